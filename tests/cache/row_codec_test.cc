#include "cache/row_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::StatusIs;
using ::testing::HasSubstr;

TEST(RowCodecTest, KernelsSurviveTheirTextForm) {
  const std::vector<Kernel> kernels = {{.entry = "a",
                                        .params = {{0, 8}, {8, 4}},
                                        .param_bytes = 12,
                                        .registers = 255,
                                        .static_shared_bytes = 49152,
                                        .local_bytes = 16,
                                        .max_threads = 1024},
                                       {.entry = "_Z3fooPf", .params = {}},
                                       {.entry = "max",
                                        .params = {{0xFFFFFFFF, 0xFFFFFFFF}},
                                        .param_bytes = 0xFFFFFFFF}};
  ASSERT_OK_AND_ASSIGN(const std::string text, KernelsToText(kernels));
  ASSERT_OK_AND_ASSIGN(const std::vector<Kernel> again, KernelsFromText(text));
  EXPECT_EQ(again, kernels);
}

TEST(RowCodecTest, NoKernelsAreEmptyText) {
  ASSERT_OK_AND_ASSIGN(const std::string text, KernelsToText({}));
  EXPECT_EQ(text, "");
  ASSERT_OK_AND_ASSIGN(const std::vector<Kernel> again, KernelsFromText(""));
  EXPECT_TRUE(again.empty());
}

TEST(RowCodecTest, RefusesEntriesThatWouldBreakALine) {
  for (const char* entry : {"", "a b", "a\nb", "a\tb"}) {
    EXPECT_THAT(
        KernelsToText({{.entry = entry, .params = {}}}),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("entry")))
        << entry;
  }
}

TEST(RowCodecTest, RefusesMalformedKernelText) {
  for (const char* text :
       {"a 1 2 3 4 5 -", "a 1 2 3 4 -\n", "a 1 2 3 4 5 6 -\n", " 1 2 3 4 5 -\n",
        "a x 2 3 4 5 -\n", "a +1 2 3 4 5 -\n", "a 1 2 3 4 5 0:\n",
        "a 1 2 3 4 5 0:8:8\n", "a 1 2 3 4 5 0:8,\n", "a 1 2 3 4 5 \n",
        "a 4294967296 2 3 4 5 -\n", "a 1 2 3 4 5 -\n\n"}) {
    EXPECT_THAT(KernelsFromText(text), StatusIs(absl::StatusCode::kDataLoss))
        << text;
  }
}

TEST(RowCodecTest, SamplesKeepEveryBit) {
  const std::vector<Sample> samples = {
      {0, 1.0 / 3},
      {0xFFFFFFFF, std::numeric_limits<double>::denorm_min()},
      {7, -0.0},
      {7, std::numeric_limits<double>::infinity()}};
  const std::string bytes = SamplesToBytes(samples);
  EXPECT_EQ(bytes.size(), 48u);
  ASSERT_OK_AND_ASSIGN(const std::vector<Sample> again,
                       SamplesFromBytes(bytes));
  EXPECT_EQ(again, samples);
  EXPECT_TRUE(std::signbit(again[2].ns));
}

TEST(RowCodecTest, RefusesSamplesOfAPartialRecord) {
  EXPECT_THAT(SamplesFromBytes(std::string(13, 'x')),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("13 bytes")));
}

TEST(RowCodecTest, EveryColumnMovesTheProgramRow) {
  const ProgramColumns base = {.key = "k",
                               .target = "t",
                               .toolchain_name = "n",
                               .toolchain_version = "v",
                               .toolchain_content = "c",
                               .binary_digest = "b",
                               .kernels = "e",
                               .log = "l",
                               .compile_seconds = 1,
                               .provenance = {1, "h", "d", "w"}};
  std::vector<ProgramColumns> variants(13, base);
  variants[1].key = "x";
  variants[2].target = "x";
  variants[3].toolchain_name = "x";
  variants[4].toolchain_version = "x";
  variants[5].toolchain_content = "x";
  variants[6].binary_digest = "x";
  variants[7].kernels = "x";
  variants[8].log = "x";
  variants[9].compile_seconds = 2;
  variants[10].provenance.created_unix = 2;
  variants[11].provenance.host_name = "x";
  variants[12].provenance.device_name = "x";
  std::set<std::string> encoded;
  for (const ProgramColumns& row : variants) encoded.insert(EncodeRow(row));
  EXPECT_EQ(encoded.size(), variants.size());
}

TEST(RowCodecTest, EveryColumnMovesTheMeasurementRow) {
  const MeasurementColumns base = {.plan_key = "p", .position = 1};
  std::vector<MeasurementColumns> variants(13, base);
  variants[1].plan_key = "x";
  variants[2].position = 2;
  variants[3].label = "x";
  variants[4].candidate = "x";
  variants[5].verdict = "x";
  variants[6].reason = "x";
  variants[7].worst_error = 1;
  variants[8].regret = std::nan("");
  variants[9].numerics_class = "x";
  variants[10].arena_bytes = 1;
  variants[11].registers = 1;
  variants[12].samples = "x";
  std::set<std::string> encoded;
  for (const MeasurementColumns& row : variants) encoded.insert(EncodeRow(row));
  EXPECT_EQ(encoded.size(), variants.size());
}

TEST(RowCodecTest, WhatSqliteCannotKeepDoesNotMoveTheRow) {
  const MeasurementColumns zero = {.worst_error = 0.0, .regret = std::nan("1")};
  const MeasurementColumns negative_zero = {.worst_error = -0.0,
                                            .regret = std::nan("2")};
  EXPECT_EQ(EncodeRow(zero), EncodeRow(negative_zero));
}

}  // namespace
}  // namespace kiln
