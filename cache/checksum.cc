#include "cache/checksum.h"

#include <bit>

// The whole of it is compiled here; nothing is linked.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kiln {

Checksum ChecksumOf(std::initializer_list<absl::string_view> parts) {
  static_assert(std::endian::native == std::endian::little);
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const absl::string_view part : parts) {
    const uint64_t size = part.size();
    XXH3_128bits_update(&state, &size, sizeof(size));
    XXH3_128bits_update(&state, part.data(), part.size());
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
  Checksum checksum;
  static_assert(sizeof(canonical.digest) == sizeof(checksum.bytes));
  for (size_t i = 0; i < checksum.bytes.size(); ++i) {
    checksum.bytes[i] = canonical.digest[i];
  }
  return checksum;
}

}  // namespace kiln
