// EXL3 trellis tiles: bit stream, decode states, codebooks.
//
// A tile holds 16 x 16 weights of K bits in 8K little-endian u32 words. The
// stream is MSB-first inside each word; the state of stream position p is the
// 16 bits that end at bit (p + 1) * K of the ring of 256K bits. A codebook
// turns a state into one binary16 value, bit-exactly.
#ifndef KILN_DEVICE_TRELLIS_H_
#define KILN_DEVICE_TRELLIS_H_

#include "device/half.h"
#include "device/platform.h"

namespace kd {

constexpr int kCodebook3Inst = 0;
constexpr int kCodebookMcg = 1;
constexpr int kCodebookMul1 = 2;

constexpr u32 kTileRows = 16;     // input channels, k
constexpr u32 kTileColumns = 16;  // output channels, n
constexpr u32 kTileWeights = 256;

// u32 words of one tile.
template <int K>
constexpr u32 kTileWords = 8u * K;

// ---- stream position <-> element -------------------------------------------

KILN_FN u32 PositionRow(u32 p) {
  const u32 lane = p >> 3;
  return 2 * (lane & 3) + (p & 1) + 8 * ((p >> 1) & 1);
}

KILN_FN u32 PositionColumn(u32 p) { return (p >> 5) + 8 * ((p >> 2) & 1); }

KILN_FN u32 ElementPosition(u32 k, u32 n) {
  return 32 * (n & 7) + 8 * ((k & 7) >> 1) + 4 * (n >> 3) + 2 * (k >> 3) +
         (k & 1);
}

// ---- states ----------------------------------------------------------------

// The 16-bit state of stream position p (0..255) of the tile at `words`.
template <int K>
KILN_FN u32 Window(const u32* words, u32 p) {
  static_assert(K >= 1 && K <= 8, "a trellis symbol has 1 to 8 bits");
  const u32 end = (p + 1) * K;
  const u32 low = (end - 1) >> 5;
  const u32 high = low == 0 ? kTileWords<K> - 1 : low - 1;
  const u32 shift = 32 * (low + 1) - end;
  const u64 both = (static_cast<u64>(words[high]) << 32) | words[low];
  return static_cast<u32>(both >> shift) & 0xFFFFu;
}

// How many states of one lane two neighbouring words always contain.
template <int K>
constexpr u32 kFunnelStates = K <= 4 ? 8u : (K == 7 ? 2u : 4u);

template <int K>
constexpr u32 kFunnelsPerLane = 8u / kFunnelStates<K>;

// Where funnel f of `lane` lies: the words are [WordBefore(low), low], and the
// last state ends `shift` bits above the bottom of the low word.
template <int K>
KILN_FN void FunnelPlace(u32 lane, u32 funnel, u32* low, u32* shift) {
  const u32 end = (8 * lane + (funnel + 1) * kFunnelStates<K>)*K;
  *low = (end - 1) >> 5;
  *shift = 32 * (*low + 1) - end;
}

template <int K>
KILN_FN u32 WordBefore(u32 index) {
  return index == 0 ? kTileWords<K> - 1 : index - 1;
}

// (high:low) >> shift, low 32 bits; 0 <= shift < 32.
KILN_FN u32 FunnelRight(u32 high, u32 low, u32 shift) {
#if KILN_ON_CUDA
  u32 out;
  asm("shf.r.wrap.b32 %0, %1, %2, %3;"
      : "=r"(out)
      : "r"(low), "r"(high), "r"(shift));
  return out;
#else
  const u64 both = (static_cast<u64>(high) << 32) | low;
  return static_cast<u32>(both >> shift);
#endif
}

// The states of one funnel, in stream order, from its two words.
template <int K>
KILN_FN void FunnelStates(u32 high, u32 low, u32 shift, u32* out) {
  constexpr u32 kCount = kFunnelStates<K>;
  const u32 low_aligned = FunnelRight(high, low, shift);
  const u32 high_aligned = high >> shift;
  KILN_UNROLLED
  for (u32 j = 0; j < kCount; ++j) {
    out[j] =
        FunnelRight(high_aligned, low_aligned, (kCount - 1 - j) * K) & 0xFFFFu;
  }
}

// The eight states of stream positions 8 * lane .. 8 * lane + 7 (lane 0..31):
// the two B fragments of mma.m16n8k16 that this lane holds, columns lane / 4
// (out[0..3]) and 8 + lane / 4 (out[4..7]); rows in the order
// 2c, 2c + 1, 2c + 8, 2c + 9 with c = lane % 4.
template <int K>
KILN_FN void LaneStates(const u32* words, u32 lane, u32 out[8]) {
  KILN_UNROLLED
  for (u32 funnel = 0; funnel < kFunnelsPerLane<K>; ++funnel) {
    u32 low, shift;
    FunnelPlace<K>(lane, funnel, &low, &shift);
    FunnelStates<K>(words[WordBefore<K>(low)], words[low], shift,
                    out + funnel * kFunnelStates<K>);
  }
}

// ---- codebooks -------------------------------------------------------------

constexpr u32 k3InstMultiplier = 89226354u;
constexpr u32 k3InstAddend = 64248484u;
constexpr u32 kMcgMultiplier = 0xCBAC1FEDu;
constexpr u32 kMul1Multiplier = 0x83DCD12Du;
constexpr u32 kPairMask = 0x8FFF8FFFu;
constexpr u32 kPairFlip = 0x3B603B60u;
constexpr u16 kMul1Bias = 0x6400;    // 1024
constexpr u16 kMul1Scale = 0x1EEE;   // about 0.0067673
constexpr u16 kMul1Offset = 0xC931;  // -10.3828125

// The 32-bit hash of a state, before it is read as numbers.
template <int CB>
KILN_FN u32 StateHash(u32 s) {
  static_assert(CB >= kCodebook3Inst && CB <= kCodebookMul1,
                "codebook is 0 (3INST), 1 (MCG) or 2 (MUL1)");
  if constexpr (CB == kCodebook3Inst) {
    return s * k3InstMultiplier + k3InstAddend;
  } else if constexpr (CB == kCodebookMcg) {
    return s * kMcgMultiplier;
  } else {
    return s * kMul1Multiplier;
  }
}

// addend + the sum of the four unsigned bytes of x.
KILN_FN u32 ByteSum(u32 x, u32 addend) {
#if KILN_ON_CUDA
  u32 sum;
  asm("dp4a.u32.u32 %0, %1, %2, %3;"
      : "=r"(sum)
      : "r"(x), "r"(0x01010101u), "r"(addend));
  return sum;
#else
  const u32 pairs = (x & 0x00FF00FFu) + ((x >> 8) & 0x00FF00FFu);
  return addend + (pairs & 0xFFFFu) + (pairs >> 16);
#endif
}

// The binary16 bits of state s (0..65535).
template <int CB>
KILN_FN u16 DecodeState(u32 s) {
  const u32 x = StateHash<CB>(s);
  if constexpr (CB == kCodebookMul1) {
    return hfma(static_cast<u16>(ByteSum(x, kMul1Bias)), kMul1Scale,
                kMul1Offset);
  } else {
    const u32 pair = (x & kPairMask) ^ kPairFlip;
    return hadd(static_cast<u16>(pair & 0xFFFFu), static_cast<u16>(pair >> 16));
  }
}

// Two states at once: DecodeState(s0) in the low half, DecodeState(s1) in the
// high half.
template <int CB>
KILN_FN u32 DecodeStatePair(u32 s0, u32 s1) {
#if KILN_ON_CUDA
  const u32 x0 = StateHash<CB>(s0);
  const u32 x1 = StateHash<CB>(s1);
  if constexpr (CB == kCodebookMul1) {
    u32 biased;
    asm("prmt.b32 %0, %1, %2, 0x5410;"
        : "=r"(biased)
        : "r"(ByteSum(x0, kMul1Bias)), "r"(ByteSum(x1, kMul1Bias)));
    return hfma2(biased, kMul1Scale * 0x00010001u, kMul1Offset * 0x00010001u);
  } else {
    u32 low, high;
    asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(low) : "r"(x0), "r"(x1));
    asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(high) : "r"(x0), "r"(x1));
    return hadd2((low & kPairMask) ^ kPairFlip, (high & kPairMask) ^ kPairFlip);
  }
#else
  return DecodeState<CB>(s0) | (static_cast<u32>(DecodeState<CB>(s1)) << 16);
#endif
}

}  // namespace kd

#endif  // KILN_DEVICE_TRELLIS_H_
