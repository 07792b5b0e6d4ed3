// Golden replay: plans run once on inputs that the bundle describes, and a
// digest of their outputs is compared with the one that freeze computed.
// Allocates and waits; not for the serving path.

#ifndef KILN_RUNTIME_SELFTEST_H_
#define KILN_RUNTIME_SELFTEST_H_

#include "runtime/module_set.h"

namespace kiln::runtime {

// See kiln_modules_selftest. `options` is complete and checked; `result` is
// written on success only, except for its struct_size.
kiln_status_t RunSelftest(const Modules& modules,
                          const kiln_selftest_options_t& options,
                          kiln_selftest_result_t* result, kiln_error_t* error);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_SELFTEST_H_
