#include "tests/tuner/mutants/rules.h"

#include <cstring>

#include "absl/strings/match.h"

namespace kiln::testing {

const Excuse* FindExcuse(const Mutant& mutant,
                         std::span<const Excuse> excuses) {
  const auto covers = [](const char* wanted, absl::string_view is) {
    return wanted[0] == '\0' || is == wanted;
  };
  for (const Excuse& excuse : excuses) {
    if (excuse.file == absl::string_view(mutant.rule->file) &&
        covers(excuse.scope, mutant.scope) &&
        covers(excuse.find, mutant.rule->find) &&
        covers(excuse.replace, mutant.rule->replace) &&
        absl::StrContains(mutant.code, excuse.code)) {
      return &excuse;
    }
  }
  return nullptr;
}

}  // namespace kiln::testing
