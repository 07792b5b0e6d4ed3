// Routes of a call in tiles of one expert each, for CPU kernels.
#ifndef KILN_TEMPLATES_FUSED_MOE_CPU_ROUTES_H_
#define KILN_TEMPLATES_FUSED_MOE_CPU_ROUTES_H_

#include "device/platform.h"

namespace kd {

// Routes are grouped by expert, stably, into tiles of Rows rows; a tile never
// mixes experts. A slot is tile * Rows + row in tile.
//   Id: i32 or i64, of topk_ids.
template <u32 Experts, u32 TopK, u32 Rows, class Id>
struct CpuRoutes {
  // The most tiles that `tokens` tokens make.
  KILN_FN static u32 TileBound(u32 tokens) {
    const u64 routes = static_cast<u64>(tokens) * TopK;
    const u64 packed = (routes + static_cast<u64>(Experts) * (Rows - 1)) / Rows;
    return static_cast<u32>(routes < packed ? routes : packed);
  }

  // The expert of a route, or -1.
  KILN_FN static i32 ExpertOf(const void* topk_ids, u64 route) {
    const i64 id = static_cast<const Id*>(topk_ids)[route];
    return id >= 0 && id < static_cast<i64>(Experts) ? static_cast<i32>(id)
                                                     : -1;
  }

  // tile_expert: [TileBound], -1 for a tile that is not in use.
  // tile_routes: [TileBound][Rows], the route of each slot, -1 for none; only
  //   of tiles in use.
  // route_slot: [tokens][TopK], the slot of each route, -1 if it is inactive.
  KILN_FN static void Place(u32 tokens, const void* topk_ids, i32* tile_expert,
                            i32* tile_routes, i32* route_slot) {
    const u64 routes = static_cast<u64>(tokens) * TopK;
    u32 next_slot[Experts] = {};
    for (u64 r = 0; r < routes; ++r) {
      const i32 expert = ExpertOf(topk_ids, r);
      if (expert >= 0) ++next_slot[expert];
    }
    u32 tiles = 0;
    for (u32 e = 0; e < Experts; ++e) {
      const u32 count = next_slot[e];
      next_slot[e] = tiles * Rows;
      for (u32 row = 0; row < count; row += Rows) {
        tile_expert[tiles++] = static_cast<i32>(e);
      }
    }
    for (u64 i = 0; i < static_cast<u64>(tiles) * Rows; ++i) {
      tile_routes[i] = -1;
    }
    for (u32 tile = tiles; tile < TileBound(tokens); ++tile) {
      tile_expert[tile] = -1;
    }
    for (u64 r = 0; r < routes; ++r) {
      const i32 expert = ExpertOf(topk_ids, r);
      if (expert < 0) {
        route_slot[r] = -1;
        continue;
      }
      const u32 slot = next_slot[expert]++;
      tile_routes[slot] = static_cast<i32>(r);
      route_slot[r] = static_cast<i32>(slot);
    }
  }
};

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_CPU_ROUTES_H_
