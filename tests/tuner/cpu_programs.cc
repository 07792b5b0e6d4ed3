#include "tests/tuner/cpu_programs.h"

#include <unistd.h>

#include <cstdlib>

#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/device_profile.h"
#include "templates/registry.h"

namespace kiln::testing {
namespace {

const KernelTemplate& CpuTemplate() {
  const KernelTemplate* found = FindTemplate("fused_moe.cpu");
  KILN_CHECK(found != nullptr);
  return *found;
}

absl::StatusOr<DeviceProfile> HostProfile() {
  ASSIGN_OR_RETURN(const Target target, HostCpuTarget());
  ASSIGN_OR_RETURN(DeviceProfile profile, HostCpuProfile(target));
  // The tests ask for two threads, whatever this machine has.
  profile.multiprocessors = 2;
  return profile;
}

}  // namespace

RequestGeometry SmallGeometry() {
  RequestGeometry geometry;
  geometry.hidden = 256;
  geometry.intermediate = 128;
  geometry.experts = 4;
  geometry.top_k = 2;
  geometry.id_dtype = DType::kI64;
  geometry.weights.codebook = Codebook::kMcg;
  geometry.weights.bits = {.gate = 4, .up = 4, .down = 3};
  return geometry;
}

Assignment SmallAssignment() {
  return {{"channels_tile", 64},
          {"k_tile", 64},
          {"threads", 2},
          {"tokens_tile", 4},
          {"unroll", 1}};
}

absl::StatusOr<PlanBody> SmallBody(const RequestGeometry& geometry,
                                   uint32_t capacity,
                                   const Assignment& assignment) {
  ASSIGN_OR_RETURN(const DeviceProfile device, HostProfile());
  return CpuTemplate().MakeBody({geometry, {1, capacity}, device}, assignment);
}

SourceUnit SmallUnit(const RequestGeometry& geometry,
                     const Assignment& assignment) {
  const absl::StatusOr<Target> target = HostCpuTarget();
  KILN_CHECK(target.ok());
  std::vector<SourceUnit> units =
      CpuTemplate().MakeUnits(geometry, *target, assignment);
  KILN_CHECK(units.size() == 1);
  return units[0];
}

std::string CcCpuPath() {
  const char* folder = std::getenv("KILN_BIN_DIR");
  return folder == nullptr ? "" : std::string(folder) + "/kiln-cc-cpu";
}

std::string WhyNoCcCpu() {
  const std::string path = CcCpuPath();
  if (path.empty()) return "KILN_BIN_DIR is not set";
  if (access(path.c_str(), X_OK) != 0) {
    return "this build has no kiln-cc-cpu: " + path + " is not executable";
  }
  return "";
}

std::vector<absl::StatusOr<std::shared_ptr<const Program>>> CompileUnits(
    const std::vector<SourceUnit>& units) {
  using Result = absl::StatusOr<std::shared_ptr<const Program>>;
  const absl::StatusOr<Target> target = HostCpuTarget();
  const absl::StatusOr<CompilerSetup> setup = ProbeCcCpu(CcCpuPath());
  for (const absl::Status& status : {target.status(), setup.status()}) {
    if (!status.ok()) return std::vector<Result>(units.size(), status);
  }
  std::vector<CompileJob> jobs;
  for (const SourceUnit& unit : units) jobs.push_back({unit, *target});
  PoolOptions options;
  options.jobs = 2;
  CompilePool pool(options, {*setup});
  absl::StatusOr<std::vector<CompileResult>> compiled = pool.Run(jobs);
  if (!compiled.ok()) {
    return std::vector<Result>(units.size(), compiled.status());
  }
  std::vector<Result> results;
  for (size_t i = 0; i < jobs.size(); ++i) {
    absl::StatusOr<Program> program =
        MakeProgram(jobs[i], setup->toolchain, std::move((*compiled)[i]));
    if (program.ok()) {
      results.push_back(std::make_shared<const Program>(*std::move(program)));
    } else {
      results.push_back(program.status());
    }
  }
  return results;
}

}  // namespace kiln::testing
