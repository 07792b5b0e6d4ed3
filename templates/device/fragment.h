// The eight weights that one lane of a warp decodes from a trellis tile, as
// the A fragment of mma.m16n8k16 (rows: output channels, depth: input
// channels). Bit-identical with LaneStates and DecodeState of trellis.h, in a
// form that spends fewer integer operations.
//
// Plain code on the CPU, so tests can hold it against trellis.h without a GPU.
#ifndef KILN_DEVICE_FRAGMENT_H_
#define KILN_DEVICE_FRAGMENT_H_

#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"

namespace kd {

// Where a lane's part of a tile's bit stream lies. Lane l decodes stream
// positions 8l..8l+7; the last of their windows ends at stream bit
// 8K * (l + 1), in word[0]. word[1] and word[2] precede it on the ring.
template <int K>
struct LaneSpan {
  // The windows cover 7K + 16 bits, and up to 24 more lie below them.
  static constexpr u32 kWords = K <= 4 ? 2 : 3;
  u32 word[kWords];
  u32 shift;
};

template <int K>
KILN_FN LaneSpan<K> FindLaneSpan(u32 lane) {
  LaneSpan<K> span;
  const u32 end = 8u * K * (lane + 1);
  const u32 last = (end - 1) / 32;
  KILN_UNROLLED
  for (u32 i = 0; i < LaneSpan<K>::kWords; ++i) {
    span.word[i] = (last + kTileWords<K> - i) % kTileWords<K>;
  }
  span.shift = (last + 1) * 32 - end;
  return span;
}

// The span's bits, the end of the last window at bit 0 of low; bits that no
// window of this K needs are unspecified.
struct SpanBits {
  u32 low, middle, high;
};

template <int K>
KILN_FN SpanBits LoadSpan(const u32* tile, const LaneSpan<K>& span) {
  SpanBits bits;
  const u32 w0 = tile[span.word[0]];
  const u32 w1 = tile[span.word[1]];
  u32 w2 = 0;
  if constexpr (K > 4) w2 = tile[span.word[2]];
  if constexpr (K % 4 == 0) {
    // 8K * (l + 1) is a whole number of words.
    bits.low = w0;
    bits.middle = w1;
    bits.high = w2;
  } else {
    bits.low = FunnelRight(w1, w0, span.shift);
    bits.middle = K <= 4 ? w1 >> span.shift : FunnelRight(w2, w1, span.shift);
    bits.high = w2 >> span.shift;
  }
  return bits;
}

// 32 bits of the span from bit kFrom on.
template <int kFrom>
KILN_FN u32 SpanWord(const SpanBits& bits) {
  static_assert(kFrom >= 0 && kFrom < 64, "inside the span");
  if constexpr (kFrom == 0) {
    return bits.low;
  } else if constexpr (kFrom < 32) {
    return FunnelRight(bits.middle, bits.low, kFrom);
  } else if constexpr (kFrom == 32) {
    return bits.middle;
  } else {
    return FunnelRight(bits.high, bits.middle, kFrom - 32);
  }
}

// State of the lane's position kIndex (0..7): the 16 bits that end
// (7 - kIndex) * K before the span's end.
template <int K, int kIndex>
KILN_FN u32 SpanState(const SpanBits& bits) {
  constexpr int kFrom = (7 - kIndex) * K;
  if constexpr (kFrom % 32 <= 16) {
    return ((kFrom < 32 ? bits.low : bits.middle) >> (kFrom % 32)) & 0xFFFFu;
  } else {
    return SpanWord<kFrom>(bits) & 0xFFFFu;
  }
}

// Hashes of the two states in the halves of `word`. Where bytes of hashes are
// summed next, sums and products share a pipe. Otherwise the integer pipe is
// the busier one, and the low hash is that of the whole word less what the high
// state adds to it: a multiply-add instead of a mask.
template <int CB, bool kSumsBytes>
KILN_FN void HashHalves(u32 word, u32* low, u32* high) {
  constexpr u32 kMultiplier = CB == kCodebook3Inst ? k3InstMultiplier
                              : CB == kCodebookMcg ? kMcgMultiplier
                                                   : kMul1Multiplier;
  constexpr u32 kAddend = CB == kCodebook3Inst ? k3InstAddend : 0u;
  *high = StateHash<CB>(word >> 16);
  if constexpr (kSumsBytes) {
    *low = StateHash<CB>(word & 0xFFFFu);
  } else {
    const u32 both = word * kMultiplier + (kAddend + (kAddend << 16));
#if KILN_ON_CUDA
    asm("mad.lo.u32 %0, %1, %2, %3;"
        : "=r"(*low)
        : "r"(*high), "r"(0xFFFF0000u), "r"(both));
#else
    *low = both - (*high << 16);
#endif
  }
}

#if KILN_ON_CUDA
// (x & kPairMask) ^ kPairFlip as one instruction: from two constant operands
// the compiler makes two, and this pipe is what decoding waits for.
KILN_FN u32 FlipPair(u32 x) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;"
      : "=r"(y)
      : "r"(x), "r"(kPairMask), "n"(kPairFlip));
  return y;
}
#endif

// Values of two hashes: the first in the low half.
template <int CB>
KILN_FN u32 HashValues(u32 x0, u32 x1) {
#if KILN_ON_CUDA
  u32 pair;
  if constexpr (CB == kCodebookMul1) {
    asm("prmt.b32 %0, %1, %2, 0x5410;"
        : "=r"(pair)
        : "r"(ByteSum(x0, kMul1Bias)), "r"(ByteSum(x1, kMul1Bias)));
    return hfma2(pair, kMul1Scale * 0x00010001u, kMul1Offset * 0x00010001u);
  } else {
    // Adding the halves of a register to each other needs no integer pipe.
    asm("{\n"
        "  .reg .b16 a, b, c, d;\n"
        "  mov.b32 {a, b}, %1;\n"
        "  mov.b32 {c, d}, %2;\n"
        "  add.rn.f16 a, a, b;\n"
        "  add.rn.f16 c, c, d;\n"
        "  mov.b32 %0, {a, c};\n"
        "}"
        : "=r"(pair)
        : "r"(FlipPair(x0)), "r"(FlipPair(x1)));
    return pair;
  }
#else
  u32 pair = 0;
  const u32 hashes[2] = {x0, x1};
  for (u32 i = 0; i < 2; ++i) {
    u16 value;
    if constexpr (CB == kCodebookMul1) {
      value = hfma(static_cast<u16>(ByteSum(hashes[i], kMul1Bias)), kMul1Scale,
                   kMul1Offset);
    } else {
      const u32 halves = (hashes[i] & kPairMask) ^ kPairFlip;
      value = hadd(static_cast<u16>(halves & 0xFFFFu),
                   static_cast<u16>(halves >> 16));
    }
    pair |= static_cast<u32>(value) << (16 * i);
  }
  return pair;
#endif
}

// Hashes of positions kIndex and kIndex - 16 / K, whose windows lie side by
// side in one word.
template <int CB, bool kSumsBytes, int K, int kIndex>
KILN_FN void HashNeighbours(const SpanBits& bits, u32 x[8]) {
  HashHalves<CB, kSumsBytes>(SpanWord<(7 - kIndex) * K>(bits), &x[kIndex],
                             &x[kIndex - 16 / K]);
}

template <int CB, int K, int kIndex>
KILN_FN void HashFrom(const SpanBits& bits, u32 x[8]) {
  x[kIndex] = StateHash<CB>(SpanState<K, kIndex>(bits));
  if constexpr (kIndex < 7) HashFrom<CB, K, kIndex + 1>(bits, x);
}

// Hashes of the lane's eight positions, in stream order: 0 to 3 are channel l/4
// and k 2(l%4) + {0, 1, 8, 9}, 4 to 7 the same of channel l/4 + 8. kSumsBytes:
// ByteSum is made of them.
template <int CB, int K, bool kSumsBytes>
KILN_FN void HashFragment(const SpanBits& bits, u32 x[8]) {
  if constexpr (K == 4) {
    HashNeighbours<CB, kSumsBytes, 4, 7>(bits, x);
    HashNeighbours<CB, kSumsBytes, 4, 6>(bits, x);
    HashNeighbours<CB, kSumsBytes, 4, 5>(bits, x);
    HashNeighbours<CB, kSumsBytes, 4, 4>(bits, x);
  } else if constexpr (K == 8) {
    HashNeighbours<CB, kSumsBytes, 8, 7>(bits, x);
    HashNeighbours<CB, kSumsBytes, 8, 6>(bits, x);
    HashNeighbours<CB, kSumsBytes, 8, 3>(bits, x);
    HashNeighbours<CB, kSumsBytes, 8, 2>(bits, x);
  } else {
    HashFrom<CB, K, 0>(bits, x);
  }
}

// The lane's A fragment: a[0] channel l/4, k 2(l%4) + {0, 1}; a[1] channel
// l/4 + 8, same k; a[2] and a[3] as a[0] and a[1] with k + 8.
template <int CB, int K>
KILN_FN void DecodeFragment(const SpanBits& bits, u32 a[4]) {
  u32 x[8];
  HashFragment<CB, K, CB == kCodebookMul1>(bits, x);
  a[0] = HashValues<CB>(x[0], x[1]);
  a[1] = HashValues<CB>(x[4], x[5]);
  a[2] = HashValues<CB>(x[2], x[3]);
  a[3] = HashValues<CB>(x[6], x[7]);
}

// A quarter of a tile's channel pair l/4, l/4 + 8: the K words that hold stream
// positions 32g .. 32g + 31 behind the one word before them, words[0]. Bits of
// fragment kPart (0..3), the one that FindLaneSpan(4g + kPart) would find.
template <int K, int kPart>
KILN_FN SpanBits QuarterSpan(const u32 words[K + 1]) {
  constexpr u32 kEnd = 32 + 8 * K * (kPart + 1);
  constexpr u32 kLast = (kEnd - 1) / 32;
  constexpr u32 kShift = (kLast + 1) * 32 - kEnd;
  SpanBits bits;
  bits.middle = bits.high = 0;
  if constexpr (kShift == 0) {
    bits.low = words[kLast];
    if constexpr (kLast >= 1) bits.middle = words[kLast - 1];
    if constexpr (kLast >= 2) bits.high = words[kLast - 2];
  } else {
    bits.low = FunnelRight(words[kLast - 1], words[kLast], kShift);
    if constexpr (kLast >= 2) {
      bits.middle = FunnelRight(words[kLast - 2], words[kLast - 1], kShift);
      bits.high = words[kLast - 2] >> kShift;
    } else {
      bits.middle = words[kLast - 1] >> kShift;
    }
  }
  return bits;
}

}  // namespace kd

#endif  // KILN_DEVICE_FRAGMENT_H_
