// kiln: command line. Parses options, calls one verb, maps its status to an
// exit code.

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "compiler/base/available_memory.h"
#include "compiler/nvrtc_worker.h"
#include "tools/cli.h"
#include "tools/cmd_encode.h"
#include "tuner/race_worker.h"

namespace {

constexpr char kSecondsRule[] = "a number of seconds within 0.001..1000000";

using Verb = std::function<absl::StatusOr<int>()>;

// CLI11's own checks of numbers let NaN and infinities pass, and its reader
// turns what does not fit 64 bits into something that does.
CLI::Validator NumberWithin(double min, double max, const std::string& rule) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        double value = 0;
        // Written so that NaN fails too.
        if (absl::SimpleAtod(text, &value) && value >= min && value <= max) {
          return "";
        }
        return "\"" + text + "\" is not " + rule;
      },
      "");
}

bool IsDigits(const std::string& text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
}

// CLI11 reads "010" as eight: numbers that are whole reach it without leading
// zeros. For transform().
CLI::Validator WholeNumber(uint64_t min = 0, uint64_t max = UINT64_MAX) {
  const bool any = min == 0 && max == UINT64_MAX;
  const std::string range = any ? "" : absl::StrCat(min, "..", max);
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        uint64_t value = 0;
        if (IsDigits(text) && absl::SimpleAtoi(text, &value) && value >= min &&
            value <= max) {
          text = absl::StrCat(value);
          return "";
        }
        return absl::StrCat("\"", text, "\" is not a whole number ",
                            any ? "of 64 bits" : "within ", range);
      },
      range);
}

// "512MiB" and the like, as bytes; all units are powers of 1024. For
// transform().
CLI::Validator Size(uint64_t min, uint64_t max) {
  const auto bytes_of = [](absl::string_view text) -> std::optional<uint64_t> {
    const size_t end =
        std::min(text.find_first_not_of("0123456789"), text.size());
    uint64_t value = 0;
    if (!absl::SimpleAtoi(text.substr(0, end), &value)) return std::nullopt;
    std::string unit = absl::AsciiStrToLower(
        absl::StripLeadingAsciiWhitespace(text.substr(end)));
    if (unit.empty() || unit == "b") return value;
    const size_t power = absl::string_view("kmgtpe").find(unit.front());
    unit.erase(0, 1);
    if (power == absl::string_view::npos ||
        !(unit.empty() || unit == "b" || unit == "i" || unit == "ib")) {
      return std::nullopt;
    }
    const uint64_t factor = uint64_t{1} << (10 * (power + 1));
    if (value > UINT64_MAX / factor) return std::nullopt;
    return value * factor;
  };
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        const std::optional<uint64_t> bytes = bytes_of(text);
        if (!bytes.has_value() || *bytes < min || *bytes > max) {
          return absl::StrCat("\"", text, "\" is not a size within ", min, "..",
                              max, " bytes, as in 512MiB");
        }
        text = absl::StrCat(*bytes);
        return "";
      },
      "");
}

// Refuses "" as the value of any option of `app` and its verbs: an unset
// variable of a script must not mean the default. A verify --key "" that looks
// at no signature would be a success.
void RefuseEmptyValues(CLI::App* app) {
  const CLI::Validator not_empty(
      [](std::string& text) -> std::string {
        return text.empty() ? "\"\" names nothing" : "";
      },
      "");
  for (CLI::Option* option : app->get_options()) {
    if (option->get_items_expected_max() > 0) option->check(not_empty);
  }
  const std::function<bool(CLI::App*)> all;
  for (CLI::App* verb : app->get_subcommands(all)) RefuseEmptyValues(verb);
}

// A shell may close what a program should inherit; a file that is opened later
// must not take the place of stdout or stderr.
void OccupyStandardStreams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) != -1 || errno != EBADF) continue;
    // The lowest free number is fd. Reading stdin ends at once; writing to a
    // stdout that was closed fails, which FlushResults reports.
    if (open("/dev/null", fd == STDERR_FILENO ? O_WRONLY : O_RDONLY) < 0) {
      std::abort();
    }
  }
}

// A result that was not written is no result.
int FlushResults(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "kiln: cannot write to stdout: %s\n",
               std::strerror(errno));
  return code == kiln::kExitDone ? kiln::kExitFailed : code;
}

// The options that decide a plan's key, apart from the manifest.
void AddKeyOptions(CLI::App* verb, kiln::PlanningOptions* planning,
                   bool target_required) {
  verb->add_option("--target", planning->targets,
                   "sm_90a, sm_120a, ..., cpu-x86-64-v3, or cpu for this "
                   "machine; may be repeated")
      ->required(target_required)
      ->allow_extra_args(false);
  verb->add_option("--max-capacity", planning->max_capacity,
                   "Leave out capacities above N tokens")
      ->type_name("N")
      ->transform(WholeNumber(1, 1u << 20));
  verb->add_option("--max-candidates", planning->max_candidates,
                   "Candidates per interval and template (default 16 on GPUs, "
                   "6 on CPUs)")
      ->type_name("N")
      ->transform(WholeNumber(1, 4096));
  verb->add_option("--max-arena", planning->max_arena,
                   "Only candidates that need at most so much scratch: 512MiB")
      ->type_name("SIZE")
      ->transform(Size(1, kiln::kArenaBytesMax));
  verb->add_flag("--exhaustive", planning->exhaustive,
                 "All legal candidates: the cost model leaves none out")
      ->excludes("--max-candidates");
  verb->add_option("--keep-numerics", planning->keep_numerics,
                   "Only plans whose results are bit-identical to those of "
                   "this bundle: equal numerics class, per interval")
      ->type_name("BUNDLE");
  verb->add_option("--package", planning->packages,
                   "Folder of a kernel package whose candidates compete too; "
                   "part of every key; may be repeated")
      ->type_name("DIR")
      ->allow_extra_args(false);
  verb->add_flag("--warm-l2", planning->warm_l2,
                 "Time with weights in the L2 cache (default: cold)");
  verb->add_option("--device", planning->devices,
                   "GPU to use, by the driver's number (default 0); prewarm "
                   "races on several that are alike: 0,1")
      ->type_name("N,...")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->transform(WholeNumber(0, 63));
  verb->add_flag("--compile-only", planning->compile_only,
                 "Touch no device: compile and inspect; plans are predicted");
}

void AddPlanning(CLI::App* verb, kiln::PlanningOptions* planning) {
  verb->add_option("manifest", planning->manifest,
                   "Model manifest, schema kiln.model/1")
      ->required();
  AddKeyOptions(verb, planning, true);
}

void AddRegretCap(CLI::App* verb, double* regret_cap) {
  verb->add_option("--regret-cap", *regret_cap,
                   "Time that merging adjacent intervals may cost, as a "
                   "fraction (default 0.01; 0 merges only equal winners)")
      ->type_name("FRACTION")
      ->check(NumberWithin(0, 10, "a fraction within 0..10"));
}

void AddPrefer(CLI::App* verb, std::string* prefer, bool* dry_run) {
  verb->add_option("--prefer", *prefer,
                   "ours or theirs, where both answer a key differently "
                   "(default: show and refuse)")
      ->type_name("SIDE");
  verb->add_flag("--dry-run", *dry_run, "Show what would be done");
}

int Run(int argc, char** argv) {
  CLI::App app{
      "Kiln bakes the GPU kernels of a model before the engine that serves it "
      "starts."};
  app.set_version_flag("--version", "kiln " KILN_VERSION);
  app.require_subcommand(1);
  app.fallthrough();
  app.footer(
      "Exit codes: 0 done, 1 failed, 2 usage, invalid input or a named file "
      "that is not there,\n3 incomplete (an interval has no verified winner), "
      "4 refused (fingerprint, digest,\ntarget or policy, or what no "
      "template serves).");

  kiln::GlobalOptions global;
  app.add_option("--cache", global.cache,
                 "Cache folder (default $KILN_CACHE, $XDG_CACHE_HOME/kiln or "
                 "~/.cache/kiln)")
      ->type_name("DIR");
  app.add_option("--cache-mode", global.cache_mode,
                 "read-write, read-only or off (default read-write)")
      ->type_name("MODE");
  app.add_flag("--json", global.json, "Results as JSON on stdout");
  app.add_option("--nvrtc", global.nvrtc,
                 "libnvrtc to compile with (default: searched for)")
      ->type_name("FILE");
  app.add_option("--cc-cpu", global.cc_cpu,
                 "kiln-cc-cpu to compile with (default: beside kiln)")
      ->type_name("FILE");

  Verb chosen;

  kiln::DescribeCommand describe;
  CLI::App* verb = app.add_subcommand(
      "describe", "Write the manifest of a checkpoint; reads no weights");
  verb->add_option("checkpoint", describe.checkpoint,
                   "Folder with config.json and safetensors files")
      ->required();
  verb->add_option("-o,--output", describe.output,
                   "Manifest to write (default: stdout)")
      ->type_name("FILE");
  verb->add_option("--tp", describe.tensor_parallel,
                   "Ranks that share each expert, or each matrix of a dense "
                   "model (default 1)")
      ->type_name("N")
      ->transform(WholeNumber(1, 4096));
  verb->callback(
      [&] { chosen = [&] { return RunDescribe(global, describe); }; });

  kiln::PrepareCommand prepare;
  verb = app.add_subcommand(
      "prepare", "Write one layer's weights as the kernels read them");
  verb->add_option("checkpoint", prepare.checkpoint,
                   "Folder with config.json and safetensors files")
      ->required();
  verb->add_option("-o,--output", prepare.output, "Folder to write into")
      ->type_name("DIR")
      ->required();
  verb->add_option("--layer", prepare.layer,
                   "Layer of the model, from 0; of a dense model, the one "
                   "behind the last is its head")
      ->type_name("N")
      ->required()
      ->transform(WholeNumber(0, 1023));
  verb->add_option("--tp", prepare.tensor_parallel,
                   "Rank K of N, counted from 0 (default 0/1)")
      ->type_name("K/N");
  verb->callback([&] { chosen = [&] { return RunPrepare(global, prepare); }; });

  kiln::EncodeCommand encode;
  verb = app.add_subcommand(
      "encode",
      "Make an EXL3 checkpoint, or NPK-1 sidecars, from real-valued weights");
  verb->add_option("checkpoint", encode.checkpoint,
                   "Folder with config.json and safetensors files; matrices of "
                   "routed experts, or of a dense model's layers, in F32, F16 "
                   "or BF16")
      ->required();
  verb->add_option("-o,--output", encode.output,
                   "Folder to write, new or empty")
      ->type_name("DIR")
      ->required();
  verb->add_option("--format", encode.format, "exl3 or npk1 (default exl3)")
      ->type_name("NAME");
  verb->add_option("--bits", encode.bits,
                   "Bits per weight: exl3 1..8, or of experts gate,up,down; "
                   "npk1 2..5 (default 4)")
      ->type_name("K");
  verb->add_option("--codebook", encode.codebook,
                   "exl3: 3inst, mcg or mul1 (default mcg)")
      ->type_name("NAME");
  verb->add_option("--tp", encode.tensor_parallel,
                   "npk1: ranks that share each expert (default 1)")
      ->type_name("N")
      ->transform(WholeNumber(1, 4096));
  verb->add_option("--boundary", encode.boundary,
                   "npk1: coupled or identity (default coupled)")
      ->type_name("NAME");
  verb->add_option("--limit", encode.limit,
                   "npk1: clamp of gate and up (default inf)")
      ->type_name("X");
  verb->add_option("--seed", encode.seed, "Of the scales' signs (default 0)")
      ->type_name("S")
      ->transform(WholeNumber());
  verb->add_option("--threads", encode.threads,
                   "Threads (default: one per core)")
      ->type_name("N")
      ->transform(WholeNumber(1, 1024));
  verb->callback([&] { chosen = [&] { return RunEncode(global, encode); }; });

  kiln::PlanningOptions plan;
  verb = app.add_subcommand(
      "plan", "Requests, intervals, candidates and rejects; compiles nothing");
  AddPlanning(verb, &plan);
  verb->callback([&] { chosen = [&] { return RunPlan(global, plan); }; });

  kiln::PrewarmCommand prewarm;
  verb = app.add_subcommand(
      "prewarm", "Compile, verify, race and store the winners of a model");
  AddPlanning(verb, &prewarm.planning);
  verb->add_option("--jobs", prewarm.jobs,
                   "Compile workers (default: cores, as memory allows)")
      ->type_name("N")
      ->transform(WholeNumber(1, 1024));
  verb->add_option("--compile-timeout", prewarm.compile_timeout,
                   "Seconds one compile may take (default 120)")
      ->type_name("SECONDS")
      ->check(NumberWithin(1e-3, 1e6, kSecondsRule));
  verb->add_option("--budget", prewarm.budget,
                   "Seconds that timing may take per request, shared by its "
                   "intervals (default 10 for each of them)")
      ->type_name("SECONDS")
      ->check(NumberWithin(1e-3, 1e6, kSecondsRule));
  verb->add_option("--launch-timeout", prewarm.launch_timeout,
                   "Seconds one launch may take in a race before its candidate "
                   "is set aside (default 30 on GPUs, 300 on CPUs)")
      ->type_name("SECONDS")
      ->check(NumberWithin(1e-3, 1e6, kSecondsRule));
  verb->add_flag("--exclusive", prewarm.exclusive,
                 "Refuse a device that another process races or computes on "
                 "(default: wait for a race, warn of the rest)");
  verb->add_option("--stop-after", prewarm.stop_after,
                   "resolve, lookup, enumerate, compile or race")
      ->type_name("STAGE");
  verb->add_option("--shard", prewarm.shard,
                   "Do part K of N (1 <= K <= N) into this cache: with "
                   "--stop-after compile a part of the programs, else of the "
                   "intervals; kiln cache merge joins the caches")
      ->type_name("K/N");
  verb->add_flag("--recheck", prewarm.recheck,
                 "Then measure each winner and the default again, on inputs "
                 "that no race has seen; exit 1 when a winner is slower beyond "
                 "the noise")
      ->excludes("--stop-after")
      ->excludes("--compile-only");
  verb->callback([&] { chosen = [&] { return RunPrewarm(global, prewarm); }; });

  kiln::ExplainCommand explain;
  CLI::App* verb_explain = app.add_subcommand(
      "explain",
      "Why a plan won and what each rival lost by; on a miss, how its "
      "candidates failed, or the fields that keep the nearest plan from "
      "applying");
  AddPlanning(verb_explain, &explain.planning);
  verb_explain->add_option("--entry", explain.entry, "Entry, a request's name")
      ->type_name("NAME")
      ->required();
  verb_explain->add_option("--tokens", explain.tokens, "Live tokens m")
      ->type_name("M")
      ->required()
      ->transform(WholeNumber(1, uint64_t{1} << 40));
  verb_explain->callback(
      [&] { chosen = [&] { return RunExplain(global, explain); }; });

  CLI::App* package =
      app.add_subcommand("package", "Kernel packages: bring your own kernels");
  package->require_subcommand(1);
  package->fallthrough();
  kiln::PackageCommand package_command;
  verb = package->add_subcommand(
      "check",
      "Check a package in full and show what it offers; compiles nothing");
  verb->add_option("folder", package_command.folder, "Folder of the package")
      ->required();
  verb->footer(
      "Exit codes: 0 all is well, 2 malformed, or a file that is not there, 4 "
      "a file is not the pinned one.");
  verb->callback([&] {
    chosen = [&] { return RunPackageCheck(global, package_command); };
  });
  verb = package->add_subcommand(
      "pin",
      "Write the SHA-256 of every file, as it is now, into package.json");
  verb->add_option("folder", package_command.folder, "Folder of the package")
      ->required();
  verb->callback(
      [&] { chosen = [&] { return RunPackagePin(global, package_command); }; });

  CLI::App* cache = app.add_subcommand("cache", "Look after the plan cache");
  cache->require_subcommand(1);
  cache->fallthrough();
  verb = cache->add_subcommand("stats", "Rows and bytes of each table");
  verb->callback([&] { chosen = [&] { return RunCacheStats(global); }; });

  kiln::CacheCheckCommand check;
  verb = cache->add_subcommand(
      "check", "Read every row and digest; exit 4 when something is damaged");
  verb->add_flag("--repair", check.repair,
                 "Rebuild the file from the rows that are whole");
  verb->callback(
      [&] { chosen = [&] { return RunCacheCheck(global, check); }; });

  kiln::CacheGcCommand gc;
  verb = cache->add_subcommand(
      "gc",
      "Remove what is old or too much; what manifests, bundles and the last "
      "hour need stays");
  verb->add_option("--max-bytes", gc.bytes_max,
                   "Size to shrink the file to, for example 500MB or 2GiB")
      ->type_name("SIZE")
      ->transform(Size(0, INT64_MAX));
  verb->add_option("--max-age", gc.days_max, "Remove rows older than DAYS")
      ->type_name("DAYS")
      ->check(NumberWithin(0, 1e6, "a number of days within 0..1000000"));
  CLI::Option* const roots =
      verb->add_option("--manifest", gc.manifests,
                       "Manifest whose plans for --target stay; may be "
                       "repeated")
          ->type_name("FILE")
          ->allow_extra_args(false);
  const size_t before_keys = verb->get_options().size();
  AddKeyOptions(verb, &gc.planning, false);
  // They choose plans of a manifest, and nothing without one.
  const std::vector<CLI::Option*> of_gc = verb->get_options();
  for (size_t i = before_keys; i < of_gc.size(); ++i) of_gc[i]->needs(roots);
  verb->add_option("--bundle", gc.bundles,
                   "Bundle whose programs and plans stay; may be repeated")
      ->type_name("FILE")
      ->allow_extra_args(false);
  verb->add_flag("--dry-run", gc.dry_run, "Show what would be removed");
  verb->callback([&] { chosen = [&] { return RunCacheGc(global, gc); }; });

  kiln::CacheExportCommand cache_export;
  verb = cache->add_subcommand(
      "export",
      "Write the plans of models, with evidence and programs, to one "
      "file");
  verb->add_option("manifest", cache_export.manifests,
                   "Manifests, schema kiln.model/1")
      ->required();
  AddKeyOptions(verb, &cache_export.planning, true);
  verb->add_option("-o,--output", cache_export.output, "File to write")
      ->type_name("FILE")
      ->required();
  verb->callback(
      [&] { chosen = [&] { return RunCacheExport(global, cache_export); }; });

  kiln::CacheImportCommand cache_import;
  verb = cache->add_subcommand("import",
                               "Check an exported file and add all it has");
  verb->add_option("file", cache_import.file, "File that export wrote")
      ->required();
  verb->add_option("--digest", cache_import.digest,
                   "SHA-256 that the file must have, as export printed it")
      ->type_name("HEX");
  AddPrefer(verb, &cache_import.prefer, &cache_import.dry_run);
  verb->callback(
      [&] { chosen = [&] { return RunCacheImport(global, cache_import); }; });

  kiln::CacheMergeCommand merge;
  verb = cache->add_subcommand("merge",
                               "Add all that other caches have to this one");
  verb->add_option("folders", merge.directories, "Cache folders to add")
      ->required();
  AddPrefer(verb, &merge.prefer, &merge.dry_run);
  verb->callback(
      [&] { chosen = [&] { return RunCacheMerge(global, merge); }; });

  kiln::FreezeCommand freeze;
  verb = app.add_subcommand("freeze", "Write the stored winners to one file");
  AddPlanning(verb, &freeze.planning);
  verb->add_option("-o,--output", freeze.output, "Bundle to write")
      ->type_name("FILE")
      ->required();
  verb->add_flag("--allow-predicted", freeze.allow_predicted,
                 "Accept plans that never ran; the bundle says so");
  verb->add_flag("--allow-unqualified", freeze.allow_unqualified,
                 "Accept templates that have not passed the suite on a device "
                 "of the target; the bundle says so");
  verb->add_flag("--no-golden", freeze.no_golden,
                 "Do not run the plans for the digests of golden replay: the "
                 "same bytes on machines with and without the device");
  AddRegretCap(verb, &freeze.regret_cap);
  verb->add_flag("--keep-intervals", freeze.keep_intervals,
                 "Merge nothing: one plan per capacity of the manifest")
      ->excludes("--regret-cap");
  verb->callback([&] { chosen = [&] { return RunFreeze(global, freeze); }; });

  kiln::VerifyCommand verify;
  verb = app.add_subcommand(
      "verify",
      "Check a bundle's structure and digests; with --key its signature, with "
      "--selftest its results");
  verb->add_option("file", verify.file, "Bundle")->required();
  verb->add_option("--root", verify.root, "Root that the bundle must have")
      ->type_name("HEX");
  CLI::Option* const key =
      verb->add_option("--key", verify.key,
                       "Public key whose signature the root must carry")
          ->type_name("PUB");
  verb->add_option("--signature", verify.signature,
                   "Signature to check with --key (default FILE.sig)")
      ->type_name("SIG")
      ->needs(key);
  CLI::Option* const selftest = verb->add_flag(
      "--selftest", verify.selftest,
      "Golden replay: run every plan that has a digest on this machine's "
      "device and compare its output with that of freeze");
  verb->add_option("--target", verify.target,
                   "Section to test (default: the GPU's, else the CPU's)")
      ->needs(selftest);
  verb->add_option("--device", verify.device, "GPU (default 0)")
      ->type_name("N")
      ->transform(WholeNumber(0, 63))
      ->needs(selftest);
  verb->add_flag("--allow-predicted", verify.allow_predicted,
                 "Load plans that never ran; they are not tested")
      ->needs(selftest);
  verb->add_flag("--allow-unqualified", verify.allow_unqualified,
                 "Load plans of templates without a qualification")
      ->needs(selftest);
  verb->footer(
      "Exit codes: 0 all is well, 2 no such file, 3 --selftest found no plan "
      "with a digest, 4 refused: another root, damaged, unsigned, or a plan "
      "that gives other results.");
  verb->callback([&] { chosen = [&] { return RunVerify(global, verify); }; });

  kiln::DiffCommand diff;
  verb = app.add_subcommand(
      "diff",
      "What changed from bundle A to B: entries, intervals, plans, "
      "evidence, programs");
  verb->add_option("a", diff.a, "Bundle")->required();
  verb->add_option("b", diff.b, "Bundle")->required();
  verb->footer(
      "Exit codes: 0 equal, 1 different, 2 no such file, 4 not a whole "
      "bundle.");
  verb->callback([&] { chosen = [&] { return RunDiff(global, diff); }; });

  kiln::SignCommand sign;
  verb = app.add_subcommand(
      "sign", "Write an Ed25519 signature of a bundle's root beside it");
  CLI::Option* const to_sign = verb->add_option(
      "file", sign.file, "Bundle (may be left out with --new-key)");
  verb->add_option("--key", sign.key,
                   "Secret key file; mode 0600 and yours, or refused")
      ->type_name("SEC")
      ->required();
  verb->add_flag("--new-key", sign.new_key,
                 "Make SEC and SEC.pub first; neither may exist");
  verb->add_option("-o,--output", sign.output, "Signature (default FILE.sig)")
      ->type_name("SIG")
      ->needs(to_sign);
  verb->callback([&] { chosen = [&] { return RunSign(global, sign); }; });

  kiln::InspectCommand inspect;
  verb = app.add_subcommand("inspect", "Show what a bundle contains");
  verb->add_option("file", inspect.file, "Bundle")->required();
  verb->callback([&] { chosen = [&] { return RunInspect(global, inspect); }; });

  kiln::RunCommand run;
  verb = app.add_subcommand(
      "run", "Load a bundle through the runtime and launch on seeded data");
  verb->add_option("file", run.file, "Bundle")->required();
  verb->add_option("--entry", run.entry, "Entry, a request's name")
      ->type_name("NAME")
      ->required();
  verb->add_option("--tokens", run.tokens, "Live tokens m")
      ->type_name("M")
      ->required()
      ->transform(WholeNumber(0, uint64_t{1} << 40));
  verb->add_option("--target", run.target,
                   "Section to run (default: the GPU's, else the CPU's)");
  verb->add_option("--seed", run.seed, "Of weights and inputs (default 1)")
      ->type_name("S")
      ->transform(WholeNumber());
  verb->add_option("--device", run.device, "GPU (default 0)")
      ->type_name("N")
      ->transform(WholeNumber(0, 63));
  verb->add_flag("--check", run.check,
                 "Compare with the float64 oracle, also after a captured "
                 "replay on changed inputs and routes");
  verb->add_flag("--allow-predicted", run.allow_predicted,
                 "Load plans that never ran");
  verb->add_flag("--allow-unqualified", run.allow_unqualified,
                 "Load plans of templates without a qualification");
  verb->callback([&] { chosen = [&] { return RunRun(global, run); }; });

  kiln::BenchCommand bench;
  verb = app.add_subcommand(
      "bench",
      "Time of each plan at its capacity, against the device's floors");
  verb->add_option("file", bench.file, "Bundle")->required();
  verb->add_option("--entry", bench.entry, "Entry (default: all)")
      ->type_name("NAME");
  verb->add_option("--target", bench.target,
                   "Section to time (default: the GPU's, else the CPU's)");
  verb->add_option("--device", bench.device, "GPU (default 0)")
      ->type_name("N")
      ->transform(WholeNumber(0, 63));
  verb->add_option("--max-capacity", bench.max_capacity,
                   "Leave out capacities above N tokens")
      ->type_name("N")
      ->transform(WholeNumber(1, 1u << 20));
  verb->add_option("--blocks", bench.blocks,
                   "Timed blocks of two runs each (default 15)")
      ->type_name("N")
      ->transform(WholeNumber(2, 10000));
  verb->add_flag("--warm-l2", bench.warm_l2,
                 "Time with weights in the L2 cache (default: cold)");
  CLI::Option* const compare =
      verb->add_option("--compare", bench.compare,
                       "torch: time PyTorch's bf16 fused_moe in the same "
                       "blocks")
          ->type_name("WHAT");
  verb->add_option("--python", bench.python,
                   "Python with PyTorch (default python3)")
      ->type_name("FILE")
      ->needs(compare);
  verb->add_flag("--allow-predicted", bench.allow_predicted,
                 "Load plans that never ran");
  verb->add_flag("--allow-unqualified", bench.allow_unqualified,
                 "Load plans of templates without a qualification");
  verb->callback([&] { chosen = [&] { return RunBench(global, bench); }; });

  kiln::ReplayCommand replay;
  verb = app.add_subcommand(
      "replay",
      "Derive every stored winner, and the intervals that freeze would merge, "
      "again from the samples");
  AddRegretCap(verb, &replay.regret_cap);
  verb->callback([&] { chosen = [&] { return RunReplay(global, replay); }; });

  kiln::ReportCommand report;
  verb = app.add_subcommand(
      "report", "Charts and tables of all measured plans, as one HTML page");
  verb->add_option("-o,--output", report.output, "Page to write")
      ->type_name("FILE")
      ->required();
  verb->add_option("--target", report.targets,
                   "Only plans for this target; may be repeated (default: all)")
      ->allow_extra_args(false);
  verb->callback([&] { chosen = [&] { return RunReport(global, report); }; });

  kiln::DoctorCommand doctor;
  verb = app.add_subcommand("doctor", "What Kiln finds on this machine");
  CLI::Option* measure = verb->add_flag(
      "--measure", doctor.measure,
      "Measure what the devices can do at best, and keep it in the cache: the "
      "cost model, bench and report go by it");
  verb->add_option("--target", doctor.targets,
                   "Measure for this target; may be repeated (default: all "
                   "devices of this machine)")
      ->needs(measure)
      ->allow_extra_args(false);
  verb->add_option("--device", doctor.device, "GPU to measure (default 0)")
      ->type_name("N")
      ->needs(measure)
      ->transform(WholeNumber(0, 63));
  verb->add_option("--jobs", doctor.jobs,
                   "Compile workers (default: cores, as memory allows)")
      ->type_name("N")
      ->needs(measure)
      ->transform(WholeNumber(1, 1024));
  verb->callback([&] { chosen = [&] { return RunDoctor(global, doctor); }; });

  RefuseEmptyValues(&app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // --help and --version arrive here too, with code 0.
    if (error.get_exit_code() == 0) {
      app.exit(error);
      return FlushResults(kiln::kExitDone);
    }
    // A word that is no verb is reported as a verb that is missing.
    const bool no_verb =
        app.get_subcommands().empty() && argc > 1 && !app.remaining().empty();
    std::fprintf(
        stderr, "kiln: %s; see kiln --help\n",
        no_verb ? ("unknown verb or option \"" + app.remaining().front() + "\"")
                      .c_str()
                : error.what());
    return kiln::kExitUsage;
  }
  absl::StatusOr<int> result = kiln::kExitFailed;
  try {
    result = chosen();
  } catch (const std::exception& error) {
    result = kiln::ExhaustedStatus(error);
  }
  if (result.ok()) return FlushResults(*result);
  std::fprintf(stderr, "kiln: %s\n",
               std::string(result.status().message()).c_str());
  return kiln::ExitCodeOf(result.status());
}

}  // namespace

int main(int argc, char** argv) {
  // A compile worker is this executable in another role.
  if (argc > 1 && std::strcmp(argv[1], kiln::kNvrtcWorkerVerb) == 0) {
    return kiln::NvrtcWorkerMain(argc, argv);
  }
  // A race worker likewise.
  if (argc > 1 && std::strcmp(argv[1], kiln::kRaceWorkerVerb) == 0) {
    return kiln::RaceWorkerMain(argc, argv);
  }
  OccupyStandardStreams();
  return Run(argc, argv);
}
