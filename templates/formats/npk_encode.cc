#include "templates/formats/npk_encode.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "device/half.h"
#include "templates/formats/encoder_matrix.h"
#include "templates/formats/mxfp8.h"
#include "templates/formats/npk_decode.h"
#include "templates/formats/npk_header.h"
#include "templates/formats/npk_law.h"

namespace kiln {
namespace {

using Reals = std::vector<double>;

constexpr size_t kOuter = 512;
constexpr size_t kInner = 128;
constexpr size_t kGroup = 32;
constexpr int kRefits = 2;
constexpr double kHalfMin = 0x1p-14;
constexpr double kHalfMax = 65504;
constexpr char kEncoderName[] = "kiln npk1 encoder 1";

std::vector<float> NpkAlphabet() {
  std::vector<float> values(kTileStates);
  for (uint32_t s = 0; s < kTileStates; ++s) {
    values[s] = E4m3Value(kd::NpkByte(s));
  }
  return values;
}

// Binary16 of a scale that may be neither zero nor infinite. Blocks make up for
// what the limits take away.
uint16_t ScaleOf(double value, double sign) {
  const double magnitude =
      value == 0 ? 1 : std::clamp(std::abs(value), kHalfMin, kHalfMax);
  return kd::f32_to_f16(static_cast<float>(sign * magnitude));
}

std::vector<uint16_t> ScalesOf(const Reals& norms, double factor,
                               uint64_t seed) {
  const Reals signs = RandomSigns(seed, norms.size());
  std::vector<uint16_t> scales(norms.size());
  for (size_t i = 0; i < norms.size(); ++i) {
    scales[i] = ScaleOf(norms[i] / factor, signs[i]);
  }
  return scales;
}

double Half(uint16_t bits) { return kd::f16_to_f32(bits); }

// The scale itself, or its inverse.
double Factor(uint16_t bits, bool divide) {
  return divide ? 1 / Half(bits) : Half(bits);
}

void ScaleRows(const std::vector<uint16_t>& scales, bool divide,
               Reals* matrix) {
  const size_t columns = matrix->size() / scales.size();
  for (size_t i = 0; i < matrix->size(); ++i) {
    (*matrix)[i] *= Factor(scales[i / columns], divide);
  }
}

void ScaleColumns(const std::vector<uint16_t>& scales, bool divide,
                  Reals* matrix) {
  for (size_t i = 0; i < matrix->size(); ++i) {
    (*matrix)[i] *= Factor(scales[i % scales.size()], divide);
  }
}

// e with value * 2^-e within [2^-1/2, 2^1/2).
int NearestPower(double value) {
  int exponent = 0;
  return std::frexp(value, &exponent) < std::sqrt(0.5) ? exponent - 1
                                                       : exponent;
}

// What one layer has in common.
struct Geometry {
  size_t hidden;
  size_t inter;  // of all ranks
  bool coupled;
};

// Between the weights as the model has them and as they are multiplied: rows of
// gate and up, neuron by neuron, [2 I][H] on the one side, the atoms of 32 that
// the kernel interleaves on the other.
struct ExpertVectors {
  std::vector<uint16_t> svh;   // [2 I], in the interleaved order of atoms
  std::vector<uint16_t> suh;   // down_suh [I]
  std::vector<uint16_t> pre;   // signs [2 I]
  std::vector<uint16_t> post;  // signs [I]
};

// [g0 u0 g1 u1 ...]
Reals Logical(const RealExpert& expert, const Geometry& g) {
  Reals rows(2 * g.inter * g.hidden);
  for (size_t i = 0; i < g.inter; ++i) {
    for (size_t c = 0; c < g.hidden; ++c) {
      rows[2 * i * g.hidden + c] = expert.gate[i * g.hidden + c];
      rows[(2 * i + 1) * g.hidden + c] = expert.up[i * g.hidden + c];
    }
  }
  return rows;
}

// A matrix [out][in] with power-of-two scales for every 32 inputs of a row.
struct Encoded {
  std::vector<uint16_t> words;  // [in/16][out/16][16 K]
  std::vector<uint8_t> scales;  // [out][in/32]
  std::vector<float> decoded;   // [in][out], without the scales
};

class BlockEncoder {
 public:
  explicit BlockEncoder(GridEncoder* encoder) : encoder_(encoder) {}

  // physical: [out][in]. rms: what the numbers of a block should have.
  Encoded Encode(const Reals& physical, size_t out, size_t in, double rms) {
    out_ = out;
    in_ = in;
    Encoded encoded;
    encoded.scales.resize(out * in / kGroup);
    for (size_t b = 0; b < encoded.scales.size(); ++b) {
      double energy = 0;
      for (size_t i = 0; i < kGroup; ++i) {
        energy += physical[kGroup * b + i] * physical[kGroup * b + i];
      }
      const double found = std::sqrt(energy / kGroup);
      encoded.scales[b] = Byte(found > 0 ? NearestPower(found / rms) : 0);
    }
    encoded.words.resize(out * in / 16 * static_cast<size_t>(encoder_->bits()));
    encoded.decoded.resize(out * in);
    grid_.resize(out * in);
    for (size_t b = 0; b < encoded.scales.size(); ++b) {
      Fill(physical, encoded.scales, b);
    }
    encoder_->Encode({grid_.data(), in, out}, encoded.words, encoded.decoded);
    for (int i = 0; i < kRefits; ++i) Refit(physical, &encoded);
    return encoded;
  }

 private:
  static uint8_t Byte(int exponent) {
    return static_cast<uint8_t>(std::clamp(exponent, -127, 127) + kScaleOne);
  }

  // Offset in the grid [in][out] of input i of block b.
  size_t At(size_t b, size_t i) const {
    const size_t groups = in_ / kGroup;
    return (b % groups * kGroup + i) * out_ + b / groups;
  }

  void Fill(const Reals& physical, const std::vector<uint8_t>& scales,
            size_t b) {
    const double scale = Ue8m0Value(scales[b]);
    for (size_t i = 0; i < kGroup; ++i) {
      grid_[At(b, i)] = static_cast<float>(physical[kGroup * b + i] / scale);
    }
  }

  // Gives each block the better of the two powers of two around the scale that
  // fits its decoded numbers best, and encodes the tiles of those that change.
  void Refit(const Reals& physical, Encoded* encoded) {
    std::set<size_t> tiles;
    for (size_t b = 0; b < encoded->scales.size(); ++b) {
      double cross = 0;
      double square = 0;
      for (size_t i = 0; i < kGroup; ++i) {
        const double q = encoded->decoded[At(b, i)];
        cross += physical[kGroup * b + i] * q;
        square += q * q;
      }
      if (cross <= 0 || square <= 0) continue;
      const int low = std::ilogb(cross / square);
      const auto error = [&](int exponent) {
        const double scale = std::ldexp(1.0, exponent);
        return scale * (scale * square - 2 * cross);
      };
      const uint8_t byte = Byte(error(low) <= error(low + 1) ? low : low + 1);
      if (byte == encoded->scales[b]) continue;
      encoded->scales[b] = byte;
      Fill(physical, encoded->scales, b);
      const size_t groups = in_ / kGroup;
      for (const size_t row : {2 * (b % groups), 2 * (b % groups) + 1}) {
        tiles.insert(row * (out_ / 16) + b / groups / 16);
      }
    }
    encoder_->EncodeTiles({grid_.data(), in_, out_},
                          std::vector<size_t>(tiles.begin(), tiles.end()),
                          encoded->words, encoded->decoded);
  }

  GridEncoder* encoder_;
  size_t out_ = 0;
  size_t in_ = 0;
  std::vector<float> grid_;  // [in][out], what the trellis approximates
};

// Physical [out][in] numbers of an encoded matrix.
Reals Dequantise(const Encoded& encoded, size_t out, size_t in) {
  Reals physical(out * in);
  for (size_t n = 0; n < out; ++n) {
    for (size_t k = 0; k < in; ++k) {
      physical[n * in + k] = static_cast<double>(encoded.decoded[k * out + n]) *
                             Ue8m0Value(encoded.scales[(n * in + k) / kGroup]);
    }
  }
  return physical;
}

// From gate and up as they are multiplied back to the model's.
void RestoreFc1(const Reals& gate, const Reals& up, const Geometry& g,
                const std::vector<uint16_t>& suh, const ExpertVectors& v,
                RealExpert* out) {
  out->gate.resize(gate.size());
  out->up.resize(up.size());
  Reals rows(2 * gate.size());
  for (size_t r = 0; r < 2 * g.inter; ++r) {
    const size_t from = g.coupled ? NpkSlotRowOf(r) : r / 2;
    const bool is_up = (g.coupled ? NpkSlotOf(r) : r % 2) != 0;
    std::copy_n(
        (is_up ? up : gate).begin() + static_cast<ptrdiff_t>(from * g.hidden),
        g.hidden, rows.begin() + static_cast<ptrdiff_t>(r * g.hidden));
  }
  if (g.coupled) {
    HadamardColumns(2 * g.inter, g.hidden, kInner, &rows);
    ScaleColumns(suh, false, &rows);
    HadamardColumns(2 * g.inter, g.hidden, kOuter, &rows);
    HadamardRows(2 * g.inter, g.hidden, kInner, &rows);
    ScaleRows(v.svh, false, &rows);
    HadamardRows(2 * g.inter, g.hidden, kInner, &rows);
    ScaleRows(v.pre, false, &rows);
  }
  for (size_t i = 0; i < gate.size(); ++i) {
    const size_t at = 2 * (i / g.hidden) * g.hidden + i % g.hidden;
    out->gate[i] = static_cast<float>(rows[at]);
    out->up[i] = static_cast<float>(rows[at + g.hidden]);
  }
}

void RestoreFc2(Reals down, const Geometry& g, const std::vector<uint16_t>& svh,
                const ExpertVectors& v, RealExpert* out) {
  if (g.coupled) {
    HadamardColumns(g.hidden, g.inter, kInner, &down);
    ScaleColumns(v.suh, false, &down);
    HadamardColumns(g.hidden, g.inter, kInner, &down);
    ScaleColumns(v.post, false, &down);
    HadamardRows(g.hidden, g.inter, kInner, &down);
    ScaleRows(svh, false, &down);
    HadamardRows(g.hidden, g.inter, kOuter, &down);
  }
  out->down.assign(down.begin(), down.end());
}

double SquaredDistance(const std::vector<float>& a,
                       const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = static_cast<double>(a[i]) - b[i];
    sum += difference * difference;
  }
  return sum;
}

class LayerEncoder {
 public:
  LayerEncoder(const NpkMetadata& metadata, const RealExperts& experts,
               uint64_t seed, int threads)
      : m_(metadata),
        experts_(experts),
        seed_(seed),
        g_{.hidden = static_cast<size_t>(metadata.hidden),
           .inter = static_cast<size_t>(metadata.intermediate_global),
           .coupled = metadata.boundary == NpkBoundary::kCoupled},
        encoder_(NpkAlphabet(), metadata.bits, threads),
        blocks_(&encoder_),
        target_rms_(TypicalRatio(metadata.bits) *
                    AlphabetDeviation(encoder_.alphabet())) {}

  void set_progress(const std::function<void(size_t)>& done) {
    encoder_.set_progress(done);
  }

  absl::Status Run(NpkEncoding* result) {
    if (g_.coupled) RETURN_IF_ERROR(ChooseSharedScales());
    for (int64_t e = 0; e < m_.experts; ++e) {
      ASSIGN_OR_RETURN(const RealExpert expert, Load(e));
      for (const auto* matrix : {&expert.gate, &expert.up, &expert.down}) {
        for (const float w : *matrix) {
          result->energy += static_cast<double>(w) * w;
        }
      }
      EncodeExpert(e, expert, &result->squared_error);
    }
    return absl::OkStatus();
  }

  absl::Status Pieces(
      const NpkMetadata& rank, NpkTensor which,
      const std::function<absl::Status(std::span<const uint8_t>)>& sink) const;

 private:
  struct Expert {
    std::array<Encoded, 3> matrices;  // gate, up, down
    ExpertVectors vectors;
    uint8_t draw = 0;
  };

  absl::StatusOr<RealExpert> Load(int64_t e) const {
    ASSIGN_OR_RETURN(RealExpert expert, experts_(e));
    const size_t size = g_.hidden * g_.inter;
    const char* const names[] = {"gate", "up", "down"};
    const std::vector<float>* const matrices[] = {&expert.gate, &expert.up,
                                                  &expert.down};
    for (size_t i = 0; i < 3; ++i) {
      KILN_CHECK(matrices[i]->size() == size);
      const auto bad = std::find_if(matrices[i]->begin(), matrices[i]->end(),
                                    [](float w) { return !std::isfinite(w); });
      if (bad == matrices[i]->end()) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", m_.layer, " expert ", e, " ", names[i], ": weight ",
          bad - matrices[i]->begin(), " is ", *bad, ", must be finite"));
    }
    return expert;
  }

  // The vectors that all experts share, from the norms over all of them.
  absl::Status ChooseSharedScales() {
    Reals input(g_.hidden, 0.0);
    Reals output(g_.hidden, 0.0);
    for (int64_t e = 0; e < m_.experts; ++e) {
      ASSIGN_OR_RETURN(const RealExpert expert, Load(e));
      Reals rows = Logical(expert, g_);
      HadamardColumns(2 * g_.inter, g_.hidden, kOuter, &rows);
      Reals down(expert.down.begin(), expert.down.end());
      HadamardRows(g_.hidden, g_.inter, kOuter, &down);
      const Reals in = ColumnNorms(2 * g_.inter, g_.hidden, rows);
      const Reals out = RowNorms(g_.hidden, g_.inter, down);
      for (size_t i = 0; i < g_.hidden; ++i) {
        input[i] += in[i] * in[i];
        output[i] += out[i] * out[i];
      }
    }
    // Relative to the mean, so that private scales carry the magnitude.
    for (Reals* norms : {&input, &output}) {
      double mean = 0;
      for (const double square : *norms) mean += square;
      mean /= static_cast<double>(g_.hidden);
      for (double& norm : *norms) norm = mean > 0 ? std::sqrt(norm / mean) : 0;
    }
    suh_ = ScalesOf(input, 1, seed_ + 1);
    svh_ = ScalesOf(output, 1, seed_ + 2);
    return absl::OkStatus();
  }

  void EncodeExpert(int64_t e, const RealExpert& real, double* squared_error) {
    Expert& expert = encoded_.emplace_back();
    const auto [physical, down] = Transform(e, real, &expert);
    std::array<Reals, 2> slots;
    for (size_t r = 0; r < 2 * g_.inter; ++r) {
      const size_t slot = g_.coupled ? NpkSlotOf(r) : r % 2;
      // Rows of one slot come in order.
      slots[slot].insert(
          slots[slot].end(),
          physical.begin() + static_cast<ptrdiff_t>(r * g_.hidden),
          physical.begin() + static_cast<ptrdiff_t>((r + 1) * g_.hidden));
    }
    for (size_t i = 0; i < 2; ++i) {
      expert.matrices[i] =
          blocks_.Encode(slots[i], g_.inter, g_.hidden, target_rms_);
    }
    expert.matrices[2] = blocks_.Encode(down, g_.hidden, g_.inter, target_rms_);
    RealExpert restored;
    RestoreFc1(Dequantise(expert.matrices[0], g_.inter, g_.hidden),
               Dequantise(expert.matrices[1], g_.inter, g_.hidden), g_, suh_,
               expert.vectors, &restored);
    RestoreFc2(Dequantise(expert.matrices[2], g_.hidden, g_.inter), g_, svh_,
               expert.vectors, &restored);
    *squared_error += SquaredDistance(real.gate, restored.gate) +
                      SquaredDistance(real.up, restored.up) +
                      SquaredDistance(real.down, restored.down);
    for (Encoded& matrix : expert.matrices) {
      std::vector<float>().swap(matrix.decoded);
    }
  }

  // The matrices as they are multiplied: gate and up in the order of atoms.
  std::pair<Reals, Reals> Transform(int64_t e, const RealExpert& real,
                                    Expert* expert) {
    Reals rows = Logical(real, g_);
    Reals down(real.down.begin(), real.down.end());
    if (!g_.coupled) return {std::move(rows), std::move(down)};
    ExpertVectors& v = expert->vectors;
    expert->draw = static_cast<uint8_t>(e % 8);
    NpkMetadata whole = m_;
    whole.rank = 0;
    whole.world_size = 1;
    whole.intermediate = m_.intermediate_global;
    const std::vector<uint16_t> signs = NpkSigns(whole, expert->draw);
    const auto cut = signs.begin() + static_cast<ptrdiff_t>(2 * g_.inter);
    v.pre.assign(signs.begin(), cut);
    v.post.assign(cut, signs.end());
    const uint64_t seed = seed_ + 4 * static_cast<uint64_t>(e) + 3;

    ScaleRows(v.pre, false, &rows);
    HadamardRows(2 * g_.inter, g_.hidden, kInner, &rows);
    HadamardColumns(2 * g_.inter, g_.hidden, kOuter, &rows);
    ScaleColumns(suh_, true, &rows);
    v.svh =
        ScalesOf(RowNorms(2 * g_.inter, g_.hidden, rows), target_rms_, seed);
    ScaleRows(v.svh, true, &rows);
    HadamardRows(2 * g_.inter, g_.hidden, kInner, &rows);
    HadamardColumns(2 * g_.inter, g_.hidden, kInner, &rows);

    HadamardRows(g_.hidden, g_.inter, kOuter, &down);
    ScaleRows(svh_, true, &down);
    HadamardRows(g_.hidden, g_.inter, kInner, &down);
    ScaleColumns(v.post, false, &down);
    HadamardColumns(g_.hidden, g_.inter, kInner, &down);
    v.suh =
        ScalesOf(ColumnNorms(g_.hidden, g_.inter, down), target_rms_, seed + 1);
    ScaleColumns(v.suh, true, &down);
    HadamardColumns(g_.hidden, g_.inter, kInner, &down);
    return {std::move(rows), std::move(down)};
  }

  const NpkMetadata& m_;
  const RealExperts& experts_;
  uint64_t seed_;
  Geometry g_;
  GridEncoder encoder_;
  BlockEncoder blocks_;
  double target_rms_;
  std::vector<uint16_t> suh_;  // gate_up_suh
  std::vector<uint16_t> svh_;  // down_svh
  std::vector<Expert> encoded_;
};

template <typename T>
std::span<const uint8_t> Bytes(const std::vector<T>& values, size_t begin,
                               size_t count) {
  KILN_CHECK(begin + count <= values.size());
  return {reinterpret_cast<const uint8_t*>(values.data() + begin),
          count * sizeof(T)};
}

absl::Status LayerEncoder::Pieces(
    const NpkMetadata& rank, NpkTensor which,
    const std::function<absl::Status(std::span<const uint8_t>)>& sink) const {
  const auto local = static_cast<size_t>(rank.intermediate);
  const size_t first = static_cast<size_t>(rank.rank) * local;
  const auto words = static_cast<size_t>(16 * m_.bits);
  // Runs of `count` that begin at `begin` in each of `rows` rows of `width`.
  const auto slice = [&](const auto& values, size_t rows, size_t width,
                         size_t begin, size_t count) -> absl::Status {
    for (size_t r = 0; r < rows; ++r) {
      RETURN_IF_ERROR(sink(Bytes(values, r * width + begin, count)));
    }
    return absl::OkStatus();
  };
  switch (which) {
    case NpkTensor::kW13Stream:
      for (size_t slot = 0; slot < 2; ++slot) {
        for (const Expert& expert : encoded_) {
          RETURN_IF_ERROR(slice(expert.matrices[slot].words, g_.hidden / 16,
                                g_.inter / 16 * words, first / 16 * words,
                                local / 16 * words));
        }
      }
      return absl::OkStatus();
    case NpkTensor::kW2Stream:
      for (const Expert& expert : encoded_) {
        const size_t row = g_.hidden / 16 * words;
        RETURN_IF_ERROR(sink(Bytes(expert.matrices[2].words, first / 16 * row,
                                   local / 16 * row)));
      }
      return absl::OkStatus();
    case NpkTensor::kW13Scale:
      for (const Expert& expert : encoded_) {
        for (size_t slot = 0; slot < 2; ++slot) {
          const size_t row = g_.hidden / kGroup;
          RETURN_IF_ERROR(sink(
              Bytes(expert.matrices[slot].scales, first * row, local * row)));
        }
      }
      return absl::OkStatus();
    case NpkTensor::kW2Scale:
      for (const Expert& expert : encoded_) {
        RETURN_IF_ERROR(slice(expert.matrices[2].scales, g_.hidden,
                              g_.inter / kGroup, first / kGroup,
                              local / kGroup));
      }
      return absl::OkStatus();
    case NpkTensor::kGateUpSuh:
      return sink(Bytes(suh_, 0, suh_.size()));
    case NpkTensor::kInnerScales:
      for (const Expert& expert : encoded_) {
        std::array<std::vector<uint16_t>, 2> svh;
        for (size_t r = 2 * first; r < 2 * (first + local); ++r) {
          svh[NpkSlotOf(r)].push_back(expert.vectors.svh[r]);
        }
        RETURN_IF_ERROR(sink(Bytes(svh[0], 0, local)));
        RETURN_IF_ERROR(sink(Bytes(svh[1], 0, local)));
        RETURN_IF_ERROR(sink(Bytes(expert.vectors.suh, first, local)));
      }
      return absl::OkStatus();
    case NpkTensor::kDownSvh:
      return sink(Bytes(svh_, 0, svh_.size()));
    case NpkTensor::kSignDraw:
      for (const Expert& expert : encoded_) {
        RETURN_IF_ERROR(sink({&expert.draw, 1}));
      }
      return absl::OkStatus();
  }
  KILN_UNREACHABLE();
}

}  // namespace

RealExpert DecodeNpkExpert(std::span<const NpkSidecar* const> ranks,
                           int64_t expert) {
  const NpkMetadata& m = ranks[0]->metadata();
  const Geometry g = {.hidden = static_cast<size_t>(m.hidden),
                      .inter = static_cast<size_t>(m.intermediate_global),
                      .coupled = m.boundary == NpkBoundary::kCoupled};
  const auto local = static_cast<size_t>(m.intermediate);
  const auto e = static_cast<size_t>(expert);
  Reals gate;
  Reals up;
  Reals down(g.hidden * g.inter);
  ExpertVectors v;
  for (const NpkSidecar* rank : ranks) {
    const Reals gate_part = DecodeNpkMatrix(*rank, NpkMatrix::kGate, expert);
    const Reals up_part = DecodeNpkMatrix(*rank, NpkMatrix::kUp, expert);
    gate.insert(gate.end(), gate_part.begin(), gate_part.end());
    up.insert(up.end(), up_part.begin(), up_part.end());
    const Reals part = DecodeNpkMatrix(*rank, NpkMatrix::kDown, expert);
    const size_t first = static_cast<size_t>(rank->metadata().rank) * local;
    for (size_t n = 0; n < g.hidden; ++n) {
      std::copy_n(part.begin() + static_cast<ptrdiff_t>(n * local), local,
                  down.begin() + static_cast<ptrdiff_t>(n * g.inter + first));
    }
    if (!g.coupled) continue;
    const std::vector<uint16_t> inner =
        NpkHalves(rank->tensor(NpkTensor::kInnerScales)
                      .subspan(6 * e * local, 6 * local));
    for (size_t r = 0; r < 2 * local; ++r) {
      v.svh.push_back(inner[NpkSlotOf(r) * local + NpkSlotRowOf(r)]);
    }
    v.suh.insert(v.suh.end(), inner.begin() + static_cast<ptrdiff_t>(2 * local),
                 inner.end());
    const std::vector<uint16_t> signs =
        NpkSigns(rank->metadata(), rank->tensor(NpkTensor::kSignDraw)[e]);
    const auto cut = signs.begin() + static_cast<ptrdiff_t>(2 * local);
    v.pre.insert(v.pre.end(), signs.begin(), cut);
    v.post.insert(v.post.end(), cut, signs.end());
  }
  RealExpert real;
  RestoreFc1(gate, up, g, NpkHalves(ranks[0]->tensor(NpkTensor::kGateUpSuh)), v,
             &real);
  RestoreFc2(std::move(down), g,
             NpkHalves(ranks[0]->tensor(NpkTensor::kDownSvh)), v, &real);
  return real;
}

namespace {

// All that the geometry breaks of the rules V6 and V7.
absl::Status CheckGeometry(const NpkMetadata& m) {
  const bool coupled = m.boundary == NpkBoundary::kCoupled;
  const int64_t multiple = coupled ? int64_t{kInner} : kNpkAtom;
  const int64_t hidden_multiple = coupled ? int64_t{kOuter} : int64_t{kInner};
  absl::Status hidden;
  absl::Status slice;
  if (m.hidden <= 0 || m.hidden % hidden_multiple != 0) {
    hidden = NpkRuleError(
        6, absl::StrCat("hidden is ", m.hidden, ", must be a multiple of ",
                        hidden_multiple,
                        coupled && m.hidden % int64_t{kInner} == 0
                            ? " unless the boundary is identity"
                            : ""));
  }
  if (m.world_size < 1 || m.intermediate_global <= 0 ||
      m.intermediate_global % (m.world_size * multiple) != 0) {
    slice = NpkRuleError(
        7, absl::StrCat("intermediate_global is ", m.intermediate_global,
                        ", must be a multiple of ", multiple, " for each of ",
                        m.world_size, " ranks; ",
                        PossibleRanks(m.intermediate_global, multiple)));
  }
  if (hidden.ok()) return slice;
  if (slice.ok()) return hidden;
  return absl::InvalidArgumentError(
      absl::StrCat(hidden.message(), "; ", slice.message()));
}

}  // namespace

absl::StatusOr<NpkEncoding> EncodeNpkLayer(
    const NpkMetadata& metadata, const RealExperts& experts, uint64_t seed,
    int threads, const std::function<void(size_t)>& done,
    const std::string& output) {
  NpkMetadata m = metadata;
  m.encoder = Sha256(kEncoderName);
  if (m.bits < kd::kNpkBitsMin || m.bits > kd::kNpkBitsMax) {
    return NpkRuleError(
        5, absl::StrCat("bits is ", m.bits, ", must be within 2..5"));
  }
  RETURN_IF_ERROR(CheckGeometry(m));
  m.intermediate = m.intermediate_global / m.world_size;
  RETURN_IF_ERROR(CheckNpkTexts(m));
  LayerEncoder encoder(m, experts, seed, threads);
  encoder.set_progress(done);
  NpkEncoding result;
  RETURN_IF_ERROR(encoder.Run(&result));
  for (m.rank = 0; m.rank < m.world_size; ++m.rank) {
    const std::string path =
        absl::StrCat(output, "/", NpkFileName(m.layer, m.rank, m.world_size));
    RETURN_IF_ERROR(
        WriteNpkSidecar(path, m, [&](NpkTensor which, const auto& sink) {
          return encoder.Pieces(m, which, sink);
        }));
    result.paths.push_back(path);
    result.bytes += std::filesystem::file_size(path);
  }
  return result;
}

}  // namespace kiln
