#include "tuner/racer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/plan_key.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/plan_bench.h"

namespace kiln {
namespace {

using ::testing::AllOf;
using testing::CompileUnits;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::SmallAssignment;
using testing::SmallBody;
using testing::SmallGeometry;
using testing::SmallUnit;
using testing::StatusIs;
using testing::WhyNoCcCpu;

constexpr Interval kInterval = {1, 8};

TEST(MedianNsTest, IsTheMiddleOrTheMeanOfTheMiddleTwo) {
  const auto median = [](std::vector<double> values) {
    std::vector<BlockTime> samples;
    for (const double ns : values) samples.push_back({.block = 0, .ns = ns});
    return MedianNs(samples);
  };
  EXPECT_TRUE(std::isnan(median({})));
  EXPECT_EQ(median({7}), 7);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({9, 1, 5, 3}), 4);
  EXPECT_EQ(median({1e9, 1, 1, 1, 1}), 1) << "one outlier moves nothing";
}

RequestGeometry LinearGeometry() {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.linear = {
      .in_features = 256, .out_features = 128, .bits = 4, .bias = true};
  return geometry;
}

TEST(OpBenchTest, RefusesWeightsThatDoNotFitWithTheirBytes) {
  ASSERT_OK_AND_ASSIGN(const Target target, HostCpuTarget());
  ASSERT_OK_AND_ASSIGN(const auto device, OpenCpuDevice(target));
  RequestGeometry geometry = SmallGeometry();
  geometry.hidden = 32768;
  geometry.intermediate = 65536;
  geometry.experts = 1024;
  // Matrices of 4, 4 and 3 bits a weight, on the host and on the device.
  const uint64_t matrices = uint64_t{32768} * 65536 * 1024 * 11 / 8 * 2;
  uint64_t bytes = 0;
  for (const BufferFill& fill : ContractOf(geometry).Buffers(geometry)) {
    if (fill.kind != BufferFill::Kind::kNone) bytes += 2 * fill.bytes;
  }
  EXPECT_GT(bytes, matrices);
  EXPECT_THAT(OpBench::Create(device.get(), geometry, 1),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr(geometry.ToString()),
                             HasSubstr(absl::StrCat("needs ", bytes, " bytes")),
                             HasSubstr("are available; free some"))));
}

// Launches that alternate between draws must not find each other's weights in
// the cache: an op that reads all of them gets a copy for each draw.
TEST(AddColdDrawsTest, CopiesTheWeightsOfAnOpThatReadsAllOfThem) {
  ASSERT_OK_AND_ASSIGN(const Target target, HostCpuTarget());
  ASSERT_OK_AND_ASSIGN(const auto device, OpenCpuDevice(target));
  for (const RequestGeometry& geometry : {LinearGeometry(), SmallGeometry()}) {
    SCOPED_TRACE(geometry.ToString());
    const bool linear = geometry.op == Op::kLinear;
    ASSERT_OK_AND_ASSIGN(const auto bench,
                         OpBench::Create(device.get(), geometry, 1));
    ASSERT_OK(bench->Reserve(3, 0));
    ASSERT_OK_AND_ASSIGN(const std::vector<std::vector<uint64_t>> draws,
                         AddColdDraws(bench.get(), 5, 3, false));
    ASSERT_GE(draws.size(), 2u);
    for (size_t slot = 0; slot < draws[0].size(); ++slot) {
      std::set<uint64_t> places;
      for (const std::vector<uint64_t>& params : draws) {
        places.insert(params[slot]);
      }
      const absl::string_view bytes = bench->workload().Constant(slot);
      const bool output = bench->contract().Params(geometry)[slot].output;
      EXPECT_EQ(places.size(),
                output || (!bytes.empty() && !linear) ? 1 : draws.size())
          << slot;
      for (const uint64_t place : places) {
        EXPECT_EQ(absl::string_view(reinterpret_cast<const char*>(place),
                                    bytes.size()),
                  bytes);
      }
    }
    EXPECT_OK(bench->CheckInputs());
    if (linear) {
      // A write to a copy is seen and undone.
      auto* const suh = reinterpret_cast<char*>(draws[1][2]);
      suh[3] ^= 1;
      EXPECT_THAT(bench->RestoreInputs(),
                  testing::IsOkAndHolds(HasSubstr("suh was written")));
      EXPECT_OK(bench->CheckInputs());
    }
    ASSERT_OK_AND_ASSIGN(const std::vector<std::vector<uint64_t>> warm,
                         AddColdDraws(bench.get(), 5, 3, true));
    EXPECT_EQ(warm.size(), 1u);
  }
}

Assignment TileOf(int64_t tokens) {
  Assignment assignment = SmallAssignment();
  assignment["tokens_tile"] = tokens;
  return assignment;
}

class RacerTest : public ::testing::Test {
 protected:
  enum Source { kRight, kWrong, kSlow, kWritesScales, kSources };

  // Compiled once for all tests: two tile sizes, and the smaller one with three
  // changes.
  static void SetUpTestSuite() {
    if (!WhyNoCcCpu().empty()) return;
    const SourceUnit right = SmallUnit(SmallGeometry(), TileOf(1));
    const auto changed = [&right](const char* find, const char* replace) {
      SourceUnit unit = right;
      ReplaceOnce(&unit.text, find, replace);
      return unit;
    };
    const auto programs = CompileUnits(
        {right,
         changed("for (u32 j = 0; j < kTopK; ++j) {",
                 "for (u32 j = 0; j + 1 < kTopK; ++j) {"),
         changed("u32 tiles = 0;\n",
                 "u32 tiles = 0;\n"
                 "  for (volatile u32 spin = 0; spin < 3000000;) {\n"
                 "    spin = spin + 1;\n  }\n"),
         changed("F sum[kBlock / kLanes] = {};",
                 "F sum[kBlock / kLanes] = {};\n    if (token == 0) "
                 "const_cast<u16*>(args.down_svh)[1] = 0x3555;"),
         SmallUnit(SmallGeometry(), TileOf(16))});
    auto* made = new std::vector<std::shared_ptr<const Program>>;
    for (const auto& program : programs) {
      ASSERT_OK(program);
      made->push_back(*program);
    }
    programs_ = made;
  }

  static void ReplaceOnce(std::string* text, const std::string& find,
                          const std::string& replace) {
    ASSERT_EQ(absl::StrReplaceAll({{find, replace}}, text), 1) << find;
  }

  void SetUp() override {
    if (const std::string why = WhyNoCcCpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_NE(programs_, nullptr) << "the programs did not compile";
    ASSERT_OK_AND_ASSIGN(const Target target, HostCpuTarget());
    ASSERT_OK_AND_ASSIGN(device_, OpenCpuDevice(target));
    ASSERT_OK_AND_ASSIGN(bench_,
                         OpBench::Create(device_.get(), SmallGeometry(), 1));
    options_.seconds_max = 0;  // blocks_min decides
    options_.schedule.blocks_min = 5;
    options_.schedule.blocks_max = 5;
    options_.schedule.blocks_unsettled_max = 5;
    options_.about_to_run = [this](size_t contender) {
      started_.push_back(contender);
    };
  }

  static Contender Make(int64_t tile, size_t program) {
    Contender contender;
    absl::StatusOr<PlanBody> body =
        SmallBody(SmallGeometry(), kInterval.m_max, TileOf(tile));
    EXPECT_OK(body);
    contender.body = *std::move(body);
    contender.programs = {(*programs_)[program]};
    contender.digest =
        CandidateDigest(contender.body, {contender.programs[0]->key.digest});
    return contender;
  }

  static Contender Make(Source source) { return Make(1, source); }

  static Contender MakeLargeTile() { return Make(16, kSources); }

  static const std::vector<std::shared_ptr<const Program>>* programs_;

  std::unique_ptr<Device> device_;
  std::unique_ptr<OpBench> bench_;
  RaceOptions options_;
  std::vector<size_t> started_;
};

const std::vector<std::shared_ptr<const Program>>* RacerTest::programs_ =
    nullptr;

// The processor with the clock of another device: the readings that are given,
// then the last of them.
class ClockedDevice : public Device {
 public:
  ClockedDevice(Device* device, std::vector<ClockState> readings)
      : device_(*device), readings_(std::move(readings)) {}

  const DeviceProfile& profile() const override { return device_.profile(); }

  CUctx_st* context() const override { return device_.context(); }

  CUstream_st* stream() const override { return device_.stream(); }

  absl::StatusOr<void*> Allocate(uint64_t bytes) override {
    return device_.Allocate(bytes);
  }

  bool fences() const override { return device_.fences(); }

  void Free(void* memory) override { device_.Free(memory); }

  absl::Status CopyIn(void* to, const void* from, uint64_t bytes) override {
    return device_.CopyIn(to, from, bytes);
  }

  absl::Status CopyOut(void* to, const void* from, uint64_t bytes) override {
    return device_.CopyOut(to, from, bytes);
  }

  absl::Status Fill(void* to, uint8_t value, uint64_t bytes) override {
    return device_.Fill(to, value, bytes);
  }

  absl::Status Synchronize() override { return device_.Synchronize(); }

  std::optional<ClockState> ReadClocks() override {
    return readings_[std::min(next_++, readings_.size() - 1)];
  }

  absl::StatusOr<std::unique_ptr<Replay>> Record(
      std::function<absl::Status()> launches) override {
    return device_.Record(std::move(launches));
  }

 private:
  Device& device_;
  const std::vector<ClockState> readings_;
  size_t next_ = 0;
};

TEST_F(RacerTest, BlocksInWhichTheClockMovedDoNotCount) {
  // Before and after each block: still, moved, throttled, one step, still.
  ClockedDevice clocked(device_.get(), {{1980},
                                        {1980},
                                        {1980},
                                        {1700},
                                        {1980, 0x8},
                                        {1980},
                                        {1980},
                                        {1965},
                                        {1980}});
  ASSERT_OK_AND_ASSIGN(const auto bench,
                       OpBench::Create(&clocked, SmallGeometry(), 1));
  ASSERT_OK_AND_ASSIGN(
      const RaceResult result,
      Race(bench.get(), kInterval, {Make(kRight), MakeLargeTile()}, options_));
  EXPECT_EQ(result.discarded, 2u);
  EXPECT_EQ(result.blocks, 5u);
}

TEST_F(RacerTest, ABenchTellsTheClockThatItRanAt) {
  const Contender contender = Make(kRight);
  const auto time = [&](Device* device) -> absl::StatusOr<BenchTiming> {
    ASSIGN_OR_RETURN(const auto bench,
                     OpBench::Create(device, SmallGeometry(), 1));
    ASSIGN_OR_RETURN(LoadedPlan plan,
                     LoadedPlan::Load(device, SmallGeometry(), kInterval.m_max,
                                      contender.body, contender.programs));
    RETURN_IF_ERROR(plan.Find(kInterval.m_max));
    return TimePlan(bench.get(), plan, kInterval.m_max, {.blocks = 2}, nullptr);
  };
  ClockedDevice clocked(device_.get(), {{1965}, {1980}, {1410}, {1755}});
  ASSERT_OK_AND_ASSIGN(BenchTiming timing, time(&clocked));
  EXPECT_GT(timing.ns, 0);
  EXPECT_EQ(timing.mhz_min, 1410u);
  EXPECT_EQ(timing.mhz_max, 1980u);
  ASSERT_OK_AND_ASSIGN(timing, time(device_.get()));
  EXPECT_EQ(timing.mhz_min, 0u);
  EXPECT_EQ(timing.mhz_max, 0u);
}

TEST_F(RacerTest, RecordsEveryBlockOfEveryContenderThatIsRight) {
  const std::vector<Contender> contenders = {Make(kRight), MakeLargeTile()};
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, contenders, options_));
  ASSERT_EQ(result.timings.size(), 2u);
  EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
  EXPECT_EQ(result.timings[0].samples.size(), 5u)
      << "the default's second lane must not add samples";
  for (const Timing& timing : result.timings) {
    EXPECT_NE(timing.outcome, Outcome::kRejected) << timing.reason;
    EXPECT_GT(timing.worst_error, 0);
    EXPECT_LT(timing.worst_error, 2e-3);
    ASSERT_GE(timing.samples.size(), 3u);
    for (size_t i = 0; i < timing.samples.size(); ++i) {
      EXPECT_EQ(timing.samples[i].block, i);
      EXPECT_GT(timing.samples[i].ns, 0);
    }
  }
  EXPECT_GE(result.noise_floor, 0);
  EXPECT_TRUE(std::isfinite(result.noise_floor));
  EXPECT_THAT(std::set<size_t>(started_.begin(), started_.end()),
              ElementsAre(0, 1));
}

TEST_F(RacerTest, ARejectedContenderDoesNotStopTheOthers) {
  const std::vector<Contender> contenders = {Make(kRight), Make(kWrong),
                                             MakeLargeTile()};
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, contenders, options_));
  EXPECT_EQ(result.timings[1].outcome, Outcome::kRejected);
  EXPECT_THAT(result.timings[1].reason, HasSubstr(" instead of "));
  EXPECT_THAT(result.timings[1].samples, IsEmpty())
      << "what is wrong must not be timed";
  EXPECT_NE(result.timings[0].outcome, Outcome::kRejected);
  EXPECT_NE(result.timings[2].outcome, Outcome::kRejected);
  EXPECT_FALSE(result.timings[2].samples.empty());
}

TEST_F(RacerTest, ARejectedDefaultLeavesTheRaceToTheOthers) {
  const std::vector<Contender> contenders = {Make(kWrong), Make(kRight)};
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, contenders, options_));
  EXPECT_EQ(result.timings[0].outcome, Outcome::kRejected);
  EXPECT_EQ(result.timings[1].outcome, Outcome::kFinished);
  EXPECT_EQ(result.timings[1].samples.size(), 5u);
}

TEST_F(RacerTest, WhenAllAreRejectedNothingIsTimed) {
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, {Make(kWrong)}, options_));
  EXPECT_EQ(result.timings[0].outcome, Outcome::kRejected);
  EXPECT_THAT(result.timings[0].samples, IsEmpty());
  EXPECT_GE(result.launches, 1u);
}

TEST_F(RacerTest, ASlowContenderIsEliminatedEarlyAndKeepsItsSamples) {
  options_.schedule.blocks_max = 40;
  options_.schedule.blocks_unsettled_max = 40;
  options_.seconds_max = 100;
  const std::vector<Contender> contenders = {Make(kRight), Make(kSlow)};
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, contenders, options_));
  EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
  EXPECT_EQ(result.timings[1].outcome, Outcome::kEliminated);
  EXPECT_GE(result.timings[1].samples.size(), 2u);
  // Once nobody is left to compare with, the race ends.
  EXPECT_LT(result.timings[0].samples.size(), 40u);
  EXPECT_GE(result.timings[0].samples.size(), 5u);
  EXPECT_EQ(result.blocks, result.timings[0].samples.size());
  EXPECT_GT(MedianNs(result.timings[1].samples),
            1.3 * MedianNs(result.timings[0].samples));
}

TEST_F(RacerTest, TheDefaultIsTimedToTheEndHoweverSlow) {
  const std::vector<Contender> contenders = {Make(kSlow), Make(kRight)};
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, contenders, options_));
  EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
  EXPECT_EQ(result.timings[0].samples.size(), 5u);
  EXPECT_LT(MedianNs(result.timings[1].samples),
            MedianNs(result.timings[0].samples));
}

TEST_F(RacerTest, IdenticalCodeAndLaunchesRunOnce) {
  Contender twin = Make(kRight);
  twin.body.assignment["k_tile"] = 128;  // another name for the same code
  Contender fewer_threads = Make(kRight);
  fewer_threads.body.cpu_threads = 1;  // same code, other launches
  const std::vector<Contender> contenders = {Make(kRight), twin, fewer_threads};
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, contenders, options_));
  EXPECT_EQ(result.timings[1].outcome, Outcome::kIdentical);
  EXPECT_EQ(result.timings[1].reason, contenders[0].body.Label());
  EXPECT_THAT(result.timings[1].samples, IsEmpty());
  EXPECT_NE(result.timings[2].outcome, Outcome::kIdentical);
  EXPECT_FALSE(result.timings[2].samples.empty());
  EXPECT_THAT(std::set<size_t>(started_.begin(), started_.end()),
              ElementsAre(0, 2));
}

TEST_F(RacerTest, WhatTheRuntimeRefusesIsRejectedWithItsReason) {
  Contender unknown = Make(kRight);
  unknown.body.steps[0].entry = "no_such_entry";
  const std::vector<Contender> contenders = {Make(kRight), unknown};
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, contenders, options_));
  EXPECT_EQ(result.timings[1].outcome, Outcome::kRejected);
  EXPECT_THAT(result.timings[1].reason, HasSubstr("no_such_entry"));
  EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
}

// The bench's arena is as large as the hungriest contender needs. That must not
// hide a write past the end of a smaller one.
TEST_F(RacerTest, AnArenaThatIsDeclaredTooSmallIsSeenBesideALargerOne) {
  Contender small = Make(kRight);
  ArenaSlice& last = small.body.arena.slices.back();
  ASSERT_EQ(last.offset + last.bytes, small.body.arena.bytes);
  last.bytes -= kArenaAlignment;
  small.body.arena.bytes -= kArenaAlignment;
  const Contender large = MakeLargeTile();
  ASSERT_GT(large.body.arena.bytes, small.body.arena.bytes + 8192);
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, {large, small}, options_));
  EXPECT_EQ(result.timings[1].outcome, Outcome::kRejected);
  EXPECT_THAT(result.timings[1].reason,
              HasSubstr("behind the end of slice down_out"));
}

// Who damages the inputs is rejected; who runs afterwards is not.
TEST_F(RacerTest, AWriteToTheInputsIsBlamedOnWhoDidIt) {
  ASSERT_OK_AND_ASSIGN(
      const RaceResult result,
      Race(bench_.get(), kInterval,
           {Make(kRight), Make(kWritesScales), MakeLargeTile()}, options_));
  EXPECT_EQ(result.timings[1].outcome, Outcome::kRejected);
  EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
  EXPECT_NE(result.timings[2].outcome, Outcome::kRejected)
      << result.timings[2].reason;
  EXPECT_OK(bench_->CheckInputs());
}

TEST_F(RacerTest, StopsAtTheTimeLimitOnceTheFewestBlocksAreDone) {
  options_.schedule.blocks_min = 2;
  options_.schedule.blocks_max = 1000000;
  options_.schedule.blocks_unsettled_max = 1000000;
  options_.seconds_max = 0.05;
  ASSERT_OK_AND_ASSIGN(const RaceResult result,
                       Race(bench_.get(), kInterval, {Make(kRight)}, options_));
  EXPECT_GE(result.timings[0].samples.size(), 2u);
  EXPECT_LT(result.timings[0].samples.size(), 100000u);
}

TEST_F(RacerTest, CanRaceAgainOnTheSameBench) {
  for (int round = 0; round < 2; ++round) {
    ASSERT_OK_AND_ASSIGN(
        const RaceResult result,
        Race(bench_.get(), {1, 8}, {MakeLargeTile(), Make(kRight)}, options_));
    EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
    EXPECT_NE(result.timings[1].outcome, Outcome::kRejected);
  }
}

}  // namespace
}  // namespace kiln
