#include "tuner/report_format.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"

namespace kiln {
namespace {

constexpr char kStyle[] = R"css(
:root { color-scheme: light dark;
  --page: #f9f9f7; --card: #ffffff; --ink: #16160f; --soft: #52514e;
  --mute: #8b8a85; --line: #dddcd6; --bad: #b3261e;
  --c0: #2a78d6; --c1: #eb6834; --c2: #1baf7a; --c3: #c08400; --c4: #8a3fb5;
  --c5: #008300; --c6: #d6457a; --c7: #4a3aa7; }
@media (prefers-color-scheme: dark) { :root {
  --page: #121211; --card: #1c1c1a; --ink: #f2f1ec; --soft: #c3c2b7;
  --mute: #8f8e88; --line: #3a3935; --bad: #ff8a80;
  --c0: #4c97ee; --c1: #e8743f; --c2: #22b380; --c3: #d19a1c; --c4: #bd84e0;
  --c5: #4caf4c; --c6: #e8709a; --c7: #9085e9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 64px; max-width: 1120px;
  background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0 0 4px; }
h3 { font-size: 14px; margin: 20px 0 6px; }
p { margin: 4px 0 8px; }
section { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 16px 20px; margin: 20px 0; }
.soft { color: var(--soft); }
.bad { color: var(--bad); }
code, .label { font: 12px/1.45 ui-monospace, monospace;
  overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 10px 4px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); white-space: nowrap; }
.n { text-align: right; white-space: nowrap; }
details { margin: 4px 0; }
summary { cursor: pointer; padding: 2px 0; }
svg { display: block; width: 100%; height: auto; min-width: 640px; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .title { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--mute); stroke-width: 1; }
.curve { fill: none; stroke: var(--ink); stroke-width: 2; }
.default { fill: none; stroke: var(--soft); stroke-width: 1.5;
  stroke-dasharray: 5 4; }
.dmark { fill: var(--card); stroke: var(--soft); stroke-width: 1.5; }
.rival { fill: var(--mute); fill-opacity: 0.75; }
.band { fill: var(--ink); fill-opacity: 0.13; stroke: none; }
.floor { fill: none; stroke: var(--c5); stroke-width: 1.5;
  stroke-dasharray: 2 3; }
.whisker { stroke: var(--ink); stroke-opacity: 0.45; stroke-width: 1.5; }
.key { display: inline-block; min-width: 20px; padding: 0 5px;
  border-radius: 4px; text-align: center; font-weight: 600; font-size: 12px;
  border: 2px solid; }
.w { stroke: var(--card); stroke-width: 1.5; }
.region { fill-opacity: 0.28; stroke-width: 1.5; }
svg .letter { fill: var(--ink); font-weight: 600; text-anchor: middle; }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); }
.f3 { fill: var(--c3); } .f4 { fill: var(--c4); } .f5 { fill: var(--c5); }
.f6 { fill: var(--c6); } .f7 { fill: var(--c7); }
.s0 { stroke: var(--c0); border-color: var(--c0); }
.s1 { stroke: var(--c1); border-color: var(--c1); }
.s2 { stroke: var(--c2); border-color: var(--c2); }
.s3 { stroke: var(--c3); border-color: var(--c3); }
.s4 { stroke: var(--c4); border-color: var(--c4); }
.s5 { stroke: var(--c5); border-color: var(--c5); }
.s6 { stroke: var(--c6); border-color: var(--c6); }
.s7 { stroke: var(--c7); border-color: var(--c7); }
@media print { section { break-inside: avoid; } }
)css";

// Length of the well-formed UTF-8 sequence at the start of `text`, or 0. Sets
// `code` (Unicode 15, table 3-7).
size_t DecodeUtf8(absl::string_view text, uint32_t* code) {
  const auto byte = [&](size_t i) {
    return static_cast<uint32_t>(static_cast<unsigned char>(text[i]));
  };
  const uint32_t first = byte(0);
  if (first < 0x80) {
    *code = first;
    return 1;
  }
  const size_t length = first >= 0xF0   ? 4
                        : first >= 0xE0 ? 3
                        : first >= 0xC2 ? 2
                                        : 0;
  if (length == 0 || first > 0xF4 || text.size() < length) return 0;
  uint32_t value = first & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    value = (value << 6) | (byte(i) & 0x3F);
  }
  const bool overlong =
      (length == 3 && value < 0x800) || (length == 4 && value < 0x10000);
  if (overlong || value > 0x10FFFF) return 0;
  *code = value;
  return length;
}

// XML 1.0, production Char.
bool IsXmlChar(uint32_t code) {
  if (code < 0x20) return code == '\t' || code == '\n';
  return code != 0x7F && !(code >= 0xD800 && code <= 0xDFFF) &&
         code != 0xFFFE && code != 0xFFFF;
}

}  // namespace

absl::string_view ReportStyle() { return kStyle; }

std::string EscapeMarkup(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    uint32_t code = 0;
    const size_t length = DecodeUtf8(text, &code);
    if (length == 0 || !IsXmlChar(code)) {
      absl::StrAppend(&out, "\xEF\xBF\xBD");
    } else if (code == '&') {
      absl::StrAppend(&out, "&amp;");
    } else if (code == '<') {
      absl::StrAppend(&out, "&lt;");
    } else if (code == '>') {
      absl::StrAppend(&out, "&gt;");
    } else if (code == '"') {
      absl::StrAppend(&out, "&quot;");
    } else if (code == '\'') {
      absl::StrAppend(&out, "&#39;");
    } else {
      absl::StrAppend(&out, text.substr(0, length));
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

std::string Time(double ns) {
  if (!std::isfinite(ns)) return "–";
  if (ns >= 1e9) return absl::StrFormat("%.3f s", ns / 1e9);
  if (ns >= 1e6) return absl::StrFormat("%.3f ms", ns / 1e6);
  if (ns >= 1e3) return absl::StrFormat("%.2f µs", ns / 1e3);
  return absl::StrFormat("%.1f ns", ns);
}

std::string TickTime(double ns) {
  if (ns >= 1e9) return absl::StrFormat("%g s", ns / 1e9);
  if (ns >= 1e6) return absl::StrFormat("%g ms", ns / 1e6);
  if (ns >= 1e3) return absl::StrFormat("%g µs", ns / 1e3);
  return absl::StrFormat("%g ns", ns);
}

std::string Percent(double fraction) {
  if (!std::isfinite(fraction)) return "–";
  return absl::StrFormat("%+.1f %%", 100 * fraction);
}

std::string Error(double error) {
  return std::isfinite(error) ? absl::StrFormat("%.1e", error) : "–";
}

std::string Bytes(uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= 1 << 20) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  if (bytes >= 1 << 10) return absl::StrFormat("%.1f KiB", value / (1 << 10));
  return absl::StrCat(bytes, " B");
}

std::string Day(int64_t unix_seconds) {
  return absl::FormatTime("%Y-%m-%d", absl::FromUnixSeconds(unix_seconds),
                          absl::UTCTimeZone());
}

std::string Count(size_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::string Tokens(const Interval& interval) {
  return interval.m_min == interval.m_max
             ? absl::StrCat(interval.m_max)
             : absl::StrCat(interval.m_min, "–", interval.m_max);
}

std::string TokensNoun(const Interval& interval) {
  return absl::StrCat(Tokens(interval),
                      interval.m_max == 1 ? " token" : " tokens");
}

std::string Letter(size_t index) {
  std::string out;
  for (size_t i = index + 1; i > 0; i = (i - 1) / 26) {
    out.insert(out.begin(), static_cast<char>('A' + (i - 1) % 26));
  }
  return out;
}

std::string Cell(absl::string_view text) {
  return absl::StrCat("<td>", EscapeMarkup(text), "</td>");
}

std::string Number(absl::string_view text) {
  return absl::StrCat("<td class=\"n\">", EscapeMarkup(text), "</td>");
}

std::string LabelCell(absl::string_view label) {
  return absl::StrCat(
      "<td class=\"label\">",
      absl::StrReplaceAll(EscapeMarkup(label), {{",", ",<wbr/>"}}), "</td>");
}

}  // namespace kiln
