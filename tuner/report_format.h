// How numbers, labels and cells of the report are written. Pure.

#ifndef KILN_TUNER_REPORT_FORMAT_H_
#define KILN_TUNER_REPORT_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "compiler/spec/request.h"

namespace kiln {

// Colours of winners; a letter tells them apart too.
inline constexpr size_t kColours = 8;

// The page's style sheet, light and dark.
absl::string_view ReportStyle();

// Text as it may stand in an element or a quoted attribute. What XML cannot
// carry (control characters, bytes that are no UTF-8) becomes U+FFFD.
std::string EscapeMarkup(absl::string_view text);

// "12.30 µs"; a dash for what is not finite, here and below.
std::string Time(double ns);
// As short as an axis wants it: "20 µs".
std::string TickTime(double ns);
std::string Percent(double fraction);
std::string Error(double error);
std::string Bytes(uint64_t bytes);
std::string Day(int64_t unix_seconds);
// "1 plan", "2 plans".
std::string Count(size_t count, absl::string_view noun);
// "8", "5–8"; with "token" or "tokens".
std::string Tokens(const Interval& interval);
std::string TokensNoun(const Interval& interval);
// "A".."Z", "AA"..
std::string Letter(size_t index);

// Table cells, escaped. LabelCell: a plan's label, which may break between its
// axes.
std::string Cell(absl::string_view text);
std::string Number(absl::string_view text);
std::string LabelCell(absl::string_view label);

}  // namespace kiln

#endif  // KILN_TUNER_REPORT_FORMAT_H_
