#include "tools/bundle_diff.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/bundle_json.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

class Differ {
 public:
  std::vector<BundleChange> Run(Json a, Json b) {
    // These follow from all the rest.
    const Json root_a = std::exchange(a["root"], nullptr);
    const Json root_b = std::exchange(b["root"], nullptr);
    a.erase("bytes");
    b.erase("bytes");
    Lists("section", Take(&a, "sections"), Take(&b, "sections"), "target",
          &BundleChange::target,
          [this](Json* from, Json* to) { Section(from, to); });
    Fields("bundle_changed", "", a, b);
    if (changes_.empty() && root_a != root_b) {
      // A binary that is not what its digest says; kiln verify says which.
      Add("bytes_changed", "root", root_a, root_b);
    }
    return std::move(changes_);
  }

 private:
  using Both = std::function<void(Json*, Json*)>;

  static Json Take(Json* object, const char* key) {
    Json value = std::move(object->at(key));
    object->erase(key);
    return value;
  }

  void Add(std::string kind, std::string field, Json a, Json b) {
    BundleChange change = at_;
    change.kind = std::move(kind);
    change.field = std::move(field);
    change.a = std::move(a);
    change.b = std::move(b);
    changes_.push_back(std::move(change));
  }

  // Matches the objects of two lists by the text of their member `key`. What
  // is in one list only came or went; `both` compares the others. `place` is
  // where the text goes meanwhile.
  void Lists(const std::string& kind, Json a, Json b, const char* key,
             std::string BundleChange::*place, const Both& both) {
    std::map<std::string, std::pair<Json*, Json*>> named;
    for (Json& item : a) named[item.at(key)].first = &item;
    for (Json& item : b) named[item.at(key)].second = &item;
    for (auto& [name, pair] : named) {
      at_.*place = name;
      if (pair.first == nullptr) {
        Add(kind + "_added", "", nullptr, name);
      } else if (pair.second == nullptr) {
        Add(kind + "_removed", "", name, nullptr);
      } else {
        both(pair.first, pair.second);
      }
      (at_.*place).clear();
    }
  }

  void Section(Json* a, Json* b) {
    // Steps name their programs by index, which moves without a change.
    for (Json* section : {a, b}) {
      for (Json& entry : section->at("entries")) {
        for (Json& plan : entry.at("plans")) {
          for (Json& step : plan.at("steps")) {
            const auto index = step.at("program").get<size_t>();
            step["program"] =
                section->at("programs").at(index).at("build_digest");
          }
        }
      }
    }
    Lists("entry", Take(a, "entries"), Take(b, "entries"), "name",
          &BundleChange::entry, [this](Json* x, Json* y) { Entry(x, y); });
    Lists("program", Take(a, "programs"), Take(b, "programs"), "build_digest",
          &BundleChange::field, [this](Json* x, Json* y) { Program(x, y); });
    Fields("section_changed", "", *a, *b);
  }

  void Entry(Json* a, Json* b) {
    const auto plans = [](Json list) {
      std::map<std::pair<uint32_t, uint32_t>, Json> out;
      for (Json& plan : list) {
        const std::pair<uint32_t, uint32_t> interval = {plan.at("m_min"),
                                                        plan.at("m_max")};
        out[interval] = std::move(plan);
      }
      return out;
    };
    std::map<std::pair<uint32_t, uint32_t>, std::pair<Json, Json>> intervals;
    for (auto& [interval, plan] : plans(Take(a, "plans"))) {
      intervals[interval].first = plan;
    }
    for (auto& [interval, plan] : plans(Take(b, "plans"))) {
      intervals[interval].second = plan;
    }
    for (auto& [interval, pair] : intervals) {
      at_.interval = absl::StrCat(interval.first, "..", interval.second);
      auto& [from, to] = pair;
      if (from.is_null()) {
        Add("interval_added", "", nullptr, to.at("label"));
      } else if (to.is_null()) {
        Add("interval_removed", "", from.at("label"), nullptr);
      } else {
        const Json evidence_from = Take(&from, "evidence");
        const Json evidence_to = Take(&to, "evidence");
        Fields("plan_changed", "", from, to);
        Fields("evidence_changed", "", evidence_from, evidence_to);
      }
      at_.interval.clear();
    }
    Fields("entry_changed", "", *a, *b);
  }

  void Program(Json* a, Json* b) {
    const std::string digest =
        std::exchange(at_.field, std::string()).substr(0, 12);
    Fields("program_changed", digest + " ", *a, *b);
  }

  // Goes down into objects of the same members and lists of the same length,
  // so that a change is named where it is.
  void Fields(const std::string& kind, const std::string& field, const Json& a,
              const Json& b) {
    if (a == b) return;
    if (a.is_object() && b.is_object() && SameMembers(a, b)) {
      const bool inner = !field.empty() && field.back() != ' ';
      for (const auto& [key, value] : a.items()) {
        Fields(kind, absl::StrCat(field, inner ? "." : "", key), value,
               b.at(key));
      }
    } else if (a.is_array() && b.is_array() && a.size() == b.size()) {
      for (size_t i = 0; i < a.size(); ++i) {
        Fields(kind, absl::StrFormat("%s[%d]", field, i), a[i], b[i]);
      }
    } else {
      Add(kind, field, a, b);
    }
  }

  static bool SameMembers(const Json& a, const Json& b) {
    if (a.size() != b.size()) return false;
    for (const auto& [key, value] : a.items()) {
      if (!b.contains(key)) return false;
    }
    return true;
  }

  BundleChange at_;  // where the walk is
  std::vector<BundleChange> changes_;
};

std::string TextOf(const Json& value) {
  if (value.is_null()) return "-";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// Bytes of a value that a table shows.
constexpr size_t kShown = 60;

// A text from `begin` on, as much of it as a table shows.
std::string Window(const std::string& text, size_t begin) {
  const std::string head = begin == 0 ? "" : "...";
  if (head.size() + text.size() - begin <= kShown) {
    return head + text.substr(begin);
  }
  return absl::StrCat(head, text.substr(begin, kShown - 3 - head.size()),
                      "...");
}

}  // namespace

std::pair<std::string, std::string> ShownChange(const BundleChange& change) {
  const std::string a = TextOf(change.a);
  const std::string b = TextOf(change.b);
  const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  const auto differs = static_cast<size_t>(x - a.begin());
  // So much from the beginning shows a difference whole, and so much before one
  // says what it is about.
  constexpr size_t kFromBeginning = 30;
  constexpr size_t kBefore = 24;
  size_t begin = 0;
  if (std::max(a.size(), b.size()) > kShown && differs > kFromBeginning) {
    begin = differs - kBefore;
    const size_t word = a.find_first_of(" ,;{[(", begin);
    if (word < differs) begin = word + 1;
  }
  return {Window(a, begin), Window(b, begin)};
}

std::vector<BundleChange> DiffBundles(const BundleView& a,
                                      const BundleView& b) {
  return Differ().Run(BundleToJson(a), BundleToJson(b));
}

}  // namespace kiln
