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

// The first block of a leaf: its kind, then 63 bytes of the file. The root's
// own place is in the first leaf's.
constexpr size_t kHeadBytes = 63;
static_assert(kRootEnd <= kHeadBytes &&
              kHeadBytes < sizeof(kiln_format_header_t));

void MakeHead(const uint8_t* leaf, bool first, uint8_t* head) {
  head[0] = kLeaf;
  memcpy(head + 1, leaf, kHeadBytes);
  if (first) memset(head + 1 + kRootBegin, 0, KILN_SHA256_BYTES);
}

// A leaf that may be short; the first one has at least a header.
Node HashLeaf(const uint8_t* leaf, size_t bytes, bool first) {
  Node node;
  if (bytes >= kHeadBytes) {
    uint8_t head[1][64];
    MakeHead(leaf, first, head[0]);
    const void* tail = leaf + kHeadBytes;
    kiln_sha256_many(head, &tail, bytes - kHeadBytes, 1, node.digest);
    return node;
  }
  kiln_sha256_t hash;
  kiln_sha256_init(&hash);
  kiln_sha256_update(&hash, &kLeaf, 1);
  kiln_sha256_update(&hash, leaf, bytes);
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
  size_t at = 0;
  // Full leaves side by side.
  while (bytes - at >= kBytes) {
    constexpr size_t kAtOnce = 16;
    const size_t full = (bytes - at) / kBytes;
    const size_t take = full < kAtOnce ? full : kAtOnce;
    uint8_t heads[kAtOnce][64];
    const void* tails[kAtOnce];
    Node nodes[kAtOnce];
    for (size_t i = 0; i < take; ++i, at += kBytes) {
      MakeHead(in + at, at == 0, heads[i]);
      tails[i] = in + at + kHeadBytes;
    }
    kiln_sha256_many(heads, tails, kBytes - kHeadBytes, take, nodes[0].digest);
    for (size_t i = 0; i < take; ++i) push(nodes[i]);
  }
  if (at < bytes) push(HashLeaf(in + at, bytes - at, at == 0));
  while (depth > 1) {
    stack[depth - 2] = HashNode(stack[depth - 2], stack[depth - 1]);
    --depth;
  }
  memcpy(root, stack[0].digest, KILN_SHA256_BYTES);
}
