// Any bytes as an NPK-1 sidecar: refused with a short message that names a
// rule, or a file whose header is the one its contents would be given.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "compiler/base/check.h"
#include "templates/formats/npk.h"

namespace {

void Check(std::span<const uint8_t> file, bool values) {
  const absl::StatusOr<kiln::NpkSidecar> sidecar =
      kiln::NpkSidecar::Parse(file, {.pins = {}, .values = values});
  if (!sidecar.ok()) {
    KILN_CHECK(absl::IsInvalidArgument(sidecar.status()));
    KILN_CHECK(absl::StartsWith(sidecar.status().message(), "rule V"));
    KILN_CHECK(sidecar.status().message().size() < 1000);
    return;
  }
  const kiln::NpkMetadata& metadata = sidecar->metadata();
  size_t bytes = 0;
  std::vector<kiln::Digest> digests;
  for (const kiln::SafetensorsTensor& tensor : kiln::NpkTensorsOf(metadata)) {
    const std::span<const uint8_t> data =
        sidecar->tensor(static_cast<kiln::NpkTensor>(digests.size()));
    KILN_CHECK(data.size() == tensor.bytes());
    KILN_CHECK(data.data() >= file.data());
    KILN_CHECK(data.data() + data.size() <= file.data() + file.size());
    digests.push_back(kiln::Sha256(
        {reinterpret_cast<const char*>(data.data()), data.size()}));
    bytes += data.size();
  }
  if (!values) return;
  const kiln::Digest signs = kiln::NpkSignsDigest(
      metadata, sidecar->tensor(kiln::NpkTensor::kSignDraw));
  const std::string head = kiln::MakeNpkHead(metadata, digests, signs);
  KILN_CHECK(head.size() + bytes == file.size());
  KILN_CHECK(std::equal(
      head.begin(), head.end(), file.begin(),
      [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; }));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Check({data, size}, true);
  Check({data, size}, false);
  return 0;
}
