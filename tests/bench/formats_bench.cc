// What the encoder and the validation of files cost, beside what moving their
// bytes alone costs on the same core.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "templates/formats/encoder_matrix.h"
#include "templates/formats/encoder_tile.h"
#include "templates/formats/npk.h"
#include "tests/support/npk_writer.h"

namespace kiln {
namespace {

// Bytes that one position of a tile moves: all values, and the costs of all
// prefixes in and out.
double BytesOfPosition(int bits) {
  const double prefixes = static_cast<double>(1u << (16 - bits));
  return 4.0 * kTileStates + 8.0 * prefixes;
}

void CountBytes(benchmark::State& state, int bits) {
  const auto positions =
      static_cast<double>(state.iterations()) * static_cast<double>(kTileSize);
  state.counters["us_per_position"] =
      benchmark::Counter(positions * 1e-6, benchmark::Counter::kIsRate |
                                               benchmark::Counter::kInvert);
  state.SetBytesProcessed(
      static_cast<int64_t>(positions * BytesOfPosition(bits)));
}

// One pass of the search, with the instructions of one level.
void BM_TrellisPass(benchmark::State& state) {
  const int bits = static_cast<int>(state.range(0));
  const auto level = static_cast<EncoderLevel>(state.range(1));
  if (level > BestEncoderLevel()) {
    state.SkipWithError("this processor lacks the level");
    return;
  }
  TileEncoder encoder(CodebookAlphabet(Codebook::kMcg), bits, level);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  TileValues tile;
  for (float& value : tile) value = normal(random);
  for (auto _ : state) {
    encoder.Forward(tile);
    benchmark::ClobberMemory();
  }
  CountBytes(state, bits);
}

// The bound: the same reads and writes of the same buffers, by the C library's
// widest loads, without the sums.
void BM_TrellisPassBound(benchmark::State& state) {
  const int bits = static_cast<int>(state.range(0));
  const size_t row = size_t{4} << (16 - bits);
  const std::vector<char> values(4 * kTileStates, 1);
  std::vector<char> costs((kTileSize + 1) * row, 1);
  for (auto _ : state) {
    for (size_t p = 0; p < kTileSize; ++p) {
      // Reads everything: there is no such byte.
      benchmark::DoNotOptimize(std::memchr(values.data(), 0, values.size()));
      std::memcpy(costs.data() + (p + 1) * row, costs.data() + p * row, row);
      benchmark::ClobberMemory();
    }
  }
  CountBytes(state, bits);
}

// Every rule, digests of all tensors included, over a file in memory.
void BM_ValidateNpk(benchmark::State& state) {
  NpkMetadata metadata = testing::SmallNpk();
  metadata.experts = 256;
  metadata.bits = 4;
  const std::string file =
      testing::NpkBytes(metadata, testing::RandomNpkTensors(metadata, 1));
  for (auto _ : state) {
    const absl::StatusOr<NpkSidecar> sidecar = NpkSidecar::Parse(
        {reinterpret_cast<const uint8_t*>(file.data()), file.size()});
    if (!sidecar.ok()) state.SkipWithError("the file is refused");
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) *
                          static_cast<int64_t>(file.size()));
}

BENCHMARK(BM_ValidateNpk);
BENCHMARK(BM_TrellisPass)
    ->ArgNames({"bits", "level"})
    ->ArgsProduct({benchmark::CreateDenseRange(2, 8, 1),
                   {static_cast<int64_t>(EncoderLevel::kAvx2),
                    static_cast<int64_t>(EncoderLevel::kAvx512)}});
BENCHMARK(BM_TrellisPassBound)->DenseRange(2, 8);

}  // namespace
}  // namespace kiln

BENCHMARK_MAIN();
