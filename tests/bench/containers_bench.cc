// What it costs to check a layer before it is used: bytes of the file by second
// of one core, the digest included, and of native tensors that are made from
// it.

#include <benchmark/benchmark.h>

#include <memory>
#include <string>

#include "compiler/base/check.h"
#include "templates/formats/btx_layer.h"
#include "templates/formats/describe.h"
#include "templates/formats/qsrt_layer.h"
#include "tests/support/btx_writer.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/qsrt_writer.h"

namespace kiln {
namespace {

using ::kiln::testing::BtxOptions;
using ::kiln::testing::QsrtOptions;
using ::kiln::testing::TestFolder;

// A layer of about 50 MB on disk, opened.
struct BtxOnDisk {
  explicit BtxOnDisk(const BtxOptions& options) {
    const testing::BtxFiles files = testing::MakeBtxFiles(options);
    const std::string bytes = files.LayerBytes();
    size = bytes.size();
    folder.Write(testing::BtxLayerName(options.layer), bytes);
    const absl::StatusOr<BtxManifest> manifest =
        ParseBtxManifest(testing::MakeBtxManifest(options, bytes), "m");
    KILN_CHECK(manifest.ok());
    absl::StatusOr<BtxLayer> opened =
        BtxLayer::Open(folder.path(), *manifest, options.layer);
    KILN_CHECK(opened.ok());
    layer = std::make_unique<BtxLayer>(*std::move(opened));
  }

  TestFolder folder;
  size_t size = 0;
  std::unique_ptr<BtxLayer> layer;
};

BtxOptions LargeUniform() {
  BtxOptions options;
  options.experts = 32;
  options.hidden = 2048;
  options.intermediate = 512;
  options.bits = 4;
  options.row_alignment = 4096;
  return options;
}

BtxOptions LargePairs() {
  BtxOptions options = LargeUniform();
  options.codebook = "sqg_e4m3";
  options.pair_kinds = {"P33", "P24"};
  return options;
}

void Validate(benchmark::State& state, BtxOnDisk* data) {
  for (auto _ : state) KILN_CHECK(data->layer->Validate().ok());
  state.SetBytesProcessed(
      static_cast<int64_t>(state.iterations() * data->size));
}

void ValidateBtxUniform(benchmark::State& state) {
  static BtxOnDisk& data = *new BtxOnDisk(LargeUniform());
  Validate(state, &data);
}

BENCHMARK(ValidateBtxUniform)->Unit(benchmark::kMillisecond);

void ValidateBtxPairs(benchmark::State& state) {
  static BtxOnDisk& data = *new BtxOnDisk(LargePairs());
  Validate(state, &data);
}

BENCHMARK(ValidateBtxPairs)->Unit(benchmark::kMillisecond);

void ValidateQsrt(benchmark::State& state) {
  static TestFolder& folder = *new TestFolder;
  static const std::string& bytes = *new std::string([] {
    QsrtOptions options;
    options.hidden = 2048;
    options.codes.assign(32, 0x11);
    return testing::QsrtFileBytes(options, testing::MakeQsrtFile(options));
  }());
  folder.Write("qsrt-layer-003.safetensors", bytes);
  folder.Write("MANIFEST.sha256",
               Sha256(bytes).ToHex() + "  qsrt-layer-003.safetensors\n");
  absl::StatusOr<QsrtLayer> layer = QsrtLayer::Open(folder.path(), 3);
  KILN_CHECK(layer.ok());
  for (auto _ : state) KILN_CHECK(layer->Validate().ok());
  state.SetBytesProcessed(
      static_cast<int64_t>(state.iterations() * bytes.size()));
}

BENCHMARK(ValidateQsrt)->Unit(benchmark::kMillisecond);

// The manifest of a checkpoint of 100 shards, from its headers.
void DescribeHundredShards(benchmark::State& state) {
  static TestFolder& folder = *[] {
    auto* made = new TestFolder;
    testing::WriteLargeCheckpoint(*made);
    return made;
  }();
  for (auto _ : state) KILN_CHECK(DescribeCheckpoint(folder.path(), {}).ok());
}

BENCHMARK(DescribeHundredShards)->Unit(benchmark::kMillisecond);

// The native tensors of the whole layer, without writing them.
void StreamBtxUniform(benchmark::State& state) {
  static BtxOnDisk& data = *new BtxOnDisk(LargeUniform());
  const auto source = TrellisFromBtx({0, 512}, data.layer.get());
  KILN_CHECK(source.ok());
  uint64_t bytes = 0;
  for (auto _ : state) {
    for (const FusedMoeParam slot : kTrellisSlots) {
      KILN_CHECK((*source)
                     ->Stream(slot,
                              [&](std::span<const uint8_t> piece) {
                                bytes += piece.size();
                                return absl::OkStatus();
                              })
                     .ok());
    }
  }
  state.SetBytesProcessed(static_cast<int64_t>(bytes));
}

BENCHMARK(StreamBtxUniform)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kiln

BENCHMARK_MAIN();
