// MXFP8: E4M3 numbers in blocks of 32 with one UE8M0 scale, 2^(byte - 127).
//
// Source: trellis format specification, section 4.6 (the exact-bit rule) and
// section 6, decisions 6 to 8.

#ifndef KILN_TEMPLATES_FORMATS_MXFP8_H_
#define KILN_TEMPLATES_FORMATS_MXFP8_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kiln {

inline constexpr size_t kMxfp8Block = 32;
inline constexpr uint8_t kScaleOne = 127;  // 2^0
inline constexpr uint8_t kScaleNan = 255;  // reserved: the block is no number
inline constexpr uint8_t kE4m3Nan = 0x7F;

// Value of an E4M3FN byte; NaN for 0x7F and 0xFF.
float E4m3Value(uint8_t code);

// Nearest E4M3FN, ties to even, at most 448 in magnitude; the sign of zero
// stays. NaN becomes 0x7F.
uint8_t E4m3Of(double value);

// 2^(byte - 127); NaN for 255.
double Ue8m0Value(uint8_t byte);

// The scale of a block whose largest magnitude is `amax`, from the bits of
// fl32(amax / 448): the least power of two that is not below it. 127 for 0, 255
// for an infinity or NaN.
uint8_t Mxfp8ScaleOf(float amax);

// Quantises one block. A block with an infinity or NaN becomes all NaN, scale
// 255, so that it shows in every result it enters.
void QuantizeMxfp8(std::span<const float, kMxfp8Block> values, uint8_t* scale,
                   std::span<uint8_t, kMxfp8Block> payload);

// Value of one element of a block.
inline double Mxfp8Value(uint8_t scale, uint8_t code) {
  return E4m3Value(code) * Ue8m0Value(scale);
}

// Two orders of the 32 bytes of an activation block, for tensor cores that take
// the states of two trellis tiles as they lie: stored byte i holds element
// order[i].
//   kSqgOrder: format specification 3.6; lanes exchange words in pairs.
//   kNpkOrder: prepared-weights specification A.9.3; no exchange.
extern const std::array<uint8_t, kMxfp8Block> kSqgOrder;
extern const std::array<uint8_t, kMxfp8Block> kNpkOrder;

// Byte of the scale of (row, group of 32) in the plane that a block-scaled
// matrix instruction reads: 128 rows and 4 groups in 512 bytes.
//   groups: of one row, at least 1.
size_t ScaleMmaOffset(size_t row, size_t group, size_t groups);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_MXFP8_H_
