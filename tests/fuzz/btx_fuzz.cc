// A line of BTX manifest, then a layer file (see memory_file.h) whose digest
// the manifest is given: refused with a short message, or native tensors of
// exactly the declared sizes.

#include <cstdint>
#include <string>

#include "templates/formats/btx_layer.h"
#include "tests/fuzz/layer_checks.h"
#include "tests/fuzz/memory_file.h"

namespace {

using kiln::testing::CheckRefused;
using kiln::testing::MemoryFile;

void CheckLayer(kiln::BtxManifest manifest, const std::string& bytes) {
  static MemoryFile& file = *new MemoryFile;
  file.Write(bytes);
  const int64_t number = manifest.layers.begin()->first;
  kiln::BtxManifest::Layer& entry = manifest.layers.begin()->second;
  entry.file = file.name();
  entry.sha256 = kiln::Sha256(bytes);
  absl::StatusOr<kiln::BtxLayer> layer =
      kiln::BtxLayer::Open(MemoryFile::kFolder, manifest, number);
  if (!layer.ok()) return CheckRefused(layer.status());
  const absl::Status valid = layer->Validate();
  if (!valid.ok()) return CheckRefused(valid);
  for (const kiln::TrellisExtent& extent :
       {kiln::TrellisExtent{0, manifest.intermediate},
        kiln::TrellisExtent{0, 128}, kiln::TrellisExtent{128, 256},
        kiln::TrellisExtent{256, 512}}) {
    const auto source = kiln::TrellisFromBtx(extent, &*layer);
    if (!source.ok()) {
      CheckRefused(source.status());
    } else {
      kiln::testing::CheckStreams(source->get());
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t line = input.find('\n');
  const absl::StatusOr<kiln::BtxManifest> manifest =
      kiln::ParseBtxManifest(input.substr(0, line), "m");
  if (!manifest.ok()) {
    CheckRefused(manifest.status());
    return 0;
  }
  KILN_CHECK(!manifest->layers.empty());
  KILN_CHECK(manifest->slots() * 32 == manifest->intermediate);
  KILN_CHECK(manifest->pairs() == (manifest->bits == 0));
  std::string bytes;
  if (line != absl::string_view::npos &&
      kiln::testing::MakeLayerFile(input.substr(line + 1), 0, &bytes)) {
    CheckLayer(*manifest, bytes);
  }
  return 0;
}
