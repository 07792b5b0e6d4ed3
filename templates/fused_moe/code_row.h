// How an operand row of E4M3 codes lies in memory: in the order in which
// mma.m16n8k32 takes them beside weights that stay where they were decoded.
//
// A lane decodes eight weights of a tile of 16 input channels: for each of two
// output channels those of k = 2c + {0, 1, 8, 9}, where c is its number among
// four. As codes these are one register for each output channel, and those of
// two tiles are an A fragment, but for k = 4c + {0, 1, 2, 3}. So a row has the
// channels of each 16 in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.
#ifndef KILN_TEMPLATES_FUSED_MOE_CODE_ROW_H_
#define KILN_TEMPLATES_FUSED_MOE_CODE_ROW_H_

#include "device/platform.h"

namespace kd {

// Where a row has an input channel.
KILN_FN constexpr u32 CodePlace(u32 channel) {
  return channel / 16 * 16 + channel % 8 / 2 * 4 + channel % 16 / 8 * 2 +
         channel % 2;
}

// Stores the codes of four neighbours, of which the first is a multiple of 4.
KILN_FN void StoreCodes(const u8 (&codes)[4], u32 channel, u8* row) {
  // Two neighbours stay side by side.
  KILN_UNROLLED
  for (u32 i = 0; i < 4; i += 2) {
    *reinterpret_cast<u16*>(row + CodePlace(channel + i)) =
        static_cast<u16>(codes[i] | codes[i + 1] << 8);
  }
}

// Bytes of a row of `depth` codes and, behind them, a scale for each 32: a
// multiple of 16.
KILN_FN constexpr u32 ScaledRowBytes(u32 depth) {
  return depth + (depth / 32 + 15) / 16 * 16;
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_CODE_ROW_H_
