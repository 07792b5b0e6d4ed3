#include "runtime/cpu_level.h"

#include <cpuid.h>

namespace kiln::runtime {
namespace {

constexpr uint32_t Bit(int n) { return uint32_t{1} << n; }

uint32_t ExtendedControlRegister0() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace

uint32_t HostCpuLevel() {
  unsigned a = 0, b = 0, c1 = 0, d = 0;
  unsigned b7 = 0, c7 = 0, cx = 0, unused = 0;
  if (!__get_cpuid(1, &a, &b, &c1, &d)) return 1;
  (void)__get_cpuid_count(7, 0, &a, &b7, &c7, &unused);
  (void)__get_cpuid(0x80000001u, &a, &b, &cx, &unused);

  // SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT; LAHF-SAHF.
  constexpr uint32_t kLevel2 =
      Bit(0) | Bit(9) | Bit(13) | Bit(19) | Bit(20) | Bit(23);
  if ((c1 & kLevel2) != kLevel2 || (cx & Bit(0)) == 0) return 1;

  // FMA, MOVBE, OSXSAVE, AVX, F16C; LZCNT; BMI1, AVX2, BMI2; XMM and YMM state.
  constexpr uint32_t kLevel3 = Bit(12) | Bit(22) | Bit(27) | Bit(28) | Bit(29);
  constexpr uint32_t kLevel3Leaf7 = Bit(3) | Bit(5) | Bit(8);
  if ((c1 & kLevel3) != kLevel3 || (cx & Bit(5)) == 0 ||
      (b7 & kLevel3Leaf7) != kLevel3Leaf7) {
    return 2;
  }
  const uint32_t state = ExtendedControlRegister0();
  if ((state & 0x6) != 0x6) return 2;

  // AVX512F, DQ, CD, BW, VL; mask and ZMM state.
  constexpr uint32_t kLevel4Leaf7 =
      Bit(16) | Bit(17) | Bit(28) | Bit(30) | Bit(31);
  if ((b7 & kLevel4Leaf7) != kLevel4Leaf7 || (state & 0xe6) != 0xe6) return 3;
  return 4;
}

}  // namespace kiln::runtime
