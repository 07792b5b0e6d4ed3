#include "compiler/base/pending_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "compiler/base/file_util.h"
#include "compiler/base/unfinished_files.h"
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
using ::testing::HasSubstr;

TEST(PendingFolderTest, WithoutCommitItsFilesAreRemoved) {
  const ScratchFolder scratch;
  const std::string path = scratch.File("a/b");
  {
    PendingFolder folder(path);
    ASSERT_OK(folder.status());
    ASSERT_OK(WriteFileAtomically(folder.At("one"), "1"));
    folder.At("never written");
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  // A folder that was there stays, and so does what somebody else put there.
  ASSERT_OK(MakeDirectories(path));
  {
    PendingFolder folder(path);
    ASSERT_OK(folder.status());
    ASSERT_OK(WriteFileAtomically(folder.At("one"), "1"));
    ASSERT_OK(WriteFileAtomically(path + "/other", "2"));
  }
  EXPECT_THAT(NamesIn(path), ElementsAre("other"));
}

TEST(PendingFolderTest, AfterCommitItsFilesStay) {
  const ScratchFolder scratch;
  const std::string path = scratch.File("a");
  {
    PendingFolder folder(path);
    ASSERT_OK(folder.status());
    ASSERT_OK(WriteFileAtomically(folder.At("one"), "1"));
    folder.Commit();
  }
  EXPECT_THAT(NamesIn(path), ElementsAre("one"));
}

TEST(PendingFolderTest, RefusesAFolderWithSomethingInItAndTouchesNothing) {
  const ScratchFolder scratch;
  ASSERT_OK(WriteFileAtomically(scratch.File("old"), "1"));
  for (const std::string& path :
       {scratch.File("."), scratch.File("old"), scratch.File("old/x")}) {
    PendingFolder folder(path);
    EXPECT_FALSE(folder.status().ok()) << path;
    folder.At("old");
  }
  EXPECT_THAT(PendingFolder(scratch.File(".")).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("must be an empty folder")));
  EXPECT_THAT(NamesIn(scratch.File(".")), ElementsAre("old"));
}

TEST(RemoveUnfinishedFilesTest, RemovesFilesAndFoldersAndLetsNothingAppear) {
  const ScratchFolder scratch;
  ASSERT_OK(WriteFileAtomically(scratch.File("kept"), "1"));
  EXPECT_EXIT(
      {
        PendingFile file(scratch.File("kept"));
        static_cast<void>(file.Append("2"));
        PendingFolder folder(scratch.File("folder"));
        static_cast<void>(WriteFileAtomically(folder.At("one"), "1"));
        RemoveUnfinishedFiles();
        // This waits for the end of the process.
        std::thread([&] {
          static_cast<void>(WriteFileAtomically(scratch.File("late"), "1"));
        }).detach();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        _exit(7);
      },
      ::testing::ExitedWithCode(7), "");
  EXPECT_THAT(NamesIn(scratch.File(".")), ElementsAre("kept"));
  EXPECT_THAT(ReadFile(scratch.File("kept"), 9), IsOkAndHolds("1"));
}

}  // namespace
}  // namespace kiln
