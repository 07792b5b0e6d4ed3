#include "templates/fused_moe/trellis_codebook.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <iterator>

#include "compiler/base/check.h"
#include "device/half.h"
#include "device/trellis.h"
#include "templates/formats/mxfp8.h"

namespace kiln {
namespace {

constexpr uint32_t kStates = 65536;
constexpr uint32_t kHalfRanks = 0x8000;  // ranks below it are negative
constexpr int kSqgBitsMin = 2;
constexpr int kSqgBitsMax = 6;

// Where the positive half of the E4M3 staircase steps to the next code.
constexpr uint16_t kStaircase[] = {
    17,    51,    85,    119,   153,   187,   221,   255,   289,   323,
    357,   391,   426,   460,   494,   528,   579,   647,   715,   783,
    851,   919,   987,   1055,  1157,  1293,  1429,  1565,  1701,  1837,
    1973,  2108,  2312,  2583,  2854,  3124,  3395,  3665,  3934,  4203,
    4606,  5141,  5674,  6205,  6732,  7258,  7779,  8298,  9070,  10085,
    11084, 12065, 13026, 13967, 14885, 15781, 17081, 18725, 20265, 21696,
    23017, 24229, 25332, 26330, 27637, 29054, 30143, 30957, 31548, 31967,
    32255, 32447, 32617, 32717, 32753, 32764, 32767};

struct Segment {
  uint16_t base;   // binary16
  uint16_t slope;  // binary16
};

// The piecewise linear quantile of sqg_fp16 ("D3L").
constexpr Segment kSegments[104] = {
    {0x467D, 0x0000}, {0x461D, 0x0000}, {0x45EF, 0x0000}, {0x45D0, 0x0000},
    {0x45B8, 0x0000}, {0x45A5, 0x0000}, {0x4595, 0x0000}, {0x4587, 0x0000},
    {0x457B, 0x0000}, {0x4570, 0x0000}, {0x4566, 0x0000}, {0x455D, 0x0000},
    {0x4554, 0x0000}, {0x454C, 0x0000}, {0x4545, 0x0000}, {0x453E, 0x0000},
    {0x4532, 0x2600}, {0x4527, 0x2500}, {0x451C, 0x2500}, {0x4513, 0x2500},
    {0x450A, 0x2500}, {0x4502, 0x2400}, {0x44FB, 0x2400}, {0x44F4, 0x2200},
    {0x44E7, 0x2200}, {0x44DB, 0x2200}, {0x44D1, 0x20CD}, {0x44C7, 0x20CD},
    {0x44BE, 0x209A}, {0x44B5, 0x209A}, {0x44AE, 0x1E66}, {0x44A6, 0x2000},
    {0x4499, 0x1E92}, {0x448C, 0x1E55}, {0x4481, 0x1DAB}, {0x4477, 0x1D25},
    {0x446E, 0x1C92}, {0x4465, 0x1C00}, {0x445C, 0x1C92}, {0x4455, 0x1ADB},
    {0x4446, 0x1B4B}, {0x4439, 0x1A85}, {0x442D, 0x19DF}, {0x4422, 0x19A3},
    {0x4418, 0x192A}, {0x440F, 0x18D6}, {0x4406, 0x185D}, {0x43FB, 0x1848},
    {0x43DD, 0x178D}, {0x43C1, 0x16F0}, {0x43A7, 0x1650}, {0x4390, 0x15CD},
    {0x437A, 0x1571}, {0x4366, 0x1513}, {0x4353, 0x14BF}, {0x4341, 0x1472},
    {0x431F, 0x1424}, {0x4301, 0x1380}, {0x42E6, 0x12E0}, {0x42CD, 0x125A},
    {0x42B5, 0x11EE}, {0x429F, 0x1187}, {0x428A, 0x112B}, {0x4276, 0x10E7},
    {0x4252, 0x108B}, {0x4231, 0x1022}, {0x4212, 0x0F93}, {0x41F6, 0x0F05},
    {0x41DC, 0x0E8F}, {0x41C4, 0x0E23}, {0x41AC, 0x0DC7}, {0x4197, 0x0D74},
    {0x416E, 0x0D13}, {0x4149, 0x0CA1}, {0x4127, 0x0C44}, {0x4107, 0x0BEE},
    {0x40E9, 0x0B68}, {0x40CD, 0x0AF9}, {0x40B3, 0x0A98}, {0x409A, 0x0A40},
    {0x406B, 0x09D2}, {0x4041, 0x0957}, {0x4019, 0x08F4}, {0x3FE8, 0x08A0},
    {0x3FA3, 0x0859}, {0x3F61, 0x081C}, {0x3F22, 0x07D0}, {0x3EE7, 0x0774},
    {0x3E76, 0x06FD}, {0x3E0F, 0x067B}, {0x3DAE, 0x0611}, {0x3D52, 0x05B9},
    {0x3CFB, 0x056F}, {0x3CA8, 0x0531}, {0x3C59, 0x04FC}, {0x3C0C, 0x04CD},
    {0x3AF2, 0x0493}, {0x39DD, 0x0456}, {0x38D3, 0x0427}, {0x37A5, 0x0403},
    {0x35B1, 0x03E9}, {0x338C, 0x03D6}, {0x2F86, 0x03C9}, {0x004C, 0x03C3},
};

// A rank's side and its distance from the middle, 0..32767.
struct FoldedRank {
  bool negative;
  uint32_t magnitude;
};

FoldedRank Fold(uint32_t rank) {
  const uint32_t low = rank & (kHalfRanks - 1);
  if (rank >= kHalfRanks) return {.negative = false, .magnitude = low};
  return {.negative = true, .magnitude = low ^ (kHalfRanks - 1)};
}

uint8_t StaircaseByte(uint32_t rank) {
  const FoldedRank folded = Fold(rank);
  const auto code = static_cast<uint8_t>(
      std::upper_bound(std::begin(kStaircase), std::end(kStaircase),
                       folded.magnitude) -
      std::begin(kStaircase));
  return folded.negative && code != 0 ? static_cast<uint8_t>(code | 0x80)
                                      : code;
}

template <typename Decode>
TrellisTable MakeTable(const Decode& decode) {
  TrellisTable table;
  table.bits.resize(kStates);
  table.value.resize(kStates);
  for (uint32_t s = 0; s < kStates; ++s) {
    table.bits[s] = decode(s);
    table.value[s] = kd::f16_to_f32(table.bits[s]);
  }
  return table;
}

template <int CB>
const TrellisTable& Exl3Table() {
  static const TrellisTable table =
      MakeTable([](uint32_t s) { return kd::DecodeState<CB>(s); });
  return table;
}

template <int K>
const TrellisTable& SqgE4m3Table() {
  static const TrellisTable table = MakeTable([](uint32_t s) {  // Exact.
    return kd::f32_to_f16(E4m3Value(SqgE4m3Bytes()[SqgRank(s, K) >> 4]));
  });
  return table;
}

template <int K>
const TrellisTable& SqgFp16Table() {
  static const TrellisTable table =
      MakeTable([](uint32_t s) { return SqgFp16Value(SqgRank(s, K)); });
  return table;
}

}  // namespace

absl::string_view TrellisCodebook::name() const {
  switch (value_) {
    case k3Inst:
    case kMcg:
    case kMul1:
      return CodebookName(*request());
    case kSqgE4m3:
      return "sqg_e4m3";
    case kSqgFp16:
      return "sqg_fp16";
  }
  KILN_UNREACHABLE();
}

std::optional<Codebook> TrellisCodebook::request() const {
  if (value_ > kMul1) return std::nullopt;
  return static_cast<Codebook>(value_);
}

int TrellisCodebook::bits_min() const {
  return value_ == kSqgE4m3 ? 2 : value_ == kSqgFp16 ? 5 : 1;
}

int TrellisCodebook::bits_max() const {
  return value_ == kSqgE4m3 ? 4 : value_ == kSqgFp16 ? 6 : 8;
}

uint32_t SqgRank(uint32_t state, int bits) {
  KILN_CHECK(bits >= kSqgBitsMin && bits <= kSqgBitsMax);
  const auto k = static_cast<uint32_t>(bits);
  const uint32_t width = 16 - k;
  const uint32_t mask = (1u << width) - 1;
  const uint32_t branch = state & ((1u << k) - 1);
  uint32_t x = state >> k;
  x ^= x >> 11;
  x ^= x << 11 & mask;
  const uint32_t p = 0x3FA7D929u * x + 0xC928FD8Eu;
  uint32_t reversed = 0;
  for (uint32_t i = 0; i < k; ++i) {
    reversed |= (branch >> i & 1) << (k - 1 - i);
  }
  return (reversed ^ p >> (32 - k)) << width | (p & mask);
}

const std::vector<uint8_t>& SqgE4m3Bytes() {
  static const std::vector<uint8_t> bytes = [] {
    constexpr uint32_t kGroup = 16;
    std::vector<uint8_t> most(kStates / kGroup);
    for (uint32_t q = 0; q < most.size(); ++q) {
      std::array<int, 256> votes{};
      for (uint32_t i = 0; i < kGroup; ++i) {
        ++votes[StaircaseByte(kGroup * q + i)];
      }
      // The first of the largest counts: ties go to the smallest byte.
      most[q] = static_cast<uint8_t>(
          std::max_element(votes.begin(), votes.end()) - votes.begin());
    }
    return most;
  }();
  return bytes;
}

uint16_t SqgFp16Value(uint32_t rank) {
  const FoldedRank folded = Fold(rank);
  const uint32_t v = 65535 - 2 * folded.magnitude;  // odd, 1..65535
  const auto e = static_cast<uint32_t>(std::bit_width(v)) - 1;
  const uint32_t d = v - (1u << e);
  uint32_t index = 0;
  uint32_t place = 0;
  if (e == 0) {
    index = 0;
  } else if (e <= 3) {
    index = (1u << (e - 1)) + ((d - 1) >> 1);
  } else {
    const uint32_t shift = e - 3;
    const uint32_t sub = d >> shift;
    index = 8 * shift + sub;
    place = ((1u << e) + (sub << shift) + (1u << shift) - 1 - v) >> 1;
  }
  KILN_CHECK(index < std::size(kSegments));
  const uint16_t value = kd::hfma(kSegments[index].slope,
                                  kd::f32_to_f16(static_cast<float>(place)),
                                  kSegments[index].base);
  return folded.negative ? static_cast<uint16_t>(value ^ 0x8000) : value;
}

const TrellisTable& TrellisTableOf(TrellisCodebook codebook, int bits) {
  KILN_CHECK(bits >= codebook.bits_min() && bits <= codebook.bits_max());
  switch (codebook) {
    case TrellisCodebook::k3Inst:
      return Exl3Table<kd::kCodebook3Inst>();
    case TrellisCodebook::kMcg:
      return Exl3Table<kd::kCodebookMcg>();
    case TrellisCodebook::kMul1:
      return Exl3Table<kd::kCodebookMul1>();
    case TrellisCodebook::kSqgE4m3:
      return bits == 2   ? SqgE4m3Table<2>()
             : bits == 3 ? SqgE4m3Table<3>()
                         : SqgE4m3Table<4>();
    case TrellisCodebook::kSqgFp16:
      return bits == 5 ? SqgFp16Table<5>() : SqgFp16Table<6>();
  }
  KILN_UNREACHABLE();
}

}  // namespace kiln
