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

TEST_P(Sha256Test, PairsHashLikeEachAlone) {
  std::mt19937 random(11);
  std::string a(700, '\0');
  std::string b(700, '\0');
  for (char& c : a) c = static_cast<char>(random());
  for (char& c : b) c = static_cast<char>(random());
  const auto hex = [](kiln_sha256_t* hash) {
    uint8_t digest[KILN_SHA256_BYTES];
    kiln_sha256_final(hash, digest);
    return ToHex(absl::string_view(reinterpret_cast<char*>(digest), 32));
  };
  for (size_t before = 0; before < 130; before += 13) {
    // Equal and unequal fill levels before the common update.
    for (const size_t skew : {0, 1}) {
      for (const size_t bytes : {0, 1, 63, 64, 65, 127, 128, 500}) {
        kiln_sha256_t first;
        kiln_sha256_t second;
        kiln_sha256_init(&first);
        kiln_sha256_init(&second);
        kiln_sha256_update(&first, a.data(), before);
        kiln_sha256_update(&second, b.data(), before + skew);
        kiln_sha256_update_pair(&first, a.data() + before, &second,
                                b.data() + before + skew, bytes);
        EXPECT_EQ(hex(&first), HexOf(a.substr(0, before + bytes)))
            << before << " " << skew << " " << bytes;
        EXPECT_EQ(hex(&second), HexOf(b.substr(0, before + skew + bytes)))
            << before << " " << skew << " " << bytes;
      }
    }
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
