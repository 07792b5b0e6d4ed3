// kiln bench: time of each plan of a bundle against the device's floors, and
// against PyTorch.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_device.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"
#include "tools/torch_rival.h"
#include "tuner/ceilings.h"
#include "tuner/plan_bench.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

// One plan at its capacity.
struct Row {
  std::string entry;
  kiln_plan_info_t plan = {};
  BenchTiming timing;
  Work work;
  Floor floor;  // zero without ceilings
};

struct Geomean {
  double sum = 0;
  size_t count = 0;

  void Add(double ratio) {
    sum += std::log(ratio);
    ++count;
  }

  double Value() const {
    return count == 0 ? 0 : std::exp(sum / static_cast<double>(count));
  }
};

Json ToJson(const Row& row) {
  const double seconds = row.timing.ns / 1e9;
  Json out = {{"entry", row.entry},
              {"m_min", row.plan.m_min},
              {"tokens", row.plan.m_max},
              {"plan", row.plan.label},
              {"ns", row.timing.ns},
              {"noise_floor", row.timing.noise_floor},
              {"active_experts", row.timing.experts},
              {"draws", row.timing.draws},
              {"bytes_per_s", row.work.bytes / seconds},
              {"flops_per_s", row.work.flops / seconds}};
  if (row.timing.mhz_max > 0) {
    out["clock_mhz"] = {{"least", row.timing.mhz_min},
                        {"most", row.timing.mhz_max}};
  }
  if (row.floor.Seconds() > 0) {
    out["floor_ns"] = {{"bytes", row.floor.bytes_s * 1e9},
                       {"decode", row.floor.decode_s * 1e9},
                       {"mma", row.floor.mma_s * 1e9},
                       {"all", row.floor.Seconds() * 1e9}};
    out["bound"] = std::string(row.floor.Bound());
    out["fraction"] = row.floor.Seconds() / seconds;
  }
  if (row.timing.rival_ns > 0) {
    out["torch_ns"] = row.timing.rival_ns;
    out["torch_ratio"] = row.timing.rival_ns / row.timing.ns;
  }
  return out;
}

// One number where the clock stood still.
std::string ClockText(const BenchTiming& timing) {
  if (timing.mhz_max == 0) return "-";
  if (timing.mhz_min == timing.mhz_max) return absl::StrCat(timing.mhz_max);
  return absl::StrCat(timing.mhz_min, "..", timing.mhz_max);
}

std::vector<std::string> ToCells(const Row& row, bool compared) {
  const double seconds = row.timing.ns / 1e9;
  const bool has_floor = row.floor.Seconds() > 0;
  std::vector<std::string> cells = {
      row.entry,
      absl::StrCat(row.plan.m_max),
      FormatNs(row.timing.ns),
      absl::StrFormat("%.1f %%", 100 * row.timing.noise_floor),
      ClockText(row.timing),
      has_floor ? FormatNs(row.floor.Seconds() * 1e9) : "-",
      has_floor ? std::string(row.floor.Bound()) : "-",
      has_floor ? absl::StrFormat("%.2f", row.floor.Seconds() / seconds) : "-",
      absl::StrFormat("%.1f", row.work.bytes / seconds / 1e9),
      absl::StrFormat("%.1f", row.work.flops / seconds / 1e9)};
  if (compared) {
    cells.push_back(FormatNs(row.timing.rival_ns));
    cells.push_back(
        absl::StrFormat("%.2f", row.timing.rival_ns / row.timing.ns));
  }
  cells.emplace_back(row.plan.label);
  return cells;
}

// Ceilings of the device in the cache, if a cache is there and has them.
std::optional<Ceilings> LookUpCeilings(const GlobalOptions& global,
                                       const DeviceProfile& device) {
  absl::StatusOr<PlanCache> cache = OpenCacheToRead(global);
  if (!cache.ok()) return std::nullopt;
  return FindCeilings(device, &*cache);
}

class Bencher {
 public:
  Bencher(const BenchCommand& command, const BundleView& bundle, Device* device,
          std::optional<Ceilings> ceilings)
      : command_(command),
        bundle_(bundle),
        device_(*device),
        ceilings_(std::move(ceilings)) {}

  absl::Status Run() {
    const std::string target = device_.profile().target.ToString();
    for (uint32_t s = 0; s < bundle_.info().section_count; ++s) {
      if (bundle_.Section(s).target != target) continue;
      for (uint32_t e = 0; e < bundle_.Section(s).entry_count; ++e) {
        const std::string name = bundle_.Entry(s, e).name;
        if (!command_.entry.empty() && name != command_.entry) continue;
        RETURN_IF_ERROR(Entry(s, e, name));
      }
    }
    if (!rows_.empty()) return absl::OkStatus();
    return WhyNothing(target);
  }

  const std::vector<Row>& rows() const { return rows_; }

  const std::string& rival() const { return rival_; }

 private:
  absl::Status WhyNothing(const std::string& target) const {
    std::set<std::string> names;
    uint32_t least = UINT32_MAX;
    for (uint32_t s = 0; s < bundle_.info().section_count; ++s) {
      if (bundle_.Section(s).target != target) continue;
      for (uint32_t e = 0; e < bundle_.Section(s).entry_count; ++e) {
        const std::string name = bundle_.Entry(s, e).name;
        names.insert(name);
        if (!command_.entry.empty() && name != command_.entry) continue;
        for (uint32_t p = 0; p < bundle_.Entry(s, e).plan_count; ++p) {
          least = std::min(least, bundle_.Plan(s, e, p).m_max);
        }
      }
    }
    if (!command_.entry.empty() && names.count(command_.entry) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("the bundle has no entry \"", command_.entry, "\" for ",
                       target, "; it has ", absl::StrJoin(names, ", ")));
    }
    return absl::InvalidArgumentError(
        absl::StrCat("--max-capacity is ", command_.max_capacity,
                     ", and the smallest capacity of the bundle",
                     command_.entry.empty()
                         ? ""
                         : absl::StrCat(" for entry \"", command_.entry, "\""),
                     " on ", target, " is ", least, " tokens"));
  }

  absl::Status Entry(uint32_t section, uint32_t entry,
                     const std::string& name) {
    uint32_t flags = 0;
    if (command_.allow_predicted) flags |= KILN_LOAD_ALLOW_PREDICTED;
    if (command_.allow_unqualified) flags |= KILN_LOAD_ALLOW_UNQUALIFIED;
    ASSIGN_OR_RETURN(const RequestGeometry geometry,
                     bundle_.Geometry(section, entry));
    ASSIGN_OR_RETURN(LoadedPlan loaded,
                     LoadedPlan::Open(&device_, bundle_.handle(), name, flags));
    ASSIGN_OR_RETURN(const std::unique_ptr<OpBench> bench,
                     OpBench::Create(&device_, geometry, /*seed=*/1));
    std::unique_ptr<TorchRival> torch;
    BenchRival rival;
    if (command_.compare == "torch") {
      ASSIGN_OR_RETURN(
          torch, TorchRival::Start(command_.python, geometry, device_.profile(),
                                   command_.device));
      rival_ = torch->description();
      rival = [&torch](uint32_t m, uint32_t draws) {
        return torch->Time(m, draws);
      };
    }
    const uint32_t plans = bundle_.Entry(section, entry).plan_count;
    for (uint32_t p = 0; p < plans; ++p) {
      Row row;
      row.entry = name;
      row.plan = bundle_.Plan(section, entry, p);
      const uint32_t m = row.plan.m_max;
      if (m > command_.max_capacity) continue;
      std::fprintf(stderr, "bench %s m=%u\n", name.c_str(), m);
      RETURN_IF_ERROR(loaded.Find(m));
      BenchOptions options;
      options.blocks = command_.blocks;
      options.warm_l2 = command_.warm_l2;
      ASSIGN_OR_RETURN(row.timing,
                       TimePlan(bench.get(), loaded, m, options, rival));
      const Ceilings ceilings = ceilings_.value_or(Ceilings());
      row.work = WorkOf(geometry, m, row.timing.experts, ceilings,
                        IsSummedByMma(row.plan.numerics_class));
      row.floor = FloorOf(row.work, ceilings);
      rows_.push_back(std::move(row));
    }
    return absl::OkStatus();
  }

  const BenchCommand& command_;
  const BundleView& bundle_;
  Device& device_;
  std::optional<Ceilings> ceilings_;
  std::string rival_;
  std::vector<Row> rows_;
};

}  // namespace

absl::StatusOr<int> RunBench(const GlobalOptions& global,
                             const BenchCommand& command) {
  if (!command.compare.empty() && command.compare != "torch") {
    return absl::InvalidArgumentError(
        absl::StrCat("--compare is \"", command.compare, "\", must be torch"));
  }
  ASSIGN_OR_RETURN(const BundleView bundle,
                   BundleView::Open(command.file, std::nullopt));
  ASSIGN_OR_RETURN(const std::unique_ptr<Device> device,
                   OpenDeviceFor(bundle, command.target, command.device));
  const DeviceProfile& profile = device->profile();
  const std::optional<Ceilings> ceilings = LookUpCeilings(global, profile);
  if (!ceilings.has_value()) {
    std::fprintf(stderr,
                 "no floors: the ceilings of this device were not measured; "
                 "kiln doctor --measure --target %s does\n",
                 profile.target.ToString().c_str());
  }
  Bencher bencher(command, bundle, device.get(), ceilings);
  RETURN_IF_ERROR(bencher.Run());
  Geomean fractions;
  Geomean ratios;
  Json rows = Json::array();
  std::vector<std::vector<std::string>> table = {
      {"entry", "m", "time", "noise", "MHz", "floor", "bound", "fraction",
       "GB/s", "GFLOP/s"}};
  const bool compared = !bencher.rival().empty();
  if (compared) table[0].insert(table[0].end(), {"torch", "ratio"});
  table[0].emplace_back("plan");
  for (const Row& row : bencher.rows()) {
    rows.push_back(ToJson(row));
    table.push_back(ToCells(row, compared));
    if (row.floor.Seconds() > 0) {
      fractions.Add(row.floor.Seconds() * 1e9 / row.timing.ns);
    }
    if (compared) ratios.Add(row.timing.rival_ns / row.timing.ns);
  }
  if (global.json) {
    Json out = {{"bundle", command.file},
                {"root", bundle.Root().ToHex()},
                {"device", profile.name},
                {"target", profile.target.ToString()},
                {"driver_version", profile.driver_version},
                {"l2", command.warm_l2 ? "warm" : "cold"}};
    if (compared) {
      out["rival"] = bencher.rival();
      out["torch_ratio_geomean"] = ratios.Value();
    }
    if (fractions.count > 0) out["fraction_geomean"] = fractions.Value();
    out["rows"] = std::move(rows);
    PrintJson(out);
    return kExitDone;
  }
  std::printf("%s, %s, %s L2%s%s\n", profile.name.c_str(),
              profile.target.ToString().c_str(),
              command.warm_l2 ? "warm" : "cold", compared ? ", against " : "",
              bencher.rival().c_str());
  std::printf("%s", FormatTable(table).c_str());
  if (fractions.count > 0) {
    std::printf("fraction of the floor, geometric mean %.2f\n",
                fractions.Value());
  }
  if (compared) {
    std::printf("times as fast as torch, geometric mean %.2f\n",
                ratios.Value());
  }
  return kExitDone;
}

}  // namespace kiln
