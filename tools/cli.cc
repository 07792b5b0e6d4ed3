#include "tools/cli.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "compiler/base/same_file.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_view.h"
#include "tools/progress_bar.h"
#include "tuner/attach.h"

namespace kiln {
namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// The name of this host, for the provenance columns of the cache.
std::string HostName() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "";
  return name;
}

class StageClock {
 public:
  // Seconds since the stage began.
  double Begin(Stage stage) {
    const auto now = std::chrono::steady_clock::now();
    if (stage != stage_) {
      stage_ = stage;
      begin_ = now;
    }
    return std::chrono::duration<double>(now - begin_).count();
  }

 private:
  std::optional<Stage> stage_;
  std::chrono::steady_clock::time_point begin_;
};

class TerminalProgress : public ProgressSink {
 public:
  void Update(Stage stage, size_t done, size_t total,
              const std::string& detail) override {
    bar_.Draw(StageName(stage), clock_.Begin(stage), done, total, detail);
  }

  void Note(const std::string& line) override {
    bar_.Clear();
    std::fprintf(stderr, "%s\n", line.c_str());
  }

 private:
  StageClock clock_;
  ProgressBar bar_;
};

// For logs: a line when a stage ends, and now and then while it lasts.
class LineProgress : public ProgressSink {
 public:
  void Update(Stage stage, size_t done, size_t total,
              const std::string& detail) override {
    constexpr double kSecondsBetween = 30;
    const double elapsed = clock_.Begin(stage);
    if (elapsed < printed_) printed_ = 0;  // another stage
    const bool ended = done == total && total != 0 && ended_ != stage;
    if (!ended && (done == total || elapsed - printed_ < kSecondsBetween)) {
      return;
    }
    printed_ = elapsed;
    if (ended) ended_ = stage;
    std::fprintf(stderr, "%s %zu/%zu%s%s\n",
                 std::string(StageName(stage)).c_str(), done, total,
                 RemainingTime(elapsed, done, total).c_str(),
                 ended ? "" : absl::StrCat(" ", detail).c_str());
  }

  void Note(const std::string& line) override {
    std::fprintf(stderr, "%s\n", line.c_str());
  }

 private:
  StageClock clock_;
  double printed_ = 0;  // seconds into the stage
  std::optional<Stage> ended_;
};

// only_look: nothing is to be created or changed.
absl::StatusOr<PlanCache> OpenCacheAs(const GlobalOptions& global,
                                      bool only_look) {
  PlanCacheOptions options;
  options.directory = CacheDirectory(global);
  bool known = false;
  for (const CacheMode mode :
       {CacheMode::kReadWrite, CacheMode::kReadOnly, CacheMode::kOff}) {
    if (CacheModeName(mode) != global.cache_mode) continue;
    options.mode = mode;
    known = true;
  }
  if (!known) {
    return absl::InvalidArgumentError(
        absl::StrCat("--cache-mode is \"", global.cache_mode,
                     "\", must be read-write, read-only or off"));
  }
  if (only_look && options.mode == CacheMode::kReadWrite) {
    options.mode = CacheMode::kReadOnly;
  }
  if (options.directory.empty() && options.mode != CacheMode::kOff) {
    return absl::InvalidArgumentError(
        "no folder for the cache: give --cache, or set KILN_CACHE, "
        "XDG_CACHE_HOME or HOME");
  }
  options.provenance.host_name = HostName();
  options.provenance.tool_version = "kiln " KILN_VERSION;
  return PlanCache::Open(options);
}

}  // namespace

void PrintJson(const nlohmann::ordered_json& value, int indent) {
  std::printf("%s\n",
              value
                  .dump(indent, ' ', false,
                        nlohmann::ordered_json::error_handler_t::replace)
                  .c_str());
}

int ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitDone;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:  // of what the command line names
      return kExitUsage;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:  // no template serves it
      return kExitRefused;
    default:
      return kExitFailed;
  }
}

std::string CacheDirectory(const GlobalOptions& global) {
  if (!global.cache.empty()) return global.cache;
  if (std::string cache = Environment("KILN_CACHE"); !cache.empty()) {
    return cache;
  }
  if (std::string base = Environment("XDG_CACHE_HOME"); !base.empty()) {
    return absl::StrCat(base, "/kiln");
  }
  const std::string home = Environment("HOME");
  return home.empty() ? "" : absl::StrCat(home, "/.cache/kiln");
}

bool CacheExists(const GlobalOptions& global) {
  std::error_code ignored;
  return std::filesystem::exists(
      std::filesystem::path(CacheDirectory(global)) / kCacheFileName, ignored);
}

absl::StatusOr<PlanCache> OpenCache(const GlobalOptions& global) {
  return OpenCacheAs(global, false);
}

absl::StatusOr<PlanCache> OpenExistingCache(const GlobalOptions& global) {
  return OpenCacheAs(global, !CacheExists(global));
}

absl::StatusOr<PlanCache> OpenCacheToRead(const GlobalOptions& global) {
  return OpenCacheAs(global, true);
}

absl::StatusOr<std::vector<Target>> ParseTargets(
    const std::vector<std::string>& texts) {
  std::vector<Target> targets;
  for (const std::string& text : texts) {
    Target target;
    if (text == "cpu") {
      ASSIGN_OR_RETURN(target, HostCpuTarget());
    } else {
      ASSIGN_OR_RETURN(target, ParseTarget(text));
    }
    if (std::find(targets.begin(), targets.end(), target) == targets.end()) {
      targets.push_back(target);
    }
  }
  if (targets.empty()) {
    return absl::InvalidArgumentError("no --target was given");
  }
  return targets;
}

void PrintNotesOnIdle(const PrewarmOptions& options,
                      const ResolvedManifest& resolved) {
  for (const std::string& note : NotesOnIdle(options.attached, resolved)) {
    std::fprintf(stderr, "%s\n", note.c_str());
  }
}

NvrtcProbeOptions MakeNvrtcOptions(const GlobalOptions& global) {
  NvrtcProbeOptions options;
  options.library = global.nvrtc;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    const std::string home = Environment(variable);
    if (!home.empty()) options.folders.push_back(absl::StrCat(home, "/lib64"));
  }
  return options;
}

absl::Status CheckReplacesNone(absl::string_view what,
                               const std::string& output,
                               const std::vector<std::string>& inputs) {
  for (const std::string& input : inputs) {
    if (!IsSameFile(output, input)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the ", what, " would replace ", input,
                     ", which is read; name another file with -o"));
  }
  return absl::OkStatus();
}

absl::StatusOr<PrewarmOptions> MakePrewarmOptions(
    const GlobalOptions& global, const PlanningOptions& planning) {
  PrewarmOptions options;
  ASSIGN_OR_RETURN(options.targets, ParseTargets(planning.targets));
  options.capacity_max = planning.max_capacity;
  options.arena_bytes_max = planning.max_arena;
  options.candidates_max =
      planning.exhaustive ? kAllCandidates : planning.max_candidates;
  options.warm_l2 = planning.warm_l2;
  if (!planning.keep_numerics.empty()) {
    ASSIGN_OR_RETURN(const BundleView bundle,
                     BundleView::Open(planning.keep_numerics, std::nullopt));
    ASSIGN_OR_RETURN(options.keep_numerics,
                     KeptNumerics::Read(bundle.handle()));
  }
  options.device_ordinals.clear();
  for (const int ordinal : planning.devices) {
    std::vector<int>& ordinals = options.device_ordinals;
    if (std::find(ordinals.begin(), ordinals.end(), ordinal) ==
        ordinals.end()) {
      ordinals.push_back(ordinal);
    }
  }
  options.compile_only = planning.compile_only;
  ASSIGN_OR_RETURN(options.attached, AttachPackages(planning.packages));
  options.toolchain = [global](
                          Backend backend,
                          ProbeMemo* memo) -> absl::StatusOr<CompilerSetup> {
    const bool cuda = backend == Backend::kCuda;
    const std::string& named = cuda ? global.nvrtc : global.cc_cpu;
    absl::StatusOr<CompilerSetup> setup =
        cuda ? ProbeNvrtc(MakeNvrtcOptions(global), memo)
             : ProbeCcCpu(named.empty() ? DefaultCcCpuPath() : named, memo);
    // A machine without a compiler is no mistake on the command line.
    std::error_code ignored;
    if (absl::IsNotFound(setup.status()) && !named.empty() &&
        !std::filesystem::exists(named, ignored)) {
      return absl::InvalidArgumentError(setup.status().message());
    }
    return setup;
  };
  return options;
}

std::unique_ptr<ProgressSink> MakeProgress() {
  if (isatty(STDERR_FILENO) != 0) return std::make_unique<TerminalProgress>();
  return std::make_unique<LineProgress>();
}

std::string FormatTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) {
        line += std::string(widths[i] - row[i].size() + 2, ' ');
      }
    }
    out += line + "\n";
  }
  return out;
}

void PrintWarnings(PlanCache* cache) {
  for (const std::string& warning : cache->TakeWarnings()) {
    std::fprintf(stderr, "cache: %s\n", warning.c_str());
  }
}

std::string FormatTime(int64_t unix_seconds) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC",
                          absl::FromUnixSeconds(unix_seconds),
                          absl::UTCTimeZone());
}

std::string FormatNs(double ns) {
  if (ns >= 1e9) return absl::StrFormat("%.3g s", ns / 1e9);
  if (ns >= 1e6) return absl::StrFormat("%.2f ms", ns / 1e6);
  return absl::StrFormat("%.1f us", ns / 1e3);
}

std::string FormatBytes(uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= uint64_t{1} << 30) {
    return absl::StrFormat("%.2f GiB", value / (1 << 30));
  }
  if (bytes >= 1 << 20) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  if (bytes >= 1 << 10) return absl::StrFormat("%.1f KiB", value / (1 << 10));
  return absl::StrCat(bytes, " B");
}

}  // namespace kiln
