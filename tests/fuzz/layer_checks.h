// What every layer reader owes a caller, for fuzz targets.

#ifndef KILN_TESTS_FUZZ_LAYER_CHECKS_H_
#define KILN_TESTS_FUZZ_LAYER_CHECKS_H_

#include "absl/status/status.h"
#include "compiler/base/check.h"
#include "templates/formats/trellis_source.h"

namespace kiln::testing {

// A refusal of bad input or of what is not read, with a short message.
inline void CheckRefused(const absl::Status& status) {
  KILN_CHECK(absl::IsInvalidArgument(status) ||
             absl::IsFailedPrecondition(status));
  KILN_CHECK(!status.message().empty() && status.message().size() < 2000);
}

// Every native tensor has the size that was declared for it.
//   Source: TrellisSource or LinearSource.
template <class Source, class Slots>
void CheckStreams(const Slots& slots, Source* source) {
  for (const auto slot : slots) {
    uint64_t bytes = 0;
    const absl::Status status =
        source->Stream(slot, [&](std::span<const uint8_t> piece) {
          bytes += piece.size();
          return absl::OkStatus();
        });
    KILN_CHECK(status.ok());
    KILN_CHECK(bytes == source->Tensor(slot).bytes());
  }
}

inline void CheckStreams(TrellisSource* source) {
  CheckStreams(kTrellisSlots, source);
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_FUZZ_LAYER_CHECKS_H_
