// fused_moe over TrellisMX weights (NPK-1 streams): the two products of the
// W4A8 arm on tensor cores that multiply E4M3 themselves. All other steps are
// part 0 of mx_cuda.cu.
//
// Source for sm_89, and for sm_120 and its family; no header other than Kiln's
// own. Read templates/fused_moe/README.md, "E4M3 tensor cores", first.
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
// kd::CodePlace; operands are stored so.
//
// code_product.h says how sums are made. Their order depends on the number of K
// slices alone: all axes but split-K give bit-identical results.

#include "cuda/grouped.h"
#include "cuda/ring.h"
#include "cuda/warp.h"
#include "device/fragment.h"
#include "device/half.h"
#include "device/platform.h"
#include "fused_moe/code_product.h"
#include "fused_moe/mx_block.h"
#include "fused_moe/mx_fragment.h"
#include "fused_moe/mx_scales.h"

namespace {

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

// A stage of the ring: packed weights, a word of scales per output channel, and
// rows of codes.
constexpr u32 kStageDepth = KILN_K_TILE;
using Operand = kd::CodeTile<kThreads, kTokens>;
constexpr u32 kWeightBytes = kStageDepth * kChannels * kBits / 8;
constexpr u32 kScalesAt = kWeightBytes;
constexpr u32 kOperandAt = kScalesAt + kChannels * 4;
constexpr u32 kStageBytes = kOperandAt + Operand::kBytes;

static_assert(kHidden % 128 == 0 && kInter % 128 == 0,
              "what a word of scales is for");
static_assert(kTokens == 8 || kTokens % 16 == 0, "T: 8 or a multiple of 16");
static_assert(kStageDepth == kd::kCodeDepth, "what a word of scales is for");
static_assert(kStrips % kWarps == 0, "C must be at least 16 * warps");
static_assert(kd::kMxPanel % kChannels == 0, "C divides a panel of scales");
static_assert(kStages >= 2, "at least two stages");
static_assert(kChannels / 4 <= kThreads,
              "a thread copies at most one piece of words");
static_assert(kWarpStrips * (kTokenGroups * 4 + 20) <= 144,
              "too many registers per lane");

using Sums = float[kWarpStrips][kTokenGroups][4];

// What a block multiplies.
struct Factors {
  const unsigned char* weights;  // the block's first tile in K16 row 0
  const u32* scales;      // the block's words of the first 128 input channels
  const u8* operand;      // [rows][K]
  const u32* row_scales;  // [rows][K / 128]
  Operand rows;
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
__device__ __forceinline__ void CopyOperand(const Factors& factors, u32 stage,
                                            u32 to) {
  factors.rows.template Copy<kDepth, kDepth / kStageDepth>(
      factors.operand, factors.row_scales, stage, to + kOperandAt);
}

// Adds a stage.
__device__ __forceinline__ void ComputeStage(const unsigned char* stage,
                                             const kd::LaneSpan<kBits>& span,
                                             u32 rows, Sums& sums) {
  constexpr u32 kTileWords = kd::kTileWords<kBits>;
  const u32 strip = threadIdx.x / 32 * kWarpStrips;
  const u32* tiles = reinterpret_cast<const u32*>(stage) + strip * kTileWords;
  const u32* words =
      reinterpret_cast<const u32*>(stage + kScalesAt) + strip * 16;
#pragma unroll 1
  for (u32 fold = 0; fold < kStageDepth / kd::kMxBlock;
       fold += kd::kCodeFolds) {
    u32 a[kd::kCodeFolds][kWarpStrips][4];
    kd::StripScales<KILN_BLOCK_SCALED != 0> scales[kWarpStrips];
#pragma unroll
    for (u32 i = 0; i < kWarpStrips; ++i) {
#pragma unroll
      for (u32 half = 0; half < 2 * kd::kCodeFolds; ++half) {
        const u32* tile =
            tiles + ((2 * fold + half) * kStrips + i) * kTileWords;
        u32 codes[2];
        kd::DecodeNpkCodes<kBits>(kd::LoadSpan(tile, span), codes);
        a[half / 2][i][half % 2 * 2] = codes[0];
        a[half / 2][i][half % 2 * 2 + 1] = codes[1];
      }
      scales[i].Load(words + i * 16, fold);
    }
    kd::AddCodes<Operand>(a, scales, stage + kOperandAt, fold, rows, sums);
  }
}

// sums = this block's slice of operand x weights.
template <u32 kDepth, u32 kWidth>
__device__ __forceinline__ void Multiply(const Factors& factors, u32 rows,
                                         Sums& sums) {
  static_assert(kWidth % kChannels == 0, "C must divide the width");
  constexpr u32 kBlocks = kDepth / kStageDepth;
  const u32 begin = kBlocks * blockIdx.y / gridDim.y;
  const u32 end = kBlocks * (blockIdx.y + 1) / gridDim.y;
  const kd::LaneSpan<kBits> span = kd::FindLaneSpan<kBits>(threadIdx.x % 32);
  const unsigned char* shared = kd::DynamicShared();
  const u32 ring = kd::SharedAddress(shared);

  kd::RunRing<kStages>(
      begin, end,
      [&](u32 stage, u32 slot) {
        CopyWeights<kWidth>(factors, stage, ring + slot * kStageBytes);
      },
      [&](u32 stage, u32 slot) {
        CopyOperand<kDepth>(factors, stage, ring + slot * kStageBytes);
      },
      [&](u32, u32 slot) {
        ComputeStage(shared + slot * kStageBytes, span, rows, sums);
      });
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

  Factors factors;
  factors.rows.Find(
      tile.rows, [&](u32 row) { return rows[tile.first + row].route / kTopK; });
  factors.weights = kd::ExpertTiles<kBits, kHidden, kInter>(
      w13, (is_up ? kExperts : 0) + tile.expert,
      is_up ? column - kInter : column);
  factors.scales =
      kd::MxExpertScales<kHidden, 2 * kInter>(w13_scale, tile.expert, column);
  factors.operand = x_values;
  factors.row_scales = x_scales;
  Sums sums = {};
  Multiply<kHidden, kInter>(factors, tile.rows, sums);
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

  Factors factors;
  factors.rows.Find(tile.rows, [&](u32 row) { return tile.first + row; });
  factors.weights =
      kd::ExpertTiles<kBits, kInter, kHidden>(w2, tile.expert, column);
  factors.scales =
      kd::MxExpertScales<kInter, kHidden>(w2_scale, tile.expert, column);
  factors.operand = mid_values;
  factors.row_scales = mid_scales;
  Sums sums = {};
  Multiply<kInter, kHidden>(factors, tile.rows, sums);
  kd::StoreSums<kHidden, 1>(sums, fc2, static_cast<u64>(tokens) * kTopK,
                            tile.first, tile.rows, column);
}
