// TrellisCodebook: the codebooks of every trellis container that Kiln reads,
// as tables from state to value. The three of EXL3 are those of a request; the
// SQG ones have no kernels, only readers and references.
//
// Source: trellis format specification, sections 1.5 and 2.1.

#ifndef KILN_TEMPLATES_FUSED_MOE_TRELLIS_CODEBOOK_H_
#define KILN_TEMPLATES_FUSED_MOE_TRELLIS_CODEBOOK_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "compiler/spec/request.h"

namespace kiln {

// A value. Every codebook of a request is one of these.
class TrellisCodebook {
 public:
  enum Value { k3Inst, kMcg, kMul1, kSqgE4m3, kSqgFp16 };

  constexpr TrellisCodebook(Value value) : value_(value) {}  // NOLINT

  constexpr TrellisCodebook(Codebook codebook)  // NOLINT
      : value_(static_cast<Value>(codebook)) {}

  constexpr operator Value() const { return value_; }  // NOLINT

  // "3inst", "mcg", "mul1", "sqg_e4m3", "sqg_fp16".
  absl::string_view name() const;
  // The same codebook in a request, if requests have it.
  std::optional<Codebook> request() const;

  // The rates K that it is defined for.
  int bits_min() const;
  int bits_max() const;

 private:
  Value value_;
};

static_assert(static_cast<int>(Codebook::k3Inst) == TrellisCodebook::k3Inst &&
              static_cast<int>(Codebook::kMcg) == TrellisCodebook::kMcg &&
              static_cast<int>(Codebook::kMul1) == TrellisCodebook::kMul1);

// The values of all 65,536 states.
struct TrellisTable {
  std::vector<uint16_t> bits;  // binary16
  std::vector<float> value;
};

// The table of a codebook at a rate; only SQG tables depend on the rate. Built
// at the first call, lives for the whole process. Thread-safe.
//   bits: within the codebook's rates.
const TrellisTable& TrellisTableOf(TrellisCodebook codebook, int bits);

// The rank of a state, a bijection on 16 bits.
//   bits: 2..6.
uint32_t SqgRank(uint32_t state, int bits);

// E4M3FN byte of each rank / 16: the values of sqg_e4m3. 4096 bytes.
const std::vector<uint8_t>& SqgE4m3Bytes();

// Binary16 of a rank: the values of sqg_fp16.
uint16_t SqgFp16Value(uint32_t rank);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TRELLIS_CODEBOOK_H_
