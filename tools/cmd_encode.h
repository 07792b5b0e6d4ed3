// The verb encode: its options, and what runs it.

#ifndef KILN_TOOLS_CMD_ENCODE_H_
#define KILN_TOOLS_CMD_ENCODE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "tools/cli.h"

namespace kiln {

struct EncodeCommand {
  std::string checkpoint;
  std::string output;
  std::string format = "exl3";  // or "npk1"
  std::string bits = "4";       // "K", or of exl3 "gate,up,down"
  // Options of one format; absent: not given.
  std::optional<std::string> codebook;     // of exl3; "mcg"
  std::optional<int64_t> tensor_parallel;  // of npk1; 1
  std::optional<std::string> boundary;     // of npk1; "coupled", or "identity"
  std::optional<std::string> limit;        // of npk1; "inf"
  uint64_t seed = 0;
  int threads = 0;  // 0 = one per core
};

absl::StatusOr<int> RunEncode(const GlobalOptions& global,
                              const EncodeCommand& command);

}  // namespace kiln

#endif  // KILN_TOOLS_CMD_ENCODE_H_
