// The codebook sqg_e4m3 in lanes. Decoded "compact": integer arithmetic from a
// state to its rank, and one table from a rank to an E4M3 number. Or by a table
// of all codewords of a rate, which compact decoding fills.
//
// Source: trellis format specification, section 2.1.
#ifndef KILN_TEMPLATES_FUSED_MOE_SQG_VECTOR_H_
#define KILN_TEMPLATES_FUSED_MOE_SQG_VECTOR_H_

#include "device/cpu_vector.h"
#include "device/platform.h"
#include "fused_moe/mx_block.h"

namespace kd {

// A value belongs to 16 neighbouring ranks.
constexpr u32 kSqgGroups = 4096;
constexpr u32 kSqgHalf = kSqgGroups / 2;

// Groups above the middle where the E4M3 code of T12 is one more than before;
// the middle has code 0, and the lower half mirrors the upper one.
constexpr u16 kSqgSteps[] = {
    1,    3,    5,    7,    10,   12,   14,   16,   18,   20,   22,
    24,   27,   29,   31,   33,   36,   40,   45,   49,   53,   57,
    62,   66,   72,   81,   89,   98,   106,  115,  123,  132,  145,
    161,  178,  195,  212,  229,  246,  263,  288,  321,  355,  388,
    421,  454,  486,  519,  567,  630,  693,  754,  814,  873,  930,
    986,  1068, 1170, 1267, 1356, 1439, 1514, 1583, 1646, 1727, 1816,
    1884, 1935, 1972, 1998, 2016, 2028, 2039, 2045, 2047};
constexpr u32 kSqgStepCount = sizeof kSqgSteps / sizeof kSqgSteps[0];

// Binary32 values by rank / 16.
struct SqgTable {
  float value[kSqgGroups];
};

constexpr SqgTable MakeSqgTable() {
  SqgTable table = {};
  u32 code = 0;
  float power = 0x1p-9f;  // of a step of the code's binade
  float value = 0.0f;
  for (u32 q = 0; q < kSqgHalf; ++q) {
    if (code < kSqgStepCount && kSqgSteps[code] == q) {
      value += power;
      ++code;
      // Binades have 8 codes; the first two share their step.
      if (code % 8 == 0 && code >= 16) power *= 2.0f;
    }
    table.value[kSqgHalf + q] = value;
    table.value[kSqgHalf - 1 - q] = code == 0 ? 0.0f : -value;
  }
  return table;
}

constexpr SqgTable kSqgTable = MakeSqgTable();

// The ranks of L states of K bits, divided by 16.
template <int K, int L>
KILN_FN U32V<L> SqgGroupsOf(U32V<L> states) {
  using U = U32V<L>;
  constexpr int kWidth = 16 - K;
  constexpr u32 kMask = (1u << kWidth) - 1u;
  U x = states >> K;
  x ^= x >> 11;
  x ^= (x << 11) & kMask;
  const U p = x * 0x3FA7D929u + 0xC928FD8Eu;
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

constexpr u32 kSqgStates = 65536;

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
