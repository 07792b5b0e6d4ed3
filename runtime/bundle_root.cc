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

Node Finish(kiln_sha256_t* hash) {
  Node node;
  kiln_sha256_final(hash, node.digest);
  return node;
}

void BeginLeaf(kiln_sha256_t* hash) {
  kiln_sha256_init(hash);
  kiln_sha256_update(hash, &kLeaf, 1);
}

// The first leaf holds the root's own place.
Node HashFirstLeaf(const uint8_t* data, size_t bytes) {
  static const uint8_t kZero[KILN_SHA256_BYTES] = {};
  kiln_sha256_t hash;
  BeginLeaf(&hash);
  kiln_sha256_update(&hash, data, kRootBegin);
  kiln_sha256_update(&hash, kZero, sizeof(kZero));
  kiln_sha256_update(&hash, data + kRootEnd, bytes - kRootEnd);
  return Finish(&hash);
}

Node HashLeaf(const uint8_t* data, size_t bytes) {
  kiln_sha256_t hash;
  BeginLeaf(&hash);
  kiln_sha256_update(&hash, data, bytes);
  return Finish(&hash);
}

// Two full leaves that follow each other.
void HashLeaves(const uint8_t* data, Node* nodes) {
  kiln_sha256_t first;
  kiln_sha256_t second;
  BeginLeaf(&first);
  BeginLeaf(&second);
  kiln_sha256_update_pair(&first, data, &second, data + KILN_FORMAT_LEAF_BYTES,
                          KILN_FORMAT_LEAF_BYTES);
  nodes[0] = Finish(&first);
  nodes[1] = Finish(&second);
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
  uint64_t leaves = 0;
  const auto push = [&](const Node& leaf) {
    stack[depth++] = leaf;
    ++leaves;
    for (uint64_t n = leaves; n % 2 == 0; n /= 2) {
      stack[depth - 2] = HashNode(stack[depth - 2], stack[depth - 1]);
      --depth;
    }
  };
  constexpr size_t kBytes = KILN_FORMAT_LEAF_BYTES;
  const uint8_t* in = static_cast<const uint8_t*>(data);
  size_t at = bytes < kBytes ? bytes : kBytes;
  push(HashFirstLeaf(in, at));
  for (; bytes - at >= 2 * kBytes; at += 2 * kBytes) {
    Node nodes[2];
    HashLeaves(in + at, nodes);
    push(nodes[0]);
    push(nodes[1]);
  }
  while (at < bytes) {
    const size_t take = bytes - at < kBytes ? bytes - at : kBytes;
    push(HashLeaf(in + at, take));
    at += take;
  }
  while (depth > 1) {
    stack[depth - 2] = HashNode(stack[depth - 2], stack[depth - 1]);
    --depth;
  }
  memcpy(root, stack[0].digest, KILN_SHA256_BYTES);
}
