// The CPU half of loading a section.

#ifndef KILN_RUNTIME_LOAD_CPU_H_
#define KILN_RUNTIME_LOAD_CPU_H_

#include "runtime/module_set.h"

namespace kiln::runtime {

// Loads the programs of modules->section, resolves every kernel and creates the
// pool. The tables of `modules` are built. On failure UnloadCpu cleans up.
kiln_status_t LoadCpu(const LoadOptions& options, Modules* modules,
                      kiln_error_t* error);
void UnloadCpu(Modules* modules);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_LOAD_CPU_H_
