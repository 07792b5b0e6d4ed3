// The coupled boundary of a TrellisMX layer: H512 in front of the layer and
// behind the sum of its routes, and from the results of gate and up to the
// operand of the down projection.
//
// Source: prepared-weights specification, sections A.6 and A.9.5.
#ifndef KILN_TEMPLATES_FUSED_MOE_MX_BOUNDARY_H_
#define KILN_TEMPLATES_FUSED_MOE_MX_BOUNDARY_H_

#include "device/activation.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"

namespace kd {

constexpr u32 kMxOuter = 512;
constexpr u32 kMxAtom = 32;  // channels of gate, then as many of up

// In place over v[0..511]: H512 = H4 (x) H128, each quarter first, then a
// butterfly over the four. Its own inverse up to rounding.
KILN_FN void Hadamard512(float* v) {
  for (u32 q = 0; q < kMxOuter; q += kHadamardSize) Hadamard128(v + q);
  for (u32 i = 0; i < kHadamardSize; ++i) {
    float four[4] = {v[i], v[i + kHadamardSize], v[i + 2 * kHadamardSize],
                     v[i + 3 * kHadamardSize]};
    Hadamard4(four);
    for (u32 q = 0; q < 4; ++q) v[i + q * kHadamardSize] = four[q] * 0.5f;
  }
}

// v[0..127] *= scale, binary16.
KILN_FN void ScaleBy(const u16* scale, float* v) {
  for (u32 i = 0; i < kHadamardSize; ++i) v[i] *= f16_to_f32(scale[i]);
}

// silu(min(gate, limit)) * clamp(up, -limit, limit); NaN stays.
KILN_FN float MxActivate(float gate, float up, float limit) {
  gate = limit < gate ? limit : gate;
  up = limit < up ? limit : up;
  up = up < -limit ? -limit : up;
  return Silu(gate) * up;
}

// One expert's tables, each from its own beginning.
struct MxTables {
  const u16* gate_svh;    // [I]
  const u16* up_svh;      // [I]
  const u16* down_suh;    // [I]
  const u16* pre_signs;   // [2I], +1 or -1
  const u16* post_signs;  // [I]
};

// The tables of an expert in `rotations` [E][6I].
KILN_FN MxTables MxTablesOf(const u16* rotations, u64 expert, u32 inter) {
  const u16* at = rotations + expert * 6 * inter;
  return {at, at + inter, at + 2 * inter, at + 3 * inter, at + 5 * inter};
}

// 128 neurons that begin at `first`, a multiple of 128.
//   gate, up: their results, rounded to binary16.
//   out: the operand in front of its own rounding.
KILN_FN void MxBoundary128(const MxTables& tables, u32 first, float limit,
                           const float* gate, const float* up, float* out) {
  // Two halves of 64 neurons; each is 128 values, atoms of gate and up in turn.
  for (u32 half = 0; half < 2; ++half) {
    float r[kHadamardSize];
    for (u32 i = 0; i < kHadamardSize; ++i) {
      const u32 channel = 64 * half + i / (2 * kMxAtom) * kMxAtom + i % kMxAtom;
      r[i] = (i / kMxAtom % 2 == 0 ? gate : up)[channel];
    }
    Hadamard128(r);
    for (u32 i = 0; i < kHadamardSize; ++i) {
      const u32 channel = 64 * half + i / (2 * kMxAtom) * kMxAtom + i % kMxAtom;
      const u16* svh = i / kMxAtom % 2 == 0 ? tables.gate_svh : tables.up_svh;
      r[i] *= f16_to_f32(svh[first + channel]);
    }
    Hadamard128(r);
    ScaleBy(tables.pre_signs + 2 * (first + 64 * half), r);
    for (u32 i = 0; i < 64; ++i) {
      out[64 * half + i] = MxActivate(r[2 * i], r[2 * i + 1], limit);
    }
  }
  ScaleBy(tables.post_signs + first, out);
  Hadamard128(out);
  ScaleBy(tables.down_suh + first, out);
  Hadamard128(out);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_MX_BOUNDARY_H_
