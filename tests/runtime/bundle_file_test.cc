// Opening files: what is a bundle's path, what may happen to it meanwhile.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
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

// Pages of this process that are mapped.
size_t MappedPages() {
  std::ifstream in("/proc/self/statm");
  size_t pages = 0;
  in >> pages;
  return pages;
}

// Whether the mapping of `address` may be read and no more.
bool IsReadOnly(const void* address) {
  std::ifstream in("/proc/self/maps");
  std::string line;
  while (std::getline(in, line)) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    char mode[5] = {};
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s", &begin, &end,
                    mode) != 3) {
      continue;
    }
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (begin <= at && at < end) return std::string(mode) == "r--p";
  }
  return false;
}

// Below, at and above the sizes that are kept in huge pages.
TEST_F(BundleFileTest, KeepsBundlesOfEverySizeWholeAndReadOnly) {
  for (const size_t size : {1000u, 1u << 20, (2u << 20) - 50000, 2u << 20,
                            (4u << 20) + 1, 9u << 20}) {
    SCOPED_TRACE(size);
    BundleSection section = TinyCudaSection();
    auto program = std::make_shared<Program>(*section.programs[0]);
    program->binary.clear();
    for (size_t i = 0; program->binary.size() < size; ++i) {
      program->binary += std::to_string(i * i) + " ";
    }
    program->binary_digest = Sha256(program->binary);
    section.programs[0] = program;
    const std::string bytes = WriteBundle({section}).value();
    ASSERT_OK(WriteFileAtomically(path_, bytes));
    size_t mapped = 0;
    for (int round = 0; round < 12; ++round) {
      ASSERT_EQ(Open(path_), KILN_STATUS_OK) << error_.message;
      for (uint32_t i = 0; i < section.programs.size(); ++i) {
        kiln_program_info_t info = {};
        info.struct_size = sizeof(info);
        ASSERT_EQ(kiln_bundle_program(bundle_, 0, i, &info, nullptr),
                  KILN_STATUS_OK);
        ASSERT_EQ(
            std::memcmp(info.data, bytes.data() + info.file_offset, info.bytes),
            0);
        const auto* data = static_cast<const uint8_t*>(info.data);
        EXPECT_TRUE(IsReadOnly(data));
        EXPECT_TRUE(IsReadOnly(data + info.bytes - 1));
      }
      kiln_bundle_close(bundle_, nullptr);
      bundle_ = nullptr;
      if (round == 1) mapped = MappedPages();
    }
    // Ten bundles later, less than one of them has stayed.
    EXPECT_LT(MappedPages(), mapped + 512);
  }
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
