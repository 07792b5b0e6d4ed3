// What harnesses share that take candidates from the templates' own host code
// (steps, arguments, arena), without planner, cache or runtime.

#ifndef KILN_TESTS_GPU_TEMPLATE_HARNESS_H_
#define KILN_TESTS_GPU_TEMPLATE_HARNESS_H_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "tests/gpu/cuda_harness.h"

namespace kiln::gpu {

// Programmatic dependent launch; set once by main.
inline bool overlap = true;

inline kiln::Problem SpecProblem(const Problem& p, u32 m_min, u32 m_max,
                                 const std::string& arch) {
  kiln::Problem problem;
  RequestGeometry& g = problem.geometry;
  g.hidden = p.hidden;
  g.intermediate = p.inter;
  g.experts = p.experts;
  g.top_k = p.top_k;
  g.weights.codebook = p.codebook == 0   ? Codebook::k3Inst
                       : p.codebook == 1 ? Codebook::kMcg
                                         : Codebook::kMul1;
  g.weights.bits = {.gate = p.bits[0], .up = p.bits[1], .down = p.bits[2]};
  g.weights.shared_scales = p.shared;
  g.io_dtype = p.bf16 ? DType::kBf16 : DType::kF16;
  g.id_dtype = p.id_i64 ? DType::kI64 : DType::kI32;
  // All candidates, those included whose sums have no order.
  g.deterministic = false;
  problem.interval = {m_min, m_max};
  const int level = std::atoi(arch.c_str() + 3);
  problem.device = AssumedProfile({.backend = Backend::kCuda,
                                   .level = level,
                                   .arch_specific = arch.back() == 'a'});
  return problem;
}

// ---- programs --------------------------------------------------------------

class Programs {
 public:
  Programs(const Nvrtc& nvrtc, std::string arch)
      : nvrtc_(nvrtc), arch_(std::move(arch)) {}

  ~Programs() { Clear(); }

  // Compiles what is not there yet.
  void Prepare(const std::vector<SourceUnit>& units, int threads) {
    std::map<std::string, const SourceUnit*> missing;
    for (const SourceUnit& unit : units) {
      if (cubins_.count(unit.text) == 0) missing[unit.text] = &unit;
    }
    std::vector<const SourceUnit*> list;
    for (const auto& [text, unit] : missing) list.push_back(unit);
    std::mutex mutex;
    ParallelFor(list.size(), threads, [&](size_t i) {
      std::string cubin = CompileCubin(nvrtc_, arch_, list[i]->name,
                                       list[i]->text, list[i]->headers);
      const std::lock_guard<std::mutex> lock(mutex);
      cubins_[list[i]->text] = std::move(cubin);
    });
  }

  Handle Function(const SourceUnit& unit, const std::string& entry) {
    Prepare({unit}, 1);
    Handle& module = modules_[unit.text];
    if (module == nullptr) {
      Check(driver.module_load(&module, cubins_[unit.text].data()),
            "cuModuleLoadData");
    }
    Handle function = nullptr;
    Check(driver.function(&function, module, entry.c_str()), entry.c_str());
    return function;
  }

  void Clear() {
    for (auto& [text, module] : modules_) driver.module_unload(module);
    modules_.clear();
  }

 private:
  Nvrtc nvrtc_;
  std::string arch_;
  std::map<std::string, std::string> cubins_;
  std::map<std::string, Handle> modules_;
};

// ---- a candidate, ready to launch ------------------------------------------

class Loaded {
 public:
  Loaded(const Candidate& candidate, Programs* programs)
      : body_(candidate.body) {
    for (const Step& step : body_.steps) {
      const Handle function =
          programs->Function(candidate.units[step.program], step.entry);
      functions_.push_back(function);
      if (step.dynamic_shared_bytes > 40 * 1024) {
        Check(driver.function_set(function, 8,
                                  static_cast<int>(step.dynamic_shared_bytes)),
              "shared memory limit");
      }
    }
  }

  const PlanBody& body() const { return body_; }

  // Registers of step `i`, "!" when it spills, and the clusters that the device
  // holds at once.
  std::string Registers(size_t i) const {
    LaunchConfig config = Config(i, 1, nullptr);
    int clusters = 0;
    driver.active_clusters(&clusters, functions_[i], &config);
    int registers = 0, local = 0;
    driver.function_get(&registers, 4, functions_[i]);
    driver.function_get(&local, 3, functions_[i]);
    return std::to_string(registers) + (local > 0 ? "!" : "") + "c" +
           std::to_string(clusters);
  }

  void Launch(size_t i, const DeviceData& d, Address arena, Address out, u32 m,
              Handle stream) const {
    const Address slots[] = {d.x.address(),
                             d.ids->address(),
                             d.weights.address(),
                             d.w_gate->address(),
                             d.w_up->address(),
                             d.w_down->address(),
                             d.gate_suh.address(),
                             d.up_suh.address(),
                             d.rotations.address(),
                             d.down_svh.address(),
                             out};
    Launch(i, slots, arena, m, stream);
  }

  //   slots: of the parameter block, the output among them
  void Launch(size_t i, std::span<const Address> slots, Address arena, u32 m,
              Handle stream) const {
    const Step& step = body_.steps[i];
    std::vector<u64> values(step.args.size());
    std::vector<void*> args;
    for (size_t a = 0; a < step.args.size(); ++a) {
      const Arg& arg = step.args[a];
      switch (arg.kind) {
        case ArgKind::kParam:
          if (arg.value >= slots.size()) Die(step.entry + ": no such slot");
          values[a] = slots[arg.value];
          break;
        case ArgKind::kArena:
          values[a] = arena + body_.arena.slices[arg.value].offset;
          break;
        case ArgKind::kTokens:
          values[a] = m;
          break;
        default:
          values[a] = arg.value;
      }
      args.push_back(&values[a]);
    }
    LaunchConfig config = Config(i, m, stream);
    if (config.grid[0] == 0 || config.grid[1] == 0) return;
    LaunchAttribute attribute = {};
    attribute.id = LaunchAttribute::kProgrammaticStreamSerialization;
    attribute.value = 1;
    config.attributes = &attribute;
    config.attribute_count = overlap && body_.overlapped && i > 0 ? 1 : 0;
    Check(driver.launch_ex(&config, functions_[i], args.data(), nullptr),
          step.entry.c_str());
  }

  void LaunchAll(const DeviceData& d, Address arena, Address out, u32 m,
                 Handle stream) const {
    for (size_t i = 0; i < body_.steps.size(); ++i) {
      Launch(i, d, arena, out, m, stream);
    }
  }

 private:
  LaunchConfig Config(size_t i, u32 m, Handle stream) const {
    const Step& step = body_.steps[i];
    LaunchConfig config = {};
    for (size_t n = 0; n < 3; ++n) {
      config.grid[n] = static_cast<unsigned>(step.grid[n].Evaluate(m));
      config.block[n] = step.block[n];
    }
    config.shared_bytes = step.dynamic_shared_bytes;
    config.stream = stream;
    return config;
  }

  PlanBody body_;
  std::vector<Handle> functions_;
};

inline Candidate Make(const KernelTemplate* from, const kiln::Problem& problem,
                      const Assignment& assignment) {
  absl::StatusOr<Candidate> candidate = from->Instantiate(problem, assignment);
  if (!candidate.ok()) Die(std::string(candidate.status().message()));
  return *std::move(candidate);
}

inline bool Legal(const KernelTemplate* from, const kiln::Problem& problem,
                  const Assignment& assignment) {
  return from->MakeBody(problem, assignment).ok();
}

// ---- correctness -----------------------------------------------------------

constexpr double kExactMax = 2e-3;  // against float64 without rounding

struct Case {
  Problem problem;
  std::vector<Assignment> points;
};

// The same inputs with NaN wherever no active route leads: weights of inactive
// routes.
inline Data WithDeadNan(const Problem& p, Data d) {
  for (size_t r = 0; r < d.topk_weights.size(); ++r) {
    const int64_t id = p.id_i64 ? d.ids64[r] : d.ids32[r];
    if (id < 0 || id >= static_cast<int64_t>(p.experts)) {
      d.topk_weights[r] = std::nanf("");
    }
  }
  return d;
}

// The same inputs with a NaN in every row of x but the first.
inline Data WithLiveNan(const Problem& p, Data d, u32 tokens) {
  for (u32 t = 1; t < tokens; ++t) {
    d.x[size_t{t} * p.hidden + (t * 37) % p.hidden] = p.bf16 ? 0x7FC0 : 0x7E00;
  }
  return d;
}

inline bool HasRoute(const Problem& p, const Data& d, u32 token) {
  for (u32 j = 0; j < p.top_k; ++j) {
    const size_t r = size_t{token} * p.top_k + j;
    const int64_t id = p.id_i64 ? d.ids64[r] : d.ids32[r];
    if (id >= 0 && id < static_cast<int64_t>(p.experts)) return true;
  }
  return false;
}

// Runs cases of a template: on poisoned and on cleared memory, with NaN in what
// no active route may touch.
class Suite {
 public:
  // Largest error of a candidate against the staged rounding boundaries.
  using StagedMax = double (*)(const Assignment&);

  Suite(const KernelTemplate* from, StagedMax staged_max, Programs* programs,
        std::string arch, int threads)
      : from_(from),
        staged_max_(staged_max),
        programs_(programs),
        arch_(std::move(arch)),
        threads_(threads) {}

  bool Run(const Case& test) {
    const Problem& p = test.problem;
    const u32 capacity = p.tokens.back();
    const Data data = WithDeadNan(p, MakeData(p, capacity, true));
    const Data nan_data = WithLiveNan(p, data, capacity);
    const DeviceData device(p, data), nan_device(p, nan_data);
    std::map<u32, Oracle> oracles;
    for (u32 m : p.tokens) oracles[m] = MakeOracle(p, data, m, threads_);
    std::map<std::pair<u32, std::string>, std::vector<float>> classes;
    double worst_exact = 0, worst_staged = 0;
    u64 runs = 0, failed = 0;
    for (const Assignment& point : test.points) {
      for (u32 m : p.tokens) {
        // Arena and grid of a larger capacity, and of exactly m tokens.
        for (const u32 most : {capacity, m}) {
          const kiln::Problem problem = SpecProblem(p, 1, most, arch_);
          if (!Legal(from_, problem, point)) continue;
          const Candidate candidate = Make(from_, problem, point);
          const Loaded plan(candidate, programs_);
          std::string wrong;
          const std::vector<float> out =
              Launch(plan, p, device, m, 0xFF, &wrong);
          const std::vector<float> again =
              Launch(plan, p, device, m, 0x00, &wrong);
          const bool exactly = candidate.body.deterministic;
          if (!Same(out, again, p.hidden, exactly)) {
            wrong += " second run differs;";
          }
          const double exact =
              WorstError(oracles[m], oracles[m].exact, out, p.hidden);
          const double staged =
              WorstError(oracles[m], oracles[m].staged, out, p.hidden);
          worst_exact = std::max(worst_exact, exact);
          worst_staged = std::max(worst_staged, staged);
          if (exact > kExactMax || staged > staged_max_(point)) {
            char text[96];
            std::snprintf(text, sizeof(text), " error %.2e, staged %.2e;",
                          exact, staged);
            wrong += text;
          }
          const auto [first, fresh] =
              classes.try_emplace({m, candidate.body.numerics_class}, out);
          if (!fresh && !Same(first->second, out, p.hidden, exactly)) {
            wrong += " class differs;";
          }
          CheckNan(Launch(plan, p, nan_device, m, 0xFF, &wrong), out, p,
                   nan_data, m, exactly, &wrong);
          ++runs;
          if (!wrong.empty()) {
            ++failed;
            std::printf("FAIL %s m=%u of %u %s:%s\n", p.name.c_str(), m, most,
                        AssignmentText(point).c_str(), wrong.c_str());
          }
        }
      }
    }
    std::printf("%-34s %4llu runs, worst %.2e exact %.2e staged%s\n",
                p.name.c_str(), static_cast<unsigned long long>(runs),
                worst_exact, worst_staged, failed == 0 ? "" : "  FAILED");
    std::fflush(stdout);
    total_ += runs;
    programs_->Clear();
    return failed == 0;
  }

  u64 total() const { return total_; }

 private:
  // Equal bits, or rows of `width` as near each other as fp32 sums of another
  // order are.
  static bool Same(std::span<const float> a, std::span<const float> b,
                   u32 width, bool exactly) {
    if (exactly) return std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
    for (size_t row = 0; row < a.size(); row += width) {
      double difference = 0, size = 0;
      for (size_t i = row; i < row + width; ++i) {
        difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
        size += double{a[i]} * a[i];
      }
      // False of a NaN too.
      if (!(difference <= 1e-12 * size)) return false;
    }
    return true;
  }

  // Output of one run over an arena full of `fill`.
  static std::vector<float> Launch(const Loaded& plan, const Problem& p,
                                   const DeviceData& device, u32 m,
                                   unsigned char fill, std::string* wrong) {
    Buffer arena(plan.body().arena.bytes);
    Buffer result(size_t{m} * p.hidden * 4);
    Check(driver.fill(arena.address(), fill, arena.bytes()), "cuMemsetD8");
    plan.LaunchAll(device, arena.address(), result.address(), m, nullptr);
    Check(driver.synchronize(), p.name.c_str());
    std::vector<float> out(size_t{m} * p.hidden);
    Check(driver.to_host(out.data(), result.address(), result.bytes()), "copy");
    if (!arena.RedZonesIntact() || !result.RedZonesIntact()) {
      *wrong += " wrote outside its buffers;";
    }
    return out;
  }

  // Row 0 must be as without NaN, the other rows nothing else.
  static void CheckNan(const std::vector<float>& got,
                       const std::vector<float>& clean, const Problem& p,
                       const Data& d, u32 m, bool exactly, std::string* wrong) {
    if (!Same(std::span(got).first(p.hidden), std::span(clean).first(p.hidden),
              p.hidden, exactly)) {
      *wrong += " NaN of another token came in;";
    }
    for (u32 t = 1; t < m; ++t) {
      if (!HasRoute(p, d, t)) continue;
      for (u32 c = 0; c < p.hidden; ++c) {
        if (!std::isnan(got[size_t{t} * p.hidden + c])) {
          *wrong += " NaN got lost;";
          return;
        }
      }
    }
  }

  const KernelTemplate* from_;
  StagedMax staged_max_;
  Programs* programs_;
  std::string arch_;
  int threads_;
  u64 total_ = 0;
};

inline void CompileAll(const KernelTemplate* from,
                       const std::vector<Case>& cases, const std::string& arch,
                       Programs* programs, int threads) {
  std::vector<SourceUnit> units;
  for (const Case& c : cases) {
    const kiln::Problem problem =
        SpecProblem(c.problem, 1, c.problem.tokens.back(), arch);
    for (const Assignment& point : c.points) {
      if (!Legal(from, problem, point)) continue;
      for (SourceUnit& unit :
           from->MakeUnits(problem.geometry, problem.device.target, point)) {
        units.push_back(std::move(unit));
      }
    }
  }
  programs->Prepare(units, threads);
  std::printf("%zu programs compiled for %s\n", units.size(), arch.c_str());
  std::fflush(stdout);
}

// ---- speed -----------------------------------------------------------------

// Compiles the programs of the points that are not there yet.
inline void CompilePoints(const KernelTemplate* from,
                          const kiln::Problem& problem,
                          const std::vector<Assignment>& points,
                          Programs* programs, int threads) {
  std::vector<SourceUnit> units;
  for (const Assignment& point : points) {
    for (SourceUnit& unit :
         from->MakeUnits(problem.geometry, problem.device.target, point)) {
      units.push_back(std::move(unit));
    }
  }
  programs->Prepare(units, threads);
}

// Memory of one candidate for every layer, and its timing.
class Timing {
 public:
  Timing(const Layers& layers, u64 arena_bytes, u32 m, u32 hidden)
      : layers_(layers), m_(m), out_(size_t{m} * hidden * 4) {
    for (u32 layer = 0; layer < layers.count; ++layer) {
      arenas_.push_back(std::make_unique<Buffer>(arena_bytes));
    }
    Check(driver.synchronize(), "cuCtxSynchronize");
  }

  // Microseconds per layer of steps [0, count).
  double Steps(const Loaded& plan, size_t count, int replays) const {
    return TimeGraph(layers_.stream, replays,
                     [&] {
                       for (u32 i = 0; i < layers_.count; ++i) {
                         for (size_t s = 0; s < count; ++s) {
                           plan.Launch(s, *layers_.data[i],
                                       arenas_[i]->address(), out_.address(),
                                       m_, layers_.stream);
                         }
                       }
                     }) /
           layers_.count;
  }

 private:
  const Layers& layers_;
  u32 m_;
  Buffer out_;
  std::vector<std::unique_ptr<Buffer>> arenas_;
};

struct Timed {
  double us = 0;
  Assignment point;
  std::string note;
};

inline bool Faster(const Timed& a, const Timed& b) { return a.us < b.us; }

// ---- command line ----------------------------------------------------------

// "axis=value,...".
inline Assignment ParseAssignment(const std::string& text) {
  Assignment assignment;
  std::istringstream list(text);
  for (std::string axis; std::getline(list, axis, ',');) {
    const size_t equals = axis.find('=');
    if (equals == std::string::npos) Die("--once needs axis=value,...");
    assignment[axis.substr(0, equals)] = std::atoi(axis.c_str() + equals + 1);
  }
  return assignment;
}

inline std::vector<u32> ParseTokens(const std::string& text) {
  std::vector<u32> tokens;
  std::istringstream list(text);
  for (std::string m; std::getline(list, m, ',');) {
    tokens.push_back(static_cast<u32>(std::strtoul(m.c_str(), nullptr, 10)));
  }
  return tokens;
}

// The layers that benches time: --shape.
inline Problem BenchProblem(int shape, int codebook, int bits) {
  Problem p;
  p.codebook = codebook;
  p.bits = {bits, bits, bits};
  p.top_k = 8;
  if (shape == 0) {
    p.name = "Qwen3-30B-A3B H2048 I768 E128 k8";
    p.hidden = 2048;
    p.inter = 768;
    p.experts = 128;
  } else if (shape == 1) {
    p.name = "H7168 I256 E256 k8";
    p.hidden = 7168;
    p.inter = 256;
    p.experts = 256;
  } else {
    p.name = "H1024 I512 E256 k8";
    p.hidden = 1024;
    p.inter = 512;
    p.experts = 256;
  }
  return p;
}

// What every harness takes; its head says what each option does.
struct Options {
  std::string nvrtc, filter, compile_only;
  Assignment once;
  bool quick = false, bench = true, correctness = true;
  int threads = 0, codebook = 1, bits = 4, shape = 0;
  std::vector<u32> tokens;  // of the bench
};

inline Options Parse(int argc, char** argv, std::vector<u32> tokens) {
  Options o;
  o.tokens = std::move(tokens);
  const auto value = [&](int* i) -> std::string {
    if (*i + 1 >= argc) Die(std::string(argv[*i]) + " needs a value");
    return argv[++*i];
  };
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    if (a == "--nvrtc") {
      o.nvrtc = value(&i);
    } else if (a == "--filter") {
      o.filter = value(&i);
    } else if (a == "--compile-only") {
      o.compile_only = value(&i);
    } else if (a == "--codebook") {
      o.codebook = std::atoi(value(&i).c_str());
    } else if (a == "--bits") {
      o.bits = std::atoi(value(&i).c_str());
    } else if (a == "--shape") {
      o.shape = std::atoi(value(&i).c_str());
    } else if (a == "--threads") {
      o.threads = std::atoi(value(&i).c_str());
    } else if (a == "--quick") {
      o.quick = true;
    } else if (a == "--once") {
      o.once = ParseAssignment(value(&i));
      o.correctness = false;
    } else if (a == "--plain") {
      overlap = false;
    } else if (a == "--bench-only") {
      o.correctness = false;
    } else if (a == "--no-bench") {
      o.bench = false;
    } else if (a == "--bench-tokens") {
      o.tokens = ParseTokens(value(&i));
    } else {
      Die("unknown option " + a);
    }
  }
  if (o.codebook < 0 || o.codebook > 2) Die("--codebook is 0, 1 or 2");
  if (o.bits < 1 || o.bits > 8) Die("--bits is 1 to 8");
  if (o.shape < 0 || o.shape > 2) Die("--shape is 0, 1 or 2");
  if (o.tokens.empty()) Die("--bench-tokens needs a number");
  if (o.threads <= 0) {
    o.threads = static_cast<int>(
        std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
  }
  return o;
}

// The cases whose names --filter is part of.
inline std::vector<Case> Selected(std::vector<Case> cases, const Options& o) {
  std::erase_if(cases, [&o](const Case& c) {
    return c.problem.name.find(o.filter) == std::string::npos;
  });
  return cases;
}

// Compiles and runs the cases of a template; whether all passed.
inline bool RunCases(const KernelTemplate* from, Suite::StagedMax staged_max,
                     const std::vector<Case>& cases, const std::string& arch,
                     Programs* programs, int threads) {
  CompileAll(from, cases, arch, programs, threads);
  Suite suite(from, staged_max, programs, arch, threads);
  bool ok = true;
  for (const Case& c : cases) ok = suite.Run(c) && ok;
  std::printf("%llu runs: %s\n", static_cast<unsigned long long>(suite.total()),
              ok ? "passed" : "FAILED");
  std::fflush(stdout);
  return ok;
}

}  // namespace kiln::gpu

#endif  // KILN_TESTS_GPU_TEMPLATE_HARNESS_H_
