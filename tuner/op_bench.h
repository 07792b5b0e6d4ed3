// OpBench: the buffers of one request on one device. Weights are uploaded once;
// token inputs come in numbered sets; every buffer lies between red zones.

#ifndef KILN_TUNER_OP_BENCH_H_
#define KILN_TUNER_OP_BENCH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/spec/request.h"
#include "templates/op_contract.h"
#include "templates/op_workload.h"
#include "tuner/device.h"

namespace kiln {

// A device buffer with red zones before and after it.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  // For what kernels write: the zones hold what no kernel writes.
  static absl::StatusOr<GuardedBuffer> Allocate(Device* device, uint64_t bytes);
  // For what kernels only read: the zones hold NaN, so that a read there shows
  // in a result. On a device that fences its memory the payload ends at the
  // fence instead.
  //   zone: what the zones hold instead, where 0xFF reads as something
  //   harmless.
  static absl::StatusOr<GuardedBuffer> AllocateInput(Device* device,
                                                     uint64_t bytes,
                                                     uint8_t zone = 0xFF);

  void* data() const;

  uint64_t bytes() const { return bytes_; }

  // Renews the zones and fills the payload with `value` (0xFF: NaN as f32, f16
  // and bf16).
  absl::Status Poison(uint8_t value = 0xFF);
  // Renews the zones and copies the payload from the host.
  absl::Status CopyIn(absl::string_view payload) const;
  // Side and distance of a write into a zone, for people; empty when both
  // zones are intact. The status is the device's.
  absl::StatusOr<std::string> FindDamage() const;

 private:
  Device* device_ = nullptr;
  DeviceBuffer memory_;
  uint64_t bytes_ = 0;
  uint64_t front_ = 0;   // bytes of the zone before the payload
  uint64_t behind_ = 0;  // and of the one behind it
  uint8_t zone_ = 0;
};

// Not thread-safe. Owns device memory; destroy before the device.
class OpBench {
 public:
  // Makes weights from `seed` and uploads them.
  //   Errors: ResourceExhausted, before any of it, when the machine has too
  //   little memory; those of the device.
  static absl::StatusOr<std::unique_ptr<OpBench>> Create(
      Device* device, const RequestGeometry& geometry, uint64_t seed);

  Device* device() const { return device_; }

  OpWorkload& workload() { return *workload_; }

  const RequestGeometry& geometry() const { return workload_->geometry(); }

  const OpContract& contract() const { return ContractOf(geometry()); }

  // Makes sure that output and arena hold this much.
  absl::Status Reserve(uint32_t tokens, uint64_t arena_bytes);

  // Uploads tokens 0..tokens-1 of a draw and returns the number of the input
  // set; a set with the same tokens that is already there is returned instead.
  // Sets live until ClearInputs.
  absl::StatusOr<size_t> AddInputs(DrawKind kind, uint32_t draw,
                                   uint32_t tokens);
  void ClearInputs();

  // Gives an input set weights of its own, the same as the others', so that
  // launches that alternate between sets do not find each other's in a cache.
  absl::Status CopyWeights(size_t inputs);

  // Overwrites an input set in place with another draw of the same size: its
  // addresses, and so a captured graph, stay valid.
  absl::Status RewriteInputs(size_t inputs, DrawKind kind, uint32_t draw,
                             uint32_t tokens);

  // Parameter block of an input set.
  std::vector<uint64_t> Params(size_t inputs) const;

  GuardedBuffer& output() { return output_; }

  GuardedBuffer& arena() { return arena_; }

  // Copies the first `tokens` output rows to the host.
  absl::StatusOr<std::vector<float>> ReadOutput(uint32_t tokens) const;

  // Internal when an input or its zones no longer have their bytes:
  // something wrote to or around a read-only buffer. Reads all weights back.
  absl::Status CheckInputs() const;

  // The same as a finding: the first damaged slot in words, or empty when all
  // are intact. Damaged slots are uploaded again, so that the next candidate
  // starts from whole inputs. RestoreInputs looks at everything, RestoreTokens
  // at one input set.
  absl::StatusOr<std::string> RestoreTokens(size_t inputs);
  absl::StatusOr<std::string> RestoreInputs();

 private:
  struct Inputs {
    DrawKind kind = DrawKind::kUniform;
    uint32_t draw = 0;
    uint32_t tokens = 0;
    // By slot; empty where a slot does not depend on the tokens.
    std::vector<std::string> host;
    std::vector<GuardedBuffer> buffers;
    std::vector<GuardedBuffer> weights;  // its own, or none
  };

  // An input buffer and what it must hold.
  struct Slot {
    std::string name;
    const GuardedBuffer* buffer = nullptr;
    absl::string_view host;
  };

  // Of one buffer per slot; those that are empty are left out.
  std::vector<Slot> ConstantSlots(
      const std::vector<GuardedBuffer>& buffers) const;
  std::vector<Slot> TokenSlots(const Inputs& inputs) const;
  std::vector<Slot> AllSlots() const;
  absl::StatusOr<std::string> FindDamage(const Slot& slot) const;
  absl::StatusOr<std::string> Restore(const std::vector<Slot>& slots);

  // What the zones around an input slot hold.
  uint8_t ZoneOf(size_t slot) const;
  // Uploads Constant of every slot that has one.
  absl::StatusOr<std::vector<GuardedBuffer>> UploadWeights() const;

  OpBench(Device* device, const RequestGeometry& geometry, uint64_t seed)
      : device_(device),
        workload_(ContractOf(geometry).MakeWorkload(geometry, seed)),
        params_(contract().Params(geometry)),
        fills_(contract().Buffers(geometry)) {}

  Device* device_;
  std::unique_ptr<OpWorkload> workload_;
  std::vector<ParamDecl> params_;         // by slot
  std::vector<BufferFill> fills_;         // by slot
  std::vector<GuardedBuffer> constants_;  // by slot; empty where per-token
  std::vector<Inputs> inputs_;
  GuardedBuffer output_;
  GuardedBuffer arena_;
};

}  // namespace kiln

#endif  // KILN_TUNER_OP_BENCH_H_
