#include "tuner/measure_ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/compile_pool.h"
#include "templates/registry.h"
#include "tuner/loaded_plan.h"
#include "tuner/op_bench.h"

namespace kiln {
namespace {

constexpr Codebook kCodebooks[] = {Codebook::k3Inst, Codebook::kMcg,
                                   Codebook::kMul1};
constexpr int kRuns = 9;

// Compiles units for the device; one program per unit, in order.
absl::StatusOr<std::vector<std::shared_ptr<const Program>>> CompileAll(
    const std::vector<SourceUnit>& units, const Target& target,
    const CompilerSetup& setup, int jobs) {
  std::vector<CompileJob> work;
  for (const SourceUnit& unit : units) work.push_back({unit, target});
  PoolOptions options;
  options.jobs = jobs;
  CompilePool pool(options, {setup});
  ASSIGN_OR_RETURN(std::vector<CompileResult> results, pool.Run(work));
  std::vector<std::shared_ptr<const Program>> programs;
  for (size_t i = 0; i < work.size(); ++i) {
    absl::StatusOr<Program> program =
        MakeProgram(work[i], setup.toolchain, std::move(results[i]));
    if (!program.ok()) return Annotate(program.status(), units[i].name);
    programs.push_back(std::make_shared<const Program>(*std::move(program)));
  }
  return programs;
}

// Seconds of the fastest of a few runs.
absl::StatusOr<double> BestSeconds(Device* device,
                                   const std::function<absl::Status()>& work) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Replay> replay, device->Record(work));
  double best = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kRuns; ++run) {
    ASSIGN_OR_RETURN(const double ns, replay->Run());
    best = std::min(best, ns);
  }
  return best / 1e9;
}

// One expert that every token uses.
RequestGeometry OneExpert(Codebook codebook, int bits) {
  RequestGeometry geometry;
  geometry.hidden = 1024;
  geometry.intermediate = 1024;
  geometry.experts = 1;
  geometry.top_k = 1;
  geometry.weights.codebook = codebook;
  geometry.weights.bits = {bits, bits, bits};
  return geometry;
}

double WeightsOf(const RequestGeometry& geometry) {
  return 3.0 * static_cast<double>(geometry.hidden) *
         static_cast<double>(geometry.intermediate);
}

// The CPU. --------------------------------------------------------------------

// Bytes per second of all threads that read memory no cache holds.
absl::StatusOr<double> ReadRateOfCpu(Device* device) {
  const DeviceProfile& profile = device->profile();
  const auto threads =
      static_cast<size_t>(std::max(1, profile.multiprocessors));
  const uint64_t bytes =
      std::clamp<uint64_t>(4 * static_cast<uint64_t>(profile.l2_bytes),
                           uint64_t{256} << 20, uint64_t{1} << 30);
  ASSIGN_OR_RETURN(const DeviceBuffer buffer,
                   DeviceBuffer::Allocate(device, bytes));
  RETURN_IF_ERROR(device->Fill(buffer.data(), 1, bytes));
  const auto* words = static_cast<const uint64_t*>(buffer.data());
  const size_t share = bytes / sizeof(uint64_t) / threads;
  std::atomic<uint64_t> total = 0;
  ASSIGN_OR_RETURN(const double seconds, BestSeconds(device, [&] {
                     std::vector<std::thread> pool;
                     for (size_t t = 0; t < threads; ++t) {
                       pool.emplace_back([&, t] {
                         uint64_t sum[8] = {};
                         const uint64_t* at = words + t * share;
                         for (size_t i = 0; i + 8 <= share; i += 8) {
                           for (size_t j = 0; j < 8; ++j) sum[j] += at[i + j];
                         }
                         for (const uint64_t part : sum) total += part;
                       });
                     }
                     for (std::thread& thread : pool) thread.join();
                     return absl::OkStatus();
                   }));
  return static_cast<double>(share * threads * sizeof(uint64_t)) / seconds;
}

// A candidate of the fused_moe template with `rows` rows per tile: the first of
// its order.
absl::StatusOr<Candidate> CandidateWithRows(const RequestGeometry& geometry,
                                            const DeviceProfile& device,
                                            uint32_t rows) {
  const Problem problem = {geometry, {1, rows}, device};
  for (const KernelTemplate* from :
       TemplatesFor(geometry, device.target.backend)) {
    RETURN_IF_ERROR(from->Supports(geometry, device.target));
    const ParamSpace space =
        from->Enumerate(problem, std::numeric_limits<size_t>::max());
    for (const Assignment& point : space.points) {
      const auto tile = point.find("tokens_tile");
      if (tile == point.end() || tile->second != rows) continue;
      return from->Instantiate(problem, point);
    }
  }
  return absl::UnimplementedError(
      absl::StrCat("no template has tiles of ", rows, " rows"));
}

struct CpuCase {
  RequestGeometry geometry;
  uint32_t rows = 1;
  Candidate candidate;
};

absl::StatusOr<double> SecondsOf(
    Device* device, const CpuCase& test,
    const std::shared_ptr<const Program>& program) {
  const PlanBody& body = test.candidate.body;
  ASSIGN_OR_RETURN(
      const LoadedPlan plan,
      LoadedPlan::Load(device, test.geometry, test.rows, body, {program}));
  ASSIGN_OR_RETURN(const std::unique_ptr<OpBench> bench,
                   OpBench::Create(device, test.geometry, /*seed=*/1));
  RETURN_IF_ERROR(bench->Reserve(test.rows, body.arena.bytes));
  ASSIGN_OR_RETURN(const size_t inputs,
                   bench->AddInputs(DrawKind::kUniform, 0, test.rows));
  const std::vector<uint64_t> params = bench->Params(inputs);
  return BestSeconds(device, [&] {
    return plan.Launch(test.rows, params, bench->arena().data(),
                       bench->arena().bytes());
  });
}

absl::StatusOr<Ceilings> MeasureCpu(Device* device, const CompilerSetup& setup,
                                    const MeasureOptions& options) {
  constexpr uint32_t kManyRows = 16;
  Ceilings ceilings;
  options.progress("read");
  ASSIGN_OR_RETURN(ceilings.read_bytes_per_s, ReadRateOfCpu(device));
  // The first two cases differ by their rows alone.
  std::vector<CpuCase> cases;
  std::vector<SourceUnit> units;
  const auto add = [&](Codebook codebook, int bits,
                       uint32_t rows) -> absl::Status {
    CpuCase test;
    test.geometry = OneExpert(codebook, bits);
    test.rows = rows;
    ASSIGN_OR_RETURN(test.candidate,
                     CandidateWithRows(test.geometry, device->profile(), rows));
    units.push_back(test.candidate.units.at(0));
    cases.push_back(std::move(test));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(add(Codebook::kMcg, options.bits_max, kManyRows));
  RETURN_IF_ERROR(add(Codebook::kMcg, options.bits_max, 1));
  for (const Codebook codebook : kCodebooks) {
    for (int bits = options.bits_min; bits <= options.bits_max; ++bits) {
      if (codebook == Codebook::kMcg && bits == options.bits_max) continue;
      RETURN_IF_ERROR(add(codebook, bits, 1));
    }
  }
  options.progress(absl::StrCat("compiling ", units.size(), " programs"));
  ASSIGN_OR_RETURN(
      const std::vector<std::shared_ptr<const Program>> programs,
      CompileAll(units, device->profile().target, setup, options.jobs));
  options.progress("mma");
  ASSIGN_OR_RETURN(const double many, SecondsOf(device, cases[0], programs[0]));
  ASSIGN_OR_RETURN(const double one, SecondsOf(device, cases[1], programs[1]));
  // A machine that is busy may claim that more rows are no slower.
  const double row = std::max((many - one) / (kManyRows - 1), one / 1000);
  const double weights = WeightsOf(cases[0].geometry);
  ceilings.mma_flops_per_s = 2 * weights / row;
  for (size_t i = 1; i < cases.size(); ++i) {
    const Weights& what = cases[i].geometry.weights;
    options.progress(absl::StrCat("decode ", CodebookName(what.codebook), " K",
                                  what.bits.gate));
    ASSIGN_OR_RETURN(const double seconds,
                     SecondsOf(device, cases[i], programs[i]));
    ceilings.decode_weights_per_s[{what.codebook, what.bits.gate}] =
        weights / std::max(seconds - row, seconds / 10);
  }
  return ceilings;
}

// A GPU. ----------------------------------------------------------------------

// KILN_CEILING of ceilings.cu.
enum class Loop { kRead, kDecode, kHash, kMma };

constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kBlocksPerSm = 4;
constexpr double kTilesPerRound = 16;  // of 256 weights, per warp
constexpr double kMmasPerRound = 16;   // of 16 x 8 x 16, per warp
constexpr uint32_t kRounds = 4000;

SourceUnit LoopUnit(Loop loop, Codebook codebook, int bits) {
  SourceUnit unit;
  unit.name = "tuner/ceilings.cu";
  unit.template_version = 1;
  unit.compute_dtype = "f16";
  unit.text = absl::StrCat("#define KILN_CEILING ", static_cast<int>(loop),
                           "\n#define KILN_CODEBOOK ",
                           static_cast<int>(codebook), "\n#define KILN_BITS ",
                           bits, "\n", CeilingKernels().at(0).second);
  unit.headers = DeviceHeaders();
  unit.entries = {"kiln_ceiling"};
  return unit;
}

// Seconds of one launch over `bytes` bytes of data.
absl::StatusOr<double> SecondsOf(Device* device,
                                 const std::shared_ptr<const Program>& program,
                                 const DeviceBuffer& data, uint64_t bytes,
                                 uint32_t rounds) {
  PlanBody body;
  body.template_name = "ceilings";
  body.template_version = 1;
  body.numerics_class = "none";
  body.params = {{"data", "u8", "[bytes]", false}, {"out", "u32", "[1]", true}};
  Step step;
  step.label = "loop";
  step.entry = "kiln_ceiling";
  const auto blocks = kBlocksPerSm * static_cast<uint32_t>(std::max(
                                         1, device->profile().multiprocessors));
  step.grid = {LaunchDim::Constant(blocks), LaunchDim::Constant(1),
               LaunchDim::Constant(1)};
  step.block = {kThreads, 1, 1};
  step.args = {Arg::Param(0), Arg::Param(1), Arg::U64(bytes / 16),
               Arg::U32(rounds)};
  body.steps = {step};
  ASSIGN_OR_RETURN(const LoadedPlan plan,
                   LoadedPlan::Load(device, OneExpert(Codebook::kMcg, 4), 1,
                                    body, {program}));
  ASSIGN_OR_RETURN(const DeviceBuffer out, DeviceBuffer::Allocate(device, 256));
  const std::vector<uint64_t> params = {reinterpret_cast<uint64_t>(data.data()),
                                        reinterpret_cast<uint64_t>(out.data())};
  return BestSeconds(device,
                     [&] { return plan.Launch(1, params, nullptr, 0); });
}

// A ceiling, and of which weights.
struct Case {
  Loop loop;
  TrellisRate rate;
};

std::vector<Case> GpuCases(const MeasureOptions& options) {
  std::vector<Case> cases = {{Loop::kRead, {Codebook::kMcg, 4}},
                             {Loop::kMma, {Codebook::kMcg, 4}}};
  for (const Loop loop : {Loop::kDecode, Loop::kHash}) {
    for (const Codebook codebook : kCodebooks) {
      for (int bits = options.bits_min; bits <= options.bits_max; ++bits) {
        cases.push_back({loop, {codebook, bits}});
      }
    }
  }
  return cases;
}

absl::StatusOr<Ceilings> MeasureGpu(Device* device, const CompilerSetup& setup,
                                    const MeasureOptions& options) {
  const std::vector<Case> cases = GpuCases(options);
  const std::vector<SourceUnit> units = CeilingUnits(options);
  options.progress(absl::StrCat("compiling ", units.size(), " programs"));
  ASSIGN_OR_RETURN(
      const std::vector<std::shared_ptr<const Program>> programs,
      CompileAll(units, device->profile().target, setup, options.jobs));
  // Several times the L2, so that what is read comes from memory.
  const uint64_t bytes = std::max<uint64_t>(
      uint64_t{1} << 30, 8 * static_cast<uint64_t>(device->profile().l2_bytes));
  ASSIGN_OR_RETURN(const DeviceBuffer data,
                   DeviceBuffer::Allocate(device, bytes));
  RETURN_IF_ERROR(device->Fill(data.data(), 0x5A, bytes));
  const double warps = static_cast<double>(kBlocksPerSm * kWarps) *
                       std::max(1, device->profile().multiprocessors);
  Ceilings ceilings;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& test = cases[i];
    options.progress(absl::StrCat("ceiling ", i + 1, "/", cases.size()));
    ASSIGN_OR_RETURN(const double seconds,
                     SecondsOf(device, programs[i], data, bytes, kRounds));
    const double weights = warps * kTilesPerRound * 256 * kRounds;
    switch (test.loop) {
      case Loop::kRead:
        ceilings.read_bytes_per_s = static_cast<double>(bytes) / seconds;
        break;
      case Loop::kMma:
        ceilings.mma_flops_per_s =
            warps * kMmasPerRound * kRounds * (2.0 * 16 * 8 * 16) / seconds;
        break;
      case Loop::kDecode:
        ceilings.decode_weights_per_s[test.rate] = weights / seconds;
        break;
      case Loop::kHash:
        ceilings.hash_weights_per_s[test.rate] = weights / seconds;
        break;
    }
  }
  return ceilings;
}

}  // namespace

std::vector<SourceUnit> CeilingUnits(const MeasureOptions& options) {
  std::vector<SourceUnit> units;
  for (const Case& test : GpuCases(options)) {
    units.push_back(LoopUnit(test.loop, test.rate.first, test.rate.second));
  }
  return units;
}

absl::StatusOr<Ceilings> MeasureCeilings(Device* device,
                                         const CompilerSetup& setup,
                                         const MeasureOptions& options) {
  MeasureOptions told = options;
  if (!told.progress) told.progress = [](const std::string&) {};
  return device->profile().target.backend == Backend::kCpu
             ? MeasureCpu(device, setup, told)
             : MeasureGpu(device, setup, told);
}

}  // namespace kiln
