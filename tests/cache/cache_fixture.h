// Values for the cache's tests: programs, plans and measurements that depend on
// a seed alone.

#ifndef KILN_TESTS_CACHE_CACHE_FIXTURE_H_
#define KILN_TESTS_CACHE_CACHE_FIXTURE_H_

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/plan_cache.h"
#include "cache/records.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/plan_key.h"
#include "compiler/spec/program.h"

namespace kiln::testing {

// True in the slow form of a test.
inline bool FullTest() { return std::getenv("KILN_TEST_FULL") != nullptr; }

inline std::string RandomBytes(uint64_t seed, size_t size) {
  std::mt19937_64 random(seed);
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random() & 0xFF);
  return bytes;
}

inline Target TestTarget() {
  return {.backend = Backend::kCuda, .level = 90, .arch_specific = true};
}

inline Program MakeProgram(uint64_t seed, size_t binary_bytes = 3000) {
  SourceUnit unit;
  unit.name = "fused_moe/cuda.cu";
  unit.template_version = 3;
  unit.compute_dtype = "f16";
  unit.text = absl::StrCat("#define KILN_SEED ", seed, "\n");
  unit.headers = {{"device/half.h", "half"}, {"device/trellis.h", "trellis"}};
  unit.entries = {"moe_fc1", "moe_fc2"};
  const Toolchain toolchain = {
      .name = "nvrtc", .version = "13.0.88", .content = Sha256("library")};
  Program program;
  program.key = MakeProgramKey(unit, TestTarget(), toolchain);
  program.target = TestTarget();
  program.toolchain = toolchain;
  program.binary = RandomBytes(seed, binary_bytes);
  program.binary_digest = Sha256(program.binary);
  program.kernels = {{.entry = "moe_fc1",
                      .params = {{0, 8}, {8, 8}, {16, 4}},
                      .param_bytes = 20,
                      .registers = 64 + static_cast<uint32_t>(seed % 7),
                      .static_shared_bytes = 1024,
                      .local_bytes = 0,
                      .max_threads = 256},
                     {.entry = "moe_fc2", .params = {}}};
  program.log = seed % 2 == 0 ? "" : "note: a line\nand another\n";
  program.compile_seconds = 0.25 + static_cast<double>(seed);
  return program;
}

inline bool SameProgram(const Program& a, const Program& b) {
  return a.key == b.key && a.target == b.target && a.toolchain == b.toolchain &&
         a.binary == b.binary && a.binary_digest == b.binary_digest &&
         a.kernels == b.kernels && a.log == b.log &&
         a.compile_seconds == b.compile_seconds;
}

inline Plan MakePlan(uint64_t seed, const std::vector<Digest>& programs) {
  Plan plan;
  plan.geometry.hidden = 2048;
  plan.geometry.intermediate = 768;
  plan.geometry.experts = 128;
  plan.geometry.top_k = 8;
  plan.geometry.weights.bits = {4, 4, 4};
  plan.target = TestTarget();
  plan.interval = {.m_min = static_cast<uint32_t>(seed) + 1,
                   .m_max = static_cast<uint32_t>(seed) + 1};
  plan.body.template_name = "fused_moe.cuda";
  plan.body.template_version = 3;
  plan.body.assignment = {{"tokens_tile", 8}, {"warps", 4}};
  plan.body.numerics_class = "ordered";
  plan.body.tolerance = 1e-3;
  plan.body.params = {
      {.name = "x", .dtype = "bf16", .shape = "[m, H]"},
      {.name = "out", .dtype = "f32", .shape = "[m, H]", .output = true}};
  plan.body.arena.Add("routes", 1000);
  plan.body.arena.Add("hidden", 5000);
  for (uint32_t i = 0; i < programs.size(); ++i) {
    Step step;
    step.label = absl::StrCat("step", i);
    step.program = i;
    step.entry = "moe_fc1";
    step.grid = {LaunchDim::Of({.mul = 8, .add = 0, .div = 16}),
                 LaunchDim::Constant(12), LaunchDim::Constant(1)};
    step.block = {128, 1, 1};
    step.dynamic_shared_bytes = 49152;
    step.args = {Arg::Param(0), Arg::Arena(1), Arg::Tokens(), Arg::U32(7),
                 Arg::U64(uint64_t{1} << 63)};
    plan.body.steps.push_back(step);
  }
  plan.programs = programs;
  plan.evidence = {.state = PlanState::kMeasured,
                   .median_ns = 41250.5 + static_cast<double>(seed),
                   .default_median_ns = 50000,
                   .noise_floor = 0.004,
                   .worst_error = 3e-4,
                   .samples = 25,
                   .candidates = 3};
  return plan;
}

inline PlanKey MakeTestPlanKey(const Plan& plan) {
  const CandidateSpace space = {
      .templates = {{.name = plan.body.template_name,
                     .version = plan.body.template_version,
                     .sources = Sha256("sources")}},
      .toolchain = {.name = "nvrtc",
                    .version = "13.0.88",
                    .content = Sha256("library")},
      .candidates_max = 0};
  return MakePlanKey(plan.geometry, plan.interval, AssumedProfile(plan.target),
                     space);
}

inline std::vector<Measurement> MakeMeasurements(uint64_t seed) {
  std::vector<Measurement> measurements(3);
  measurements[0] = {.label = "fused_moe.cuda{tokens_tile=8,warps=4}",
                     .candidate = Sha256(absl::StrCat("won", seed)),
                     .verdict = Verdict::kWon,
                     .worst_error = 3e-4,
                     .numerics_class = "ordered",
                     .arena_bytes = 6144,
                     .registers = 64};
  measurements[1] = {.label = "fused_moe.cuda{tokens_tile=16,warps=4}",
                     .candidate = Sha256(absl::StrCat("lost", seed)),
                     .verdict = Verdict::kLost,
                     .worst_error = 2e-4,
                     .regret = 0.21};
  measurements[2] = {.label = "fused_moe.cuda{tokens_tile=32,warps=4}",
                     .candidate = Sha256(absl::StrCat("rejected", seed)),
                     .verdict = Verdict::kRejected,
                     .reason = "row 3: error 0.7 exceeds 0.001",
                     .worst_error = std::numeric_limits<double>::infinity(),
                     .regret = std::numeric_limits<double>::quiet_NaN()};
  std::mt19937_64 random(seed);
  for (uint32_t block = 0; block < 25; ++block) {
    for (Measurement* measurement : {&measurements[0], &measurements[1]}) {
      measurement->samples.push_back(
          {.block = block,
           .ns = 41000 + static_cast<double>(random() % 1000) / 3});
    }
  }
  return measurements;
}

// Equal in every field, NaN equal to NaN.
inline bool SameMeasurements(const std::vector<Measurement>& a,
                             const std::vector<Measurement>& b) {
  const auto same = [](double x, double y) {
    return x == y || (x != x && y != y);
  };
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].label != b[i].label || a[i].candidate != b[i].candidate ||
        a[i].verdict != b[i].verdict || a[i].reason != b[i].reason ||
        !same(a[i].worst_error, b[i].worst_error) ||
        !same(a[i].regret, b[i].regret) ||
        a[i].numerics_class != b[i].numerics_class ||
        a[i].arena_bytes != b[i].arena_bytes ||
        a[i].registers != b[i].registers || a[i].samples != b[i].samples) {
      return false;
    }
  }
  return true;
}

inline Reject MakeReject(uint64_t seed) {
  Reject reject;
  reject.preimage = MakeProgram(seed + 1'000'000, 1).key.preimage;
  reject.key = Sha256(reject.preimage);
  reject.stage = RejectStage::kCompile;
  reject.reason = "compiler exceeded 30 s";
  reject.log = absl::StrCat("cuda.cu(", seed, "): warning: deep template\n");
  return reject;
}

// A read-write cache with provenance and a clock that stands still.
inline PlanCacheOptions TestOptions(const std::string& directory,
                                    CacheMode mode = CacheMode::kReadWrite) {
  PlanCacheOptions options;
  options.directory = directory;
  options.mode = mode;
  options.provenance = {.host_name = "build-host",
                        .device_name = "Test Device",
                        .tool_version = "0.1.0"};
  options.clock = [] { return int64_t{1'800'000'000}; };
  return options;
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_CACHE_CACHE_FIXTURE_H_
