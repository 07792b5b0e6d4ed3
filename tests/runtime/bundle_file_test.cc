// Opening files: what is a bundle's path, what may happen to it meanwhile.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "compiler/base/file_util.h"
#include "runtime/kiln.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::ScratchFolder;
using ::kiln::testing::TinyCudaSection;
using ::testing::HasSubstr;

class BundleFileTest : public ::testing::Test {
 protected:
  BundleFileTest() {
    bytes_ = WriteBundle({TinyCudaSection()}).value();
    path_ = folder_.File("tiny.kiln");
    EXPECT_OK(WriteFileAtomically(path_, bytes_));
  }

  ~BundleFileTest() override { kiln_bundle_close(bundle_, nullptr); }

  kiln_status_t Open(const std::string& path) {
    return kiln_bundle_open_file(path.c_str(), nullptr, &bundle_, &error_);
  }

  ScratchFolder folder_;
  std::string bytes_;
  std::string path_;
  kiln_bundle_t* bundle_ = nullptr;
  kiln_error_t error_ = {};
};

TEST_F(BundleFileTest, OpensAFileAndSaysItsRoot) {
  ASSERT_EQ(Open(path_), KILN_STATUS_OK) << error_.message;
  kiln_bundle_info_t info = {};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kiln_bundle_info(bundle_, &info, nullptr), KILN_STATUS_OK);
  EXPECT_EQ(info.bytes, bytes_.size());
  EXPECT_EQ(std::string(reinterpret_cast<char*>(info.root), 32),
            BundleRoot(bytes_).value().AsBytes());
}

TEST_F(BundleFileTest, ChangesAfterOpeningDoNotMatter) {
  ASSERT_EQ(Open(path_), KILN_STATUS_OK);
  const int fd = open(path_.c_str(), O_WRONLY | O_TRUNC);
  ASSERT_GE(fd, 0);
  close(fd);
  kiln_program_info_t info = {};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kiln_bundle_program(bundle_, 0, 0, &info, nullptr), KILN_STATUS_OK);
  EXPECT_EQ(
      std::memcmp(info.data, bytes_.data() + info.file_offset, info.bytes), 0);
}

TEST_F(BundleFileTest, FollowsSymbolicLinks) {
  const std::string link = folder_.File("link");
  ASSERT_EQ(symlink(path_.c_str(), link.c_str()), 0);
  EXPECT_EQ(Open(link), KILN_STATUS_OK) << error_.message;
}

TEST_F(BundleFileTest, RefusesALinkToItself) {
  const std::string link = folder_.File("loop");
  ASSERT_EQ(symlink(link.c_str(), link.c_str()), 0);
  EXPECT_EQ(Open(link), KILN_STATUS_FILE_UNREADABLE);
  EXPECT_EQ(error_.driver_code, ELOOP);
}

TEST_F(BundleFileTest, SaysThatAFileIsAbsent) {
  EXPECT_EQ(Open(folder_.File("absent")), KILN_STATUS_FILE_NOT_FOUND);
  EXPECT_THAT(error_.message, HasSubstr("no such file"));
  EXPECT_EQ(error_.driver_code, ENOENT);
}

TEST_F(BundleFileTest, RefusesAFolder) {
  EXPECT_EQ(Open(folder_.path()), KILN_STATUS_FILE_UNREADABLE);
  EXPECT_THAT(error_.message, HasSubstr("is not a regular file"));
}

TEST_F(BundleFileTest, RefusesAFifoWithoutWaitingForIt) {
  const std::string fifo = folder_.File("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(Open(fifo), KILN_STATUS_FILE_UNREADABLE);
}

TEST_F(BundleFileTest, RefusesAnEmptyFile) {
  const std::string empty = folder_.File("empty");
  ASSERT_OK(WriteFileAtomically(empty, ""));
  EXPECT_EQ(Open(empty), KILN_STATUS_BUNDLE_TRUNCATED);
}

TEST_F(BundleFileTest, RefusesAFileThatIsTooLargeWithoutReadingIt) {
  const std::string large = folder_.File("large");
  ASSERT_OK(WriteFileAtomically(large, "x"));
  ASSERT_EQ(truncate(large.c_str(), (off_t{1} << 34) + 1), 0);
  EXPECT_EQ(Open(large), KILN_STATUS_BUNDLE_LIMIT);
}

TEST_F(BundleFileTest, ShowsUnprintablePathsSafely) {
  EXPECT_EQ(Open("/no\x1b[31m/such\n"), KILN_STATUS_FILE_NOT_FOUND);
  EXPECT_THAT(error_.message, HasSubstr("'/no?[31m/such?'"));
}

}  // namespace
}  // namespace kiln
