#include "tuner/freeze.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"
#include "compiler/bundle_writer.h"
#include "runtime/kiln.h"
#include "templates/op_contract.h"
#include "templates/registry.h"
#include "tuner/bundle_check.h"
#include "tuner/device.h"
#include "tuner/loaded_plan.h"
#include "tuner/stored_plans.h"

namespace kiln {
namespace {

// Why the template of a plan, which is `identity`, counts as unqualified, and
// what to do.
std::string WhyUnqualified(const Plan& plan, const TemplateIdentity& identity,
                           const AttachedTemplates& attached,
                           const std::vector<QualificationReceipt>& receipts) {
  for (const auto& one : attached) {
    if (one->name() != plan.body.template_name) continue;
    return "no package has: it was compared with the oracle before it was "
           "timed, but no suite ran on such a device; pass "
           "--allow-unqualified to ship it all the same, and the bundle says "
           "that it is unqualified";
  }
  std::string what =
      "as it stands it has not passed the suite on such a device";
  for (const QualificationReceipt& receipt : receipts) {
    if (IsOfTreeSuite(receipt) || receipt.target != plan.target ||
        std::find(receipt.templates.begin(), receipt.templates.end(),
                  identity) == receipt.templates.end()) {
      continue;
    }
    what = absl::StrCat("its receipt is of the suite ", receipt.suite->name,
                        " with SHA-256 ", receipt.suite->content.ToHex(),
                        ", and the suite of this build, ", TreeSuite().name,
                        ", has ", TreeSuite().content.ToHex());
  }
  return absl::StrCat(what,
                      "; run tools/qualify.py on a device of the target, or "
                      "pass --allow-unqualified");
}

// The template behind a plan as it is in this build; unknown names and other
// versions have an identity that no receipt has.
TemplateIdentity IdentityOf(const Plan& plan) {
  TemplateIdentity identity;
  identity.name = plan.body.template_name;
  identity.version = plan.body.template_version;
  const KernelTemplate* from = FindTemplate(identity.name);
  if (from != nullptr && from->version() == identity.version) {
    identity.sources = from->sources();
  }
  return identity;
}

// A bundle's section for one target, loaded on its device for as long as this
// lives.
class LoadedSection {
 public:
  LoadedSection() = default;
  LoadedSection(const LoadedSection&) = delete;
  LoadedSection& operator=(const LoadedSection&) = delete;

  ~LoadedSection() {
    kiln_modules_unload(modules_, nullptr);
    kiln_bundle_close(bundle_, nullptr);
  }

  absl::Status Load(absl::string_view bytes, const Device& device) {
    kiln_error_t error = {};
    RETURN_IF_ERROR(
        RuntimeStatus(kiln_bundle_open_memory(bytes.data(), bytes.size(),
                                              nullptr, &bundle_, &error),
                      error));
    const std::string target = device.profile().target.ToString();
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.flags = KILN_LOAD_ALLOW_PREDICTED | KILN_LOAD_ALLOW_UNQUALIFIED;
    options.target = target.c_str();
    options.context = device.context();
    return RuntimeStatus(
        kiln_modules_load(bundle_, &options, &modules_, &error), error);
  }

  // Golden replay of every plan that can be replayed: digests by entry name
  // and interval.
  using Digests = std::map<std::string, std::map<Interval, Digest>>;

  absl::StatusOr<Digests> Replay() {
    std::vector<kiln_selftest_plan_t> plans;
    kiln_selftest_options_t options = {};
    options.struct_size = sizeof(options);
    options.flags = KILN_SELFTEST_COMPUTE;
    options.report = [](void* user, const kiln_selftest_plan_t* plan) {
      static_cast<std::vector<kiln_selftest_plan_t>*>(user)->push_back(*plan);
    };
    options.user = &plans;
    kiln_error_t error = {};
    RETURN_IF_ERROR(RuntimeStatus(
        kiln_modules_selftest(modules_, &options, nullptr, &error), error));
    kiln_modules_info_t info = {};
    info.struct_size = sizeof(info);
    RETURN_IF_ERROR(
        RuntimeStatus(kiln_modules_info(modules_, &info, &error), error));
    Digests digests;
    for (const kiln_selftest_plan_t& plan : plans) {
      if (plan.outcome != KILN_SELFTEST_COMPUTED) continue;
      kiln_entry_info_t entry = {};
      entry.struct_size = sizeof(entry);
      kiln_plan_info_t record = {};
      record.struct_size = sizeof(record);
      RETURN_IF_ERROR(RuntimeStatus(
          kiln_bundle_entry(bundle_, info.section, plan.entry, &entry, &error),
          error));
      RETURN_IF_ERROR(
          RuntimeStatus(kiln_bundle_plan(bundle_, info.section, plan.entry,
                                         plan.plan, &record, &error),
                        error));
      Digest& digest = digests[entry.name][{record.m_min, record.m_max}];
      std::copy(std::begin(plan.found), std::end(plan.found),
                digest.bytes.begin());
    }
    return digests;
  }

 private:
  kiln_bundle_t* bundle_ = nullptr;
  kiln_modules_t* modules_ = nullptr;
};

// The device of a target, or null where it is not here.
absl::StatusOr<std::unique_ptr<Device>> DeviceOf(
    const TargetContext& context, const PrewarmOptions& options) {
  if (context.profile.assumed || options.compile_only) return nullptr;
  if (context.target.backend == Backend::kCpu) {
    return OpenCpuDevice(context.target);
  }
  return OpenCudaDevice(options.device_ordinals.front(), context.target);
}

absl::StatusOr<LoadedSection::Digests> ReplayOn(Device* device,
                                                const std::string& bytes) {
  LoadedSection loaded;
  RETURN_IF_ERROR(loaded.Load(bytes, *device));
  return loaded.Replay();
}

// Runs the sections whose device is here, twice: a plan that calls itself
// deterministic must give the same digest again. `bytes` holds the sections as
// they are so far.
absl::Status AddGolden(const std::vector<TargetContext>& contexts,
                       const PrewarmOptions& options, const std::string& bytes,
                       std::vector<BundleSection>* sections) {
  for (size_t i = 0; i < contexts.size(); ++i) {
    BundleSection& section = (*sections)[i];
    ASSIGN_OR_RETURN(const std::unique_ptr<Device> device,
                     DeviceOf(contexts[i], options));
    if (device == nullptr) continue;
    const auto annotate = [&](const absl::Status& status) {
      return Annotate(
          status, absl::StrCat("golden replay on ", section.target.ToString(),
                               " (--no-golden freezes without it)"));
    };
    absl::StatusOr<LoadedSection::Digests> first =
        ReplayOn(device.get(), bytes);
    RETURN_IF_ERROR(annotate(first.status()));
    const absl::StatusOr<LoadedSection::Digests> second =
        ReplayOn(device.get(), bytes);
    RETURN_IF_ERROR(annotate(second.status()));
    for (BundleEntry& entry : section.entries) {
      entry.golden = std::move((*first)[entry.name]);
      for (const auto& [interval, digest] : entry.golden) {
        const auto again = second->find(entry.name);
        if (again == second->end() || again->second.at(interval) != digest) {
          return absl::InternalError(absl::StrCat(
              "entry ", entry.name, ", plan for m ", interval.m_min, "..",
              interval.m_max, " on ", section.target.ToString(),
              ": two runs on the same inputs differ, though its template says "
              "that it is deterministic"));
        }
      }
    }
  }
  return absl::OkStatus();
}

// Whether every entry that the plan is for has its digest of golden replay.
bool HasGolden(const BundleSection& section,
               const std::vector<std::string>& names,
               const Interval& interval) {
  return std::all_of(section.entries.begin(), section.entries.end(),
                     [&](const BundleEntry& entry) {
                       return std::find(names.begin(), names.end(),
                                        entry.name) == names.end() ||
                              entry.golden.find(interval) != entry.golden.end();
                     });
}

// The plan that serves each interval: its own, or the one that it was merged
// into, with the whole interval that this one serves.
absl::StatusOr<std::vector<Plan>> MergePlans(
    const std::vector<ResolvedInterval>& intervals,
    const std::vector<StoredPlan>& stored, double regret_cap,
    PlanCache* cache) {
  std::vector<Plan> plans;
  size_t begin = 0;
  while (begin < intervals.size()) {
    std::vector<CurvePoint> points;
    size_t end = begin;
    for (; end < intervals.size() &&
           intervals[end].context == intervals[begin].context &&
           intervals[end].geometry == intervals[begin].geometry;
         ++end) {
      ASSIGN_OR_RETURN(const std::vector<Measurement> evidence,
                       cache->LoadMeasurements(stored[end].key.digest));
      points.push_back(CurvePointOf(stored[end].plan, evidence));
    }
    for (const CurveSegment& segment : MergeIntervals(points, regret_cap)) {
      Plan plan = stored[begin + segment.last].plan;
      plan.interval.m_min = points[segment.first].interval.m_min;
      plans.insert(plans.end(), segment.last - segment.first + 1, plan);
    }
    begin = end;
  }
  return plans;
}

}  // namespace

absl::StatusOr<FreezeResult> Freeze(const Manifest& manifest,
                                    const PrewarmOptions& options,
                                    const FreezePolicy& policy,
                                    PlanCache* cache) {
  ASSIGN_OR_RETURN(const ResolvedManifest resolved_manifest,
                   ResolveManifest(manifest, options, cache));
  const std::vector<TargetContext>& contexts = resolved_manifest.contexts;
  const std::vector<ResolvedInterval>& intervals = resolved_manifest.intervals;
  ASSIGN_OR_RETURN(
      const std::vector<StoredPlan> stored,
      FindStoredPlans(intervals, contexts, !options.compile_only, cache));
  std::vector<Plan> plans;
  if (policy.regret_cap.has_value()) {
    ASSIGN_OR_RETURN(plans,
                     MergePlans(intervals, stored, *policy.regret_cap, cache));
  } else {
    for (const StoredPlan& own : stored) plans.push_back(own.plan);
  }

  FreezeResult result;
  std::vector<BundleSection> sections(contexts.size());
  std::vector<std::map<std::string, BundleEntry>> entries(contexts.size());
  std::vector<std::set<Digest>> needed(contexts.size());
  std::vector<std::set<std::string>> unqualified(contexts.size());
  for (size_t i = 0; i < intervals.size(); ++i) {
    const ResolvedInterval& resolved = intervals[i];
    const Target& target = contexts[resolved.context].target;
    const Plan& plan = plans[i];
    if (plan.interval.m_max != resolved.interval.m_max) {
      ++result.merged;
      continue;
    }
    if (plan.evidence.state == PlanState::kPredicted) {
      ++result.predicted;
      if (!policy.allow_predicted) {
        return absl::FailedPreconditionError(absl::StrCat(
            "the plan for ", IntervalName(resolved, target),
            " is predicted: it never ran on the device; prewarm on a machine "
            "that has it, or pass --allow-predicted"));
      }
    }
    const TemplateIdentity identity = IdentityOf(plan);
    if (!IsQualified(identity, target, policy.receipts)) {
      ++result.unqualified;
      if (!policy.allow_unqualified) {
        return absl::FailedPreconditionError(absl::StrCat(
            "template ", plan.body.template_name, " of the plan for ",
            IntervalName(resolved, target), " has no qualification for ",
            target.ToString(), ": ",
            WhyUnqualified(plan, identity, options.attached, policy.receipts)));
      }
      unqualified[resolved.context].insert(plan.body.template_name);
    }
    ++result.plans;
    needed[resolved.context].insert(plan.programs.begin(), plan.programs.end());
    for (const std::string& name : resolved.names) {
      BundleEntry& entry = entries[resolved.context][name];
      entry.name = name;
      entry.geometry = resolved.geometry;
      entry.buffers = ContractOf(resolved.geometry).Buffers(resolved.geometry);
      entry.plans.push_back(plan);
    }
  }
  for (size_t i = 0; i < contexts.size(); ++i) {
    BundleSection& section = sections[i];
    section.target = contexts[i].target;
    section.driver_version_min =
        section.target.backend == Backend::kCuda ? kDriverVersionMin : 0;
    section.unqualified_templates.assign(unqualified[i].begin(),
                                         unqualified[i].end());
    for (auto& [name, entry] : entries[i]) {
      section.entries.push_back(std::move(entry));
    }
    const std::vector<Digest> digests(needed[i].begin(), needed[i].end());
    ASSIGN_OR_RETURN(std::vector<std::optional<Program>> programs,
                     cache->FindPrograms(digests));
    for (size_t p = 0; p < programs.size(); ++p) {
      if (!programs[p].has_value()) {
        return absl::NotFoundError(
            absl::StrCat("program ", digests[p].Short(),
                         " of a stored plan for ", section.target.ToString(),
                         " is not in the cache; run kiln prewarm again"));
      }
      section.programs.push_back(
          std::make_shared<const Program>(*std::move(programs[p])));
    }
    result.programs += section.programs.size();
    result.entries += section.entries.size();
  }
  const BundleOptions consent = {.allow_predicted = policy.allow_predicted,
                                 .allow_unqualified = policy.allow_unqualified};
  ASSIGN_OR_RETURN(result.bytes, WriteBundle(sections, consent));
  if (policy.golden) {
    RETURN_IF_ERROR(AddGolden(contexts, options, result.bytes, &sections));
    ASSIGN_OR_RETURN(result.bytes, WriteBundle(sections, consent));
    for (size_t i = 0; i < intervals.size(); ++i) {
      const Interval& interval = plans[i].interval;
      if (interval.m_max != intervals[i].interval.m_max) continue;  // merged
      result.golden += HasGolden(sections[intervals[i].context],
                                 intervals[i].names, interval)
                           ? 1
                           : 0;
    }
  }
  RETURN_IF_ERROR(CheckBundleMatches(result.bytes, sections));
  ASSIGN_OR_RETURN(result.root, BundleRoot(result.bytes));
  return result;
}

}  // namespace kiln
