// kiln cache: look after a plan cache.

#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"
#include "tools/interrupt.h"
#include "tuner/explain.h"
#include "tuner/stored_plans.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

// Largest file that --digest is computed of, in bytes.
constexpr uint64_t kImportBytesMax = uint64_t{8} << 30;

Json ToJson(const std::vector<CacheFinding>& findings) {
  Json out = Json::array();
  for (const CacheFinding& finding : findings) {
    out.push_back({{"table", finding.table},
                   {"key", finding.key},
                   {"problem", finding.problem}});
  }
  return out;
}

void PrintFindings(const char* head,
                   const std::vector<CacheFinding>& findings) {
  for (const CacheFinding& finding : findings) {
    std::printf("%s %s%s%s: %s\n", head, finding.table.c_str(),
                finding.key.empty() ? "" : " ", finding.key.c_str(),
                finding.problem.c_str());
  }
}

// What manifests ask for on this machine.
absl::StatusOr<std::vector<ResolvedManifest>> ResolveManifests(
    const GlobalOptions& global, const std::vector<std::string>& manifests,
    PlanningOptions planning, PlanCache* cache) {
  std::vector<ResolvedManifest> all;
  for (const std::string& path : manifests) {
    planning.manifest = path;
    ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(path));
    ASSIGN_OR_RETURN(const PrewarmOptions options,
                     MakePrewarmOptions(global, planning));
    ASSIGN_OR_RETURN(ResolvedManifest resolved,
                     ResolveManifest(manifest, options, cache));
    PrintNotesOnIdle(options, resolved);
    all.push_back(std::move(resolved));
  }
  return all;
}

// Keys of their plans, in order.
std::vector<Digest> PlanKeysOf(const std::vector<ResolvedManifest>& manifests) {
  std::vector<Digest> keys;
  for (const ResolvedManifest& manifest : manifests) {
    for (const ResolvedInterval& interval : manifest.intervals) {
      keys.push_back(interval.key.digest);
    }
  }
  return keys;
}

// "moe m 3..4 on sm_90a: run kiln prewarm ..." of the first without a plan;
// `plans` in the order of PlanKeysOf.
absl::StatusOr<std::string> FirstMissing(
    const std::vector<ResolvedManifest>& manifests,
    const std::vector<std::optional<StoredPlan>>& plans, PlanCache* cache) {
  auto plan = plans.begin();
  for (const ResolvedManifest& manifest : manifests) {
    for (const ResolvedInterval& interval : manifest.intervals) {
      if ((plan++)->has_value()) continue;
      ASSIGN_OR_RETURN(const MissingPlan missing,
                       ExplainMissing(interval, cache));
      return absl::StrCat(
          IntervalName(interval, manifest.contexts[interval.context].target),
          ": ", missing.Advice());
    }
  }
  return std::string();
}

absl::StatusOr<std::vector<Digest>> ProgramsOfBundles(
    const std::vector<std::string>& files) {
  std::vector<Digest> keys;
  for (const std::string& file : files) {
    ASSIGN_OR_RETURN(const BundleView bundle,
                     BundleView::Open(file, std::nullopt));
    for (uint32_t s = 0; s < bundle.info().section_count; ++s) {
      for (uint32_t p = 0; p < bundle.Section(s).program_count; ++p) {
        const kiln_program_info_t program = bundle.Program(s, p);
        ASSIGN_OR_RETURN(
            const Digest key,
            Digest::FromBytes(absl::string_view(
                reinterpret_cast<const char*>(program.build_digest),
                sizeof(program.build_digest))));
        keys.push_back(key);
      }
    }
  }
  return keys;
}

absl::StatusOr<ConflictChoice> ParsePrefer(const std::string& text) {
  if (text.empty()) return ConflictChoice::kRefuse;
  if (text == "ours") return ConflictChoice::kKeepOurs;
  if (text == "theirs") return ConflictChoice::kTakeTheirs;
  return absl::InvalidArgumentError(
      absl::StrCat("--prefer is \"", text, "\", must be ours or theirs"));
}

Json ToJson(const std::string& source, const MergeReport& report) {
  Json conflicts = Json::array();
  for (const MergeConflict& conflict : report.conflicts) {
    conflicts.push_back({{"table", conflict.table},
                         {"key", conflict.key},
                         {"ours", conflict.ours},
                         {"theirs", conflict.theirs}});
  }
  return {{"source", source},
          {"plans_added", report.plans_added},
          {"programs_added", report.programs_added},
          {"rejects_added", report.rejects_added},
          {"kept", report.kept},
          {"conflicts", std::move(conflicts)},
          {"skipped", ToJson(report.skipped)},
          {"stored", report.stored}};
}

void PrintMerge(const std::string& source, const MergeReport& report,
                bool dry_run) {
  for (const MergeConflict& conflict : report.conflicts) {
    std::printf("conflict %s %s\n  ours:   %s\n  theirs: %s\n",
                conflict.table.c_str(), conflict.key.c_str(),
                conflict.ours.c_str(), conflict.theirs.c_str());
  }
  PrintFindings("skipped", report.skipped);
  std::printf("%s: %s%zu plans, %zu programs, %zu rejects; %zu already here\n",
              source.c_str(),
              report.stored ? "added "
              : dry_run     ? "would add "
                            : "nothing stored, would add ",
              report.plans_added, report.programs_added, report.rejects_added,
              report.kept);
}

// Code for one merge; says what to do about conflicts.
int MergeCode(const std::string& source, const MergeReport& report,
              ConflictChoice choice) {
  if (report.conflicts.empty() || choice != ConflictChoice::kRefuse) {
    return kExitDone;
  }
  std::fprintf(stderr,
               "kiln: %s answers %zu keys differently; choose with --prefer "
               "ours or --prefer theirs\n",
               source.c_str(), report.conflicts.size());
  return kExitRefused;
}

// A dry run changes nothing, so it needs no right to.
absl::StatusOr<PlanCache> OpenFor(const GlobalOptions& global, bool dry_run) {
  return dry_run ? OpenCacheToRead(global) : OpenCache(global);
}

const char* NameOf(const std::string& path) {
  return path.empty() ? "a cache without a file" : path.c_str();
}

absl::StatusOr<PlanCache> OpenSource(const std::string& directory,
                                     const std::string& file_name) {
  PlanCacheOptions options;
  options.directory = directory;
  options.file_name = file_name;
  options.mode = CacheMode::kReadOnly;
  const std::filesystem::path path =
      std::filesystem::path(directory) / file_name;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    return absl::NotFoundError(absl::StrCat("no cache at ", path.string()));
  }
  // As a copy that failed leaves it. To read it as a cache without rows would
  // hide that.
  if (std::filesystem::is_regular_file(path, ignored) &&
      std::filesystem::file_size(path, ignored) == 0) {
    return absl::DataLossError(
        absl::StrCat(path.string(), " is empty, expected a cache"));
  }
  return PlanCache::Open(options);
}

}  // namespace

absl::StatusOr<int> RunCacheStats(const GlobalOptions& global) {
  ASSIGN_OR_RETURN(PlanCache cache, OpenCacheToRead(global));
  ASSIGN_OR_RETURN(const CacheStats stats, cache.Stats());
  PrintWarnings(&cache);
  if (global.json) {
    Json tables;
    for (const TableStats& table : stats.tables) {
      tables[table.name] = {{"rows", table.rows}, {"bytes", table.bytes}};
    }
    PrintJson({{"path", stats.path},
               {"schema", stats.schema_version},
               {"bytes", stats.bytes},
               {"free_bytes", stats.free_bytes},
               {"tables", std::move(tables)}});
    return kExitDone;
  }
  std::printf("%s: schema %d, %s, of it %s unused\n", NameOf(stats.path),
              stats.schema_version,
              FormatBytes(static_cast<uint64_t>(stats.bytes)).c_str(),
              FormatBytes(static_cast<uint64_t>(stats.free_bytes)).c_str());
  std::vector<std::vector<std::string>> rows = {{"table", "rows", "bytes"}};
  for (const TableStats& table : stats.tables) {
    rows.push_back({table.name, absl::StrCat(table.rows),
                    FormatBytes(static_cast<uint64_t>(table.bytes))});
  }
  std::printf("%s", FormatTable(rows).c_str());
  return kExitDone;
}

absl::StatusOr<int> RunCacheCheck(const GlobalOptions& global,
                                  const CacheCheckCommand& command) {
  const bool exists = CacheExists(global);
  ASSIGN_OR_RETURN(PlanCache cache, OpenExistingCache(global));
  ASSIGN_OR_RETURN(std::vector<CacheFinding> findings, cache.Check());
  Json out;
  out["path"] = cache.path();
  out["findings"] = ToJson(findings);
  if (!global.json) PrintFindings("damaged", findings);
  if (command.repair && !findings.empty()) {
    ASSIGN_OR_RETURN(const RepairReport repaired, cache.Repair());
    out["dropped"] = ToJson(repaired.dropped);
    if (!global.json) PrintFindings("dropped", repaired.dropped);
    ASSIGN_OR_RETURN(findings, cache.Check());
    out["left"] = ToJson(findings);
    if (!global.json) PrintFindings("still damaged", findings);
  }
  PrintWarnings(&cache);
  if (global.json) {
    PrintJson(out);
  } else if (!exists) {
    std::printf("there is nothing to check\n");
  } else if (findings.empty()) {
    std::printf("%s is whole\n", NameOf(cache.path()));
  }
  return findings.empty() ? kExitDone : kExitRefused;
}

absl::StatusOr<int> RunCacheGc(const GlobalOptions& global,
                               const CacheGcCommand& command) {
  if (!command.bytes_max.has_value() && !command.days_max.has_value()) {
    return absl::InvalidArgumentError(
        "nothing says what may go; give --max-bytes, --max-age or both");
  }
  GcOptions options;
  options.dry_run = command.dry_run || !CacheExists(global);
  ASSIGN_OR_RETURN(PlanCache cache, OpenFor(global, options.dry_run));
  ASSIGN_OR_RETURN(
      const std::vector<ResolvedManifest> manifests,
      ResolveManifests(global, command.manifests, command.planning, &cache));
  options.root_plans = PlanKeysOf(manifests);
  ASSIGN_OR_RETURN(options.root_programs, ProgramsOfBundles(command.bundles));
  if (command.bytes_max.has_value()) {
    options.bytes_max = static_cast<int64_t>(*command.bytes_max);
  }
  if (command.days_max.has_value()) {
    options.age_max = static_cast<int64_t>(*command.days_max * 86400);
  }
  ASSIGN_OR_RETURN(const GcReport report, cache.CollectGarbage(options));
  PrintWarnings(&cache);
  std::map<std::string, std::pair<size_t, int64_t>> sums;
  Json removed = Json::array();
  for (const GcItem& item : report.removed) {
    ++sums[item.table].first;
    sums[item.table].second += item.bytes;
    removed.push_back({{"table", item.table},
                       {"key", item.key},
                       {"bytes", item.bytes},
                       {"created", FormatTime(item.created_unix)},
                       {"used", FormatTime(item.used_unix)},
                       {"reason", item.reason}});
  }
  if (global.json) {
    PrintJson({{"dry_run", options.dry_run},
               {"removed", std::move(removed)},
               {"bytes_before", report.bytes_before},
               {"bytes_after", report.bytes_after},
               {"plans_kept", report.plans_kept},
               {"programs_kept", report.programs_kept}});
  } else {
    if (options.dry_run) {
      for (const GcItem& item : report.removed) {
        std::printf("%s %s  %s  %s  %s\n", item.table.c_str(),
                    item.key.substr(0, 12).c_str(),
                    FormatBytes(static_cast<uint64_t>(item.bytes)).c_str(),
                    FormatTime(item.used_unix).c_str(), item.reason.c_str());
      }
    }
    for (const auto& [table, sum] : sums) {
      std::printf("%s %zu rows of %s, %s\n",
                  options.dry_run ? "would remove" : "removed", sum.first,
                  table.c_str(),
                  FormatBytes(static_cast<uint64_t>(sum.second)).c_str());
    }
    std::printf("%s, %s %s; %zu plans and %zu programs stay\n",
                FormatBytes(static_cast<uint64_t>(report.bytes_before)).c_str(),
                options.dry_run ? "would be about" : "now",
                FormatBytes(static_cast<uint64_t>(report.bytes_after)).c_str(),
                report.plans_kept, report.programs_kept);
  }
  if (options.bytes_max.has_value() && !options.dry_run &&
      report.bytes_after > *options.bytes_max) {
    std::fprintf(stderr,
                 "kiln: the cache still has %s, more than the %s asked for: "
                 "the rest is in use or was made within the last hour\n",
                 FormatBytes(static_cast<uint64_t>(report.bytes_after)).c_str(),
                 FormatBytes(*command.bytes_max).c_str());
    return kExitIncomplete;
  }
  return kExitDone;
}

absl::StatusOr<int> RunCacheExport(const GlobalOptions& global,
                                   const CacheExportCommand& command) {
  EndCleanlyWhenInterrupted(kUnfinishedIsRemoved);
  RETURN_IF_ERROR(
      CheckReplacesNone("export", command.output, command.manifests));
  ASSIGN_OR_RETURN(PlanCache cache, OpenCacheToRead(global));
  ASSIGN_OR_RETURN(
      const std::vector<ResolvedManifest> manifests,
      ResolveManifests(global, command.manifests, command.planning, &cache));
  const std::vector<Digest> keys = PlanKeysOf(manifests);
  ASSIGN_OR_RETURN(const std::vector<std::optional<StoredPlan>> plans,
                   cache.FindPlans(keys));
  size_t missing = 0;
  for (const std::optional<StoredPlan>& plan : plans) {
    missing += plan.has_value() ? 0 : 1;
  }
  if (missing > 0) {
    ASSIGN_OR_RETURN(const std::string first,
                     FirstMissing(manifests, plans, &cache));
    PrintWarnings(&cache);
    std::fprintf(stderr,
                 "kiln: %zu of %zu intervals have no plan in %s, the first is "
                 "%s\n",
                 missing, keys.size(), NameOf(cache.path()), first.c_str());
    return kExitIncomplete;
  }
  ASSIGN_OR_RETURN(const ExportReport report,
                   cache.ExportTo(command.output, keys));
  PrintWarnings(&cache);
  if (global.json) {
    PrintJson({{"file", command.output},
               {"bytes", report.bytes},
               {"digest", report.digest.ToHex()},
               {"plans", report.plans},
               {"programs", report.programs}});
  } else {
    std::printf("%s: %s, %zu plans, %zu programs\ndigest %s\n",
                command.output.c_str(), FormatBytes(report.bytes).c_str(),
                report.plans, report.programs, report.digest.ToHex().c_str());
  }
  return kExitDone;
}

absl::StatusOr<int> RunCacheImport(const GlobalOptions& global,
                                   const CacheImportCommand& command) {
  MergeOptions options;
  options.dry_run = command.dry_run;
  ASSIGN_OR_RETURN(options.choice, ParsePrefer(command.prefer));
  if (!command.digest.empty()) {
    ASSIGN_OR_RETURN(const Digest expected, Digest::FromHex(command.digest));
    ASSIGN_OR_RETURN(const std::string bytes,
                     ReadFile(command.file, kImportBytesMax));
    if (const Digest found = Sha256(bytes); found != expected) {
      return absl::FailedPreconditionError(
          absl::StrCat(command.file, " has digest ", found.ToHex(),
                       ", expected ", expected.ToHex()));
    }
  }
  const std::filesystem::path path = command.file;
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat(
        command.file,
        " is a folder, expected a file that kiln cache export wrote; kiln "
        "cache merge takes folders"));
  }
  ASSIGN_OR_RETURN(
      PlanCache source,
      OpenSource(path.has_parent_path() ? path.parent_path().string() : ".",
                 path.filename().string()));
  ASSIGN_OR_RETURN(const std::vector<CacheFinding> findings, source.Check());
  if (!findings.empty()) {
    return absl::DataLossError(absl::StrCat(
        command.file, " is damaged: ", findings.front().table, " ",
        findings.front().key, " ", findings.front().problem, " (and ",
        findings.size() - 1, " more); nothing was imported"));
  }
  ASSIGN_OR_RETURN(PlanCache cache, OpenFor(global, command.dry_run));
  ASSIGN_OR_RETURN(const MergeReport report, cache.MergeFrom(&source, options));
  PrintWarnings(&cache);
  if (global.json) {
    PrintJson(ToJson(command.file, report));
  } else {
    PrintMerge(command.file, report, command.dry_run);
  }
  return MergeCode(command.file, report, options.choice);
}

absl::StatusOr<int> RunCacheMerge(const GlobalOptions& global,
                                  const CacheMergeCommand& command) {
  MergeOptions options;
  options.dry_run = command.dry_run;
  ASSIGN_OR_RETURN(options.choice, ParsePrefer(command.prefer));
  // All sources first: one that is missing must not leave half a join.
  std::vector<PlanCache> sources;
  for (const std::string& directory : command.directories) {
    ASSIGN_OR_RETURN(PlanCache source, OpenSource(directory, kCacheFileName));
    sources.push_back(std::move(source));
  }
  ASSIGN_OR_RETURN(PlanCache cache, OpenFor(global, command.dry_run));
  int code = kExitDone;
  Json out = Json::array();
  for (size_t i = 0; i < sources.size(); ++i) {
    const std::string& directory = command.directories[i];
    ASSIGN_OR_RETURN(const MergeReport report,
                     cache.MergeFrom(&sources[i], options));
    if (global.json) {
      out.push_back(ToJson(directory, report));
    } else {
      PrintMerge(directory, report, command.dry_run);
    }
    code = std::max(code, MergeCode(directory, report, options.choice));
  }
  PrintWarnings(&cache);
  if (global.json) PrintJson({{"merged", std::move(out)}});
  return code;
}

}  // namespace kiln
