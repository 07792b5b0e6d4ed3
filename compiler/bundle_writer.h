// WriteBundle: sections of entries, plans and programs -> the bytes of one
// frozen file (runtime/bundle_format.h). A pure function: equal inputs give
// equal bytes on every machine. Writes no file; see WriteFileAtomically.

#ifndef KILN_COMPILER_BUNDLE_WRITER_H_
#define KILN_COMPILER_BUNDLE_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "compiler/spec/buffer_fill.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/program.h"
#include "compiler/spec/request.h"
#include "compiler/spec/target.h"

namespace kiln {

// One request as the engine will ask for it.
struct BundleEntry {
  std::string name;  // unique within a section
  RequestGeometry geometry;
  // In any order; their intervals must cover 1..capacity without gap or
  // overlap, where capacity is the largest m_max.
  std::vector<Plan> plans;
  // The buffers of the parameter block, one for each slot; empty where nobody
  // described them. All plans of the entry then have as many parameters.
  std::vector<BufferFill> buffers = {};
  // Digests of golden replay (runtime/bundle_format.md), by interval; only of
  // measured, deterministic plans of an entry with `buffers`.
  std::map<Interval, Digest> golden = {};
};

struct BundleSection {
  Target target;
  // Smallest driver that may load it, as cuDriverGetVersion counts (12040 for
  // 12.4). 0 on the CPU.
  uint32_t driver_version_min = 0;
  std::vector<BundleEntry> entries;
  // At least every program that a plan names; others are left out. The same
  // program may appear several times.
  std::vector<std::shared_ptr<const Program>> programs;
  // Templates (Plan::body.template_name) without a qualification for this
  // target. Their plans are marked, and loading them needs consent.
  std::vector<std::string> unqualified_templates;
};

struct BundleOptions {
  // False refuses plans in state kPredicted.
  bool allow_predicted = false;
  // False refuses plans of unqualified templates.
  bool allow_unqualified = true;
};

// Serialises `sections`. Everything is checked first:
//   InvalidArgument     empty input, duplicate target or entry name, text that
//                       is not printable ASCII, a plan of another target or
//                       geometry than its entry, intervals with a gap or
//                       overlap, arguments that differ from the kernel's
//                       declared parameters
//   NotFound            a program or kernel that a plan names is not there
//   FailedPrecondition  predicted or unqualified plans without consent
//   DataLoss            a binary that does not hash to its digest, or two
//                       different binaries under one build digest
//   ResourceExhausted   a count or size above its maximum in the format
//   Internal            ValidatePlan refuses a plan
absl::StatusOr<std::string> WriteBundle(std::vector<BundleSection> sections,
                                        const BundleOptions& options = {});

// The root in the header of `bundle`, which WriteBundle made.
absl::StatusOr<Digest> BundleRoot(absl::string_view bundle);

}  // namespace kiln

#endif  // KILN_COMPILER_BUNDLE_WRITER_H_
