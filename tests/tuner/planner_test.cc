#include "tuner/planner.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "compiler/base/sanitized.h"
#include "compiler/spec/manifest.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/registry.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"
#include "tuner/cost_model.h"

namespace kiln {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::SourcePath;
using testing::StatusIs;

constexpr char const* kModels[] = {"deepseek-v3-tp8", "mixtral-8x7b",
                                   "olmoe-1b-7b", "qwen3-30b-a3b"};
constexpr char const* kTargets[] = {
    "sm_80",   "sm_89",         "sm_90a",        "sm_100a",
    "sm_120a", "cpu-x86-64-v2", "cpu-x86-64-v3", "cpu-x86-64-v4"};

Toolchain TestToolchain() { return {"test", "1.2.3", Sha256("compiler")}; }

Target TargetNamed(const std::string& name) {
  absl::StatusOr<Target> target = ParseTarget(name);
  EXPECT_OK(target);
  return *target;
}

// A CPU has as many threads as we say, whatever runs the test.
DeviceProfile ProfileOf(const std::string& target) {
  DeviceProfile profile = AssumedProfile(TargetNamed(target));
  if (profile.target.backend == Backend::kCpu) profile.multiprocessors = 8;
  return profile;
}

std::vector<PlannedRequest> RequestsOf(const std::string& model) {
  const absl::StatusOr<Manifest> manifest =
      ReadManifest(SourcePath("tests/data/models/" + model + ".json"));
  EXPECT_OK(manifest);
  absl::StatusOr<std::vector<PlannedRequest>> requests =
      Canonicalize(*manifest, 0);
  EXPECT_OK(requests);
  return *std::move(requests);
}

RequestGeometry Qwen() { return RequestsOf("qwen3-30b-a3b")[0].geometry; }

Plan PlanOf(const RequestGeometry& geometry, const Target& target,
            const Interval& interval, const PlannedCandidate& candidate) {
  Plan plan;
  plan.geometry = geometry;
  plan.target = target;
  plan.interval = interval;
  plan.body = candidate.body;
  for (const ProgramKey& key : candidate.programs) {
    plan.programs.push_back(key.digest);
  }
  return plan;
}

// Live token counts of an interval that are worth a look: edges and a few
// inside.
std::set<uint32_t> SizesOf(const Interval& interval) {
  std::set<uint32_t> sizes = {interval.m_min, interval.m_max};
  for (const uint32_t m : {1u, 2u, 3u, 7u, 17u, 100u, 1000u}) {
    if (m >= interval.m_min && m <= interval.m_max) sizes.insert(m);
  }
  sizes.insert(interval.m_min + (interval.m_max - interval.m_min) / 2);
  return sizes;
}

class EveryModelAndTargetTest
    : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  const std::vector<PlannedRequest> requests_ =
      RequestsOf(std::get<0>(GetParam()));
  const DeviceProfile device_ = ProfileOf(std::get<1>(GetParam()));
};

TEST_P(EveryModelAndTargetTest, HasValidDistinctCandidatesForEveryInterval) {
  const int limit = DefaultCandidatesMax(device_.target.backend);
  for (const PlannedRequest& request : requests_) {
    Planner planner(request.geometry, device_, TestToolchain(), {limit});
    std::set<Digest> keys;
    for (const Interval& interval : request.intervals) {
      SCOPED_TRACE(interval.m_max);
      EXPECT_TRUE(keys.insert(planner.KeyOf(interval).digest).second)
          << "two intervals share a key";
      ASSERT_OK_AND_ASSIGN(const IntervalPlan plan, planner.Plan(interval));
      EXPECT_EQ(plan.interval, interval);
      ASSERT_GE(plan.candidates.size(), 2u) << "there is nothing to race";
      EXPECT_LE(
          plan.candidates.size(),
          static_cast<size_t>(limit) *
              TemplatesFor(RequestGeometry(), device_.target.backend).size());
      std::set<Digest> digests;
      std::set<std::string> labels;
      for (const PlannedCandidate& candidate : plan.candidates) {
        SCOPED_TRACE(candidate.body.Label());
        EXPECT_TRUE(digests.insert(candidate.digest).second);
        EXPECT_TRUE(labels.insert(candidate.body.Label()).second);
        ASSERT_OK(ValidatePlan(
            PlanOf(request.geometry, device_.target, interval, candidate)));
        EXPECT_EQ(candidate.body.template_name,
                  candidate.kernel_template->name());
        EXPECT_GT(candidate.body.tolerance, 0);
        EXPECT_NE(candidate.body.numerics_class, "");
        EXPECT_EQ(candidate.body.params, FusedMoeParams(request.geometry));
      }
    }
  }
}

TEST_P(EveryModelAndTargetTest, LaunchesFitTheDeviceAtEveryLiveSize) {
  const bool cuda = device_.target.backend == Backend::kCuda;
  const int limit = DefaultCandidatesMax(device_.target.backend);
  for (const PlannedRequest& request : requests_) {
    Planner planner(request.geometry, device_, TestToolchain(), {limit});
    for (const Interval& interval : request.intervals) {
      ASSERT_OK_AND_ASSIGN(const IntervalPlan plan, planner.Plan(interval));
      for (const PlannedCandidate& candidate : plan.candidates) {
        for (const Step& step : candidate.body.steps) {
          SCOPED_TRACE(candidate.body.Label() + " " + step.label);
          for (const uint32_t m : SizesOf(interval)) {
            const uint64_t x = step.grid[0].Evaluate(m);
            const uint64_t y = step.grid[1].Evaluate(m);
            const uint64_t z = step.grid[2].Evaluate(m);
            EXPECT_GE(x, 1u) << m;
            EXPECT_GE(y, 1u) << m;
            EXPECT_GE(z, 1u) << m;
            EXPECT_LE(x, 0x7FFFFFFFu) << m;
            EXPECT_LE(y, 65535u) << m;
            EXPECT_LE(z, 65535u) << m;
          }
          const uint32_t threads =
              step.block[0] * step.block[1] * step.block[2];
          EXPECT_LE(threads, cuda ? 1024u : 1u);
          EXPECT_LE(step.dynamic_shared_bytes,
                    cuda ? device_.shared_bytes_max : 0);
          EXPECT_EQ(candidate.body.cpu_threads > 0, !cuda);
        }
      }
    }
  }
}

TEST_P(EveryModelAndTargetTest, EqualInputsGiveEqualPlans) {
  const PlannedRequest& request = requests_.front();
  const Interval& interval = request.intervals.back();
  Planner first(request.geometry, device_, TestToolchain(), {5});
  Planner second(request.geometry, device_, TestToolchain(), {5});
  // Other work before must not matter.
  ASSERT_OK(second.Plan(request.intervals.front()));
  ASSERT_OK_AND_ASSIGN(const IntervalPlan a, first.Plan(interval));
  ASSERT_OK_AND_ASSIGN(const IntervalPlan b, second.Plan(interval));
  EXPECT_EQ(first.KeyOf(interval), second.KeyOf(interval));
  ASSERT_EQ(a.candidates.size(), b.candidates.size());
  for (size_t i = 0; i < a.candidates.size(); ++i) {
    EXPECT_EQ(a.candidates[i].digest, b.candidates[i].digest);
    EXPECT_EQ(a.candidates[i].body, b.candidates[i].body);
    EXPECT_EQ(a.candidates[i].programs, b.candidates[i].programs);
  }
}

// Sanitizers look for faults of the code, and one model runs all of it.
constexpr size_t kModelsTested = KILN_SANITIZED ? 1 : std::size(kModels);

INSTANTIATE_TEST_SUITE_P(
    Models, EveryModelAndTargetTest,
    ::testing::Combine(::testing::ValuesIn(kModels, kModels + kModelsTested),
                       ::testing::ValuesIn(kTargets)),
    [](const auto& test) {
      std::string name =
          std::string(std::get<0>(test.param)) + "_" + std::get<1>(test.param);
      for (char& c : name) {
        if (c == '-') c = '_';
      }
      return name;
    });

TEST(PlannerTest, ASmallerLimitIsAPrefixOfALargerOne) {
  for (const char* target : {"sm_90a", "cpu-x86-64-v3"}) {
    const Interval interval = {65, 127};  // one template serves it
    ASSERT_OK_AND_ASSIGN(
        const IntervalPlan all,
        Planner(Qwen(), ProfileOf(target), TestToolchain(), {100000})
            .Plan(interval));
    EXPECT_EQ(all.pruned.size(), 0u);
    for (const int limit : {1, 2, 7, 16}) {
      ASSERT_OK_AND_ASSIGN(
          const IntervalPlan some,
          Planner(Qwen(), ProfileOf(target), TestToolchain(), {limit})
              .Plan(interval));
      ASSERT_EQ(some.candidates.size(), static_cast<size_t>(limit));
      EXPECT_EQ(some.pruned.size() + some.candidates.size(),
                all.candidates.size())
          << "what was left out is counted";
      for (size_t i = 0; i < some.candidates.size(); ++i) {
        EXPECT_EQ(some.candidates[i].digest, all.candidates[i].digest) << i;
      }
    }
  }
}

// Points of the space, and the reasons among them.
size_t CountPoints(const IntervalPlan& plan) {
  size_t points = plan.candidates.size() + plan.pruned.size();
  std::set<std::string> reasons;
  for (const RejectedPoints& reject : plan.rejects) {
    EXPECT_GE(reject.count, 1u);
    EXPECT_NE(reject.reason, "");
    EXPECT_TRUE(reasons.insert(reject.reason).second) << reject.reason;
    points += reject.count;
  }
  return points;
}

// The axes do not depend on the device or the limit; what is legal does.
TEST(PlannerTest, EveryPointIsLegalRejectedWithAReasonOrLeftOut) {
  for (const char* target : {"sm_89", "sm_90a"}) {
    ASSERT_OK_AND_ASSIGN(
        const IntervalPlan few,
        Planner(Qwen(), ProfileOf(target), TestToolchain(), {3}).Plan({1, 1}));
    ASSERT_OK_AND_ASSIGN(
        const IntervalPlan many,
        Planner(Qwen(), ProfileOf(target), TestToolchain(), {90})
            .Plan({2049, 4096}));
    EXPECT_FALSE(few.rejects.empty());
    EXPECT_NE(few.pruned.size(), many.pruned.size());
    EXPECT_EQ(CountPoints(few), CountPoints(many));
  }
}

// Capacities share programs: an interval must not enter a source.
TEST(PlannerTest, ProgramsDoNotDependOnTheInterval) {
  for (const char* target : {"sm_90a", "cpu-x86-64-v3"}) {
    Planner planner(Qwen(), ProfileOf(target), TestToolchain(), {100000});
    ASSERT_OK_AND_ASSIGN(const IntervalPlan small, planner.Plan({1, 1}));
    // Other planners, so that nothing is remembered.
    Planner second(Qwen(), ProfileOf(target), TestToolchain(), {100000});
    ASSERT_OK_AND_ASSIGN(const IntervalPlan medium, second.Plan({9, 16}));
    Planner third(Qwen(), ProfileOf(target), TestToolchain(), {100000});
    ASSERT_OK_AND_ASSIGN(const IntervalPlan large, third.Plan({2049, 4096}));
    Planner fourth(Qwen(), ProfileOf(target), TestToolchain(), {100000});
    ASSERT_OK_AND_ASSIGN(const IntervalPlan larger, fourth.Plan({4097, 8192}));
    // Some templates serve small intervals alone, some large ones.
    std::map<Assignment, std::vector<ProgramKey>> programs;
    for (const IntervalPlan* plan : {&small, &larger}) {
      for (const PlannedCandidate& candidate : plan->candidates) {
        programs[candidate.body.assignment] = candidate.programs;
      }
    }
    ASSERT_EQ(small.candidates.size(), medium.candidates.size());
    ASSERT_EQ(large.candidates.size(), larger.candidates.size());
    for (const IntervalPlan* plan : {&medium, &large}) {
      for (const PlannedCandidate& candidate : plan->candidates) {
        ASSERT_TRUE(programs.contains(candidate.body.assignment));
        EXPECT_EQ(programs[candidate.body.assignment], candidate.programs);
      }
    }
  }
}

TEST(PlannerTest, TheArenaDependsOnTheCapacityAlone) {
  for (const char* target : {"sm_90a", "cpu-x86-64-v3"}) {
    Planner planner(Qwen(), ProfileOf(target), TestToolchain(), {100000});
    ASSERT_OK_AND_ASSIGN(const IntervalPlan narrow, planner.Plan({63, 63}));
    ASSERT_OK_AND_ASSIGN(const IntervalPlan wide, planner.Plan({1, 63}));
    ASSERT_OK_AND_ASSIGN(const IntervalPlan larger, planner.Plan({1, 64}));
    const auto arenas = [](const IntervalPlan& plan) {
      std::map<Assignment, ArenaLayout> result;
      for (const PlannedCandidate& candidate : plan.candidates) {
        result[candidate.body.assignment] = candidate.body.arena;
      }
      return result;
    };
    EXPECT_EQ(arenas(narrow), arenas(wide));
    const auto more = arenas(larger);
    for (const auto& [assignment, arena] : arenas(wide)) {
      EXPECT_LE(arena.bytes, more.at(assignment).bytes);
      EXPECT_GT(arena.bytes, 0u);
    }
  }
}

TEST(PlannerTest, KeysMoveWithWhatDecidesTheRace) {
  const Interval interval = {1, 8};
  const auto key = [&](const RequestGeometry& geometry,
                       const DeviceProfile& device, const Toolchain& toolchain,
                       int limit, const Interval& at) {
    return Planner(geometry, device, toolchain, {limit}).KeyOf(at).digest;
  };
  const RequestGeometry geometry = Qwen();
  const DeviceProfile device = ProfileOf("sm_90a");
  std::set<Digest> keys = {key(geometry, device, TestToolchain(), 4, interval)};
  const auto expect_new = [&keys](const Digest& digest, const char* what) {
    EXPECT_TRUE(keys.insert(digest).second) << what << " does not move the key";
  };
  expect_new(key(geometry, device, TestToolchain(), 5, interval), "the limit");
  expect_new(key(geometry, device, TestToolchain(), 4, {2, 8}), "m_min");
  expect_new(key(geometry, device, TestToolchain(), 4, {1, 9}), "m_max");
  Toolchain toolchain = TestToolchain();
  toolchain.content = Sha256("another compiler");
  expect_new(key(geometry, device, toolchain, 4, interval), "the compiler");
  expect_new(key(geometry, ProfileOf("sm_90"), TestToolchain(), 4, interval),
             "sm_90 for sm_90a");
  DeviceProfile slower = device;
  slower.multiprocessors = 114;
  expect_new(key(geometry, slower, TestToolchain(), 4, interval),
             "the SM count");
  RequestGeometry other = geometry;
  other.id_dtype = DType::kI64;
  expect_new(key(other, device, TestToolchain(), 4, interval), "the id dtype");
  // And not with what does not.
  DeviceProfile renamed = device;
  renamed.name = "another name";
  EXPECT_EQ(key(geometry, renamed, TestToolchain(), 4, interval),
            key(geometry, device, TestToolchain(), 4, interval));
}

TEST(PlannerTest, NamesTheRulesWhenNoPointIsLegal) {
  DeviceProfile device = ProfileOf("sm_90a");
  device.shared_bytes_max = 1024;
  EXPECT_THAT(
      Planner(Qwen(), device, TestToolchain(), {4}).Plan({9, 16}),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("no candidate is legal"), HasSubstr("m 9..16"),
                     HasSubstr("sm_90a"), HasSubstr("shared memory"))));
}

// Who asks for equal bits, as all do who do not say otherwise, gets no
// candidate whose repeats may differ; who does not may have both.
TEST(PlannerTest, RepeatsDifferOnlyWhereTheRequestAllowsIt) {
  RequestGeometry geometry = Qwen();
  geometry.weights.shared_scales = true;
  const auto nondeterministic = [&](bool required) -> size_t {
    geometry.deterministic = required;
    const IntervalPlan plan =
        Planner(geometry, ProfileOf("sm_90a"), TestToolchain(),
                {.candidates_max = kAllCandidates})
            .Plan({2049, 4096})
            .value();
    return static_cast<size_t>(
        std::count_if(plan.candidates.begin(), plan.candidates.end(),
                      [](const PlannedCandidate& candidate) {
                        return !candidate.body.deterministic;
                      }));
  };
  EXPECT_TRUE(RequestGeometry().deterministic);
  EXPECT_EQ(nondeterministic(true), 0u);
  EXPECT_GT(nondeterministic(false), 0u);
}

// Sums of routes in the output need no row for each route: with less scratch
// than that they are what is left.
TEST(PlannerTest, ALimitOfTheArenaLeavesWhatFits) {
  RequestGeometry geometry = Qwen();
  geometry.weights.shared_scales = true;
  geometry.deterministic = false;
  const Interval interval = {2049, 4096};
  PlannerOptions options = {.candidates_max = kAllCandidates};
  const auto plan = [&] {
    return Planner(geometry, ProfileOf("sm_90a"), TestToolchain(), options)
        .Plan(interval);
  };
  ASSERT_OK_AND_ASSIGN(const IntervalPlan all, plan());
  uint64_t ordered = UINT64_MAX, atomic = 0;
  for (const PlannedCandidate& candidate : all.candidates) {
    const uint64_t bytes = candidate.body.arena.bytes;
    if (candidate.body.deterministic) {
      ordered = std::min(ordered, bytes);
    } else {
      atomic = std::max(atomic, bytes);
    }
  }
  ASSERT_LT(atomic, ordered);
  options.arena_bytes_max = ordered - 1;
  ASSERT_OK_AND_ASSIGN(const IntervalPlan some, plan());
  ASSERT_FALSE(some.candidates.empty());
  for (const PlannedCandidate& candidate : some.candidates) {
    EXPECT_EQ(candidate.body.assignment.at("atomic_sum"), 1);
  }
  options.arena_bytes_max = 1;
  // The least that would do.
  uint64_t least = UINT64_MAX;
  for (const PlannedCandidate& candidate : all.candidates) {
    least = std::min(least, candidate.body.arena.bytes);
  }
  EXPECT_THAT(plan().status().message(),
              AllOf(HasSubstr("bytes or more exceeds the limit of 1"),
                    HasSubstr(absl::StrCat("an arena of ", least, " bytes"))));
}

TEST(PlannerTest, SaysSoWhenNoTemplateServesTheTarget) {
  DeviceProfile device = ProfileOf("sm_80");
  device.target.level = 75;
  EXPECT_THAT(
      Planner(Qwen(), device, TestToolchain(), {4}).Plan({1, 1}),
      StatusIs(absl::StatusCode::kUnimplemented,
               AllOf(HasSubstr("no template serves"), HasSubstr("sm_75"),
                     HasSubstr("sm_80 and later"))));
}

RequestGeometry Linear() {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.linear = {.in_features = 256, .out_features = 128, .bits = 4};
  return geometry;
}

// No template has it, and no manifest can name it.
RequestGeometry LinearTrellisMx() {
  RequestGeometry geometry = Linear();
  geometry.weights.format = WeightFormat::kTrellisMx;
  return geometry;
}

TEST(PlannerTest, SaysSoWhenNoTemplateServesTheFormat) {
  EXPECT_THAT(
      Planner(LinearTrellisMx(), ProfileOf("sm_90a"), TestToolchain(), {4})
          .Plan({1, 1}),
      StatusIs(absl::StatusCode::kUnimplemented,
               AllOf(HasSubstr("no template serves linear"),
                     HasSubstr("on sm_90a"))));
}

TEST(PlannerTest, PlansQsrt) {
  RequestGeometry geometry = Qwen();
  geometry.intermediate = 256;
  geometry.weights.format = WeightFormat::kQsrt;
  for (const auto& [target, name] :
       {std::pair{"cpu-x86-64-v3", "fused_moe.qsrt_cpu"},
        {"sm_90a", "fused_moe.qsrt_cuda"}}) {
    ASSERT_OK_AND_ASSIGN(
        const IntervalPlan plan,
        Planner(geometry, ProfileOf(target), TestToolchain(), {4})
            .Plan({5, 17}));
    EXPECT_EQ(plan.candidates.size(), 4u);
    for (const PlannedCandidate& candidate : plan.candidates) {
      EXPECT_EQ(candidate.body.template_name, name);
    }
  }
}

TEST(PlannerTest, PlansLinear) {
  for (const auto& [target, name] :
       {std::pair{"cpu-x86-64-v3", "linear.cpu"}, {"sm_90a", "linear.cuda"}}) {
    ASSERT_OK_AND_ASSIGN(
        const IntervalPlan plan,
        Planner(Linear(), ProfileOf(target), TestToolchain(), {4})
            .Plan({5, 17}));
    EXPECT_EQ(plan.candidates.size(), 4u);
    for (const PlannedCandidate& candidate : plan.candidates) {
      EXPECT_EQ(candidate.body.template_name, name);
    }
  }
}

TEST(CheckOpsServedTest, NamesTheRequestTheTargetAndWhatToDo) {
  Manifest manifest;
  manifest.requests.resize(2);
  manifest.requests[0].name = "moe";
  manifest.requests[0].geometry = Qwen();
  manifest.requests[1].name = "q_proj";
  manifest.requests[1].geometry = Linear();
  const Target cpu = ProfileOf("cpu-x86-64-v3").target;
  const std::vector<Target> targets = {cpu, ProfileOf("sm_90a").target};
  EXPECT_OK(CheckOpsServed(manifest, targets));
  manifest.requests.resize(3);
  manifest.requests[2].name = "mx";
  manifest.requests[2].geometry = LinearTrellisMx();
  EXPECT_THAT(
      CheckOpsServed(manifest, targets),
      StatusIs(absl::StatusCode::kUnimplemented,
               AllOf(HasSubstr("no template of this build serves op linear "
                               "over weights of trellis_mx on cpu-x86-64-v3"),
                     HasSubstr("request \"mx\""),
                     HasSubstr("no target has a template for it"),
                     HasSubstr("take such requests out of the manifest"))));
}

// The largest geometry a manifest may name: every number must still fit, or the
// point must be rejected by a rule.
TEST(PlannerTest, TheLimitsOfAManifestDoNotOverflow) {
  RequestGeometry geometry = Qwen();
  geometry.hidden = kHiddenMax;
  geometry.intermediate = kIntermediateMax;
  geometry.experts = kExpertsMax;
  geometry.top_k = kTopKMax;
  geometry.weights.bits = {.gate = 8, .up = 8, .down = 8};
  const Interval interval = {1, static_cast<uint32_t>(kCapacityMax)};
  for (const char* target : {"sm_90a", "cpu-x86-64-v4"}) {
    SCOPED_TRACE(target);
    const DeviceProfile device = ProfileOf(target);
    const absl::StatusOr<IntervalPlan> plan =
        Planner(geometry, device, TestToolchain(), {100000}).Plan(interval);
    if (!plan.ok()) {
      EXPECT_THAT(plan, StatusIs(absl::StatusCode::kFailedPrecondition));
      continue;
    }
    for (const PlannedCandidate& candidate : plan->candidates) {
      SCOPED_TRACE(candidate.body.Label());
      ASSERT_OK(
          ValidatePlan(PlanOf(geometry, device.target, interval, candidate)));
      for (const Step& step : candidate.body.steps) {
        EXPECT_LE(step.grid[0].Evaluate(interval.m_max), 0x7FFFFFFFu)
            << step.label;
      }
    }
  }
}

// Ceilings of an H200, rounded; decoding is what its kernels wait for.
Ceilings GpuCeilings() {
  Ceilings ceilings;
  ceilings.read_bytes_per_s = 4.3e12;
  ceilings.mma_flops_per_s = 530e12;
  ceilings.decode_weights_per_s[{Codebook::kMcg, 4}] = 5e12;
  return ceilings;
}

PlannerOptions Pruning(int limit) {
  PlannerOptions options;
  options.candidates_max = limit;
  options.ceilings = GpuCeilings();
  return options;
}

TEST(PlannerTest, TheModelPrunesWithItsReasonAndNeverTheDefault) {
  for (const Interval interval : {Interval{1, 1}, Interval{257, 512}}) {
    ASSERT_OK_AND_ASSIGN(const IntervalPlan all,
                         Planner(Qwen(), ProfileOf("sm_90a"), TestToolchain(),
                                 {.candidates_max = kAllCandidates})
                             .Plan(interval));
    EXPECT_TRUE(all.pruned.empty());
    ASSERT_OK_AND_ASSIGN(const IntervalPlan some,
                         Planner(Qwen(), ProfileOf("sm_90a"), TestToolchain(),
                                 Pruning(kAllCandidates - 1))
                             .Plan(interval));
    EXPECT_EQ(some.candidates.size() + some.pruned.size(),
              all.candidates.size());
    EXPECT_EQ(some.candidates[0].digest, all.candidates[0].digest);
    EXPECT_LT(some.candidates.size(), 3 * all.candidates.size() / 4);
    std::set<std::string> listed;
    for (const PrunedCandidate& pruned : some.pruned) {
      EXPECT_TRUE(listed.insert(pruned.label).second);
      EXPECT_THAT(pruned.reason, HasSubstr("x the best prediction"));
      EXPECT_THAT(pruned.reason, ::testing::StartsWith(kPrunedPrefix));
    }
    for (const PlannedCandidate& candidate : some.candidates) {
      EXPECT_FALSE(listed.contains(candidate.body.Label()));
    }
  }
}

// Whoever asks for all candidates gets them, measured device or not.
TEST(PlannerTest, ExhaustiveMeansAll) {
  PlannerOptions options = Pruning(kAllCandidates);
  Planner measured(Qwen(), ProfileOf("sm_90a"), TestToolchain(), options);
  options.ceilings.reset();
  Planner plain(Qwen(), ProfileOf("sm_90a"), TestToolchain(), options);
  EXPECT_EQ(measured.KeyOf({1, 8}), plain.KeyOf({1, 8}));
  ASSERT_OK_AND_ASSIGN(const IntervalPlan plan, measured.Plan({1, 8}));
  EXPECT_TRUE(plan.pruned.empty());
}

TEST(PlannerTest, KeysMoveWithTheBalanceAndNotWithNoise) {
  const auto key = [](const PlannerOptions& options) {
    return Planner(Qwen(), ProfileOf("sm_90a"), TestToolchain(), options)
        .KeyOf({1, 8})
        .digest;
  };
  PlannerOptions options = Pruning(16);
  const Digest base = key(options);
  options.ceilings->mma_flops_per_s *= 1.01;
  EXPECT_EQ(key(options), base);
  options.ceilings->mma_flops_per_s *= 2;
  EXPECT_NE(key(options), base);
  options.ceilings.reset();
  EXPECT_NE(key(options), base);
  options = Pruning(16);
  options.warm_l2 = true;
  EXPECT_NE(key(options), base);
  options = Pruning(16);
  options.numerics[{1, 8}] = "w4a16.f16.fc1x2.fc2x1";
  EXPECT_NE(key(options), base);
}

TEST(PlannerTest, OnlyTheNumericsClassToKeepIsAdmitted) {
  PlannerOptions options;
  options.candidates_max = kAllCandidates;
  const Interval interval = {1, 8};
  options.numerics[interval] = "w4a16.f16.fc1x2.fc2x1";
  Planner planner(Qwen(), ProfileOf("sm_90a"), TestToolchain(), options);
  ASSERT_OK_AND_ASSIGN(const IntervalPlan kept, planner.Plan(interval));
  for (const PlannedCandidate& candidate : kept.candidates) {
    EXPECT_EQ(candidate.body.numerics_class, "w4a16.f16.fc1x2.fc2x1");
  }
  EXPECT_TRUE(std::any_of(
      kept.rejects.begin(), kept.rejects.end(), [](const auto& reject) {
        return reject.reason.find("fc1x1.fc2x1 is not admitted") !=
               std::string::npos;
      }));
  // Another interval of the same request is free.
  ASSERT_OK_AND_ASSIGN(const IntervalPlan free, planner.Plan({9, 16}));
  EXPECT_GT(free.candidates.size(), kept.candidates.size());
  options.numerics[interval] = "no such class";
  EXPECT_THAT(Planner(Qwen(), ProfileOf("sm_90a"), TestToolchain(), options)
                  .Plan(interval),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("is to be kept")));
}

}  // namespace
}  // namespace kiln
