#include "templates/formats/encoder_matrix.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numeric>
#include <thread>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "device/half.h"
#include "device/trellis.h"
#include "templates/formats/exl3.h"

namespace kiln {
namespace {

constexpr size_t kEdge = 16;
// Tiles of the search for the factor: 1 in 8, at least 4, at most 48.
constexpr size_t kSampleShare = 8;
constexpr size_t kSampleMin = 4;
constexpr size_t kSampleMax = 48;

template <int CB>
std::vector<float> AlphabetOf() {
  std::vector<float> values(kTileStates);
  for (uint32_t s = 0; s < kTileStates; ++s) {
    values[s] = kd::f16_to_f32(kd::DecodeState<CB>(s));
  }
  return values;
}

// Offset in the grid of each stream position of a tile.
std::array<size_t, kTileSize> TileOffsets(const GridView& grid, size_t tile) {
  const size_t across = grid.columns / kEdge;
  const size_t origin =
      tile / across * kEdge * grid.columns + tile % across * kEdge;
  std::array<size_t, kTileSize> offsets;
  for (uint32_t p = 0; p < kTileSize; ++p) {
    offsets[p] =
        origin + kd::PositionRow(p) * grid.columns + kd::PositionColumn(p);
  }
  return offsets;
}

// One butterfly network over `size` numbers that lie `stride` apart, on `count`
// neighbouring columns at once.
void Butterflies(size_t size, size_t stride, size_t count, double* at) {
  for (size_t step = 1; step < size; step *= 2) {
    for (size_t i = 0; i < size; ++i) {
      if ((i & step) != 0) continue;
      double* a = at + i * stride;
      double* b = at + (i + step) * stride;
      for (size_t c = 0; c < count; ++c) {
        const double sum = a[c] + b[c];
        b[c] = a[c] - b[c];
        a[c] = sum;
      }
    }
  }
}

void Multiply(double factor, std::vector<double>* values) {
  for (double& value : *values) value *= factor;
}

std::vector<uint16_t> ToHalf(const std::vector<double>& values) {
  std::vector<uint16_t> out(values.size());
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = kd::f32_to_f16(static_cast<float>(values[i]));
  }
  return out;
}

// Divides (or multiplies) row r by scale[r] and column c by scale[c]. What a
// scale of zero drops is zero.
void ApplyScales(const std::vector<uint16_t>& rows,
                 const std::vector<uint16_t>& columns, bool divide,
                 std::vector<double>* matrix) {
  const auto factors = [divide](const std::vector<uint16_t>& scales) {
    std::vector<double> out(scales.size());
    for (size_t i = 0; i < out.size(); ++i) {
      const double value = kd::f16_to_f32(scales[i]);
      out[i] = !divide ? value : value == 0 ? 0 : 1 / value;
    }
    return out;
  };
  const std::vector<double> row = factors(rows);
  const std::vector<double> column = factors(columns);
  for (size_t r = 0; r < row.size(); ++r) {
    double* at = matrix->data() + r * column.size();
    for (size_t c = 0; c < column.size(); ++c) at[c] *= row[r] * column[c];
  }
}

void RotateBoth(size_t in, size_t out, std::vector<double>* matrix) {
  HadamardRows(in, out, kHadamardBlock, matrix);
  HadamardColumns(in, out, kHadamardBlock, matrix);
}

absl::Status CheckScales(const std::vector<double>& wanted,
                         const std::vector<uint16_t>& stored) {
  constexpr uint16_t kInfinity = 0x7C00;
  const double largest = std::abs(*std::max_element(
      wanted.begin(), wanted.end(),
      [](double a, double b) { return std::abs(a) < std::abs(b); }));
  const bool overflow = std::any_of(
      stored.begin(), stored.end(),
      [](uint16_t bits) { return (bits & kInfinity) == kInfinity; });
  // Scales below the smallest normal number have too few bits; a few of them
  // in a matrix do not matter, the largest does.
  constexpr double kNormal = 0x1p-14;
  if (!overflow && (largest == 0 || largest >= kNormal)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the largest scale would be ", largest, ", must be within 2^-14..65504, ",
      "which binary16 holds: multiply the weights by a constant first"));
}

}  // namespace

std::vector<float> CodebookAlphabet(Codebook codebook) {
  switch (codebook) {
    case Codebook::k3Inst:
      return AlphabetOf<kd::kCodebook3Inst>();
    case Codebook::kMcg:
      return AlphabetOf<kd::kCodebookMcg>();
    case Codebook::kMul1:
      return AlphabetOf<kd::kCodebookMul1>();
  }
  KILN_UNREACHABLE();
}

double AlphabetDeviation(std::span<const float> alphabet) {
  double sum = 0;
  double squares = 0;
  for (const float value : alphabet) {
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  const auto count = static_cast<double>(alphabet.size());
  return std::sqrt(squares / count - sum / count * (sum / count));
}

double TypicalRatio(int bits) {
  static constexpr double kRatios[8] = {1.12, 1.0,  0.91, 0.87,
                                        0.80, 0.73, 0.70, 0.66};
  KILN_CHECK(bits >= 1 && bits <= 8);
  return kRatios[bits - 1];
}

GridEncoder::GridEncoder(std::span<const float> alphabet, int bits, int threads)
    : bits_(bits), alphabet_(alphabet.begin(), alphabet.end()) {
  KILN_CHECK(threads >= 1);
  for (int i = 0; i < threads; ++i) {
    encoders_.push_back(std::make_unique<TileEncoder>(alphabet, bits));
  }
}

void GridEncoder::ForEachTile(
    const GridView& grid, std::span<const size_t> tiles,
    const std::function<void(size_t tile, TileEncoder*)>& work) {
  KILN_CHECK(grid.rows % kEdge == 0 && grid.columns % kEdge == 0);
  std::atomic<size_t> next{0};
  const auto run = [&](TileEncoder* encoder) {
    for (size_t i = next++; i < tiles.size(); i = next++) {
      work(tiles[i], encoder);
    }
  };
  std::vector<std::thread> workers;
  for (size_t i = 1; i < std::min(encoders_.size(), tiles.size()); ++i) {
    workers.emplace_back(run, encoders_[i].get());
  }
  run(encoders_[0].get());
  for (std::thread& worker : workers) worker.join();
}

void GridEncoder::EncodeTiles(const GridView& grid,
                              std::span<const size_t> tiles,
                              std::span<uint16_t> words,
                              std::span<float> decoded) {
  const auto tile_words = static_cast<size_t>(16 * bits_);
  KILN_CHECK(words.size() == grid.tiles() * tile_words);
  KILN_CHECK(decoded.size() == grid.rows * grid.columns);
  ForEachTile(grid, tiles, [&](size_t tile, TileEncoder* encoder) {
    const std::array<size_t, kTileSize> offsets = TileOffsets(grid, tile);
    TileValues target;
    for (size_t p = 0; p < kTileSize; ++p) {
      target[p] = grid.values[offsets[p]];
    }
    const TileStates states = encoder->Encode(target);
    PackTile(states, bits_, words.subspan(tile * tile_words, tile_words));
    for (size_t p = 0; p < kTileSize; ++p) {
      decoded[offsets[p]] = alphabet_[states[p]];
    }
    if (progress_) progress_(1);
  });
}

void GridEncoder::Encode(const GridView& grid, std::span<uint16_t> words,
                         std::span<float> decoded) {
  std::vector<size_t> all(grid.tiles());
  std::iota(all.begin(), all.end(), size_t{0});
  EncodeTiles(grid, all, words, decoded);
}

double GridEncoder::BestFactor(const GridView& grid) {
  double energy = 0;
  const size_t count = grid.rows * grid.columns;
  for (size_t i = 0; i < count; ++i) {
    energy += static_cast<double>(grid.values[i]) * grid.values[i];
  }
  if (energy == 0) return 1;
  const double unit = AlphabetDeviation(alphabet_) /
                      std::sqrt(energy / static_cast<double>(count));

  const size_t sampled =
      std::min(grid.tiles(),
               std::clamp(grid.tiles() / kSampleShare, kSampleMin, kSampleMax));
  std::vector<size_t> tiles(sampled);
  for (size_t i = 0; i < sampled; ++i) tiles[i] = i * grid.tiles() / sampled;

  static constexpr double kSteps[] = {1, 0.94, 1.06, 0.88, 1.12};
  double best = 0;
  double best_error = 0;
  for (const double step : kSteps) {
    const double factor = unit * TypicalRatio(bits_) * step;
    std::vector<double> errors(grid.tiles(), 0.0);
    ForEachTile(grid, tiles, [&](size_t tile, TileEncoder* encoder) {
      const std::array<size_t, kTileSize> offsets = TileOffsets(grid, tile);
      TileValues target;
      for (size_t p = 0; p < kTileSize; ++p) {
        target[p] = static_cast<float>(grid.values[offsets[p]] * factor);
      }
      const TileStates states = encoder->Encode(target);
      for (size_t p = 0; p < kTileSize; ++p) {
        const double error =
            static_cast<double>(target[p]) - alphabet_[states[p]];
        errors[tile] += error * error;
      }
    });
    const double error =
        std::accumulate(errors.begin(), errors.end(), 0.0) / (factor * factor);
    if (best != 0 && error >= best_error) continue;
    best = factor;
    best_error = error;
  }
  return best;
}

void HadamardRows(size_t rows, size_t columns, size_t size,
                  std::vector<double>* matrix) {
  KILN_CHECK(rows % size == 0 && matrix->size() == rows * columns);
  for (size_t r = 0; r < rows; r += size) {
    Butterflies(size, columns, columns, matrix->data() + r * columns);
  }
  Multiply(1 / std::sqrt(static_cast<double>(size)), matrix);
}

void HadamardColumns(size_t rows, size_t columns, size_t size,
                     std::vector<double>* matrix) {
  KILN_CHECK(columns % size == 0 && matrix->size() == rows * columns);
  for (size_t at = 0; at < matrix->size(); at += size) {
    Butterflies(size, 1, 1, matrix->data() + at);
  }
  Multiply(1 / std::sqrt(static_cast<double>(size)), matrix);
}

std::vector<double> RowNorms(size_t rows, size_t columns,
                             const std::vector<double>& matrix) {
  std::vector<double> norms(rows, 0.0);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < columns; ++c) {
      norms[r] += matrix[r * columns + c] * matrix[r * columns + c];
    }
    norms[r] = std::sqrt(norms[r] / static_cast<double>(columns));
  }
  return norms;
}

std::vector<double> ColumnNorms(size_t rows, size_t columns,
                                const std::vector<double>& matrix) {
  std::vector<double> norms(columns, 0.0);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < columns; ++c) {
      norms[c] += matrix[r * columns + c] * matrix[r * columns + c];
    }
  }
  for (double& norm : norms) {
    norm = std::sqrt(norm / static_cast<double>(rows));
  }
  return norms;
}

std::vector<double> RandomSigns(uint64_t seed, size_t count) {
  // SplitMix64, the top bit of each output.
  std::vector<double> signs(count);
  for (double& sign : signs) {
    seed += 0x9E3779B97F4A7C15u;
    uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    sign = (z >> 63) != 0 ? -1 : 1;
  }
  return signs;
}

absl::StatusOr<Exl3Encoding> EncodeExl3(std::span<const float> weights,
                                        size_t in, size_t out, uint64_t seed,
                                        GridEncoder* encoder) {
  KILN_CHECK(in > 0 && in % kHadamardBlock == 0);
  KILN_CHECK(out > 0 && out % kHadamardBlock == 0);
  KILN_CHECK(weights.size() == in * out);
  Exl3Encoding encoding;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!std::isfinite(weights[i])) {
      return absl::InvalidArgumentError(
          absl::StrCat("the weight of input ", i / out, " and output ", i % out,
                       " is ", weights[i], ", must be finite"));
    }
    encoding.energy += static_cast<double>(weights[i]) * weights[i];
  }
  const std::vector<double> exact(weights.begin(), weights.end());

  // Rows get their own norms relative to the whole, columns what is left; both
  // get signs. Every tile then sees numbers of one variance.
  std::vector<double> suh = RowNorms(in, out, exact);
  const double whole =
      std::sqrt(encoding.energy / static_cast<double>(weights.size()));
  // Half of a very small scale goes to the rows: binary16 has few exponents.
  const double shift =
      whole > 0 && whole < 0x1p-8 ? std::ldexp(1.0, std::ilogb(whole) / 2) : 1;
  const std::vector<double> row_signs = RandomSigns(seed, in);
  for (size_t r = 0; r < in; ++r) {
    suh[r] = whole > 0 ? row_signs[r] * suh[r] / whole * shift : 0;
  }
  encoding.suh = ToHalf(suh);
  encoding.svh.assign(out, kd::f32_to_f16(1.0f));
  std::vector<double> rotated = exact;
  ApplyScales(encoding.suh, encoding.svh, true, &rotated);
  std::vector<double> svh = ColumnNorms(in, out, rotated);
  const std::vector<double> column_signs = RandomSigns(~seed, out);
  for (size_t c = 0; c < out; ++c) svh[c] *= column_signs[c];
  const auto rotate = [&] {
    encoding.svh = ToHalf(svh);
    rotated = exact;
    ApplyScales(encoding.suh, encoding.svh, true, &rotated);
    RotateBoth(in, out, &rotated);
    return std::vector<float>(rotated.begin(), rotated.end());
  };

  std::vector<float> target = rotate();
  const double factor = encoder->BestFactor({target.data(), in, out});
  for (double& scale : svh) scale /= factor;
  target = rotate();
  if (absl::Status status = CheckScales(suh, encoding.suh); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckScales(svh, encoding.svh); !status.ok()) {
    return status;
  }

  encoding.trellis.resize(in * out / 16 * static_cast<size_t>(encoder->bits()));
  std::vector<float> decoded(in * out);
  encoder->Encode({target.data(), in, out}, encoding.trellis, decoded);

  std::vector<double> restored(decoded.begin(), decoded.end());
  RotateBoth(in, out, &restored);
  ApplyScales(encoding.suh, encoding.svh, false, &restored);
  for (size_t i = 0; i < restored.size(); ++i) {
    const double error = exact[i] - restored[i];
    encoding.squared_error += error * error;
  }
  return encoding;
}

}  // namespace kiln
