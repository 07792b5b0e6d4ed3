// GoogleMock matchers for absl::Status and absl::StatusOr, which the packaged
// Abseil does not have:
//
//   EXPECT_OK(status_or_statusor);
//   ASSERT_OK_AND_ASSIGN(const Plan plan, PlanFromJson(text));
//   EXPECT_THAT(s, StatusIs(absl::StatusCode::kNotFound, HasSubstr("sm_90a")));
//   EXPECT_THAT(s, IsOkAndHolds(7));

#ifndef KILN_TESTS_SUPPORT_STATUS_MATCHERS_H_
#define KILN_TESTS_SUPPORT_STATUS_MATCHERS_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kiln::testing {

inline const absl::Status& StatusOf(const absl::Status& status) {
  return status;
}

template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& value) {
  return value.status();
}

// Matches a Status or StatusOr by code, and its message by a string matcher.
class StatusIsMatcher {
 public:
  StatusIsMatcher(absl::StatusCode code,
                  ::testing::Matcher<const std::string&> message)
      : code_(code), message_(std::move(message)) {}

  template <typename StatusLike>
  bool MatchAndExplain(const StatusLike& value,
                       ::testing::MatchResultListener* listener) const {
    const absl::Status& status = StatusOf(value);
    *listener << "which is " << status.ToString();
    return status.code() == code_ &&
           message_.Matches(std::string(status.message()));
  }

  void DescribeTo(std::ostream* os) const {
    *os << "has status " << absl::StatusCodeToString(code_)
        << " and a message that ";
    message_.DescribeTo(os);
  }

  void DescribeNegationTo(std::ostream* os) const {
    *os << "not (";
    DescribeTo(os);
    *os << ")";
  }

 private:
  absl::StatusCode code_;
  ::testing::Matcher<const std::string&> message_;
};

template <typename MessageMatcher>
::testing::PolymorphicMatcher<StatusIsMatcher> StatusIs(
    absl::StatusCode code, MessageMatcher message) {
  return ::testing::MakePolymorphicMatcher(StatusIsMatcher(
      code, ::testing::SafeMatcherCast<const std::string&>(message)));
}

inline ::testing::PolymorphicMatcher<StatusIsMatcher> StatusIs(
    absl::StatusCode code) {
  return StatusIs(code, ::testing::_);
}

inline ::testing::PolymorphicMatcher<StatusIsMatcher> IsOk() {
  return StatusIs(absl::StatusCode::kOk);
}

// Matches a StatusOr that holds a value which `inner` matches.
template <typename Inner>
class IsOkAndHoldsMatcher {
 public:
  explicit IsOkAndHoldsMatcher(Inner inner) : inner_(std::move(inner)) {}

  template <typename StatusOrT>
  operator ::testing::Matcher<StatusOrT>() const {  // NOLINT: implicit as gmock
    return ::testing::Matcher<StatusOrT>(new Implementation<StatusOrT>(inner_));
  }

 private:
  template <typename StatusOrT>
  class Implementation : public ::testing::MatcherInterface<StatusOrT> {
   public:
    using Value = typename std::decay_t<StatusOrT>::value_type;

    explicit Implementation(const Inner& inner)
        : inner_(::testing::SafeMatcherCast<const Value&>(inner)) {}

    bool MatchAndExplain(
        StatusOrT value,
        ::testing::MatchResultListener* listener) const override {
      if (!value.ok()) {
        *listener << "which is " << value.status().ToString();
        return false;
      }
      return inner_.MatchAndExplain(*value, listener);
    }

    void DescribeTo(std::ostream* os) const override {
      *os << "is OK and holds a value that ";
      inner_.DescribeTo(os);
    }

   private:
    ::testing::Matcher<const Value&> inner_;
  };

  Inner inner_;
};

template <typename Inner>
IsOkAndHoldsMatcher<std::decay_t<Inner>> IsOkAndHolds(Inner&& inner) {
  return IsOkAndHoldsMatcher<std::decay_t<Inner>>(std::forward<Inner>(inner));
}

}  // namespace kiln::testing

#define EXPECT_OK(expression) EXPECT_THAT((expression), ::kiln::testing::IsOk())
#define ASSERT_OK(expression) ASSERT_THAT((expression), ::kiln::testing::IsOk())

#define KILN_TEST_CONCAT_INNER_(a, b) a##b
#define KILN_TEST_CONCAT_(a, b) KILN_TEST_CONCAT_INNER_(a, b)

// Declares or assigns `lhs` from a StatusOr, or ends the test with its status.
#define ASSERT_OK_AND_ASSIGN(lhs, expression) \
  KILN_ASSERT_OK_AND_ASSIGN_IMPL_(            \
      KILN_TEST_CONCAT_(kiln_test_statusor_, __LINE__), lhs, expression)

#define KILN_ASSERT_OK_AND_ASSIGN_IMPL_(statusor, lhs, expression) \
  auto statusor = (expression);                                    \
  ASSERT_TRUE(statusor.ok()) << statusor.status();                 \
  lhs = std::move(statusor).value()

#endif  // KILN_TESTS_SUPPORT_STATUS_MATCHERS_H_
