// Power cuts: after every prefix of what was written and synced, with whatever
// a disk may have made of the rest, the cache opens, Check passes, what was
// acknowledged is there, and the work can be finished. The power may be cut
// again while that is done.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "compiler/base/file_util.h"
#include "tests/cache/cache_workload.h"
#include "tests/support/fault_fs.h"
#include "tests/support/simulated_disk.h"

namespace kiln {
namespace {

using ::kiln::testing::CacheWorkload;
using ::kiln::testing::DiskEvent;
using ::kiln::testing::FullTest;
using ::kiln::testing::kWorkSteps;
using ::kiln::testing::RecordMark;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::SimulatedDisk;
using ::kiln::testing::StartRecording;
using ::kiln::testing::StopRecording;

// States per cut, and cuts, of the short form.
constexpr uint64_t kShortSeeds = 4;
constexpr size_t kShortCuts = 24;
constexpr uint64_t kFullSeeds = 8;
// Tests that share the cuts, so that they can run side by side.
constexpr size_t kParts = 4;

class CachePowerTest : public ::testing::TestWithParam<size_t> {
 protected:
  static void SetUpTestSuite() {
    if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 0);
  }

  // All steps on the cache in `root`, recorded with a mark behind each.
  std::vector<DiskEvent> RecordWork(const std::string& root) {
    StartRecording(root);
    {
      absl::StatusOr<PlanCache> cache = workload_.Open(root);
      EXPECT_OK(cache);
      for (int step = 0; step < kWorkSteps && cache.ok(); ++step) {
        EXPECT_OK(workload_.Step(step, root, &*cache)) << "step " << step;
        RecordMark(step);
      }
    }
    return StopRecording();
  }

  // Cuts the power in the middle of the work that follows a first cut.
  void CutAgain(const SimulatedDisk& disk, uint64_t seed,
                const std::vector<int>& acknowledged) {
    const ScratchFolder first;
    disk.Cut(seed, first.path());
    SimulatedDisk again(first.path());
    const std::vector<DiskEvent> events = RecordWork(first.path());
    ASSERT_FALSE(events.empty());
    // Most of all in the first few: there the first cut is recovered from.
    const size_t cut = seed % 2 == 0
                           ? seed * 7919 % events.size()
                           : seed * 31 % std::min<size_t>(40, events.size());
    std::vector<int> all = acknowledged;
    for (size_t i = 0; i < cut; ++i) {
      again.Apply(events[i]);
      if (events[i].kind == DiskEvent::Kind::kMark) {
        all.push_back(static_cast<int>(events[i].offset));
      }
    }
    const ScratchFolder second;
    again.Cut(seed + 1, second.path());
    SCOPED_TRACE(absl::StrCat("cut again after event ", cut));
    workload_.ExpectRecovery(second.path(), all);
  }

  CacheWorkload workload_;
};

TEST_P(CachePowerTest, NothingAcknowledgedIsLost) {
  const ScratchFolder root;
  SimulatedDisk disk(root.path());
  const std::vector<DiskEvent> events = RecordWork(root.path());
  ASSERT_GT(events.size(), 200u);
  const size_t stride = FullTest() ? 1 : events.size() / kShortCuts;
  const uint64_t seeds = FullTest() ? kFullSeeds : kShortSeeds;
  std::vector<int> acknowledged;
  int64_t states = 0;
  int64_t twice = 0;
  for (size_t cut = 0; cut <= events.size() && !HasFailure(); ++cut) {
    const bool chosen = cut % stride == 0 || cut == events.size();
    if (chosen && cut / stride % kParts == GetParam()) {
      for (uint64_t i = 0; i < seeds && !HasFailure(); ++i) {
        // The first three are special; the others differ from cut to cut.
        const uint64_t seed = i < 3 ? i : i + cut * kFullSeeds;
        SCOPED_TRACE(absl::StrCat("cut after event ", cut, ", seed ", seed));
        const ScratchFolder after;
        disk.Cut(seed, after.path());
        workload_.ExpectRecovery(after.path(), acknowledged);
        ++states;
      }
      CutAgain(disk, 100 + cut, acknowledged);
      ++twice;
    }
    if (cut == events.size()) break;
    disk.Apply(events[cut]);
    if (events[cut].kind == DiskEvent::Kind::kMark) {
      acknowledged.push_back(static_cast<int>(events[cut].offset));
    }
  }
  std::printf(
      "%lld states after a cut tried, %lld after a second one; the "
      "work makes %zu changes\n",
      static_cast<long long>(states), static_cast<long long>(twice),
      events.size());
}

INSTANTIATE_TEST_SUITE_P(Parts, CachePowerTest,
                         ::testing::Range(size_t{0}, kParts));

// The model itself: it loses what nobody synced, and only that.
TEST(SimulatedDiskTest, KeepsWhatWasSyncedAndMayLoseTheRest) {
  const ScratchFolder root;
  SimulatedDisk disk(root.path());
  const std::string path = root.File("sub/file");
  StartRecording(root.path());
  ASSERT_OK(MakeDirectories(root.File("sub")));
  ASSERT_OK(WriteFileAtomically(path, std::string(3000, 'a')));
  RecordMark(1);
  ASSERT_OK(WriteFileAtomically(path, std::string(4000, 'b')));
  const std::vector<DiskEvent> events = StopRecording();
  bool acknowledged = false;
  bool lost = false;
  bool replaced = false;
  for (const DiskEvent& event : events) {
    disk.Apply(event);
    acknowledged = acknowledged || event.kind == DiskEvent::Kind::kMark;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const ScratchFolder after;
      disk.Cut(seed, after.path());
      const absl::StatusOr<std::string> bytes =
          ReadFile(after.File("sub/file"), 1 << 20);
      if (!bytes.ok()) {
        EXPECT_FALSE(acknowledged);
        lost = true;
        continue;
      }
      EXPECT_TRUE(*bytes == std::string(3000, 'a') ||
                  *bytes == std::string(4000, 'b'));
      replaced = replaced || bytes->front() == 'b';
    }
  }
  EXPECT_TRUE(lost);
  EXPECT_TRUE(replaced);
}

// A write without a sync does not survive: what the cache tests rely on.
TEST(SimulatedDiskTest, FindsWhatWasNotSynced) {
  const ScratchFolder root;
  SimulatedDisk disk(root.path());
  using Kind = DiskEvent::Kind;
  disk.Apply({.kind = Kind::kCreate, .inode = 7, .path = root.File("f")});
  disk.Apply({.kind = Kind::kSyncFolder, .path = root.path()});
  disk.Apply(
      {.kind = Kind::kWrite, .inode = 7, .data = std::string(2000, 'x')});
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const ScratchFolder after;
    disk.Cut(seed, after.path());
    ASSERT_OK_AND_ASSIGN(const std::string bytes,
                         ReadFile(after.File("f"), 1 << 20));
    seen.insert(bytes);
  }
  // Nothing, all, and torn in between: zeros and garbage too.
  EXPECT_EQ(seen.count(""), 1u);
  EXPECT_EQ(seen.count(std::string(2000, 'x')), 1u);
  EXPECT_GT(seen.size(), 4u);
}

}  // namespace
}  // namespace kiln
