// A layer's native tensors in memory, and calls of the reference with them.

#ifndef KILN_TESTS_SUPPORT_NATIVE_LAYER_H_
#define KILN_TESTS_SUPPORT_NATIVE_LAYER_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "templates/formats/trellis_source.h"
#include "templates/fused_moe/reference.h"
#include "tests/support/random_layer.h"

namespace kiln::testing {

// The whole slot; its pieces must keep within the limits.
inline std::string ReadSlot(TrellisSource* source, FusedMoeParam slot) {
  std::string bytes;
  const absl::Status status =
      source->Stream(slot, [&](std::span<const uint8_t> piece) {
        EXPECT_LE(piece.size(), kStagingBytesMax);
        bytes.append(piece.begin(), piece.end());
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return bytes;
}

class NativeLayer {
 public:
  explicit NativeLayer(TrellisSource* source) : layout_(source->layout()) {
    for (const FusedMoeParam slot : kTrellisSlots) {
      slots_.push_back(ReadSlot(source, slot));
    }
  }

  NativeLayer(const NativeLayer&) = delete;
  NativeLayer& operator=(const NativeLayer&) = delete;

  // The weights of a call; borrows this object.
  FusedMoeProblem Problem() const {
    const auto words = [&](size_t i) {
      return reinterpret_cast<const uint16_t*>(slots_[i].data());
    };
    FusedMoeProblem p;
    p.hidden = layout_.hidden;
    p.intermediate = layout_.intermediate;
    p.experts = layout_.experts;
    p.codebook = layout_.codebook;
    p.bits = layout_.bits;
    p.shared_scales = layout_.shared_scales;
    p.coupled = layout_.coupled;
    if (layout_.pairs()) {
      p.rates_fc1 = layout_.rates_fc1.data();
      p.rates_fc2 = layout_.rates_fc2.data();
    }
    p.w_gate = words(0);
    p.w_up = words(1);
    p.w_down = words(2);
    p.gate_suh = words(3);
    p.up_suh = words(4);
    p.rotations = words(5);
    p.down_svh = words(6);
    return p;
  }

 private:
  TrellisLayout layout_;
  std::vector<std::string> slots_;
};

// Seeded inputs: binary16 x within [-2, 2), routes over all experts.
class NativeCall {
 public:
  NativeCall(const TrellisLayout& layout, int64_t tokens, int64_t top_k,
             uint64_t seed)
      : tokens_(tokens), top_k_(top_k) {
    const RandomLayer random(seed);
    for (int64_t t = 0; t < tokens; ++t) {
      const std::string row = random.Scales(t, 0, 0, layout.hidden);
      x_ += row;
      for (int64_t j = 0; j < top_k; ++j) {
        ids_.push_back((t + j) % layout.experts);
        weights_.push_back(0.25f + 0.5f * static_cast<float>(j));
      }
    }
  }

  NativeCall(const NativeCall&) = delete;
  NativeCall& operator=(const NativeCall&) = delete;

  // Sets the inputs of a call; borrows this object.
  void Fill(FusedMoeProblem* p) const {
    p->tokens = tokens_;
    p->top_k = top_k_;
    p->x_dtype = DType::kF16;
    p->id_dtype = DType::kI64;
    p->x = x_.data();
    p->topk_ids = ids_.data();
    p->topk_weights = weights_.data();
  }

 private:
  int64_t tokens_;
  int64_t top_k_;
  std::string x_;
  std::vector<int64_t> ids_;
  std::vector<float> weights_;
};

inline std::vector<double> AllRows(const FusedMoeProblem& p,
                                   ReferenceMode mode) {
  std::vector<int64_t> rows(static_cast<size_t>(p.tokens));
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<double> out(static_cast<size_t>(p.tokens * p.hidden));
  FusedMoeReferenceRows(p, rows, mode, out.data(), 1);
  return out;
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_NATIVE_LAYER_H_
