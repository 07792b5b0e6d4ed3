// Safetensors files: an 8-byte length, a JSON header, the bytes of the tensors.
// A file is accepted as a whole or not at all; what is accepted has no hole, no
// overlap and no byte that belongs to nothing.
//
// Source: the format's public description (huggingface/safetensors, README).

#ifndef KILN_TEMPLATES_FORMATS_SAFETENSORS_H_
#define KILN_TEMPLATES_FORMATS_SAFETENSORS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

// The limit of the format's own library.
inline constexpr uint64_t kSafetensorsHeaderBytesMax = 100'000'000;
inline constexpr size_t kSafetensorsRankMax = 8;

// Every element type of the format, by its name in the file.
enum class StoredType {
  kBool,
  kU8,
  kI8,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
  kC64,
};

// "BF16".
absl::string_view StoredTypeName(StoredType type);
// Bits of one element; F4 and F6 types pack them without gaps.
uint64_t StoredTypeBits(StoredType type);

// A tensor's UTF-8 name in quotes for messages: whole, unless it is very long.
std::string QuoteTensorName(absl::string_view name);

// A tensor of one file. `begin` and `end` count from the first byte after the
// header.
struct SafetensorsTensor {
  absl::string_view name;
  StoredType type = StoredType::kU8;
  size_t rank = 0;
  std::array<uint64_t, kSafetensorsRankMax> dims{};
  uint64_t begin = 0;
  uint64_t end = 0;

  std::span<const uint64_t> shape() const { return {dims.data(), rank}; }

  uint64_t bytes() const { return end - begin; }

  // "I16 [128, 48, 64]".
  std::string TypeAndShape() const;
};

// A checked header. Movable; names stay valid while it lives.
class SafetensorsHeader {
 public:
  // `json` is the header, `data_bytes` what follows it in the file.
  //   Errors: InvalidArgument with the rule, the tensor and the value.
  static absl::StatusOr<SafetensorsHeader> Parse(std::string json,
                                                 uint64_t data_bytes);

  // In the order of their bytes.
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }

  // "__metadata__": empty where the header has none.
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }

  // The header as it stands in the file.
  absl::string_view text() const { return *text_; }

 private:
  absl::Status Scan(uint64_t data_bytes);

  std::unique_ptr<const std::string> text_;
  std::unique_ptr<std::deque<std::string>> decoded_;
  std::vector<SafetensorsTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// One open file. The header is read when it is opened; tensors are mapped when
// they are first asked for. Not thread-safe until the first call of Bytes.
class SafetensorsFile {
 public:
  //   Errors: as SafetensorsHeader::Parse, and those of opening a file. All
  //   begin with the path.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  ~SafetensorsFile();

  const std::string& path() const { return path_; }

  const SafetensorsHeader& header() const { return header_; }

  // The bytes of one of this file's tensors; they live as long as this object.
  // A file that is cut short while it is mapped ends the process with SIGBUS,
  // as any mapped file; one whose size changed before is FailedPrecondition.
  absl::StatusOr<std::span<const uint8_t>> Bytes(
      const SafetensorsTensor& tensor);

  // The bytes of the whole file, for digests; as Bytes.
  absl::StatusOr<std::span<const uint8_t>> FileBytes();

 private:
  SafetensorsFile() = default;
  void Release();

  std::string path_;
  int fd_ = -1;
  uint64_t file_bytes_ = 0;
  uint64_t data_begin_ = 0;
  SafetensorsHeader header_;
  const uint8_t* map_ = nullptr;
};

// Bytes 0.. of a file up to its data: length and header, padded with spaces so
// that the data starts at a multiple of 64. Offsets follow the order given.
//   tensors: distinct names of printable ASCII without quotes and backslashes;
//   `begin` and `end` are ignored.
//   metadata: key and value pairs, of the same characters.
std::string MakeSafetensorsHead(
    std::span<const SafetensorsTensor> tensors,
    const std::map<std::string, std::string>& metadata);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_SAFETENSORS_H_
