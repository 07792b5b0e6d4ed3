// The mutants of one backend, compiled and put before the verifier.

#ifndef KILN_TESTS_TUNER_MUTANTS_SUITE_H_
#define KILN_TESTS_TUNER_MUTANTS_SUITE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/spec/program.h"
#include "compiler/toolchain_probe.h"
#include "tests/tuner/mutants/mutator.h"
#include "tests/tuner/mutants/rules.h"

namespace kiln::testing {

// A request and a candidate of it; together they contain the code that the
// rules change. A mutant that one request lets through meets the next.
struct MutantRequest {
  const char* name;
  const KernelTemplate* kernel;
  RequestGeometry geometry;
  Assignment assignment;
  uint32_t capacity = 0;
};

struct MutantSuite {
  DeviceProfile device;
  CompilerSetup compiler;
  std::vector<MutantRequest> requests;
  // Requests of real size that the original alone faces: the limits that catch
  // mutants must leave it room.
  std::vector<MutantRequest> originals;
  std::span<const MutationRule> rules;
  std::span<const Excuse> excuses;
};

// Errors: why this backend's mutants cannot be compiled here.
//   cc_cpu: path of kiln-cc-cpu.
absl::StatusOr<MutantSuite> CpuSuite(const std::string& cc_cpu);
// For `target`, of a device that need not be here; Judge uses the first one.
absl::StatusOr<MutantSuite> CudaSuite(const std::string& target);

// Whether the programs of a request contain a file, so that its mutants matter.
bool Contains(const MutantSuite& suite, const MutantRequest& request,
              absl::string_view file);

// All mutants of a suite, no two with the same text, in the order of the rules.
//   Errors: NotFound, naming a rule that applies nowhere.
absl::StatusOr<std::vector<Mutant>> AllMutants(const MutantSuite& suite);

// Programs by candidate and unit, or why a unit does not compile.
using Programs = std::vector<absl::StatusOr<std::shared_ptr<const Program>>>;

// The original's programs, then those of each mutant.
absl::StatusOr<std::vector<Programs>> CompileMutants(
    const MutantSuite& suite, const MutantRequest& request,
    const std::vector<const Mutant*>& mutants, int jobs);

struct Verdict {
  bool caught = false;
  std::string reason;  // what the verifier found, or how the process ended
};

struct VerdictOptions {
  int jobs = 2;
  double seconds_max = 60;  // for one mutant; then its process is killed
};

// The verifier's verdict on each candidate (programs as CompileMutants returned
// them), each in a process of its own: a mutant may crash or never end.
absl::StatusOr<std::vector<Verdict>> Judge(
    const MutantSuite& suite, const MutantRequest& request,
    const std::vector<const Programs*>& candidates,
    const VerdictOptions& options);

// Whether this machine has a GPU. Asks in a child: a process that has used CUDA
// cannot have children that do.
bool HasGpu();

}  // namespace kiln::testing

#endif  // KILN_TESTS_TUNER_MUTANTS_SUITE_H_
