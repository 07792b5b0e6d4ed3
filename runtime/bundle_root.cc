#include <string.h>

#include "runtime/bundle_format.h"
#include "runtime/sha256.h"

namespace {

constexpr uint8_t kLeaf = 0;
constexpr uint8_t kNode = 1;
constexpr size_t kRootBegin = offsetof(kiln_format_header_t, root);
constexpr size_t kRootEnd = kRootBegin + KILN_SHA256_BYTES;

struct Node {
  uint8_t digest[KILN_SHA256_BYTES];
};

Node HashLeaf(const uint8_t* data, size_t bytes, bool first) {
  static const uint8_t kZero[KILN_SHA256_BYTES] = {};
  kiln_sha256_t hash;
  kiln_sha256_init(&hash);
  kiln_sha256_update(&hash, &kLeaf, 1);
  if (first) {
    kiln_sha256_update(&hash, data, kRootBegin);
    kiln_sha256_update(&hash, kZero, sizeof(kZero));
    kiln_sha256_update(&hash, data + kRootEnd, bytes - kRootEnd);
  } else {
    kiln_sha256_update(&hash, data, bytes);
  }
  Node node;
  kiln_sha256_final(&hash, node.digest);
  return node;
}

Node HashNode(const Node& left, const Node& right) {
  kiln_sha256_t hash;
  kiln_sha256_init(&hash);
  kiln_sha256_update(&hash, &kNode, 1);
  kiln_sha256_update(&hash, left.digest, sizeof(left.digest));
  kiln_sha256_update(&hash, right.digest, sizeof(right.digest));
  Node node;
  kiln_sha256_final(&hash, node.digest);
  return node;
}

}  // namespace

extern "C" void kiln_bundle_root(const void* data, size_t bytes,
                                 uint8_t* root) {
  // Complete subtrees wait on a stack, one per set bit of the number of leaves
  // seen, largest first. Merging from the top at the end puts the split at the
  // largest power of two, as the definition asks.
  Node stack[64];
  size_t depth = 0;
  const uint8_t* in = static_cast<const uint8_t*>(data);
  uint64_t leaves = 0;
  for (size_t at = 0; at < bytes; at += KILN_FORMAT_LEAF_BYTES) {
    const size_t left = bytes - at;
    const size_t take =
        left < KILN_FORMAT_LEAF_BYTES ? left : KILN_FORMAT_LEAF_BYTES;
    stack[depth++] = HashLeaf(in + at, take, at == 0);
    ++leaves;
    for (uint64_t n = leaves; n % 2 == 0; n /= 2) {
      stack[depth - 2] = HashNode(stack[depth - 2], stack[depth - 1]);
      --depth;
    }
  }
  while (depth > 1) {
    stack[depth - 2] = HashNode(stack[depth - 2], stack[depth - 1]);
    --depth;
  }
  memcpy(root, stack[0].digest, KILN_SHA256_BYTES);
}
