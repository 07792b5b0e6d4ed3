#include "tests/templates/gpu_intrinsics.h"

#include <cmath>

#include "device/half.h"

namespace kd {

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
