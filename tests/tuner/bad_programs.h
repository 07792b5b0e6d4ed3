// Programs that misbehave: a fused_moe template with one change in a kernel
// that every plan launches, compiled like any candidate.

#ifndef KILN_TESTS_TUNER_BAD_PROGRAMS_H_
#define KILN_TESTS_TUNER_BAD_PROGRAMS_H_

#include "compiler/spec/plan.h"

namespace kiln::testing {

enum class Deed {
  kNone,
  kSpins,      // never returns on the CPU, after 20 seconds on the GPU
  kSegfaults,  // writes to address 8
  kTraps,      // executes an instruction that traps
  // On the CPU only:
  kAborts,  // sends itself SIGABRT
  kExits,   // ends the process with code 3
  // Segfaults at the 60th launch in one process: right as long as it is
  // verified, broken while it is timed.
  kSegfaultsLate,
  kSpinsLate,  // the same, but never returns
};

// `unit`, of the CPU or the CUDA template, with the deed in it.
SourceUnit Misbehaving(SourceUnit unit, Deed deed);

}  // namespace kiln::testing

#endif  // KILN_TESTS_TUNER_BAD_PROGRAMS_H_
