#include "templates/fused_moe/tile_product.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "templates/fused_moe/op.h"
#include "templates/registry.h"

namespace kiln {
namespace {

// Of more rows, the sums of the operand alone cost more than biased weights
// save.
constexpr int64_t kBiasedRows = 8;

}  // namespace

int64_t TileProductSharedBytes(const AxisPoint& point, int bits) {
  const int64_t k_tile = point.at("k_tile");
  return point.at("stages") * (k_tile * point.at("channels_tile") * bits / 8 +
                               point.at("tokens_tile") * (k_tile + 8) * 2);
}

std::string TileProductRule(const Problem& problem, Codebook codebook, int bits,
                            const AxisPoint& point) {
  std::string broken = WarpStripsRule(point);
  if (broken.empty()) broken = ThreadSumsRule(point);
  if (!broken.empty()) return broken;
  if (point.at("sum") == kTileBiased) {
    if (codebook != Codebook::kMul1) {
      return absl::StrCat("biased sums are made for mul1, not for ",
                          CodebookName(codebook));
    }
    const int64_t tokens = point.at("tokens_tile");
    if (tokens != kBiasedRows) {
      return absl::StrCat("biased sums are made for tokens_tile ", kBiasedRows,
                          ", not for ", tokens);
    }
  }
  return SharedBytesRule(problem, TileProductSharedBytes(point, bits));
}

std::string TileProductClass(const AxisPoint& point) {
  if (point.at("sum") == kTileRounded) return "f16";
  // A warp adds up the operand at every warps-th step of K.
  return absl::StrCat("biased.warps", point.at("warps"));
}

double TileProductDecodeCycles(const AxisPoint& point, int bits) {
  constexpr double kCycles = 36;
  constexpr double kUnalignedCycles = 11;  // bits not a multiple of 4
  constexpr double kRoundCycles = 4;       // that biased weights do not take
  if (bits % 4 != 0) return kCycles + kUnalignedCycles;
  return kCycles - (point.at("sum") == kTileBiased ? kRoundCycles : 0);
}

double TileProductMmaCycles(const AxisPoint& point) {
  constexpr double kCycles = 8;
  // One warp after the other adds up the operand, beside its own channels.
  const auto strips = static_cast<double>(point.at("channels_tile")) / 16;
  return point.at("sum") == kTileBiased ? kCycles * (1 + 1 / strips) : kCycles;
}

SourceUnit TileProductUnit(const RequestGeometry& geometry,
                           uint32_t template_version, int part,
                           const Assignment& assignment) {
  SourceUnit unit;
  unit.name = "fused_moe/cuda.cu";
  unit.template_version = template_version;
  unit.compute_dtype = "f16";
  unit.text = absl::StrCat(
      FusedMoePrelude(geometry), "#define KILN_PART ", part, "\n",
      AxisPrelude(assignment, {"tokens_tile", "channels_tile", "k_tile",
                               "warps", "stages", "sum"}),
      TemplateText(unit.name));
  unit.headers =
      CudaHeaders({"cuda/grouped.h", "cuda/mul1_affine.h", "cuda/warp.h"});
  return unit;
}

}  // namespace kiln
