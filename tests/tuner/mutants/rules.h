// The mutation rules, and the mutants that no verifier can or need catch.

#ifndef KILN_TESTS_TUNER_MUTANTS_RULES_H_
#define KILN_TESTS_TUNER_MUTANTS_RULES_H_

#include <span>

#include "tests/tuner/mutants/mutator.h"

namespace kiln::testing {

std::span<const MutationRule> CpuMutationRules();
std::span<const MutationRule> CudaMutationRules();

// Mutants that are left out, and why. Besides these, a mutant whose program has
// the machine code of the original is left out: it is the original.
struct Excuse {
  const char* file;
  const char* scope;
  const char* find;     // of the rule
  const char* replace;  // of the rule; empty: any
  const char* code;     // part of the unchanged line; empty: any
  const char* reason;
};

std::span<const Excuse> CpuExcuses();
std::span<const Excuse> CudaExcuses();

// The excuse that covers a mutant, or null.
const Excuse* FindExcuse(const Mutant& mutant, std::span<const Excuse> excuses);

}  // namespace kiln::testing

#endif  // KILN_TESTS_TUNER_MUTANTS_RULES_H_
