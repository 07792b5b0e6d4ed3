// Correctness and speed of fused_moe's candidates for few tokens on a GPU,
// through the templates' own host code (steps, arguments, arena), but without
// planner, cache or runtime. Needs NVRTC and a driver.
//
//   stream_harness [--nvrtc FILE] [--quick] [--no-bench | --bench-only]
//       [--compile-only ARCH] [--filter TEXT] [--threads N] [--plain]
//       [--codebook 0|1|2] [--bits 1..8] [--shape 0|1|2] [--bench-tokens M,...]
//       [--once AXIS=VALUE,...]
//
// Every case runs on poisoned and on cleared memory, and with NaN in what no
// active route may touch. The bench times fc1 for all its axes, then the whole
// plan for the best of them and all axes of fc2, beside candidates of the tile
// kernel. --plain launches steps without programmatic dependence; --once
// launches one candidate for every layer, for a profiler. Exit status: 0 all
// passed, 1 a case failed, 2 wrong use or missing library.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/template_cuda.h"
#include "templates/fused_moe/template_stream.h"
#include "tests/gpu/template_harness.h"

namespace kiln::gpu {
namespace {

// Layers of a timed graph: weights are cold.
constexpr u32 kLayers = 16;

struct Split {
  int64_t split = 1;
  int64_t columns = 1;
};

Assignment Stream(int64_t sum, Split fc1, Split fc2, int64_t ctas = 3) {
  return {{"sum", sum},
          {"split_fc1", fc1.split},
          {"columns_fc1", fc1.columns},
          {"split_fc2", fc2.split},
          {"columns_fc2", fc2.columns},
          {"ctas", ctas}};
}

std::vector<int64_t> SumModes(int codebook) {
  if (codebook == 2) return {0, 2, 3};
  return {0, 1};
}

// ---- correctness -----------------------------------------------------------

// Modes that round weights to fp16, as their codebook says, and the others.
double StagedMax(const Assignment& point) {
  return point.at("sum") == 0 ? 5e-4 : 1e-3;
}

std::vector<Case> Cases(bool quick) {
  std::vector<Case> cases;
  const auto add = [&cases](Problem p, std::vector<Assignment> axes,
                            std::vector<u32> tokens) {
    Case c;
    p.tokens = std::move(tokens);
    for (const int64_t sum : SumModes(p.codebook)) {
      for (Assignment point : axes) {
        point["sum"] = sum;
        c.points.push_back(std::move(point));
      }
    }
    c.problem = std::move(p);
    cases.push_back(std::move(c));
  };
  const Assignment plain = Stream(0, {}, {});
  const Assignment split = Stream(0, {2}, {2}, 4);
  for (int codebook = 0; codebook < 3; ++codebook) {
    for (int k = 1; k <= 8; ++k) {
      Problem p;
      p.name =
          "codebook " + std::to_string(codebook) + " K" + std::to_string(k);
      p.codebook = codebook;
      p.bits = {k, k, k};
      add(p, {plain, split}, {1, 5, 16});
    }
  }
  for (int bits = 0; bits < 8; ++bits) {
    Problem p;
    p.shared = (bits & 1) != 0;
    p.id_i64 = (bits & 2) != 0;
    p.bf16 = (bits & 4) != 0;
    p.codebook = bits % 3;
    p.bits = {3, 3, 3};
    p.experts = 12;
    p.top_k = 3;
    p.name = std::string(p.shared ? "shared" : "per-expert") +
             (p.id_i64 ? " i64" : " i32") + (p.bf16 ? " bf16" : " f16");
    add(p, {plain, split}, {1, 5, 16});
    for (const Routing r :
         {Routing::kInactive, Routing::kOneExpert, Routing::kDuplicates}) {
      Problem q = p;
      q.routing = r;
      q.name += r == Routing::kInactive    ? " inactive"
                : r == Routing::kOneExpert ? " one expert"
                                           : " duplicates";
      add(q, {plain, split}, {1, 5, 10, 16});
    }
  }
  const std::array<int, 3> mixes[] = {{2, 4, 3}, {5, 1, 8}, {8, 7, 6}};
  for (const std::array<int, 3>& mix : mixes) {
    Problem p;
    p.bits = mix;
    p.codebook = mix[0] == 5 ? 0 : mix[0] == 2 ? 1 : 2;
    p.name = "mixed bits " + std::to_string(mix[0]) + std::to_string(mix[1]) +
             std::to_string(mix[2]);
    add(p, {plain, split}, {1, 5, 16});
  }
  const auto shape = [&add](std::string name, u32 h, u32 i, u32 e, u32 k,
                            int codebook, int bits, bool shared,
                            Routing routing, std::vector<u32> tokens,
                            std::vector<Assignment> axes) {
    Problem p;
    p.name = std::move(name);
    p.hidden = h;
    p.inter = i;
    p.experts = e;
    p.top_k = k;
    p.codebook = codebook;
    p.bits = {bits, bits, bits};
    p.shared = shared;
    p.routing = routing;
    add(p, std::move(axes), std::move(tokens));
  };
  shape("one expert, one route", 128, 256, 1, 1, 1, 4, true, Routing::kUniform,
        {1, 7, 16}, {plain});
  shape("1024 experts, top 8", 256, 128, 1024, 8, 2, 2, false,
        Routing::kInactive, {1, 4, 5, 16}, {plain});
  shape("top 32", 256, 128, 64, 32, 0, 5, true, Routing::kInactive, {1, 2, 16},
        {plain});
  shape("H384 I640", 384, 640, 6, 2, 2, 6, true, Routing::kUniform, {1, 9, 16},
        {plain, split, Stream(0, {2, 3}, {4, 2})});
  std::vector<Assignment> all;
  for (const Split fc1 : {Split{1}, {2, 3}, {4}, {8, 3}}) {
    for (const Split fc2 : {Split{1, 4}, {2}, {3, 2}, {4}, {6, 2}}) {
      for (const int64_t ctas : {3, 4}) {
        if (quick && (fc1.split + fc2.split + ctas) % 3 != 0) continue;
        all.push_back(Stream(0, fc1, fc2, ctas));
      }
    }
  }
  shape("axes, mcg K4", 1024, 768, 12, 3, 1, 4, true, Routing::kUniform,
        {1, 6, 64}, all);
  shape("axes, mul1 K4 per-expert", 1024, 768, 12, 3, 2, 4, false,
        Routing::kDuplicates, {3, 33}, all);
  const std::vector<Assignment> wide = {
      Stream(0, {4}, {3}), Stream(0, {8}, {6}, 4), Stream(0, {2, 3}, {1, 4})};
  shape("Qwen3-30B-A3B H2048 I768 E128", 2048, 768, 128, 8, 1, 4, true,
        Routing::kUniform, {1, 2, 4, 8, 16, 50}, wide);
  shape("H7168 I256 E256 mul1", 7168, 256, 256, 8, 2, 4, true,
        Routing::kUniform, {1, 4, 16},
        {Stream(0, {8}, {2, 8}), Stream(0, {16}, {})});
  return cases;
}

// ---- speed -----------------------------------------------------------------

class Bench {
 public:
  Bench(const Problem& p, std::vector<u32> tokens, Programs* programs,
        std::string arch, int threads)
      : p_(p),
        tokens_(std::move(tokens)),
        programs_(programs),
        arch_(std::move(arch)),
        threads_(threads),
        layers_(p, *std::max_element(tokens_.begin(), tokens_.end()), kLayers) {
  }

  // Launches one candidate for every layer, for a profiler.
  void Once(const Assignment& point) {
    for (u32 m : tokens_) {
      const Loaded plan(
          Make(FusedMoeStreamTemplate(), SpecProblem(p_, m, m, arch_), point),
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
                p_.name.c_str(), kNames[p_.codebook], p_.bits[0], kLayers);
    for (u32 m : tokens_) RunTokens(m);
  }

 private:
  void RunTokens(u32 m) {
    const double active = layers_.ActiveExperts(p_, m);
    const double bytes = active * p_.hidden * p_.inter *
                         (p_.bits[0] + p_.bits[1] + p_.bits[2]) / 8.0;
    std::printf("m=%u: %.1f active experts, %.1f MB of weights\n", m, active,
                bytes / 1e6);
    const kiln::Problem problem = SpecProblem(p_, m, m, arch_);
    // The tile kernel's best.
    std::vector<Assignment> points =
        FusedMoeCudaTemplate()->Enumerate(problem, 8).points;
    CompilePoints(FusedMoeCudaTemplate(), problem, points, programs_, threads_);
    std::vector<Timed> tile;
    for (const Assignment& point : points) {
      tile.push_back(Time(FusedMoeCudaTemplate(), problem, point, m, 99, 15));
    }
    std::sort(tile.begin(), tile.end(), Faster);
    std::printf("  tile   %7.2f us  %s\n", tile[0].us,
                AssignmentText(tile[0].point).c_str());
    for (const int64_t sum : SumModes(p_.codebook)) {
      Sweep(problem, m, sum, bytes, tile[0].us);
    }
    std::fflush(stdout);
    programs_->Clear();
  }

  void Sweep(const kiln::Problem& problem, u32 m, int64_t sum, double bytes,
             double tile_us) {
    const KernelTemplate* stream = FusedMoeStreamTemplate();
    std::vector<Assignment> first, second;
    // Splits that leave the device with too few or far too many blocks are
    // slow.
    const auto worth = [m](const Split& s) {
      return m <= 2 ? s.columns == 1 : s.split <= 8;
    };
    for (const int64_t ctas : {3, 4}) {
      for (const int64_t split : {1, 2, 4, 8, 16}) {
        for (const int64_t columns : {1, 3}) {
          const Split fc1 = {split, columns};
          const Assignment point = Stream(sum, fc1, {}, ctas);
          if (worth(fc1) && Legal(stream, problem, point)) {
            first.push_back(point);
          }
        }
      }
    }
    CompilePoints(stream, problem, first, programs_, threads_);
    std::vector<Timed> fc1;
    for (const Assignment& point : first) {
      fc1.push_back(Time(stream, problem, point, m, 1, 15));
    }
    std::sort(fc1.begin(), fc1.end(), Faster);
    std::printf("  sum %lld fc1:", static_cast<long long>(sum));
    for (const Timed& t : fc1) {
      std::printf(" %lldx%lldc%lld:%.2f",
                  static_cast<long long>(t.point.at("split_fc1")),
                  static_cast<long long>(t.point.at("columns_fc1")),
                  static_cast<long long>(t.point.at("ctas")), t.us);
    }
    std::printf(" (%s regs)\n", fc1[0].note.c_str());
    std::vector<Timed> whole;
    for (const int64_t ctas : {3, 4}) {
      const auto best = std::find_if(
          fc1.begin(), fc1.end(),
          [ctas](const Timed& t) { return t.point.at("ctas") == ctas; });
      if (best == fc1.end()) continue;
      second.clear();
      for (const int64_t split : {1, 2, 3, 6}) {
        for (const int64_t columns : {1, 2, 4}) {
          Assignment point = best->point;
          point["split_fc2"] = split;
          point["columns_fc2"] = columns;
          if (worth({split, columns}) && Legal(stream, problem, point)) {
            second.push_back(point);
          }
        }
      }
      CompilePoints(stream, problem, second, programs_, threads_);
      for (const Assignment& point : second) {
        whole.push_back(Time(stream, problem, point, m, 99, 11));
      }
    }
    std::sort(whole.begin(), whole.end(), Faster);
    for (size_t i = 0; i < std::min<size_t>(5, whole.size()); ++i) {
      std::printf("  stream %7.2f us  %.0f GB/s, %.2f x  %s regs %s\n",
                  whole[i].us, bytes / whole[i].us / 1e3, tile_us / whole[i].us,
                  AssignmentText(whole[i].point).c_str(),
                  whole[i].note.c_str());
    }
    const bool was = overlap;
    overlap = false;
    const Timed plain = Time(stream, problem, whole[0].point, m, 99, 15);
    overlap = was;
    std::printf("  best without programmatic launch %.2f, worst %.2f\n",
                plain.us, whole.back().us);
  }

  Timed Time(const KernelTemplate* from, const kiln::Problem& problem,
             const Assignment& point, u32 m, size_t steps, int replays) {
    const Loaded plan(Make(from, problem, point), programs_);
    const Timing timing(layers_, plan.body().arena.bytes, m, p_.hidden);
    Timed timed;
    timed.point = point;
    timed.us =
        timing.Steps(plan, std::min(steps, plan.body().steps.size()), replays);
    timed.note = plan.Registers(0) + "/" + plan.Registers(1);
    return timed;
  }

  Problem p_;
  std::vector<u32> tokens_;
  Programs* programs_;
  std::string arch_;
  int threads_;
  Layers layers_;
};

// ---- command line ----------------------------------------------------------

int Main(int argc, char** argv) {
  const Options o = Parse(argc, argv, {1, 2, 4, 8, 16});
  const Nvrtc nvrtc = OpenNvrtc(o.nvrtc);
  if (!o.compile_only.empty()) {
    Programs programs(nvrtc, o.compile_only);
    CompileAll(FusedMoeStreamTemplate(), Selected(Cases(o.quick), o),
               o.compile_only, &programs, o.threads);
    return 0;
  }
  const Device device = OpenDevice(nvrtc);
  Programs programs(nvrtc, device.arch);
  bool ok = true;
  if (o.correctness) {
    ok = RunCases(FusedMoeStreamTemplate(), StagedMax,
                  Selected(Cases(o.quick), o), device.arch, &programs,
                  o.threads);
  }
  if (o.bench) {
    Bench bench(BenchProblem(o.shape, o.codebook, o.bits), o.tokens, &programs,
                device.arch, o.threads);
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
