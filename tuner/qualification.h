// Qualification: which templates passed the suite on a real device of a target,
// according to the receipts under tests/qualification/ that were built in.

#ifndef KILN_TUNER_QUALIFICATION_H_
#define KILN_TUNER_QUALIFICATION_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "compiler/spec/plan_key.h"
#include "compiler/spec/target.h"

namespace kiln {

// The requests that a suite is made of.
struct SuiteIdentity {
  std::string name;  // of its file
  Digest content;    // SHA-256 of the file

  bool operator==(const SuiteIdentity&) const = default;
};

// One receipt, as far as Kiln itself needs it.
struct QualificationReceipt {
  Target target;
  std::string device;       // "NVIDIA H200"
  std::string date;         // "2026-11-29"
  std::string not_covered;  // what the suite does not claim
  // Receipts from before it was recorded have none; no other suite could be
  // run then without a change of the tree.
  std::optional<SuiteIdentity> suite;
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

// That of tests/qualification as it was built in.
const SuiteIdentity& TreeSuite();

// (file name, text) of it; one.
const std::vector<std::pair<std::string, std::string>>& EmbeddedSuite();

// Whether a receipt is of the tree's suite as it stands.
bool IsOfTreeSuite(const QualificationReceipt& receipt);

// True when a receipt for `target` of the tree's suite has exactly this
// template: name, version and sources. A changed template is unqualified until
// its suite ran again, and so are all when the suite changed.
bool IsQualified(const TemplateIdentity& identity, const Target& target,
                 const std::vector<QualificationReceipt>& receipts);

}  // namespace kiln

#endif  // KILN_TUNER_QUALIFICATION_H_
