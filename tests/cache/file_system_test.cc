#include "cache/file_system.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::ScratchFolder;
using ::kiln::testing::StatusIs;

struct FileSystemCase {
  const char* name;
  FileSystemInfo info;
  const char* network;  // "" = local
};

class FileSystemNameTest : public ::testing::TestWithParam<FileSystemCase> {};

TEST_P(FileSystemNameTest, TellsNetworkFromLocal) {
  EXPECT_EQ(NetworkFileSystemName(GetParam().info), GetParam().network);
}

INSTANTIATE_TEST_SUITE_P(
    Known, FileSystemNameTest,
    ::testing::Values(
        FileSystemCase{"Ext4", {0xEF53, ""}, ""},
        FileSystemCase{"Xfs", {0x58465342, ""}, ""},
        FileSystemCase{"Btrfs", {0x9123683E, ""}, ""},
        FileSystemCase{"Tmpfs", {0x01021994, ""}, ""},
        FileSystemCase{"Overlay", {0x794C7630, ""}, ""},
        FileSystemCase{"Nfs", {0x6969, ""}, "NFS"},
        FileSystemCase{"Cifs", {0xFF534D42, ""}, "CIFS"},
        FileSystemCase{"Smb2", {0xFE534D42, ""}, "SMB2"},
        FileSystemCase{"Lustre", {0x0BD00BD0, ""}, "Lustre"},
        FileSystemCase{"Ceph", {0x00C36400, ""}, "Ceph"},
        FileSystemCase{"NineP", {0x01021997, ""}, "9P"},
        FileSystemCase{
            "Sshfs", {0x65735546, "fuse.sshfs"}, "FUSE (fuse.sshfs)"},
        FileSystemCase{"UnknownFuse", {0x65735546, ""}, "FUSE"},
        FileSystemCase{"FuseOverlay", {0x65735546, "fuse.fuse-overlayfs"}, ""}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(FileSystemTest, ProbesAFolder) {
  const ScratchFolder folder;
  ASSERT_OK_AND_ASSIGN(const FileSystemInfo info,
                       ProbeFileSystem(folder.path()));
  EXPECT_NE(info.magic, 0u);
}

TEST(FileSystemTest, ProbeNamesAMissingPath) {
  EXPECT_THAT(ProbeFileSystem("/nonexistent/kiln"),
              StatusIs(absl::StatusCode::kNotFound,
                       ::testing::HasSubstr("/nonexistent/kiln")));
}

}  // namespace
}  // namespace kiln
