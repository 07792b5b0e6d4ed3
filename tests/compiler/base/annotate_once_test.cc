#include "compiler/base/annotate_once.h"

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

std::string Annotated(const char* message, const char* path) {
  return std::string(
      AnnotateOnce(absl::DataLossError(message), path).message());
}

TEST(AnnotateOnceTest, NamesAPathThatTheMessageDoesNot) {
  EXPECT_EQ(Annotated("is damaged", "/a/b"), "/a/b: is damaged");
  EXPECT_EQ(Annotated("cannot open /a/bc: no", "/a/b"),
            "/a/b: cannot open /a/bc: no");
  EXPECT_EQ(Annotated("expert 0 has gate/up", "a"), "a: expert 0 has gate/up");
  EXPECT_OK(AnnotateOnce(absl::OkStatus(), "/a/b"));
}

TEST(AnnotateOnceTest, LeavesAMessageThatNamesItOrAFileInIt) {
  for (const char* message :
       {"cannot open /a/b: no", "/a/b: is damaged", "/a/b/c: is damaged",
        "cannot map /a/b/c: no", "/a/b is not a regular file"}) {
    EXPECT_EQ(Annotated(message, "/a/b"), message);
  }
}

}  // namespace
}  // namespace kiln
