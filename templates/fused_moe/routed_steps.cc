#include "templates/fused_moe/routed_steps.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "templates/fused_moe/op.h"

namespace kiln {
namespace {

// How blocks share the routes of a capacity.
struct Segments {
  uint32_t count = 1;   // blocks that sort
  uint32_t length = 0;  // routes of each; 0: one block has all, uncounted
};

Segments SegmentsOf(uint64_t routes) {
  constexpr uint64_t kRoutesOfOneBlockMax = 8192;
  constexpr uint64_t kSegmentsMax = 128;
  if (routes <= kRoutesOfOneBlockMax) return {};
  const uint64_t share = (routes + kSegmentsMax - 1) / kSegmentsMax;
  const uint64_t length =
      (share + kRouteThreads - 1) / kRouteThreads * kRouteThreads;
  return {static_cast<uint32_t>((routes + length - 1) / length),
          static_cast<uint32_t>(length)};
}

}  // namespace

RoutedSteps::RoutedSteps(absl::string_view family, const Problem& problem,
                         uint32_t tile, PlanBody* body)
    : prefix_(absl::StrCat("kiln_", family, "_")),
      routes_(uint64_t{problem.interval.m_max} *
              static_cast<uint64_t>(problem.geometry.top_k)),
      experts_(static_cast<uint32_t>(problem.geometry.experts)),
      top_k_(static_cast<uint32_t>(problem.geometry.top_k)),
      tile_(tile),
      rotating_blocks_max_(2 * static_cast<uint32_t>(std::max(
                                   1, problem.device.multiprocessors))),
      body_(body) {
  lists_.tiles = Slice("tiles", 16 * FusedMoeTilesMax(problem.geometry, tile,
                                                      problem.interval.m_max));
  lists_.totals = Slice("totals", 16);
  lists_.rows = Slice("rows", 8 * routes_);
  lists_.positions = Slice("positions", 4 * routes_);
}

Arg RoutedSteps::Slice(absl::string_view name, uint64_t bytes) {
  return Arg::Arena(body_->arena.Add(name, bytes));
}

Arg RoutedSteps::ProductSlice(absl::string_view name, uint64_t width,
                              uint32_t slices) {
  return Slice(name, (slices == 1 ? uint64_t{2} : uint64_t{4} * slices) *
                         width * routes_);
}

void RoutedSteps::Add(absl::string_view label, uint32_t program,
                      const GroupedLaunch& launch, std::vector<Arg> args) {
  Step step;
  step.label = std::string(label);
  step.program = program;
  step.entry = absl::StrCat(prefix_, label);
  step.grid = {launch.blocks, LaunchDim::Constant(launch.slices),
               LaunchDim::Constant(1)};
  step.block = {launch.threads, 1, 1};
  step.dynamic_shared_bytes = launch.shared_bytes;
  step.args = std::move(args);
  body_->steps.push_back(std::move(step));
}

void RoutedSteps::AddHelper(absl::string_view label, const LaunchDim& blocks,
                            std::vector<Arg> args) {
  Add(label, 0, {.blocks = blocks, .threads = kHelperThreads}, std::move(args));
}

void RoutedSteps::AddRoute(Arg ids, const std::vector<Arg>& sorting,
                           const TokenRotation& rotation) {
  const Segments segments = SegmentsOf(routes_);
  Arg counts = Arg::U64(0);
  if (segments.length != 0) {
    counts = Slice("counts", uint64_t{4} * segments.count * experts_);
    Add("count", 0,
        {.blocks =
             LaunchDim::Of({.mul = top_k_, .add = 0, .div = segments.length}),
         .threads = kRouteThreads},
        {ids, counts, Arg::Tokens(), Arg::U32(segments.length)});
  }
  GroupedLaunch launch = {.blocks = LaunchDim::Constant(segments.count),
                          .threads = kRouteThreads,
                          .shared_bytes = RouteSharedBytes(experts_)};
  std::vector<Arg> args = {ids, counts};
  args.insert(args.end(), sorting.begin(), sorting.end());
  args.insert(args.end(), rotation.args.begin(), rotation.args.end());
  args.push_back(Arg::Tokens());
  if (rotation.chunks != 0) {
    launch.blocks =
        LaunchDim::Of({.mul = rotation.chunks,
                       .add = rotation.block_chunks * segments.count,
                       .div = rotation.block_chunks});
    launch.blocks.b =
        LaunchDim::Constant(segments.count + rotating_blocks_max_).b;
    args.push_back(Arg::U32(segments.count));
  }
  args.insert(args.end(), {Arg::U32(segments.length), Arg::U32(tile_)});
  Add("route", 0, launch, std::move(args));
}

}  // namespace kiln
