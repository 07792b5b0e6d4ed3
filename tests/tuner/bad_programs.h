// CPU programs that misbehave: the fused_moe template with one change in its
// first kernel, compiled like any candidate.

#ifndef KILN_TESTS_TUNER_BAD_PROGRAMS_H_
#define KILN_TESTS_TUNER_BAD_PROGRAMS_H_

#include "compiler/spec/plan.h"

namespace kiln::testing {

enum class Deed {
  kNone,
  kSpins,      // never returns
  kSegfaults,  // writes to address 8
  kAborts,     // sends itself SIGABRT
  kExits,      // ends the process with code 3
  kTraps,      // executes an illegal instruction
  // Segfaults at the 60th launch in one process: right as long as it is
  // verified, broken while it is timed.
  kSegfaultsLate,
  kSpinsLate,  // the same, but never returns
};

// `unit` with the deed in it.
SourceUnit Misbehaving(SourceUnit unit, Deed deed);

}  // namespace kiln::testing

#endif  // KILN_TESTS_TUNER_BAD_PROGRAMS_H_
