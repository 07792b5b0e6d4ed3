// Where the template tests find their data, and how they read it.
//
// Files lie in tests/data of the source tree, which ctest names in
// KILN_SOURCE_DIR. The environment may name another folder for golden files
// (KILN_GOLDEN_DIR) or for vector files (KILN_VECTORS_DIR).

#ifndef KILN_TESTS_TEMPLATES_TEST_DATA_H_
#define KILN_TESTS_TEMPLATES_TEST_DATA_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "compiler/base/digest.h"
#include "nlohmann/json.hpp"
#include "tests/support/golden.h"

namespace kiln::testing {

inline std::filesystem::path FolderOr(const char* variable,
                                      const char* standard) {
  const char* given = std::getenv(variable);
  if (given != nullptr && *given != '\0') return given;
  return SourcePath("tests/data/" + std::string(standard));
}

inline std::filesystem::path GoldenFolder() {
  return FolderOr("KILN_GOLDEN_DIR", "golden");
}

inline std::filesystem::path VectorsFolder() {
  return FolderOr("KILN_VECTORS_DIR", "vectors");
}

// Files at any depth below `folder` whose name starts with `prefix` and ends
// with `suffix`, sorted. Empty if the folder does not exist.
inline std::vector<std::filesystem::path> FilesNamed(
    const std::filesystem::path& folder, const std::string& prefix,
    const std::string& suffix) {
  std::vector<std::filesystem::path> found;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_regular_file() && name.starts_with(prefix) &&
        name.ends_with(suffix)) {
      found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

// The whole file. Throws if it cannot be read: the test then fails.
inline std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  return std::string(std::istreambuf_iterator<char>(in), {});
}

inline nlohmann::json ReadJson(const std::filesystem::path& path) {
  return nlohmann::json::parse(ReadAll(path));
}

template <typename T>
std::string Sha256Hex(const std::vector<T>& values) {
  return Sha256(absl::string_view(reinterpret_cast<const char*>(values.data()),
                                  values.size() * sizeof(T)))
      .ToHex();
}

// Reads little-endian records from a byte string; throws past the end.
class ByteReader {
 public:
  explicit ByteReader(const std::string& bytes) : bytes_(bytes) {}

  bool done() const { return at_ == bytes_.size(); }

  template <typename T>
  std::vector<T> Read(size_t count) {
    if (count * sizeof(T) > bytes_.size() - at_) {
      throw std::runtime_error("record runs past the end of the file");
    }
    std::vector<T> values(count);
    std::memcpy(values.data(), bytes_.data() + at_, count * sizeof(T));
    at_ += count * sizeof(T);
    return values;
  }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
};

// The payload generator of the vector files (SplitMix64).
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // Uniform in [-1, 1).
  double Symmetric() {
    return static_cast<double>(Next() >> 11) * 0x1p-52 - 1.0;
  }

  // `count` u16 words, outputs concatenated little-endian.
  std::vector<uint16_t> Words(size_t count) {
    std::vector<uint16_t> words(count);
    for (size_t i = 0; i < count; i += 4) {
      const uint64_t value = Next();
      for (size_t j = 0; j < 4 && i + j < count; ++j) {
        words[i + j] = static_cast<uint16_t>(value >> (16 * j));
      }
    }
    return words;
  }

 private:
  uint64_t state_;
};

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_TEST_DATA_H_
