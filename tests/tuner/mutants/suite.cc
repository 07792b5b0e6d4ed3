#include "tests/tuner/mutants/suite.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/compile_pool.h"
#include "templates/registry.h"
#include "tuner/device.h"
#include "tuner/loaded_plan.h"
#include "tuner/op_bench.h"
#include "tuner/verifier.h"

namespace kiln::testing {
namespace {

constexpr uint64_t kSeed = 3;
constexpr uint32_t kTokensMax = 64;  // of the 8-bit arm of QSRT

RequestGeometry Geometry(int64_t hidden, int64_t intermediate, int64_t experts,
                         int64_t top_k, Codebook codebook, Bits bits) {
  RequestGeometry geometry;
  geometry.hidden = hidden;
  geometry.intermediate = intermediate;
  geometry.experts = experts;
  geometry.top_k = top_k;
  geometry.id_dtype = DType::kI64;
  geometry.weights.codebook = codebook;
  geometry.weights.bits = bits;
  return geometry;
}

RequestGeometry Shared(RequestGeometry geometry) {
  geometry.io_dtype = DType::kF16;
  geometry.id_dtype = DType::kI32;
  geometry.weights.shared_scales = true;
  return geometry;
}

RequestGeometry Linear(int64_t in, int64_t out, Codebook codebook, int bits,
                       bool bias) {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.linear = {
      .in_features = in, .out_features = out, .bits = bits, .bias = bias};
  geometry.weights.codebook = codebook;
  geometry.io_dtype = bias ? DType::kBf16 : DType::kF16;
  return geometry;
}

// decode_max_tokens: 0 for 16 bits alone.
RequestGeometry Qsrt(int64_t hidden, PairKinds pairs, Activation activation,
                     uint32_t decode_max_tokens) {
  RequestGeometry geometry;
  geometry.hidden = hidden;
  geometry.intermediate = 256;
  geometry.experts = 5;
  geometry.top_k = 3;
  geometry.activation = activation;
  geometry.id_dtype = DType::kI64;
  geometry.weights.format = WeightFormat::kQsrt;
  geometry.recipe = decode_max_tokens == 0 ? Recipe::kW4A16 : Recipe::kW4A8;
  geometry.qsrt = {.pairs = pairs, .decode_max_tokens = decode_max_tokens};
  return geometry;
}

// The units of a request with one file replaced.
std::vector<SourceUnit> UnitsOf(const MutantSuite& suite,
                                const MutantRequest& request,
                                const Mutant* mutant) {
  std::vector<SourceUnit> units = request.kernel->MakeUnits(
      request.geometry, suite.device.target, request.assignment);
  if (mutant == nullptr) return units;
  for (SourceUnit& unit : units) {
    if (unit.name == mutant->rule->file) {
      // The text is a prelude and the file.
      const std::string& file = TemplateText(unit.name);
      const size_t at = unit.text.size() - file.size();
      KILN_CHECK(unit.text.substr(at) == file);
      unit.text.replace(at, file.size(), mutant->text);
    }
    for (auto& [name, text] : unit.headers) {
      if (name == mutant->rule->file) text = mutant->text;
    }
  }
  return units;
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const MutantSuite& suite) {
  const Target& target = suite.device.target;
  return target.backend == Backend::kCpu ? OpenCpuDevice(target)
                                         : OpenCudaDevice(0, target);
}

// Runs inside the child: the verdict as "+reason", "-" or "!error".
//   bench: the request's, or null: opens a device of its own.
//   threads: for the oracle.
std::string JudgeHere(const MutantSuite& suite, const MutantRequest& request,
                      const Programs& programs, OpBench* bench, int threads) {
  const auto judge = [&]() -> absl::StatusOr<VerifyResult> {
    std::unique_ptr<Device> device;
    std::unique_ptr<OpBench> own;
    if (bench == nullptr) {
      ASSIGN_OR_RETURN(device, OpenDevice(suite));
      ASSIGN_OR_RETURN(own,
                       OpBench::Create(device.get(), request.geometry, kSeed));
      bench = own.get();
    }
    const Interval interval = {1, request.capacity};
    DeviceProfile profile = suite.device;
    ASSIGN_OR_RETURN(PlanBody body, request.kernel->MakeBody(
                                        {request.geometry, interval, profile},
                                        request.assignment));
    body = WithArenaZones(body);
    std::vector<std::shared_ptr<const Program>> loaded;
    for (const auto& program : programs) {
      RETURN_IF_ERROR(program.status());
      loaded.push_back(*program);
    }
    ASSIGN_OR_RETURN(const LoadedPlan plan,
                     LoadedPlan::Load(bench->device(), request.geometry,
                                      request.capacity, body, loaded));
    RETURN_IF_ERROR(bench->Reserve(request.capacity, body.arena.bytes));
    return Verify(bench, plan, body, VerifyCases(interval), threads);
  };
  const absl::StatusOr<VerifyResult> result = judge();
  if (!result.ok()) {
    return absl::StrCat("!", std::string(result.status().message()));
  }
  if (result->passed) {
    return absl::StrFormat(
        "-worst errors: %.3g float64, %.3g staged, %.3g of a case, %.3g with "
        "one term",
        result->worst_error, result->worst_staged_error,
        result->worst_case_error, result->worst_one_term_error);
  }
  return absl::StrCat("+", result->reason);
}

struct Child {
  pid_t pid = -1;
  int pipe = -1;
  size_t candidate = 0;
  absl::Time deadline;
  std::string said;
};

Verdict VerdictOf(const Child& child, int status, bool late) {
  Verdict verdict;
  verdict.caught = true;
  if (late) {
    verdict.reason = "never ended";
  } else if (WIFSIGNALED(status)) {
    verdict.reason = absl::StrCat("killed by signal ", WTERMSIG(status), " (",
                                  strsignal(WTERMSIG(status)), ")");
  } else if (child.said.empty() || WEXITSTATUS(status) != 0) {
    verdict.reason =
        absl::StrCat("its process ended with code ", WEXITSTATUS(status));
  } else {
    verdict.caught = child.said[0] != '-';
    verdict.reason = child.said.substr(1);
  }
  return verdict;
}

// At most `jobs` children at a time, each with a deadline.
class Children {
 public:
  Children(const VerdictOptions& options, std::vector<Verdict>* verdicts)
      : options_(options), verdicts_(verdicts) {}

  template <class Work>
  void Start(size_t candidate, const Work& work) {
    while (running_.size() >= static_cast<size_t>(options_.jobs)) Wait();
    int ends[2];
    KILN_CHECK(pipe(ends) == 0);
    Child child;
    child.candidate = candidate;
    child.deadline = absl::Now() + absl::Seconds(options_.seconds_max);
    child.pid = fork();
    KILN_CHECK(child.pid >= 0);
    if (child.pid == 0) {
      close(ends[0]);
      const std::string said = work();
      const ssize_t written = write(ends[1], said.data(), said.size());
      _exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
    }
    close(ends[1]);
    child.pipe = ends[0];
    running_.push_back(child);
  }

  void Finish() {
    while (!running_.empty()) Wait();
  }

 private:
  // Until one child has ended.
  void Wait() {
    const size_t before = running_.size();
    while (running_.size() == before) {
      std::vector<pollfd> polls;
      for (const Child& child : running_) {
        polls.push_back({.fd = child.pipe, .events = POLLIN, .revents = 0});
      }
      poll(polls.data(), polls.size(), 100);
      for (size_t i = polls.size(); i-- > 0;) {
        Child& child = running_[i];
        const bool late = absl::Now() > child.deadline;
        if (late) kill(child.pid, SIGKILL);
        if (polls[i].revents != 0 && !late) {
          char bytes[1024];
          const ssize_t count = read(child.pipe, bytes, sizeof(bytes));
          if (count > 0) {
            child.said.append(bytes, static_cast<size_t>(count));
            continue;
          }
        } else if (!late) {
          continue;
        }
        int status = 0;
        waitpid(child.pid, &status, 0);
        close(child.pipe);
        (*verdicts_)[child.candidate] = VerdictOf(child, status, late);
        running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }

  const VerdictOptions& options_;
  std::vector<Verdict>* verdicts_;
  std::vector<Child> running_;
};

}  // namespace

absl::StatusOr<MutantSuite> CpuSuite(const std::string& cc_cpu) {
  MutantSuite suite;
  const KernelTemplate* const moe = FindTemplate("fused_moe.cpu");
  const KernelTemplate* const linear = FindTemplate("linear.cpu");
  const KernelTemplate* const qsrt = FindTemplate("fused_moe.qsrt_cpu");
  KILN_CHECK(moe != nullptr && linear != nullptr && qsrt != nullptr);
  // One target for all machines, so that the same mutants are caught on each.
  ASSIGN_OR_RETURN(const Target target, ParseTarget("cpu-x86-64-v3"));
  ASSIGN_OR_RETURN(suite.device, HostCpuProfile(target));
  suite.device.multiprocessors = 2;
  ASSIGN_OR_RETURN(suite.compiler, ProbeCcCpu(cc_cpu));
  suite.rules = CpuMutationRules();
  suite.excuses = CpuExcuses();
  const auto axes = [](int64_t tokens, int64_t channels, int64_t unroll) {
    return Assignment{{"channels_tile", channels},
                      {"k_tile", 64},
                      {"threads", 2},
                      {"tokens_tile", tokens},
                      {"unroll", unroll}};
  };
  // Two chunks of 512 channels, the second ragged; sums in registers.
  suite.requests.push_back({"registers", moe,
                            Geometry(640, 384, 5, 3, Codebook::kMcg,
                                     {.gate = 3, .up = 3, .down = 3}),
                            axes(2, 64, 1), 19});
  // Weights through a buffer; a ragged last strip; the other input types.
  suite.requests.push_back({"buffer", moe,
                            Shared(Geometry(384, 640, 4, 2, Codebook::k3Inst,
                                            {.gate = 4, .up = 4, .down = 4})),
                            axes(8, 256, 1), 21});
  // Few channels, so that activations may be large; one row per tile.
  suite.requests.push_back({"rows", moe,
                            Geometry(256, 128, 6, 2, Codebook::kMul1,
                                     {.gate = 2, .up = 2, .down = 2}),
                            axes(1, 64, 2), 17});
  // Two chunks of 512 channels on either side, the second ragged, and a ragged
  // last strip.
  suite.requests.push_back({"linear, bias", linear,
                            Linear(1152, 640, Codebook::kMcg, 3, true),
                            axes(8, 256, 1), 21});
  suite.requests.push_back({"linear", linear,
                            Linear(128, 384, Codebook::kMul1, 2, false),
                            axes(2, 64, 2), 17});
  // Each kind of pairs, arm and decoder; activations of each expert, then
  // scales of each.
  suite.requests.push_back({"qsrt, 8 bits",
                            qsrt,
                            Shared(Qsrt(640, PairKinds::kP24P33,
                                        Activation::kPerExpert, kTokensMax)),
                            {{"activation_bits", 8},
                             {"channels_tile", 256},
                             {"codewords", 0},
                             {"k_tile", 32},
                             {"row_group", 2},
                             {"threads", 2},
                             {"tokens_tile", 4}},
                            19});
  suite.requests.push_back({"qsrt, 16 bits",
                            qsrt,
                            Qsrt(384, PairKinds::kP33P43, Activation::kSitu, 0),
                            {{"activation_bits", 16},
                             {"channels_tile", 128},
                             {"codewords", 1},
                             {"k_tile", 128},
                             {"row_group", 1},
                             {"threads", 2},
                             {"tokens_tile", 2}},
                            17});
  return suite;
}

absl::StatusOr<MutantSuite> CudaSuite(const std::string& target_name) {
  MutantSuite suite;
  const KernelTemplate* const moe = FindTemplate("fused_moe.cuda");
  KILN_CHECK(moe != nullptr);
  ASSIGN_OR_RETURN(const Target target, ParseTarget(target_name));
  suite.device = AssumedProfile(target);
  ASSIGN_OR_RETURN(suite.compiler, ProbeNvrtc({}));
  suite.rules = CudaMutationRules();
  suite.excuses = CudaExcuses();
  const auto axes = [](int64_t tokens, int64_t channels, int64_t stages,
                       int64_t split1, int64_t split2) {
    return Assignment{{"channels_tile", channels}, {"k_tile", 64},
                      {"split_fc1", split1},       {"split_fc2", split2},
                      {"stages", stages},          {"sum", 0},
                      {"tokens_tile", tokens},     {"warps", 4}};
  };
  suite.requests.push_back({"narrow", moe,
                            Geometry(640, 384, 5, 3, Codebook::kMcg,
                                     {.gate = 3, .up = 3, .down = 3}),
                            axes(8, 128, 3, 1, 1), 19});
  suite.requests.push_back({"split", moe,
                            Shared(Geometry(512, 640, 6, 3, Codebook::k3Inst,
                                            {.gate = 4, .up = 5, .down = 4})),
                            axes(32, 128, 2, 4, 2), 61});
  // As many routes as the warps that sort have threads: the last has some too.
  suite.requests.push_back({"large", moe,
                            Geometry(512, 256, 9, 4, Codebook::kMul1,
                                     {.gate = 8, .up = 8, .down = 2}),
                            axes(16, 64, 4, 1, 2), 256});
  // Weights before their affine map.
  Assignment biased = axes(8, 128, 2, 2, 1);
  biased["sum"] = 3;
  suite.requests.push_back({"biased", moe,
                            Shared(Geometry(512, 384, 6, 3, Codebook::kMul1,
                                            {.gate = 4, .up = 3, .down = 4})),
                            biased, 23});
  const auto real = [](int64_t hidden, int64_t inter, int64_t experts,
                       int64_t top_k, int bits) {
    return Geometry(hidden, inter, experts, top_k, Codebook::kMcg,
                    {.gate = bits, .up = bits, .down = bits});
  };
  suite.originals.push_back({"64 experts", moe, real(2048, 1024, 64, 8, 4),
                             axes(16, 128, 3, 1, 1), 64});
  suite.originals.push_back({"128 experts, split", moe,
                             Shared(real(2048, 768, 128, 8, 3)),
                             axes(8, 64, 3, 4, 2), 16});
  suite.originals.push_back(
      {"wide", moe, real(7168, 2048, 4, 2, 4), axes(32, 128, 3, 1, 1), 40});
  suite.originals.push_back({"wide, split", moe, real(7168, 2048, 4, 2, 5),
                             axes(32, 128, 2, 8, 4), 40});
  suite.originals.push_back(
      {"deep", moe, real(4096, 14336, 2, 1, 4), axes(64, 128, 2, 2, 4), 40});
  return suite;
}

bool HasGpu() {
  const pid_t child = fork();
  KILN_CHECK(child >= 0);
  if (child == 0) _exit(ListCudaDevices().empty() ? 1 : 0);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool Contains(const MutantSuite& suite, const MutantRequest& request,
              absl::string_view file) {
  const std::vector<SourceUnit> units = UnitsOf(suite, request, nullptr);
  return std::any_of(units.begin(), units.end(), [&](const SourceUnit& unit) {
    return unit.name == file ||
           std::any_of(
               unit.headers.begin(), unit.headers.end(),
               [&](const auto& header) { return header.first == file; });
  });
}

absl::StatusOr<std::vector<Mutant>> AllMutants(const MutantSuite& suite) {
  std::vector<Mutant> all;
  std::set<const MutationRule*> used;
  std::set<std::string> files;
  for (const MutationRule& rule : suite.rules) files.insert(rule.file);
  for (const std::string& file : files) {
    // Two rules may make the same change.
    std::set<std::string> texts;
    for (Mutant& mutant : MakeMutants(file, TemplateText(file), suite.rules)) {
      used.insert(mutant.rule);
      if (!texts.insert(mutant.text).second) continue;
      all.push_back(std::move(mutant));
    }
  }
  for (const MutationRule& rule : suite.rules) {
    if (used.contains(&rule)) continue;
    return absl::NotFoundError(absl::StrCat(
        "rule \"", rule.rule, "\": `", rule.find, "` is nowhere in ", rule.file,
        rule.scope[0] == '\0' ? "" : " in ", rule.scope,
        "; the template has changed, so must the rule"));
  }
  // In the order of the table.
  std::stable_sort(
      all.begin(), all.end(),
      [](const Mutant& a, const Mutant& b) { return a.rule < b.rule; });
  return all;
}

absl::StatusOr<std::vector<Programs>> CompileMutants(
    const MutantSuite& suite, const MutantRequest& request,
    const std::vector<const Mutant*>& mutants, int jobs) {
  std::vector<CompileJob> work;
  std::vector<const Mutant*> candidates = {nullptr};
  candidates.insert(candidates.end(), mutants.begin(), mutants.end());
  size_t units = 0;
  for (const Mutant* mutant : candidates) {
    const std::vector<SourceUnit> made = UnitsOf(suite, request, mutant);
    units = made.size();
    for (const SourceUnit& unit : made) {
      work.push_back({unit, suite.device.target});
    }
  }
  PoolOptions options;
  options.jobs = jobs;
  CompilePool pool(options, {suite.compiler});
  ASSIGN_OR_RETURN(std::vector<CompileResult> compiled, pool.Run(work));
  std::vector<Programs> programs(candidates.size());
  for (size_t i = 0; i < work.size(); ++i) {
    absl::StatusOr<Program> program =
        MakeProgram(work[i], suite.compiler.toolchain, std::move(compiled[i]));
    Programs& own = programs[i / units];
    if (program.ok()) {
      own.push_back(std::make_shared<const Program>(*std::move(program)));
    } else {
      own.push_back(program.status());
    }
  }
  return programs;
}

absl::StatusOr<std::vector<Verdict>> Judge(
    const MutantSuite& suite, const MutantRequest& request,
    const std::vector<const Programs*>& candidates,
    const VerdictOptions& options) {
  std::vector<Verdict> verdicts(candidates.size());
  std::unique_ptr<Device> device;
  std::unique_ptr<OpBench> bench;
  // On the CPU the children share inputs and answers; a CUDA context cannot be
  // shared with a child.
  if (suite.device.target.backend == Backend::kCpu) {
    ASSIGN_OR_RETURN(device, OpenDevice(suite));
    ASSIGN_OR_RETURN(bench,
                     OpBench::Create(device.get(), request.geometry, kSeed));
    for (const VerifyCase& test : VerifyCases({1, request.capacity})) {
      RETURN_IF_ERROR(bench->AddInputs(test.kind, test.draw, test.m).status());
      bench->workload().Expected(test.kind, test.draw, test.rows, 2,
                                 test.kind == DrawKind::kUniform
                                     ? ReferenceMode::kFloat64
                                     : ReferenceMode::kSequential);
    }
  }
  Children children(options, &verdicts);
  const int threads = candidates.size() == 1 ? options.jobs : 1;
  for (size_t i = 0; i < candidates.size(); ++i) {
    children.Start(i, [&] {
      return JudgeHere(suite, request, *candidates[i], bench.get(), threads);
    });
  }
  children.Finish();
  return verdicts;
}

}  // namespace kiln::testing
