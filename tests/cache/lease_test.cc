// Claims on work: one owner at a time, and none that is dead keeps one.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cache/lease_owner.h"
#include "cache/plan_cache.h"
#include "cache/sqlite_db.h"
#include "tests/cache/cache_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::IsOkAndHolds;
using ::kiln::testing::MakeMeasurements;
using ::kiln::testing::MakePlan;
using ::kiln::testing::MakeProgram;
using ::kiln::testing::MakeReject;
using ::kiln::testing::MakeTestPlanKey;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestOptions;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kSeconds = 600;

class LeaseTest : public ::testing::Test {
 protected:
  PlanCache Open() {
    PlanCacheOptions options = TestOptions(folder_.path());
    options.clock = [this] { return now_; };
    absl::StatusOr<PlanCache> cache = PlanCache::Open(options);
    EXPECT_OK(cache);
    return *std::move(cache);
  }

  ScratchFolder folder_;
  int64_t now_ = 1'800'000'000;
  const Digest one_ = Sha256("one");
  const Digest two_ = Sha256("two");
};

TEST_F(LeaseTest, OneOwnerHoldsAKeyUntilItIsReleased) {
  PlanCache a = Open();
  PlanCache b = Open();
  EXPECT_THAT(a.AcquireLeases({one_}, kSeconds),
              IsOkAndHolds(ElementsAre(true)));
  EXPECT_THAT(b.AcquireLeases({one_, two_}, kSeconds),
              IsOkAndHolds(ElementsAre(false, true)));
  EXPECT_THAT(a.AcquireLeases({one_, two_}, kSeconds),
              IsOkAndHolds(ElementsAre(true, false)))
      << "a claim may be repeated";
  ASSERT_OK(b.ReleaseLeases({one_}));  // not b's
  EXPECT_THAT(b.AcquireLeases({one_}, kSeconds),
              IsOkAndHolds(ElementsAre(false)));
  ASSERT_OK(a.ReleaseLeases({one_}));
  EXPECT_THAT(b.AcquireLeases({one_}, kSeconds),
              IsOkAndHolds(ElementsAre(true)));
}

TEST_F(LeaseTest, ClaimsNoMoreThanTheLimitInOrder) {
  PlanCache a = Open();
  EXPECT_THAT(a.AcquireLeases({one_, two_, Sha256("three")}, kSeconds, 2),
              IsOkAndHolds(ElementsAre(true, true, false)));
}

TEST_F(LeaseTest, StoringTheResultEndsTheClaim) {
  PlanCache a = Open();
  PlanCache b = Open();
  const Program program = MakeProgram(1);
  const Reject reject = MakeReject(1);
  const Plan plan = MakePlan(1, {program.key.digest});
  const PlanKey plan_key = MakeTestPlanKey(plan);
  const std::vector<Digest> keys = {program.key.digest, reject.key,
                                    plan_key.digest};
  ASSERT_THAT(a.AcquireLeases(keys, kSeconds),
              IsOkAndHolds(ElementsAre(true, true, true)));
  ASSERT_OK(a.PutProgram(program));
  ASSERT_OK(a.PutReject(reject));
  ASSERT_OK(a.PutPlan(plan_key, plan, MakeMeasurements(1)));
  // What is answered needs no owner; a plan may be raced again.
  EXPECT_THAT(b.AcquireLeases(keys, kSeconds),
              IsOkAndHolds(ElementsAre(false, false, true)));
  ASSERT_OK_AND_ASSIGN(const CacheStats stats, a.Stats());
  EXPECT_EQ(stats.tables[1].name, "lease");
  EXPECT_EQ(stats.tables[1].rows, 1);
}

TEST_F(LeaseTest, AClaimEndsWithItsTimeUnlessRenewed) {
  PlanCache a = Open();
  PlanCache b = Open();
  ASSERT_OK(a.AcquireLeases({one_, two_}, kSeconds));
  now_ += kSeconds - 1;
  ASSERT_OK(a.RenewLeases({one_}, kSeconds));
  now_ += 1;
  EXPECT_THAT(b.AcquireLeases({one_, two_}, kSeconds),
              IsOkAndHolds(ElementsAre(false, true)));
  // The first owner was too slow: what was taken over is not renewed.
  ASSERT_OK(a.RenewLeases({two_}, 10 * kSeconds));
  EXPECT_THAT(a.AcquireLeases({two_}, kSeconds),
              IsOkAndHolds(ElementsAre(false)));
}

TEST_F(LeaseTest, AKilledOwnerIsTakenOverAtOnce) {
  { PlanCache cache = Open(); }
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    PlanCache cache = Open();
    const absl::StatusOr<std::vector<bool>> claimed =
        cache.AcquireLeases({one_}, kSeconds);
    const char byte = claimed.ok() && (*claimed)[0] ? 'y' : 'n';
    if (write(ready[1], &byte, 1) != 1) _exit(1);
    for (;;) pause();
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  close(ready[1]);
  ASSERT_EQ(byte, 'y');
  PlanCache cache = Open();
  EXPECT_THAT(cache.AcquireLeases({one_}, kSeconds),
              IsOkAndHolds(ElementsAre(false)));
  kill(child, SIGKILL);
  // Dead from here on, also while nobody has waited for it.
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT),
            0);
  EXPECT_THAT(cache.AcquireLeases({one_}, kSeconds),
              IsOkAndHolds(ElementsAre(true)));
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
}

TEST_F(LeaseTest, ADamagedClaimIsNone) {
  PlanCache a = Open();
  PlanCache b = Open();
  ASSERT_OK(a.AcquireLeases({one_}, kSeconds));
  {
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Database> database,
                         Database::Open({.path = folder_.File("index.db")}));
    ASSERT_OK(database->Execute("UPDATE lease SET expires_unix = 1 << 60"));
  }
  EXPECT_THAT(b.AcquireLeases({one_}, kSeconds),
              IsOkAndHolds(ElementsAre(true)));
  EXPECT_THAT(b.Check(), IsOkAndHolds(IsEmpty()));
}

TEST_F(LeaseTest, AReadOnlyCacheGivesNoClaims) {
  { PlanCache cache = Open(); }
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(folder_.path(), CacheMode::kReadOnly));
  EXPECT_THAT(
      cache.AcquireLeases({one_}, kSeconds).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("read-only")));
}

TEST(LeaseOwnerTest, OnlyWhoIsCertainlyGoneIsDead) {
  const LeaseOwner self = NewLeaseOwner();
  EXPECT_TRUE(MayBeAlive(self));
  EXPECT_NE(NewLeaseOwner(), self) << "two owners of one process are two";
  LeaseOwner reused = self;
  ++reused.start_ticks;
  EXPECT_FALSE(MayBeAlive(reused)) << "the process id was used again";
  LeaseOwner rebooted = self;
  rebooted.boot = "another-boot/" + self.boot.substr(self.boot.find('/') + 1);
  EXPECT_FALSE(MayBeAlive(rebooted));
  LeaseOwner contained = self;
  contained.boot = self.boot.substr(0, self.boot.find('/')) + "/pid:[1]";
  contained.start_ticks = 1;
  EXPECT_TRUE(MayBeAlive(contained)) << "another container cannot be seen";
}

}  // namespace
}  // namespace kiln
