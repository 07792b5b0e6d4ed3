// Real CPU candidates for tests: the fused_moe template at a small geometry,
// compiled by kiln-cc-cpu in worker processes exactly as prewarm does it.

#ifndef KILN_TESTS_TUNER_CPU_PROGRAMS_H_
#define KILN_TESTS_TUNER_CPU_PROGRAMS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/compile_pool.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/program.h"
#include "compiler/spec/request.h"
#include "compiler/toolchain_probe.h"

namespace kiln::testing {

// H256 I128 E4 k2, i64 ids, per-expert scales: every step has work, one
// program compiles in about a second.
RequestGeometry SmallGeometry();

// The assignment that the tests use: tiles of 4 rows, two threads.
Assignment SmallAssignment();

// The fused_moe CPU template's body for 1..capacity tokens on this machine.
absl::StatusOr<PlanBody> SmallBody(const RequestGeometry& geometry,
                                   uint32_t capacity,
                                   const Assignment& assignment);

// The one program of a CPU candidate, as source.
SourceUnit SmallUnit(const RequestGeometry& geometry,
                     const Assignment& assignment);

// Path of kiln-cc-cpu of this build: in $KILN_BIN_DIR.
std::string CcCpuPath();

// Empty, or why CPU candidates cannot be compiled in this build.
std::string WhyNoCcCpu();

// Compiles and inspects each unit; one status or program per unit.
std::vector<absl::StatusOr<std::shared_ptr<const Program>>> CompileUnits(
    const std::vector<SourceUnit>& units);

}  // namespace kiln::testing

#endif  // KILN_TESTS_TUNER_CPU_PROGRAMS_H_
