// Writes small QSRT atoms layers for tests: valid ones, which a test then
// damages in one place.

#ifndef KILN_TESTS_SUPPORT_QSRT_WRITER_H_
#define KILN_TESTS_SUPPORT_QSRT_WRITER_H_

#include <cstdint>
#include <map>
#include <string>

#include "tests/support/checkpoint_writer.h"
#include "tests/support/random_layer.h"

namespace kiln::testing {

struct QsrtOptions {
  bool kimi = true;  // else the schema whose experts have their own scales
  int64_t hidden = 128;
  int64_t intermediate = 512;
  int64_t layer = 3;
  int64_t multiplier = 5;
  int64_t alignment = 4096;
  // Format codes of the experts, a byte each; 0xFF is one of the X4T tier.
  std::string codes = std::string("\x10\x01\x22\x00\x12", 5);
  uint64_t seed = 9;
};

// Place of an expert's logical pair on the stored axis.
int64_t QsrtPhysicalPair(const QsrtOptions& options, int64_t expert,
                         int64_t logical);

// Bits of record 2 * logical (low) and 2 * logical + 1 (high).
int QsrtRecordBits(const QsrtOptions& options, int64_t expert, int64_t logical,
                   bool high, bool down);

// What makes up the file; a test changes it before QsrtFileBytes.
struct QsrtFile {
  TestTensors tensors;
  std::map<std::string, std::string> metadata;
};

// Tiles and scales are RandomLayer(seed)'s, with the logical order of channels
// (record r is channels 128 r ..).
QsrtFile MakeQsrtFile(const QsrtOptions& options);

// With the schema's header: canonical for Kimi's, else as other writers do.
std::string QsrtFileBytes(const QsrtOptions& options, const QsrtFile& file);

// "qsrt-layer-003.safetensors".
std::string QsrtName(int64_t layer);

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_QSRT_WRITER_H_
