// What the page must say of every plan, and what must never reach it. That it
// is well-formed XML is checked by tests/tools/cli_test.py with a real parser.

#include "tuner/report.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cache/cache_fixture.h"
#include "tests/support/status_matchers.h"
#include "tuner/report_format.h"

namespace kiln {
namespace {

using ::testing::HasSubstr;
using testing::MakeMeasurements;
using testing::MakePlan;
using testing::MakeProgram;
using testing::MakeTestPlanKey;
using ::testing::Not;
using testing::TestOptions;

constexpr char kReplacement[] = "\xEF\xBF\xBD";

size_t CountOf(absl::string_view text, absl::string_view word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != absl::string_view::npos;
       at = text.find(word, at + word.size())) {
    ++count;
  }
  return count;
}

// The plan for seed + 1 tokens, with a default, a winner that is faster, and a
// reject.
MeasuredPlan MakeMeasuredPlan(uint64_t seed) {
  MeasuredPlan out;
  out.stored.plan = MakePlan(seed, {MakeProgram(1).key.digest});
  out.stored.key = MakeTestPlanKey(out.stored.plan);
  out.stored.provenance = {.created_unix = 1'700'000'000,
                           .host_name = "secret-host",
                           .device_name = "Test Device",
                           .tool_version = "kiln 9.9"};
  out.evidence = MakeMeasurements(seed);
  std::swap(out.evidence[0], out.evidence[1]);
  for (Sample& sample : out.evidence[0].samples) sample.ns += 9000;
  out.evidence[1].candidate =
      CandidateDigest(out.stored.plan.body, out.stored.plan.programs);
  return out;
}

TEST(EscapeMarkupTest, LeavesNothingThatMarkupCouldMean) {
  EXPECT_EQ(EscapeMarkup("a<b>&\"c'"), "a&lt;b&gt;&amp;&quot;c&#39;");
  EXPECT_EQ(EscapeMarkup(""), "");
  EXPECT_EQ(EscapeMarkup("µs – \xF0\x9F\x94\xA5\t\n"),
            "µs – \xF0\x9F\x94\xA5\t\n");
}

TEST(EscapeMarkupTest, ReplacesWhatXmlCannotCarry) {
  const std::string r = kReplacement;
  EXPECT_EQ(EscapeMarkup(absl::string_view("\0\x1b[0m\x7f", 6)),
            r + r + "[0m" + r);
  EXPECT_EQ(EscapeMarkup("\xff"), r);
  EXPECT_EQ(EscapeMarkup("\xc0\xaf"), r + r);                  // overlong '/'
  EXPECT_EQ(EscapeMarkup("\xe0\x80\xbc"), r + r + r);          // overlong '<'
  EXPECT_EQ(EscapeMarkup("\xf4\x90\x80\x80"), r + r + r + r);  // > 10FFFF
  EXPECT_EQ(EscapeMarkup("\xed\xa0\x80"), r);                  // a surrogate
  EXPECT_EQ(EscapeMarkup("\xef\xbf\xbf"), r);                  // U+FFFF
  EXPECT_EQ(EscapeMarkup("\xe2\x82"), r + r);                  // cut short
  EXPECT_EQ(EscapeMarkup("\xe2<"), r + "&lt;");
}

TEST(ReportTest, AnEmptyCacheSaysSo) {
  EXPECT_THAT(RenderReport({}), HasSubstr("The cache has no measured plans."));
  ReportInput input;
  input.targets = {testing::TestTarget()};
  input.predicted = 2;
  const std::string page = RenderReport(input);
  EXPECT_THAT(page, HasSubstr("The cache has no measured plans for sm_90a. "
                              "Left out: 2 predicted plans, never run."));
  EXPECT_THAT(page, Not(HasSubstr("<svg")));
}

TEST(ReportTest, EveryPlanAppearsWithAllThatEnteredItsRace) {
  ReportInput input;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    input.plans.push_back(MakeMeasuredPlan(seed));
    input.plans.back().evidence[2].reason = absl::StrCat("reason ", seed, ".");
  }
  const std::string page = RenderReport(input);
  EXPECT_EQ(CountOf(page, "<svg"), 1u);
  for (const MeasuredPlan& plan : input.plans) {
    EXPECT_THAT(page, HasSubstr(plan.stored.key.digest.ToHex()));
    // Once in the list of rejects, once in the interval's own table.
    EXPECT_EQ(CountOf(page, absl::StrCat("<td>", plan.evidence[2].reason)), 2u);
  }
  for (const Measurement& measurement : input.plans[0].evidence) {
    const std::string label = absl::StrReplaceAll(
        EscapeMarkup(measurement.label), {{",", ",<wbr/>"}});
    EXPECT_GE(CountOf(page, label), 12u);
  }
  // A mark per interval in both charts, and one in the legend.
  EXPECT_EQ(CountOf(page, "<circle class=\"w "), 25u);
  EXPECT_EQ(CountOf(page, "<rect class=\"region "), 12u);
  EXPECT_EQ(CountOf(page, ">same</td>"), 12u);
  EXPECT_THAT(page, HasSubstr("Test Device"));
  EXPECT_THAT(page, HasSubstr("2023-11-14"));
  EXPECT_THAT(page, HasSubstr("kiln 9.9"));
  EXPECT_THAT(page, HasSubstr("candidates/fused_moe.cuda/sources"));
}

TEST(ReportTest, TheTableHasTheStoredFigures) {
  ReportInput input;
  input.plans = {MakeMeasuredPlan(3)};
  const std::string page = RenderReport(input);
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">41.25 µs</td>"));
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">50.00 µs</td>"));
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">+21.2 %</td>"));
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">0.40 %</td>"));
  EXPECT_THAT(page, HasSubstr("<td class=\"n\">3.0e-04</td>"));
}

TEST(ReportTest, AWinnerThatTheSamplesDoNotSupportIsMarked) {
  ReportInput input;
  input.plans = {MakeMeasuredPlan(3)};
  for (Sample& sample : input.plans[0].evidence[0].samples) sample.ns = 100;
  const std::string page = RenderReport(input);
  EXPECT_THAT(page, HasSubstr("the samples lead to another winner"));
  EXPECT_THAT(page, Not(HasSubstr(">same</td>")));
}

TEST(ReportTest, EqualInputGivesEqualBytesInAnyOrder) {
  ReportInput input;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    input.plans.push_back(MakeMeasuredPlan(seed));
  }
  const std::string page = RenderReport(input);
  EXPECT_EQ(RenderReport(input), page);
  std::reverse(input.plans.begin(), input.plans.end());
  EXPECT_EQ(RenderReport(input), page);
}

TEST(ReportTest, NamesNoHostAndNeedsNoOtherFile) {
  ReportInput input;
  input.plans = {MakeMeasuredPlan(1), MakeMeasuredPlan(2)};
  const std::string page = RenderReport(input);
  EXPECT_THAT(page, Not(HasSubstr("secret-host")));
  for (const char* word : {"<script", "<link", "<img", "<iframe",
                           "src=", "href=", "url(", "@import"}) {
    EXPECT_THAT(page, Not(HasSubstr(word)));
  }
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  EXPECT_THAT(page, HasSubstr("prefers-color-scheme: dark"));
}

TEST(ReportTest, TextOfOthersIsEscapedEverywhere) {
  constexpr char kHostile[] = "<script>alert(1)</script>&\"'\x1b";
  ReportInput input;
  input.plans = {MakeMeasuredPlan(1)};
  MeasuredPlan& plan = input.plans[0];
  plan.stored.plan.body.template_name = kHostile;
  plan.stored.provenance.device_name = kHostile;
  plan.stored.provenance.tool_version = kHostile;
  plan.stored.key.preimage = "no canonical bytes";
  for (Measurement& measurement : plan.evidence) {
    measurement.label = kHostile;
    measurement.reason = kHostile;
  }
  const std::string page = RenderReport(input);
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("\x1b")));
  EXPECT_GE(CountOf(page, "&lt;script&gt;"), 8u);
}

TEST(ReportTest, PlansThatCannotBeComparedHaveChartsOfTheirOwn) {
  ReportInput input;
  for (int i = 0; i < 4; ++i) input.plans.push_back(MakeMeasuredPlan(1));
  input.plans[1].stored.plan.geometry.experts = 64;
  input.plans[2].stored.plan.target = {.backend = Backend::kCpu, .level = 3};
  for (MeasuredPlan& plan : input.plans) {
    plan.stored.key = MakeTestPlanKey(plan.stored.plan);
  }
  // Another device or compiler shows in the key alone.
  input.plans[3].stored.key.preimage = "other";
  EXPECT_EQ(CountOf(RenderReport(input), "<svg"), 4u);
}

TEST(ReportTest, OverlappingIntervalsDoNotHideEachOther) {
  ReportInput input;
  for (const Interval interval :
       {Interval{1, 4}, Interval{3, 4}, Interval{5, 8}}) {
    MeasuredPlan plan = MakeMeasuredPlan(1);
    plan.stored.plan.interval = interval;
    plan.stored.key = MakeTestPlanKey(plan.stored.plan);
    input.plans.push_back(plan);
  }
  const std::string page = RenderReport(input);
  EXPECT_EQ(CountOf(page, "<rect class=\"region "), 3u);
  EXPECT_EQ(CountOf(page, " y=\"387.0\""), 2u);
  EXPECT_EQ(CountOf(page, " y=\"409.0\""), 1u);
}

TEST(ReportTest, MeasuredCeilingsDrawFloors) {
  ReportInput input;
  input.plans = {MakeMeasuredPlan(1), MakeMeasuredPlan(2)};
  const std::string without = RenderReport(input);
  EXPECT_THAT(without, Not(HasSubstr("class=\"floor\"")));
  EXPECT_EQ(CountOf(without, ">roofline floor</th>"), 0u);
  Ceilings ceilings;
  ceilings.read_bytes_per_s = 1e12;
  ceilings.mma_flops_per_s = 1e15;
  ceilings.decode_weights_per_s[{Codebook::kMcg, 4}] = 1e15;
  input.ceilings[CeilingsKeyOf(input.plans[0].stored)] = ceilings;
  const std::string page = RenderReport(input);
  // The line through both intervals, and the one of the legend.
  EXPECT_EQ(CountOf(page, "<path class=\"floor\""), 1u);
  EXPECT_EQ(CountOf(page, "<line class=\"floor\""), 1u);
  EXPECT_EQ(CountOf(page, ">roofline floor</th>"), 1u);
  EXPECT_EQ(CountOf(page, "<td>bytes</td>"), 2u);
  // Ceilings of another device are no floor of this one.
  input.ceilings.clear();
  input.ceilings["kiln.ceilings/1\ndevice/target=sm_80"] = ceilings;
  EXPECT_THAT(RenderReport(input), Not(HasSubstr("class=\"floor\"")));
}

TEST(ReportTest, WhatWasLeftOutIsListedApartFromRejects) {
  ReportInput input;
  input.plans = {MakeMeasuredPlan(1)};
  Measurement pruned = input.plans[0].evidence[2];
  pruned.label = "fused_moe.cuda{tokens_tile=128}";
  pruned.reason = "pruned: mma takes 9.00 x the best prediction";
  input.plans[0].evidence.push_back(pruned);
  input.plans[0].stored.plan.evidence.pruned = 40;
  const std::string page = RenderReport(input);
  const size_t rejects = page.find("<h3>Rejected candidates</h3>");
  const size_t left_out = page.find("<h3>Left out of the race</h3>");
  const size_t reason = page.find(pruned.reason);
  ASSERT_NE(left_out, std::string::npos);
  EXPECT_LT(rejects, left_out);
  EXPECT_LT(left_out, reason);
  EXPECT_THAT(page, HasSubstr("39 more"));
  EXPECT_THAT(page, HasSubstr("<td>pruned</td>"));
}

TEST(ReportTest, NumbersThatMakeNoSenseAreNotDrawn) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double bad :
       {kNan, kInfinity, -kInfinity, 0.0, -1.0, 1e-300, 1e300}) {
    ReportInput input;
    input.plans = {MakeMeasuredPlan(1), MakeMeasuredPlan(2)};
    Plan& plan = input.plans[0].stored.plan;
    plan.evidence.median_ns = bad;
    plan.evidence.worst_error = bad;
    input.plans[1].stored.plan.evidence.noise_floor = bad;
    input.plans[1].stored.plan.evidence.default_median_ns = bad;
    for (MeasuredPlan& each : input.plans) {
      each.evidence[0].samples[0].ns = bad;
      each.evidence[1].samples[0].ns = bad;
      each.evidence[1].regret = bad;
    }
    const std::string page = RenderReport(input);
    EXPECT_THAT(page, HasSubstr("<svg")) << bad;
    for (const char* word : {"=\"nan", "=\"-nan", "=\"inf", "=\"-inf", "Mnan",
                             "Lnan", " nan", "Linf", "Minf"}) {
      EXPECT_THAT(page, Not(HasSubstr(word))) << bad;
    }
  }
}

TEST(LoadReportTest, TakesMeasuredPlansOfTheTargets) {
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(TestOptions("", CacheMode::kOff)));
  ASSERT_OK(cache.PutProgram(MakeProgram(1)));
  const Plan measured = MakePlan(1, {MakeProgram(1).key.digest});
  Plan predicted = MakePlan(2, measured.programs);
  predicted.evidence = {};
  Plan other = MakePlan(3, measured.programs);
  other.target.level = 100;
  for (const Plan& plan : {measured, predicted, other}) {
    ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, MakeMeasurements(1)));
  }
  ASSERT_OK_AND_ASSIGN(const ReportInput all, LoadReport(&cache, {}));
  EXPECT_EQ(all.plans.size(), 2u);
  EXPECT_EQ(all.predicted, 1u);
  ASSERT_OK_AND_ASSIGN(const ReportInput some,
                       LoadReport(&cache, {measured.target}));
  ASSERT_EQ(some.plans.size(), 1u);
  EXPECT_EQ(some.plans[0].stored.plan, measured);
  EXPECT_TRUE(
      testing::SameMeasurements(some.plans[0].evidence, MakeMeasurements(1)));
}

}  // namespace
}  // namespace kiln
