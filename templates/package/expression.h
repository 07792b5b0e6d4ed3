// Expression: a size or a launch dimension of a package's manifest, such as
// "ceil_div(top_k * m, tile)".
//
//   whole numbers, names, ( ), + - * / %, ceil_div(a, b), min(a, b), max(a, b)
//
// "/" and "%" are those of C. Numbers have 64 bits, and a result that does not
// fit is an error. A launch dimension may name m, the live tokens, where a
// launch can compute it: as a * m + b, as ceil_div(a * m + b, c), or as min of
// two of these, with a, b and c free of m.

#ifndef KILN_TEMPLATES_PACKAGE_EXPRESSION_H_
#define KILN_TEMPLATES_PACKAGE_EXPRESSION_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/plan.h"

namespace kiln {

// What the names of an expression stand for.
using ExpressionValues = std::map<std::string, int64_t>;

// Largest expression, in bytes, and deepest nesting.
inline constexpr size_t kExpressionBytesMax = 1024;
inline constexpr int kExpressionDepthMax = 32;

// A plain value; the empty one is 0.
class Expression {
 public:
  // What the result of a node can be, by how it depends on m.
  enum class Kind {
    kNumber,    // not at all
    kLinear,    // a * m + b
    kQuotient,  // ceil_div(a * m + b, c)
    kSmaller,   // min of two of these
  };

  // An operator or a leaf. Operands come before it in the list of nodes.
  struct Node {
    char operation = '#';  // # number, $ name, + - * / %, c ceil_div, < min,
                           // > max
    Kind kind = Kind::kNumber;
    int64_t number = 0;
    std::string name;
    size_t left = 0;  // indices of nodes
    size_t right = 0;
    bool operator==(const Node&) const = default;
  };

  Expression() = default;

  // names: those that may occur. launch: m may occur too.
  //   Errors: InvalidArgument, with the expression and the place in it; also
  //   for a part without names that overflows or divides by something below 1.
  static absl::StatusOr<Expression> Parse(absl::string_view text,
                                          const std::set<std::string>& names,
                                          bool launch);

  // Whether it names nothing but m: it is then worth the same at every point.
  bool IsFixed() const;

  // The value of an expression without m. `values` has all names.
  //   Errors: InvalidArgument, with the expression, where it overflows or
  //   divides by something below 1.
  absl::StatusOr<int64_t> Number(const ExpressionValues& values) const;

  // Number, within [low, high].
  absl::StatusOr<int64_t> Within(const ExpressionValues& values, int64_t low,
                                 int64_t high) const;

  // The expression as a launch rule.
  //   Errors: as Number, and where a part of the rule does not fit 32 bits.
  absl::StatusOr<LaunchDim> Dim(const ExpressionValues& values) const;

  const std::string& text() const { return text_; }

  bool operator==(const Expression&) const = default;

 private:
  std::string text_ = "0";
  std::vector<Node> nodes_;  // the last is the result
};

// Two expressions and how they must compare, such as "hidden % tile == 0".
class Condition {
 public:
  static absl::StatusOr<Condition> Parse(absl::string_view text,
                                         const std::set<std::string>& names);

  bool IsFixed() const;  // as that of an expression

  //   Errors: as Expression::Number.
  absl::StatusOr<bool> Holds(const ExpressionValues& values) const;

  const std::string& text() const { return text_; }

  bool operator==(const Condition&) const = default;

 private:
  std::string text_;
  std::string comparison_;  // == != < <= > >=
  Expression left_;
  Expression right_;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_PACKAGE_EXPRESSION_H_
