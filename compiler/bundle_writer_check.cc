#include "compiler/bundle_writer_check.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "runtime/bundle_format.h"

namespace kiln {
namespace {

absl::Status CheckBinary(const Program& program) {
  const std::string name = program.key.digest.Short();
  if (program.binary.empty()) {
    return absl::DataLossError(
        absl::StrCat("program ", name, ": its binary is empty"));
  }
  RETURN_IF_ERROR(CheckCount(absl::StrCat("program ", name, ": binary bytes"),
                             program.binary.size(),
                             KILN_FORMAT_BINARY_BYTES_MAX));
  const Digest digest = Sha256(program.binary);
  if (digest != program.binary_digest) {
    return absl::DataLossError(absl::StrCat(
        "program ", name, ": its binary hashes to ", digest.ToHex(),
        ", recorded is ", program.binary_digest.ToHex()));
  }
  return absl::OkStatus();
}

absl::Status CheckKernels(const Program& program) {
  const std::string name = program.key.digest.Short();
  if (program.kernels.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("program ", name, ": no kernels"));
  }
  RETURN_IF_ERROR(CheckCount(absl::StrCat("program ", name, ": kernels"),
                             program.kernels.size(),
                             KILN_FORMAT_PROGRAM_KERNELS_MAX));
  const Kernel* previous = nullptr;
  for (const Kernel& kernel : program.kernels) {
    const std::string what =
        absl::StrCat("program ", name, ": kernel ", kernel.entry);
    if (kernel.entry.empty() ||
        (previous != nullptr && previous->entry >= kernel.entry)) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": names must be set, distinct and sorted"));
    }
    previous = &kernel;
    RETURN_IF_ERROR(CheckCount(absl::StrCat(what, ": parameters"),
                               kernel.params.size(),
                               KILN_FORMAT_KERNEL_PARAMS_EACH_MAX));
    RETURN_IF_ERROR(CheckCount(absl::StrCat(what, ": parameter bytes"),
                               kernel.param_bytes,
                               KILN_FORMAT_ARG_BLOCK_BYTES_MAX));
    uint64_t end = 0;
    for (const KernelParam& param : kernel.params) {
      if (param.bytes == 0 || param.offset < end) {
        return absl::InvalidArgumentError(
            absl::StrCat(what, ": parameters are empty or overlap"));
      }
      end = uint64_t{param.offset} + param.bytes;
    }
    if (end > kernel.param_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": parameters end at ", end, ", block has ",
                       kernel.param_bytes, " bytes"));
    }
    const bool whole = kernel.params.empty()
                           ? kernel.param_bytes == 0
                           : kernel.params.size() == 1 &&
                                 kernel.params[0].offset == 0 &&
                                 end == kernel.param_bytes;
    if (program.target.backend == Backend::kCpu && !whole) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, ": a CPU kernel declares one parameter that covers its ",
          kernel.param_bytes, " argument bytes"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckLaunch(const Step& step, const Kernel& kernel,
                         Backend backend, uint32_t m_max) {
  for (size_t d = 0; d < 3; ++d) {
    const uint64_t largest = step.grid[d].Evaluate(m_max);
    const uint64_t limit =
        d == 0 ? KILN_FORMAT_GRID_X_MAX : KILN_FORMAT_GRID_YZ_MAX;
    RETURN_IF_ERROR(CheckCount(
        absl::StrCat("grid dimension ", d, " at m ", m_max), largest, limit));
  }
  uint64_t threads = 1;
  for (const uint32_t n : step.block) {
    RETURN_IF_ERROR(
        CheckCount("block dimension", n, KILN_FORMAT_BLOCK_THREADS_MAX));
    threads *= n;
  }
  if (backend == Backend::kCpu) {
    if (threads != 1 || step.dynamic_shared_bytes != 0) {
      return absl::InvalidArgumentError(
          "a CPU step has a block or shared memory");
    }
    return absl::OkStatus();
  }
  const uint32_t limit =
      kernel.max_threads != 0
          ? std::min(kernel.max_threads, KILN_FORMAT_BLOCK_THREADS_MAX)
          : KILN_FORMAT_BLOCK_THREADS_MAX;
  return CheckCount("block threads", threads, limit);
}

absl::Status CheckMeasure(absl::string_view what, double value) {
  if (std::isfinite(value) && !std::signbit(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is ", value, ", expected a finite number >= 0"));
}

absl::Status CheckPlanLimits(const Plan& plan) {
  const PlanBody& body = plan.body;
  RETURN_IF_ERROR(
      CheckCount("interval end", plan.interval.m_max, KILN_FORMAT_TOKENS_MAX));
  RETURN_IF_ERROR(CheckCount("parameters", body.params.size(),
                             KILN_FORMAT_PLAN_PARAMS_MAX));
  RETURN_IF_ERROR(CheckCount("arena slices", body.arena.slices.size(),
                             KILN_FORMAT_PLAN_SLICES_MAX));
  RETURN_IF_ERROR(
      CheckCount("steps", body.steps.size(), KILN_FORMAT_PLAN_STEPS_MAX));
  const Evidence& evidence = plan.evidence;
  RETURN_IF_ERROR(CheckMeasure("tolerance", body.tolerance));
  RETURN_IF_ERROR(CheckMeasure("median_ns", evidence.median_ns));
  RETURN_IF_ERROR(
      CheckMeasure("default_median_ns", evidence.default_median_ns));
  RETURN_IF_ERROR(CheckMeasure("noise_floor", evidence.noise_floor));
  RETURN_IF_ERROR(CheckMeasure("worst_error", evidence.worst_error));
  if (body.template_name.empty()) {
    return absl::InvalidArgumentError("template name is empty");
  }
  for (const ParamDecl& param : body.params) {
    if (param.name.empty()) {
      return absl::InvalidArgumentError("a parameter has no name");
    }
  }
  if (plan.target.backend == Backend::kCuda) {
    if (body.cpu_threads != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "cpu_threads is ", body.cpu_threads, " on a CUDA target"));
    }
  } else {
    if (body.cpu_threads == 0) {
      return absl::InvalidArgumentError("cpu_threads is 0 on a CPU target");
    }
    RETURN_IF_ERROR(CheckCount("cpu_threads", body.cpu_threads,
                               KILN_FORMAT_CPU_THREADS_MAX));
  }
  return absl::OkStatus();
}

using ProgramIndex = std::map<Digest, std::shared_ptr<const Program>>;

absl::Status CheckStep(const Plan& plan, const Step& step,
                       const ProgramIndex& programs) {
  RETURN_IF_ERROR(
      CheckCount("arguments", step.args.size(), KILN_FORMAT_STEP_ARGS_MAX));
  const Digest& digest = plan.programs[step.program];
  const auto found = programs.find(digest);
  if (found == programs.end()) {
    return absl::NotFoundError(
        absl::StrCat("program ", digest.ToHex(), " is not in the section"));
  }
  const Kernel* kernel = found->second->FindKernel(step.entry);
  if (kernel == nullptr) {
    return absl::NotFoundError(absl::StrCat("program ", digest.Short(),
                                            " has no kernel ", step.entry));
  }
  const Backend backend = plan.target.backend;
  RETURN_IF_ERROR(CheckArgs(step, *kernel, backend));
  return CheckLaunch(step, *kernel, backend, plan.interval.m_max);
}

absl::Status CheckPlan(const Plan& plan, const ProgramIndex& programs) {
  RETURN_IF_ERROR(ValidatePlan(plan));
  RETURN_IF_ERROR(CheckPlanLimits(plan));
  for (const Step& step : plan.body.steps) {
    RETURN_IF_ERROR(Annotate(CheckStep(plan, step, programs),
                             absl::StrCat("step ", step.label)));
  }
  return absl::OkStatus();
}

absl::Status CheckConsent(const BundleSection& section, const Plan& plan,
                          const BundleOptions& options) {
  if (plan.evidence.state == PlanState::kPredicted &&
      !options.allow_predicted) {
    return absl::FailedPreconditionError(absl::StrCat(
        "plan is predicted, it was never run; prewarm on a machine with "
        "target ",
        section.target.ToString(), ", or pass --allow-predicted"));
  }
  if (!options.allow_unqualified && IsUnqualified(section, plan)) {
    return absl::FailedPreconditionError(
        absl::StrCat("template ", plan.body.template_name,
                     " has no qualification on ", section.target.ToString()));
  }
  return absl::OkStatus();
}

std::string IntervalText(const Interval& interval) {
  return absl::StrCat(interval.m_min, "..", interval.m_max);
}

// Intervals, sorted, cover 1..capacity without gap or overlap.
absl::Status CheckCoverage(const BundleEntry& entry) {
  uint64_t covered = 0;
  for (const Plan& plan : entry.plans) {
    if (plan.interval.m_min != covered + 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "interval ", IntervalText(plan.interval),
          plan.interval.m_min > covered + 1 ? " leaves a gap" : " overlaps",
          ", expected it to begin at ", covered + 1));
    }
    covered = plan.interval.m_max;
  }
  return absl::OkStatus();
}

absl::Status CheckBuffer(const ParamDecl& param, const BufferFill& buffer,
                         uint32_t m_max) {
  const uint32_t element = buffer.element_bytes;
  if (element != 1 && element != 2 && element != 4 && element != 8) {
    return absl::InvalidArgumentError(
        absl::StrCat("elements have ", element, " bytes"));
  }
  constexpr uint64_t kMax = KILN_FORMAT_PARAM_BYTES_MAX;
  if (buffer.bytes > kMax || buffer.bytes_per_token > kMax / m_max ||
      buffer.bytes + buffer.bytes_per_token * m_max > kMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat(buffer.bytes, " bytes and ", buffer.bytes_per_token,
                     " for each of ", m_max, " tokens exceed ", kMax));
  }
  if (buffer.bytes % element != 0 || buffer.bytes_per_token % element != 0 ||
      buffer.bytes + buffer.bytes_per_token == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(buffer.bytes, " bytes and ", buffer.bytes_per_token,
                     " per token are not elements of ", element, " bytes"));
  }
  if ((buffer.kind == BufferFill::Kind::kNone) != param.output) {
    return absl::InvalidArgumentError(param.output ? "an output has a fill"
                                                   : "an input has no fill");
  }
  const uint64_t largest = UINT64_MAX >> (64 - 8 * element);
  bool ok = buffer.a <= largest && buffer.b <= largest;
  switch (buffer.kind) {
    case BufferFill::Kind::kNone:
      ok = buffer.a == 0 && buffer.b == 0;
      break;
    case BufferFill::Kind::kWords:
      ok = ok && (buffer.a & buffer.b) == 0;
      break;
    case BufferFill::Kind::kIndices:
      ok = ok && buffer.a >= 1 && buffer.b == 0;
      break;
  }
  if (!ok) {
    return absl::InvalidArgumentError(
        absl::StrCat("fill ", buffer.a, ", ", buffer.b, " is not of its kind"));
  }
  return absl::OkStatus();
}

absl::Status CheckBuffers(const BundleEntry& entry) {
  for (const Plan& plan : entry.plans) {
    const std::vector<ParamDecl>& params = plan.body.params;
    if (entry.buffers.empty()) continue;
    if (entry.buffers.size() != params.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          entry.buffers.size(), " buffers, the plan for m ",
          IntervalText(plan.interval), " has ", params.size(), " parameters"));
    }
    for (size_t i = 0; i < params.size(); ++i) {
      RETURN_IF_ERROR(Annotate(
          CheckBuffer(params[i], entry.buffers[i], plan.interval.m_max),
          absl::StrCat("buffer of parameter ", params[i].name)));
    }
  }
  for (const auto& golden : entry.golden) {
    const auto& [interval, digest] = golden;
    const auto plan =
        std::find_if(entry.plans.begin(), entry.plans.end(),
                     [&](const Plan& p) { return p.interval == golden.first; });
    if (plan == entry.plans.end() || entry.buffers.empty() ||
        digest == Digest() || !plan->body.deterministic ||
        plan->evidence.state == PlanState::kPredicted ||
        std::none_of(plan->body.params.begin(), plan->body.params.end(),
                     [](const ParamDecl& p) { return p.output; })) {
      return absl::InvalidArgumentError(absl::StrCat(
          "golden digest for m ", IntervalText(interval),
          " is not of a measured, deterministic plan with known buffers"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckEntry(const BundleSection& section, const BundleEntry& entry,
                        const ProgramIndex& programs,
                        const BundleOptions& options) {
  if (entry.name.empty()) {
    return absl::InvalidArgumentError("an entry has no name");
  }
  if (entry.plans.empty()) return absl::InvalidArgumentError("no plans");
  RETURN_IF_ERROR(
      CheckCount("plans", entry.plans.size(), KILN_FORMAT_ENTRY_PLANS_MAX));
  for (const Plan& plan : entry.plans) {
    const std::string context =
        absl::StrCat("plan for m ", IntervalText(plan.interval));
    if (plan.target != section.target) {
      return absl::InvalidArgumentError(
          absl::StrCat(context, " is for target ", plan.target.ToString()));
    }
    if (plan.geometry != entry.geometry) {
      return absl::InvalidArgumentError(
          absl::StrCat(context, " is for geometry ", plan.geometry.ToString(),
                       ", the entry has ", entry.geometry.ToString()));
    }
    RETURN_IF_ERROR(Annotate(CheckConsent(section, plan, options), context));
    RETURN_IF_ERROR(Annotate(CheckPlan(plan, programs), context));
  }
  RETURN_IF_ERROR(CheckCoverage(entry));
  return CheckBuffers(entry);
}

absl::StatusOr<ProgramIndex> IndexPrograms(const BundleSection& section) {
  ProgramIndex index;
  for (const std::shared_ptr<const Program>& program : section.programs) {
    KILN_CHECK(program != nullptr);
    const auto [at, inserted] = index.emplace(program->key.digest, program);
    if (inserted) continue;
    const Program& first = *at->second;
    if (first.binary != program->binary || first.kernels != program->kernels) {
      return absl::DataLossError(absl::StrCat(
          "program ", program->key.digest.ToHex(),
          " has two different binaries: ", first.binary_digest.ToHex(), " (",
          first.binary.size(), " bytes) and ", program->binary_digest.ToHex(),
          " (", program->binary.size(), " bytes)"));
    }
  }
  return index;
}

}  // namespace

absl::Status CheckCount(absl::string_view what, uint64_t count, uint64_t max) {
  if (count <= max) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": ", count, " exceeds the limit of ", max));
}

absl::Status CheckArgs(const Step& step, const Kernel& kernel,
                       Backend backend) {
  const std::vector<uint32_t> offsets = ArgOffsets(step.args);
  const bool cuda = backend == Backend::kCuda;
  if (cuda && kernel.params.size() != step.args.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "passes ", step.args.size(), " arguments, kernel ", kernel.entry,
        " declares ", kernel.params.size(), " parameters"));
  }
  uint64_t end = 0;
  for (size_t i = 0; i < step.args.size(); ++i) {
    const uint32_t bytes = ArgBytes(step.args[i].kind);
    end = uint64_t{offsets[i]} + bytes;
    if (!cuda) continue;
    const KernelParam& param = kernel.params[i];
    if (param.offset != offsets[i] || param.bytes != bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("argument ", i, " has ", bytes, " bytes at offset ",
                       offsets[i], ", kernel ", kernel.entry, " declares ",
                       param.bytes, " bytes at ", param.offset));
    }
  }
  if (kernel.param_bytes != end && kernel.param_bytes != AlignUp(end, 8)) {
    return absl::InvalidArgumentError(
        absl::StrCat("arguments take ", end, " bytes, kernel ", kernel.entry,
                     " declares ", kernel.param_bytes));
  }
  return absl::OkStatus();
}

bool IsUnqualified(const BundleSection& section, const Plan& plan) {
  const std::vector<std::string>& names = section.unqualified_templates;
  return std::find(names.begin(), names.end(), plan.body.template_name) !=
         names.end();
}

absl::StatusOr<SortedSection> SortSection(BundleSection* section,
                                          const BundleOptions& options) {
  SortedSection sorted;
  sorted.section = section;
  sorted.target = section->target.ToString();
  if (section->entries.empty()) {
    return absl::InvalidArgumentError("no entries");
  }
  if (section->target.backend == Backend::kCpu &&
      section->driver_version_min != 0) {
    return absl::InvalidArgumentError("a CPU section names a driver version");
  }
  std::sort(section->entries.begin(), section->entries.end(),
            [](const BundleEntry& a, const BundleEntry& b) {
              return a.name < b.name;
            });
  ASSIGN_OR_RETURN(const ProgramIndex programs, IndexPrograms(*section));
  std::set<Digest> used;
  for (BundleEntry& entry : section->entries) {
    std::sort(
        entry.plans.begin(), entry.plans.end(),
        [](const Plan& a, const Plan& b) { return a.interval < b.interval; });
    RETURN_IF_ERROR(Annotate(CheckEntry(*section, entry, programs, options),
                             absl::StrCat("entry ", entry.name)));
    if (!sorted.entries.empty() && sorted.entries.back()->name == entry.name) {
      return absl::InvalidArgumentError(
          absl::StrCat("entry ", entry.name, " appears twice"));
    }
    sorted.entries.push_back(&entry);
    for (const Plan& plan : entry.plans) {
      for (const Step& step : plan.body.steps) {
        used.insert(plan.programs[step.program]);
      }
    }
  }
  for (const Digest& digest : used) {
    const std::shared_ptr<const Program>& program = programs.at(digest);
    if (program->target != section->target) {
      return absl::InvalidArgumentError(
          absl::StrCat("program ", digest.Short(), " is for target ",
                       program->target.ToString()));
    }
    RETURN_IF_ERROR(CheckBinary(*program));
    RETURN_IF_ERROR(CheckKernels(*program));
    sorted.programs.push_back(program);
  }
  return sorted;
}

}  // namespace kiln
