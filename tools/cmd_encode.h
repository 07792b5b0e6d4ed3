// The verb encode: its options, and what runs it.

#ifndef KILN_TOOLS_CMD_ENCODE_H_
#define KILN_TOOLS_CMD_ENCODE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "tools/cli.h"

namespace kiln {

struct EncodeCommand {
  std::string checkpoint;
  std::string output;
  std::string format = "exl3";       // or "npk1"
  std::string codebook = "mcg";      // of exl3
  std::string bits = "4";            // "K", or of exl3 "gate,up,down"
  int64_t tensor_parallel = 1;       // of npk1
  std::string boundary = "coupled";  // of npk1, or "identity"
  std::string limit = "inf";         // of npk1
  uint64_t seed = 0;
  int threads = 0;  // 0 = one per core
};

absl::StatusOr<int> RunEncode(const GlobalOptions& global,
                              const EncodeCommand& command);

}  // namespace kiln

#endif  // KILN_TOOLS_CMD_ENCODE_H_
