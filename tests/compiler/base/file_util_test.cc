#include "compiler/base/file_util.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/golden.h"
#include "tests/support/names_in.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::IsOkAndHolds;
using ::kiln::testing::NamesIn;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(ReadFileTest, ReturnsWhatWasWritten) {
  const ScratchFolder folder;
  const std::string contents("a\0\xFF\n", 4);
  ASSERT_OK(WriteFileAtomically(folder.File("f"), contents));
  EXPECT_THAT(ReadFile(folder.File("f"), 4), IsOkAndHolds(contents));
  ASSERT_OK(WriteFileAtomically(folder.File("empty"), ""));
  EXPECT_THAT(ReadFile(folder.File("empty"), 0), IsOkAndHolds(""));
}

TEST(ReadFileTest, RefusesMoreThanTheLimit) {
  const ScratchFolder folder;
  const std::string path = folder.File("f");
  ASSERT_OK(WriteFileAtomically(path, "12345"));
  EXPECT_THAT(
      ReadFile(path, 4),
      StatusIs(absl::StatusCode::kInvalidArgument,
               Eq(absl::StrCat(path, " has 5 bytes, at most 4 are accepted"))));
}

TEST(ReadFileTest, NamesTheMissingFile) {
  const ScratchFolder folder;
  const std::string path = folder.File("none");
  EXPECT_THAT(ReadFile(path, 10),
              StatusIs(absl::StatusCode::kNotFound,
                       Eq(absl::StrCat("cannot open ", path,
                                       ": No such file or directory"))));
}

TEST(ReadFileTest, RefusesFoldersAndPipesWithoutWaiting) {
  const ScratchFolder folder;
  EXPECT_THAT(ReadFile(folder.path(), 10),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("is not a regular file")));
  ASSERT_EQ(mkfifo(folder.File("pipe").c_str(), 0600), 0);
  EXPECT_THAT(ReadFile(folder.File("pipe"), 10),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("is not a regular file")));
}

TEST(ReadSystemFileTest, ReadsWhatItCanAndIsElseEmpty) {
  EXPECT_THAT(ReadSystemFile("/proc/self/comm"), Not(IsEmpty()));
  EXPECT_THAT(ReadSystemFile("/proc/self/maps").size(), ::testing::Le(8192u));
  EXPECT_EQ(ReadSystemFile("/proc/none"), "");
  EXPECT_EQ(ReadSystemFile("/proc"), "");
  // Opens, and cannot be read: as a process that ends in between.
  EXPECT_EQ(ReadSystemFile("/proc/self/mem"), "");
}

TEST(WriteFileAtomicallyTest, ReplacesTheFileAndLeavesNothingElse) {
  const ScratchFolder folder;
  ASSERT_OK(WriteFileAtomically(folder.File("f"), "old and longer"));
  ASSERT_OK(WriteFileAtomically(folder.File("f"), "new"));
  EXPECT_THAT(ReadFile(folder.File("f"), 100), IsOkAndHolds("new"));
  EXPECT_THAT(NamesIn(folder.path()), ElementsAre("f"));
}

mode_t ModeOf(const std::string& path) {
  struct stat info = {};
  EXPECT_EQ(stat(path.c_str(), &info), 0);
  return info.st_mode & 07777;
}

TEST(WriteFileAtomicallyTest, ANewFileFollowsTheUmaskAndAnOldOneKeepsItsMode) {
  const ScratchFolder folder;
  const mode_t before = umask(027);
  EXPECT_OK(WriteFileAtomically(folder.File("new"), "x"));
  umask(002);
  EXPECT_OK(WriteFileAtomically(folder.File("shared"), "x"));
  EXPECT_OK(MakeDirectories(folder.File("sub/sub")));
  umask(before);
  EXPECT_EQ(ModeOf(folder.File("new")), 0640u);
  EXPECT_EQ(ModeOf(folder.File("shared")), 0664u);
  EXPECT_EQ(ModeOf(folder.File("sub/sub")), 0775u);
  ASSERT_EQ(chmod(folder.File("new").c_str(), 0600), 0);
  EXPECT_OK(WriteFileAtomically(folder.File("new"), "y"));
  EXPECT_EQ(ModeOf(folder.File("new")), 0600u);
}

TEST(WriteFileAtomicallyTest, ReplacesWhatASymbolicLinkPointsTo) {
  const ScratchFolder folder;
  ASSERT_OK(MakeDirectories(folder.File("there")));
  ASSERT_OK(WriteFileAtomically(folder.File("there/f"), "old"));
  std::filesystem::create_symlink("there/f", folder.File("link"));
  ASSERT_OK(WriteFileAtomically(folder.File("link"), "new"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder.File("link")));
  EXPECT_THAT(ReadFile(folder.File("there/f"), 100), IsOkAndHolds("new"));
  EXPECT_THAT(NamesIn(folder.File("there")), ElementsAre("f"));

  std::filesystem::create_symlink("nowhere/f", folder.File("dangling"));
  EXPECT_THAT(WriteFileAtomically(folder.File("dangling"), "x"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("is a symbolic link that cannot be")));
  EXPECT_TRUE(std::filesystem::is_symlink(folder.File("dangling")));
}

TEST(PendingFileTest, WithoutCommitTheOldFileStands) {
  const ScratchFolder folder;
  ASSERT_OK(WriteFileAtomically(folder.File("f"), "old"));
  {
    PendingFile file(folder.File("f"));
    EXPECT_OK(file.Append("new"));
  }
  EXPECT_THAT(ReadFile(folder.File("f"), 100), IsOkAndHolds("old"));
  EXPECT_THAT(NamesIn(folder.path()), ElementsAre("f"));
  PendingFile file(folder.File("f"));
  EXPECT_OK(file.Append("in "));
  EXPECT_OK(file.Append("pieces"));
  EXPECT_OK(file.Commit());
  EXPECT_THAT(ReadFile(folder.File("f"), 100), IsOkAndHolds("in pieces"));
}

TEST(WriteFileAtomicallyTest, KeepsTheOldFileWhenTheDiskIsFull) {
  const ScratchFolder folder;
  ASSERT_OK(WriteFileAtomically(folder.File("f"), "old"));
  // A limit on the file size fails the write as a full disk would.
  struct rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit small = before;
  small.rlim_cur = 4096;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status =
      WriteFileAtomically(folder.File("f"), std::string(8192, 'n'));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable,
                               HasSubstr("cannot write")));
  EXPECT_THAT(ReadFile(folder.File("f"), 100), IsOkAndHolds("old"));
  EXPECT_THAT(NamesIn(folder.path()), ElementsAre("f"));
}

TEST(WriteFileAtomicallyTest, RefusesToReplaceAPipeOrAFolder) {
  const ScratchFolder folder;
  const std::string pipe = folder.File("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(WriteFileAtomically(pipe, "x"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("exists and is not a regular file")));
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  std::filesystem::create_directory(folder.File("sub"));
  EXPECT_THAT(WriteFileAtomically(folder.File("sub"), "x"),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(WriteFileAtomicallyTest, NamesTheMissingFolder) {
  const ScratchFolder folder;
  EXPECT_THAT(
      WriteFileAtomically(folder.File("none/f"), "x"),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr(folder.File("none/f"))));
  EXPECT_FALSE(std::filesystem::exists(folder.File("none")));
}

TEST(WriteFileAtomicallyTest, ReadersSeeOneWholeVersion) {
  const ScratchFolder folder;
  const std::string path = folder.File("f");
  const std::string versions[2] = {std::string(50000, 'a'),
                                   std::string(70000, 'b')};
  ASSERT_OK(WriteFileAtomically(path, versions[0]));
  std::atomic<bool> done = false;
  std::thread writer([&] {
    for (size_t i = 0; i < 60; ++i) {
      EXPECT_OK(WriteFileAtomically(path, versions[i % 2]));
    }
    done = true;
  });
  do {
    const absl::StatusOr<std::string> seen = ReadFile(path, 1 << 20);
    EXPECT_TRUE(seen.ok() && (*seen == versions[0] || *seen == versions[1]));
  } while (!done);
  writer.join();
}

TEST(MakeDirectoriesTest, CreatesParentsAndAcceptsExistingOnes) {
  const ScratchFolder folder;
  const std::string path = folder.File("a/b/c");
  EXPECT_OK(MakeDirectories(path));
  EXPECT_TRUE(std::filesystem::is_directory(path));
  EXPECT_OK(MakeDirectories(path));
  EXPECT_OK(MakeDirectories(path + "/"));
}

TEST(MakeDirectoriesTest, RefusesAFileInTheWay) {
  const ScratchFolder folder;
  ASSERT_OK(WriteFileAtomically(folder.File("f"), ""));
  EXPECT_THAT(MakeDirectories(folder.File("f")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("exists and is not a folder")));
  EXPECT_THAT(
      MakeDirectories(folder.File("f/g")),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("Not a directory")));
}

TEST(ErrnoStatusTest, ChoosesTheCodeByWhatTheCallerCanDo) {
  const std::pair<int, absl::StatusCode> cases[] = {
      {ENOENT, absl::StatusCode::kNotFound},
      {EACCES, absl::StatusCode::kPermissionDenied},
      {EROFS, absl::StatusCode::kPermissionDenied},
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {EISDIR, absl::StatusCode::kInvalidArgument},
      {ELOOP, absl::StatusCode::kInvalidArgument},
      {ENAMETOOLONG, absl::StatusCode::kInvalidArgument},
      {EIO, absl::StatusCode::kUnavailable},
  };
  for (const auto& [value, code] : cases) {
    EXPECT_EQ(ErrnoStatus(value, "cannot open", "f").code(), code) << value;
  }
  EXPECT_EQ(ErrnoStatus(EROFS, "cannot open", "f").message(),
            "cannot open f: Read-only file system");
}

}  // namespace
}  // namespace kiln
