// What CUDA candidates of fused_moe share whose steps work on rows sorted by
// expert: how kernels are launched, and how the routes of a capacity are
// sorted.

#ifndef KILN_TEMPLATES_FUSED_MOE_ROUTED_STEPS_H_
#define KILN_TEMPLATES_FUSED_MOE_ROUTED_STEPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"

namespace kiln {

// Of kernels that sort routes: kRouteThreads of cuda/grouped.h.
inline constexpr uint32_t kRouteThreads = 1024;
inline constexpr uint32_t kRouteWarps = kRouteThreads / 32;
// Of other kernels that are no product.
inline constexpr uint32_t kHelperThreads = 128;
inline constexpr uint32_t kHelperWarps = kHelperThreads / 32;

// Dynamic shared memory of a block that sorts: kPlaceBytes of cuda/grouped.h.
constexpr uint32_t RouteSharedBytes(uint32_t experts) {
  return kRouteWarps * experts * 2;
}

// Blocks of helpers that have a warp for each of so many items of a token.
inline LaunchDim WarpsOver(uint32_t items) {
  return LaunchDim::Of({.mul = items, .add = 0, .div = kHelperWarps});
}

// How a kernel is launched.
struct GroupedLaunch {
  LaunchDim blocks;     // grid.x
  uint32_t slices = 1;  // grid.y: of K in a product, whose result is partial
                        // sums above one
  uint32_t threads = 0;
  uint32_t shared_bytes = 0;  // dynamic
};

// Slices of the arena that sorting writes and products read; cuda/grouped.h has
// their types.
struct RouteLists {
  Arg tiles;
  Arg totals;
  Arg rows;
  Arg positions;
};

// What blocks of the sorting launch do that do not sort. There are at most two
// of them for each multiprocessor, which go on with further chunks.
struct TokenRotation {
  uint32_t chunks = 0;        // of a token; 0: there are no such blocks
  uint32_t block_chunks = 1;  // that one block rotates at a time
  std::vector<Arg> args;
};

// Builds the steps and the arena of a candidate that has support kernels in
// program 0 and products in program 1.
class RoutedSteps {
 public:
  // family: its kernels are kiln_<family>_<label>. tile: rows of one expert
  // that a product takes at once.
  RoutedSteps(absl::string_view family, const Problem& problem, uint32_t tile,
              PlanBody* body);

  // The first slices of the arena.
  const RouteLists& lists() const { return lists_; }

  Arg Slice(absl::string_view name, uint64_t bytes);

  // For `width` results of a product for each route: rounded to fp16, or one
  // fp32 partial sum for each slice of K.
  Arg ProductSlice(absl::string_view name, uint64_t width, uint32_t slices);

  void Add(absl::string_view label, uint32_t program,
           const GroupedLaunch& launch, std::vector<Arg> args);

  void AddHelper(absl::string_view label, const LaunchDim& blocks,
                 std::vector<Arg> args);

  // The step "route": one block sorts the routes, or one for each segment of
  // many, which "count" in front of it has counted; see CountSegment and
  // PlaceSegment in cuda/grouped.h. Blocks beyond these rotate tokens.
  //   sorting: its arguments between the counts and those of the rotation
  void AddRoute(Arg ids, const std::vector<Arg>& sorting,
                const TokenRotation& rotation);

 private:
  std::string prefix_;
  uint64_t routes_;
  uint32_t experts_;
  uint32_t top_k_;
  uint32_t tile_;
  uint32_t rotating_blocks_max_;
  PlanBody* body_;
  RouteLists lists_;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_ROUTED_STEPS_H_
