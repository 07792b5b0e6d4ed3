// Products of E4M3 codes on tensor cores that multiply them: rows of codes in a
// stage of a block's ring, and what half a stage adds to the sums of a warp.
//
// Without scales of its own the tensor core sums 32 input channels from zero;
// their result, times its scales, is added in binary32. With them it sums 64
// before that: how many bits its own sums have is nowhere stated, so they stay
// short.
//
// CUDA only, or under a test's emulator; no header other than Kiln's own.
#ifndef KILN_TEMPLATES_FUSED_MOE_CODE_PRODUCT_H_
#define KILN_TEMPLATES_FUSED_MOE_CODE_PRODUCT_H_

#include "cuda/e4m3.h"
#include "cuda/grouped.h"
#include "cuda/ring.h"
#include "cuda/warp.h"
#include "device/platform.h"
#include "fused_moe/mx_block.h"
#include "fused_moe/mx_scales.h"

namespace kd {

// Input channels of a stage: those of a word of scales.
constexpr u32 kCodeDepth = 128;

// Blocks of 32 input channels whose weights are decoded together: half a stage.
// All at once would take twice the registers.
constexpr u32 kCodeFolds = 2;

// kTokens rows of codes in shared memory, kCodeDepth of each and the word of
// their scales, and which of them this thread copies.
template <u32 kThreads, u32 kTokens>
struct CodeTile {
  // As binary16 numbers, two codes each. The first of the 16 bytes behind a
  // row's codes are its scales.
  using Codes = OperandTile<kThreads, kTokens, kCodeDepth / 2>;
  static constexpr u32 kRowBytes = Codes::kRowHalves * 2;
  static constexpr u32 kBytes = Codes::kBytes;
  static_assert(kRowBytes >= kCodeDepth + 4, "scales lie behind the codes");
  static_assert(kTokens <= kThreads, "a thread copies one row's scales");

  Codes codes;
  u32 scales;  // the operand's row, kNone beyond the tile's

  //   rows: of the tile
  //   row_of(row): the operand's row of one of them
  template <class Which>
  KILN_FN void Find(u32 rows, Which row_of) {
    codes.Find(rows, row_of);
    scales = threadIdx.x < rows ? row_of(threadIdx.x) : kNone;
  }

  // Copies a stage of an operand to `to`; rows beyond the tile's become zeros.
  //   from: [rows][kRowStride] codes
  //   words: [rows][kWordStride] scales
  template <u32 kRowStride, u32 kWordStride>
  KILN_FN void Copy(const u8* from, const u32* words, u32 stage, u32 to) const {
    codes.template Copy<kRowStride / 2>(reinterpret_cast<const u16*>(from),
                                        stage * (kCodeDepth / 2), to);
    if (threadIdx.x < kTokens) {
      const bool copy = scales != kNone;
      CopyAsyncWordOrZero(
          to + threadIdx.x * kRowBytes + kCodeDepth,
          words + stage + static_cast<u64>(copy ? scales : 0) * kWordStride,
          copy);
    }
  }

  // The scales of a row of the tile at `tile` from block `fold` on.
  KILN_FN static u32 Scales(const unsigned char* tile, u32 row, u32 fold) {
    return *reinterpret_cast<const u32*>(tile + row * kRowBytes + kCodeDepth) >>
           (8 * fold);
  }
};

// The scales of half a stage of a strip's weights, 16 output channels.
template <bool kBlockScaled>
struct StripScales;

// As the MMA takes them: lane 4r has those of channel r, lane 4r + 1 those of
// channel r + 8.
template <>
struct StripScales<true> {
  u32 word;

  // Of weights without scales.
  KILN_FN void SetOne() { word = 0x7F7F7F7Fu; }

  //   words: of the strip's channels
  //   fold: the first block of 32
  KILN_FN void Load(const u32* words, u32 fold) {
    const u32 lane = threadIdx.x % 32;
    word = words[lane / 4 + lane % 2 * 8] >> (8 * fold);
  }
};

// Of channels lane / 4 and lane / 4 + 8.
template <>
struct StripScales<false> {
  float value[kCodeFolds][2];

  KILN_FN void SetOne() {
    value[0][0] = value[0][1] = value[1][0] = value[1][1] = 1.0f;
  }

  KILN_FN void Load(const u32* words, u32 fold) {
    KILN_UNROLLED
    for (u32 half = 0; half < 2; ++half) {
      const u32 word = words[threadIdx.x % 32 / 4 + 8 * half] >> (8 * fold);
      KILN_UNROLLED
      for (u32 i = 0; i < kCodeFolds; ++i) {
        value[i][half] = MxWordScale(word, i);
      }
    }
  }
};

// Adds half a stage of a warp's strips and 8 tokens.
//   a: the weights; a[step][strip] is an A fragment
//   b: the B fragments of both steps
//   rows: the first of the tokens' rows of a Tile
template <class Tile, u32 kStrips, u32 kGroups>
KILN_FN void AddGroup(const u32 (&a)[kCodeFolds][kStrips][4], const u32 (&b)[4],
                      const StripScales<true> (&scales)[kStrips],
                      const unsigned char* rows, u32 fold, u32 group,
                      float (&sums)[kStrips][kGroups][4]) {
  const u32 row_scales = Tile::Scales(rows, threadIdx.x % 32 / 4, fold);
  KILN_UNROLLED
  for (u32 i = 0; i < kStrips; ++i) {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    MmaE4m3Scaled<0>(d, a[0][i], b[0], b[1], scales[i].word, row_scales);
    MmaE4m3Scaled<1>(d, a[1][i], b[2], b[3], scales[i].word, row_scales);
    KILN_UNROLLED
    for (u32 n = 0; n < 4; ++n) sums[i][group][n] += d[n];
  }
}

template <class Tile, u32 kStrips, u32 kGroups>
KILN_FN void AddGroup(const u32 (&a)[kCodeFolds][kStrips][4], const u32 (&b)[4],
                      const StripScales<false> (&scales)[kStrips],
                      const unsigned char* rows, u32 fold, u32 group,
                      float (&sums)[kStrips][kGroups][4]) {
  // The tokens whose sums this lane has.
  const u32 token = threadIdx.x % 4 * 2;
  const u32 words[2] = {Tile::Scales(rows, token, fold),
                        Tile::Scales(rows, token + 1, fold)};
  KILN_UNROLLED
  for (u32 step = 0; step < kCodeFolds; ++step) {
    const float row_scale[2] = {MxWordScale(words[0], step),
                                MxWordScale(words[1], step)};
    KILN_UNROLLED
    for (u32 i = 0; i < kStrips; ++i) {
      float d[4];
      MmaE4m3FromZero(d, a[step][i], b[2 * step], b[2 * step + 1]);
      KILN_UNROLLED
      for (u32 n = 0; n < 4; ++n) {
        sums[i][group][n] = Fma(d[n] * scales[i].value[step][n / 2],
                                row_scale[n % 2], sums[i][group][n]);
      }
    }
  }
}

// Adds half a stage, from block `fold` on, of a warp's strips and the tokens of
// the Tile at `tile`.
//   rows: live ones
template <class Tile, bool kBlockScaled, u32 kStrips, u32 kGroups>
KILN_FN void AddCodes(const u32 (&a)[kCodeFolds][kStrips][4],
                      const StripScales<kBlockScaled> (&scales)[kStrips],
                      const unsigned char* tile, u32 fold, u32 rows,
                      float (&sums)[kStrips][kGroups][4]) {
  constexpr u32 kGroupBytes = 8 * Tile::kRowBytes;
  // ldmatrix: 8 tokens by 64 input channels, 16 in each matrix.
  const u32 lane = threadIdx.x % 32;
  const u32 matrices = SharedAddress(tile) + lane % 8 * Tile::kRowBytes +
                       lane / 8 * 16 + fold * kMxBlock;
  KILN_UNROLLED
  for (u32 g = 0; g < kGroups; ++g) {
    if (g != 0 && g * 8 >= rows) continue;
    u32 b[4];
    LoadMatrices(matrices + g * kGroupBytes, b);
    AddGroup<Tile>(a, b, scales, tile + g * kGroupBytes, fold, g, sums);
  }
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_CODE_PRODUCT_H_
