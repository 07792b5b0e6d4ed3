// What the fault and power-cut tests do to a cache: every kind of change, one
// acknowledged step each, and what must be true of a step that was.

#ifndef KILN_TESTS_CACHE_CACHE_WORKLOAD_H_
#define KILN_TESTS_CACHE_CACHE_WORKLOAD_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache/plan_cache.h"
#include "tests/cache/cache_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln::testing {

inline constexpr int kWorkSteps = 12;
inline constexpr char kExportName[] = "exported.kilncache";

// Works on the cache in `folder`/cache and exports to `folder`; what is merged
// and imported lies elsewhere and is made first.
class CacheWorkload {
 public:
  CacheWorkload() {
    // A shard: a plan to take over, and an old program that nobody needs.
    PlanCacheOptions options = TestOptions(sources_.File("shard"));
    constexpr int64_t kLongAgo = kStart - 100 * kUseGrainSeconds;
    options.clock = [] { return kLongAgo; };
    absl::StatusOr<PlanCache> shard = PlanCache::Open(options);
    EXPECT_OK(shard);
    EXPECT_OK(shard->PutPrograms({WorkProgram(10), WorkProgram(11)}));
    EXPECT_OK(PutWorkPlan(10, 10, &*shard));
    EXPECT_OK(shard->PutReject(MakeReject(10)));
    // An exported file.
    absl::StatusOr<PlanCache> other =
        PlanCache::Open(TestOptions(sources_.File("other")));
    EXPECT_OK(other);
    EXPECT_OK(other->PutProgram(WorkProgram(20)));
    EXPECT_OK(PutWorkPlan(20, 20, &*other));
    EXPECT_OK(
        other->ExportTo(sources_.File(kExportName), {WorkPlanKey(20).digest}));
  }

  static std::string Folder(const std::string& root) { return root + "/cache"; }

  absl::StatusOr<PlanCache> Open(const std::string& root) {
    PlanCacheOptions options = TestOptions(Folder(root));
    options.clock = [this] { return now_; };
    return PlanCache::Open(options);
  }

  absl::Status Step(int step, const std::string& root, PlanCache* cache) {
    now_ = kStart + (step < 9 ? 0 : 2 * kUseGrainSeconds);
    switch (step) {
      case 0:
        return cache->PutProgram(WorkProgram(1));
      case 1:
        return PutWorkPlan(1, 1, cache);
      case 2:
        return cache->PutReject(MakeReject(1));
      case 3:
        return cache->AcquireLeases({WorkProgram(2).key.digest}, 600).status();
      case 4:
        return cache->PutPrograms({WorkProgram(2), WorkProgram(3)});
      case 5:  // replaces the plan of step 1
        return PutWorkPlan(1, 2, cache);
      case 6:
        return Join(sources_.File("shard"), kCacheFileName, cache);
      case 7:
        return cache
            ->ExportTo(root + "/" + kExportName, {WorkPlanKey(1).digest})
            .status();
      case 8:
        return Join(sources_.path(), kExportName, cache);
      case 9:
        return cache->NoteUse({WorkPlanKey(1).digest, WorkPlanKey(20).digest});
      case 10:  // the old program goes, and the file is compacted
        return cache->CollectGarbage({.age_max = 30 * kUseGrainSeconds})
            .status();
      default:  // rewrites the file
        return cache->Repair().status();
    }
  }

  // What was acknowledged is there.
  void Expect(int step, const std::string& root, PlanCache* cache) {
    SCOPED_TRACE(absl::StrCat("step ", step));
    const auto has_program = [&](uint64_t seed) {
      ASSERT_OK_AND_ASSIGN(const std::optional<Program> program,
                           cache->FindProgram(WorkProgram(seed).key.digest));
      ASSERT_TRUE(program.has_value()) << seed;
      EXPECT_TRUE(SameProgram(*program, WorkProgram(seed)));
    };
    const auto has_plan = [&](uint64_t seed) {
      ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> plan,
                           cache->FindPlan(WorkPlanKey(seed).digest));
      EXPECT_TRUE(plan.has_value()) << seed;
      EXPECT_OK(cache->LoadMeasurements(WorkPlanKey(seed).digest));
    };
    switch (step) {
      case 0:
        return has_program(1);
      case 1:
      case 5:
        return has_plan(1);
      case 2: {
        ASSERT_OK_AND_ASSIGN(const std::optional<Reject> reject,
                             cache->FindReject(MakeReject(1).key));
        EXPECT_TRUE(reject.has_value());
        return;
      }
      case 4:
        has_program(2);
        return has_program(3);
      case 6:
        has_program(10);
        return has_plan(10);
      case 7: {
        EXPECT_TRUE(std::filesystem::exists(root + "/" + kExportName));
        return ExpectExportIsWhole(root);
      }
      case 8:
        has_program(20);
        return has_plan(20);
      default:
        return;
    }
  }

  // The exported file is there whole, or not at all.
  static void ExpectExportIsWhole(const std::string& root) {
    if (!std::filesystem::exists(root + "/" + kExportName)) return;
    PlanCacheOptions options = TestOptions(root, CacheMode::kReadOnly);
    options.file_name = kExportName;
    ASSERT_OK_AND_ASSIGN(PlanCache exported, PlanCache::Open(options));
    EXPECT_THAT(exported.Check(), IsOkAndHolds(::testing::IsEmpty()));
    ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> plans,
                         exported.ListPlans());
    ASSERT_EQ(plans.size(), 1u);
    EXPECT_EQ(plans[0].key.digest, WorkPlanKey(1).digest);
  }

  // After a fault: Check passes, what was acknowledged is there, nothing was
  // quarantined, and all of the work can be done.
  void ExpectRecovery(const std::string& root,
                      const std::vector<int>& acknowledged) {
    ExpectExportIsWhole(root);
    absl::StatusOr<PlanCache> cache = Open(root);
    ASSERT_OK(cache);
    EXPECT_THAT(cache->Check(), IsOkAndHolds(::testing::IsEmpty()));
    for (const int step : acknowledged) Expect(step, root, &*cache);
    EXPECT_THAT(cache->TakeWarnings(), ::testing::IsEmpty())
        << "something was quarantined";
    for (int step = 0; step < kWorkSteps; ++step) {
      EXPECT_OK(Step(step, root, &*cache)) << "step " << step;
    }
    for (int step = 0; step < kWorkSteps; ++step) Expect(step, root, &*cache);
    EXPECT_THAT(cache->Check(), IsOkAndHolds(::testing::IsEmpty()));
  }

 private:
  static constexpr int64_t kStart = 1'800'000'000;

  static Program WorkProgram(uint64_t seed) { return MakeProgram(seed, 9000); }

  static Plan WorkPlan(uint64_t seed) {
    return MakePlan(seed, {WorkProgram(seed).key.digest});
  }

  static PlanKey WorkPlanKey(uint64_t seed) {
    return MakeTestPlanKey(WorkPlan(seed));
  }

  static absl::Status PutWorkPlan(uint64_t seed, uint64_t evidence,
                                  PlanCache* cache) {
    return cache->PutPlan(WorkPlanKey(seed), WorkPlan(seed),
                          MakeMeasurements(evidence));
  }

  static absl::Status Join(const std::string& folder,
                           const std::string& file_name, PlanCache* cache) {
    PlanCacheOptions options = TestOptions(folder, CacheMode::kReadOnly);
    options.file_name = file_name;
    absl::StatusOr<PlanCache> source = PlanCache::Open(options);
    if (!source.ok()) return source.status();
    absl::StatusOr<MergeReport> report = cache->MergeFrom(&*source, {});
    if (!report.ok()) return report.status();
    return report->stored ? absl::OkStatus()
                          : absl::InternalError("a conflict");
  }

  const ScratchFolder sources_;
  int64_t now_ = kStart;
};

}  // namespace kiln::testing

#endif  // KILN_TESTS_CACHE_CACHE_WORKLOAD_H_
