// Opening files: what is a bundle's path, what may happen to it meanwhile.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

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

// The most address space that this process has had.
size_t VirtualPeakKiB() {
  std::ifstream in("/proc/self/status");
  std::string line;
  while (std::getline(in, line)) {
    size_t kib = 0;
    if (std::sscanf(line.c_str(), "VmPeak: %zu kB", &kib) == 1) return kib;
  }
  ADD_FAILURE() << "no VmPeak";
  return 0;
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

// A checkpoint in place of a bundle, say.
TEST_F(BundleFileTest, RefusesALargeFileOfAnotherKindByItsHeader) {
  const std::string large = folder_.File("large");
  std::string head = bytes_.substr(0, 4096);
  const size_t pages = VirtualPeakKiB();
  for (const bool magic : {false, true}) {
    if (!magic) head[0] = 'x';
    ASSERT_OK(WriteFileAtomically(large, head));
    ASSERT_EQ(truncate(large.c_str(), off_t{8} << 30), 0);
    EXPECT_EQ(Open(large), magic ? KILN_STATUS_BUNDLE_MALFORMED
                                 : KILN_STATUS_BUNDLE_NOT_A_BUNDLE);
    head = bytes_.substr(0, 4096);
  }
  uint8_t root[KILN_ROOT_BYTES] = {};
  kiln_open_options_t options = {};
  options.struct_size = sizeof(options);
  options.expected_root = root;
  EXPECT_EQ(kiln_bundle_open_file(path_.c_str(), &options, &bundle_, &error_),
            KILN_STATUS_ROOT_MISMATCH);
  // No memory was asked for.
  EXPECT_LT(VirtualPeakKiB(), pages + (size_t{1} << 20));
}

// The kernel's own files and devices: no such thing is a bundle, and none makes
// an engine wait, read for ever or crash.
TEST_F(BundleFileTest, RefusesWhatIsNoFile) {
  EXPECT_EQ(Open("/dev/zero"), KILN_STATUS_FILE_UNREADABLE);
  EXPECT_EQ(Open("/dev/full"), KILN_STATUS_FILE_UNREADABLE);
  EXPECT_EQ(Open("/proc/self/mem"), KILN_STATUS_BUNDLE_TRUNCATED);
  EXPECT_EQ(Open("/proc/self/maps"), KILN_STATUS_BUNDLE_TRUNCATED);
  EXPECT_EQ(Open(path_ + "/below"), KILN_STATUS_FILE_NOT_FOUND);
  EXPECT_EQ(Open(""), KILN_STATUS_FILE_NOT_FOUND);
  EXPECT_EQ(Open(std::string(5000, 'x')), KILN_STATUS_FILE_UNREADABLE);
  EXPECT_EQ(error_.driver_code, ENAMETOOLONG);
  const std::string name = folder_.File("socket");
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(name.size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, name.c_str(), name.size() + 1);
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(
      bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)),
      0);
  EXPECT_EQ(Open(name), KILN_STATUS_FILE_UNREADABLE);
  close(listener);
}

TEST_F(BundleFileTest, RefusesAFileThatMayNotBeRead) {
  ASSERT_EQ(chmod(path_.c_str(), 0200), 0);
  // Root may read everything, so be somebody else for a moment.
  const bool root = geteuid() == 0;
  ASSERT_EQ(root ? seteuid(65534) : 0, 0);
  const kiln_status_t status = Open(path_);
  ASSERT_EQ(root ? seteuid(0) : 0, 0);
  EXPECT_EQ(status, KILN_STATUS_FILE_UNREADABLE);
  EXPECT_EQ(error_.driver_code, EACCES);
}

// A file that is written, cut and replaced by another process while it is
// opened, over and over: whatever comes out is whole or refused, and a bundle
// that is open does not change.
TEST_F(BundleFileTest, AFileThatNeverRestsIsWholeOrRefused) {
  std::string other = bytes_;
  other.resize(other.size() + 3 * 65536);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (uint32_t round = 0; !done; ++round) {
      const int fd = open(path_.c_str(), O_WRONLY | O_CREAT, 0600);
      if (fd < 0) continue;
      const std::string& text = round % 3 == 0 ? other : bytes_;
      if (round % 2 == 0 && ftruncate(fd, 0) != 0) std::abort();
      if (pwrite(fd, text.data(), text.size(), 0) < 0) std::abort();
      if (ftruncate(fd, static_cast<off_t>(text.size())) != 0) std::abort();
      close(fd);
    }
  });
  const Digest root = BundleRoot(bytes_).value();
  int opened = 0;
  int refused = 0;
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while ((opened < 50 || refused < 50) &&
         std::chrono::steady_clock::now() < deadline) {
    const kiln_status_t status = Open(path_);
    if (status != KILN_STATUS_OK) {
      ++refused;
      continue;
    }
    ++opened;
    kiln_program_info_t info = {};
    info.struct_size = sizeof(info);
    EXPECT_EQ(kiln_bundle_program(bundle_, 0, 0, &info, nullptr),
              KILN_STATUS_OK);
    EXPECT_EQ(
        std::memcmp(info.data, bytes_.data() + info.file_offset, info.bytes),
        0);
    kiln_bundle_info_t head = {};
    head.struct_size = sizeof(head);
    EXPECT_EQ(kiln_bundle_info(bundle_, &head, nullptr), KILN_STATUS_OK);
    EXPECT_EQ(std::memcmp(head.root, root.bytes.data(), sizeof(head.root)), 0);
    kiln_bundle_close(bundle_, nullptr);
    bundle_ = nullptr;
  }
  done = true;
  writer.join();
  EXPECT_GT(opened, 0);
  EXPECT_GT(refused, 0);
}

TEST_F(BundleFileTest, ShowsUnprintablePathsSafely) {
  EXPECT_EQ(Open("/no\x1b[31m/such\n"), KILN_STATUS_FILE_NOT_FOUND);
  EXPECT_THAT(error_.message, HasSubstr("'/no?[31m/such?'"));
}

}  // namespace
}  // namespace kiln
