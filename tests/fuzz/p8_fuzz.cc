// A sidecar of the public schema (see memory_file.h): refused with a short
// message and nothing written, or an NPK-1 sidecar that obeys its rules.

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "templates/formats/npk_import.h"
#include "tests/fuzz/layer_checks.h"
#include "tests/fuzz/memory_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using kiln::testing::MemoryFile;
  static MemoryFile& file = *new MemoryFile;
  static const std::string& output =
      *new std::string(std::filesystem::temp_directory_path() /
                       ("kiln_p8_fuzz_" + std::to_string(getpid())));
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  std::string bytes;
  if (!kiln::testing::MakeLayerFile(input, 0, &bytes)) return 0;
  file.Write(bytes);
  const absl::StatusOr<kiln::NpkImport> imported = kiln::ImportP8Sidecar(
      std::string(MemoryFile::kFolder) + "/" + file.name(), "fuzz", output);
  if (!imported.ok()) {
    kiln::testing::CheckRefused(imported.status());
    KILN_CHECK(!std::filesystem::exists(output));
    return 0;
  }
  KILN_CHECK(kiln::NpkSidecar::Open(imported->path).ok());
  std::filesystem::remove_all(output);
  return 0;
}
