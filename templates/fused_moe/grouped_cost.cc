#include "templates/fused_moe/grouped_cost.h"

#include <algorithm>
#include <cmath>

namespace kiln {
namespace {

constexpr double kBytesPerCycle = 28;  // of one multiprocessor

// fp32 partial sums are written and read again.
//   fixed_cycles: of the kernel that reads them
double SplitCycles(const Problem& problem, const GroupedProduct& product,
                   double fixed_cycles) {
  if (product.split == 1) return 0;
  const double bytes = static_cast<double>(problem.interval.m_max) *
                       static_cast<double>(problem.geometry.top_k) *
                       static_cast<double>(product.outputs) * 8 *
                       static_cast<double>(product.split);
  return fixed_cycles +
         bytes / (std::max(1, problem.device.multiprocessors) * kBytesPerCycle);
}

double ProductCycles(const Problem& problem, const AxisPoint& point,
                     double tiles, const GroupedProduct& product) {
  // Issue slots of a warp: the barrier of a stage, and one 16-byte copy (twice:
  // in the loop, and before it, where nothing overlaps).
  constexpr double kStageCycles = 15.5;
  constexpr double kCopyCycles = 31;
  constexpr double kFillCopyCycles = 14;
  constexpr double kWaveCycles = 280;
  // How much a lone block loses at its barriers, and what part of the last,
  // partly filled wave is lost.
  constexpr double kBarrierLoss = 0.15;
  constexpr double kTailLoss = 0.1;
  const DeviceProfile& device = problem.device;
  const auto tile = static_cast<double>(point.at("tokens_tile"));
  const auto warps = static_cast<double>(point.at("warps"));
  const auto channels = static_cast<double>(point.at("channels_tile"));
  const auto k_tile = static_cast<double>(point.at("k_tile"));
  const auto stages = static_cast<double>(point.at("stages"));
  const auto split = static_cast<double>(product.split);
  const double rows = static_cast<double>(problem.interval.m_max) *
                      static_cast<double>(problem.geometry.top_k);
  // Groups of 16 tokens without rows are skipped.
  const double live = std::min(tile, std::ceil(rows / tiles / 16) * 16);
  const double strips = channels / 16 / warps;
  const double slice =
      std::ceil(static_cast<double>(product.inputs) / 128 / split) * 128;
  const double copies = product.stage_pieces / (warps * 32);
  const double per_warp =
      slice / 16 * strips *
          (product.decode_cycles + product.group_cycles * live / 8) +
      slice / k_tile * (kStageCycles + kCopyCycles * copies) +
      kFillCopyCycles * (stages - 1) * copies +
      4 / warps * product.block_bytes / kBytesPerCycle;
  const double blocks =
      tiles * static_cast<double>(product.outputs) / channels * split;

  // Resident blocks. Registers as the compiler used them: about 44, the sums,
  // and the fragments of a step.
  const double registers = std::ceil((44 + product.strip_registers * strips +
                                      1.2 * strips * tile / 8 * 4) /
                                     8) *
                           8;
  const auto shared = static_cast<double>(product.shared_bytes);
  const double resident = std::clamp(
      std::floor(std::min(
          {static_cast<double>(device.shared_bytes_per_sm) / (shared + 1024),
           static_cast<double>(device.registers_per_sm) /
               (warps * 32 * registers),
           2048 / (warps * 32)})),
      1.0, 32.0);
  const double processors = std::max(1, device.multiprocessors);
  const double in_flight = std::min(resident, std::ceil(blocks / processors));
  // Warps of one of the four sub-cores share its issue slots.
  const double per_core = std::max(1.0, in_flight * warps / 4);
  const double wave =
      per_warp * per_core * (in_flight + kBarrierLoss) / in_flight +
      kWaveCycles;
  const double waves = blocks / (processors * in_flight);
  return wave * std::max(1.0, waves + kTailLoss * (std::ceil(waves) - waves));
}

}  // namespace

double GroupedCycles(const Problem& problem, const AxisPoint& point,
                     double tiles, const GroupedProduct& fc1,
                     const GroupedProduct& fc2) {
  // Reading partial sums takes the next kernel a round of loads per slice.
  constexpr double kActivateSplitCycles = 450;
  constexpr double kCombineSplitCycles = 1900;
  return ProductCycles(problem, point, tiles, fc1) +
         ProductCycles(problem, point, tiles, fc2) +
         SplitCycles(problem, fc1, kActivateSplitCycles) +
         SplitCycles(problem, fc2, kCombineSplitCycles);
}

}  // namespace kiln
