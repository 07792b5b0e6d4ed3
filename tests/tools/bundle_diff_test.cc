#include "tools/bundle_diff.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "runtime/bundle_format.h"
#include "tests/support/bundle_differences.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_bundle.h"
#include "tools/bundle_json.h"

namespace kiln {
namespace {

using ::kiln::testing::BundleDifference;
using ::kiln::testing::BundleDifferences;
using ::kiln::testing::ForEachAcceptedChange;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<BundleSection> Sections() {
  return {TinyCudaSection(), TinyCpuSection("object")};
}

BundleView View(const std::string& bytes) {
  kiln_bundle_t* bundle = nullptr;
  kiln_error_t error = {};
  EXPECT_EQ(kiln_bundle_open_memory(bytes.data(), bytes.size(), nullptr,
                                    &bundle, &error),
            KILN_STATUS_OK)
      << error.message;
  return BundleView(bundle);
}

std::vector<BundleChange> Diff(const std::string& a, const std::string& b) {
  return DiffBundles(View(a), View(b));
}

TEST(BundleDiffTest, ABundleEqualsItself) {
  ASSERT_OK_AND_ASSIGN(const std::string bytes, WriteBundle(Sections()));
  EXPECT_THAT(Diff(bytes, bytes), IsEmpty());
}

TEST(BundleDiffTest, AChangeIsNamedWhereItIs) {
  ASSERT_OK_AND_ASSIGN(const std::string before, WriteBundle(Sections()));
  std::vector<BundleSection> sections = Sections();
  sections[0].entries[0].plans[2].body.steps[1].block[1] = 2;
  ASSERT_OK_AND_ASSIGN(const std::string after, WriteBundle(sections));
  const std::vector<BundleChange> changes = Diff(before, after);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].kind, "plan_changed");
  EXPECT_EQ(changes[0].target, "sm_90a");
  EXPECT_EQ(changes[0].entry, "moe");
  EXPECT_EQ(changes[0].interval, "5..64");
  EXPECT_EQ(changes[0].field, "steps[1].block[1]");
  EXPECT_EQ(changes[0].a, 4);
  EXPECT_EQ(changes[0].b, 2);
}

using Both = std::pair<std::string, std::string>;

Both Shown(nlohmann::ordered_json a, nlohmann::ordered_json b) {
  BundleChange change;
  change.a = std::move(a);
  change.b = std::move(b);
  return ShownChange(change);
}

TEST(ShownChangeTest, LongTextsAreCutToWhatDiffers) {
  const std::string head =
      "fused_moe H4096 I512 E288 k8 trellis_mx K4 silu limit ";
  const std::string tail = " w4a8 small-m 16 bf16 i32";
  EXPECT_EQ(Shown(head + "10" + tail, head + "7" + tail),
            Both("...K4 silu limit 10 w4a8 small-m 16 bf16 i32",
                 "...K4 silu limit 7 w4a8 small-m 16 bf16 i32"));
  EXPECT_EQ(Shown(head + "10" + tail, head + "10" + tail + " nondeterministic"),
            Both("...small-m 16 bf16 i32",
                 "...small-m 16 bf16 i32 nondeterministic"));
  // Where it begins early, the text is shown from its beginning.
  EXPECT_EQ(Shown("fused_moe H4096" + std::string(60, 'x'),
                  "fused_moe H2048" + std::string(60, 'x')),
            Both("fused_moe H4096" + std::string(42, 'x') + "...",
                 "fused_moe H2048" + std::string(42, 'x') + "..."));
  const std::string word(200, 'w');
  const auto [one, two] = Shown(word + "a" + word, word + "b" + word);
  EXPECT_EQ(one,
            "..." + std::string(24, 'w') + "a" + std::string(29, 'w') + "...");
  EXPECT_EQ(two,
            "..." + std::string(24, 'w') + "b" + std::string(29, 'w') + "...");
}

TEST(ShownChangeTest, ShortTextsAndOtherValuesAreWhole) {
  const std::string text(59, 'w');
  EXPECT_EQ(Shown(text + "a", text + "b"), Both(text + "a", text + "b"));
  EXPECT_EQ(Shown(nullptr, 3), Both("-", "3"));
  EXPECT_EQ(Shown({1, 2}, {1}), Both("[1,2]", "[1]"));
  std::vector<int> many(100, 7);
  std::vector<int> more = many;
  more.push_back(8);
  EXPECT_THAT(Shown(many, more).second, EndsWith("7,8]"));
}

TEST(BundleDiffTest, OverlappedStepsAndQualificationAreShown) {
  ASSERT_OK_AND_ASSIGN(const std::string before, WriteBundle(Sections()));
  std::vector<BundleSection> sections = Sections();
  sections[0].entries[0].plans[0].body.overlapped = true;
  sections[1].unqualified_templates = {"sumsq.cpu"};
  ASSERT_OK_AND_ASSIGN(const std::string after, WriteBundle(sections));
  const auto fields = [](const std::vector<BundleChange>& changes) {
    std::vector<std::string> out;
    for (const BundleChange& change : changes) {
      out.push_back(change.target + " " + change.interval + " " + change.field);
    }
    return out;
  };
  EXPECT_THAT(
      fields(Diff(before, after)),
      ElementsAre("cpu-x86-64-v2 1..2 qualified",
                  "cpu-x86-64-v2 3..256 qualified", "sm_90a 1..1 overlapped"));
  const auto shown = BundleToJson(View(after));
  EXPECT_EQ(shown["sections"][1]["entries"][1]["plans"][0]["overlapped"], true);
  EXPECT_EQ(shown["sections"][1]["entries"][1]["plans"][1]["overlapped"],
            false);
}

TEST(BundleDiffTest, SectionsThatCameOrWentAreNamed) {
  ASSERT_OK_AND_ASSIGN(const std::string both, WriteBundle(Sections()));
  ASSERT_OK_AND_ASSIGN(const std::string one, WriteBundle({TinyCudaSection()}));
  const std::vector<BundleChange> gone = Diff(both, one);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].kind, "section_removed");
  EXPECT_EQ(gone[0].target, "cpu-x86-64-v2");
  EXPECT_EQ(gone[0].a, "cpu-x86-64-v2");
  EXPECT_TRUE(gone[0].b.is_null());
}

// Of each field that WriteBundle lets be changed alone.
TEST(BundleDiffTest, ShowsADifferenceInEveryField) {
  ASSERT_OK_AND_ASSIGN(const std::string before, WriteBundle(Sections()));
  int written = 0;
  for (const BundleDifference& difference : BundleDifferences()) {
    std::vector<BundleSection> sections = Sections();
    difference.apply(&sections[0]);
    const absl::StatusOr<std::string> after =
        WriteBundle(sections, {.allow_predicted = true});
    if (!after.ok() || *after == before) continue;
    ++written;
    const std::vector<BundleChange> changes = Diff(before, *after);
    EXPECT_THAT(changes, Not(IsEmpty())) << difference.name;
    EXPECT_THAT(changes,
                Not(Contains(Field(&BundleChange::kind, "bytes_changed"))))
        << difference.name;
  }
  EXPECT_GT(written, 25);
}

// Without knowing the fields: nothing that a file may hold is left unshown, so
// what joins the format is covered by this.
TEST(BundleDiffTest, ShowsEveryChangeThatTheReaderAccepts) {
  std::vector<BundleSection> sections = Sections();
  BundleEntry& entry = sections[0].entries[0];
  entry.golden[entry.plans[0].interval] = Sha256("golden");
  entry.plans[1].body.overlapped = true;
  ASSERT_OK_AND_ASSIGN(const std::string bytes, WriteBundle(sections));
  const BundleView original = View(bytes);
  ForEachAcceptedChange(
      bytes, [&](const std::string& changed, uint32_t table, size_t offset) {
        const std::vector<BundleChange> changes =
            DiffBundles(original, View(changed));
        EXPECT_THAT(changes, Not(IsEmpty())) << table << ", byte " << offset;
        EXPECT_THAT(changes,
                    Not(Contains(Field(&BundleChange::kind, "bytes_changed"))))
            << "table " << table << ", byte " << offset;
      });
}

TEST(BundleDiffTest, AnotherBinaryUnderTheSameDigestIsStillADifference) {
  ASSERT_OK_AND_ASSIGN(const std::string before, WriteBundle(Sections()));
  std::string after = before;
  after[after.size() - 3] ^= 1;
  kiln::testing::RepairRoot(&after);
  const std::vector<BundleChange> changes = Diff(before, after);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(changes[0].kind, "bytes_changed");
}

}  // namespace
}  // namespace kiln
