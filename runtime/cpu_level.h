// The x86-64 psABI level of this processor.

#ifndef KILN_RUNTIME_CPU_LEVEL_H_
#define KILN_RUNTIME_CPU_LEVEL_H_

#include <stdint.h>

namespace kiln::runtime {

// 1 to 4 (System V x86-64 psABI, section "Processor Architecture"): every
// feature of the level is in the processor, and the operating system saves the
// registers it needs. Levels are cumulative.
uint32_t HostCpuLevel();

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_CPU_LEVEL_H_
