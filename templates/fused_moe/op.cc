#include "templates/fused_moe/op.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"

namespace kiln {

std::vector<ParamDecl> FusedMoeParams(const RequestGeometry& geometry) {
  const std::string io(DTypeName(geometry.io_dtype));
  const std::string id(DTypeName(geometry.id_dtype));
  const std::string rows = geometry.weights.shared_scales ? "1" : "experts";
  const std::string h_table = absl::StrCat("[", rows, ", hidden]");
  const Bits& bits = geometry.weights.bits;
  const auto fc1 = [](int k) {
    return absl::StrCat("[experts, hidden/16, intermediate/16, ", 16 * k, "]");
  };
  return {
      {"x", io, "[m, hidden]", false},
      {"topk_ids", id, "[m, top_k]", false},
      {"topk_weights", "f32", "[m, top_k]", false},
      {"w_gate", "i16", fc1(bits.gate), false},
      {"w_up", "i16", fc1(bits.up), false},
      {"w_down", "i16",
       absl::StrCat("[experts, intermediate/16, hidden/16, ", 16 * bits.down,
                    "]"),
       false},
      {"gate_suh", "f16", h_table, false},
      {"up_suh", "f16", h_table, false},
      {"rotations", "f16", "[experts, 3*intermediate]", false},
      {"down_svh", "f16", h_table, false},
      {"out", "f32", "[m, hidden]", true},
  };
}

std::vector<uint64_t> FusedMoeBytes(const RequestGeometry& geometry,
                                    uint32_t tokens) {
  const auto h = static_cast<uint64_t>(geometry.hidden);
  const auto i = static_cast<uint64_t>(geometry.intermediate);
  const auto e = static_cast<uint64_t>(geometry.experts);
  const auto k = static_cast<uint64_t>(geometry.top_k);
  const uint64_t m = tokens;
  const uint64_t table = (geometry.weights.shared_scales ? 1 : e) * h * 2;
  const Bits& bits = geometry.weights.bits;
  // 256 weights of a tile take 32 bytes per bit: h * i / 8 per bit.
  const auto matrix = [&](int rate) {
    return e * h * i / 8 * static_cast<uint64_t>(rate);
  };
  return {
      m * h * DTypeBytes(geometry.io_dtype),
      m * k * DTypeBytes(geometry.id_dtype),
      m * k * 4,
      matrix(bits.gate),
      matrix(bits.up),
      matrix(bits.down),
      table,
      table,
      e * 3 * i * 2,
      table,
      m * h * 4,
  };
}

std::string FusedMoePrelude(const RequestGeometry& geometry) {
  const Weights& weights = geometry.weights;
  int codebook = 0;
  switch (weights.codebook) {
    case Codebook::k3Inst:
      codebook = 0;
      break;
    case Codebook::kMcg:
      codebook = 1;
      break;
    case Codebook::kMul1:
      codebook = 2;
      break;
  }
  std::string out;
  const auto define = [&out](absl::string_view name, int64_t value) {
    absl::StrAppend(&out, "#define KILN_", name, " ", value, "\n");
  };
  define("HIDDEN", geometry.hidden);
  define("INTER", geometry.intermediate);
  define("EXPERTS", geometry.experts);
  define("TOPK", geometry.top_k);
  define("CODEBOOK", codebook);
  define("BITS_GATE", weights.bits.gate);
  define("BITS_UP", weights.bits.up);
  define("BITS_DOWN", weights.bits.down);
  define("X_BF16", geometry.io_dtype == DType::kBf16 ? 1 : 0);
  define("ID_I64", geometry.id_dtype == DType::kI64 ? 1 : 0);
  define("SHARED_SUH", weights.shared_scales ? 1 : 0);
  return out;
}

LaunchDim FusedMoeTiles(const RequestGeometry& geometry, uint32_t tile,
                        uint32_t blocks) {
  KILN_CHECK(tile >= 1 && blocks >= 1);
  const uint32_t routes = static_cast<uint32_t>(geometry.top_k) * blocks;
  // Less tile - 1, so that the rule's ceiling is the floor of the bound: no
  // block may look at a tile beyond FusedMoeTilesMax, the arena ends there.
  const uint32_t ragged =
      static_cast<uint32_t>(geometry.experts) * (tile - 1) * blocks -
      (tile - 1);
  return {.a = {.mul = routes, .add = 0, .div = 1},
          .b = {.mul = routes, .add = ragged, .div = tile}};
}

uint64_t FusedMoeTilesMax(const RequestGeometry& geometry, uint32_t tile,
                          uint32_t capacity) {
  const uint64_t routes =
      uint64_t{capacity} * static_cast<uint64_t>(geometry.top_k);
  const uint64_t ragged =
      (routes + static_cast<uint64_t>(geometry.experts) * (tile - 1)) / tile;
  return std::min(routes, ragged);
}

double FusedMoeTilesExpected(const RequestGeometry& geometry, uint32_t tile,
                             uint32_t m) {
  // Routes of one expert are about binomial(m, top_k / experts); sum the
  // expected ceil(count / tile) over experts by the Poisson approximation.
  const double mean = static_cast<double>(m) *
                      static_cast<double>(geometry.top_k) /
                      static_cast<double>(geometry.experts);
  double probability = std::exp(-mean);
  double tiles = 0;
  double below = 0;
  const int limit = static_cast<int>(mean + 10 * std::sqrt(mean) + 20);
  for (int count = 0; count <= limit; ++count) {
    below += probability;
    tiles += probability *
             std::ceil(static_cast<double>(count) / static_cast<double>(tile));
    probability *= mean / (count + 1);
  }
  if (below < 0.5) tiles = mean / tile + 0.5;  // exp(-mean) underflowed
  return tiles * static_cast<double>(geometry.experts);
}

}  // namespace kiln
