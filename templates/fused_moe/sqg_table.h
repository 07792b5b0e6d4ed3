// The table of the codebook sqg_e4m3 from ranks to E4M3 numbers, in any
// representation.
//
// Source: trellis format specification, section 2.1.
#ifndef KILN_TEMPLATES_FUSED_MOE_SQG_TABLE_H_
#define KILN_TEMPLATES_FUSED_MOE_SQG_TABLE_H_

#include "device/platform.h"

namespace kd {

constexpr u32 kSqgStates = 65536;

// A value belongs to 16 neighbouring ranks.
constexpr u32 kSqgGroups = 4096;
constexpr u32 kSqgHalf = kSqgGroups / 2;

// From a state's upper bits to its rank, all modulo 2^32.
constexpr u32 kSqgMultiplier = 0x3FA7D929u;
constexpr u32 kSqgAddend = 0xC928FD8Eu;

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

// By rank / 16.
template <class T>
struct alignas(16) SqgTable {
  T value[kSqgGroups];
};

// number(code, negative): the T of an E4M3 code without its sign; zero is never
// negative.
template <class T, class Number>
KILN_FN constexpr SqgTable<T> MakeSqgTable(Number number) {
  SqgTable<T> table = {};
  u32 code = 0;
  for (u32 q = 0; q < kSqgHalf; ++q) {
    if (code < kSqgStepCount && kSqgSteps[code] == q) ++code;
    table.value[kSqgHalf + q] = number(code, false);
    table.value[kSqgHalf - 1 - q] = number(code, code != 0);
  }
  return table;
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_SQG_TABLE_H_
