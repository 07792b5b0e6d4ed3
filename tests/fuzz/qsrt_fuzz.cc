// A QSRT layer file (see memory_file.h): refused with a short message, or
// native tensors of exactly the declared sizes.

#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "templates/formats/qsrt_layer.h"
#include "tests/fuzz/layer_checks.h"
#include "tests/fuzz/memory_file.h"

namespace {

using kiln::testing::CheckRefused;
using kiln::testing::MemoryFile;

constexpr int64_t kLayer = 3;
constexpr size_t kCanonicalHeaderBytes = 4088;

// A folder whose layer file is in memory, removed at the end.
class Folder {
 public:
  Folder() {
    path_ = (std::filesystem::temp_directory_path() / "kiln_fuzz_XXXXXX");
    KILN_CHECK(mkdtemp(path_.data()) != nullptr);
    std::filesystem::create_symlink(
        std::string(MemoryFile::kFolder) + "/" + file.name(),
        path_ + "/" + kiln::QsrtLayerFileName(kLayer));
  }

  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }

  MemoryFile file;

 private:
  std::string path_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Folder folder;
  std::string bytes;
  if (!kiln::testing::MakeLayerFile(
          absl::string_view(reinterpret_cast<const char*>(data), size),
          kCanonicalHeaderBytes, &bytes)) {
    return 0;
  }
  folder.file.Write(bytes);
  absl::StatusOr<kiln::QsrtLayer> layer =
      kiln::QsrtLayer::Open(folder.path(), kLayer);
  if (!layer.ok()) {
    CheckRefused(layer.status());
    return 0;
  }
  for (int64_t begin = 0; begin <= layer->intermediate(); begin += 256) {
    const auto source =
        kiln::TrellisFromQsrtLayer({begin, begin + 256}, &*layer);
    if (!source.ok()) {
      CheckRefused(source.status());
    } else {
      KILN_CHECK(begin < layer->intermediate());
      kiln::testing::CheckStreams(source->get());
    }
  }
  return 0;
}
