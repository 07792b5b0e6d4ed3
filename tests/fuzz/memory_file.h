// A file in memory that readers open by its path: fuzz targets change it
// thousands of times.

#ifndef KILN_TESTS_FUZZ_MEMORY_FILE_H_
#define KILN_TESTS_FUZZ_MEMORY_FILE_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "compiler/base/check.h"

namespace kiln::testing {

class MemoryFile {
 public:
  // The folder of every process's open files.
  static constexpr const char* kFolder = "/proc/self/fd";

  MemoryFile() : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    KILN_CHECK(fd_ >= 0);
  }

  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  ~MemoryFile() { close(fd_); }

  // In kFolder.
  std::string name() const { return absl::StrCat(fd_); }

  // Replaces the contents.
  void Write(absl::string_view bytes) {
    KILN_CHECK(ftruncate(fd_, 0) == 0);
    KILN_CHECK(pwrite(fd_, bytes.data(), bytes.size(), 0) ==
               static_cast<ssize_t>(bytes.size()));
  }

 private:
  int fd_;
};

// A safetensors file from what a fuzzer can change with effect: the header's
// text on one line, the number of data bytes on the next, and then edits of the
// data, which is zero: three bytes of offset, most significant first, and a
// value. False where there are no such lines.
inline bool MakeLayerFile(absl::string_view input, size_t header_bytes_min,
                          std::string* file) {
  constexpr size_t kDataBytesMax = 1 << 20;
  const size_t first = input.find('\n');
  if (first == absl::string_view::npos) return false;
  const size_t second = input.find('\n', first + 1);
  size_t data_bytes = 0;
  if (second == absl::string_view::npos ||
      !absl::SimpleAtoi(input.substr(first + 1, second - first - 1),
                        &data_bytes) ||
      data_bytes > kDataBytesMax) {
    return false;
  }
  std::string header(input.substr(0, first));
  if (header.size() < header_bytes_min) header.resize(header_bytes_min, ' ');
  file->clear();
  for (int i = 0; i < 8; ++i) {
    file->push_back(static_cast<char>(uint64_t{header.size()} >> 8 * i));
  }
  *file += header;
  const size_t data = file->size();
  file->resize(data + data_bytes);
  for (absl::string_view edits = input.substr(second + 1); edits.size() >= 4;
       edits.remove_prefix(4)) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(edits[i]); };
    const size_t at = static_cast<size_t>(byte(0)) << 16 |
                      static_cast<size_t>(byte(1)) << 8 | byte(2);
    if (at < data_bytes) (*file)[data + at] = edits[3];
  }
  return true;
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_FUZZ_MEMORY_FILE_H_
