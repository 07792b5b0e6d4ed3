#include "runtime/sha256.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "compiler/base/digest.h"

namespace kiln {
namespace {

std::string HexOf(const std::string& message) {
  uint8_t digest[KILN_SHA256_BYTES];
  kiln_sha256(message.data(), message.size(), digest);
  return ToHex(
      absl::string_view(reinterpret_cast<char*>(digest), sizeof(digest)));
}

struct Vector {
  const char* name;
  std::string message;
  const char* digest;
};

// NIST, "Secure Hash Standard" examples and CAVP short messages.
const Vector kVectors[] = {
    {"Empty", "",
     "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {"OneBlock", "abc",
     "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
    {"TwoBlocks", "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
     "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    {"MillionLetters", std::string(1000000, 'a'),
     "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
};

class Sha256Test : public ::testing::TestWithParam<bool> {
 protected:
  Sha256Test() { kiln_sha256_allow_extensions(GetParam() ? 1 : 0); }

  ~Sha256Test() override { kiln_sha256_allow_extensions(1); }
};

TEST_P(Sha256Test, MatchesPublishedVectors) {
  for (const Vector& vector : kVectors) {
    EXPECT_EQ(HexOf(vector.message), vector.digest) << vector.name;
  }
}

TEST_P(Sha256Test, PiecesHashLikeTheWhole) {
  std::mt19937 random(7);
  std::string message(5000, '\0');
  for (char& c : message) c = static_cast<char>(random());
  const std::string expected = HexOf(message);
  for (int round = 0; round < 100; ++round) {
    kiln_sha256_t hash;
    kiln_sha256_init(&hash);
    for (size_t at = 0; at < message.size();) {
      const size_t take = std::min<size_t>(random() % 200, message.size() - at);
      kiln_sha256_update(&hash, message.data() + at, take);
      at += take;
    }
    uint8_t digest[KILN_SHA256_BYTES];
    kiln_sha256_final(&hash, digest);
    EXPECT_EQ(ToHex(absl::string_view(reinterpret_cast<char*>(digest), 32)),
              expected);
  }
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutExtensions, Sha256Test,
                         ::testing::Bool());

TEST(Sha256ExtensionsTest, AgreeWithThePortableCodeAtEveryLength) {
  std::string message;
  for (int bytes = 0; bytes < 300; ++bytes) {
    kiln_sha256_allow_extensions(0);
    const std::string portable = HexOf(message);
    kiln_sha256_allow_extensions(1);
    EXPECT_EQ(HexOf(message), portable) << bytes << " bytes";
    message.push_back(static_cast<char>(bytes * 31 + 1));
  }
}

}  // namespace
}  // namespace kiln
