// Routing of cuda/grouped.h, run on the host.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/routed_steps.h"
#include "tests/templates/gpu_intrinsics.h"
#include "tests/templates/test_data.h"
// After what replaces the instructions.
#include "cuda/grouped.h"

namespace kiln {
namespace {

constexpr uint32_t kExperts = 5;
constexpr uint32_t kShareUnit = 32;

struct Routed {
  std::vector<kd::Row> rows;
  std::vector<uint32_t> positions;
  std::vector<kd::Tile> tiles;
  kd::Totals totals = {};
};

// Memory that nobody has written yet.
Routed Unwritten(size_t routes, uint32_t tokens_tile) {
  constexpr uint32_t kPoison = 0xA5A5A5A5;
  Routed routed;
  routed.rows.assign(routes, {kPoison, kPoison});
  routed.positions.assign(routes, kPoison);
  routed.tiles.assign(routes / tokens_tile + kExperts,
                      {kPoison, kPoison, kPoison, kPoison});
  return routed;
}

// Sorted by blocks of segments, with one more than there are: in two launches,
// or by one block where `length` is 0.
template <uint32_t kUnit, typename Id>
Routed Route(const std::vector<Id>& ids, uint32_t tokens_tile,
             uint32_t length = 0,
             testing::gpu::Order order = testing::gpu::Order::kForward) {
  Routed routed = Unwritten(ids.size(), tokens_tile);
  const auto routes = static_cast<uint32_t>(ids.size());
  const uint32_t segments = length == 0 ? 1 : (routes + length - 1) / length;
  std::vector<uint32_t> counts(size_t{segments} * kExperts, 0xA5A5A5A5);
  if (length != 0) {
    testing::gpu::Run(
        {.grid = {segments}, .threads = kd::kRouteThreads, .order = order},
        [&] {
          kd::CountSegment<kExperts>(ids.data(), counts.data(), routes, length);
        });
  }
  testing::gpu::Run({.grid = {segments + 1},
                     .threads = kd::kRouteThreads,
                     .shared_bytes = kd::kPlaceBytes<kExperts>,
                     .order = order},
                    [&] {
                      kd::PlaceSegment<kExperts, kUnit>(
                          ids.data(), length == 0 ? nullptr : counts.data(),
                          routed.rows.data(), routed.positions.data(),
                          routed.tiles.data(), &routed.totals, routes, length,
                          tokens_tile);
                    });
  return routed;
}

// An expert's id that knows how often one was looked at.
struct CountedId {
  static uint64_t reads;

  explicit CountedId(int value) : id(value) {}

  explicit CountedId(uint32_t value) : id(static_cast<int>(value)) {}

  bool operator>=(int other) const {
    ++reads;
    return id >= other;
  }

  bool operator<(const CountedId& other) const { return id < other.id; }

  explicit operator uint32_t() const { return static_cast<uint32_t>(id); }

  int id;
};

uint64_t CountedId::reads = 0;

// Routes to experts that have as many as `counts` says, shuffled.
std::vector<int> Ids(const std::vector<uint32_t>& counts) {
  std::vector<int> ids;
  for (size_t e = 0; e < counts.size(); ++e) {
    ids.insert(ids.end(), counts[e], static_cast<int>(e));
  }
  testing::SplitMix64 random(7);
  for (size_t i = ids.size(); i > 1; --i) {
    std::swap(ids[i - 1], ids[random.Next() % i]);
  }
  return ids;
}

// `each` routes to every expert.
std::vector<CountedId> CountedIds(uint32_t each) {
  std::vector<CountedId> ids;
  for (const int id : Ids(std::vector<uint32_t>(kExperts, each))) {
    ids.emplace_back(id);
  }
  return ids;
}

// Kernels cannot include what the host includes.
TEST(PlaceSegmentTest, TheHostLaunchesTheBlockThatKernelsAreWrittenFor) {
  EXPECT_EQ(kRouteThreads, kd::kRouteThreads);
  EXPECT_EQ(kRouteWarps, kd::kRouteWarps);
  EXPECT_EQ(RouteSharedBytes(1), kd::kPlaceBytes<1>);
  EXPECT_EQ(RouteSharedBytes(kExperts), kd::kPlaceBytes<kExperts>);
  EXPECT_EQ(RouteSharedBytes(1024), kd::kPlaceBytes<1024>);
}

TEST(PlaceSegmentTest, TilesOfAnExpertShareItsRows) {
  const std::vector<std::vector<uint32_t>> all = {
      {256, 257, 300, 0, 1}, {31, 32, 33, 513, 520}, {64, 65, 511, 512, 1025}};
  for (const uint32_t tile : {32u, 64u, 96u, 256u, 288u}) {
    for (const std::vector<uint32_t>& counts : all) {
      SCOPED_TRACE(absl::StrCat("tile ", tile, ", second expert ", counts[1]));
      const Routed routed = Route<kShareUnit>(Ids(counts), tile);
      size_t at = 0;
      uint32_t first = 0;
      for (uint32_t e = 0; e < kExperts; ++e) {
        const uint32_t tiles = (counts[e] + tile - 1) / tile;
        uint32_t rows = 0;
        for (uint32_t i = 0; i < tiles; ++i, ++at) {
          ASSERT_LT(at, routed.totals.tiles);
          const kd::Tile& t = routed.tiles[at];
          EXPECT_EQ(t.expert, e);
          EXPECT_EQ(t.first, first + rows);
          EXPECT_GT(t.rows, 0u);
          EXPECT_LE(t.rows, tile);
          if (i + 1 < tiles) {
            EXPECT_EQ(t.rows, routed.tiles[at - i].rows);
            EXPECT_EQ(t.rows % kShareUnit, 0u);
            // No tile has more than its share, rounded up to whole units.
            EXPECT_LT(t.rows, counts[e] / tiles + 1 + kShareUnit);
          }
          rows += t.rows;
        }
        EXPECT_EQ(rows, counts[e]);
        first += counts[e];
      }
      EXPECT_EQ(at, routed.totals.tiles);
      EXPECT_EQ(routed.totals.rows, first);
    }
  }
}

TEST(PlaceSegmentTest, TilesAreFullWhereNothingIsShared) {
  const Routed routed = Route<0>(Ids({100, 0, 65, 64, 63}), 64);
  std::vector<uint32_t> rows;
  for (uint32_t i = 0; i < routed.totals.tiles; ++i) {
    rows.push_back(routed.tiles[i].rows);
  }
  EXPECT_EQ(rows, (std::vector<uint32_t>{64, 36, 64, 1, 64, 63}));
}

// A token's routes follow each other, so that route order is token order.
TEST(PlaceSegmentTest, RowsOfAnExpertAreInRouteOrder) {
  const std::vector<std::vector<uint32_t>> all = {
      {90, 70, 50, 30, 10}, {2000, 1, 1023, 1024, 1500}, {0, 0, 4500, 0, 0}};
  for (const std::vector<uint32_t>& counts : all) {
    std::vector<int> ids = Ids(counts);
    ids[3] = -1;
    ids[40] = static_cast<int>(kExperts);
    std::vector<uint32_t> expected;
    for (int e = 0; e < static_cast<int>(kExperts); ++e) {
      for (uint32_t i = 0; i < ids.size(); ++i) {
        if (ids[i] == e) expected.push_back(i);
      }
    }
    std::vector<uint32_t> positions(ids.size(), kd::kNone);
    for (uint32_t i = 0; i < expected.size(); ++i) positions[expected[i]] = i;
    for (const uint32_t length : {0u, 1024u, 3072u}) {
      for (const auto order :
           {testing::gpu::Order::kForward, testing::gpu::Order::kBackward}) {
        SCOPED_TRACE(absl::StrCat(ids.size(), " routes, segments of ", length));
        const Routed routed = Route<kShareUnit>(ids, 32, length, order);
        ASSERT_EQ(routed.totals.rows, expected.size());
        EXPECT_EQ(routed.positions, positions);
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_EQ(routed.rows[i].route, expected[i]) << i;
          ASSERT_EQ(routed.rows[i].expert,
                    static_cast<uint32_t>(ids[expected[i]]));
        }
      }
    }
  }
}

// The work of a block grows with the routes, whatever their order.
TEST(PlaceSegmentTest, ABlockReadsEachRouteTwice) {
  for (const uint32_t each : {7u, 820u, 1640u}) {
    const std::vector<CountedId> ids = CountedIds(each);
    CountedId::reads = 0;
    const Routed routed = Route<kShareUnit>(ids, 32);
    EXPECT_EQ(CountedId::reads, 2 * ids.size());
    EXPECT_EQ(routed.totals.rows, ids.size());
  }
}

// The work of all blocks does.
TEST(PlaceSegmentTest, TwoLaunchesReadEachRouteThreeTimes) {
  for (const uint32_t each : {7u, 820u, 1640u}) {
    const std::vector<CountedId> ids = CountedIds(each);
    CountedId::reads = 0;
    const Routed routed = Route<kShareUnit>(ids, 32, 1024);
    EXPECT_EQ(CountedId::reads, 3 * ids.size());
    EXPECT_EQ(routed.totals.rows, ids.size());
  }
}

// Tiles and totals are the same however routes are cut.
TEST(PlaceSegmentTest, TwoLaunchesWriteTheTilesOfOne) {
  const std::vector<int> all = Ids({2000, 0, 1500, 1, 700});
  for (const size_t routes :
       {size_t{1}, size_t{1024}, size_t{1025}, all.size()}) {
    const std::vector<int> ids(all.begin(),
                               all.begin() + static_cast<ptrdiff_t>(routes));
    const Routed expected = Route<kShareUnit>(ids, 64);
    for (const uint32_t length : {1024u, 3072u}) {
      SCOPED_TRACE(absl::StrCat(routes, " routes, segments of ", length));
      const Routed routed = Route<kShareUnit>(ids, 64, length);
      ASSERT_EQ(routed.totals.rows, expected.totals.rows);
      ASSERT_EQ(routed.totals.tiles, expected.totals.tiles);
      for (size_t i = 0; i < expected.tiles.size(); ++i) {
        ASSERT_EQ(routed.tiles[i].expert, expected.tiles[i].expert) << i;
        ASSERT_EQ(routed.tiles[i].first, expected.tiles[i].first) << i;
        ASSERT_EQ(routed.tiles[i].rows, expected.tiles[i].rows) << i;
      }
    }
  }
}

}  // namespace
}  // namespace kiln
