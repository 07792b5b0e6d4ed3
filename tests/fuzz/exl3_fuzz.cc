// A line of config.json, then a safetensors file (see memory_file.h): refused
// with a short message, or a manifest and, of its first layer, native tensors
// of exactly the declared sizes.

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <variant>

#include "templates/formats/dense_layers.h"
#include "templates/formats/describe.h"
#include "templates/formats/linear_source.h"
#include "templates/formats/routed_experts.h"
#include "tests/fuzz/layer_checks.h"
#include "tests/fuzz/memory_file.h"

namespace {

using kiln::testing::CheckRefused;
using kiln::testing::MemoryFile;

// A checkpoint whose two files are in memory.
class MemoryCheckpoint {
 public:
  MemoryCheckpoint()
      : folder_(std::filesystem::temp_directory_path() /
                "kiln_exl3_fuzz_XXXXXX") {
    KILN_CHECK(mkdtemp(folder_.data()) != nullptr);
    Link(config_, "config.json");
    Link(tensors_, "model.safetensors");
  }

  MemoryCheckpoint(const MemoryCheckpoint&) = delete;
  MemoryCheckpoint& operator=(const MemoryCheckpoint&) = delete;

  ~MemoryCheckpoint() {
    for (const char* name : {"config.json", "model.safetensors"}) {
      unlink((folder_ + "/" + name).c_str());
    }
    rmdir(folder_.c_str());
  }

  const std::string& folder() const { return folder_; }

  void Write(absl::string_view config, absl::string_view tensors) {
    config_.Write(config);
    tensors_.Write(tensors);
  }

 private:
  void Link(const MemoryFile& file, const std::string& name) {
    const std::string from =
        std::string(MemoryFile::kFolder) + "/" + file.name();
    KILN_CHECK(symlink(from.c_str(), (folder_ + "/" + name).c_str()) == 0);
  }

  std::string folder_;
  MemoryFile config_;
  MemoryFile tensors_;
};

void CheckExperts(const kiln::ModelConfig& config, int64_t number,
                  kiln::Checkpoint* checkpoint) {
  const auto experts = kiln::RoutedExperts::Find(*checkpoint, config);
  KILN_CHECK(experts.ok());
  const absl::StatusOr<kiln::RoutedLayer> layer = experts->Layer(number);
  KILN_CHECK(layer.ok());
  const auto source =
      kiln::TrellisFromExl3(*layer, {0, config.intermediate}, checkpoint);
  // Of the bytes, markers and scales have rules.
  if (!source.ok()) return CheckRefused(source.status());
  kiln::testing::CheckStreams(source->get());
}

void CheckMatrices(const kiln::DenseConfig& config, int64_t number,
                   kiln::Checkpoint* checkpoint) {
  const auto layers = kiln::DenseLayers::Find(*checkpoint, config);
  KILN_CHECK(layers.ok());
  const auto matrices = layers->Layer(number);
  KILN_CHECK(matrices.ok());
  for (const kiln::DenseMatrix& matrix : *matrices) {
    const auto extent = kiln::ExtentOfRank(matrix, 0, 1);
    KILN_CHECK(extent.ok());
    auto source =
        kiln::LinearSource::FromExl3(matrix.matrix, *extent, checkpoint);
    // As above, and biases.
    if (!source.ok()) return CheckRefused(source.status());
    kiln::testing::CheckStreams(source->Slots(), &*source);
  }
}

void CheckFirstLayer(const std::string& folder, int64_t number) {
  const absl::StatusOr<kiln::AnyModelConfig> config =
      kiln::ReadAnyModelConfig(folder);
  KILN_CHECK(config.ok());
  absl::StatusOr<kiln::Checkpoint> checkpoint = kiln::Checkpoint::Open(folder);
  KILN_CHECK(checkpoint.ok());
  if (const auto* dense = std::get_if<kiln::DenseConfig>(&*config)) {
    return CheckMatrices(*dense, number, &*checkpoint);
  }
  CheckExperts(std::get<kiln::ModelConfig>(*config), number, &*checkpoint);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static MemoryCheckpoint checkpoint;
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t line = input.find('\n');
  std::string bytes;
  if (line == absl::string_view::npos ||
      !kiln::testing::MakeLayerFile(input.substr(line + 1), 0, &bytes)) {
    return 0;
  }
  checkpoint.Write(input.substr(0, line), bytes);
  const absl::StatusOr<kiln::Manifest> manifest =
      kiln::DescribeCheckpoint(checkpoint.folder(), {});
  if (!manifest.ok()) {
    CheckRefused(manifest.status());
    return 0;
  }
  CheckFirstLayer(checkpoint.folder(), manifest->requests[0].layers[0]);
  return 0;
}
