// kiln doctor: what this machine offers, and what to do about what is missing.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cache/sqlite_db.h"
#include "compiler/base/status_macros.h"
#include "compiler/compile_pool.h"
#include "templates/registry.h"
#include "tools/cli.h"
#include "tuner/ceilings.h"
#include "tuner/device.h"
#include "tuner/measure_ceilings.h"
#include "tuner/nvml.h"
#include "tuner/qualification.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

Json Compiler(const absl::StatusOr<CompilerSetup>& setup) {
  Json out;
  out["found"] = setup.ok();
  if (setup.ok()) {
    out["version"] = setup->toolchain.version;
    out["content"] = setup->toolchain.content.ToHex();
  } else {
    out["problem"] = std::string(setup.status().message());
  }
  return out;
}

// What a GPU does now; null without NVML.
Json State(const DeviceProfile& device) {
  const absl::StatusOr<NvmlDevice> nvml = FindNvmlDevice(device.pci_bus_id);
  if (!nvml.ok()) return nullptr;
  const GpuState state = nvml->State();
  const auto known = [](int value) {
    return value >= 0 ? Json(value) : Json(nullptr);
  };
  Json out;
  out["sm_clock_mhz"] = known(state.sm_clock_mhz);
  out["sm_clock_max_mhz"] = known(state.sm_clock_max_mhz);
  out["memory_clock_mhz"] = known(state.memory_clock_mhz);
  out["temperature_c"] = known(state.temperature_c);
  out["power_mw"] = known(state.power_mw);
  out["throttle"] = ThrottleText(state.throttle_reasons);
  const absl::StatusOr<std::vector<uint32_t>> processes =
      nvml->ComputeProcesses();
  out["compute_processes"] = processes.ok() ? Json(*processes) : Json(nullptr);
  return out;
}

// "1980 of 1980 MHz, 34 C, 112 W, throttle: none, no compute process".
std::string StateLine(const Json& state) {
  const auto number = [&state](const char* key, int divisor) {
    return state[key].is_null() ? std::string("?")
                                : absl::StrCat(state[key].get<int>() / divisor);
  };
  const Json& processes = state["compute_processes"];
  return absl::StrCat(
      number("sm_clock_mhz", 1), " of ", number("sm_clock_max_mhz", 1),
      " MHz, ", number("temperature_c", 1), " C, ", number("power_mw", 1000),
      " W, throttle: ", state["throttle"].get<std::string>(), ", ",
      processes.is_null() ? "compute processes unknown"
      : processes.empty()
          ? "no compute process"
          : absl::StrCat("compute processes ", processes.dump()));
}

Json Describe(const DeviceProfile& device) {
  Json out;
  out["name"] = device.name;
  out["target"] = device.target.ToString();
  out["multiprocessors"] = device.multiprocessors;
  out["memory_gib_class"] = device.memory_gib;
  out["l2_bytes"] = device.l2_bytes;
  out["driver_version"] = device.driver_version;
  if (!device.mig.empty()) out["mig"] = device.mig;
  out["pci_bus_id"] = device.pci_bus_id;
  out["uuid"] = device.uuid;
  out["state"] = State(device);
  return out;
}

// Every template with the targets it is qualified for.
Json Templates() {
  Json out = Json::array();
  for (const KernelTemplate* from : AllTemplates()) {
    const TemplateIdentity identity = {std::string(from->name()),
                                       from->version(), from->sources()};
    Json targets = Json::array();
    for (const QualificationReceipt& receipt : Receipts()) {
      if (IsQualified(identity, receipt.target, {receipt})) {
        targets.push_back(receipt.target.ToString());
      }
    }
    out.push_back({{"name", identity.name},
                   {"version", identity.version},
                   {"op", std::string(OpName(from->op()))},
                   {"format", std::string(WeightFormatName(from->format()))},
                   {"backend", std::string(BackendName(from->backend()))},
                   {"sources", identity.sources.ToHex()},
                   {"qualified", std::move(targets)}});
  }
  return out;
}

// A device of this machine that --measure is about.
struct Measured {
  DeviceProfile profile;
  std::optional<Ceilings> before;
  Ceilings now;
  bool kept = false;    // the stored ones hold
  bool stored = false;  // `now` is in the cache
};

// Measurements that differ by less say the same.
constexpr double kCeilingTolerance = 0.1;

bool AreClose(const std::map<TrellisRate, double>& a,
              const std::map<TrellisRate, double>& b) {
  return a.size() == b.size() &&
         std::equal(
             a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
               return x.first == y.first &&
                      std::abs(x.second / y.second - 1) < kCeilingTolerance;
             });
}

bool AreClose(const Ceilings& a, const Ceilings& b) {
  const auto close = [](double x, double y) {
    return std::abs(x / y - 1) < kCeilingTolerance;
  };
  return close(a.read_bytes_per_s, b.read_bytes_per_s) &&
         close(a.mma_flops_per_s, b.mma_flops_per_s) &&
         AreClose(a.decode_weights_per_s, b.decode_weights_per_s) &&
         AreClose(a.hash_weights_per_s, b.hash_weights_per_s);
}

absl::StatusOr<std::vector<Target>> TargetsToMeasure(
    const DoctorCommand& command) {
  if (!command.targets.empty()) return ParseTargets(command.targets);
  std::vector<Target> targets;
  const std::vector<DeviceProfile> devices = ListCudaDevices();
  const auto ordinal = static_cast<size_t>(command.device);
  if (ordinal < devices.size()) targets.push_back(devices[ordinal].target);
  const absl::StatusOr<Target> cpu = HostCpuTarget();
  if (cpu.ok()) targets.push_back(*cpu);
  return targets;
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const Target& target,
                                                   int ordinal) {
  return target.backend == Backend::kCpu ? OpenCpuDevice(target)
                                         : OpenCudaDevice(ordinal, target);
}

// Whether there are devices and compilers, without a cache of its own.
absl::Status CheckMeasurable(const GlobalOptions& global,
                             const DoctorCommand& command,
                             const std::vector<Target>& targets,
                             const PrewarmOptions& options) {
  ASSIGN_OR_RETURN(PlanCache cache, OpenCacheToRead(global));
  for (const Target& target : targets) {
    RETURN_IF_ERROR(ResolveTarget(target, options, &cache).status());
    RETURN_IF_ERROR(OpenDevice(target, command.device).status());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Measured>> MeasureDevices(
    const GlobalOptions& global, const DoctorCommand& command) {
  ASSIGN_OR_RETURN(const std::vector<Target> targets,
                   TargetsToMeasure(command));
  PlanningOptions planning;
  planning.targets = command.targets;
  if (planning.targets.empty()) planning.targets = {"cpu"};
  planning.devices = {command.device};
  ASSIGN_OR_RETURN(const PrewarmOptions options,
                   MakePrewarmOptions(global, planning));
  // Before there is a cache: what cannot be measured changes nothing.
  if (!CacheExists(global)) {
    RETURN_IF_ERROR(CheckMeasurable(global, command, targets, options));
  }
  ASSIGN_OR_RETURN(PlanCache cache, OpenCache(global));
  std::vector<Measured> all;
  for (const Target& target : targets) {
    ASSIGN_OR_RETURN(const TargetContext context,
                     ResolveTarget(target, options, &cache));
    ASSIGN_OR_RETURN(const std::unique_ptr<Device> device,
                     OpenDevice(target, command.device));
    MeasureOptions measure;
    measure.jobs = command.jobs > 0 ? command.jobs : WorkerCountMax();
    measure.progress = [&](const std::string& line) {
      std::fprintf(stderr, "%s: %s\n", target.ToString().c_str(), line.c_str());
    };
    Measured measured;
    measured.profile = device->profile();
    measured.before = context.ceilings;
    ASSIGN_OR_RETURN(measured.now,
                     MeasureCeilings(device.get(), context.setup, measure));
    measured.now.measured_unix = absl::ToUnixSeconds(absl::Now());
    if (measured.before.has_value()) {
      measured.now.KeepBalanceOf(*measured.before);
    }
    measured.kept =
        measured.before.has_value() && AreClose(*measured.before, measured.now);
    measured.stored = !measured.kept && cache.mode() == CacheMode::kReadWrite;
    if (measured.stored) {
      RETURN_IF_ERROR(cache.PutMemo(CeilingsKey(measured.profile),
                                    CeilingsToJson(measured.now)));
    }
    all.push_back(std::move(measured));
  }
  return all;
}

std::string BalanceBefore(const Measured& measured) {
  return measured.before.value_or(Ceilings()).Balance();
}

Json ToJson(const Measured& measured) {
  const Ceilings& holds = measured.kept ? *measured.before : measured.now;
  return {{"target", measured.profile.target.ToString()},
          {"device", measured.profile.name},
          {"stored", measured.stored},
          {"balance", holds.Balance()},
          {"balance_before", BalanceBefore(measured)},
          {"measured", Json::parse(CeilingsToJson(measured.now))}};
}

// What the keys of plans hold now, and what that means for those of before.
std::string BalanceLine(const Measured& measured) {
  const std::string before = BalanceBefore(measured);
  const std::string now = measured.now.Balance();
  if (measured.kept) return "within 10 % of what is stored, which stays";
  if (!measured.stored) return "not stored: --cache-mode does not allow it";
  if (before == now) {
    return "stored; the balance that plans go by is as before, so that they "
           "still answer";
  }
  return absl::StrCat(
      before.empty() ? "stored, the first of this device, with the balance \""
                     : absl::StrCat("stored; the balance moved from \"", before,
                                    "\" to \""),
      now,
      "\": plans that were made before no longer answer, but for those of "
      "--exhaustive; kiln prewarm makes them anew");
}

void Print(const Measured& measured) {
  const Ceilings& now = measured.now;
  std::printf("%s, %s\n  read    %.1f GB/s\n  mma     %.1f GFLOP/s\n",
              measured.profile.target.ToString().c_str(),
              measured.profile.name.c_str(), now.read_bytes_per_s / 1e9,
              now.mma_flops_per_s / 1e9);
  const auto rates = [](const char* what,
                        const std::map<TrellisRate, double>& values) {
    for (const auto& [rate, value] : values) {
      std::printf("  %s  %s K%d %.1f Gweights/s, %.1f GB/s\n", what,
                  std::string(CodebookName(rate.first)).c_str(), rate.second,
                  value / 1e9, value * rate.second / 8 / 1e9);
    }
  };
  rates("decode", now.decode_weights_per_s);
  rates("hash  ", now.hash_weights_per_s);
  std::printf("  %s\n", BalanceLine(measured).c_str());
}

}  // namespace

absl::StatusOr<int> RunDoctor(const GlobalOptions& global,
                              const DoctorCommand& command) {
  if (command.measure) {
    ASSIGN_OR_RETURN(const std::vector<Measured> all,
                     MeasureDevices(global, command));
    Json rows = Json::array();
    for (const Measured& measured : all) {
      rows.push_back(ToJson(measured));
      if (!global.json) Print(measured);
    }
    if (global.json) PrintJson({{"ceilings", std::move(rows)}});
    return kExitDone;
  }
  Json out;
  const absl::StatusOr<Target> cpu = HostCpuTarget();
  out["cpu_target"] = cpu.ok() ? Json(cpu->ToString()) : Json(nullptr);
  if (!cpu.ok()) out["cpu_problem"] = std::string(cpu.status().message());
  out["cc_cpu"] = Compiler(
      ProbeCcCpu(global.cc_cpu.empty() ? DefaultCcCpuPath() : global.cc_cpu));
  const absl::StatusOr<std::string> library =
      FindNvrtc(MakeNvrtcOptions(global));
  out["nvrtc"] = Compiler(ProbeNvrtc(MakeNvrtcOptions(global)));
  if (library.ok()) out["nvrtc"]["library"] = *library;
  out["devices"] = Json::array();
  for (const DeviceProfile& device : ListCudaDevices()) {
    out["devices"].push_back(Describe(device));
  }
  const absl::StatusOr<std::string> nvml = NvmlVersion();
  out["nvml"]["found"] = nvml.ok();
  if (nvml.ok()) {
    out["nvml"]["version"] = *nvml;
  } else {
    out["nvml"]["problem"] = std::string(nvml.status().message());
  }
  out["templates"] = Templates();
  out["sqlite"] = std::string(SqliteVersion());
  out["cache"]["folder"] = CacheDirectory(global);
  absl::StatusOr<PlanCache> cache = OpenCacheToRead(global);
  absl::StatusOr<CacheStats> stats =
      cache.ok() ? cache->Stats() : absl::StatusOr<CacheStats>(cache.status());
  if (stats.ok()) {
    out["cache"]["bytes"] = stats->bytes;
    for (const TableStats& table : stats->tables) {
      out["cache"]["rows"][table.name] = table.rows;
    }
  } else {
    out["cache"]["problem"] = std::string(stats.status().message());
  }
  if (global.json) {
    PrintJson(out);
    return kExitDone;
  }
  const auto compiler = [&out](const char* key, const char* without) {
    const Json& entry = out[key];
    return entry["found"].get<bool>()
               ? entry["version"].get<std::string>()
               : absl::StrCat("missing: ", entry["problem"].get<std::string>(),
                              "\n", std::string(14, ' '), without);
  };
  std::printf("cpu target    %s\n",
              cpu.ok() ? cpu->ToString().c_str()
                       : std::string(cpu.status().message()).c_str());
  std::printf("kiln-cc-cpu   %s\n",
              compiler("cc_cpu",
                       "without it CPU targets cannot be compiled; "
                       "bundles still run")
                  .c_str());
  std::printf("nvrtc         %s\n",
              compiler("nvrtc",
                       "without it sm_* targets cannot be compiled; "
                       "CPU targets and bundles still work")
                  .c_str());
  if (out["devices"].empty()) {
    std::printf(
        "devices       no GPU: sm_* targets compile, their plans stay "
        "predicted\n");
  }
  for (const Json& device : out["devices"]) {
    std::printf("device        %s, %s, driver %d\n",
                device["name"].get<std::string>().c_str(),
                device["target"].get<std::string>().c_str(),
                device["driver_version"].get<int>());
    if (!device["state"].is_null()) {
      std::printf("              %s\n", StateLine(device["state"]).c_str());
    }
  }
  std::printf("nvml          %s\n",
              compiler("nvml",
                       "without it races cannot see clocks, throttling and "
                       "other processes on a GPU")
                  .c_str());
  for (const Json& entry : out["templates"]) {
    std::string targets;
    for (const Json& target : entry["qualified"]) {
      absl::StrAppend(&targets, " ", target.get<std::string>());
    }
    std::printf("template      %s v%u, qualified for%s\n",
                entry["name"].get<std::string>().c_str(),
                entry["version"].get<unsigned>(),
                targets.empty() ? " no target" : targets.c_str());
  }
  std::printf("sqlite        %s\n", out["sqlite"].get<std::string>().c_str());
  std::printf(
      "cache         %s%s\n", out["cache"]["folder"].get<std::string>().c_str(),
      stats.ok()
          ? absl::StrCat(", ", FormatBytes(static_cast<uint64_t>(stats->bytes)))
                .c_str()
          : absl::StrCat(": ", stats.status().message()).c_str());
  return kExitDone;
}

}  // namespace kiln
