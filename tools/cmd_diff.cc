// kiln diff: what changed between two bundles.

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "compiler/base/status_macros.h"
#include "tools/bundle_diff.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

void Print(const std::vector<BundleChange>& changes) {
  std::vector<std::vector<std::string>> rows = {
      {"change", "target", "entry", "m", "field", "from", "to"}};
  for (const BundleChange& change : changes) {
    const auto cell = [](const std::string& text) {
      return text.empty() ? std::string("-") : text;
    };
    const auto [from, to] = ShownChange(change);
    rows.push_back({change.kind, change.target, cell(change.entry),
                    cell(change.interval), cell(change.field), from, to});
  }
  std::printf("%s", FormatTable(rows).c_str());
}

}  // namespace

absl::StatusOr<int> RunDiff(const GlobalOptions& global,
                            const DiffCommand& command) {
  ASSIGN_OR_RETURN(const BundleView a,
                   BundleView::Open(command.a, std::nullopt));
  ASSIGN_OR_RETURN(const BundleView b,
                   BundleView::Open(command.b, std::nullopt));
  const std::vector<BundleChange> changes = DiffBundles(a, b);
  if (global.json) {
    Json out;
    out["equal"] = changes.empty();
    out["roots"] = {a.Root().ToHex(), b.Root().ToHex()};
    out["changes"] = Json::array();
    for (const BundleChange& change : changes) {
      Json item;
      item["kind"] = change.kind;
      item["target"] = change.target;
      if (!change.entry.empty()) item["entry"] = change.entry;
      if (!change.interval.empty()) item["interval"] = change.interval;
      if (!change.field.empty()) item["field"] = change.field;
      item["a"] = change.a;
      item["b"] = change.b;
      out["changes"].push_back(std::move(item));
    }
    PrintJson(out);
  } else if (changes.empty()) {
    std::printf("equal: root %s\n", a.Root().ToHex().c_str());
  } else {
    Print(changes);
  }
  return changes.empty() ? kExitDone : kExitDifferent;
}

}  // namespace kiln
