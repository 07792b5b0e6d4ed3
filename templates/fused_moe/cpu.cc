// fused_moe, recipe w4a16, EXL3 weights, on the CPU.
//
// Kernel source: compiled at run time by the embedded Clang for one request
// and one candidate, with a prelude of macros before the text. Rounding
// boundaries follow the trellis specification, 4.5. Every sum over input
// channels runs in ascending order with one fused multiply-add per term, so
// all candidates of this template give identical bits.
//
// Words: R = m * top_k routes. Routes are grouped by expert, stably, into
// tiles of T = KILN_TOKENS_TILE rows; a tile never mixes experts.
//   tiles(m) = min(R, ceil((R + (E - 1) (T - 1)) / T))   upper bound of tiles
//   slot     = tile * T + row in tile
// C is KILN_CHANNELS_TILE, "c512" is ceil(channels / 512).
//
// Steps, in this order. "p" marks a parameter of the op, "a" an arena slice;
// `tokens` is live m.
//   entry                  grid                       arguments
//   kiln_moe_cpu_route     1, 1, 1                    tokens, p topk_ids,
//     a tile_expert, a tile_routes, a route_slot
//   kiln_moe_cpu_rotate    tiles, c512(H), 1          a tile_expert,
//     a tile_routes, p x, p gate_suh, p up_suh, a gate_in, a up_in
//   kiln_moe_cpu_fc1       tiles, ceil(I / C), 2      a tile_expert,
//     p w_gate, p w_up, a gate_in, a up_in, a gate_out, a up_out
//   kiln_moe_cpu_activate  tiles, c512(I), 1          a tile_expert,
//     a tile_routes, p rotations, a gate_out, a up_out, a down_in
//   kiln_moe_cpu_fc2       tiles, ceil(H / C), 1      a tile_expert,
//     p w_down, a down_in, a down_out
//   kiln_moe_cpu_combine   m, c512(H), 1              a tile_expert,
//     a route_slot, p topk_weights, p down_svh, a down_out, p out
//
// tiles as a launch dimension: min(ceil(top_k m / 1),
//   ceil((top_k m + (E - 1) (T - 1)) / T)).
//
// Arena slices for a capacity m, in bytes, n = tiles(m):
//   tile_expert i32 [n]           4 n          expert, -1: tile not in use
//   tile_routes i32 [n][T]        4 n T        route, -1: row not in use
//   route_slot  i32 [R]           4 R          slot, -1: inactive route
//   gate_in     f16 [n][H][T]     2 n T H
//   up_in       f16 [n][H][T]     2 n T H
//   gate_out    f16 [n][T][I]     2 n T I
//   up_out      f16 [n][T][I]     2 n T I
//   down_in     f16 [n][I][T]     2 n T I
//   down_out    f16 [n][T][H]     2 n T H      may share bytes with gate_in
// Nothing is read that the same launch did not write.
//
// Axes: KILN_TOKENS_TILE, KILN_CHANNELS_TILE, KILN_K_TILE and KILN_UNROLL of
// cpu/trellis_product.h.

#include "cpu/trellis_product.h"
#include "device/activation.h"
#include "device/cpu_entry.h"
#include "device/platform.h"

namespace {

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kInter = KILN_INTER;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;

static_assert(kHidden % kBlock == 0 && kInter % kBlock == 0,
              "hidden and intermediate sizes are multiples of 128");

KILN_FN u32 TileBound(u32 tokens) {
  const u64 routes = static_cast<u64>(tokens) * kTopK;
  const u64 packed =
      (routes + static_cast<u64>(kExperts) * (kRows - 1)) / kRows;
  return static_cast<u32>(routes < packed ? routes : packed);
}

// ---- route -----------------------------------------------------------------

struct RouteArgs {
  u32 tokens;
  const void* topk_ids;
  i32* tile_expert;
  i32* tile_routes;
  i32* route_slot;
};

// The expert of a route, or -1.
KILN_FN i32 ExpertOf(const void* ids, u64 route) {
#if KILN_ID_I64
  const i64 id = static_cast<const i64*>(ids)[route];
#else
  const i64 id = static_cast<const i32*>(ids)[route];
#endif
  return id >= 0 && id < static_cast<i64>(kExperts) ? static_cast<i32>(id) : -1;
}

void Route(const RouteArgs& args, u32, u32, u32) {
  const u64 routes = static_cast<u64>(args.tokens) * kTopK;
  u32 next_slot[kExperts] = {};
  for (u64 r = 0; r < routes; ++r) {
    const i32 expert = ExpertOf(args.topk_ids, r);
    if (expert >= 0) ++next_slot[expert];
  }
  u32 tiles = 0;
  for (u32 e = 0; e < kExperts; ++e) {
    const u32 count = next_slot[e];
    next_slot[e] = tiles * kRows;
    for (u32 row = 0; row < count; row += kRows) {
      args.tile_expert[tiles++] = static_cast<i32>(e);
    }
  }
  for (u64 i = 0; i < static_cast<u64>(tiles) * kRows; ++i) {
    args.tile_routes[i] = -1;
  }
  for (u32 tile = tiles; tile < TileBound(args.tokens); ++tile) {
    args.tile_expert[tile] = -1;
  }
  for (u64 r = 0; r < routes; ++r) {
    const i32 expert = ExpertOf(args.topk_ids, r);
    if (expert < 0) {
      args.route_slot[r] = -1;
      continue;
    }
    const u32 slot = next_slot[expert]++;
    args.tile_routes[slot] = static_cast<i32>(r);
    args.route_slot[r] = static_cast<i32>(slot);
  }
}

// ---- rotate ----------------------------------------------------------------

struct RotateArgs {
  const i32* tile_expert;
  const i32* tile_routes;
  const u16* x;
  const u16* gate_suh;
  const u16* up_suh;
  u16* gate_in;
  u16* up_in;
};

// Row of a scale table that experts may share.
KILN_FN u64 ScaleRow(i32 expert) {
#if KILN_SHARED_SUH
  return static_cast<u64>(expert) * 0;
#else
  return static_cast<u64>(expert) * kHidden;
#endif
}

void Rotate(const RotateArgs& args, u32 tile, u32 chunk, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  const u32 end =
      (chunk + 1) * kChunk < kHidden ? (chunk + 1) * kChunk : kHidden;
  for (u32 base = chunk * kChunk; base < end; base += kBlock) {
    u16 gate[kRows][kBlock];
    u16 up[kRows][kBlock];
    for (u32 row = 0; row < kRows; ++row) {
      const i32 route = args.tile_routes[tile * kRows + row];
      if (route < 0) {
        for (u32 c = 0; c < kBlock; ++c) gate[row][c] = up[row][c] = 0;
        continue;
      }
      const u64 token = static_cast<u32>(route) / kTopK;
      float x[kBlock];
      LoadX(args.x + token * kHidden + base, x);
      const u64 scale = ScaleRow(expert) + base;
      RotateRow(x, args.gate_suh + scale, gate[row]);
      RotateRow(x, args.up_suh + scale, up[row]);
    }
    const u64 at = (static_cast<u64>(tile) * kHidden + base) * kRows;
    StoreTransposed(gate, args.gate_in + at);
    StoreTransposed(up, args.up_in + at);
  }
}

// ---- matrix products -------------------------------------------------------

// out[row][column ..] = a * W, rounded to binary16.
template <int K>
KILN_FN void MultiplyStrip(const u16* w, i32 expert, u32 k_size, u32 n_size,
                           u32 strip_index, const u16* a, u16* out) {
  const u32 column = strip_index * kStrip;
  const u32 columns = ColumnsOf(n_size, column);
  const u64 expert_words =
      static_cast<u64>(k_size / 16) * (n_size / 16) * kd::kTileWords<K>;
  Strip strip;
  Product<K>::Run(
      reinterpret_cast<const u32*>(w) + static_cast<u64>(expert) * expert_words,
      k_size, n_size, column, columns / kGroup, a, &strip);
  for (u32 row = 0; row < kRows; ++row) {
    u16* to = out + static_cast<u64>(row) * n_size + column;
    for (u32 g = 0; g < columns / kGroup; ++g) {
      for (u32 half = 0; half < 2; ++half) {
        u16 lanes[kLanes];
        kd::Store(lanes, kd::ToHalves<kLanes>(strip.sum[g][half][row]));
        for (u32 tile = 0; tile < kGroupTiles; ++tile) {
          __builtin_memcpy(to + g * kGroup + tile * 16 + half * 8,
                           lanes + tile * 8, 8 * sizeof(u16));
        }
      }
    }
  }
}

struct Fc1Args {
  const i32* tile_expert;
  const u16* w_gate;
  const u16* w_up;
  const u16* gate_in;
  const u16* up_in;
  u16* gate_out;
  u16* up_out;
};

void Fc1(const Fc1Args& args, u32 tile, u32 strip, u32 side) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  const u64 in = static_cast<u64>(tile) * kRows * kHidden;
  const u64 out = static_cast<u64>(tile) * kRows * kInter;
  if (side == 0) {
    MultiplyStrip<KILN_BITS_GATE>(args.w_gate, expert, kHidden, kInter, strip,
                                  args.gate_in + in, args.gate_out + out);
  } else {
    MultiplyStrip<KILN_BITS_UP>(args.w_up, expert, kHidden, kInter, strip,
                                args.up_in + in, args.up_out + out);
  }
}

struct Fc2Args {
  const i32* tile_expert;
  const u16* w_down;
  const u16* down_in;
  u16* down_out;
};

void Fc2(const Fc2Args& args, u32 tile, u32 strip, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  MultiplyStrip<KILN_BITS_DOWN>(
      args.w_down, expert, kInter, kHidden, strip,
      args.down_in + static_cast<u64>(tile) * kRows * kInter,
      args.down_out + static_cast<u64>(tile) * kRows * kHidden);
}

// ---- activate --------------------------------------------------------------

struct ActivateArgs {
  const i32* tile_expert;
  const i32* tile_routes;
  const u16* rotations;
  const u16* gate_out;
  const u16* up_out;
  u16* down_in;
};

// v[0..127] = Hadamard(from) * scale.
KILN_FN void LoadRotated(const u16* from, const u16* scale, float* v) {
  for (u32 c = 0; c < kBlock; c += kLanes) {
    kd::Store(v + c, kd::LoadHalves<kLanes>(from + c));
  }
  kd::VectorHadamard128<kLanes>(v);
  for (u32 c = 0; c < kBlock; c += kLanes) {
    kd::Store(v + c, kd::Load<F>(v + c) * kd::LoadHalves<kLanes>(scale + c));
  }
}

void Activate(const ActivateArgs& args, u32 tile, u32 chunk, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  const u16* gate_svh = args.rotations + static_cast<u64>(expert) * 3 * kInter;
  const u16* up_svh = gate_svh + kInter;
  const u16* down_suh = up_svh + kInter;
  const u32 end = (chunk + 1) * kChunk < kInter ? (chunk + 1) * kChunk : kInter;
  for (u32 base = chunk * kChunk; base < end; base += kBlock) {
    u16 result[kRows][kBlock];
    for (u32 row = 0; row < kRows; ++row) {
      if (args.tile_routes[tile * kRows + row] < 0) {
        for (u32 c = 0; c < kBlock; ++c) result[row][c] = 0;
        continue;
      }
      const u64 at = (static_cast<u64>(tile) * kRows + row) * kInter + base;
      float gate[kBlock];
      float up[kBlock];
      LoadRotated(args.gate_out + at, gate_svh + base, gate);
      LoadRotated(args.up_out + at, up_svh + base, up);
      for (u32 c = 0; c < kBlock; ++c) gate[c] = kd::Silu(gate[c]) * up[c];
      for (u32 c = 0; c < kBlock; c += kLanes) {
        kd::Store(gate + c, kd::Load<F>(gate + c) *
                                kd::LoadHalves<kLanes>(down_suh + base + c));
      }
      kd::VectorHadamard128<kLanes>(gate);
      StoreHalves(gate, result[row]);
    }
    StoreTransposed(
        result,
        args.down_in + (static_cast<u64>(tile) * kInter + base) * kRows);
  }
}

// ---- combine ---------------------------------------------------------------

struct CombineArgs {
  const i32* tile_expert;
  const i32* route_slot;
  const float* topk_weights;
  const u16* down_svh;
  const u16* down_out;
  float* out;
};

void Combine(const CombineArgs& args, u32 token, u32 chunk, u32) {
  const u32 end =
      (chunk + 1) * kChunk < kHidden ? (chunk + 1) * kChunk : kHidden;
  for (u32 base = chunk * kChunk; base < end; base += kBlock) {
    F sum[kBlock / kLanes] = {};
    for (u32 j = 0; j < kTopK; ++j) {
      const u64 route = static_cast<u64>(token) * kTopK + j;
      const i32 slot = args.route_slot[route];
      if (slot < 0) continue;
      const i32 expert = args.tile_expert[static_cast<u32>(slot) / kRows];
      const F weight = kd::Splat<kLanes>(args.topk_weights[route]);
      float v[kBlock];
      LoadRotated(args.down_out + static_cast<u64>(slot) * kHidden + base,
                  args.down_svh + ScaleRow(expert) + base, v);
      for (u32 i = 0; i < kBlock / kLanes; ++i) {
        sum[i] = kd::FmaLanes<F>(kd::Load<F>(v + i * kLanes), weight, sum[i]);
      }
    }
    float* out = args.out + static_cast<u64>(token) * kHidden + base;
    for (u32 i = 0; i < kBlock / kLanes; ++i) {
      kd::Store(out + i * kLanes, sum[i]);
    }
  }
}

}  // namespace

KILN_CPU_ENTRY(kiln_moe_cpu_route, RouteArgs, Route)
KILN_CPU_ENTRY(kiln_moe_cpu_rotate, RotateArgs, Rotate)
KILN_CPU_ENTRY(kiln_moe_cpu_fc1, Fc1Args, Fc1)
KILN_CPU_ENTRY(kiln_moe_cpu_activate, ActivateArgs, Activate)
KILN_CPU_ENTRY(kiln_moe_cpu_fc2, Fc2Args, Fc2)
KILN_CPU_ENTRY(kiln_moe_cpu_combine, CombineArgs, Combine)
