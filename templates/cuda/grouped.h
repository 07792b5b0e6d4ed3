// What CUDA kernels share that multiply rows grouped by expert: the lists that
// routing writes and products read, the way of sums to memory and back.
//
// CUDA only, or under a test's emulator; no header other than Kiln's own.
#ifndef KILN_TEMPLATES_CUDA_GROUPED_H_
#define KILN_TEMPLATES_CUDA_GROUPED_H_

#include "cuda/warp.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"

namespace kd {

constexpr u32 kNone = 0xFFFFFFFFu;

// One sorted row: the route it came from and the expert that serves it.
struct alignas(8) Row {
  u32 route;
  u32 expert;
};

// A run of consecutive sorted rows of one expert, at most a tile of them.
struct alignas(16) Tile {
  u32 expert;
  u32 first;
  u32 rows;
  u32 unused;
};

struct alignas(16) Totals {
  u32 tiles;
  u32 rows;
  u32 unused[2];
};

// ---- routing ---------------------------------------------------------------

// Launched by the host, which has these numbers and kPlaceBytes once more, in
// fused_moe/routed_steps.h.
constexpr u32 kRouteThreads = 1024;
constexpr u32 kRouteWarps = kRouteThreads / 32;
static_assert(kRouteWarps == 32, "a lane per warp");

// kExperts when the route is inactive. The test is made in the width of the
// id, so 2^32 + e does not alias expert e.
template <u32 kExperts, typename Id>
KILN_FN u32 ExpertOf(Id id) {
  return id >= 0 && id < static_cast<Id>(kExperts) ? static_cast<u32>(id)
                                                   : kExperts;
}

KILN_FN u32 WarpSum(u32 v) {
  for (u32 step = 16; step != 0; step /= 2) {
    v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  }
  return v;
}

// Tiles of an expert that has `count` sorted rows from `first` on: the
// begin'th and then every stride'th.
//   kShareUnit: 0 fills all tiles of an expert but the last; otherwise they
//   share its rows evenly, in whole such units. Divides tokens_tile.
template <u32 kShareUnit>
KILN_FN void WriteTiles(u32 expert, u32 first, u32 count, u32 first_tile,
                        u32 begin, u32 stride, u32 tokens_tile, Tile* tiles) {
  const u32 own_tiles = (count + tokens_tile - 1) / tokens_tile;
  // At most tokens_tile, and the last tile gets some: count is above
  // (own_tiles - 1) * tokens_tile.
  u32 share = tokens_tile;
  if constexpr (kShareUnit != 0) {
    if (own_tiles != 0) {
      share = (count + own_tiles - 1) / own_tiles;
      share = (share + kShareUnit - 1) / kShareUnit * kShareUnit;
    }
  }
  for (u32 i = begin; i < own_tiles; i += stride) {
    const u32 left = count - i * share;
    Tile tile;
    tile.expert = expert;
    tile.first = first + i * share;
    tile.rows = left < share ? left : share;
    tile.unused = 0;
    tiles[first_tile + i] = tile;
  }
}

KILN_FN void WriteTotals(u32 tiles, u32 rows, Totals* totals) {
  Totals sum;
  sum.tiles = tiles;
  sum.rows = rows;
  sum.unused[0] = sum.unused[1] = 0;
  *totals = sum;
}

// One block sorts some thousands of routes. More of them are cut into segments
// of `length`, a multiple of kRouteThreads and at most 65535, of which there
// are at most 128 or so: one launch counts the experts of every segment, and
// from all counts the next one knows where each of its own routes goes. Block s
// of both serves segment s; all have kRouteThreads threads.

// Calls each(route, expert, lanes with the same expert) for every 32 of the
// routes [begin, end), of which the last ones may lie beyond it; by a warp.
template <u32 kExperts, typename Id, class Each>
KILN_FN void ForRoutes(const Id* ids, u32 begin, u32 end, u32 lane, Each each) {
  const auto expert_of = [&](u32 route) {
    return route < end ? ExpertOf<kExperts>(ids[route]) : kExperts;
  };
  u32 upcoming = expert_of(begin + lane);
  for (u32 route = begin + lane; route - lane < end; route += 32) {
    const u32 expert = upcoming;
    upcoming = expert_of(route + 32);
    each(route, expert, __match_any_sync(0xFFFFFFFFu, expert));
    __syncwarp();
  }
}

// counts[segment][expert]: how many routes.
template <u32 kExperts, typename Id>
KILN_FN void CountSegment(const Id* ids, u32* counts, u32 routes, u32 length) {
  __shared__ u32 own[kExperts];
  for (u32 e = threadIdx.x; e < kExperts; e += kRouteThreads) own[e] = 0;
  __syncthreads();
  const u32 begin = blockIdx.x * length;
  const u32 end = begin + length < routes ? begin + length : routes;
#pragma unroll 4
  for (u32 route = begin + threadIdx.x; route < end; route += kRouteThreads) {
    const u32 found = ExpertOf<kExperts>(ids[route]);
    if (found < kExperts) atomicAdd(&own[found], 1u);
  }
  __syncthreads();
  for (u32 e = threadIdx.x; e < kExperts; e += kRouteThreads) {
    counts[blockIdx.x * kExperts + e] = own[e];
  }
}

// Inclusive sum over the lanes up to this one.
KILN_FN u32 WarpScan(u32 v, u32 lane) {
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 before = __shfl_sync(0xFFFFFFFFu, v, (lane - step) % 32);
    v += lane >= step ? before : 0;
  }
  return v;
}

// Bytes of the dynamic shared memory of PlaceSegment.
template <u32 kExperts>
constexpr u32 kPlaceBytes = kRouteWarps* kExperts * 2;

// Sorts routes by expert, stably: rows, positions (kNone of inactive routes),
// tiles, totals. Blocks beyond the segments of `routes` do nothing.
//   counts: of CountSegment; null where all routes are one segment, and then
//   `length` is not read
//   kShareUnit: see WriteTiles
template <u32 kExperts, u32 kShareUnit, typename Id>
KILN_FN void PlaceSegment(const Id* ids, const u32* counts, Row* rows,
                          u32* positions, Tile* tiles, Totals* totals,
                          u32 routes, u32 length, u32 tokens_tile) {
  static_assert(kExperts <= kRouteThreads, "a thread for each expert");
  __shared__ u32 next[kExperts];  // where the segment's first route goes
  __shared__ u32 warp_rows[kRouteWarps];
  __shared__ u32 warp_tiles[kRouteWarps];
  // Of each warp and expert: routes, then those of the warps before it.
  u16* const table = reinterpret_cast<u16*>(DynamicShared());
  if (counts == nullptr) {
    length = (routes + kRouteThreads - 1) / kRouteThreads * kRouteThreads;
  }
  const u32 segment = blockIdx.x;
  const u32 segments = (routes + length - 1) / length;
  if (segment >= segments) return;
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  u16* const own = table + warp * kExperts;

  // A warp has a contiguous range of the segment: it counts, and once the
  // counts of the warps before it are known, it places.
  const u32 range = length / kRouteWarps;
  const u32 from = segment * length + warp * range;
  const u32 begin = from < routes ? from : routes;
  const u32 end = begin + range < routes ? begin + range : routes;
  const u32 below = (1u << lane) - 1;
  for (u32 e = lane; e < kExperts; e += 32) own[e] = 0;
  __syncwarp();
  const auto add = [&](u32 found, u32 same) {
    if (found < kExperts && (same & below) == 0) {
      own[found] = static_cast<u16>(own[found] + __popc(same));
    }
  };
  ForRoutes<kExperts>(ids, begin, end, lane,
                      [&](u32, u32 found, u32 same) { add(found, same); });

  // Thread e knows how many routes expert e has, and how many of them lie in
  // the segments before this one.
  const u32 expert = threadIdx.x;
  u32 count = 0, before = 0;
  if (counts != nullptr && expert < kExperts) {
#pragma unroll 8
    for (u32 s = 0; s < segments; ++s) {
      const u32 some = counts[s * kExperts + expert];
      count += some;
      before += s < segment ? some : 0;
    }
  }
  __syncthreads();
  if (expert < kExperts) {
    u32 sum = 0;
#pragma unroll 8
    for (u32 w = 0; w < kRouteWarps; ++w) {
      u16& at = table[w * kExperts + expert];
      const u32 some = at;
      at = static_cast<u16>(sum);
      sum += some;
    }
    if (counts == nullptr) count = sum;
  }
  const u32 own_tiles = (count + tokens_tile - 1) / tokens_tile;
  const u32 rows_upto = WarpScan(count, lane);
  const u32 tiles_upto = WarpScan(own_tiles, lane);
  if (lane == 31) {
    warp_rows[warp] = rows_upto;
    warp_tiles[warp] = tiles_upto;
  }
  __syncthreads();
  const u32 first =
      rows_upto - count + WarpSum(lane < warp ? warp_rows[lane] : 0);
  const u32 first_tile =
      tiles_upto - own_tiles + WarpSum(lane < warp ? warp_tiles[lane] : 0);
  if (expert < kExperts) {
    next[expert] = first + before;
    WriteTiles<kShareUnit>(expert, first, count, first_tile, segment, segments,
                           tokens_tile, tiles);
    if (expert == kExperts - 1 && segment == 0) {
      WriteTotals(first_tile + own_tiles, first + count, totals);
    }
  }
  __syncthreads();
  ForRoutes<kExperts>(
      ids, begin, end, lane, [&](u32 route, u32 found, u32 same) {
        if (found < kExperts) {
          const u32 at = next[found] + own[found] + __popc(same & below);
          Row row;
          row.route = route;
          row.expert = found;
          rows[at] = row;
          positions[route] = at;
        } else if (route < end) {
          positions[route] = kNone;
        }
        __syncwarp();
        add(found, same);
      });
}

// ---- items of a warp -------------------------------------------------------

// Calls work(item, load(item)) for first, first + stride, ... below `items`; an
// item is loaded before the one in front of it is worked on.
template <class Load, class Work>
KILN_FN void ForItems(u32 first, u32 items, u32 stride, Load load, Work work) {
  if (first >= items) return;
  auto upcoming = load(first);
#pragma unroll 1
  for (u32 item = first; item < items; item += stride) {
    const auto input = upcoming;
    if (item + stride < items) upcoming = load(item + stride);
    work(item, input);
  }
}

// ---- four neighbours -------------------------------------------------------

KILN_FN void Unpack4(uint2 bits, float (&v)[4]) {
  v[0] = kd::f16_to_f32(static_cast<u16>(bits.x));
  v[1] = kd::f16_to_f32(static_cast<u16>(bits.x >> 16));
  v[2] = kd::f16_to_f32(static_cast<u16>(bits.y));
  v[3] = kd::f16_to_f32(static_cast<u16>(bits.y >> 16));
}

KILN_FN u32 Pack2(float low, float high) {
  return static_cast<u32>(kd::f32_to_f16(low)) |
         static_cast<u32>(kd::f32_to_f16(high)) << 16;
}

KILN_FN void Load4(const u16* from, float (&v)[4]) {
  Unpack4(*reinterpret_cast<const uint2*>(from), v);
}

KILN_FN void Store4(u16* to, const float (&v)[4]) {
  *reinterpret_cast<uint2*>(to) =
      make_uint2(Pack2(v[0], v[1]), Pack2(v[2], v[3]));
}

// v *= a binary16 table.
KILN_FN void Scale4(const u16* table, float (&v)[4]) {
  float scale[4];
  Load4(table, scale);
  KILN_UNROLLED
  for (u32 i = 0; i < 4; ++i) v[i] *= scale[i];
}

// Four of x, binary16 or bfloat16, rounded to binary16.
template <bool kBfloat>
KILN_FN void UnpackX4(uint2 bits, float (&v)[4]) {
  if constexpr (kBfloat) {
    const u32 halves[4] = {bits.x & 0xFFFFu, bits.x >> 16, bits.y & 0xFFFFu,
                           bits.y >> 16};
    KILN_UNROLLED
    for (u32 i = 0; i < 4; ++i) {
      v[i] = round_f16(bf16_to_f32(static_cast<u16>(halves[i])));
    }
  } else {
    Unpack4(bits, v);
  }
}

// ---- results ---------------------------------------------------------------

// Stores kTimes the sums of 16 channels x 8 rows as fp16. Sums lie as an MMA
// leaves them: d[0], d[1] are channel lane/4 of rows 2(lane%4) and the next,
// d[2] and d[3] channel lane/4 + 8 of the same. `to` is channel 2(lane%4) of
// row lane/4, stored to only where `store`.
template <int kTimes>
KILN_FN void StoreRounded(const float* d, u16* to, bool store) {
  const u32 low = Transpose8x8(RoundPair(kTimes * d[0], kTimes * d[1]));
  const u32 high = Transpose8x8(RoundPair(kTimes * d[2], kTimes * d[3]));
  if (store) {
    *reinterpret_cast<u32*>(to) = low;
    *reinterpret_cast<u32*>(to + 8) = high;
  }
}

// Writes kTimes the sums to rows [first, first + rows) of the product, columns
// from `column` on: fp16 when K is not split, else this slice's fp32 partial
// sums.
//   sums: of a warp's 16-channel strips by 8 rows, as an MMA leaves them
//   total: rows of a slice
template <u32 kWidth, int kTimes, u32 kWarpStrips, u32 kTokenGroups>
KILN_FN void StoreSums(const float (&sums)[kWarpStrips][kTokenGroups][4],
                       void* product, u64 total, u32 first, u32 rows,
                       u32 column) {
  const u32 lane = threadIdx.x % 32;
  column += threadIdx.x / 32 * (kWarpStrips * 16);
  if (gridDim.y == 1) {
    u16* to = static_cast<u16*>(product) +
              static_cast<u64>(first + lane / 4) * kWidth + column +
              lane % 4 * 2;
    KILN_UNROLLED
    for (u32 g = 0; g < kTokenGroups; ++g) {
      if (g * 8 >= rows) break;
      const bool store = g * 8 + lane / 4 < rows;
      KILN_UNROLLED
      for (u32 i = 0; i < kWarpStrips; ++i) {
        StoreRounded<kTimes>(
            sums[i][g], to + static_cast<u64>(g * 8) * kWidth + i * 16, store);
      }
    }
    return;
  }
  float* to = static_cast<float*>(product) +
              (total * blockIdx.y + first + lane % 4 * 2) * kWidth + column +
              lane / 4;
  KILN_UNROLLED
  for (u32 g = 0; g < kTokenGroups; ++g) {
    KILN_UNROLLED
    for (u32 odd = 0; odd < 2; ++odd) {
      if (g * 8 + lane % 4 * 2 + odd < rows) {
        float* at = to + static_cast<u64>(g * 8 + odd) * kWidth;
        KILN_UNROLLED
        for (u32 i = 0; i < kWarpStrips; ++i) {
          at[i * 16] = kTimes * sums[i][g][odd];
          at[i * 16 + 8] = kTimes * sums[i][g][odd + 2];
        }
      }
    }
  }
}

// Four neighbours each of kCount places of a matrix product's result, rounded
// to fp16 (steps 4 and 8). With one K slice the product has stored fp16;
// otherwise fp32 partial sums, `slice` elements apart, are added here in slice
// order. Where `at` is kAbsent nothing is read. All loads of kAhead slices are
// issued before the first of them is needed.
constexpr u64 kAbsent = ~u64{0};

template <u32 kAhead, u32 kCount>
KILN_FN void LoadProducts(const void* product, const u64 (&at)[kCount],
                          u64 slice, u32 slices, float (&v)[kCount][4]) {
  if (slices == 1) {
    uint2 bits[kCount];
    KILN_UNROLLED
    for (u32 i = 0; i < kCount; ++i) {
      bits[i] = make_uint2(0, 0);
      if (at[i] != kAbsent) {
        bits[i] = *reinterpret_cast<const uint2*>(
            static_cast<const u16*>(product) + at[i]);
      }
    }
    KILN_UNROLLED
    for (u32 i = 0; i < kCount; ++i) Unpack4(bits[i], v[i]);
    return;
  }
  const float* from = static_cast<const float*>(product);
  KILN_UNROLLED
  for (u32 i = 0; i < kCount; ++i) {
    v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0.0f;
  }
#pragma unroll 1
  for (u32 s = 0; s < slices; s += kAhead) {
    float4 part[kAhead][kCount];
    KILN_UNROLLED
    for (u32 n = 0; n < kAhead; ++n) {
      KILN_UNROLLED
      for (u32 i = 0; i < kCount; ++i) {
        part[n][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (s + n < slices && at[i] != kAbsent) {
          part[n][i] =
              *reinterpret_cast<const float4*>(from + at[i] + n * slice);
        }
      }
    }
    KILN_UNROLLED
    for (u32 n = 0; n < kAhead; ++n) {
      KILN_UNROLLED
      for (u32 i = 0; i < kCount; ++i) {
        v[i][0] += part[n][i].x;
        v[i][1] += part[n][i].y;
        v[i][2] += part[n][i].z;
        v[i][3] += part[n][i].w;
      }
    }
    from += kAhead * slice;
  }
  KILN_UNROLLED
  for (u32 i = 0; i < kCount; ++i) {
    Unpack4(make_uint2(Pack2(v[i][0], v[i][1]), Pack2(v[i][2], v[i][3])), v[i]);
  }
}

// What lane j of a warp knows of route j of its token.
struct LaneRoute {
  u32 row;  // kNone of an inactive route, and in lanes beyond kTopK
  float weight;
};

template <u32 kTopK>
KILN_FN LaneRoute LoadLaneRoute(const u32* positions, const float* weights,
                                u32 token, u32 lane) {
  LaneRoute own = {kNone, 0.0f};
  if (lane < kTopK) {
    const u64 route = static_cast<u64>(token) * kTopK + lane;
    own.row = positions[route];
    own.weight = weights[route];
  }
  return own;
}

// sum += weight times what each route of the warp's token has in this lane's
// four columns of a product [rows][kWidth], in router order with explicit fma.
// Inactive routes add nothing.
//   each(j, value): made of route j's four values before they are added; all
//   lanes call it
template <u32 kTopK, u32 kWidth, class Each>
KILN_FN void SumRoutes(const void* product, const LaneRoute& own, u32 column,
                       u64 slice, u32 slices, Each each, float (&sum)[4]) {
  constexpr u32 kAtOnce = kTopK < 8 ? kTopK : 8;  // routes loaded together
#pragma unroll 1
  for (u32 base = 0; base < kTopK; base += kAtOnce) {
    u64 places[kAtOnce];
    float value[kAtOnce][4];
    KILN_UNROLLED
    for (u32 j = 0; j < kAtOnce; ++j) {
      const u32 row = __shfl_sync(0xFFFFFFFFu, own.row, (base + j) % 32);
      places[j] = base + j < kTopK && row != kNone
                      ? static_cast<u64>(row) * kWidth + column
                      : kAbsent;
    }
    LoadProducts<1>(product, places, slice, slices, value);
    KILN_UNROLLED
    for (u32 j = 0; j < kAtOnce; ++j) {
      const float weight =
          __shfl_sync(0xFFFFFFFFu, own.weight, (base + j) % 32);
      if (places[j] == kAbsent) continue;
      each(base + j, value[j]);
      KILN_UNROLLED
      for (u32 i = 0; i < 4; ++i) sum[i] = Fma(weight, value[j][i], sum[i]);
    }
  }
}

// The output of H128 tables: one 128 block of one token per warp. A route's
// values are transformed and scaled; with shared tables the sum of the routes
// is, once.
//   down_svh: [experts][kWidth], or [kWidth] when shared
template <u32 kTopK, u32 kWidth, bool kShared, u32 kWarps>
KILN_FN void CombineRoutes(const void* product, const u16* down_svh,
                           const float* weights, const u32* positions,
                           [[maybe_unused]] const Row* rows, float* out,
                           u32 tokens, u32 slices) {
  constexpr u32 kBlocks = kWidth / kHadamardSize;
  const u32 lane = threadIdx.x % 32;
  const u32 item = blockIdx.x * kWarps + threadIdx.x / 32;
  const u32 token = item / kBlocks;
  if (token >= tokens) return;
  const u32 column = item % kBlocks * kHadamardSize + lane * 4;
  const u64 slice = static_cast<u64>(tokens) * (kTopK * kWidth);
  const LaneRoute own = LoadLaneRoute<kTopK>(positions, weights, token, lane);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if constexpr (kShared) {
    SumRoutes<kTopK, kWidth>(
        product, own, column, slice, slices, [](u32, float(&)[4]) {}, sum);
    WarpHadamard128(sum, lane);
    Scale4(down_svh + column, sum);
  } else {
    const u32 own_expert = own.row != kNone ? rows[own.row].expert : 0;
    SumRoutes<kTopK, kWidth>(
        product, own, column, slice, slices,
        [&](u32 route, float(&value)[4]) {
          const u64 expert = __shfl_sync(0xFFFFFFFFu, own_expert, route % 32);
          WarpHadamard128(value, lane);
          Scale4(down_svh + expert * kWidth + column, value);
        },
        sum);
  }
  *reinterpret_cast<float4*>(out + static_cast<u64>(token) * kWidth + column) =
      make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// Byte address of tile (0, column / 16) of an expert's matrix.
template <int kBits, u32 kDepth, u32 kWidth>
KILN_FN const unsigned char* ExpertTiles(const u16* weights, u32 expert,
                                         u32 column) {
  constexpr u64 kExpertBytes = static_cast<u64>(kDepth) * kWidth * kBits / 8;
  return reinterpret_cast<const unsigned char*>(weights) +
         expert * kExpertBytes + column * (2 * kBits);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_CUDA_GROUPED_H_
