#include "templates/linear/workload.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "templates/device/hadamard.h"
#include "templates/linear/reference.h"
#include "templates/seeded_values.h"

namespace kiln {
namespace {

constexpr uint64_t kStreamWeights = 1;
constexpr uint64_t kStreamScales = 2;
constexpr uint64_t kStreamTokens = 3;

constexpr double kBiasMagnitude = 0.5;

// What is special about a token of an extreme draw.
struct ExtremeToken {
  double magnitude = 1;  // factor of x
  double poison = 0;     // added to one channel
  bool all = false;      // or to all channels
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Rotated operands have a standard deviation near the factor: 14 of them are
// the largest binary16, so that large ones stay finite.
constexpr double kLarge = 65504.0 / 14;
// Some rotated operands are infinite, and so nothing of the row is finite.
constexpr double kHuge = 65504.0 / 2;
// Rotated operands are subnormal binary16 numbers.
constexpr double kTiny = 0x1p-16;

constexpr ExtremeToken kExtremeTokens[kDistinctTokens] = {
    {.magnitude = kLarge},
    {.magnitude = 0x1p-6},
    {},
    {.poison = kNan},
    {.magnitude = kTiny},
    {.poison = kNan, .all = true},
    {.magnitude = 0},
    {.poison = -kInfinity},
    {.magnitude = -1},
    {.magnitude = kHuge},
    {.poison = kInfinity, .all = true},
    {.magnitude = -kLarge},
    {},
};

}  // namespace

std::vector<BufferFill> LinearBuffers(const RequestGeometry& geometry) {
  // A dot product of n terms of order one grows by sqrt(n).
  const int shrink = -static_cast<int>(std::lround(
      std::log2(std::sqrt(static_cast<double>(geometry.linear.in_features)))));
  std::vector<BufferFill> out = {
      FloatFill(geometry.io_dtype, -1, true),
      {.kind = BufferFill::Kind::kWords, .element_bytes = 2, .a = 0xffff},
      FloatFill(DType::kF16, -1, true),
      FloatFill(DType::kF16, shrink, true)};
  if (geometry.linear.bias) out.push_back(FloatFill(DType::kF16, -1, true));
  out.push_back({.kind = BufferFill::Kind::kNone, .element_bytes = 4});
  SetFillBytes(LinearBytes(geometry, 0), LinearBytes(geometry, 1), &out);
  return out;
}

LinearWorkload::LinearWorkload(const RequestGeometry& geometry, uint64_t seed)
    : OpWorkload(geometry, geometry.linear.out_features), seed_(seed) {
  const std::vector<uint64_t> bytes = LinearBytes(geometry, 0);
  constants_.resize(bytes.size());
  const uint32_t w = LinearSlotOf(geometry, LinearParam::kW);
  constants_[w] = MakeWords(bytes[w], MixSeed(seed, kStreamWeights, w, 0));
  const auto scales = [&](LinearParam param, double magnitude) {
    const uint32_t slot = LinearSlotOf(geometry, param);
    constants_[slot] = MakeScales(bytes[slot] / 2, magnitude,
                                  MixSeed(seed, kStreamScales, slot, 0));
  };
  scales(LinearParam::kSuh, 1);
  std::string& suh = constants_[LinearSlotOf(geometry, LinearParam::kSuh)];
  for (size_t at = 0; at < kd::kHadamardSize * 2; at += 2) {
    uint16_t bits = 0;
    std::memcpy(&bits, suh.data() + at, 2);
    bits = (bits & 0x8000u) | 0x3C00u;
    std::memcpy(suh.data() + at, &bits, 2);
  }
  // Decoded weights have about unit variance, so a dot product over n inputs
  // grows by sqrt(n); the output-side scale takes that back.
  scales(LinearParam::kSvh,
         1 / std::sqrt(static_cast<double>(geometry.linear.in_features)));
  if (geometry.linear.bias) scales(LinearParam::kBias, kBiasMagnitude);
}

absl::string_view LinearWorkload::Constant(size_t slot) const {
  return constants_[slot];
}

double LinearWorkload::OneTermValue(uint32_t token, int64_t channel) const {
  if (channel >= kd::kHadamardSize) return 0;
  // Row r of the Hadamard matrix has the sign (-1)^popcount(r and c) in column
  // c; it is rotated into channel r alone.
  const uint32_t row = (token * 37 + 11) % kd::kHadamardSize;
  const bool minus =
      std::popcount(row & static_cast<uint32_t>(channel)) % 2 == 1;
  uint16_t scale = 0;
  std::memcpy(&scale, ConstantOf(LinearParam::kSuh).data() + channel * 2, 2);
  // A power of two near sqrt(in / 128), so that results are of order one.
  const double size = std::exp2(std::round(
      0.5 * std::log2(static_cast<double>(geometry().linear.in_features) /
                      kd::kHadamardSize)));
  return minus != (scale >> 15 != 0) ? -size : size;
}

void LinearWorkload::AppendToken(DrawKind kind, uint32_t draw, uint32_t token,
                                 std::string* x) const {
  token = FirstAlike(kind, token);
  SplitMix64 random(MixSeed(
      seed_, kStreamTokens + (static_cast<uint64_t>(kind) << 8), draw, token));
  ExtremeToken extreme;
  if (kind == DrawKind::kExtreme) extreme = kExtremeTokens[token];
  const int64_t channels = geometry().linear.in_features;
  for (int64_t c = 0; c < channels; ++c) {
    double value = random.Bell() * extreme.magnitude;  // zeros keep their signs
    if (kind == DrawKind::kOneTerm) value = OneTermValue(token, c);
    // One channel of the last block, or all.
    if (extreme.all || c == channels - 5) value += extreme.poison;
    AppendNarrow(x, static_cast<float>(value),
                 geometry().io_dtype == DType::kBf16);
  }
}

std::vector<std::string> LinearWorkload::TokenInputs(DrawKind kind,
                                                     uint32_t draw,
                                                     uint32_t tokens) const {
  std::vector<std::string> slots(constants_.size());
  std::string& x = slots[LinearSlotOf(geometry(), LinearParam::kX)];
  for (uint32_t t = 0; t < tokens; ++t) AppendToken(kind, draw, t, &x);
  return slots;
}

std::vector<double> LinearWorkload::Evaluate(DrawKind kind, uint32_t draw,
                                             const std::vector<int64_t>& rows,
                                             int threads,
                                             ReferenceMode mode) const {
  const auto tokens =
      static_cast<uint32_t>(*std::max_element(rows.begin(), rows.end()) + 1);
  const std::vector<std::string> inputs = TokenInputs(kind, draw, tokens);
  const auto half = [this](LinearParam param) {
    return reinterpret_cast<const uint16_t*>(ConstantOf(param).data());
  };
  const LinearShape& shape = geometry().linear;
  LinearProblem problem;
  problem.tokens = tokens;
  problem.in_features = shape.in_features;
  problem.out_features = shape.out_features;
  problem.codebook = geometry().weights.codebook;
  problem.bits = shape.bits;
  problem.x_dtype = geometry().io_dtype;
  problem.x = inputs[LinearSlotOf(geometry(), LinearParam::kX)].data();
  problem.w = half(LinearParam::kW);
  problem.suh = half(LinearParam::kSuh);
  problem.svh = half(LinearParam::kSvh);
  if (shape.bias) problem.bias = half(LinearParam::kBias);
  std::vector<double> result(rows.size() * row_width());
  LinearReferenceRows(problem, rows, mode, result.data(), threads);
  return result;
}

namespace {

class Contract : public OpContract {
 public:
  std::vector<ParamDecl> Params(
      const RequestGeometry& geometry) const override {
    return LinearParams(geometry);
  }

  std::vector<BufferFill> Buffers(
      const RequestGeometry& geometry) const override {
    return LinearBuffers(geometry);
  }

  OpWork Work(const RequestGeometry& geometry) const override {
    const LinearShape& shape = geometry.linear;
    const auto in = static_cast<double>(shape.in_features);
    const auto out = static_cast<double>(shape.out_features);
    OpWork work;
    work.matrices = {{.slot = LinearSlotOf(geometry, LinearParam::kW),
                      .weights = in * out,
                      .bits = shape.bits}};
    work.scale_bytes = (in + out + (shape.bias ? out : 0)) * 2;
    work.token_bytes = in * 2 + out * 4;
    work.reads_all_weights = true;
    return work;
  }

  double TilesExpected(const RequestGeometry& geometry, uint32_t tile,
                       uint32_t m) const override {
    return static_cast<double>(TilesMax(geometry, tile, m));
  }

  uint64_t TilesMax(const RequestGeometry&, uint32_t tile,
                    uint32_t m) const override {
    return (uint64_t{m} + tile - 1) / tile;
  }

  std::unique_ptr<OpWorkload> MakeWorkload(const RequestGeometry& geometry,
                                           uint64_t seed) const override {
    return std::make_unique<LinearWorkload>(geometry, seed);
  }
};

}  // namespace

const OpContract& LinearContract() {
  static const auto* const contract = new Contract;
  return *contract;
}

}  // namespace kiln
