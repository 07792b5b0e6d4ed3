// Writes small BTX checkpoints for tests: valid ones, which a test then damages
// in one place.

#ifndef KILN_TESTS_SUPPORT_BTX_WRITER_H_
#define KILN_TESTS_SUPPORT_BTX_WRITER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/support/checkpoint_writer.h"
#include "tests/support/random_layer.h"

namespace kiln::testing {

struct BtxOptions {
  std::string codebook = "mcg";
  int64_t experts = 3;
  int64_t hidden = 256;
  int64_t intermediate = 512;
  int bits = 3;  // uniform
  // Names of pair kinds, such as "P24"; not empty: pair rates, and expert e of
  // pair p has the kind number (e + p + (down ? 1 : 0)) of the list.
  std::vector<std::string> pair_kinds = {};
  bool coupled = false;
  bool per_expert_rotations = false;
  int64_t row_alignment = 64;
  int64_t extent_alignment = 4;
  std::vector<int64_t> barriers = {};
  int64_t layer = 1;
  uint64_t seed = 7;
};

// Low and high rate of an expert in a pair of 256 channels.
struct BtxRates {
  int low = 0;
  int high = 0;
};

BtxRates BtxRatesOf(const BtxOptions& options, int64_t pair, int64_t expert,
                    bool down);

// Sign draw of an expert of a coupled layer.
uint8_t BtxDrawOf(int64_t expert);

struct BtxFiles {
  TestTensors tensors;                          // of the layer file
  std::map<std::string, std::string> metadata;  // of the layer file

  std::string LayerBytes() const { return SafetensorsBytes(tensors, metadata); }
};

// The layer's contents are those of RandomLayer(options.seed). Scales that all
// experts share are those of expert 0.
BtxFiles MakeBtxFiles(const BtxOptions& options);

std::string BtxLayerName(int64_t layer);

// The manifest of one layer whose file is `layer_bytes`.
std::string MakeBtxManifest(const BtxOptions& options,
                            const std::string& layer_bytes);

// Writes both files.
void WriteBtx(const TestFolder& folder, const BtxOptions& options,
              const BtxFiles& files);

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_BTX_WRITER_H_
