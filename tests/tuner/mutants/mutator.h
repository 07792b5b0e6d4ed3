// Mutator: makes wrong kernels out of right ones. A rule is a textual change;
// it gives one mutant for every place of the source where it applies.

#ifndef KILN_TESTS_TUNER_MUTANTS_MUTATOR_H_
#define KILN_TESTS_TUNER_MUTANTS_MUTATOR_H_

#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace kiln::testing {

// In `file`, inside function `scope` (anywhere when empty), every occurrence of
// `find` in code may become `replace`. Comments, strings, preprocessor lines
// and static_assert are no code; a name is found only as a whole word.
struct MutationRule {
  const char* rule;  // the kind of fault, "wrong stride"
  const char* file;  // as templates name it, "fused_moe/cpu.cc"
  const char* scope;
  const char* find;
  const char* replace;
};

// One changed source.
struct Mutant {
  const MutationRule* rule = nullptr;
  std::string scope;   // enclosing function, empty outside of functions
  int line = 0;        // of the file, from 1
  std::string code;    // the unchanged line, without indentation
  int occurrence = 0;  // of `find` in that line, from 0
  std::string text;    // the whole changed file

  // "wrong stride: fused_moe/cpu.cc:312 Fc1, `kHidden` -> `kInter` in `...`".
  std::string Name() const;
};

// All mutants of one file, in the order of the rules and then of the places.
//   text: of the file `file`; rules for other files are passed over.
std::vector<Mutant> MakeMutants(absl::string_view file, absl::string_view text,
                                std::span<const MutationRule> rules);

}  // namespace kiln::testing

#endif  // KILN_TESTS_TUNER_MUTANTS_MUTATOR_H_
