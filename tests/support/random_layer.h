// RandomLayer: the contents of one layer with experts, before any container has
// a say about their order. Every part follows from the seed and its place, so a
// test can write it in one order and look for it in another.

#ifndef KILN_TESTS_SUPPORT_RANDOM_LAYER_H_
#define KILN_TESTS_SUPPORT_RANDOM_LAYER_H_

#include <cstdint>
#include <string>

namespace kiln::testing {

// SplitMix64's output for a state.
inline uint64_t MixBits(uint64_t z) {
  z += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

class RandomLayer {
 public:
  explicit RandomLayer(uint64_t seed) : seed_(seed) {}

  // The bytes of one tile: 16 of the intermediate channels times 16 of the
  // hidden ones.
  //   section: 0 gate, 1 up, 2 down. channels: tile of the intermediate axis.
  std::string Tile(int64_t expert, int section, int64_t channels,
                   int64_t hidden, int bits) const {
    uint64_t state = Place(expert, section, channels, hidden);
    std::string bytes;
    for (int i = 0; i < 4 * bits; ++i) {
      uint64_t word = MixBits(state++);
      for (int j = 0; j < 8; ++j, word >>= 8) {
        bytes.push_back(static_cast<char>(word));
      }
    }
    return bytes;
  }

  // A binary16 scale of a random sign and a magnitude within [0.5, 2).
  //   table: any number that names a vector of scales.
  std::string Scale(int64_t expert, int table, int64_t channel) const {
    const uint64_t random = MixBits(Place(expert, 100 + table, channel, 0));
    const uint64_t bits = (random & 1) << 15 | (14 + (random >> 20 & 1)) << 10 |
                          (random >> 30 & 0x3FF);
    return {static_cast<char>(bits), static_cast<char>(bits >> 8)};
  }

  std::string Scales(int64_t expert, int table, int64_t begin,
                     int64_t end) const {
    std::string bytes;
    for (int64_t c = begin; c < end; ++c) bytes += Scale(expert, table, c);
    return bytes;
  }

 private:
  uint64_t Place(int64_t expert, int section, int64_t a, int64_t b) const {
    uint64_t state = seed_;
    for (const int64_t part : {expert, int64_t{section}, a, b}) {
      state = MixBits(state ^ static_cast<uint64_t>(part));
    }
    return state;
  }

  uint64_t seed_;
};

// Tables of RandomLayer::Scale.
inline constexpr int kGateSuhTable = 0;
inline constexpr int kUpSuhTable = 1;
inline constexpr int kDownSvhTable = 2;
// gate_svh, up_svh and down_suh are kRotationTable + section.
inline constexpr int kRotationTable = 3;

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_RANDOM_LAYER_H_
