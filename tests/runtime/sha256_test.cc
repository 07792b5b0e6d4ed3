#include "runtime/sha256.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <string>
#include <vector>

#include "compiler/base/digest.h"

namespace kiln {
namespace {

std::string HexOf(const std::string& message) {
  uint8_t digest[KILN_SHA256_BYTES];
  kiln_sha256(message.data(), message.size(), digest);
  return ToHex(
      absl::string_view(reinterpret_cast<char*>(digest), sizeof(digest)));
}

// Hashed before main, in an order that nobody chose.
const std::string kEarly = HexOf("abc");

TEST(Sha256EarlyTest, WorksInAStaticInitialiser) {
  EXPECT_EQ(kEarly, HexOf("abc"));
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

class Sha256Test : public ::testing::TestWithParam<int> {
 protected:
  Sha256Test() { kiln_sha256_allow_extensions(GetParam()); }

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

TEST_P(Sha256Test, ManyHashLikeEachAlone) {
  std::mt19937 random(11);
  std::vector<std::string> messages(40, std::string(1000, '\0'));
  std::vector<std::array<uint8_t, 64>> heads(messages.size());
  std::vector<const void*> tails;
  for (size_t i = 0; i < messages.size(); ++i) {
    for (char& c : messages[i]) c = static_cast<char>(random());
    for (uint8_t& byte : heads[i]) byte = static_cast<uint8_t>(random());
    tails.push_back(messages[i].data());
  }
  static_assert(sizeof(heads[0]) == 64);
  for (size_t count = 0; count <= messages.size(); ++count) {
    for (const size_t bytes :
         {0, 1, 55, 56, 63, 64, 65, 127, 128, 191, 512, 703, 1000}) {
      std::vector<uint8_t> digests(32 * count + 1, 0xa5);
      kiln_sha256_many(reinterpret_cast<const uint8_t(*)[64]>(heads.data()),
                       tails.data(), bytes, count, digests.data());
      for (size_t i = 0; i < count; ++i) {
        const std::string head(heads[i].begin(), heads[i].end());
        EXPECT_EQ(ToHex(absl::string_view(
                      reinterpret_cast<char*>(digests.data()) + 32 * i, 32)),
                  HexOf(head + messages[i].substr(0, bytes)))
            << i << " of " << count << ", " << bytes << " bytes";
      }
      EXPECT_EQ(digests.back(), 0xa5);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutExtensions, Sha256Test,
                         ::testing::Values(0, 1, 2));

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
