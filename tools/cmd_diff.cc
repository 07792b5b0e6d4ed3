// kiln diff: what changed between two bundles. Programs are compared by build
// digest, plans by interval, everything else by name, so that an index that
// moved is no change.

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_json.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

// One difference. `a` or `b` is null where one side has nothing.
struct Change {
  std::string kind;
  std::string target;
  std::string entry;     // empty for sections and programs
  std::string interval;  // "1..4", empty unless it is about a plan
  std::string field;     // empty for things that came or went whole
  Json a;
  Json b;
};

class Differ {
 public:
  Differ(const BundleView& a, const BundleView& b) : a_(a), b_(b) {}

  std::vector<Change> Run() {
    const auto sections = [](const BundleView& bundle) {
      std::map<std::string, uint32_t> out;
      for (uint32_t s = 0; s < bundle.info().section_count; ++s) {
        out[bundle.Section(s).target] = s;
      }
      return out;
    };
    Pair(
        sections(a_), sections(b_), "section",
        [this](const std::string& target, uint32_t a, uint32_t b) {
          at_.target = target;
          Section(a, b);
          at_.target.clear();
        },
        &Change::target);
    if (changes_.empty() && a_.Root() != b_.Root()) {
      // Cannot happen while the format holds nothing that is not shown.
      Add("bytes_changed", "root", a_.Root().ToHex(), b_.Root().ToHex());
    }
    return std::move(changes_);
  }

 private:
  void Add(std::string kind, std::string field, Json a, Json b) {
    Change change = at_;
    change.kind = std::move(kind);
    change.field = std::move(field);
    change.a = std::move(a);
    change.b = std::move(b);
    changes_.push_back(std::move(change));
  }

  // Walks two name -> index tables in order. `place` is where the name goes in
  // a "KIND_added" or "KIND_removed".
  template <typename Both>
  void Pair(const std::map<std::string, uint32_t>& a,
            const std::map<std::string, uint32_t>& b, const std::string& kind,
            const Both& both, std::string Change::*place) {
    std::set<std::string> names;
    for (const auto& [name, index] : a) names.insert(name);
    for (const auto& [name, index] : b) names.insert(name);
    for (const std::string& name : names) {
      const auto in_a = a.find(name);
      const auto in_b = b.find(name);
      if (in_a != a.end() && in_b != b.end()) {
        both(name, in_a->second, in_b->second);
        continue;
      }
      const bool added = in_a == a.end();
      Add(absl::StrCat(kind, added ? "_added" : "_removed"), "",
          added ? Json() : Json(name), added ? Json(name) : Json());
      changes_.back().*place = name;
    }
  }

  void Field(const std::string& kind, const std::string& field, const Json& a,
             const Json& b) {
    if (a != b) Add(kind, field, a, b);
  }

  void Section(uint32_t sa, uint32_t sb) {
    Field("section_changed", "driver_version_min",
          a_.Section(sa).driver_version_min, b_.Section(sb).driver_version_min);
    const auto entries = [](const BundleView& bundle, uint32_t section) {
      std::map<std::string, uint32_t> out;
      for (uint32_t e = 0; e < bundle.Section(section).entry_count; ++e) {
        out[bundle.Entry(section, e).name] = e;
      }
      return out;
    };
    Pair(
        entries(a_, sa), entries(b_, sb), "entry",
        [&](const std::string& name, uint32_t a, uint32_t b) {
          at_.entry = name;
          Entry(sa, a, sb, b);
          at_.entry.clear();
        },
        &Change::entry);
    const auto programs = [](const BundleView& bundle, uint32_t section) {
      std::map<std::string, uint32_t> out;
      for (uint32_t p = 0; p < bundle.Section(section).program_count; ++p) {
        out[ProgramToJson(bundle, section, p)["build_digest"]] = p;
      }
      return out;
    };
    Pair(
        programs(a_, sa), programs(b_, sb), "program",
        [&](const std::string& digest, uint32_t a, uint32_t b) {
          Fields("program_changed", ProgramToJson(a_, sa, a),
                 ProgramToJson(b_, sb, b), digest.substr(0, 12) + " ");
        },
        &Change::field);
  }

  void Entry(uint32_t sa, uint32_t ea, uint32_t sb, uint32_t eb) {
    const kiln_entry_info_t a = a_.Entry(sa, ea);
    const kiln_entry_info_t b = b_.Entry(sb, eb);
    Field("entry_changed", "op", a.op, b.op);
    Field("entry_changed", "geometry", a.geometry, b.geometry);
    Field("entry_changed", "capacity", a.capacity, b.capacity);
    const auto plans = [](const BundleView& bundle, uint32_t section,
                          uint32_t entry) {
      std::map<std::pair<uint32_t, uint32_t>, uint32_t> out;
      for (uint32_t p = 0; p < bundle.Entry(section, entry).plan_count; ++p) {
        const kiln_plan_info_t plan = bundle.Plan(section, entry, p);
        out[{plan.m_min, plan.m_max}] = p;
      }
      return out;
    };
    const auto in_a = plans(a_, sa, ea);
    const auto in_b = plans(b_, sb, eb);
    std::set<std::pair<uint32_t, uint32_t>> intervals;
    for (const auto& [interval, index] : in_a) intervals.insert(interval);
    for (const auto& [interval, index] : in_b) intervals.insert(interval);
    for (const auto& interval : intervals) {
      at_.interval = absl::StrCat(interval.first, "..", interval.second);
      const auto pa = in_a.find(interval);
      const auto pb = in_b.find(interval);
      if (pa == in_a.end()) {
        Add("interval_added", "", nullptr, b_.Plan(sb, eb, pb->second).label);
      } else if (pb == in_b.end()) {
        Add("interval_removed", "", a_.Plan(sa, ea, pa->second).label, nullptr);
      } else {
        Plan(PlanOf(a_, sa, ea, pa->second), PlanOf(b_, sb, eb, pb->second));
      }
      at_.interval.clear();
    }
  }

  // The plan as JSON, with programs by digest instead of by index.
  static Json PlanOf(const BundleView& bundle, uint32_t section, uint32_t entry,
                     uint32_t index) {
    Json plan = PlanToJson(bundle, section, entry, index);
    for (Json& step : plan["steps"]) {
      step["program"] = ProgramToJson(
          bundle, section, step["program"].get<uint32_t>())["build_digest"];
    }
    return plan;
  }

  void Plan(Json a, Json b) {
    const Json evidence_a = std::exchange(a["evidence"], nullptr);
    const Json evidence_b = std::exchange(b["evidence"], nullptr);
    Fields("plan_changed", a, b, "");
    Fields("evidence_changed", evidence_a, evidence_b, "");
  }

  // Two objects with the same keys.
  void Fields(const std::string& kind, const Json& a, const Json& b,
              const std::string& prefix) {
    for (const auto& [key, value] : a.items()) {
      Field(kind, prefix + key, value, b[key]);
    }
  }

  const BundleView& a_;
  const BundleView& b_;
  Change at_;  // where the walk is
  std::vector<Change> changes_;
};

std::string Shown(const Json& value) {
  if (value.is_null()) return "-";
  std::string text =
      value.is_string() ? value.get<std::string>() : value.dump();
  constexpr size_t kShown = 60;
  if (text.size() > kShown) text = text.substr(0, kShown - 3) + "...";
  return text;
}

void Print(const std::vector<Change>& changes) {
  std::vector<std::vector<std::string>> rows = {
      {"change", "target", "entry", "m", "field", "from", "to"}};
  for (const Change& change : changes) {
    const auto cell = [](const std::string& text) {
      return text.empty() ? std::string("-") : Shown(text);
    };
    rows.push_back({change.kind, change.target, cell(change.entry),
                    cell(change.interval), cell(change.field), Shown(change.a),
                    Shown(change.b)});
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
  const std::vector<Change> changes = Differ(a, b).Run();
  if (global.json) {
    Json out;
    out["equal"] = changes.empty();
    out["roots"] = {a.Root().ToHex(), b.Root().ToHex()};
    out["changes"] = Json::array();
    for (const Change& change : changes) {
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
