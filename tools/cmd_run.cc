// kiln run: load a bundle as an engine would, launch one entry on seeded data,
// and with --check compare with the oracle.

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_device.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"
#include "tuner/device.h"
#include "tuner/loaded_plan.h"
#include "tuner/op_bench.h"
#include "tuner/verifier.h"

namespace kiln {
namespace {

// Rows that --check compares at most.
constexpr uint32_t kRowsMax = 64;
constexpr int kTimedRuns = 5;

struct RunResult {
  double ns = 0;  // median of a few runs
  VerifyResult verdict;
  bool replayed = false;
};

class Runner {
 public:
  Runner(const RunCommand& command, OpBench* bench, LoadedPlan* plan,
         const Promise& promise)
      : command_(command),
        bench_(bench),
        plan_(plan),
        promise_(promise),
        threads_(std::max(
            1, static_cast<int>(std::thread::hardware_concurrency()))) {}

  absl::StatusOr<RunResult> Run() {
    const auto m = static_cast<uint32_t>(command_.tokens);
    ASSIGN_OR_RETURN(const uint64_t arena_bytes, plan_->ArenaBytes());
    RETURN_IF_ERROR(bench_->Reserve(m, arena_bytes));
    ASSIGN_OR_RETURN(const size_t inputs,
                     bench_->AddInputs(DrawKind::kUniform, 0, m));
    const std::vector<uint64_t> params = bench_->Params(inputs);
    const auto launch = [&]() {
      return plan_->Launch(m, params, bench_->arena().data(),
                           bench_->arena().bytes());
    };
    RETURN_IF_ERROR(Poison());
    RETURN_IF_ERROR(launch());
    RETURN_IF_ERROR(bench_->device()->Synchronize());
    if (command_.check) RETURN_IF_ERROR(Check(m, DrawKind::kUniform, 0));

    ASSIGN_OR_RETURN(const std::unique_ptr<Replay> replay,
                     bench_->device()->Record(launch));
    if (command_.check) {
      // The recorded launches keep their addresses; contents and routes change.
      RETURN_IF_ERROR(bench_->RewriteInputs(inputs, DrawKind::kRagged, 1, m));
      RETURN_IF_ERROR(Poison());
      RETURN_IF_ERROR(replay->Run().status());
      RETURN_IF_ERROR(Check(m, DrawKind::kRagged, 1));
      RETURN_IF_ERROR(bench_->RewriteInputs(inputs, DrawKind::kUniform, 0, m));
      RETURN_IF_ERROR(bench_->CheckInputs());
      result_.replayed = true;
    }
    std::vector<double> times;
    for (int i = 0; i < kTimedRuns; ++i) {
      ASSIGN_OR_RETURN(const double ns, replay->Run());
      times.push_back(ns);
    }
    std::sort(times.begin(), times.end());
    result_.ns = times[times.size() / 2];
    return result_;
  }

 private:
  absl::Status Poison() {
    RETURN_IF_ERROR(bench_->output().Poison());
    return bench_->arena().Poison();
  }

  absl::Status Check(uint32_t m, DrawKind kind, uint32_t draw) {
    VerifyCase test;
    test.m = m;
    test.kind = kind;
    test.draw = draw;
    test.rows = OracleRows(kind, m, kRowsMax);
    return CheckOutput(bench_, test, promise_, threads_, &result_.verdict)
        .status();
  }

  const RunCommand& command_;
  OpBench* bench_;
  LoadedPlan* plan_;
  Promise promise_;
  int threads_;
  RunResult result_;
};

void Print(const GlobalOptions& global, const RunCommand& command,
           const DeviceProfile& profile, const kiln_plan_info_t& plan,
           const RunResult& result) {
  const bool passed = result.verdict.passed;
  if (global.json) {
    nlohmann::ordered_json out;
    out["entry"] = command.entry;
    out["tokens"] = command.tokens;
    out["target"] = profile.target.ToString();
    out["device"] = profile.name;
    out["m_min"] = plan.m_min;
    out["m_max"] = plan.m_max;
    out["plan"] = plan.label;
    out["arena_bytes"] = plan.arena_bytes;
    out["warm_ns"] = result.ns;
    out["checked"] = command.check;
    if (command.check) {
      out["passed"] = passed;
      out["worst_error"] = result.verdict.worst_error;
      out["tolerance"] = plan.tolerance;
      out["worst_cosine"] = result.verdict.worst_cosine;
      out["replayed"] = result.replayed;
      if (!passed) out["reason"] = result.verdict.reason;
    }
    PrintJson(out);
    return;
  }
  std::printf("%s m=%llu on %s (%s)\nplan %u..%u %s\n%s warm\n",
              command.entry.c_str(),
              static_cast<unsigned long long>(command.tokens),
              profile.target.ToString().c_str(), profile.name.c_str(),
              plan.m_min, plan.m_max, plan.label, FormatNs(result.ns).c_str());
  if (command.check) {
    std::printf(
        "%s: worst row error %.2e, allowed %.1e; least cosine %.9f; direct "
        "launch and replay with changed inputs and routes\n",
        passed ? "PASS" : "FAIL", result.verdict.worst_error, plan.tolerance,
        result.verdict.worst_cosine);
    if (!passed) std::printf("%s\n", result.verdict.reason.c_str());
  }
}

}  // namespace

absl::StatusOr<int> RunRun(const GlobalOptions& global,
                           const RunCommand& command) {
  ASSIGN_OR_RETURN(const BundleView bundle,
                   BundleView::Open(command.file, std::nullopt));
  ASSIGN_OR_RETURN(const std::unique_ptr<Device> device,
                   OpenDeviceFor(bundle, command.target, command.device));
  uint32_t flags = 0;
  if (command.allow_predicted) flags |= KILN_LOAD_ALLOW_PREDICTED;
  if (command.allow_unqualified) flags |= KILN_LOAD_ALLOW_UNQUALIFIED;
  ASSIGN_OR_RETURN(
      LoadedPlan plan,
      LoadedPlan::Open(device.get(), bundle.handle(), command.entry, flags));
  RETURN_IF_ERROR(plan.Find(command.tokens));
  if (command.tokens == 0) {
    RETURN_IF_ERROR(plan.Launch(0, {}, nullptr, 0));
    std::fprintf(stderr, "m = 0: nothing to do\n");
    if (global.json) {
      PrintJson({{"entry", command.entry},
                 {"tokens", 0},
                 {"target", device->profile().target.ToString()},
                 {"checked", false}});
    }
    return kExitDone;
  }
  const absl::StatusOr<RequestGeometry> geometry =
      GeometryOf(bundle, device->profile().target, command.entry);
  RETURN_IF_ERROR(geometry.status());
  kiln_plan_info_t info = {};
  info.struct_size = sizeof(info);
  kiln_error_t error = {};
  RETURN_IF_ERROR(
      RuntimeStatus(kiln_entry_plan(plan.entry(), &info, &error), error));
  ASSIGN_OR_RETURN(const std::unique_ptr<OpBench> bench,
                   OpBench::Create(device.get(), *geometry, command.seed));
  Runner runner(
      command, bench.get(), &plan,
      PromiseOf(info.numerics_class, info.tolerance, info.deterministic != 0));
  ASSIGN_OR_RETURN(const RunResult result, runner.Run());
  Print(global, command, device->profile(), info, result);
  return result.verdict.passed ? kExitDone : kExitFailed;
}

}  // namespace kiln
