// What the seeded workloads of all ops are made of: a random generator, numbers
// as buffers hold them, weights, scales, and fills of golden replay.

#ifndef KILN_TEMPLATES_SEEDED_VALUES_H_
#define KILN_TEMPLATES_SEEDED_VALUES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/spec/buffer_fill.h"
#include "compiler/spec/dtype.h"

namespace kiln {

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
// generators", OOPSLA 2014).
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // In [0, 1).
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

  // In [0, bound); the bias of at most bound / 2^64 does not matter here.
  uint64_t Below(uint64_t bound) { return Next() % bound; }

  // Sum of three uniforms: bell-shaped, variance one, bounded by 3.
  double Bell() { return 2 * (Unit() + Unit() + Unit() - 1.5); }

 private:
  uint64_t state_;
};

// Independent streams of one seed.
uint64_t MixSeed(uint64_t seed, uint64_t a, uint64_t b, uint64_t c);

// Appends the bytes of a value.
template <class T>
void AppendBytes(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// As binary16, to nearest even.
void AppendHalf(std::string* out, double value);

// As bfloat16 or binary16, to nearest even.
void AppendNarrow(std::string* out, float value, bool bf16);

// Signed binary16 scales around `magnitude`, as EXL3 stores them: the random
// sign of the incoherence rotation is folded in.
std::string MakeScales(uint64_t count, double magnitude, uint64_t seed);

// Any words: every trellis payload is valid.
std::string MakeWords(uint64_t bytes, uint64_t seed);

// Floats of magnitude [2^exponent, 2^(exponent + 1)) with any mantissa.
BufferFill FloatFill(DType dtype, int exponent, bool with_sign);

// Sets how large the buffers are, by slot.
//   none, one: bytes for no token and for one; as many as there are fills.
void SetFillBytes(const std::vector<uint64_t>& none,
                  const std::vector<uint64_t>& one,
                  std::vector<BufferFill>* fills);

}  // namespace kiln

#endif  // KILN_TEMPLATES_SEEDED_VALUES_H_
