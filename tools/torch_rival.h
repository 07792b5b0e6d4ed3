// TorchRival: PyTorch's bf16 mixture of experts in a process of its own, which
// is asked for one block at a time, so that both sides meet the same device.

#ifndef KILN_TOOLS_TORCH_RIVAL_H_
#define KILN_TOOLS_TORCH_RIVAL_H_

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/request.h"

namespace kiln {

// Not thread-safe. The process ends with this object.
class TorchRival {
 public:
  // Starts `python` with the embedded script and waits until the weights are
  // made.
  //   Errors: Unimplemented for an op that is not fused_moe; Unavailable, with
  //   what Python said last, when it or PyTorch is missing or fails.
  static absl::StatusOr<std::unique_ptr<TorchRival>> Start(
      const std::string& python, const RequestGeometry& geometry,
      const DeviceProfile& device, int ordinal);
  TorchRival(const TorchRival&) = delete;
  TorchRival& operator=(const TorchRival&) = delete;
  ~TorchRival();

  // "torch 2.11 cuda:0 bf16 grouped_mm".
  const std::string& description() const { return description_; }

  // Nanoseconds per call of m tokens, over as many draws. Unavailable when the
  // process is gone.
  absl::StatusOr<double> Time(uint32_t m, uint32_t draws);

 private:
  TorchRival() = default;

  absl::StatusOr<std::string> ReadLine();

  pid_t pid_ = -1;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
  std::string description_;
};

// torch_moe.py as (name, text); generated.
const std::vector<std::pair<std::string, std::string>>& TorchScript();

}  // namespace kiln

#endif  // KILN_TOOLS_TORCH_RIVAL_H_
