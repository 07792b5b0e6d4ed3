// PlanKey (the measure digest): what must be equal for a stored winner to
// apply. There is no nearest match: a differing field is a miss.

#ifndef KILN_COMPILER_SPEC_PLAN_KEY_H_
#define KILN_COMPILER_SPEC_PLAN_KEY_H_

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "compiler/base/digest.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/program.h"

namespace kiln {

struct PlanKey {
  Digest digest;
  std::string preimage;  // CanonicalEncoder bytes

  bool operator==(const PlanKey&) const = default;
};

// Version of the way candidates are verified, timed and selected. Moves when
// stored samples would no longer mean the same.
inline constexpr int kMeasurementPolicyVersion = 2;

// Digest of one candidate: its body and the build digests of its programs. The
// labels of steps and the names of slices are for people and do not enter.
Digest CandidateDigest(const PlanBody& body,
                       const std::vector<Digest>& programs);

// One template as a candidate space sees it.
struct TemplateIdentity {
  std::string name;
  uint32_t version = 0;
  // Over every byte that shapes the space: kernel sources, device headers, and
  // the host code with axes, constraints and cost order.
  Digest sources;

  auto operator<=>(const TemplateIdentity&) const = default;
};

// Everything that decides which candidates enter a race for a given request and
// device. A key needs no enumeration: looking up a stored plan stays cheap.
struct CandidateSpace {
  std::vector<TemplateIdentity> templates;  // order does not matter
  Toolchain toolchain;
  int candidates_max = 0;
  uint64_t arena_bytes_max = kArenaBytesMax;
  // What the cost model goes by when it leaves candidates out; empty when it
  // leaves none out. See Ceilings::Balance.
  std::string balance = {};
  // The only numerics class that may enter; empty when all may.
  std::string numerics_class = {};
  bool warm_l2 = false;  // how candidates are timed

  bool operator==(const CandidateSpace&) const = default;
};

PlanKey MakePlanKey(const RequestGeometry& geometry, const Interval& interval,
                    const DeviceProfile& device, const CandidateSpace& space);

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_PLAN_KEY_H_
