#include <gtest/gtest.h>

#include <string>

#include "compiler/base/digest.h"
#include "runtime/bundle_format.h"

namespace kiln {
namespace {

std::string Bytes(const Digest& digest) {
  return std::string(digest.AsBytes());
}

// RFC 6962 section 2.1, word for word.
std::string TreeHash(const std::vector<std::string>& leaves, size_t begin,
                     size_t end) {
  const size_t n = end - begin;
  if (n == 1) return Bytes(Sha256(std::string(1, '\0') + leaves[begin]));
  size_t k = 1;
  while (k * 2 < n) k *= 2;
  return Bytes(Sha256(std::string(1, '\1') +
                      TreeHash(leaves, begin, begin + k) +
                      TreeHash(leaves, begin + k, end)));
}

std::string Root(const std::string& data) {
  std::string root(32, '\0');
  kiln_bundle_root(data.data(), data.size(),
                   reinterpret_cast<uint8_t*>(root.data()));
  return root;
}

std::string Expected(std::string data) {
  data.replace(offsetof(kiln_format_header_t, root), 32, 32, '\0');
  std::vector<std::string> leaves;
  for (size_t at = 0; at < data.size(); at += KILN_FORMAT_LEAF_BYTES) {
    leaves.push_back(data.substr(at, KILN_FORMAT_LEAF_BYTES));
  }
  return TreeHash(leaves, 0, leaves.size());
}

TEST(BundleRootTest, IsTheTreeHashOfRfc6962) {
  for (const size_t leaves : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17}) {
    for (const int extra : {-1, 0, 1}) {
      const size_t bytes =
          leaves * KILN_FORMAT_LEAF_BYTES + static_cast<size_t>(extra);
      std::string data(bytes, '\0');
      for (size_t i = 0; i < bytes; ++i) {
        data[i] = static_cast<char>(i * 2654435761u >> 13);
      }
      EXPECT_EQ(Root(data), Expected(data)) << bytes << " bytes";
    }
  }
}

TEST(BundleRootTest, TakesItsOwnPlaceAsZero) {
  std::string data(1000, 'x');
  const std::string root = Root(data);
  data[offsetof(kiln_format_header_t, root)] = 'y';
  data[offsetof(kiln_format_header_t, root) + 31] = 'y';
  EXPECT_EQ(Root(data), root);
  data[offsetof(kiln_format_header_t, root) + 32] = 'y';
  EXPECT_NE(Root(data), root);
}

TEST(BundleRootTest, ALeafIsNeverANode) {
  // Without the domain bytes, a file made of two digests would hash like the
  // file those digests came from.
  std::string two_leaves(2 * KILN_FORMAT_LEAF_BYTES, 'a');
  const std::string left = Root(two_leaves.substr(0, KILN_FORMAT_LEAF_BYTES));
  EXPECT_NE(Bytes(Sha256(left + left)), Root(two_leaves));
}

}  // namespace
}  // namespace kiln
