// From a matrix of real numbers to trellis tiles: all tiles of a grid on
// several threads, and the EXL3 form with its scales and Hadamard transforms.
//
// Source: trellis format specification, sections 1.1 to 1.7; for the scales,
// the prepared-weights specification, section A.10 ("scale matters more than
// the law").

#ifndef KILN_TEMPLATES_FORMATS_ENCODER_MATRIX_H_
#define KILN_TEMPLATES_FORMATS_ENCODER_MATRIX_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/spec/request.h"
#include "templates/formats/encoder_tile.h"

namespace kiln {

// Value of each state of a codebook.
std::vector<float> CodebookAlphabet(Codebook codebook);

// Standard deviation of an alphabet over all states.
double AlphabetDeviation(std::span<const float> alphabet);

// Where the search for the best ratio of a Gaussian input's standard deviation
// to the alphabet's begins; about 1 at K = 2, falling to what keeps the
// alphabet's largest value in reach at K = 8.
double TypicalRatio(int bits);

// A matrix [rows][columns], row-major; both multiples of 16. Tile (a, b) is
// rows 16 a.. and columns 16 b...
struct GridView {
  const float* values = nullptr;
  size_t rows = 0;
  size_t columns = 0;

  size_t tiles() const { return rows / 16 * (columns / 16); }
};

// Encodes grids over one alphabet. Not thread-safe; it runs its own threads.
class GridEncoder {
 public:
  // threads: at least 1. Each holds up to 16 MiB of costs (2^(26 - K) bytes).
  GridEncoder(std::span<const float> alphabet, int bits, int threads);

  int bits() const { return bits_; }

  std::span<const float> alphabet() const { return alphabet_; }

  // Called with the number of tiles that were just done, from any thread.
  void set_progress(std::function<void(size_t)> progress) {
    progress_ = std::move(progress);
  }

  // Encodes every tile.
  //   words: tiles() * 16 K, in the order of an EXL3 tensor.
  //   decoded: rows * columns, the values of the states that were chosen.
  // The result does not depend on the number of threads.
  void Encode(const GridView& grid, std::span<uint16_t> words,
              std::span<float> decoded);

  // Encodes the listed tiles only, into `words` and `decoded` of a whole grid.
  void EncodeTiles(const GridView& grid, std::span<const size_t> tiles,
                   std::span<uint16_t> words, std::span<float> decoded);

  // The factor by which all values should be multiplied before they are
  // encoded, so that the squared error relative to their energy is least. Tries
  // a few on some of the tiles.
  double BestFactor(const GridView& grid);

 private:
  void ForEachTile(const GridView& grid, std::span<const size_t> tiles,
                   const std::function<void(size_t tile, TileEncoder*)>& work);

  int bits_;
  std::vector<float> alphabet_;
  std::vector<std::unique_ptr<TileEncoder>> encoders_;
  std::function<void(size_t)> progress_;
};

// y = H x on each aligned block of `size` rows (or columns) of a row-major
// matrix, size a power of two that divides them; normalised, in place.
void HadamardRows(size_t rows, size_t columns, size_t size,
                  std::vector<double>* matrix);
void HadamardColumns(size_t rows, size_t columns, size_t size,
                     std::vector<double>* matrix);

// Root mean square of each row (or column).
std::vector<double> RowNorms(size_t rows, size_t columns,
                             const std::vector<double>& matrix);
std::vector<double> ColumnNorms(size_t rows, size_t columns,
                                const std::vector<double>& matrix);

// `count` numbers, each +1 or -1, from a seed.
std::vector<double> RandomSigns(uint64_t seed, size_t count);

// One EXL3 group: W = diag(suh) H V H diag(svh), V the decoded tiles.
struct Exl3Encoding {
  std::vector<uint16_t> trellis;  // [in/16][out/16][16 K]
  std::vector<uint16_t> suh;      // binary16 [in]
  std::vector<uint16_t> svh;      // binary16 [out]
  double energy = 0;              // sum of the squares of W
  // Sum of the squares of W - diag(suh) H V H diag(svh), with the scales as
  // they are stored.
  double squared_error = 0;
};

// Encodes W [in][out], row-major; both multiples of 128.
//   seed: of the signs in suh and svh.
//   Errors: InvalidArgument for a value that is not finite, and for values
//   whose scales binary16 cannot hold.
absl::StatusOr<Exl3Encoding> EncodeExl3(std::span<const float> weights,
                                        size_t in, size_t out, uint64_t seed,
                                        GridEncoder* encoder);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_ENCODER_MATRIX_H_
