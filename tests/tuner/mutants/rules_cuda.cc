#include "tests/tuner/mutants/rules.h"

namespace kiln::testing {

std::span<const MutationRule> CudaMutationRules() { return {}; }

std::span<const Excuse> CudaExcuses() { return {}; }

}  // namespace kiln::testing
