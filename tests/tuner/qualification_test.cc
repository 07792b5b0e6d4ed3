#include "tuner/qualification.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::StatusIs;
using ::testing::HasSubstr;

constexpr char kReceipt[] = R"({"schema": "kiln.qualification/1",
 "target": "sm_90a", "device": "NVIDIA H200", "date": "2026-11-29",
 "not_covered": "timing",
 "templates": [{"name": "fused_moe.cuda", "version": 2,
  "sources":
  "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"}]})";

TemplateIdentity Identity() {
  return {"fused_moe.cuda", 2,
          Digest::FromHex("00112233445566778899aabbccddeeff"
                          "00112233445566778899aabbccddeeff")
              .value()};
}

TEST(QualificationTest, AReceiptQualifiesExactlyWhatItNames) {
  ASSERT_OK_AND_ASSIGN(const QualificationReceipt receipt,
                       ParseReceipt(kReceipt, "r.json"));
  EXPECT_EQ(receipt.device, "NVIDIA H200");
  EXPECT_EQ(receipt.not_covered, "timing");
  const Target sm_90a = ParseTarget("sm_90a").value();
  EXPECT_TRUE(IsQualified(Identity(), sm_90a, {receipt}));
  EXPECT_FALSE(IsQualified(Identity(), sm_90a, {}));
  EXPECT_FALSE(
      IsQualified(Identity(), ParseTarget("sm_90").value(), {receipt}));
  TemplateIdentity other = Identity();
  other.version = 3;
  EXPECT_FALSE(IsQualified(other, sm_90a, {receipt}));
  other = Identity();
  other.sources.bytes[31] ^= 1;
  EXPECT_FALSE(IsQualified(other, sm_90a, {receipt}));
  other = Identity();
  other.name = "fused_moe.cpu";
  EXPECT_FALSE(IsQualified(other, sm_90a, {receipt}));
}

// A receipt of another suite is none of the tree's, whatever it names.
TEST(QualificationTest, AReceiptOfAnotherSuiteQualifiesNothing) {
  const Target sm_90a = ParseTarget("sm_90a").value();
  const auto with = [](const std::string& suite) {
    return ParseReceipt(
        absl::StrReplaceAll(
            kReceipt, {{"\"not_covered\"", absl::StrCat("\"suite\": ", suite,
                                                        ", \"not_covered\"")}}),
        "r.json");
  };
  EXPECT_EQ(TreeSuite().name, "suite.v1.json");
  const std::string tree = TreeSuite().content.ToHex();
  const std::string other = Sha256("another suite").ToHex();
  ASSERT_OK_AND_ASSIGN(
      const QualificationReceipt same,
      with(absl::StrCat(R"({"name": "copy.json", "sha256": ")", tree, "\"}")));
  EXPECT_TRUE(IsQualified(Identity(), sm_90a, {same}));
  ASSERT_OK_AND_ASSIGN(
      const QualificationReceipt another,
      with(absl::StrCat(R"({"name": "suite.v1.json", "sha256": ")", other,
                        "\"}")));
  EXPECT_FALSE(IsQualified(Identity(), sm_90a, {another}));
  EXPECT_TRUE(IsQualified(Identity(), sm_90a, {another, same}));
  for (const char* bad :
       {"3", "{}", R"({"name": "x"})", R"({"name": "x", "sha256": "00"})"}) {
    EXPECT_THAT(with(bad), StatusIs(absl::StatusCode::kInvalidArgument)) << bad;
  }
}

TEST(QualificationTest, MalformedReceiptsAreRefused) {
  const struct {
    const char* from;
    const char* to;
    const char* message;
  } cases[] = {
      {"qualification/1", "qualification/2", "\"schema\" is not"},
      {"sm_90a", "sm_91", "target \"sm_91\" is unknown"},
      {"\"version\": 2", "\"version\": 0", "no template version"},
      {"\"version\": 2", "\"version\": \"2\"", "no template version"},
      {"0011", "00", "64 hex digits"},
      {"\"date\"", "\"day\"", "\"date\" is no string"},
      {"\"not_covered\"", "\"covered\"", "\"not_covered\" is no string"},
      {"\"timing\"", "\"\"", "\"not_covered\" is empty"},
      {"\"templates\"", "\"template\"", "\"templates\" is no list"},
      {"\"name\"", "\"nom\"", "\"name\" is no string"},
      {"{\"schema\"", "{{\"schema\"", "invalid JSON"},
  };

  for (const auto& c : cases) {
    std::string text = kReceipt;
    const size_t at = text.find(c.from);
    ASSERT_NE(at, std::string::npos) << c.from;
    text.replace(at, std::string(c.from).size(), c.to);
    EXPECT_THAT(
        ParseReceipt(text, "r.json"),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)))
        << c.to;
  }
}

// Reads every receipt that was built in and says which no longer holds: a
// changed template must run its suite again before freeze accepts it.
TEST(QualificationTest, EveryReceiptOfTheTreeIsWhole) {
  ASSERT_FALSE(EmbeddedReceipts().empty());
  for (const auto& [name, text] : EmbeddedReceipts()) {
    ASSERT_OK_AND_ASSIGN(const QualificationReceipt receipt,
                         ParseReceipt(text, name));
    EXPECT_EQ(name, absl::StrCat(receipt.target.ToString(), ".json"));
    for (const TemplateIdentity& identity : receipt.templates) {
      const KernelTemplate* from = FindTemplate(identity.name);
      ASSERT_NE(from, nullptr) << name << ": " << identity.name;
      const bool holds = from->version() == identity.version &&
                         from->sources() == identity.sources &&
                         IsOfTreeSuite(receipt);
      std::printf("%s %s: %s\n", receipt.target.ToString().c_str(),
                  identity.name.c_str(),
                  holds ? "qualified" : "STALE, run tools/qualify.py");
    }
  }
}

}  // namespace
}  // namespace kiln
