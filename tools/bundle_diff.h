// DiffBundles: what changed from one bundle to another, for people and CI.

#ifndef KILN_TOOLS_BUNDLE_DIFF_H_
#define KILN_TOOLS_BUNDLE_DIFF_H_

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tools/bundle_view.h"

namespace kiln {

// One difference. `a` or `b` is null where one side has nothing.
struct BundleChange {
  std::string kind;  // "plan_changed", "interval_added"
  std::string target;
  std::string entry;     // empty for sections and programs
  std::string interval;  // "1..4", empty unless it is about a plan
  std::string field;     // "steps[1].block[0]"; empty for what came or went
  nlohmann::ordered_json a;
  nlohmann::ordered_json b;
};

// Compares what BundleToJson shows, so whatever `inspect` shows is compared.
// Programs are matched by build digest, plans by interval, everything else by
// name: an index that moved is no change. Bundles that show the same and still
// have different roots are one "bytes_changed".
std::vector<BundleChange> DiffBundles(const BundleView& a, const BundleView& b);

// Both values of a change for a table, cut to the part that differs where they
// are long: {"...limit 10 w4a8", "...limit 7 w4a8"}.
std::pair<std::string, std::string> ShownChange(const BundleChange& change);

}  // namespace kiln

#endif  // KILN_TOOLS_BUNDLE_DIFF_H_
