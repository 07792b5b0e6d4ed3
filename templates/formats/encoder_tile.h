// TileEncoder: the states of one trellis tile whose values come closest to 256
// given numbers. Viterbi over all 65,536 states, tail-biting.
//
// What limits it: a position reads the value of every state once, 256 KiB, and
// the best cost of every prefix of a state, 4 * 2^(16 - K) bytes, and writes as
// many. Decisions are not stored: the costs of all positions are kept, and the
// way back is found by computing 2^K of them again per position.

#ifndef KILN_TEMPLATES_FORMATS_ENCODER_TILE_H_
#define KILN_TEMPLATES_FORMATS_ENCODER_TILE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

namespace kiln {

inline constexpr size_t kTileStates = 65536;
inline constexpr size_t kTileSize = 256;

// Numbers or states of one tile, by stream position.
using TileValues = std::array<float, kTileSize>;
using TileStates = std::array<uint16_t, kTileSize>;

// Instruction sets of the inner loop. All give the same bits.
enum class EncoderLevel { kPortable, kAvx2, kAvx512 };

// The best that this processor has.
EncoderLevel BestEncoderLevel();

// Not thread-safe: one object per thread.
class TileEncoder {
 public:
  // alphabet: the value of each state, 65,536 finite numbers; copied.
  // bits: K, 1..8.
  TileEncoder(std::span<const float> alphabet, int bits,
              EncoderLevel level = BestEncoderLevel());

  // The states whose values are near `target` in squared error. They are those
  // of a ring: state p follows state p - 1, and state 0 follows state 255.
  //   target: finite, below 1e12 in magnitude.
  // Two passes. The first starts half a tile early at no state in particular;
  // what it finds at the seam is where the second must begin and end. So the
  // result is a local optimum: best among all paths through that seam.
  TileStates Encode(const TileValues& target);

  // One pass as Encode runs two of them, for benchmarks.
  void Forward(const TileValues& target);

 private:
  // From the start of a cache line: no vector of the inner loop lies in two.
  template <typename T>
  struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t kLine{64};

    LineAllocator() = default;

    template <typename U>
    LineAllocator(const LineAllocator<U>&) {}

    T* allocate(size_t count) {
      return static_cast<T*>(::operator new(count * sizeof(T), kLine));
    }

    void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }

    bool operator==(const LineAllocator&) const = default;
  };

  using LineVector = std::vector<float, LineAllocator<float>>;
  using StepFn = void (*)(const float* values, const float* before, float x,
                          float* after);

  float* Costs(size_t row) { return costs_.data() + row * stride_; }

  void RunForward(const float* target);
  // Fills states [first, 256) of a path that ends in prefix `end`.
  void RunBack(const float* target, size_t end, size_t first,
               TileStates* states);

  int bits_ = 0;
  size_t prefixes_ = 0;  // 2^(16 - K)
  size_t stride_ = 0;    // floats of one row of costs
  StepFn step_ = nullptr;
  std::vector<float> alphabet_;
  LineVector ordered_;  // the same, in the order of the inner loop
  // Row p + 1: least cost of positions 0..p over all paths whose last state has
  // these 16 - K low bits. Row 0: where a path may begin.
  LineVector costs_;
};

// The 16 K words of a tile, as files hold them.
//   states: of a ring, as TileEncoder gives them.
void PackTile(const TileStates& states, int bits, std::span<uint16_t> words);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_ENCODER_TILE_H_
