#include "templates/cpu/product_axes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace kiln {
namespace {

// Output channels that are decoded together.
int64_t Group(const Target& target) { return target.level >= 4 ? 32 : 16; }

}  // namespace

std::vector<int64_t> CpuThreads(const Problem& problem) {
  const int64_t processors = std::max(1, problem.device.multiprocessors);
  if (processors == 1) return {processors};
  return {processors, (processors + 1) / 2};
}

std::string CpuRowGroupRule(const AxisPoint& point) {
  if (point.at("tokens_tile") % point.at("row_group") == 0) return "";
  return absl::StrCat("row_group ", point.at("row_group"),
                      " does not divide every tokens_tile");
}

std::vector<Axis> CpuProductAxes(const Problem& problem) {
  return {{"tokens_tile", {1, 2, 4, 8, 16}},
          {"channels_tile", {32, 64, 128, 256}},
          {"k_tile", {64, 128}},
          {"unroll", {1, 2}},
          {"threads", CpuThreads(problem)}};
}

const std::vector<std::string>& CpuProductMacros() {
  static const auto* const names = new std::vector<std::string>{
      "tokens_tile", "channels_tile", "k_tile", "unroll"};
  return *names;
}

std::string CpuProductConstraint(const Problem& problem,
                                 const AxisPoint& point) {
  const int64_t together = Group(problem.device.target) * point.at("unroll");
  if (point.at("channels_tile") % together != 0) {
    return absl::StrCat("channels_tile ", point.at("channels_tile"),
                        " is no multiple of the ", together,
                        " channels that are decoded together");
  }
  return "";
}

double CpuProductCost(const AxisPoint& point, double tiles, double weights,
                      int64_t strip_channels) {
  // Each weight of a tile is decoded once and multiplied with every row of the
  // tile, empty rows included.
  constexpr double kDecode = 1.0e-9;
  constexpr double kMultiply = 0.06e-9;
  const auto tile = static_cast<double>(point.at("tokens_tile"));
  const double work = tiles * weights * (kDecode + kMultiply * tile);
  const auto threads = static_cast<double>(point.at("threads"));
  // Blocks are claimed one by one: few large ones leave threads idle at the
  // end of a step.
  const double blocks =
      std::max(1.0, tiles * static_cast<double>(strip_channels) /
                        static_cast<double>(point.at("channels_tile")));
  double cost = work / threads * (1 + threads / blocks);
  // Preferences between near-equals, from measurements on AVX-512.
  if (point.at("channels_tile") != 64) cost *= 1.01;
  if (point.at("unroll") != 1) cost *= 1.005;
  if (point.at("k_tile") != 128) cost *= 1.002;
  return cost;
}

}  // namespace kiln
