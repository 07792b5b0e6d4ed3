#include "compiler/base/available_memory.h"

#include <new>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::StatusIs;

constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

TEST(CheckMemoryForTest, RefusesMoreThanThereIsWithBothNumbers) {
  EXPECT_GT(AvailableMemoryBytes(), 0u);
  EXPECT_OK(CheckMemoryFor("little", 1));
  EXPECT_THAT(
      CheckMemoryFor("the weights", uint64_t{1} << 60),
      StatusIs(kExhausted,
               AllOf(HasSubstr("the weights: needs 1152921504606846976 bytes "
                               "of memory, "),
                     HasSubstr(" are available; free some, "))));
}

TEST(ExhaustedStatusTest, SaysWhatToDoWhenMemoryRanOut) {
  EXPECT_THAT(ExhaustedStatus(std::bad_alloc()),
              StatusIs(kExhausted, AllOf(HasSubstr("memory ran out while "),
                                         HasSubstr("ulimit -v"))));
  EXPECT_THAT(ExhaustedStatus(std::runtime_error("no threads")),
              StatusIs(kExhausted, HasSubstr("no threads")));
}

}  // namespace
}  // namespace kiln
