#include "compiler/base/digest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/sha256.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Runs each test with the processor's SHA extensions (where it has them) and
// with the portable code.
class Sha256Test : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { kiln_sha256_allow_extensions(GetParam()); }

  void TearDown() override { kiln_sha256_allow_extensions(1); }
};

INSTANTIATE_TEST_SUITE_P(Paths, Sha256Test, ::testing::Values(0, 1),
                         [](const auto& path) {
                           return path.param == 0 ? "Portable" : "Extensions";
                         });

// NIST, "Descriptions of SHA-256": the examples of FIPS 180-4, and the million
// times "a" of the same document.
TEST_P(Sha256Test, GivesThePublishedDigests) {
  EXPECT_EQ(Sha256("").ToHex(),
            "e3b0c44298fc1c149afbf4c8996fb924"
            "27ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256("abc").ToHex(),
            "ba7816bf8f01cfea414140de5dae2223"
            "b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")
                .ToHex(),
            "248d6a61d20638b8e5c026930c3e6039"
            "a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                   "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu")
                .ToHex(),
            "cf5b16a778af8380036ce59e7b049237"
            "0b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(Sha256(std::string(1000000, 'a')).ToHex(),
            "cdc76e5c9914fb9281a1c7e284d73e67"
            "f1809a48a497200e046d39ccc7112cd0");
}

TEST_P(Sha256Test, DoesNotDependOnHowTheMessageIsCut) {
  std::mt19937_64 random(1);
  std::string message(700, '\0');
  for (char& c : message) c = static_cast<char>(random() & 0xFF);
  for (size_t size = 0; size <= 300; ++size) {
    const Digest whole = Sha256(absl::string_view(message).substr(0, size));
    kiln_sha256_t hash;
    kiln_sha256_init(&hash);
    for (size_t at = 0; at < size;) {
      const size_t take = std::min<size_t>(size - at, random() % 97);
      kiln_sha256_update(&hash, message.data() + at, take);
      at += take;
    }
    Digest pieces;
    kiln_sha256_final(&hash, pieces.bytes.data());
    ASSERT_EQ(pieces, whole) << size << " bytes";
  }
}

TEST_P(Sha256Test, AgreesWithTheOtherPath) {
  std::mt19937_64 random(2);
  for (size_t size = 0; size < 400; ++size) {
    std::string message(size, '\0');
    for (char& c : message) c = static_cast<char>(random() & 0xFF);
    kiln_sha256_allow_extensions(GetParam());
    const Digest here = Sha256(message);
    kiln_sha256_allow_extensions(1 - GetParam());
    ASSERT_EQ(Sha256(message), here) << size << " bytes";
  }
}

TEST(DigestTest, HexAndBytesAreInverses) {
  const Digest digest = Sha256("abc");
  EXPECT_EQ(digest.Short(), "ba7816bf8f01");
  ASSERT_OK_AND_ASSIGN(const Digest from_hex, Digest::FromHex(digest.ToHex()));
  EXPECT_EQ(from_hex, digest);
  ASSERT_OK_AND_ASSIGN(const Digest from_bytes,
                       Digest::FromBytes(digest.AsBytes()));
  EXPECT_EQ(from_bytes, digest);
}

TEST(DigestTest, RefusesOtherLengthsAndLetters) {
  const std::string hex = Sha256("").ToHex();
  EXPECT_THAT(Digest::FromHex(hex.substr(1)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("63 characters, expected 64")));
  EXPECT_THAT(Digest::FromHex(hex + "0"),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(
      Digest::FromHex(absl::StrCat("g", hex.substr(1))),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no hex digit")));
  EXPECT_THAT(Digest::FromBytes("short"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("5 bytes, expected 32")));
}

TEST(CanonicalEncoderTest, WritesTheDocumentedBytes) {
  CanonicalEncoder encoder("d/1");
  encoder.Text("t", "xy").Begin("g").Number("n", -2).End().Flag("f", true);
  const std::string expected(
      "\x03\0\0\0d/1"
      "T\x01\0\0\0t\x02\0\0\0xy"
      "{\x01\0\0\0g"
      "N\x01\0\0\0n\xFE\xFF\xFF\xFF\xFF\xFF\xFF\xFF"
      "}"
      "F\x01\0\0\0f\x01",
      7 + 12 + 6 + 14 + 1 + 7);
  EXPECT_EQ(ToHex(encoder.bytes()), ToHex(expected));
  EXPECT_EQ(encoder.digest(), Sha256(expected));
}

TEST(CanonicalEncoderTest, DecodesToPathsAndText) {
  CanonicalEncoder encoder("kiln.test/1");
  encoder.Text("name", std::string("a\0b", 3))
      .Begin("outer")
      .Number("low", INT64_MIN)
      .Begin("inner")
      .Hash("hash", Sha256("abc"))
      .End()
      .Flag("no", false)
      .End()
      .Text("", "");
  ASSERT_OK_AND_ASSIGN(const CanonicalRecord record,
                       DecodeCanonical(encoder.bytes()));
  EXPECT_EQ(record.domain, "kiln.test/1");
  EXPECT_THAT(
      record.fields,
      ElementsAre(CanonicalField{"name", std::string("a\0b", 3)},
                  CanonicalField{"outer/low", "-9223372036854775808"},
                  CanonicalField{"outer/inner/hash", Sha256("abc").ToHex()},
                  CanonicalField{"outer/no", "false"}, CanonicalField{"", ""}));
}

TEST(CanonicalEncoderDeathTest, RefusesUnbalancedGroups) {
  EXPECT_DEATH(CanonicalEncoder("d").End(), "check failed");
  EXPECT_DEATH(
      {
        CanonicalEncoder encoder("d");
        encoder.Begin("g");
        static_cast<void>(encoder.bytes());
      },
      "check failed");
}

// A random sequence of fields, from so few names and values that different
// sequences often look alike once their borders are lost.
struct RandomFields {
  std::string text;   // unambiguous description
  std::string naive;  // what a plain concatenation would hash
  std::string bytes;  // the canonical encoding
};

RandomFields MakeRandomFields(std::mt19937_64* random) {
  static const std::vector<std::string> kWords = {
      "", "a", "b", "aa", "ab", "T", "{", "}", std::string("\x01\0\0\0a", 5),
      "N"};
  const auto word = [&] { return kWords[(*random)() % kWords.size()]; };
  RandomFields out;
  CanonicalEncoder encoder("d");
  int depth = 0;
  const auto describe = [&](char tag, const std::string& name,
                            const std::string& value) {
    absl::StrAppend(&out.text, std::string(1, tag), "(", ToHex(name), "=",
                    ToHex(value), ")");
    absl::StrAppend(&out.naive, name, value);
  };
  const auto count = (*random)() % 5;
  for (uint64_t i = 0; i < count; ++i) {
    const std::string name = word();
    switch ((*random)() % 6) {
      case 0: {
        const std::string value = word();
        encoder.Text(name, value);
        describe('T', name, value);
        break;
      }
      case 1: {
        const auto value = static_cast<int64_t>((*random)() % 3);
        encoder.Number(name, value);
        describe('N', name, absl::StrCat(value));
        break;
      }
      case 2: {
        const bool value = (*random)() % 2 != 0;
        encoder.Flag(name, value);
        describe('F', name, value ? "1" : "0");
        break;
      }
      case 3: {
        const std::string value = word();
        encoder.Hash(name, Sha256(value));
        describe('H', name, Sha256(value).ToHex());
        break;
      }
      case 4:
        encoder.Begin(name);
        ++depth;
        describe('{', name, "");
        break;
      default:
        if (depth > 0) {
          encoder.End();
          --depth;
          out.text += "}";
        }
        break;
    }
  }
  for (; depth > 0; --depth) {
    encoder.End();
    out.text += "}";
  }
  out.bytes = encoder.bytes();
  return out;
}

TEST(CanonicalEncoderTest, NeverGivesTwoFieldSequencesTheSameBytes) {
  std::mt19937_64 random(3);
  std::map<std::string, std::string> by_bytes;
  std::map<std::string, std::string> by_naive;
  int naive_collisions = 0;
  for (int i = 0; i < 60000; ++i) {
    const RandomFields fields = MakeRandomFields(&random);
    const auto [seen, inserted] = by_bytes.emplace(fields.bytes, fields.text);
    ASSERT_EQ(seen->second, fields.text) << ToHex(fields.bytes);
    naive_collisions +=
        by_naive.emplace(fields.naive, fields.text).first->second != fields.text
            ? 1
            : 0;
    ASSERT_OK(DecodeCanonical(fields.bytes));
  }
  // The sequences are such that an encoding without borders does collide.
  EXPECT_GT(naive_collisions, 1000);
}

TEST(DecodeCanonicalTest, NeverTakesAPrefixForTheWhole) {
  CanonicalEncoder encoder("kiln.test/1");
  encoder.Text("a", "value").Begin("g").Number("n", 7).Flag("f", true);
  encoder.Hash("h", Sha256("x")).End().Text("z", "last");
  const std::string& bytes = encoder.bytes();
  ASSERT_OK_AND_ASSIGN(const CanonicalRecord whole, DecodeCanonical(bytes));
  int readable = 0;
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto part = DecodeCanonical(absl::string_view(bytes).substr(0, size));
    if (part.ok()) {
      EXPECT_LT(part->fields.size(), whole.fields.size()) << size;
      ++readable;
    } else {
      EXPECT_THAT(part, StatusIs(absl::StatusCode::kDataLoss)) << size;
    }
  }
  // Only cuts between top-level fields are records of their own.
  EXPECT_EQ(readable, 3);
}

TEST(DecodeCanonicalTest, RefusesWhatTheEncoderCannotWrite) {
  const std::string domain("\x01\0\0\0d", 5);

  struct Case {
    const char* name;
    std::string bytes;
    const char* message;
  };

  const Case cases[] = {
      {"unknown tag", domain + std::string("Q\0\0\0\0", 5), "unknown tag 81"},
      {"close without open", domain + "}", "closes no open group"},
      {"open at the end", domain + std::string("{\x01\0\0\0g", 6),
       "leaves group g open"},
      {"flag of 2", domain + std::string("F\x01\0\0\0f\x02", 7),
       "canonical flag f is 2"},
      {"huge length", domain + std::string("T\xFF\xFF\xFF\xFF", 5),
       "4294967295 bytes expected, 0 left"},
      {"cut hash", domain + std::string("H\0\0\0\0abc", 8),
       "32 bytes expected, 3 left"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(DecodeCanonical(c.bytes),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(c.message)))
        << c.name;
  }
}

TEST(DecodeCanonicalTest, RefusesDeepNesting) {
  std::string bytes("\x01\0\0\0d", 5);
  for (int i = 0; i < 200000; ++i) bytes.append("{\0\0\0\0", 5);
  EXPECT_THAT(DecodeCanonical(bytes),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("nests deeper than 16 groups")));
}

}  // namespace
}  // namespace kiln
