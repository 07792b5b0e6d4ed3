#include "tuner/kept_numerics.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "tuner/loaded_plan.h"

namespace kiln {

absl::StatusOr<KeptNumerics> KeptNumerics::Read(const kiln_bundle_t* bundle) {
  KeptNumerics kept;
  kiln_error_t error = {};
  kiln_bundle_info_t info = {};
  info.struct_size = sizeof(info);
  RETURN_IF_ERROR(
      RuntimeStatus(kiln_bundle_info(bundle, &info, &error), error));
  static_assert(sizeof(info.root) == sizeof(kept.root_.bytes));
  std::memcpy(kept.root_.bytes.data(), info.root, sizeof(info.root));
  for (uint32_t s = 0; s < info.section_count; ++s) {
    kiln_section_info_t section = {};
    section.struct_size = sizeof(section);
    RETURN_IF_ERROR(
        RuntimeStatus(kiln_bundle_section(bundle, s, &section, &error), error));
    for (uint32_t e = 0; e < section.entry_count; ++e) {
      kiln_entry_info_t entry = {};
      entry.struct_size = sizeof(entry);
      RETURN_IF_ERROR(RuntimeStatus(
          kiln_bundle_entry(bundle, s, e, &entry, &error), error));
      Entry& out = kept.entries_[{section.target, entry.name}];
      out.geometry = entry.geometry;
      for (uint32_t p = 0; p < entry.plan_count; ++p) {
        kiln_plan_info_t plan = {};
        plan.struct_size = sizeof(plan);
        RETURN_IF_ERROR(RuntimeStatus(
            kiln_bundle_plan(bundle, s, e, p, &plan, &error), error));
        out.ranges.push_back({{plan.m_min, plan.m_max},
                              plan.numerics_class,
                              plan.deterministic != 0});
      }
    }
  }
  return kept;
}

absl::StatusOr<std::string> KeptNumerics::ClassOf(
    const Target& target, const std::vector<std::string>& names,
    const RequestGeometry& geometry, const Interval& interval) const {
  const auto refuse = [&](const std::string& name, absl::string_view what) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot keep the numerics of entry ", name, " for m ",
                     interval.m_min, "..", interval.m_max, " on ",
                     target.ToString(), ": the bundle ", what));
  };
  std::string found;
  for (const std::string& name : names) {
    const auto entry = entries_.find({target.ToString(), name});
    if (entry == entries_.end()) return refuse(name, "has no such entry");
    if (entry->second.geometry != geometry.ToString()) {
      return refuse(name, absl::StrCat("serves ", entry->second.geometry,
                                       " under this name, wanted is ",
                                       geometry.ToString()));
    }
    uint32_t covered = 0;
    for (const Range& range : entry->second.ranges) {
      covered = std::max(covered, range.interval.m_max);
      if (range.interval.m_max < interval.m_min ||
          range.interval.m_min > interval.m_max) {
        continue;
      }
      if (!range.deterministic) {
        return refuse(name,
                      absl::StrCat("has a plan of class ", range.numerics_class,
                                   " there, whose repeats may differ"));
      }
      if (!found.empty() && found != range.numerics_class) {
        return refuse(name,
                      absl::StrCat("has the classes ", found, " and ",
                                   range.numerics_class,
                                   " there; add a capacity where they change"));
      }
      found = range.numerics_class;
    }
    if (covered < interval.m_max) {
      return refuse(name, absl::StrCat("serves at most ", covered, " tokens"));
    }
  }
  return found;
}

}  // namespace kiln
