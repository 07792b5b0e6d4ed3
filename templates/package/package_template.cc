#include "templates/package/package_template.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "templates/axes.h"
#include "templates/fused_moe/op.h"
#include "templates/registry.h"

namespace kiln {
namespace {

template <typename T>
bool Has(const std::vector<T>& list, T value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// Threads of a block along z: CUDA programming guide, technical specifications.
constexpr uint32_t kBlockDepthMax = 64;

class Template : public KernelTemplate {
 public:
  explicit Template(Package package)
      : package_(std::move(package)),
        manifest_(package_.manifest),
        name_(package_.TemplateName()),
        // Also over what Kiln makes of a package.
        sources_(CanonicalEncoder("kiln.package_template/1")
                     .Hash("package", package_.digest)
                     .Hash("kiln", TemplateSourcesDigest(
                                       {"axes.cc", "fused_moe/op.cc",
                                        "package/expression.cc",
                                        "package/package_template.cc"}))
                     .digest()) {}

  absl::string_view name() const override { return name_; }

  uint32_t version() const override { return manifest_.version; }

  Digest sources() const override { return sources_; }

  Op op() const override { return manifest_.op; }

  Backend backend() const override { return manifest_.backend; }

  absl::Status Supports(const RequestGeometry& geometry,
                        const Target& target) const override {
    const std::string why = WhyNotServed(geometry, target);
    if (why.empty()) return absl::OkStatus();
    return absl::UnimplementedError(
        absl::StrCat("package ", manifest_.name, " does not serve ", why));
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    return OrderPoints(
        manifest_.axes, {},
        [&](const AxisPoint& point) {
          const absl::StatusOr<PlanBody> body =
              MakeLegalBody(problem, point.ToAssignment());
          return body.ok() ? std::string()
                           : std::string(body.status().message());
        },
        // Ties keep the order of the manifest.
        [](const AxisPoint&) { return 0.0; }, points_max);
  }

  absl::StatusOr<PlanBody> MakeBody(
      const Problem& problem, const Assignment& assignment) const override {
    RETURN_IF_ERROR(CheckAssignment(manifest_.axes, assignment));
    return MakeLegalBody(problem, assignment);
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target& target,
      const Assignment& assignment) const override {
    std::vector<SourceUnit> units;
    for (const PackageProgram& program : manifest_.programs) {
      SourceUnit unit;
      unit.template_version = manifest_.version;
      unit.compute_dtype = manifest_.compute_dtype;
      unit.entries = program.entries;
      unit.package = package_.digest;
      if (manifest_.own_compiler) {
        const PackageBinary& binary = BinaryOf(program, target, assignment);
        unit.name = absl::StrCat(manifest_.name, "/", binary.file);
        unit.binary = package_.files.at(binary.file);
      } else {
        unit.name = absl::StrCat(manifest_.name, "/", program.source);
        unit.text = absl::StrCat(FusedMoePrelude(geometry),
                                 AxisPrelude(assignment, AxisNames()),
                                 package_.files.at(program.source));
        unit.headers = HeadersFor(program);
      }
      units.push_back(std::move(unit));
    }
    return units;
  }

 private:
  std::vector<std::string> AxisNames() const {
    std::vector<std::string> names;
    for (const Axis& axis : manifest_.axes) names.push_back(axis.name);
    return names;
  }

  // Kiln's device headers and the package's files but the sources of programs.
  std::vector<std::pair<std::string, std::string>> HeadersFor(
      const PackageProgram& program) const {
    std::vector<std::pair<std::string, std::string>> headers = DeviceHeaders();
    for (const auto& file : package_.files) {
      if (file.first != program.source) headers.push_back(file);
    }
    return headers;
  }

  // The parser has made sure that there is one for every target of the package.
  static const PackageBinary& BinaryOf(const PackageProgram& program,
                                       const Target& target,
                                       const Assignment& assignment) {
    for (const PackageBinary& binary : program.binaries) {
      if (binary.target == target &&
          std::includes(assignment.begin(), assignment.end(),
                        binary.assignment.begin(), binary.assignment.end())) {
        return binary;
      }
    }
    KILN_UNREACHABLE();
  }

  // What of the geometry or target is not served; empty when all of it is.
  std::string WhyNotServed(const RequestGeometry& geometry,
                           const Target& target) const {
    const ServedGeometries& serves = manifest_.serves;
    const Weights& weights = geometry.weights;
    if (geometry.op != manifest_.op) {
      return absl::StrCat("op ", OpName(geometry.op));
    }
    if (target.backend != manifest_.backend ||
        (!serves.targets.empty() && !Has(serves.targets, target)) ||
        !HasBinariesFor(target)) {
      return absl::StrCat("target ", target.ToString());
    }
    if (!Has(serves.recipes, geometry.recipe)) {
      return absl::StrCat("recipe ", RecipeName(geometry.recipe));
    }
    if (!Has(serves.formats, weights.format)) {
      return absl::StrCat("format ", WeightFormatName(weights.format));
    }
    if (!Has(serves.codebooks, weights.codebook)) {
      return absl::StrCat("codebook ", CodebookName(weights.codebook));
    }
    for (const int bits :
         {weights.bits.gate, weights.bits.up, weights.bits.down}) {
      if (!Has<int64_t>(serves.bits, bits)) return absl::StrCat(bits, " bits");
    }
    if (!Has(serves.shared_scales, weights.shared_scales)) {
      return weights.shared_scales ? "shared scales" : "scales per expert";
    }
    if (!Has(serves.activations, geometry.activation)) {
      return absl::StrCat("activation ", ActivationName(geometry.activation));
    }
    if (!Has(serves.io_dtypes, geometry.io_dtype)) {
      return absl::StrCat("io_dtype ", DTypeName(geometry.io_dtype));
    }
    if (!Has(serves.id_dtypes, geometry.id_dtype)) {
      return absl::StrCat("id_dtype ", DTypeName(geometry.id_dtype));
    }
    const ExpressionValues values = GeometryValues(geometry);
    for (const ServedSize& size : serves.sizes) {
      const int64_t value = values.at(size.name);
      if (value < size.range.low || value > size.range.high) {
        return absl::StrCat(size.name, " ", value, ", only ", size.range.low,
                            "..", size.range.high);
      }
    }
    return "";
  }

  bool HasBinariesFor(const Target& target) const {
    if (!manifest_.own_compiler) return true;
    const std::vector<PackageBinary>& binaries =
        manifest_.programs.front().binaries;
    return std::any_of(
        binaries.begin(), binaries.end(),
        [&](const PackageBinary& binary) { return binary.target == target; });
  }

  ExpressionValues ValuesOf(const Problem& problem,
                            const Assignment& assignment) const {
    ExpressionValues values = GeometryValues(problem.geometry);
    values["capacity"] = problem.interval.m_max;
    values["processors"] = std::max(1, problem.device.multiprocessors);
    values.insert(assignment.begin(), assignment.end());
    return values;
  }

  // InvalidArgument, with the rule, for a point that breaks one.
  absl::StatusOr<PlanBody> MakeLegalBody(const Problem& problem,
                                         const Assignment& assignment) const {
    const ExpressionValues values = ValuesOf(problem, assignment);
    const SizeRange& capacity = manifest_.serves.capacity;
    if (problem.interval.m_max < capacity.low ||
        problem.interval.m_max > capacity.high) {
      return absl::InvalidArgumentError(absl::StrCat(
          "package ", manifest_.name, " serves capacities ", capacity.low, "..",
          capacity.high, ", not ", problem.interval.m_max));
    }
    for (const Condition& condition : manifest_.conditions) {
      ASSIGN_OR_RETURN(const bool holds, condition.Holds(values));
      if (holds) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "package ", manifest_.name, " wants ", condition.text()));
    }
    PlanBody body;
    body.template_name = name_;
    body.template_version = manifest_.version;
    body.assignment = assignment;
    body.numerics_class = NumericsClass(assignment);
    body.tolerance = kFusedMoeTolerance;
    body.deterministic = manifest_.deterministic;
    body.params = FusedMoeParams(problem.geometry);
    if (manifest_.backend == Backend::kCpu) {
      ASSIGN_OR_RETURN(const int64_t threads,
                       manifest_.threads.Within(values, 1, kPackageThreadsMax));
      body.cpu_threads = static_cast<uint32_t>(threads);
    }
    RETURN_IF_ERROR(AddArena(values, &body));
    for (const PackageStep& step : manifest_.steps) {
      absl::StatusOr<Step> made = MakeStep(step, problem, values);
      if (!made.ok()) {
        return Annotate(made.status(), absl::StrCat("package ", manifest_.name,
                                                    ", step ", step.label));
      }
      body.steps.push_back(*std::move(made));
    }
    return body;
  }

  // A class is the package's own: no other template can claim its bits.
  std::string NumericsClass(const Assignment& assignment) const {
    std::string name = absl::StrCat(manifest_.name, ".v", manifest_.version);
    for (const std::string& axis : manifest_.numerics_axes) {
      absl::StrAppend(&name, ".", axis, assignment.at(axis));
    }
    return name;
  }

  absl::Status AddArena(const ExpressionValues& values, PlanBody* body) const {
    for (const PackageSlice& slice : manifest_.arena) {
      const absl::StatusOr<int64_t> bytes =
          slice.bytes.Within(values, 0, kPackageSliceBytesMax);
      if (!bytes.ok()) {
        return Annotate(bytes.status(),
                        absl::StrCat("package ", manifest_.name,
                                     ", arena slice ", slice.name));
      }
      body->arena.Add(slice.name, static_cast<uint64_t>(*bytes));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Step> MakeStep(const PackageStep& from, const Problem& problem,
                                const ExpressionValues& values) const {
    const uint32_t m_max = problem.interval.m_max;
    Step step;
    step.label = from.label;
    step.program = static_cast<uint32_t>(from.program);
    step.entry = from.entry;
    int64_t threads = 1;
    for (size_t d = 0; d < step.grid.size(); ++d) {
      ASSIGN_OR_RETURN(step.grid[d], from.grid[d].Dim(values));
      // A size that was divided by too much, not a step with nothing to do.
      if (step.grid[d].Evaluate(m_max) == 0) {
        return absl::InvalidArgumentError(absl::StrCat(
            "grid ", JsonQuote(from.grid[d].text()), " is 0 at m ", m_max));
      }
      if (manifest_.backend == Backend::kCpu) continue;
      ASSIGN_OR_RETURN(const int64_t n,
                       from.block[d].Within(values, 1, kPackageThreadsMax));
      step.block[d] = static_cast<uint32_t>(n);
      threads *= n;
    }
    if (step.block[2] > kBlockDepthMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("a block ", step.block[2],
                       " threads deep exceeds the limit of ", kBlockDepthMax));
    }
    if (threads > kPackageThreadsMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("a block of ", threads, " threads exceeds the limit of ",
                       kPackageThreadsMax));
    }
    ASSIGN_OR_RETURN(
        const int64_t shared,
        from.shared_bytes.Within(values, 0, kPackageSharedBytesMax));
    if (manifest_.backend == Backend::kCuda &&
        shared > problem.device.shared_bytes_max) {
      return absl::InvalidArgumentError(
          absl::StrCat("shared_bytes ", shared, " exceeds the ",
                       problem.device.shared_bytes_max, " B of a block on ",
                       problem.device.target.ToString()));
    }
    step.dynamic_shared_bytes = static_cast<uint32_t>(shared);
    for (const PackageArg& arg : from.args) {
      ASSIGN_OR_RETURN(const Arg made, MakeArg(arg, values));
      step.args.push_back(made);
    }
    return step;
  }

  static absl::StatusOr<Arg> MakeArg(const PackageArg& from,
                                     const ExpressionValues& values) {
    switch (from.kind) {
      case ArgKind::kParam:
      case ArgKind::kArena:
        return Arg{from.kind, from.index};
      case ArgKind::kTokens:
        return Arg::Tokens();
      case ArgKind::kU32: {
        ASSIGN_OR_RETURN(const int64_t value,
                         from.value.Within(values, 0, UINT32_MAX));
        return Arg::U32(static_cast<uint32_t>(value));
      }
      case ArgKind::kU64: {
        ASSIGN_OR_RETURN(const int64_t value,
                         from.value.Within(values, 0, INT64_MAX));
        return Arg::U64(static_cast<uint64_t>(value));
      }
    }
    KILN_UNREACHABLE();
  }

  const Package package_;
  const PackageManifest& manifest_;
  const std::string name_;
  const Digest sources_;
};

}  // namespace

std::shared_ptr<const KernelTemplate> MakePackageTemplate(Package package) {
  return std::make_shared<const Template>(std::move(package));
}

}  // namespace kiln
