// LoadedPlan: one plan behind the runtime's C ABI. What is verified and timed
// is launched exactly as an engine launches it: packed into a bundle in memory,
// opened, loaded, and enqueued by kiln_launch.

#ifndef KILN_TUNER_LOADED_PLAN_H_
#define KILN_TUNER_LOADED_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/program.h"
#include "runtime/kiln.h"
#include "tuner/device.h"

namespace kiln {

// absl::Status for a failed runtime call, with the runtime's own message.
absl::Status RuntimeStatus(kiln_status_t status, const kiln_error_t& error);

// Movable; unloads on destruction, before the device goes away.
class LoadedPlan {
 public:
  // Loads `body` for 1..capacity tokens on `device`.
  //   programs: in the order that Step::program indexes.
  static absl::StatusOr<LoadedPlan> Load(
      Device* device, const RequestGeometry& geometry, uint32_t capacity,
      const PlanBody& body,
      const std::vector<std::shared_ptr<const Program>>& programs);

  // Loads entry `name` of a bundle; Find then selects the interval.
  static absl::StatusOr<LoadedPlan> Open(Device* device, kiln_bundle_t* bundle,
                                         const std::string& name,
                                         uint32_t flags);

  LoadedPlan(LoadedPlan&& other) noexcept;
  LoadedPlan& operator=(LoadedPlan&& other) noexcept;
  ~LoadedPlan();

  // The plan that serves m; must be called before Launch of that m.
  absl::Status Find(uint64_t m);

  const kiln_entry_t* entry() const { return entry_; }

  absl::StatusOr<uint64_t> ArenaBytes() const;

  // Enqueues the plan; see kiln_launch.
  absl::Status Launch(uint32_t m, const std::vector<uint64_t>& params,
                      void* arena, uint64_t arena_bytes) const;

 private:
  LoadedPlan() = default;

  Device* device_ = nullptr;
  std::string name_;
  kiln_bundle_t* bundle_ = nullptr;  // owned when Load made it
  kiln_modules_t* modules_ = nullptr;
  const kiln_entry_t* entry_ = nullptr;
};

}  // namespace kiln

#endif  // KILN_TUNER_LOADED_PLAN_H_
