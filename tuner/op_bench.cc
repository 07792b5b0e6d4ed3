#include "tuner/op_bench.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/available_memory.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr uint64_t kZoneBytes = 4096;
constexpr uint8_t kZone = 0xA5;
constexpr uint8_t kInputZone = 0xFF;
// Around indices: routes to expert 0. 0xFF would read as "no route".
constexpr uint8_t kIndexZone = 0;
constexpr uint64_t kCheckChunkBytes = 16u << 20;

uint64_t AlignUp(uint64_t value) {
  return (value + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

absl::StatusOr<GuardedBuffer> Upload(Device* device, absl::string_view bytes,
                                     uint8_t zone) {
  ASSIGN_OR_RETURN(GuardedBuffer buffer,
                   GuardedBuffer::AllocateInput(device, bytes.size(), zone));
  RETURN_IF_ERROR(buffer.CopyIn(bytes));
  return buffer;
}

// Whether the device has what was uploaded; compared piece by piece.
absl::StatusOr<bool> Holds(Device* device, const GuardedBuffer& buffer,
                           absl::string_view expected) {
  std::string piece;
  for (uint64_t at = 0; at < expected.size(); at += kCheckChunkBytes) {
    piece.resize(std::min<uint64_t>(kCheckChunkBytes, expected.size() - at));
    RETURN_IF_ERROR(device->CopyOut(
        piece.data(), static_cast<const char*>(buffer.data()) + at,
        piece.size()));
    if (absl::string_view(piece) != expected.substr(at, piece.size())) {
      return false;
    }
  }
  return true;
}

}  // namespace

absl::StatusOr<GuardedBuffer> GuardedBuffer::Allocate(Device* device,
                                                      uint64_t bytes) {
  GuardedBuffer buffer;
  buffer.device_ = device;
  buffer.bytes_ = bytes;
  buffer.front_ = kZoneBytes;
  buffer.behind_ = kZoneBytes + AlignUp(bytes) - bytes;
  buffer.zone_ = kZone;
  ASSIGN_OR_RETURN(
      buffer.memory_,
      DeviceBuffer::Allocate(device, buffer.front_ + bytes + buffer.behind_));
  return buffer;
}

absl::StatusOr<GuardedBuffer> GuardedBuffer::AllocateInput(Device* device,
                                                           uint64_t bytes,
                                                           uint8_t zone) {
  if (!device->fences()) {
    ASSIGN_OR_RETURN(GuardedBuffer buffer, Allocate(device, bytes));
    buffer.zone_ = zone;
    return buffer;
  }
  GuardedBuffer buffer;
  buffer.device_ = device;
  buffer.bytes_ = bytes;
  buffer.front_ =
      (kZoneBytes + bytes + kPageBytes - 1) / kPageBytes * kPageBytes - bytes;
  buffer.zone_ = zone;
  ASSIGN_OR_RETURN(buffer.memory_,
                   DeviceBuffer::Allocate(device, buffer.front_ + bytes));
  return buffer;
}

void* GuardedBuffer::data() const {
  return static_cast<char*>(memory_.data()) + front_;
}

absl::Status GuardedBuffer::Poison(uint8_t value) {
  if (memory_.data() == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(device_->Fill(memory_.data(), zone_, memory_.bytes()));
  return device_->Fill(data(), value, bytes_);
}

absl::Status GuardedBuffer::CopyIn(absl::string_view payload) const {
  KILN_CHECK(payload.size() == bytes_);
  RETURN_IF_ERROR(device_->Fill(memory_.data(), zone_, front_));
  RETURN_IF_ERROR(
      device_->Fill(static_cast<char*>(data()) + bytes_, zone_, behind_));
  return device_->CopyIn(data(), payload.data(), payload.size());
}

absl::StatusOr<std::string> GuardedBuffer::FindDamage() const {
  if (memory_.data() == nullptr) return std::string();
  const char intact = static_cast<char>(zone_);
  std::string zone(front_, '\0');
  RETURN_IF_ERROR(device_->CopyOut(zone.data(), memory_.data(), front_));
  const size_t first = zone.find_first_not_of(intact);
  if (first != std::string::npos) {
    return absl::StrCat("wrote ", front_ - first,
                        " bytes before the buffer's start");
  }
  zone.resize(behind_);
  RETURN_IF_ERROR(device_->CopyOut(
      zone.data(), static_cast<const char*>(data()) + bytes_, zone.size()));
  const size_t last = zone.find_last_not_of(intact);
  if (last != std::string::npos) {
    return absl::StrCat("wrote up to ", last + 1,
                        " bytes behind the buffer's end");
  }
  return std::string();
}

absl::StatusOr<std::unique_ptr<OpBench>> OpBench::Create(
    Device* device, const RequestGeometry& geometry, uint64_t seed) {
  // What is uploaded stays on the host too, to be compared with.
  const uint64_t copies =
      device->profile().target.backend == Backend::kCpu ? 2 : 1;
  uint64_t bytes = 0;
  for (const BufferFill& fill : ContractOf(geometry).Buffers(geometry)) {
    if (fill.kind != BufferFill::Kind::kNone) bytes += copies * fill.bytes;
  }
  RETURN_IF_ERROR(CheckMemoryFor(
      absl::StrCat("the weights of ", geometry.ToString()), bytes));
  std::unique_ptr<OpBench> bench(new OpBench(device, geometry, seed));
  ASSIGN_OR_RETURN(bench->constants_, bench->UploadWeights());
  return bench;
}

uint8_t OpBench::ZoneOf(size_t slot) const {
  return fills_[slot].kind == BufferFill::Kind::kIndices ? kIndexZone
                                                         : kInputZone;
}

absl::StatusOr<std::vector<GuardedBuffer>> OpBench::UploadWeights() const {
  std::vector<GuardedBuffer> buffers(params_.size());
  for (size_t slot = 0; slot < buffers.size(); ++slot) {
    const absl::string_view bytes = workload_->Constant(slot);
    if (bytes.empty()) continue;
    ASSIGN_OR_RETURN(buffers[slot], Upload(device_, bytes, ZoneOf(slot)));
  }
  return buffers;
}

absl::Status OpBench::Reserve(uint32_t tokens, uint64_t arena_bytes) {
  const uint64_t output_bytes =
      uint64_t{tokens} * workload_->row_width() * sizeof(float);
  if (output_.bytes() != output_bytes) {
    ASSIGN_OR_RETURN(output_, GuardedBuffer::Allocate(device_, output_bytes));
  }
  if (arena_.bytes() != arena_bytes) {
    // The old arena goes first: both may not fit.
    arena_ = GuardedBuffer();
    ASSIGN_OR_RETURN(arena_, GuardedBuffer::Allocate(device_, arena_bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> OpBench::AddInputs(DrawKind kind, uint32_t draw,
                                          uint32_t tokens) {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Inputs& set = inputs_[i];
    if (set.kind == kind && set.draw == draw && set.tokens == tokens) {
      return i;
    }
  }
  Inputs inputs;
  inputs.kind = kind;
  inputs.draw = draw;
  inputs.tokens = tokens;
  inputs.host = workload_->TokenInputs(kind, draw, tokens);
  inputs.buffers.resize(inputs.host.size());
  for (size_t slot = 0; slot < inputs.host.size(); ++slot) {
    if (inputs.host[slot].empty()) continue;
    ASSIGN_OR_RETURN(inputs.buffers[slot],
                     Upload(device_, inputs.host[slot], ZoneOf(slot)));
  }
  inputs_.push_back(std::move(inputs));
  return inputs_.size() - 1;
}

void OpBench::ClearInputs() { inputs_.clear(); }

absl::Status OpBench::CopyWeights(size_t inputs) {
  ASSIGN_OR_RETURN(inputs_.at(inputs).weights, UploadWeights());
  return absl::OkStatus();
}

absl::Status OpBench::RewriteInputs(size_t inputs, DrawKind kind, uint32_t draw,
                                    uint32_t tokens) {
  Inputs& set = inputs_.at(inputs);
  set.kind = kind;
  set.draw = draw;
  set.tokens = tokens;
  set.host = workload_->TokenInputs(kind, draw, tokens);
  for (size_t slot = 0; slot < set.host.size(); ++slot) {
    if (set.host[slot].empty()) continue;
    KILN_CHECK(set.buffers[slot].bytes() == set.host[slot].size());
    RETURN_IF_ERROR(set.buffers[slot].CopyIn(set.host[slot]));
  }
  return absl::OkStatus();
}

std::vector<uint64_t> OpBench::Params(size_t inputs) const {
  const Inputs& tokens = inputs_.at(inputs);
  const std::vector<GuardedBuffer>& weights =
      tokens.weights.empty() ? constants_ : tokens.weights;
  std::vector<uint64_t> params;
  for (size_t slot = 0; slot < params_.size(); ++slot) {
    const GuardedBuffer& buffer = params_[slot].output ? output_
                                  : tokens.host[slot].empty()
                                      ? weights[slot]
                                      : tokens.buffers[slot];
    params.push_back(reinterpret_cast<uint64_t>(buffer.data()));
  }
  return params;
}

absl::StatusOr<std::vector<float>> OpBench::ReadOutput(uint32_t tokens) const {
  std::vector<float> rows(size_t{tokens} * workload_->row_width());
  RETURN_IF_ERROR(device_->CopyOut(rows.data(), output_.data(),
                                   rows.size() * sizeof(float)));
  return rows;
}

std::vector<OpBench::Slot> OpBench::TokenSlots(const Inputs& inputs) const {
  std::vector<Slot> slots;
  for (size_t slot = 0; slot < params_.size(); ++slot) {
    if (inputs.host[slot].empty()) continue;
    slots.push_back(
        {params_[slot].name, &inputs.buffers[slot], inputs.host[slot]});
  }
  return slots;
}

std::vector<OpBench::Slot> OpBench::ConstantSlots(
    const std::vector<GuardedBuffer>& buffers) const {
  std::vector<Slot> slots;
  for (size_t slot = 0; slot < buffers.size(); ++slot) {
    if (buffers[slot].bytes() == 0) continue;
    slots.push_back(
        {params_[slot].name, &buffers[slot], workload_->Constant(slot)});
  }
  return slots;
}

std::vector<OpBench::Slot> OpBench::AllSlots() const {
  std::vector<Slot> slots = ConstantSlots(constants_);
  for (const Inputs& inputs : inputs_) {
    for (Slot& slot : TokenSlots(inputs)) slots.push_back(std::move(slot));
    for (Slot& slot : ConstantSlots(inputs.weights)) {
      slots.push_back(std::move(slot));
    }
  }
  return slots;
}

absl::Status OpBench::CheckInputs() const {
  for (const Slot& slot : AllSlots()) {
    ASSIGN_OR_RETURN(const std::string damage, FindDamage(slot));
    if (!damage.empty()) return absl::InternalError(damage);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> OpBench::FindDamage(const Slot& slot) const {
  ASSIGN_OR_RETURN(const bool whole, Holds(device_, *slot.buffer, slot.host));
  if (!whole) {
    return absl::StrCat("read-only input ", slot.name, " was written");
  }
  ASSIGN_OR_RETURN(const std::string damage, slot.buffer->FindDamage());
  return damage.empty() ? damage
                        : absl::StrCat("input ", slot.name, ": ", damage);
}

absl::StatusOr<std::string> OpBench::Restore(const std::vector<Slot>& slots) {
  std::string finding;
  for (const Slot& slot : slots) {
    ASSIGN_OR_RETURN(const std::string damage, FindDamage(slot));
    if (damage.empty()) continue;
    RETURN_IF_ERROR(slot.buffer->CopyIn(slot.host));
    if (finding.empty()) finding = damage;
  }
  return finding;
}

absl::StatusOr<std::string> OpBench::RestoreTokens(size_t inputs) {
  return Restore(TokenSlots(inputs_.at(inputs)));
}

absl::StatusOr<std::string> OpBench::RestoreInputs() {
  return Restore(AllSlots());
}

}  // namespace kiln
