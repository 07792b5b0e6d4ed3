// Correctness and speed of fused_moe's candidates for many tokens on Hopper,
// through the templates' own host code, but without planner, cache or runtime.
// Needs NVRTC and a driver.
//
//   warpgroup_harness [--nvrtc FILE] [--quick] [--no-bench | --bench-only]
//       [--compile-only ARCH] [--filter TEXT] [--threads N] [--plain]
//       [--codebook 0|1|2] [--bits 1..8] [--shape 0|1|2] [--bench-tokens M,...]
//       [--once AXIS=VALUE,...]
//
// The bench times every legal point beside the best candidates of the tile
// kernel; --plain launches steps without programmatic dependence; --once
// launches one candidate for every layer, for a profiler. Exit status: 0 all
// passed, 1 a case failed, 2 wrong use or missing library.

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "templates/fused_moe/template_cuda.h"
#include "templates/fused_moe/template_warpgroup.h"
#include "tests/gpu/template_harness.h"

namespace kiln::gpu {
namespace {

double StagedMax(const Assignment&) { return 5e-4; }

Assignment Point(int64_t tile, int64_t ctas, int64_t atomic_sum = 0,
                 int64_t decoded = 0) {
  return {{"tokens_tile", tile},
          {"ctas", ctas},
          {"atomic_sum", atomic_sum},
          {"decoded", decoded}};
}

std::vector<Assignment> AllPoints() {
  std::vector<Assignment> points;
  for (const int64_t tile : {32, 64, 96, 128, 160, 192, 224, 256, 288, 320}) {
    for (const int64_t ctas : {1, 2}) {
      points.push_back(Point(tile, ctas));
      points.push_back(Point(tile, ctas, 1));
      points.push_back(Point(tile, ctas, 0, 1));
    }
  }
  return points;
}

std::vector<Case> Cases(bool quick) {
  std::vector<Case> cases;
  const std::vector<Assignment> some = {
      Point(32, 2),       Point(64, 2),       Point(96, 1),    Point(224, 1),
      Point(256, 1),      Point(288, 1),      Point(64, 2, 1), Point(288, 1, 1),
      Point(64, 1, 0, 1), Point(256, 1, 0, 1)};
  const auto add = [&cases](Problem p, std::vector<Assignment> points,
                            std::vector<u32> tokens) {
    p.tokens = std::move(tokens);
    cases.push_back({std::move(p), std::move(points)});
  };
  constexpr const char* kNames[] = {"3inst", "mcg", "mul1"};
  // Every codebook with every number of bits, gate, up and down unequal too.
  for (int codebook = 0; codebook < 3; ++codebook) {
    for (int bits = 1; bits <= 8; ++bits) {
      if (quick && bits != 4 && bits != 3 && codebook != bits % 3) continue;
      Problem p;
      p.name = std::string(kNames[codebook]) + " K" + std::to_string(bits);
      p.hidden = 256;
      p.inter = 384;
      p.experts = 3;
      p.codebook = codebook;
      p.bits = {bits, bits % 8 + 1, (bits + 4) % 8 + 1};
      p.shared = bits % 2 == 0;
      p.bf16 = bits % 3 != 0;
      add(p, some,
          quick ? std::vector<u32>{37, 1540} : std::vector<u32>{1, 37, 1540});
    }
  }
  Problem p;
  p.hidden = 512;
  p.inter = 256;
  p.experts = 12;
  p.top_k = 3;
  p.name = "axes";
  add(p, AllPoints(), {1, 65, 700});
  p.shared = false;
  p.codebook = 2;
  p.name = "axes, per-expert scales, duplicates";
  p.routing = Routing::kDuplicates;
  add(p, AllPoints(), {130, 513});
  p.name = "inactive routes, i64 ids";
  p.routing = Routing::kInactive;
  p.id_i64 = true;
  add(p, some, {3, 300});
  p.name = "one expert";
  p.routing = Routing::kOneExpert;
  p.id_i64 = false;
  p.shared = true;
  add(p, some, {64, 129, 257});
  // Enough of them for weights that are decoded ahead.
  p.name = "many rows";
  p.routing = Routing::kInactive;
  p.experts = 3;
  p.codebook = 1;
  add(p, AllPoints(), {1, 900, 1030});
  Problem big;
  big.name = "Qwen3-30B-A3B H2048 I768 E128";
  big.hidden = 2048;
  big.inter = 768;
  big.experts = 128;
  big.top_k = 8;
  add(big, some,
      quick ? std::vector<u32>{1000} : std::vector<u32>{64, 1000, 4096});
  return cases;
}

class Bench {
 public:
  Bench(const Problem& p, std::vector<u32> tokens, Programs* programs,
        std::string arch, int threads, u32 layers)
      : p_(p),
        tokens_(std::move(tokens)),
        programs_(programs),
        arch_(std::move(arch)),
        threads_(threads),
        layers_(p, *std::max_element(tokens_.begin(), tokens_.end()), layers) {}

  // Launches one candidate for every layer, for a profiler.
  void Once(const Assignment& point) {
    for (const u32 m : tokens_) {
      const Loaded plan(Make(FusedMoeWarpgroupTemplate(),
                             SpecProblem(p_, m, m, arch_), point),
                        programs_);
      const Buffer arena(plan.body().arena.bytes);
      const Buffer out(size_t{m} * p_.hidden * 4);
      for (u32 i = 0; i < layers_.count; ++i) {
        plan.LaunchAll(*layers_.data[i], arena.address(), out.address(), m,
                       nullptr);
      }
      Check(driver.synchronize(), "cuCtxSynchronize");
    }
  }

  void Run() {
    constexpr const char* kNames[] = {"3inst", "mcg", "mul1"};
    std::printf("\n%s %s K%d: us per layer, cold weights, graph of %u layers\n",
                p_.name.c_str(), kNames[p_.codebook], p_.bits[0],
                layers_.count);
    for (const u32 m : tokens_) RunTokens(m);
  }

 private:
  void RunTokens(u32 m) {
    const kiln::Problem problem = SpecProblem(p_, m, m, arch_);
    const double flops =
        6.0 * m * p_.top_k * static_cast<double>(p_.hidden) * p_.inter;
    std::printf("m=%u: %.1f active experts, %.1f GFLOP\n", m,
                layers_.ActiveExperts(p_, m), flops / 1e9);
    std::vector<Timed> tile =
        TimeAll(FusedMoeCudaTemplate(), problem,
                FusedMoeCudaTemplate()->Enumerate(problem, 6).points, m);
    std::printf("  tile      %8.2f us %4.0f TFLOP/s  %s\n", tile[0].us,
                flops / tile[0].us / 1e6,
                AssignmentText(tile[0].point).c_str());
    const ParamSpace space =
        FusedMoeWarpgroupTemplate()->Enumerate(problem, 64);
    std::vector<Timed> points =
        TimeAll(FusedMoeWarpgroupTemplate(), problem, space.points, m);
    for (size_t i = 0; i < std::min<size_t>(8, points.size()); ++i) {
      const auto place =
          std::find(space.points.begin(), space.points.end(), points[i].point) -
          space.points.begin();
      std::printf("  warpgroup %8.2f us %4.0f TFLOP/s  %.2f x  %s  place %td\n",
                  points[i].us, flops / points[i].us / 1e6,
                  tile[0].us / points[i].us,
                  AssignmentText(points[i].point).c_str(), place);
    }
    PrintSteps(problem, tile[0].point, FusedMoeCudaTemplate(), m);
    PrintSteps(problem, points[0].point, FusedMoeWarpgroupTemplate(), m);
    std::fflush(stdout);
    programs_->Clear();
  }

  // The time after every step, so the cost of each beside its neighbours.
  void PrintSteps(const kiln::Problem& problem, const Assignment& point,
                  const KernelTemplate* from, u32 m) {
    const Loaded plan(Make(from, problem, point), programs_);
    const Timing timing(layers_, plan.body().arena.bytes, m, p_.hidden);
    std::printf("  steps %s:", std::string(from->name()).c_str());
    double before = 0;
    for (size_t i = 0; i < plan.body().steps.size(); ++i) {
      const double us = timing.Steps(plan, i + 1, 11);
      std::printf(" %s %.2f", plan.body().steps[i].label.c_str(), us - before);
      before = us;
    }
    std::printf("\n");
  }

  std::vector<Timed> TimeAll(const KernelTemplate* from,
                             const kiln::Problem& problem,
                             const std::vector<Assignment>& points, u32 m) {
    CompilePoints(from, problem, points, programs_, threads_);
    std::vector<Timed> times;
    for (const Assignment& point : points) {
      const Loaded plan(Make(from, problem, point), programs_);
      const Timing timing(layers_, plan.body().arena.bytes, m, p_.hidden);
      Timed timed;
      timed.point = point;
      timed.us = timing.Steps(plan, plan.body().steps.size(), 9);
      times.push_back(std::move(timed));
    }
    std::sort(times.begin(), times.end(), Faster);
    return times;
  }

  Problem p_;
  std::vector<u32> tokens_;
  Programs* programs_;
  std::string arch_;
  int threads_;
  Layers layers_;
};

int Main(int argc, char** argv) {
  const Options o = Parse(argc, argv, {64, 128, 256, 512, 1024, 2048, 4096});
  const Nvrtc nvrtc = OpenNvrtc(o.nvrtc);
  const std::vector<Case> cases = Selected(Cases(o.quick), o);
  if (!o.compile_only.empty()) {
    Programs programs(nvrtc, o.compile_only);
    CompileAll(FusedMoeWarpgroupTemplate(), cases, o.compile_only, &programs,
               o.threads);
    return 0;
  }
  const Device device = OpenDevice(nvrtc);
  if (device.arch != "sm_90a") {
    std::fprintf(stderr, "skipped: no Hopper device\n");
    return 77;
  }
  Programs programs(nvrtc, device.arch);
  bool ok = true;
  if (o.correctness) {
    ok = RunCases(FusedMoeWarpgroupTemplate(), StagedMax, cases, device.arch,
                  &programs, o.threads);
  }
  if (o.bench) {
    Bench bench(BenchProblem(o.shape, o.codebook, o.bits), o.tokens, &programs,
                device.arch, o.threads, 4);
    if (o.once.empty()) {
      bench.Run();
    } else {
      bench.Once(o.once);
    }
  }
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace kiln::gpu

int main(int argc, char** argv) { return kiln::gpu::Main(argc, argv); }
