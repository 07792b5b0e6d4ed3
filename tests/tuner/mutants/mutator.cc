#include "tests/tuner/mutants/mutator.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace kiln::testing {
namespace {

bool IsWord(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

void Blank(std::string* text, size_t begin, size_t end) {
  for (size_t i = begin; i < std::min(end, text->size()); ++i) {
    if ((*text)[i] != '\n') (*text)[i] = ' ';
  }
}

size_t LineEnd(absl::string_view text, size_t from) {
  return std::min(text.find('\n', from), text.size());
}

// The text with everything blanked that is no code.
std::string CodeOnly(absl::string_view text) {
  std::string code(text);
  for (size_t at = 0; at < code.size(); ++at) {
    if (code.compare(at, 2, "//") == 0) {
      Blank(&code, at, LineEnd(code, at));
    } else if (code[at] == '"') {
      size_t end = at + 1;
      while (end < code.size() && code[end] != '"') {
        end += code[end] == '\\' ? 2 : 1;
      }
      Blank(&code, at, end + 1);
      at = end;
    } else if (code[at] == '#' && (at == 0 || code[at - 1] == '\n')) {
      size_t end = LineEnd(code, at);
      while (end < code.size() && code[end - 1] == '\\') {
        end = LineEnd(code, end + 1);
      }
      Blank(&code, at, end);
    } else if (code.compare(at, 14, "static_assert(") == 0) {
      Blank(&code, at, code.find(';', at));
    }
  }
  return code;
}

// The name of the function that a "{" begins after `head`; empty when it begins
// something else.
std::string FunctionName(absl::string_view head) {
  constexpr std::array<absl::string_view, 9> kNone = {
      "if", "for",    "while",     "switch", "else",
      "do", "struct", "namespace", "extern"};
  head = absl::StripAsciiWhitespace(head);
  const absl::string_view first = head.substr(
      0,
      static_cast<size_t>(std::find_if_not(head.begin(), head.end(), IsWord) -
                          head.begin()));
  const bool entry = absl::StrContains(head, "__global__");
  if (!entry && std::find(kNone.begin(), kNone.end(), first) != kNone.end()) {
    return "";
  }
  for (size_t at = head.find('('); at != absl::string_view::npos;
       at = head.find('(', at + 1)) {
    size_t begin = at;
    while (begin > 0 && IsWord(head[begin - 1])) --begin;
    const absl::string_view name = head.substr(begin, at - begin);
    if (name.empty() || absl::StartsWith(name, "__")) continue;
    if (name == "kRouteThreads" || name == "kHelperThreads") continue;
    return std::string(name);
  }
  return "";
}

// Enclosing function of each byte, as indices into `names`.
std::vector<size_t> Scopes(const std::string& code,
                           std::vector<std::string>* names) {
  names->assign(1, "");
  std::vector<size_t> scope(code.size(), 0);
  std::vector<size_t> stack = {0};
  size_t head = 0;  // where the current statement begins
  for (size_t at = 0; at < code.size(); ++at) {
    const char c = code[at];
    if (c == '{') {
      size_t inner = stack.back();
      if (inner == 0) {
        const std::string name =
            FunctionName(absl::string_view(code).substr(head, at - head));
        if (!name.empty()) {
          names->push_back(name);
          inner = names->size() - 1;
        }
      }
      stack.push_back(inner);
    } else if (c == '}' && stack.size() > 1) {
      stack.pop_back();
    }
    if (c == '{' || c == '}' || c == ';') head = at + 1;
    scope[at] = stack.back();
  }
  return scope;
}

}  // namespace

std::string Mutant::Name() const {
  return absl::StrCat(rule->rule, ": ", rule->file, ":", line, " ", scope,
                      ", `", rule->find, "` -> `", rule->replace, "` in `",
                      code, "`", occurrence == 0 ? "" : " (again)");
}

std::vector<Mutant> MakeMutants(absl::string_view file, absl::string_view text,
                                std::span<const MutationRule> rules) {
  const std::string code = CodeOnly(text);
  std::vector<std::string> names;
  const std::vector<size_t> scopes = Scopes(code, &names);
  std::vector<Mutant> mutants;
  for (const MutationRule& rule : rules) {
    if (rule.file != file) continue;
    const std::string find = rule.find;
    for (size_t at = code.find(find); at != std::string::npos;
         at = code.find(find, at + find.size())) {
      const size_t end = at + find.size();
      const bool inside_word =
          (IsWord(find.front()) && at > 0 && IsWord(code[at - 1])) ||
          (IsWord(find.back()) && end < code.size() && IsWord(code[end]));
      if (inside_word) continue;
      const std::string& scope = names[scopes[at]];
      if (rule.scope[0] != '\0' && scope != rule.scope) continue;
      const size_t begin = code.rfind('\n', at) + 1;  // npos + 1 == 0
      Mutant mutant;
      mutant.rule = &rule;
      mutant.scope = scope;
      mutant.line =
          1 + static_cast<int>(std::count(
                  code.begin(), code.begin() + static_cast<std::ptrdiff_t>(at),
                  '\n'));
      mutant.code = std::string(absl::StripAsciiWhitespace(
          text.substr(begin, LineEnd(text, begin) - begin)));
      for (size_t other = code.find(find, begin); other < at;
           other = code.find(find, other + find.size())) {
        ++mutant.occurrence;
      }
      mutant.text =
          absl::StrCat(text.substr(0, at), rule.replace, text.substr(end));
      mutants.push_back(std::move(mutant));
    }
  }
  return mutants;
}

}  // namespace kiln::testing
