// How CUDA candidates of fused_moe sort the routes of a capacity: by one block,
// or by a block for each segment of them after a launch that counts. See
// CountSegment and PlaceSegment in cuda/grouped.h.

#ifndef KILN_TEMPLATES_FUSED_MOE_ROUTE_SEGMENTS_H_
#define KILN_TEMPLATES_FUSED_MOE_ROUTE_SEGMENTS_H_

#include <cstdint>

#include "compiler/spec/plan.h"

namespace kiln {

inline constexpr uint32_t kRouteThreads = 1024;
inline constexpr uint32_t kRouteWarps = kRouteThreads / 32;

struct RouteSegments {
  uint32_t count = 1;   // blocks that sort
  uint32_t length = 0;  // routes of each; 0: one block has all, uncounted

  bool counted() const { return length != 0; }

  // Bytes of what the counting launch writes.
  uint64_t counts_bytes(uint32_t experts) const {
    return uint64_t{4} * count * experts;
  }

  // Of the counting launch, which has an argument `length` too.
  LaunchDim counting_blocks(uint32_t top_k) const {
    return LaunchDim::Of({.mul = top_k, .add = 0, .div = length});
  }
};

inline RouteSegments RouteSegmentsOf(uint64_t routes) {
  constexpr uint64_t kRoutesOfOneBlockMax = 8192;
  constexpr uint64_t kSegmentsMax = 128;
  if (routes <= kRoutesOfOneBlockMax) return {};
  const uint64_t share = (routes + kSegmentsMax - 1) / kSegmentsMax;
  const uint64_t length =
      (share + kRouteThreads - 1) / kRouteThreads * kRouteThreads;
  return {static_cast<uint32_t>((routes + length - 1) / length),
          static_cast<uint32_t>(length)};
}

// Dynamic shared memory of a block that sorts.
inline uint32_t RouteSharedBytes(uint32_t experts) {
  return kRouteWarps * experts * 2;
}

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_ROUTE_SEGMENTS_H_
