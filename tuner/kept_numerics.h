// KeptNumerics: the numerics classes of a frozen bundle. A plan that takes the
// place of one of its plans, and is of the same class, gives the same bits.

#ifndef KILN_TUNER_KEPT_NUMERICS_H_
#define KILN_TUNER_KEPT_NUMERICS_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/base/digest.h"
#include "compiler/spec/request.h"
#include "compiler/spec/target.h"
#include "runtime/kiln.h"

namespace kiln {

// A value; keeps no reference to the bundle.
class KeptNumerics {
 public:
  // Reads a bundle that the runtime opened. Internal when a getter fails.
  static absl::StatusOr<KeptNumerics> Read(const kiln_bundle_t* bundle);

  // The class that all plans for the interval have, of every entry in `names`.
  //   Errors: FailedPrecondition when the bundle has no such entry for the
  //   target, serves another geometry or fewer tokens, has more than one class
  //   in the interval, or a plan whose repeats may differ.
  absl::StatusOr<std::string> ClassOf(const Target& target,
                                      const std::vector<std::string>& names,
                                      const RequestGeometry& geometry,
                                      const Interval& interval) const;

  const Digest& root() const { return root_; }

 private:
  struct Range {
    Interval interval;
    std::string numerics_class;
    bool deterministic = false;
  };

  struct Entry {
    std::string geometry;  // as the bundle describes it
    std::vector<Range> ranges;
  };

  std::map<std::pair<std::string, std::string>, Entry>
      entries_;  // target, name
  Digest root_;
};

}  // namespace kiln

#endif  // KILN_TUNER_KEPT_NUMERICS_H_
