// NPK-1, the procedural trellis law: from a 16-bit state to the byte of an E4M3
// number, without a table, and from the words of a tile to its states. The one
// place in the tree that defines it; device code may include it.
//
// Source: prepared-weights specification, sections A.2 to A.4 and A.9.
#ifndef KILN_TEMPLATES_FORMATS_NPK_LAW_H_
#define KILN_TEMPLATES_FORMATS_NPK_LAW_H_

#include "device/platform.h"

namespace kd {

// What a sidecar's metadata calls this law.
constexpr char kNpkLaw[] =
    "npk1:mul=cbac1fed;and=8fff8fff;xor=3b603b60;alpha=2;rne;zero=+";
constexpr u32 kNpkMultiplier = 0xCBAC1FEDu;
constexpr u32 kNpkMask = 0x8FFF8FFFu;
constexpr u32 kNpkFlip = 0x3B603B60u;
constexpr int kNpkBitsMin = 2;
constexpr int kNpkBitsMax = 5;

// x / 2^shift to the nearest integer, ties to even; a negative shift
// multiplies.
KILN_FN constexpr u32 NpkRoundShift(u32 x, int shift) {
  if (shift <= 0) return x << -shift;
  const u32 half = 1u << (shift - 1);
  const u32 floor = x >> shift;
  const u32 rest = x & (2 * half - 1);
  return floor + (rest > half || (rest == half && (floor & 1) != 0) ? 1u : 0u);
}

KILN_FN constexpr int NpkBitLength(u32 x) {
  int length = 0;
  for (; x != 0; x >>= 1) ++length;
  return length;
}

// One half of the hash as a signed count of 2^-13: a binary16 number whose
// exponent has two bits that matter.
KILN_FN constexpr i32 NpkTerm(u32 half) {
  const u32 magnitude = (1024u + (half & 1023u)) << (half >> 10 & 3u);
  return (half >> 15 & 1u) != 0 ? -static_cast<i32>(magnitude)
                                : static_cast<i32>(magnitude);
}

// The E4M3 byte of state s (0..65535). Zero is 0x00, never 0x80.
KILN_FN constexpr u8 NpkByte(u32 s) {
  const u32 w = (s * kNpkMultiplier & kNpkMask) ^ kNpkFlip;
  const i32 sum = NpkTerm(w & 0xFFFFu) + NpkTerm(w >> 16);
  const bool negative = sum < 0;
  u32 a = static_cast<u32>(negative ? -sum : sum);
  if (a == 0) return 0;
  int n = NpkBitLength(a);
  if (n > 11) {  // the rounding of a binary16 addition
    a = NpkRoundShift(a, n - 11) << (n - 11);
    n = NpkBitLength(a);
  }
  // Twice the sum is a 2^-12: its exponent is n - 13.
  int exponent = n - 13;
  u32 code;
  if (exponent < -6) {
    code = NpkRoundShift(a, 3);  // subnormal, in units of 2^-9
  } else {
    u32 q = NpkRoundShift(a, n - 4);
    if (q == 16) {
      q = 8;
      ++exponent;
    }
    code = static_cast<u32>(exponent + 7) << 3 | (q - 8);
  }
  return static_cast<u8>(code == 0 ? 0u : (negative ? 0x80u : 0u) | code);
}

// ---- windows ---------------------------------------------------------------

// Lane l holds the eight states of positions 8 l .. 8 l + 7. They span 16 + 7 K
// bits: two words of the ring up to K = 4, three at K = 5.
enum class NpkWindow { kTwoWords, kThreeWords };

template <int K>
constexpr NpkWindow kNpkWindow =
    K <= 4 ? NpkWindow::kTwoWords : NpkWindow::kThreeWords;

// Where the windows of a lane lie in the ring of 8 K words.
template <int K>
struct NpkPlace {
  u32 first;  // word that holds the first bit
  u32 last;   // word that holds the last bit
  u32 span;   // words from the first to the last, less one
  u32 shift;  // bits of the last word behind the last window
};

template <int K>
KILN_FN constexpr NpkPlace<K> NpkPlaceOf(u32 lane) {
  static_assert(K >= kNpkBitsMin && K <= kNpkBitsMax, "NPK-1 has K = 2..5");
  constexpr u32 kRing = 8 * K;
  const u32 end_first = (8 * lane + 257) * K;  // one turn of the ring ahead
  const u32 begin = end_first - 16;
  const u32 end = end_first + 7 * K;
  const u32 first = begin >> 5;
  const u32 last = (end - 1) >> 5;
  return {first % kRing, last % kRing, last - first, 32 * (last + 1) - end};
}

// The states of a lane under one of the two laws. Two words hold too few bits
// for K = 5, so that is no program.
template <int K, NpkWindow kLaw>
KILN_FN constexpr void NpkLaneStates(const u32* ring, u32 lane, u32 out[8]) {
  const NpkPlace<K> place = NpkPlaceOf<K>(lane);
  if constexpr (kLaw == NpkWindow::kTwoWords) {
    static_assert(K <= 4, "the two-word window holds eight states up to K = 4");
    const u64 both =
        static_cast<u64>(ring[place.first]) << 32 | ring[place.last];
    for (u32 i = 0; i < 8; ++i) {
      out[7 - i] = static_cast<u32>(both >> (place.shift + K * i)) & 0xFFFFu;
    }
  } else {
    // States i = 0..3 from the last two words, 4..7 from the first two, each
    // brought down to bit 0 of its 64 bits.
    constexpr u32 kRing = 8 * K;
    const u32 middle =
        place.span == 2 ? ring[(place.first + 1) % kRing] : ring[place.first];
    const u64 low = static_cast<u64>(middle) << 32 | ring[place.last];
    const u64 high = place.span == 2
                         ? static_cast<u64>(ring[place.first]) << 32 | middle
                         : static_cast<u64>(ring[place.first]);
    const u64 low_states = low >> place.shift;
    for (u32 i = 0; i < 8; ++i) {
      const u32 at = place.shift + K * i;
      const u64 bits = i < 4      ? low_states >> (K * i)
                       : at >= 32 ? high >> (at - 32)
                                  : (high << (32 - at)) | (low >> at);
      out[7 - i] = static_cast<u32>(bits) & 0xFFFFu;
    }
  }
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FORMATS_NPK_LAW_H_
