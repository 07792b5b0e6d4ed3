// Small NPK-1 sidecars of random streams for tests, and ways to damage one.

#ifndef KILN_TESTS_SUPPORT_NPK_WRITER_H_
#define KILN_TESTS_SUPPORT_NPK_WRITER_H_

#include <cstdint>
#include <map>
#include <string>

#include "templates/formats/npk.h"

namespace kiln::testing {

// Coupled, H 512, I 128 of 256 on each of two ranks, 3 experts, K 3.
NpkMetadata SmallNpk();

// Bytes of every tensor: random streams, scales around one, draws 0, 1, 2...
std::map<NpkTensor, std::string> RandomNpkTensors(const NpkMetadata& metadata,
                                                  uint64_t seed);

// A whole valid file.
std::string NpkBytes(const NpkMetadata& metadata,
                     const std::map<NpkTensor, std::string>& tensors);

// The file with the first `from` in its header's text replaced, padded again.
// Throws if it is not there.
std::string WithHeaderText(const std::string& file, const std::string& from,
                           const std::string& to);

// Where a tensor begins in a valid file.
size_t NpkTensorOffset(const std::string& file, const NpkMetadata& metadata,
                       NpkTensor which);

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_NPK_WRITER_H_
