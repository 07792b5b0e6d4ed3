// Qualification: which templates passed the suite on a real device of a target,
// according to the receipts under tests/qualification/ that were built in.

#ifndef KILN_TUNER_QUALIFICATION_H_
#define KILN_TUNER_QUALIFICATION_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/plan_key.h"
#include "compiler/spec/target.h"

namespace kiln {

// One receipt, as far as Kiln itself needs it.
struct QualificationReceipt {
  Target target;
  std::string device;       // "NVIDIA H200"
  std::string date;         // "2026-11-29"
  std::string not_covered;  // what the suite does not claim
  std::vector<TemplateIdentity> templates;
};

// Reads a receipt, schema "kiln.qualification/1". InvalidArgument with line and
// column otherwise.
absl::StatusOr<QualificationReceipt> ParseReceipt(absl::string_view text,
                                                  absl::string_view file);

// All receipts of this build. Aborts on a malformed one: they are compiled in,
// and a test parses each.
const std::vector<QualificationReceipt>& Receipts();

// (file name, text) of the receipts of this build.
const std::vector<std::pair<std::string, std::string>>& EmbeddedReceipts();

// True when a receipt for `target` has exactly this template: name, version and
// sources. A changed template is unqualified until its suite ran again.
bool IsQualified(const TemplateIdentity& identity, const Target& target,
                 const std::vector<QualificationReceipt>& receipts);

}  // namespace kiln

#endif  // KILN_TUNER_QUALIFICATION_H_
