// Parts of a plan by their names, for tests of templates.

#ifndef KILN_TESTS_TEMPLATES_PLAN_PARTS_H_
#define KILN_TESTS_TEMPLATES_PLAN_PARTS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
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
//   others: what other candidates launch that share the first program
inline void ExpectProgramsOfSteps(const Candidate& candidate,
                                  const std::set<std::string>& others = {}) {
  std::vector<std::set<std::string>> used(candidate.units.size());
  for (const Step& step : candidate.body.steps) {
    ASSERT_LT(step.program, candidate.units.size());
    used[step.program].insert(step.entry);
  }
  used[0].insert(others.begin(), others.end());
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

// The class of numerics of the points says which agree bit for bit: it must
// move with the slices of K, which change the order of sums, and with nothing
// else.
inline void ExpectClassesAreSplits(const KernelTemplate& from,
                                   const Problem& problem,
                                   const std::vector<Assignment>& points) {
  std::map<std::string, std::set<std::pair<int64_t, int64_t>>> splits;
  for (const Assignment& point : points) {
    const absl::StatusOr<PlanBody> body = from.MakeBody(problem, point);
    ASSERT_TRUE(body.ok()) << body.status();
    splits[body->numerics_class].insert(
        {point.at("split_fc1"), point.at("split_fc2")});
  }
  std::set<std::pair<int64_t, int64_t>> all;
  for (const auto& [name, members] : splits) {
    EXPECT_EQ(members.size(), 1u) << name;
    all.insert(members.begin(), members.end());
  }
  EXPECT_EQ(all.size(), splits.size());
  EXPECT_GT(splits.size(), 1u);
}

// That candidates over QSRT weights decode where the words lie: for one token
// in small tiles the arena has less room than one matrix takes, decoded or
// packed, apart from a table of states; and 256 more experts make it no larger
// than their places in lists.
inline void ExpectQsrtArenaHoldsNoWeights(const KernelTemplate& from,
                                          Problem problem, int64_t tile_max) {
  problem.interval = {1, 1};
  const auto matrix =
      static_cast<uint64_t>(problem.geometry.hidden * 256 * 3 / 8);
  Problem larger = problem;
  larger.geometry.experts += 256;
  const std::vector<Assignment> points = from.Enumerate(problem, 1000).points;
  int small = 0;
  for (const Assignment& point : points) {
    const absl::StatusOr<PlanBody> body = from.MakeBody(problem, point);
    const absl::StatusOr<PlanBody> more = from.MakeBody(larger, point);
    ASSERT_TRUE(body.ok() && more.ok()) << body.status() << more.status();
    uint64_t bytes = 0;
    for (const ArenaSlice& slice : body->arena.slices) {
      if (slice.name != "codewords") bytes += slice.bytes;
    }
    if (point.at("tokens_tile") <= tile_max) {
      EXPECT_LT(bytes, matrix) << body->Label();
      ++small;
    }
    EXPECT_LE(more->arena.bytes, body->arena.bytes + 256 * 16 + kArenaAlignment)
        << body->Label();
  }
  EXPECT_GT(small, 0);
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_PLAN_PARTS_H_
