#include "templates/package/expression.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"

namespace kiln {
namespace {

using Kind = Expression::Kind;
using Node = Expression::Node;

constexpr absl::string_view kTokens = "m";

// Functions of two operands, by the operation of their node.
constexpr std::pair<absl::string_view, char> kFunctions[] = {
    {"ceil_div", 'c'}, {"min", '<'}, {"max", '>'}};

// ceil((mul * m + add) / div), in wide numbers.
struct WideTerm {
  int64_t mul = 0;
  int64_t add = 0;
  int64_t div = 1;
};

// What a node is worth: a term, or the smaller of two.
struct WideDim {
  WideTerm a;
  std::optional<WideTerm> b;
};

// Remembers whether any step overflowed or divided by something below 1.
class Arithmetic {
 public:
  int64_t Sum(int64_t a, int64_t b) {
    int64_t result = 0;
    if (__builtin_add_overflow(a, b, &result)) Fail("overflows 64 bits");
    return result;
  }

  int64_t Difference(int64_t a, int64_t b) {
    int64_t result = 0;
    if (__builtin_sub_overflow(a, b, &result)) Fail("overflows 64 bits");
    return result;
  }

  int64_t Product(int64_t a, int64_t b) {
    int64_t result = 0;
    if (__builtin_mul_overflow(a, b, &result)) Fail("overflows 64 bits");
    return result;
  }

  // `b`, or 1 after an error.
  int64_t Divisor(int64_t b) {
    if (b >= 1) return b;
    Fail(absl::StrCat("divides by ", b));
    return 1;
  }

  int64_t CeilDiv(int64_t a, int64_t b) {
    const int64_t by = Divisor(b);
    return a / by + (a % by > 0 ? 1 : 0);
  }

  const std::string& problem() const { return problem_; }

 private:
  void Fail(const std::string& problem) {
    if (problem_.empty()) problem_ = problem;
  }

  std::string problem_;
};

// The parser has made sure that operands are of the kinds that are used here.
WideDim Apply(const Node& node, const WideDim& left, const WideDim& right,
              Arithmetic* math) {
  const WideTerm& a = left.a;
  const WideTerm& b = right.a;
  switch (node.operation) {
    case '+':
      return {.a = {math->Sum(a.mul, b.mul), math->Sum(a.add, b.add), 1},
              .b = std::nullopt};
    case '-':
      return {.a = {math->Difference(a.mul, b.mul),
                    math->Difference(a.add, b.add), 1},
              .b = std::nullopt};
    case '*':
      // One of the two is a number: the product of m with m is 0.
      return {.a = {math->Sum(math->Product(a.mul, b.add),
                              math->Product(b.mul, a.add)),
                    math->Product(a.add, b.add), 1},
              .b = std::nullopt};
    case '/':
      return {.a = {0, a.add / math->Divisor(b.add), 1}, .b = std::nullopt};
    case '%':
      return {.a = {0, a.add % math->Divisor(b.add), 1}, .b = std::nullopt};
    case '>':
      return {.a = {0, std::max(a.add, b.add), 1}, .b = std::nullopt};
    case 'c':
      if (node.kind == Kind::kNumber) {
        return {.a = {0, math->CeilDiv(a.add, b.add), 1}, .b = std::nullopt};
      }
      return {.a = {a.mul, a.add, math->Divisor(b.add)}, .b = std::nullopt};
    case '<':
      if (node.kind == Kind::kNumber) {
        return {.a = {0, std::min(a.add, b.add), 1}, .b = std::nullopt};
      }
      return {.a = a, .b = b};
    default:
      KILN_UNREACHABLE();
  }
}

// Recursive descent; every call adds the nodes of what it read.
class Parser {
 public:
  Parser(absl::string_view text, const std::set<std::string>& names,
         bool launch)
      : text_(text), names_(names), launch_(launch) {}

  absl::StatusOr<std::vector<Node>> Run() {
    if (text_.size() > kExpressionBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("the expression has ", text_.size(), " bytes, at most ",
                       kExpressionBytesMax, " are accepted"));
    }
    ASSIGN_OR_RETURN(const size_t result, Sum(0));
    SkipBlanks();
    if (at_ != text_.size()) return Refuse("an operator");
    KILN_CHECK(result + 1 == nodes_.size());
    return std::move(nodes_);
  }

 private:
  absl::Status Refuse(absl::string_view expected) const {
    return Error(absl::StrCat(
        "expected ", expected, ", found ",
        at_ < text_.size() ? JsonQuote(text_.substr(at_, 1)) : "the end"));
  }

  absl::Status Error(absl::string_view what) const {
    return ErrorAt(at_, what);
  }

  absl::Status ErrorAt(size_t at, absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(
        "expression ", JsonQuote(text_), ", at byte ", at + 1, ": ", what));
  }

  void SkipBlanks() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }

  // The next character that is no blank; 0 at the end.
  char Peek() {
    SkipBlanks();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  absl::Status Expect(char c) {
    if (Peek() != c) return Refuse(absl::StrCat("\"", std::string(1, c), "\""));
    ++at_;
    return absl::OkStatus();
  }

  absl::StatusOr<size_t> Sum(int depth) {
    ASSIGN_OR_RETURN(size_t left, Product(depth));
    while (Peek() == '+' || Peek() == '-') {
      const size_t at = at_++;
      ASSIGN_OR_RETURN(const size_t right, Product(depth));
      ASSIGN_OR_RETURN(left, Add(text_[at], at, left, right));
    }
    return left;
  }

  absl::StatusOr<size_t> Product(int depth) {
    ASSIGN_OR_RETURN(size_t left, Operand(depth));
    while (Peek() == '*' || Peek() == '/' || Peek() == '%') {
      const size_t at = at_++;
      ASSIGN_OR_RETURN(const size_t right, Operand(depth));
      ASSIGN_OR_RETURN(left, Add(text_[at], at, left, right));
    }
    return left;
  }

  absl::StatusOr<size_t> Operand(int depth) {
    if (depth >= kExpressionDepthMax) {
      return Error(absl::StrCat("deeper than ", kExpressionDepthMax,
                                " levels of brackets"));
    }
    const char c = Peek();
    if (c == '(') {
      ++at_;
      ASSIGN_OR_RETURN(const size_t inside, Sum(depth + 1));
      RETURN_IF_ERROR(Expect(')'));
      return inside;
    }
    if (absl::ascii_isdigit(static_cast<unsigned char>(c))) return Literal();
    if (absl::ascii_islower(static_cast<unsigned char>(c))) return Word(depth);
    return Refuse("a number, a name or \"(\"");
  }

  std::string Take(bool (*belongs)(unsigned char)) {
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (belongs(static_cast<unsigned char>(text_[at_])) ||
            text_[at_] == '_')) {
      ++at_;
    }
    return std::string(text_.substr(begin, at_ - begin));
  }

  absl::StatusOr<size_t> Literal() {
    const std::string digits = Take(absl::ascii_isalnum);
    Node node;
    if (!absl::SimpleAtoi(digits, &node.number)) {
      return Error(
          absl::StrCat(JsonQuote(digits), " is no whole number of 64 bits"));
    }
    const int64_t number = node.number;
    return Append(std::move(node), number);
  }

  absl::StatusOr<size_t> Word(int depth) {
    SkipBlanks();
    const size_t at = at_;
    const std::string word = Take(absl::ascii_isalnum);
    for (const auto& [function, operation] : kFunctions) {
      if (function != word) continue;
      RETURN_IF_ERROR(Expect('('));
      ASSIGN_OR_RETURN(const size_t left, Sum(depth + 1));
      RETURN_IF_ERROR(Expect(','));
      ASSIGN_OR_RETURN(const size_t right, Sum(depth + 1));
      RETURN_IF_ERROR(Expect(')'));
      return Add(operation, at, left, right);
    }
    Node node;
    node.operation = '$';
    node.name = word;
    if (word == kTokens) {
      if (!launch_) {
        return Error(
            "m is known at a launch only, and may stand in a grid alone; "
            "capacity is its largest value");
      }
      node.kind = Kind::kLinear;
    } else if (names_.count(word) == 0) {
      return Error(absl::StrCat("unknown name ", JsonQuote(word),
                                "; known: ", launch_ ? "m, " : "",
                                absl::StrJoin(names_, ", ")));
    }
    return Append(std::move(node), std::nullopt);
  }

  // at: where the operation stands.
  absl::StatusOr<size_t> Add(char operation, size_t at, size_t left,
                             size_t right) {
    const Kind a = nodes_[left].kind;
    const Kind b = nodes_[right].kind;
    Node node;
    node.operation = operation;
    node.left = left;
    node.right = right;
    const std::optional<Kind> kind = KindOf(operation, a, b);
    if (!kind.has_value()) {
      return Error(
          "a launch cannot compute this of m; it can a * m + b, "
          "ceil_div(a * m + b, c), and min of two of these");
    }
    node.kind = *kind;
    ASSIGN_OR_RETURN(const std::optional<int64_t> number,
                     NumberOf(node, at, numbers_[left], numbers_[right]));
    return Append(std::move(node), number);
  }

  // The value of a node that no name can change. One that fails is refused
  // here, for it fails at every point; so is a division by such a 0.
  absl::StatusOr<std::optional<int64_t>> NumberOf(
      const Node& node, size_t at, std::optional<int64_t> left,
      std::optional<int64_t> right) const {
    Arithmetic math;
    std::optional<int64_t> number;
    if (left.has_value() && right.has_value()) {
      number = Apply(node, {.a = {0, *left, 1}, .b = std::nullopt},
                     {.a = {0, *right, 1}, .b = std::nullopt}, &math)
                   .a.add;
    } else if (right.has_value() &&
               absl::string_view("/%c").find(node.operation) !=
                   absl::string_view::npos) {
      math.Divisor(*right);
    }
    if (!math.problem().empty()) return ErrorAt(at, math.problem());
    return number;
  }

  // Absent for what a LaunchDim cannot say.
  static std::optional<Kind> KindOf(char operation, Kind a, Kind b) {
    if (a == Kind::kNumber && b == Kind::kNumber) return Kind::kNumber;
    const bool linear = a <= Kind::kLinear && b <= Kind::kLinear;
    switch (operation) {
      case '+':
      case '-':
        return linear ? std::optional(Kind::kLinear) : std::nullopt;
      case '*':
        return linear && (a == Kind::kNumber || b == Kind::kNumber)
                   ? std::optional(Kind::kLinear)
                   : std::nullopt;
      case 'c':
        return linear && b == Kind::kNumber ? std::optional(Kind::kQuotient)
                                            : std::nullopt;
      case '<':
        return a != Kind::kSmaller && b != Kind::kSmaller
                   ? std::optional(Kind::kSmaller)
                   : std::nullopt;
      default:
        return std::nullopt;
    }
  }

  size_t Append(Node node, std::optional<int64_t> number) {
    nodes_.push_back(std::move(node));
    numbers_.push_back(number);
    return nodes_.size() - 1;
  }

  absl::string_view text_;
  const std::set<std::string>& names_;
  const bool launch_;
  size_t at_ = 0;
  std::vector<Node> nodes_;
  // What each node is worth; absent where a name decides.
  std::vector<std::optional<int64_t>> numbers_;
};

absl::StatusOr<WideDim> Evaluate(const std::vector<Node>& nodes,
                                 const std::string& text,
                                 const ExpressionValues& values) {
  Arithmetic math;
  std::vector<WideDim> results;
  for (const Node& node : nodes) {
    WideDim result;
    if (node.operation == '#') {
      result.a.add = node.number;
    } else if (node.operation == '$' && node.kind == Kind::kLinear) {
      result.a.mul = 1;
    } else if (node.operation == '$') {
      const auto value = values.find(node.name);
      KILN_CHECK(value != values.end());
      result.a.add = value->second;
    } else {
      result = Apply(node, results[node.left], results[node.right], &math);
    }
    results.push_back(result);
  }
  if (!math.problem().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expression ", JsonQuote(text), " ", math.problem()));
  }
  return results.empty() ? WideDim() : results.back();
}

absl::StatusOr<uint32_t> To32Bits(int64_t value, const std::string& text) {
  if (value < 0 || value > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expression ", JsonQuote(text), " needs ", value,
                     " in a launch rule, whose numbers have 32 bits and no "
                     "sign"));
  }
  return static_cast<uint32_t>(value);
}

absl::StatusOr<LaunchTerm> ToTerm(const WideTerm& wide,
                                  const std::string& text) {
  LaunchTerm term;
  ASSIGN_OR_RETURN(term.mul, To32Bits(wide.mul, text));
  ASSIGN_OR_RETURN(term.add, To32Bits(wide.add, text));
  ASSIGN_OR_RETURN(term.div, To32Bits(wide.div, text));
  return term;
}

}  // namespace

absl::StatusOr<Expression> Expression::Parse(absl::string_view text,
                                             const std::set<std::string>& names,
                                             bool launch) {
  Expression expression;
  expression.text_ = std::string(text);
  ASSIGN_OR_RETURN(expression.nodes_, Parser(text, names, launch).Run());
  return expression;
}

bool Expression::IsFixed() const {
  return std::all_of(nodes_.begin(), nodes_.end(), [](const Node& node) {
    return node.operation != '$' || node.kind == Kind::kLinear;
  });
}

absl::StatusOr<int64_t> Expression::Number(
    const ExpressionValues& values) const {
  ASSIGN_OR_RETURN(const WideDim result, Evaluate(nodes_, text_, values));
  KILN_CHECK(nodes_.empty() || nodes_.back().kind == Kind::kNumber);
  return result.a.add;
}

absl::StatusOr<int64_t> Expression::Within(const ExpressionValues& values,
                                           int64_t low, int64_t high) const {
  ASSIGN_OR_RETURN(const int64_t value, Number(values));
  if (value < low || value > high) {
    return absl::InvalidArgumentError(
        absl::StrCat("expression ", JsonQuote(text_), " is ", value,
                     ", must be within ", low, "..", high));
  }
  return value;
}

absl::StatusOr<LaunchDim> Expression::Dim(
    const ExpressionValues& values) const {
  ASSIGN_OR_RETURN(const WideDim wide, Evaluate(nodes_, text_, values));
  LaunchDim dim;
  ASSIGN_OR_RETURN(dim.a, ToTerm(wide.a, text_));
  ASSIGN_OR_RETURN(dim.b, ToTerm(wide.b.value_or(wide.a), text_));
  return dim;
}

absl::StatusOr<Condition> Condition::Parse(absl::string_view text,
                                           const std::set<std::string>& names) {
  Condition condition;
  condition.text_ = std::string(text);
  const size_t begin = text.find_first_of("=!<>");
  if (begin == absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("condition ", JsonQuote(text),
                     " compares nothing; expected one of == != < <= > >="));
  }
  const size_t bytes = text.substr(begin + 1, 1) == "=" ? 2 : 1;
  condition.comparison_ = std::string(text.substr(begin, bytes));
  if (condition.comparison_ == "=" || condition.comparison_ == "!") {
    return absl::InvalidArgumentError(absl::StrCat(
        "condition ", JsonQuote(text), " has \"", condition.comparison_,
        "\"; expected one of == != < <= > >="));
  }
  ASSIGN_OR_RETURN(condition.left_,
                   Expression::Parse(text.substr(0, begin), names, false));
  ASSIGN_OR_RETURN(condition.right_,
                   Expression::Parse(text.substr(begin + bytes), names, false));
  return condition;
}

bool Condition::IsFixed() const { return left_.IsFixed() && right_.IsFixed(); }

absl::StatusOr<bool> Condition::Holds(const ExpressionValues& values) const {
  ASSIGN_OR_RETURN(const int64_t left, left_.Number(values));
  ASSIGN_OR_RETURN(const int64_t right, right_.Number(values));
  if (comparison_ == "==") return left == right;
  if (comparison_ == "!=") return left != right;
  if (comparison_ == "<") return left < right;
  if (comparison_ == "<=") return left <= right;
  if (comparison_ == ">") return left > right;
  return left >= right;
}

}  // namespace kiln
