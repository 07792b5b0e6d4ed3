#include "tests/templates/gpu_intrinsics.h"

#include <cmath>

#include "device/half.h"
#include "fused_moe/mx_block.h"

namespace kd {

u32 e4m3_sum_bits = 24;

namespace gpu = ::kiln::testing::gpu;

namespace {

// Half `index` of a register.
float HalfOf(u32 word, u32 index) {
  return f16_to_f32(static_cast<u16>(word >> (16 * index)));
}

float BfloatOf(u32 word, u32 index) {
  return bf16_to_f32(static_cast<u16>(word >> (16 * index)));
}

// The nearest binary32 that is not larger in magnitude.
float TowardZero(double v) {
  const auto nearest = static_cast<float>(v);
  if (std::isnan(nearest) || std::fabs(nearest) <= std::fabs(v)) return nearest;
  return std::nextafter(nearest, 0.0f);
}

// The first `bits` significant bits of a number.
float CutBehind(u32 bits, double v) {
  if (!std::isfinite(v)) return static_cast<float>(v);
  int exponent;
  const double fraction = std::frexp(v, &exponent);
  const double scaled =
      std::trunc(std::ldexp(fraction, static_cast<int>(bits)));
  return static_cast<float>(
      std::ldexp(scaled, exponent - static_cast<int>(bits)));
}

// number: of a register and which half of it.
void MmaOf(float (*number)(u32, u32), float (&d)[4], const u32 (&a)[4], u32 b0,
           u32 b1) {
  struct Registers {
    u32 a[4];
    u32 b[2];
  };

  const auto all = gpu::Gather(Registers{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const u32 lane = threadIdx.x % 32;
  // PTX: a register holds two neighbouring k. A: row = lane / 4, + 8 for
  // registers 1 and 3; k = 2 (lane % 4), + 8 for registers 2 and 3. B: k as in
  // A, + 8 for register 1; column = lane / 4. D: row = lane / 4, + 8 for
  // registers 2 and 3; column = 2 (lane % 4) + register % 2.
  const auto a_at = [&](u32 row, u32 k) {
    const u32 from = row % 8 * 4 + k % 8 / 2;
    return number(all[from].a[row / 8 + k / 8 * 2], k % 2);
  };
  const auto b_at = [&](u32 k, u32 column) {
    const u32 from = column * 4 + k % 8 / 2;
    return number(all[from].b[k / 8], k % 2);
  };
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = lane / 4 + i / 2 * 8;
    const u32 column = lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (u32 k = 0; k < 16; ++k) {
      sum += static_cast<double>(a_at(row, k)) * b_at(k, column);
    }
    d[i] = TowardZero(sum);
  }
}

}  // namespace

void MmaE4m3ScaledBy(u32 byte, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                     u32 row_scales, u32 column_scales) {
  struct Registers {
    u32 a[4];
    u32 b[2];
    u32 scales[2];
  };

  const auto all = gpu::Gather(Registers{
      {a[0], a[1], a[2], a[3]}, {b0, b1}, {row_scales, column_scales}});
  const u32 lane = threadIdx.x % 32;
  // PTX: a register holds four neighbouring k. A: row = lane / 4, + 8 for
  // registers 1 and 3; k = 4 (lane % 4), + 16 for registers 2 and 3. B: k as in
  // A, + 16 for register 1; column = lane / 4. D as in MmaOf.
  const auto number = [](u32 word, u32 index) {
    return static_cast<double>(
        E4m3ToFloat(static_cast<u8>(word >> (8 * index))));
  };
  const auto scale = [&](u32 from, u32 which) {
    return static_cast<double>(
        Ue8m0ToFloat(static_cast<u8>(all[from].scales[which] >> (8 * byte))));
  };
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = lane / 4 + i / 2 * 8;
    const u32 column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (u32 k = 0; k < 32; ++k) {
      const u32 quarter = k % 16 / 4;
      const u32 a_word = all[row % 8 * 4 + quarter].a[row / 8 + k / 16 * 2];
      const u32 b_word = all[column * 4 + quarter].b[k / 16];
      sum += number(a_word, k % 4) * number(b_word, k % 4);
    }
    // Thread selector 0: of each four lanes, the first two have the scales of
    // rows r and r + 8, the first that of column r.
    sum *= scale(row % 8 * 4 + row / 8, 0) * scale(column * 4, 1);
    d[i] = CutBehind(e4m3_sum_bits, sum + d[i]);
  }
}

void MmaE4m3FromZero(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  constexpr u32 kOnes = 0x7F7F7F7Fu;
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  MmaE4m3ScaledBy(0, d, a, b0, b1, kOnes, kOnes);
}

void LoadMatrices(u32 from, u32 (&b)[4]) {
  const auto rows = gpu::Gather(from);
  const u32 lane = threadIdx.x % 32;
  for (u32 i = 0; i < 4; ++i) {
    // Lane 8i + r gives the address of row r of matrix i; a row is 16 bytes.
    const u32 row = rows[8 * i + lane / 4];
    std::memcpy(&b[i], gpu::Shared(row, 16) + lane % 4 * 4, 4);
  }
}

void Mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  MmaOf(HalfOf, d, a, b0, b1);
}

void MmaBfloat(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  MmaOf(BfloatOf, d, a, b0, b1);
}

u32 Transpose8x8(u32 v) {
  const auto all = gpu::Gather(v);
  const u32 lane = threadIdx.x % 32;
  u32 out = 0;
  for (u32 i = 0; i < 2; ++i) {
    // Element (lane / 4, 2 (lane % 4) + i) of the transpose.
    const u32 row = lane % 4 * 2 + i;
    const u32 column = lane / 4;
    const u32 from = all[row * 4 + column / 2];
    out |= (from >> (16 * (column % 2)) & 0xFFFFu) << (16 * i);
  }
  return out;
}

}  // namespace kd
