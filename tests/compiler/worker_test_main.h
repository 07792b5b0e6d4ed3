// A test executable that can be its own compiler worker, as `kiln` is.

#ifndef KILN_TESTS_COMPILER_WORKER_TEST_MAIN_H_
#define KILN_TESTS_COMPILER_WORKER_TEST_MAIN_H_

#include <cstdlib>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "compiler/toolchain_probe.h"

namespace kiln::testing {

// First argument that makes this executable a FakeCompiler worker.
inline constexpr char kFakeWorkerVerb[] = "fake-worker";

// A compiler whose behaviour the unit's text decides, one word and arguments:
//   ok TEXT         compiles to TEXT
//   refuse TEXT     rejects with TEXT
//   sleep SECONDS   takes that long, then is ok
//   crash TEXT      prints TEXT to standard error and aborts
//   leave           ends the process with code 3
//   eat             allocates memory without end
//   once FILE       kills its process with SIGKILL unless FILE exists, which it
//                   creates; then ok
//   killed          kills its process with SIGKILL, always
//   last TEXT       compiles to TEXT and cannot be used again
//   open FILE       opens a file, keeps it open and is ok
//   environ         compiles to its environment and working folder
CompilerSetup FakeSetup(Backend backend);

// The real toolchains, or the reason why they cannot be used here.
absl::StatusOr<CompilerSetup> NvrtcForTest();
absl::StatusOr<CompilerSetup> CcCpuForTest();

}  // namespace kiln::testing

// In a test: ends it as skipped, with the reason, where the toolchain is
// missing.
#define KILN_SETUP_OR_SKIP(variable, expression)                  \
  const absl::StatusOr<CompilerSetup> variable##_or = expression; \
  if (!variable##_or.ok()) {                                      \
    GTEST_SKIP() << variable##_or.status();                       \
  }                                                               \
  const CompilerSetup& variable = *variable##_or

#endif  // KILN_TESTS_COMPILER_WORKER_TEST_MAIN_H_
