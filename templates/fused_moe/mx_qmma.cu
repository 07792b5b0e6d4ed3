// fused_moe over TrellisMX weights (NPK-1 streams behind the coupled boundary):
// the two products of the W4A8 arm on tensor cores that multiply E4M3
// themselves. All other steps are part 0 of mx_cuda.cu.
//
// Source for sm_89, and for sm_120 and its family; no header other than Kiln's
// own. Read templates/fused_moe/README.md, "TrellisMX weights on CUDA, E4M3
// tensor cores", first.
//
// Prelude (integers): those of mx_cuda.cu that describe a request, and
//   KILN_BLOCK_SCALED      1: the tensor core takes the scales of 32 input
//                          channels (sm_120a, sm_121a); 0: it does not
// Axes:
//   KILN_TOKENS_TILE T     8 or a multiple of 16 up to 128: rows of one expert
//                          per block
//   KILN_CHANNELS_TILE C   64, 128 or 256 output channels per block; divides I
//                          (fc1) and H (fc2); C >= 16 * KILN_WARPS
//   KILN_K_TILE            128 input channels per pipeline stage
//   KILN_WARPS             4 or 8
//   KILN_STAGES            2, 3, 4 or 6 buffers of the cp.async ring
// (C / 16 / warps) * (T / 8 * 4 + 20) must not exceed 144 registers per thread.
//
// Shape of the computation: that of mx_cuda.cu, with mma.m16n8k32 of E4M3
// codes. The eight weights that a lane decodes from each of two tiles are its A
// fragment, if the input channels of each 16 are in the order of
// kd::MxCodePlace; operands are stored so.
//
// Without scales of its own the tensor core sums 32 input channels from zero;
// their result, times its two scales, is added in binary32. With them it sums
// 64 of them before that: how many bits its own sums have is nowhere stated, so
// they stay short. The order of a sum depends on the number of K slices alone:
// all axes but split-K give bit-identical results.

#include "cuda/e4m3.h"
#include "cuda/grouped.h"
#include "cuda/ring.h"
#include "cuda/warp.h"
#include "device/fragment.h"
#include "device/half.h"
#include "device/platform.h"
#include "fused_moe/mx_block.h"
#include "fused_moe/mx_fragment.h"
#include "fused_moe/mx_scales.h"

namespace {

using kd::kNone;
using kd::Row;
using kd::Tile;
using kd::Totals;
using kd::u16;
using kd::u32;
using kd::u64;
using kd::u8;

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kInter = KILN_INTER;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;
constexpr int kBits = KILN_BITS;
constexpr u32 kTokens = KILN_TOKENS_TILE;
constexpr u32 kChannels = KILN_CHANNELS_TILE;
constexpr u32 kWarps = KILN_WARPS;
constexpr u32 kStages = KILN_STAGES;
constexpr u32 kThreads = kWarps * 32;

constexpr u32 kStrips = kChannels / 16;        // 16-channel strips per block
constexpr u32 kWarpStrips = kStrips / kWarps;  // and per warp
constexpr u32 kTokenGroups = kTokens / 8;      // mma columns

// A stage of the ring: 128 input channels of packed weights, a word of scales
// per output channel, and rows of codes. Behind a row's codes there are 16
// bytes, of which the first four are its scales.
constexpr u32 kStageDepth = KILN_K_TILE;
constexpr u32 kFolds = kStageDepth / kd::kMxBlock;
// A row as binary16 numbers, two codes each.
using OperandTile = kd::OperandTile<kThreads, kTokens, kStageDepth / 2>;
constexpr u32 kRowBytes = OperandTile::kRowHalves * 2;
constexpr u32 kWeightBytes = kStageDepth * kChannels * kBits / 8;
constexpr u32 kScalesAt = kWeightBytes;
constexpr u32 kOperandAt = kScalesAt + kChannels * 4;
constexpr u32 kStageBytes = kOperandAt + OperandTile::kBytes;

static_assert(kHidden % 512 == 0 && kInter % 128 == 0, "H512 and H128");
static_assert(kTokens == 8 || kTokens % 16 == 0, "T: 8 or a multiple of 16");
static_assert(kStageDepth == 128, "what a word of scales is for");
static_assert(kStrips % kWarps == 0, "C must be at least 16 * warps");
static_assert(kd::kMxPanel % kChannels == 0, "C divides a panel of scales");
static_assert(kStages >= 2, "at least two stages");
static_assert(
    kTokens <= kThreads && kChannels / 4 <= kThreads,
    "a thread copies at most one row's scales and one piece of words");
static_assert(kWarpStrips * (kTokenGroups * 4 + 20) <= 144,
              "too many registers per lane");
static_assert(kRowBytes >= kStageDepth + 4, "scales lie behind the codes");

using Sums = float[kWarpStrips][kTokenGroups][4];

// What a block multiplies.
struct Factors {
  const unsigned char* weights;  // the block's first tile in K16 row 0
  const u32* scales;      // the block's words of the first 128 input channels
  const u8* operand;      // [rows][K]
  const u32* row_scales;  // [rows][K / 128]
};

// Rows that this thread copies, kNone beyond the tile.
struct Sources {
  OperandTile operand;
  u32 scales;
};

// Copies stage `stage` of weights and their scales to buffer `to`.
template <u32 kWidth>
__device__ __forceinline__ void CopyWeights(const Factors& factors, u32 stage,
                                            u32 to) {
  // A K16 row of the block's tiles is contiguous in memory.
  constexpr u64 kTileRowBytes = static_cast<u64>(kWidth) * 2 * kBits;
  constexpr u32 kTileRows = kStageDepth / 16;
  kd::CopyRows<kThreads, kChannels * kBits / 8, kTileRows>(
      factors.weights + stage * (kTileRowBytes * kTileRows), kTileRowBytes, to);
  if (threadIdx.x < kChannels / 4) {
    kd::CopyAsync16(to + kScalesAt + threadIdx.x * 16,
                    factors.scales + static_cast<u64>(stage) * kd::kMxPanel +
                        threadIdx.x * 4);
  }
}

// The same of the operand.
template <u32 kDepth>
__device__ __forceinline__ void CopyOperand(const Factors& factors,
                                            const Sources& sources, u32 stage,
                                            u32 to) {
  sources.operand.template Copy<kDepth / 2>(
      reinterpret_cast<const u16*>(factors.operand), stage * (kStageDepth / 2),
      to + kOperandAt);
  if (threadIdx.x < kTokens) {
    const bool copy = sources.scales != kNone;
    kd::CopyAsyncWordOrZero(
        to + kOperandAt + threadIdx.x * kRowBytes + kStageDepth,
        factors.row_scales + stage +
            static_cast<u64>(copy ? sources.scales : 0) *
                (kDepth / kStageDepth),
        copy);
  }
}

// Blocks of 32 input channels whose weights are decoded together: half a stage.
constexpr u32 kFoldsAtOnce = 2;

// Of a strip's weights: a[fold][strip] is an A fragment.
using Weights = u32[kFoldsAtOnce][kWarpStrips][4];

// The scales of a row from block `fold` of its 128 input channels on.
__device__ __forceinline__ u32 RowScales(const unsigned char* operand, u32 row,
                                         u32 fold) {
  return *reinterpret_cast<const u32*>(operand + row * kRowBytes +
                                       kStageDepth) >>
         (8 * fold);
}

#if KILN_BLOCK_SCALED

// The scales of a strip's weights as the MMA takes them: lane 4r has those of
// channel r, lane 4r + 1 those of channel r + 8.
struct StripScales {
  u32 word;

  __device__ __forceinline__ void Load(const u32* words, u32 fold) {
    const u32 lane = threadIdx.x % 32;
    word = words[lane / 4 + lane % 2 * 8] >> (8 * fold);
  }
};

// Adds half a stage of the warp's channels and 8 tokens, whose first row is
// `rows`.
__device__ __forceinline__ void AddGroup(
    const Weights& a, const u32 (&b)[4],
    const StripScales (&scales)[kWarpStrips], const unsigned char* rows,
    u32 fold, u32 g, Sums& sums) {
  const u32 row_scales = RowScales(rows, threadIdx.x % 32 / 4, fold);
#pragma unroll
  for (u32 i = 0; i < kWarpStrips; ++i) {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    kd::MmaE4m3Scaled<0>(d, a[0][i], b[0], b[1], scales[i].word, row_scales);
    kd::MmaE4m3Scaled<1>(d, a[1][i], b[2], b[3], scales[i].word, row_scales);
#pragma unroll
    for (u32 n = 0; n < 4; ++n) sums[i][g][n] += d[n];
  }
}

#else

// The scales of a strip's weights, of channels lane / 4 and lane / 4 + 8.
struct StripScales {
  float value[kFoldsAtOnce][2];

  __device__ __forceinline__ void Load(const u32* words, u32 fold) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 word = words[threadIdx.x % 32 / 4 + 8 * half] >> (8 * fold);
#pragma unroll
      for (u32 i = 0; i < kFoldsAtOnce; ++i) {
        value[i][half] = kd::MxWordScale(word, i);
      }
    }
  }
};

// The same.
__device__ __forceinline__ void AddGroup(
    const Weights& a, const u32 (&b)[4],
    const StripScales (&scales)[kWarpStrips], const unsigned char* rows,
    u32 fold, u32 g, Sums& sums) {
  // The tokens whose sums this lane has.
  const u32 token = threadIdx.x % 4 * 2;
  const u32 row_scales[2] = {RowScales(rows, token, fold),
                             RowScales(rows, token + 1, fold)};
#pragma unroll
  for (u32 step = 0; step < kFoldsAtOnce; ++step) {
    const float row_scale[2] = {kd::MxWordScale(row_scales[0], step),
                                kd::MxWordScale(row_scales[1], step)};
#pragma unroll
    for (u32 i = 0; i < kWarpStrips; ++i) {
      float d[4];
      kd::MmaE4m3FromZero(d, a[step][i], b[2 * step], b[2 * step + 1]);
#pragma unroll
      for (u32 n = 0; n < 4; ++n) {
        sums[i][g][n] = kd::Fma(d[n] * scales[i].value[step][n / 2],
                                row_scale[n % 2], sums[i][g][n]);
      }
    }
  }
}

#endif  // KILN_BLOCK_SCALED

// Adds a stage.
__device__ __forceinline__ void ComputeStage(const unsigned char* stage,
                                             const kd::LaneSpan<kBits>& span,
                                             u32 rows, Sums& sums) {
  constexpr u32 kTileWords = kd::kTileWords<kBits>;
  const u32 lane = threadIdx.x % 32;
  const u32 strip = threadIdx.x / 32 * kWarpStrips;
  const u32* tiles = reinterpret_cast<const u32*>(stage) + strip * kTileWords;
  const u32* words =
      reinterpret_cast<const u32*>(stage + kScalesAt) + strip * 16;
  const unsigned char* operand = stage + kOperandAt;
  // ldmatrix: 8 tokens by 64 input channels, 16 in each matrix.
  const u32 matrices =
      kd::SharedAddress(operand) + lane % 8 * kRowBytes + lane / 8 * 16;
  // Both halves at once would take twice the registers.
#pragma unroll 1
  for (u32 fold = 0; fold < kFolds; fold += kFoldsAtOnce) {
    Weights a;
    StripScales scales[kWarpStrips];
#pragma unroll
    for (u32 i = 0; i < kWarpStrips; ++i) {
#pragma unroll
      for (u32 step = 0; step < 2 * kFoldsAtOnce; ++step) {
        const u32* tile =
            tiles + ((2 * fold + step) * kStrips + i) * kTileWords;
        u32 codes[2];
        kd::DecodeNpkCodes<kBits>(kd::LoadSpan(tile, span), codes);
        a[step / 2][i][step % 2 * 2] = codes[0];
        a[step / 2][i][step % 2 * 2 + 1] = codes[1];
      }
      scales[i].Load(words + i * 16, fold);
    }
#pragma unroll
    for (u32 g = 0; g < kTokenGroups; ++g) {
      if (g != 0 && g * 8 >= rows) continue;
      u32 b[4];
      kd::LoadMatrices(matrices + g * (8 * kRowBytes) + fold * kd::kMxBlock, b);
      AddGroup(a, b, scales, operand + g * (8 * kRowBytes), fold, g, sums);
    }
  }
}

// sums = this block's slice of operand x weights.
template <u32 kDepth, u32 kWidth>
__device__ __forceinline__ void Multiply(const Factors& factors,
                                         const Sources& sources, u32 rows,
                                         Sums& sums) {
  static_assert(kWidth % kChannels == 0, "C must divide the width");
  constexpr u32 kBlocks = kDepth / kStageDepth;
  const u32 begin = kBlocks * blockIdx.y / gridDim.y;
  const u32 end = kBlocks * (blockIdx.y + 1) / gridDim.y;
  const kd::LaneSpan<kBits> span = kd::FindLaneSpan<kBits>(threadIdx.x % 32);
  const unsigned char* shared = kd::DynamicShared();
  const u32 ring = kd::SharedAddress(shared);

  // Weights first: the rows to copy may not be known yet.
#pragma unroll
  for (u32 s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) {
      CopyWeights<kWidth>(factors, begin + s, ring + s * kStageBytes);
    }
  }
#pragma unroll
  for (u32 s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) {
      CopyOperand<kDepth>(factors, sources, begin + s, ring + s * kStageBytes);
    }
    kd::CommitCopies();
  }
  u32 slot = 0;
#pragma unroll 1
  for (u32 stage = begin; stage < end; ++stage) {
    kd::WaitCopies<kStages - 2>();
    // Stage `stage` has landed for every thread, and the buffer of the stage
    // before it is free.
    __syncthreads();
    const u32 free_slot = slot == 0 ? kStages - 1 : slot - 1;
    if (stage + kStages - 1 < end) {
      const u32 to = ring + free_slot * kStageBytes;
      CopyWeights<kWidth>(factors, stage + kStages - 1, to);
      CopyOperand<kDepth>(factors, sources, stage + kStages - 1, to);
    }
    kd::CommitCopies();
    ComputeStage(shared + slot * kStageBytes, span, rows, sums);
    slot = slot == kStages - 1 ? 0 : slot + 1;
  }
}

// Which rows of an operand this thread copies.
//   row_of: the operand's row of a tile's row
template <class RowOf>
__device__ __forceinline__ Sources SourcesOf(const Tile& tile, RowOf row_of) {
  Sources sources;
#pragma unroll
  for (u32 i = 0; i < OperandTile::kCopies; ++i) {
    const u32 row = OperandTile::RowOf(i);
    sources.operand.source[i] = row < tile.rows ? row_of(row) : kNone;
  }
  sources.scales = threadIdx.x < tile.rows ? row_of(threadIdx.x) : kNone;
  return sources;
}

}  // namespace

// Block x: tile x / (2I / C) and C of the 2I channels gate | up; block y: slice
// of K.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    kiln_mx_fc1(const u8* x_values, const u32* x_scales,
                const u16* __restrict__ w13, const u32* __restrict__ w13_scale,
                const Row* rows, const Tile* tiles, const Totals* totals,
                void* __restrict__ fc1, u32 tokens) {
  kd::BeginStep();
  constexpr u32 kBlocks = 2 * kInter / kChannels;
  const u32 index = blockIdx.x / kBlocks;
  if (index >= totals->tiles) return;
  const Tile tile = tiles[index];
  const u32 column = blockIdx.x % kBlocks * kChannels;
  const bool is_up = column >= kInter;

  const Sources sources = SourcesOf(
      tile, [&](u32 row) { return rows[tile.first + row].route / kTopK; });
  Factors factors;
  factors.weights = kd::ExpertTiles<kBits, kHidden, kInter>(
      w13, (is_up ? kExperts : 0) + tile.expert,
      is_up ? column - kInter : column);
  factors.scales =
      kd::MxExpertScales<kHidden, 2 * kInter>(w13_scale, tile.expert, column);
  factors.operand = x_values;
  factors.row_scales = x_scales;
  Sums sums = {};
  Multiply<kHidden, kInter>(factors, sources, tile.rows, sums);
  kd::StoreSums<2 * kInter, 1>(sums, fc1, static_cast<u64>(tokens) * kTopK,
                               tile.first, tile.rows, column);
}

// Block x: tile x / (H / C) and C of the H channels; block y: slice of K.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    kiln_mx_fc2(const u8* mid_values, const u32* mid_scales,
                const u16* __restrict__ w2, const u32* __restrict__ w2_scale,
                const Tile* tiles, const Totals* totals, void* __restrict__ fc2,
                u32 tokens) {
  kd::BeginStep();
  constexpr u32 kBlocks = kHidden / kChannels;
  const u32 index = blockIdx.x / kBlocks;
  if (index >= totals->tiles) return;
  const Tile tile = tiles[index];
  const u32 column = blockIdx.x % kBlocks * kChannels;

  const Sources sources =
      SourcesOf(tile, [&](u32 row) { return tile.first + row; });
  Factors factors;
  factors.weights =
      kd::ExpertTiles<kBits, kInter, kHidden>(w2, tile.expert, column);
  factors.scales =
      kd::MxExpertScales<kInter, kHidden>(w2_scale, tile.expert, column);
  factors.operand = mid_values;
  factors.row_scales = mid_scales;
  Sums sums = {};
  Multiply<kInter, kHidden>(factors, sources, tile.rows, sums);
  kd::StoreSums<kHidden, 1>(sums, fc2, static_cast<u64>(tokens) * kTopK,
                            tile.first, tile.rows, column);
}
