// TrellisMatrix: one decodable matrix of a layer on the host. Its tiles have
// one rate, or it is cut into two records of 128 channels with a rate each.
//
// Source: trellis format specification, sections 1.1 to 1.4 and 2.3.

#ifndef KILN_TEMPLATES_FUSED_MOE_TRELLIS_MATRIX_H_
#define KILN_TEMPLATES_FUSED_MOE_TRELLIS_MATRIX_H_

#include <cstdint>

#include "templates/fused_moe/trellis_codebook.h"

namespace kiln {

inline constexpr int64_t kTileEdge = 16;
// Channels of one record of a pair, and of a Hadamard block.
inline constexpr int64_t kRecordChannels = 128;
inline constexpr int64_t kPairChannels = 2 * kRecordChannels;

// The rates of a pair of records as the containers store them.
struct PairRate {
  int low = 0;   // bits of channels 0..127
  int high = 0;  // bits of channels 128..255

  static constexpr PairRate FromByte(uint8_t byte) {
    return {.low = byte >> 4, .high = byte & 0xF};
  }

  constexpr uint8_t byte() const {
    return static_cast<uint8_t>(low << 4 | high);
  }
};

// A view of [k][n] weights; k and n are multiples of 16. Borrows the words,
// which need only the alignment of their type.
struct TrellisMatrix {
  // Which axis the records of a pair divide.
  enum class Records {
    kNone,     // [k/16][n/16][16 bits]
    kColumns,  // n = 256: [k/16]{low [8][16 low], high [8][16 high]}
    kRows,     // k = 256: low [8][n/16][16 low], high [8][n/16][16 high]
  };

  const uint16_t* words = nullptr;
  int64_t k = 0;
  int64_t n = 0;
  TrellisCodebook codebook = TrellisCodebook::kMcg;
  Records records = Records::kNone;
  int bits = 0;        // of kNone
  PairRate pair = {};  // of the others

  // 16-bit words of the whole matrix.
  int64_t word_count() const;
};

// Binary16 bits, row-major [k][n]. Without scales and rotations.
void DecodeTrellisMatrix(const TrellisMatrix& matrix, uint16_t* out);

// The same for a matrix of one rate.
inline void DecodeTrellisMatrix(const uint16_t* words, int64_t k, int64_t n,
                                int bits, TrellisCodebook codebook,
                                uint16_t* out) {
  DecodeTrellisMatrix(
      {.words = words, .k = k, .n = n, .codebook = codebook, .bits = bits},
      out);
}

// y[r][0..127] = sum over k of x[r][k] * w[k][128 block + 0..127].
//   T: double or float, the type of the sums: in binary32 they run over
//     ascending k with one fma per term.
//   x: [count][k], each a value of T.
//   y: rows of n values, of which the block's are written.
template <class T>
void MultiplyTrellisBlock(const TrellisMatrix& matrix, int64_t block,
                          const double* x, int64_t count, double* y);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TRELLIS_MATRIX_H_
