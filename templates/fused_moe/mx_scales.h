// The scales of a TrellisMX layer's weights, where a product on CUDA finds
// them: words of four, 128 input channels of one output channel.
//
// Source: prepared-weights specification, section A.9.4.
#ifndef KILN_TEMPLATES_FUSED_MOE_MX_SCALES_H_
#define KILN_TEMPLATES_FUSED_MOE_MX_SCALES_H_

#include "device/platform.h"

namespace kd {

// The words of output channel `column` of an expert's matrix and its first 128
// input channels; those of the next 128 are kMxPanel words behind.
constexpr u32 kMxPanel = 256;

template <u32 kDepth, u32 kWidth>
KILN_FN const u32* MxExpertScales(const u32* words, u32 expert, u32 column) {
  constexpr u64 kPanelWords = kDepth / 128 * kMxPanel;
  constexpr u32 kPanels = (kWidth + kMxPanel - 1) / kMxPanel;
  return words +
         (static_cast<u64>(expert) * kPanels + column / kMxPanel) *
             kPanelWords +
         column % kMxPanel;
}

// 2^(byte - 127) of byte `index` of a word. For 255, which no weight has,
// infinity.
KILN_FN float MxWordScale(u32 word, u32 index) {
  const u32 bits = (word >> (8 * index) & 0xFFu) << 23;
  // 2^-127, the one subnormal, is below all others.
  return BitsFloat(bits > 0x00400000u ? bits : 0x00400000u);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_MX_SCALES_H_
