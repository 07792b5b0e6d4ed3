// Parts of a plan by their names, for tests of templates.

#ifndef KILN_TESTS_TEMPLATES_PLAN_PARTS_H_
#define KILN_TESTS_TEMPLATES_PLAN_PARTS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "compiler/base/check.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"

namespace kiln::testing {

inline uint64_t SliceBytes(const PlanBody& body, absl::string_view name) {
  for (const ArenaSlice& slice : body.arena.slices) {
    if (slice.name == name) return slice.bytes;
  }
  ADD_FAILURE() << "no slice " << name;
  return 0;
}

// Null where there is none.
inline const Step* FindStep(const PlanBody& body, absl::string_view label) {
  for (const Step& step : body.steps) {
    if (step.label == label) return &step;
  }
  return nullptr;
}

inline const Step& StepNamed(const PlanBody& body, absl::string_view label) {
  const Step* const step = FindStep(body, label);
  KILN_CHECK(step != nullptr);
  return *step;
}

// The programs of a candidate for a GPU export, sorted, what its steps launch
// and nothing else, and have no header of the CPU.
inline void ExpectProgramsOfSteps(const Candidate& candidate) {
  std::vector<std::set<std::string>> used(candidate.units.size());
  for (const Step& step : candidate.body.steps) {
    ASSERT_LT(step.program, candidate.units.size());
    used[step.program].insert(step.entry);
  }
  for (size_t i = 0; i < candidate.units.size(); ++i) {
    const SourceUnit& unit = candidate.units[i];
    EXPECT_TRUE(std::is_sorted(unit.entries.begin(), unit.entries.end()));
    EXPECT_EQ(used[i],
              std::set<std::string>(unit.entries.begin(), unit.entries.end()))
        << "a program exports what no step launches, or the reverse";
    EXPECT_FALSE(unit.headers.empty());
    for (const auto& [name, text] : unit.headers) {
      EXPECT_FALSE(absl::StrContains(name, "cpu_")) << name;
    }
  }
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_PLAN_PARTS_H_
