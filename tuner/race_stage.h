// Race stage of a prewarm: intervals whose programs are there -> stored
// winners. One worker process per device verifies and times (RemoteRacer); this
// process decides and stores.

#ifndef KILN_TUNER_RACE_STAGE_H_
#define KILN_TUNER_RACE_STAGE_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tuner/conclusion.h"
#include "tuner/device_lock.h"
#include "tuner/prewarm_state.h"
#include "tuner/remote_racer.h"

namespace kiln {

class RaceStage {
 public:
  // Borrows the state.
  explicit RaceStage(PrewarmState* state) : state_(*state) {}

  RaceStage(const RaceStage&) = delete;
  RaceStage& operator=(const RaceStage&) = delete;

  // Starts the workers of the first races, so that they open their devices
  // while this process compiles; where a device is busy, its worker starts when
  // it is free. Call WarmUp now and then meanwhile.
  absl::Status Begin();
  void WarmUp();

  // Settles every missing interval. An interval without a winner is no error.
  absl::Status Run();

 private:
  // One device, the worker on it, and what it races.
  struct Lane {
    std::string name;  // "GPU 1"; empty where there is only one
    DeviceProfile profile;
    RaceSite site;
    std::optional<DeviceLock> lock;  // outlives the worker
    std::unique_ptr<RemoteRacer> racer;
    bool looked_around = false;  // for others that compute on the device

    // Of the race that runs.
    size_t index = 0;
    std::vector<Digest> claims;
    std::vector<RaceEntry> entries;  // every candidate in planned order
    std::vector<size_t> entry_of;    // of each contender
    std::vector<bool> quarantined;   // contenders; already stored as rejects
  };

  enum class Step { kSettled, kRacing, kBusy };

  absl::Status MakeLanes(size_t context);
  absl::Status RunContext(size_t context);
  // Whether an interval needs no race: answered meanwhile, or beyond one.
  absl::StatusOr<bool> Settle(size_t index);
  // What of an interval can be done without waiting.
  absl::StatusOr<Step> TryBegin(size_t index, Lane* lane);
  absl::StatusOr<Step> BeginRace(size_t index, Lane* lane);
  // False, with a note the first time, when another process has the device.
  absl::StatusOr<bool> Lock(Lane* lane);
  absl::Status LookAround(Lane* lane);
  absl::StatusOr<bool> AnsweredMeanwhile(size_t index);
  absl::StatusOr<std::string> WhyUndecided(size_t index);
  absl::StatusOr<std::string> WhyIncomplete(const PlannedCandidate& candidate);
  absl::Status Predict(size_t index);

  absl::Status TakeCasualties(Lane* lane);
  absl::Status FinishRace(Lane* lane, const absl::StatusOr<RaceResult>& result);
  // What a race that ended well found out.
  absl::Status StoreRace(Lane* lane, const RaceResult& result);
  absl::Status RememberWrong(const Lane& lane);
  absl::Status StoreWinner(size_t index, const std::vector<RaceEntry>& entries,
                           const RaceResult& result);

  // Timing that the races of one request still have.
  struct Budget {
    double seconds = 0;
    size_t intervals = 0;  // that have not begun
  };

  Budget& BudgetOf(size_t index);
  double RaceSecondsFor(size_t index);

  std::string Describe(size_t index) const;
  std::string DescribeRace(const Lane& lane) const;
  void ShowProgress();

  PrewarmState& state_;
  std::optional<size_t> context_;  // of the lanes
  // By context and geometry.
  std::map<std::pair<size_t, RequestGeometry>, Budget> budgets_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<NewPlan> predicted_;  // not stored yet
  size_t done_ = 0;
  bool told_busy_ = false;
};

}  // namespace kiln

#endif  // KILN_TUNER_RACE_STAGE_H_
