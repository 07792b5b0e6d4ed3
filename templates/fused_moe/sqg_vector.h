// The codebook sqg_e4m3 in lanes. Decoded "compact": integer arithmetic from a
// state to its rank, and one table from a rank to an E4M3 number. Or by a table
// of all codewords of a rate, which compact decoding fills.
//
// Source: trellis format specification, section 2.1.
#ifndef KILN_TEMPLATES_FUSED_MOE_SQG_VECTOR_H_
#define KILN_TEMPLATES_FUSED_MOE_SQG_VECTOR_H_

#include "device/cpu_vector.h"
#include "device/platform.h"
#include "fused_moe/sqg_table.h"

namespace kd {

// The value of an E4M3 code.
struct SqgFloat {
  KILN_FN constexpr float operator()(u32 code, bool negative) const {
    float value = static_cast<float>(code < 8 ? code : code % 8 + 8) * 0x1p-9f;
    for (u32 binade = 1; binade < code / 8; ++binade) value *= 2.0f;
    return negative ? -value : value;
  }
};

constexpr SqgTable<float> kSqgTable = MakeSqgTable<float>(SqgFloat());

// The ranks of L states of K bits, divided by 16.
template <int K, int L>
KILN_FN U32V<L> SqgGroupsOf(U32V<L> states) {
  using U = U32V<L>;
  constexpr int kWidth = 16 - K;
  constexpr u32 kMask = (1u << kWidth) - 1u;
  U x = states >> K;
  x ^= x >> 11;
  x ^= (x << 11) & kMask;
  const U p = x * kSqgMultiplier + kSqgAddend;
  U branch = p >> (32 - K);
  KILN_UNROLLED
  for (int i = 0; i < K; ++i) {
    branch ^= ((states >> i) & 1u) << (K - 1 - i);
  }
  return ((branch << kWidth) | (p & kMask)) >> 4;
}

// The weights of L states of K bits.
template <int K, int L>
KILN_FN F32V<L> DecodeSqgLanes(U32V<L> states) {
  u32 groups[L];
  Store(groups, SqgGroupsOf<K, L>(states));
  float values[L];
  KILN_UNROLLED
  for (int i = 0; i < L; ++i) values[i] = kSqgTable.value[groups[i]];
  return Load<F32V<L>>(values);
}

// Codewords of states first .. first + count - 1, a multiple of L, to their
// places in the table [65536] of K: as bfloat16, which E4M3 numbers fit.
template <int K, int L>
KILN_FN void FillSqgCodewords(u32 first, u32 count, u16* table) {
  for (u32 s = first; s < first + count; s += L) {
    u32 states[L];
    for (u32 i = 0; i < L; ++i) states[i] = s + i;
    const F32V<L> values = DecodeSqgLanes<K, L>(Load<U32V<L>>(states));
    Store(table + s, __builtin_convertvector(
                         __builtin_bit_cast(U32V<L>, values) >> 16, U16V<L>));
  }
}

// The weights of L states by their table.
template <int L>
KILN_FN F32V<L> LookUpSqgLanes(U32V<L> states, const u16* table) {
  u32 index[L];
  Store(index, states);
  u32 codewords[L];
  KILN_UNROLLED
  for (int i = 0; i < L; ++i) codewords[i] = table[index[i]];
  return __builtin_bit_cast(F32V<L>, Load<U32V<L>>(codewords) << 16);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_SQG_VECTOR_H_
