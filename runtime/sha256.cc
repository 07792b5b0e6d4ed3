#include "runtime/sha256.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

// FIPS 180-4 §4.2.2: first 32 bits of the fractional parts of the cube roots
// of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

inline uint32_t Rotate(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

inline uint32_t LoadBigEndian(const uint8_t* p) {
  return (uint32_t{p[0]} << 24) | (uint32_t{p[1]} << 16) |
         (uint32_t{p[2]} << 8) | uint32_t{p[3]};
}

void CompressPortable(uint32_t* state, const uint8_t* data, size_t blocks) {
  for (; blocks > 0; --blocks, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = LoadBigEndian(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 =
          Rotate(w[i - 15], 7) ^ Rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 =
          Rotate(w[i - 2], 17) ^ Rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = Rotate(e, 6) ^ Rotate(e, 11) ^ Rotate(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t s0 = Rotate(a, 2) ^ Rotate(a, 13) ^ Rotate(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + t2;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
  }
}

#if defined(__x86_64__)

// Blocks of kLanes independent messages, interleaved: one message alone waits
// for the latency of SHA256RNDS2, a second one fills the gaps.
//
// That instruction keeps the state as the pairs ABEF and CDGH (Intel SDM
// vol. 2, SHA256RNDS2); two rounds per instruction.
template <int kLanes>
__attribute__((target("sha,sse4.1,ssse3"))) inline void CompressLanes(
    uint32_t* const* states, const uint8_t* const* data, size_t blocks) {
  const __m128i swap =
      _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i abef[kLanes];
  __m128i cdgh[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    // state = a b c d | e f g h (ascending lanes).
    const auto* state = reinterpret_cast<const __m128i*>(states[l]);
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(state), 0xB1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(state + 1), 0x1B);
    abef[l] = _mm_alignr_epi8(cdab, efgh, 8);
    cdgh[l] = _mm_blend_epi16(efgh, cdab, 0xF0);
  }

  for (size_t block = 0; block < blocks; ++block) {
    __m128i abef_in[kLanes];
    __m128i cdgh_in[kLanes];
    __m128i w[kLanes][4];
    for (int l = 0; l < kLanes; ++l) {
      abef_in[l] = abef[l];
      cdgh_in[l] = cdgh[l];
      const auto* in = reinterpret_cast<const __m128i*>(data[l] + 64 * block);
      for (int i = 0; i < 4; ++i) {
        w[l][i] = _mm_shuffle_epi8(_mm_loadu_si128(in + i), swap);
      }
    }
    for (int i = 0; i < 16; ++i) {
      const __m128i round =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i));
      for (int l = 0; l < kLanes; ++l) {
        const __m128i schedule = w[l][i & 3];
        __m128i sum = _mm_add_epi32(schedule, round);
        cdgh[l] = _mm_sha256rnds2_epu32(cdgh[l], abef[l], sum);
        sum = _mm_shuffle_epi32(sum, 0x0E);
        abef[l] = _mm_sha256rnds2_epu32(abef[l], cdgh[l], sum);
        if (i < 12) {
          // Words 4i+16 .. 4i+19 from the four groups now in the ring.
          const __m128i w1 = w[l][(i + 1) & 3];
          const __m128i w2 = w[l][(i + 2) & 3];
          const __m128i w3 = w[l][(i + 3) & 3];
          __m128i next = _mm_sha256msg1_epu32(schedule, w1);
          next = _mm_add_epi32(next, _mm_alignr_epi8(w3, w2, 4));
          w[l][i & 3] = _mm_sha256msg2_epu32(next, w3);
        }
      }
    }
    for (int l = 0; l < kLanes; ++l) {
      abef[l] = _mm_add_epi32(abef[l], abef_in[l]);
      cdgh[l] = _mm_add_epi32(cdgh[l], cdgh_in[l]);
    }
  }

  for (int l = 0; l < kLanes; ++l) {
    const __m128i feba = _mm_shuffle_epi32(abef[l], 0x1B);
    const __m128i dchg = _mm_shuffle_epi32(cdgh[l], 0xB1);
    auto* state = reinterpret_cast<__m128i*>(states[l]);
    _mm_storeu_si128(state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(state + 1, _mm_alignr_epi8(dchg, feba, 8));
  }
}

__attribute__((target("sha,sse4.1,ssse3"))) void CompressExtensions(
    uint32_t* state, const uint8_t* data, size_t blocks) {
  CompressLanes<1>(&state, &data, blocks);
}

__attribute__((target("sha,sse4.1,ssse3"))) void CompressPairExtensions(
    uint32_t* const* states, const uint8_t* const* data, size_t blocks) {
  CompressLanes<2>(states, data, blocks);
}

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// Sixteen messages, one in each 32-bit lane: all of FIPS 180-4 §6.2.2 in the
// order of the standard, sixteen numbers at a time. Faster for each byte than
// the SHA extensions are, if there are enough messages.
constexpr size_t kManyLanes = 16;

struct Lanes {
  __m512i row[kManyLanes];
};

// Word i of every message into row i, from rows of 16 big-endian words of one
// message each.
__attribute__((target("avx512f,avx512bw"))) inline void Transpose(
    Lanes* lanes) {
  __m512i* r = lanes->row;
  // Lane k of four[g][c] holds word 4k + c of messages 4g .. 4g + 3.
  __m512i four[4][4];
  for (int g = 0; g < 4; ++g) {
    const __m512i low01 = _mm512_unpacklo_epi32(r[4 * g], r[4 * g + 1]);
    const __m512i high01 = _mm512_unpackhi_epi32(r[4 * g], r[4 * g + 1]);
    const __m512i low23 = _mm512_unpacklo_epi32(r[4 * g + 2], r[4 * g + 3]);
    const __m512i high23 = _mm512_unpackhi_epi32(r[4 * g + 2], r[4 * g + 3]);
    four[g][0] = _mm512_unpacklo_epi64(low01, low23);
    four[g][1] = _mm512_unpackhi_epi64(low01, low23);
    four[g][2] = _mm512_unpacklo_epi64(high01, high23);
    four[g][3] = _mm512_unpackhi_epi64(high01, high23);
  }
  constexpr int kEven = 0x88;  // lanes 0 and 2 of both operands
  constexpr int kOdd = 0xdd;   // lanes 1 and 3
  for (int c = 0; c < 4; ++c) {
    const __m512i even01 = _mm512_shuffle_i32x4(four[0][c], four[1][c], kEven);
    const __m512i even23 = _mm512_shuffle_i32x4(four[2][c], four[3][c], kEven);
    const __m512i odd01 = _mm512_shuffle_i32x4(four[0][c], four[1][c], kOdd);
    const __m512i odd23 = _mm512_shuffle_i32x4(four[2][c], four[3][c], kOdd);
    r[c] = _mm512_shuffle_i32x4(even01, even23, kEven);
    r[4 + c] = _mm512_shuffle_i32x4(odd01, odd23, kEven);
    r[8 + c] = _mm512_shuffle_i32x4(even01, even23, kOdd);
    r[12 + c] = _mm512_shuffle_i32x4(odd01, odd23, kOdd);
  }
}

// Bitwise functions of three operands, as truth tables of VPTERNLOG.
constexpr int kXor3 = 0x96;
constexpr int kChoose = 0xca;
constexpr int kMajority = 0xe8;

// `blocks` blocks of each message; state[i] holds word i of every state.
__attribute__((target("avx512f,avx512bw"))) void CompressMany(
    __m512i* state, const uint8_t* const* data, size_t blocks) {
  const __m512i swap =
      _mm512_set4_epi32(0x0c0d0e0f, 0x08090a0b, 0x04050607, 0x00010203);
  for (size_t block = 0; block < blocks; ++block) {
    Lanes w;
    for (size_t l = 0; l < kManyLanes; ++l) {
      w.row[l] =
          _mm512_shuffle_epi8(_mm512_loadu_si512(data[l] + 64 * block), swap);
    }
    Transpose(&w);
    __m512i a = state[0], b = state[1], c = state[2], d = state[3];
    __m512i e = state[4], f = state[5], g = state[6], h = state[7];
#pragma GCC unroll 64
    for (int i = 0; i < 64; ++i) {
      __m512i word = w.row[i & 15];
      if (i >= 16) {
        const __m512i w15 = w.row[(i + 1) & 15];
        const __m512i w2 = w.row[(i + 14) & 15];
        const __m512i s0 = _mm512_ternarylogic_epi32(
            _mm512_ror_epi32(w15, 7), _mm512_ror_epi32(w15, 18),
            _mm512_srli_epi32(w15, 3), kXor3);
        const __m512i s1 = _mm512_ternarylogic_epi32(
            _mm512_ror_epi32(w2, 17), _mm512_ror_epi32(w2, 19),
            _mm512_srli_epi32(w2, 10), kXor3);
        word = _mm512_add_epi32(_mm512_add_epi32(word, s0),
                                _mm512_add_epi32(w.row[(i + 9) & 15], s1));
        w.row[i & 15] = word;
      }
      const __m512i s1 = _mm512_ternarylogic_epi32(
          _mm512_ror_epi32(e, 6), _mm512_ror_epi32(e, 11),
          _mm512_ror_epi32(e, 25), kXor3);
      const __m512i s0 = _mm512_ternarylogic_epi32(
          _mm512_ror_epi32(a, 2), _mm512_ror_epi32(a, 13),
          _mm512_ror_epi32(a, 22), kXor3);
      const __m512i constant = _mm512_set1_epi32(static_cast<int>(kRound[i]));
      const __m512i t1 = _mm512_add_epi32(
          _mm512_add_epi32(_mm512_add_epi32(h, constant), word),
          _mm512_add_epi32(s1, _mm512_ternarylogic_epi32(e, f, g, kChoose)));
      const __m512i t2 =
          _mm512_add_epi32(s0, _mm512_ternarylogic_epi32(a, b, c, kMajority));
      h = g;
      g = f;
      f = e;
      e = _mm512_add_epi32(d, t1);
      d = c;
      c = b;
      b = a;
      a = _mm512_add_epi32(t1, t2);
    }
    state[0] = _mm512_add_epi32(state[0], a);
    state[1] = _mm512_add_epi32(state[1], b);
    state[2] = _mm512_add_epi32(state[2], c);
    state[3] = _mm512_add_epi32(state[3], d);
    state[4] = _mm512_add_epi32(state[4], e);
    state[5] = _mm512_add_epi32(state[5], f);
    state[6] = _mm512_add_epi32(state[6], g);
    state[7] = _mm512_add_epi32(state[7], h);
  }
}

// `blocks` blocks of 1 to 16 messages; states are those of separate messages.
__attribute__((target("avx512f,avx512bw"))) void CompressManyStates(
    kiln_sha256_t* hashes, size_t count, const uint8_t* const* data,
    size_t blocks) {
  // Lanes without a message repeat the first one.
  const uint8_t* in[kManyLanes];
  alignas(64) uint32_t words[8][kManyLanes];
  for (size_t l = 0; l < kManyLanes; ++l) {
    const size_t from = l < count ? l : 0;
    in[l] = data[from];
    for (size_t i = 0; i < 8; ++i) words[i][l] = hashes[from].state[i];
  }
  __m512i state[8];
  for (size_t i = 0; i < 8; ++i) state[i] = _mm512_load_si512(words[i]);
  CompressMany(state, in, blocks);
  for (size_t i = 0; i < 8; ++i) _mm512_store_si512(words[i], state[i]);
  for (size_t l = 0; l < count; ++l) {
    for (size_t i = 0; i < 8; ++i) hashes[l].state[i] = words[i][l];
    hashes[l].bytes += 64 * blocks;
  }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

// AVX-512 F and BW, and an operating system that keeps their registers.
bool HasAvx512() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (1u << 27)) == 0) return false;
  unsigned enabled = 0, high = 0;
  __asm__("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
  if ((enabled & 0xe6) != 0xe6) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (b & (1u << 16)) != 0 && (b & (1u << 30)) != 0;
}

bool HasExtensions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool sha = (b & (1u << 29)) != 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const bool sse41 = (c & (1u << 19)) != 0;
  const bool ssse3 = (c & (1u << 9)) != 0;
  return sha && sse41 && ssse3;
}

#endif

void CompressPairPortable(uint32_t* const* states, const uint8_t* const* data,
                          size_t blocks) {
  for (int l = 0; l < 2; ++l) CompressPortable(states[l], data[l], blocks);
}

struct Functions {
  void (*compress)(uint32_t* state, const uint8_t* data, size_t blocks);
  void (*compress_pair)(uint32_t* const* states, const uint8_t* const* data,
                        size_t blocks);
  // Null where two at a time is the best there is.
  void (*compress_many)(kiln_sha256_t* hashes, size_t count,
                        const uint8_t* const* data, size_t blocks);
};

constexpr Functions kPortable = {CompressPortable, CompressPairPortable,
                                 nullptr};

Functions Choose() {
  Functions functions = kPortable;
#if defined(__x86_64__)
  if (HasExtensions()) {
    functions.compress = CompressExtensions;
    functions.compress_pair = CompressPairExtensions;
  }
  if (HasAvx512()) functions.compress_many = CompressManyStates;
#endif
  return functions;
}

// Constant at first: other files hash in their static initialisers.
Functions g_functions = kPortable;
[[maybe_unused]] const bool g_chosen = (g_functions = Choose(), true);

}  // namespace

extern "C" {

void kiln_sha256_init(kiln_sha256_t* hash) {
  // FIPS 180-4 §5.3.3.
  static const uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372,
                                       0xa54ff53a, 0x510e527f, 0x9b05688c,
                                       0x1f83d9ab, 0x5be0cd19};
  memcpy(hash->state, kInitial, sizeof(kInitial));
  hash->bytes = 0;
}

void kiln_sha256_update(kiln_sha256_t* hash, const void* data, size_t bytes) {
  const uint8_t* in = static_cast<const uint8_t*>(data);
  const size_t held = static_cast<size_t>(hash->bytes % 64);
  hash->bytes += bytes;
  if (held != 0) {
    const size_t take = bytes < 64 - held ? bytes : 64 - held;
    if (take != 0) memcpy(hash->block + held, in, take);
    in += take;
    bytes -= take;
    if (held + take < 64) return;
    g_functions.compress(hash->state, hash->block, 1);
  }
  const size_t blocks = bytes / 64;
  if (blocks != 0) g_functions.compress(hash->state, in, blocks);
  const size_t rest = bytes % 64;
  if (rest != 0) memcpy(hash->block, in + blocks * 64, rest);
}

void kiln_sha256_final(kiln_sha256_t* hash, uint8_t* digest) {
  const uint64_t bits = hash->bytes * 8;
  size_t held = static_cast<size_t>(hash->bytes % 64);
  hash->block[held++] = 0x80;
  if (held > 56) {
    memset(hash->block + held, 0, 64 - held);
    g_functions.compress(hash->state, hash->block, 1);
    held = 0;
  }
  memset(hash->block + held, 0, 56 - held);
  for (int i = 0; i < 8; ++i) {
    hash->block[56 + i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  }
  g_functions.compress(hash->state, hash->block, 1);
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 4; ++j) {
      digest[4 * i + j] = static_cast<uint8_t>(hash->state[i] >> (24 - 8 * j));
    }
  }
}

void kiln_sha256(const void* data, size_t bytes, uint8_t* digest) {
  kiln_sha256_t hash;
  kiln_sha256_init(&hash);
  kiln_sha256_update(&hash, data, bytes);
  kiln_sha256_final(&hash, digest);
}

void kiln_sha256_many(const uint8_t (*heads)[64], const void* const* tails,
                      size_t bytes, size_t count, uint8_t* digests) {
  // So few messages leave too many lanes idle.
  constexpr size_t kManyMin = 6;
  constexpr size_t kAtOnce = 16;
  const size_t blocks = bytes / 64;
  while (count > 0) {
    kiln_sha256_t hashes[kAtOnce];
    const uint8_t* in[kAtOnce];
    const bool many = g_functions.compress_many != nullptr && count >= kManyMin;
    const size_t most = many ? kAtOnce : 2;
    const size_t take = count < most ? count : most;
    for (size_t i = 0; i < take; ++i) {
      in[i] = static_cast<const uint8_t*>(tails[i]);
      kiln_sha256_init(&hashes[i]);
      kiln_sha256_update(&hashes[i], heads[i], 64);
    }
    if (many) {
      g_functions.compress_many(hashes, take, in, blocks);
    } else if (take == 2) {
      uint32_t* const states[2] = {hashes[0].state, hashes[1].state};
      g_functions.compress_pair(states, in, blocks);
      for (size_t i = 0; i < 2; ++i) hashes[i].bytes += 64 * blocks;
    } else {
      kiln_sha256_update(&hashes[0], in[0], 64 * blocks);
    }
    for (size_t i = 0; i < take; ++i) {
      kiln_sha256_update(&hashes[i], in[i] + 64 * blocks, bytes % 64);
      kiln_sha256_final(&hashes[i], digests);
      digests += KILN_SHA256_BYTES;
    }
    heads += take;
    tails += take;
    count -= take;
  }
}

void kiln_sha256_allow_extensions(int allow) {
  g_functions = allow != 0 ? Choose() : kPortable;
  if (allow == 2) g_functions.compress_many = nullptr;
}

}  // extern "C"
