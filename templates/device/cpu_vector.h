// Vectors of 8 or 16 lanes for CPU kernels, in the GNU vector language that
// both Clang and g++ speak: the target, not an intrinsic, chooses AVX2 or
// AVX-512. Includes the trellis decoder in vector form.
//
// Decoding in lanes. Stream position p of element (k, n) is
// 32 (n mod 8) + q with q = 8 floor((k mod 8) / 2) + k mod 2 +
// 2 floor(k / 8) + 4 floor(n / 8), so the eight columns n mod 8 of one row
// lie at the same bit offset of eight groups of K words. With word w of group
// i in lane i, one row's states need shifts by constants only.
#ifndef KILN_DEVICE_CPU_VECTOR_H_
#define KILN_DEVICE_CPU_VECTOR_H_

#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"

namespace kd {

typedef float F32x8 __attribute__((vector_size(32)));
typedef u32 U32x8 __attribute__((vector_size(32)));
typedef i32 I32x8 __attribute__((vector_size(32)));
typedef u16 U16x8 __attribute__((vector_size(16)));
typedef float F32x16 __attribute__((vector_size(64)));
typedef u32 U32x16 __attribute__((vector_size(64)));
typedef i32 I32x16 __attribute__((vector_size(64)));
typedef u16 U16x16 __attribute__((vector_size(32)));
#if KILN_NATIVE_F16 && defined(__clang__)
typedef _Float16 F16x8 __attribute__((vector_size(16)));
typedef _Float16 F16x16 __attribute__((vector_size(32)));
#endif

template <int... I>
struct Sequence {};

template <int L>
struct Lanes;

template <>
struct Lanes<8> {
  using F32 = F32x8;
  using U32 = U32x8;
  using I32 = I32x8;
  using U16 = U16x8;
#if KILN_NATIVE_F16 && defined(__clang__)
  using F16 = F16x8;
#endif
  using Indices = Sequence<0, 1, 2, 3, 4, 5, 6, 7>;
};

template <>
struct Lanes<16> {
  using F32 = F32x16;
  using U32 = U32x16;
  using I32 = I32x16;
  using U16 = U16x16;
#if KILN_NATIVE_F16 && defined(__clang__)
  using F16 = F16x16;
#endif
  using Indices =
      Sequence<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
};

template <int L>
using F32V = typename Lanes<L>::F32;
template <int L>
using U32V = typename Lanes<L>::U32;
template <int L>
using I32V = typename Lanes<L>::I32;
template <int L>
using U16V = typename Lanes<L>::U16;

// Unaligned memory access.
template <class V>
KILN_FN V Load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
KILN_FN void Store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

// a * b + c with one rounding per lane.
template <class V>
KILN_FN V FmaLanes(V a, V b, V c) {
#if defined(__clang__)
  return __builtin_elementwise_fma(a, b, c);
#else
  for (u32 i = 0; i < sizeof(V) / sizeof(float); ++i) {
    c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  }
  return c;
#endif
}

template <int L>
KILN_FN F32V<L> Splat(float v) {
  return v - F32V<L>{};
}

// L binary16 values from or to memory, rounding to nearest even.
template <int L>
KILN_FN F32V<L> LoadHalves(const u16* from) {
#if KILN_NATIVE_F16 && defined(__clang__)
  return __builtin_convertvector(Load<typename Lanes<L>::F16>(from), F32V<L>);
#else
  F32V<L> v;
  for (int i = 0; i < L; ++i) v[i] = f16_to_f32(from[i]);
  return v;
#endif
}

template <int L>
KILN_FN U16V<L> ToHalves(F32V<L> v) {
#if KILN_NATIVE_F16 && defined(__clang__)
  return __builtin_bit_cast(U16V<L>,
                            __builtin_convertvector(v, typename Lanes<L>::F16));
#else
  U16V<L> h;
  for (int i = 0; i < L; ++i) h[i] = f32_to_f16(v[i]);
  return h;
#endif
}

template <int L>
KILN_FN F32V<L> RoundHalves(F32V<L> v) {
#if KILN_NATIVE_F16 && defined(__clang__)
  return __builtin_convertvector(
      __builtin_convertvector(v, typename Lanes<L>::F16), F32V<L>);
#else
  for (int i = 0; i < L; ++i) v[i] = round_f16(v[i]);
  return v;
#endif
}

template <int L>
KILN_FN F32V<L> LoadBfloats(const u16* from) {
  return __builtin_bit_cast(
      F32V<L>, __builtin_convertvector(Load<U16V<L>>(from), U32V<L>) << 16);
}

// ---- Hadamard --------------------------------------------------------------

template <int S, int L, int... I>
KILN_FN F32V<L> ButterflyInside(F32V<L> v, Sequence<I...>) {
  const F32V<L> partner = __builtin_shufflevector(v, v, (I ^ S)...);
  const F32V<L> sign = {((I & S) != 0 ? -1.0f : 1.0f)...};
  return FmaLanes(v, sign, partner);  // partner + v or partner - v
}

// In place over v[0..127]; the bits of Hadamard128.
template <int L>
KILN_FN void VectorHadamard128(float* v) {
  constexpr int kCount = 128 / L;
  using Indices = typename Lanes<L>::Indices;
  F32V<L> part[kCount];
  for (int i = 0; i < kCount; ++i) {
    F32V<L> a = Load<F32V<L>>(v + i * L);
    a = ButterflyInside<1, L>(a, Indices{});
    a = ButterflyInside<2, L>(a, Indices{});
    a = ButterflyInside<4, L>(a, Indices{});
    if constexpr (L == 16) a = ButterflyInside<8, L>(a, Indices{});
    part[i] = a;
  }
  KILN_UNROLLED
  for (int stride = 1; stride < kCount; stride *= 2) {
    KILN_UNROLLED
    for (int i = 0; i < kCount; ++i) {
      if ((i & stride) != 0) continue;
      const F32V<L> sum = part[i] + part[i + stride];
      part[i + stride] = part[i] - part[i + stride];
      part[i] = sum;
    }
  }
  for (int i = 0; i < kCount; ++i) {
    Store(v + i * L, part[i] * HadamardScale());
  }
}

// ---- trellis decoding ------------------------------------------------------

// acc with the lanes that source vector `From` of the flat word array holds:
// lane i of the result is flat word K * i + Word.
template <int K, int Word, int From, int L, int... I>
KILN_FN U32V<L> MergeStrided(U32V<L> acc, U32V<L> source, Sequence<I...>) {
  return __builtin_shufflevector(
      acc, source,
      ((K * I + Word) / L == From ? L + (K * I + Word) % L : I)...);
}

template <int L, int... I>
KILN_FN U32V<L> PreviousGroup(U32V<L> v, Sequence<I...>) {
  return __builtin_shufflevector(v, v, ((I & ~7) | ((I + 7) & 7))...);
}

// The words of L / 8 adjacent tiles, transposed: word[w] holds word w of every
// group of K; before is word K - 1 of the ring's previous group.
template <int K, int L>
struct TileBits {
  U32V<L> word[K];
  U32V<L> before;

  template <int Word, int From = 1>
  KILN_FN static U32V<L> Gather(const U32V<L>* flat, U32V<L> acc) {
    if constexpr (From < K) {
      acc = MergeStrided<K, Word, From, L>(acc, flat[From],
                                           typename Lanes<L>::Indices{});
      return Gather<Word, From + 1>(flat, acc);
    } else {
      return acc;
    }
  }

  template <int Word = 0>
  KILN_FN void GatherAll(const U32V<L>* flat) {
    if constexpr (Word < K) {
      // Start from the first source so that no lane is ever undefined.
      word[Word] = Gather<Word>(
          flat, MergeStrided<K, Word, 0, L>(flat[0], flat[0],
                                            typename Lanes<L>::Indices{}));
      GatherAll<Word + 1>(flat);
    }
  }

  // words: the K * L words of L / 8 tiles, one after the other.
  KILN_FN void LoadFrom(const u32* words) {
    U32V<L> flat[K];
    KILN_UNROLLED
    for (int i = 0; i < K; ++i) flat[i] = Load<U32V<L>>(words + i * L);
    GatherAll(flat);
    before = PreviousGroup<L>(word[K - 1], typename Lanes<L>::Indices{});
  }

  // States of row Row, columns 8 * Half .. 8 * Half + 7 of each tile.
  template <int Row, int Half>
  KILN_FN U32V<L> States() const {
    constexpr int q =
        8 * ((Row & 7) >> 1) + (Row & 1) + 2 * (Row >> 3) + 4 * Half;
    constexpr int end = (q + 1) * K;
    constexpr int low = (end - 1) / 32;
    constexpr int shift = 32 * (low + 1) - end;
    if constexpr (shift == 16) {
      return word[low] >> 16;
    } else if constexpr (shift + 16 <= 32) {
      return (word[low] >> shift) & 0xFFFFu;
    } else {
      U32V<L> high;
      if constexpr (low == 0) {
        high = before;
      } else {
        high = word[low - 1];
      }
      return ((word[low] >> shift) | (high << (32 - shift))) & 0xFFFFu;
    }
  }
};

// The weights of L states, exactly the values of DecodeState.
template <int CB, int L>
KILN_FN F32V<L> DecodeLanes(U32V<L> s) {
  using U = U32V<L>;
  using I = I32V<L>;
  using F = F32V<L>;
  if constexpr (CB == kCodebookMul1) {
    const U x = s * kMul1Multiplier;
    U sum = (x & 0x00FF00FFu) + ((x >> 8) & 0x00FF00FFu);
    sum = (sum & 0xFFFFu) + (sum >> 16);
    // 1024 + sum, through the fraction of a binary32 in [1024, 2048).
    const F biased = __builtin_bit_cast(F, (sum << 13) + 0x44800000u);
    constexpr float kScale = 0x1.BB8p-8f;    // binary16 bits 0x1EEE
    constexpr float kOffset = -0x1.4C4p+3f;  // binary16 bits 0xC931
    // The product has 22 bits and the sum fits 24: exact before rounding.
    return RoundHalves<L>(
        FmaLanes<F>(biased, Splat<L>(kScale), Splat<L>(kOffset)));
  } else {
    U x;
    if constexpr (CB == kCodebook3Inst) {
      x = s * k3InstMultiplier + k3InstAddend;
    } else {
      x = s * kMcgMultiplier;
    }
    // Masked halves have binary16 exponents 12..15, so a binary16 becomes a
    // binary32 by moving fraction and low exponent bits to 24..13; the
    // arithmetic shift keeps the sign at bit 31.
    constexpr i32 kKeep = static_cast<i32>(0x81FFE000u);
    constexpr i32 kFlip = 0x3F6C0000;  // 0x3B60 as a binary32
    const I high = ((__builtin_bit_cast(I, x) >> 3) & kKeep) ^ kFlip;
    const I low = ((__builtin_bit_cast(I, x << 16) >> 3) & kKeep) ^ kFlip;
    return RoundHalves<L>(__builtin_bit_cast(F, high) +
                          __builtin_bit_cast(F, low));
  }
}

}  // namespace kd

#endif  // KILN_DEVICE_CPU_VECTOR_H_
