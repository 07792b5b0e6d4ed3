// The eight weights that one lane of a warp decodes from a tile of the codebook
// sqg_e4m3, as the A fragment of mma.m16n8k16 or half of that of an
// mma.m16n8k32 of E4M3 codes: device/fragment.h finds the lane's part of the
// tile, this finds where in a table the values of its states are.
//
// Plain code on the CPU, so tests can hold it against the codebook without a
// GPU.
#ifndef KILN_TEMPLATES_FUSED_MOE_SQG_FRAGMENT_H_
#define KILN_TEMPLATES_FUSED_MOE_SQG_FRAGMENT_H_

#include "device/fragment.h"
#include "device/platform.h"
#include "fused_moe/sqg_table.h"

namespace kd {

// Of the exponents of a byte: 2^-9, the least number, has the least one.
constexpr u32 kSqgByteBias = 10;

// What a table holds of an E4M3 number: its bits in a format with kFraction
// bits of fraction where it is exact and no subnormal. 10: binary16, 7:
// bfloat16, 3: a byte of a sign, 4 bits of exponent and 3 of fraction.
template <u32 kFraction>
struct SqgNumber {
  static_assert(kFraction == 10 || kFraction == 7 || kFraction == 3,
                "binary16, bfloat16 or a byte");

  KILN_FN constexpr u16 operator()(u32 code, bool negative) const {
    constexpr u32 kSign = kFraction == 3 ? 0x80u : 0x8000u;
    // What is added to an exponent field.
    constexpr u32 kOffset = kFraction == 10  ? 15 - 7
                            : kFraction == 7 ? 127 - 7
                                             : kSqgByteBias - 7;
    u32 bits = 0;
    if (code >= 8) {
      bits = (code << (kFraction - 3)) + (kOffset << kFraction);
    } else if (code != 0) {
      // A subnormal E4M3 number, code times 2^-9.
      const u32 power = code >= 4 ? 2 : code >= 2 ? 1 : 0;
      bits = (kOffset - 2 + power) << kFraction | (code - (1u << power))
                                                      << (kFraction - power);
    }
    return static_cast<u16>(bits | (negative ? kSign : 0u));
  }
};

// Its code, in the low byte.
struct SqgCode {
  KILN_FN constexpr u16 operator()(u32 code, bool negative) const {
    return static_cast<u16>(code | (negative ? 0x80u : 0u));
  }
};

constexpr u32 kSqgTableBytes = kSqgGroups * 2;

KILN_FN u32 ReverseBits(u32 v) {
#if KILN_ON_CUDA
  u32 reversed;
  asm("brev.b32 %0, %1;" : "=r"(reversed) : "r"(v));
  return reversed;
#else
  u32 reversed = 0;
  for (u32 i = 0; i < 32; ++i) reversed |= (v >> i & 1u) << (31 - i);
  return reversed;
#endif
}

// Twice the rank / 16 of the lane's position kIndex (0..7): the offset of its
// value in a table of 16-bit numbers.
//   reversed: the bits of bits.low in reverse order
template <int K, int kIndex>
KILN_FN u32 SqgOffset(const SpanBits& bits, u32 reversed) {
  static_assert(K >= 2 && K <= 4, "sqg_e4m3 has 2, 3 or 4 bits");
  constexpr int kFrom = (7 - kIndex) * K;  // lowest bit of the state
  // The state in the upper half, later bits of the stream below it.
  u32 state;
  if constexpr (kFrom < 16) {
    state = bits.low << (16 - kFrom);
  } else {
    state = SpanWord<kFrom - 16>(bits);
  }
  // h is all of the state but its symbol, the K lowest bits: 16 - K bits, of
  // which the 5 - K above the eleventh are `upper`. h ^ (h >> 11), then the
  // same upwards: the eleven lower bits take `upper` in, and the upper ones
  // become the lowest of h.
  const u32 h = state >> (16 + K);
  const u32 upper = state >> (27 + K);
  const u32 x = ((h & 0x7FFu) ^ upper) | ((h << 11) & ((1u << (16 - K)) - 1u));
  const u32 p = x * kSqgMultiplier + kSqgAddend;
  // The rank is the upper K bits of p ^ the symbol in reverse, then the lower
  // 16 - K bits of p. All of the symbol lies in bits.low.
  constexpr u32 kSymbol = ((1u << K) - 1u) << (13 - K);
  constexpr u32 kRest = ((1u << (12 - K)) - 1u) << 1;
  const u32 symbol =
      kFrom <= 19 ? reversed >> (19 - kFrom) : reversed << (kFrom - 19);
  return (((p >> 19) ^ symbol) & kSymbol) | ((p >> 3) & kRest);
}

template <int K, int kIndex = 0>
KILN_FN void SqgOffsets(const SpanBits& bits, u32 reversed, u32 offset[8]) {
  offset[kIndex] = SqgOffset<K, kIndex>(bits, reversed);
  if constexpr (kIndex < 7) SqgOffsets<K, kIndex + 1>(bits, reversed, offset);
}

// The lane's A fragment, laid out as DecodeFragment describes it.
//   number(offset): the 16 bits at an offset of the table
template <int K, class Number>
KILN_FN void DecodeSqgFragment(const SpanBits& bits, Number number, u32 a[4]) {
  u32 offset[8];
  SqgOffsets<K>(bits, ReverseBits(bits.low), offset);
  a[0] = number(offset[0]) | number(offset[1]) << 16;
  a[1] = number(offset[4]) | number(offset[5]) << 16;
  a[2] = number(offset[2]) | number(offset[3]) << 16;
  a[3] = number(offset[6]) | number(offset[7]) << 16;
}

// The lane's weights as codes: a[0] channel l/4 and k 2(l%4) + {0, 1, 8, 9},
// a[1] channel l/4 + 8 and the same k. code_row.h says what they are for.
//   code(offset): the byte at an offset of the table
template <int K, class Code>
KILN_FN void DecodeSqgCodes(const SpanBits& bits, Code code, u32 a[2]) {
  u32 offset[8];
  SqgOffsets<K>(bits, ReverseBits(bits.low), offset);
  KILN_UNROLLED
  for (u32 i = 0; i < 2; ++i) {
    const u32* of = offset + 4 * i;
    a[i] =
        code(of[0]) | code(of[1]) << 8 | code(of[2]) << 16 | code(of[3]) << 24;
  }
}

// Rank / 16 of a state of K bits.
template <int K>
KILN_FN u32 SqgGroupOf(u32 state) {
  const SpanBits bits = {state, 0, 0};
  return SqgOffset<K, 7>(bits, ReverseBits(state)) / 2;
}

// Two bytes as binary16 numbers whose exponents are the bytes': with 15 in
// place of kSqgByteBias, 2^-5 of the weights.
constexpr int kSqgByteTimes = 1 << (15 - kSqgByteBias);

KILN_FN u32 HalvesOfSqgBytes(u32 low, u32 high) {
  const u32 pair = low << 8 | high << 24;
  return (pair & 0x80008000u) | ((pair & 0x7F007F00u) >> 1);
}

// The same as bfloat16 numbers, which are the weights: of a byte's exponent
// kSqgByteBias makes 127, by a product that is exact.
KILN_FN u32 BfloatsOfSqgBytes(u32 low, u32 high) {
  constexpr u32 kUp = 127 - kSqgByteBias;
  const u32 pair = low << 8 | high << 24;
  const u32 bits = (pair & 0x80008000u) | ((pair & 0x7F007F00u) >> 4);
#if KILN_ON_CUDA
  constexpr u32 kPower = (127 + kUp) << 7;
  u32 weights;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(weights)
      : "r"(bits), "r"(kPower << 16 | kPower), "r"(0x80008000u));
  return weights;
#else
  u32 weights = bits;
  if ((bits & 0x7FFFu) != 0) weights += kUp << 7;
  if ((bits & 0x7FFF0000u) != 0) weights += kUp << 23;
  return weights;
#endif
}

template <int K, int kIndex = 0>
KILN_FN void SpanStates(const SpanBits& bits, u32 state[8]) {
  state[kIndex] = SpanState<K, kIndex>(bits);
  if constexpr (kIndex < 7) SpanStates<K, kIndex + 1>(bits, state);
}

// As DecodeSqgFragment, as bfloat16 or as binary16. In the latter form the
// weights are divided by kSqgByteTimes: whoever sums multiplies the sum, which
// is exact.
//   byte(state): of a state of K bits, as SqgNumber<3> makes it
template <int K, bool kBfloat, class Byte>
KILN_FN void LookUpSqgFragment(const SpanBits& bits, Byte byte, u32 a[4]) {
  u32 state[8];
  SpanStates<K>(bits, state);
  const auto pair = [&](u32 first) {
    const u32 low = byte(state[first]), high = byte(state[first + 1]);
    return kBfloat ? BfloatsOfSqgBytes(low, high) : HalvesOfSqgBytes(low, high);
  };
  a[0] = pair(0);
  a[1] = pair(4);
  a[2] = pair(2);
  a[3] = pair(6);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_SQG_FRAGMENT_H_
