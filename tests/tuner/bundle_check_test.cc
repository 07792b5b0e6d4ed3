#include "tuner/bundle_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "runtime/bundle_format.h"
#include "tests/support/bundle_differences.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::BundleDifference;
using ::kiln::testing::BundleDifferences;
using ::kiln::testing::ForEachAcceptedChange;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::testing::HasSubstr;

std::vector<BundleSection> Meant() {
  return {TinyCudaSection(), TinyCpuSection("object")};
}

TEST(BundleCheckTest, AcceptsWhatWasWritten) {
  ASSERT_OK_AND_ASSIGN(const std::string bytes, WriteBundle(Meant()));
  EXPECT_OK(CheckBundleMatches(bytes, Meant()));
}

TEST(BundleCheckTest, RefusesDamagedBytes) {
  ASSERT_OK_AND_ASSIGN(std::string bytes, WriteBundle(Meant()));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  EXPECT_THAT(CheckBundleMatches(bytes, Meant()),
              StatusIs(absl::StatusCode::kDataLoss));
}

// Changed in what is meant, not in what was written.
TEST(BundleCheckTest, SeesADifferenceInEveryField) {
  ASSERT_OK_AND_ASSIGN(const std::string bytes, WriteBundle(Meant()));
  for (const BundleDifference& difference : BundleDifferences()) {
    std::vector<BundleSection> meant = Meant();
    difference.apply(&meant[0]);
    EXPECT_THAT(
        CheckBundleMatches(bytes, meant),
        StatusIs(absl::StatusCode::kInternal, HasSubstr(difference.name)))
        << difference.name;
  }
}

// The other way round, and without knowing the fields: nothing that a file may
// hold is left unread. A field that joins the format is covered by this.
TEST(BundleCheckTest, SeesEveryChangeThatTheReaderAccepts) {
  std::vector<BundleSection> meant = Meant();
  BundleEntry& entry = meant[0].entries[0];
  entry.golden[entry.plans[0].interval] = Sha256("golden");
  entry.plans[1].body.overlapped = true;
  ASSERT_OK_AND_ASSIGN(const std::string bytes, WriteBundle(meant));
  ASSERT_OK(CheckBundleMatches(bytes, meant));
  std::array<int, KILN_FORMAT_TABLE_COUNT> accepted = {};
  ForEachAcceptedChange(
      bytes, [&](const std::string& changed, uint32_t table, size_t offset) {
        ++accepted[table];
        EXPECT_THAT(CheckBundleMatches(changed, meant),
                    StatusIs(absl::StatusCode::kInternal))
            << "table " << table << ", byte " << offset;
      });
  for (uint32_t table = 0; table < KILN_FORMAT_TABLE_COUNT; ++table) {
    // Parameters of kernels are what the arguments are, or it is refused.
    if (table == KILN_FORMAT_TABLE_KERNEL_PARAMS) continue;
    EXPECT_GT(accepted[table], 0) << "table " << table;
  }
}

TEST(BundleCheckTest, SeesAMissingSection) {
  ASSERT_OK_AND_ASSIGN(const std::string bytes, WriteBundle(Meant()));
  EXPECT_THAT(CheckBundleMatches(bytes, {TinyCudaSection()}),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("sections")));
}

TEST(BundleCheckTest, NamesThePlaceAndBothValues) {
  ASSERT_OK_AND_ASSIGN(const std::string bytes, WriteBundle(Meant()));
  std::vector<BundleSection> meant = Meant();
  meant[0].entries[0].plans[2].body.steps[1].block[1] = 7;
  EXPECT_THAT(CheckBundleMatches(bytes, meant),
              StatusIs(absl::StatusCode::kInternal,
                       "bundle does not read back: target sm_90a, entry moe, "
                       "plan for m 5..64, step 1, block 1 is '4', expected "
                       "'7'"));
}

}  // namespace
}  // namespace kiln
