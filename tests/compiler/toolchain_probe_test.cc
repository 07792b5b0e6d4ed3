#include "compiler/toolchain_probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <map>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/compiler/worker_test_main.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::CcCpuForTest;
using ::kiln::testing::NvrtcForTest;
using ::kiln::testing::StatusIs;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

class MapMemo : public ProbeMemo {
 public:
  std::optional<std::string> Lookup(absl::string_view key) override {
    ++lookups;
    const auto it = map.find(std::string(key));
    if (it == map.end()) return std::nullopt;
    return it->second;
  }

  void Store(absl::string_view key, absl::string_view value) override {
    ++stores;
    map[std::string(key)] = std::string(value);
  }

  std::map<std::string, std::string> map;
  int lookups = 0;
  int stores = 0;
};

// A folder with files that only look like an NVRTC installation.
class FakeInstallation {
 public:
  FakeInstallation()
      : folder_(absl::StrCat(::testing::TempDir(), "/nvXXXXXX")) {
    if (mkdtemp(folder_.data()) == nullptr) abort();
    Write("libnvrtc.so.13",
          std::string("bytes\0Cuda compilation tools, release 13.7, V13.7.99\0",
                      54));
    Write("libnvrtc-builtins.so.13.7", "builtins");
  }

  ~FakeInstallation() {
    for (const char* name : {"libnvrtc.so.13", "libnvrtc-builtins.so.13.7"}) {
      unlink(Path(name).c_str());
    }
    rmdir(folder_.c_str());
  }

  std::string Path(const std::string& name) const {
    return absl::StrCat(folder_, "/", name);
  }

  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(Path(name), std::ios::binary) << bytes;
  }

  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
};

TEST(ProbeNvrtcTest, ReadsVersionAndContentWithoutLoadingTheLibrary) {
  const FakeInstallation fake;
  ASSERT_OK_AND_ASSIGN(const CompilerSetup setup,
                       ProbeNvrtc({.library = fake.Path("libnvrtc.so.13")}));
  EXPECT_EQ(setup.backend, Backend::kCuda);
  EXPECT_EQ(setup.toolchain.name, "nvrtc");
  EXPECT_EQ(setup.toolchain.version, "13.7.99");
  EXPECT_THAT(setup.components, SizeIs(2));
  EXPECT_EQ(setup.command.arguments.back(), setup.components[0].path);
}

TEST(ProbeNvrtcTest, ContentIsThatOfTheBytesNotOfThePath) {
  const FakeInstallation one, two;
  ASSERT_OK_AND_ASSIGN(const CompilerSetup a,
                       ProbeNvrtc({.library = one.Path("libnvrtc.so.13")}));
  ASSERT_OK_AND_ASSIGN(const CompilerSetup b,
                       ProbeNvrtc({.library = two.Path("libnvrtc.so.13")}));
  EXPECT_EQ(a.toolchain, b.toolchain);
  two.Write("libnvrtc-builtins.so.13.7", "other builtins");
  ASSERT_OK_AND_ASSIGN(const CompilerSetup c,
                       ProbeNvrtc({.library = two.Path("libnvrtc.so.13")}));
  EXPECT_NE(a.toolchain.content, c.toolchain.content);
}

TEST(ProbeNvrtcTest, PrefersTheGivenFolders) {
  const FakeInstallation fake;
  EXPECT_THAT(
      FindNvrtc({.library = {}, .folders = {"/nowhere", fake.folder()}}),
      testing::IsOkAndHolds(fake.Path("libnvrtc.so.13")));
  EXPECT_THAT(FindNvrtc({.library = "/x/libnvrtc.so"}),
              testing::IsOkAndHolds(std::string("/x/libnvrtc.so")));
}

TEST(ProbeNvrtcTest, SaysWhatIsMissing) {
  EXPECT_THAT(ProbeNvrtc({.library = "/nowhere/libnvrtc.so.13"}),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("/nowhere/libnvrtc.so.13")));
  const FakeInstallation fake;
  unlink(fake.Path("libnvrtc-builtins.so.13.7").c_str());
  EXPECT_THAT(ProbeNvrtc({.library = fake.Path("libnvrtc.so.13")}),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("libnvrtc-builtins.so.")));
}

TEST(ProbeNvrtcTest, RefusesALibraryThatIsNotNvrtc) {
  const FakeInstallation fake;
  fake.Write("libnvrtc.so.13", "something else");
  EXPECT_THAT(ProbeNvrtc({.library = fake.Path("libnvrtc.so.13")}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("no CUDA release text")));
}

TEST(ProbeNvrtcTest, RemembersAndNoticesChangedFiles) {
  const FakeInstallation fake;
  const NvrtcProbeOptions options = {.library = fake.Path("libnvrtc.so.13")};
  MapMemo memo;
  ASSERT_OK_AND_ASSIGN(const CompilerSetup first, ProbeNvrtc(options, &memo));
  EXPECT_EQ(memo.stores, 1);
  ASSERT_OK_AND_ASSIGN(const CompilerSetup again, ProbeNvrtc(options, &memo));
  EXPECT_EQ(memo.stores, 1) << "nothing was hashed again";
  EXPECT_EQ(again.toolchain, first.toolchain);
  EXPECT_EQ(again.components, first.components);
  // Only the builtins change; the memo's key is the library's.
  fake.Write("libnvrtc-builtins.so.13.7", "newer builtins");
  ASSERT_OK_AND_ASSIGN(const CompilerSetup changed, ProbeNvrtc(options, &memo));
  EXPECT_EQ(memo.stores, 2);
  EXPECT_NE(changed.toolchain.content, first.toolchain.content);
}

TEST(ProbeNvrtcTest, IgnoresADamagedMemo) {
  const FakeInstallation fake;
  const NvrtcProbeOptions options = {.library = fake.Path("libnvrtc.so.13")};
  MapMemo memo;
  ASSERT_OK_AND_ASSIGN(const CompilerSetup first, ProbeNvrtc(options, &memo));
  const std::string good = memo.map.begin()->second;
  for (size_t i = 0; i < good.size(); ++i) {
    memo.map.begin()->second = good.substr(0, i);
    ASSERT_OK_AND_ASSIGN(const CompilerSetup setup, ProbeNvrtc(options, &memo));
    EXPECT_EQ(setup.toolchain, first.toolchain) << i;
  }
}

TEST(ProbeNvrtcTest, FindsTheInstalledLibrary) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  EXPECT_THAT(setup.toolchain.version, MatchesRegex("1[23]\\.[0-9]+\\.[0-9]+"));
  EXPECT_THAT(setup.components[1].path, HasSubstr("libnvrtc-builtins.so."));
  ASSERT_OK_AND_ASSIGN(const auto worker, WorkerProcess::Start(setup.command));
  ASSERT_OK_AND_ASSIGN(const WorkerHello hello,
                       AwaitHello(worker.get(), absl::Seconds(60)));
  EXPECT_EQ(hello.compiler, "nvrtc");
  EXPECT_EQ(hello.components, setup.components);
  EXPECT_TRUE(absl::StartsWith(setup.toolchain.version, hello.version + "."));
}

TEST(ProbeCcCpuTest, CoversExecutableClangAndLlvm) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  EXPECT_EQ(setup.toolchain.name, "clang");
  EXPECT_THAT(setup.toolchain.version, MatchesRegex("19\\.1\\.[0-9]+"));
  ASSERT_THAT(setup.components, SizeIs(3));
  EXPECT_THAT(setup.components[0].path, EndsWith("/kiln-cc-cpu"));
  EXPECT_THAT(setup.components[1].path, HasSubstr("libclang-cpp.so"));
  EXPECT_THAT(setup.components[2].path, HasSubstr("libLLVM"));
}

TEST(ProbeCcCpuTest, RemembersWithoutStartingTheWorker) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  MapMemo memo;
  ASSERT_OK(ProbeCcCpu(setup.command.executable, &memo));
  const auto start = std::chrono::steady_clock::now();
  ASSERT_OK_AND_ASSIGN(const CompilerSetup again,
                       ProbeCcCpu(setup.command.executable, &memo));
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - start;
  EXPECT_EQ(memo.stores, 1);
  EXPECT_EQ(again.toolchain, setup.toolchain);
  EXPECT_EQ(again.components, setup.components);
  EXPECT_LT(took.count(), 0.02) << "seconds; a start of the worker takes more";
}

TEST(ProbeCcCpuTest, SaysThatTheWorkerIsMissing) {
  EXPECT_THAT(
      ProbeCcCpu("/nowhere/kiln-cc-cpu"),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nowhere/kiln-cc-cpu")));
}

TEST(ProbeCcCpuTest, SaysThatTheWorkerIsNoWorker) {
  EXPECT_THAT(ProbeCcCpu("/bin/true"),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("exited with code 0 before it was ready")));
}

TEST(WorkerMainTest, RefusesToRunByHand) {
  const std::string self = absl::StrCat("/proc/", getpid(), "/exe");
  const std::string command =
      absl::StrCat(self, " cc-nvrtc --nvrtc /x < /dev/null 2> /dev/null");
  const int status = system(command.c_str());
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 2);
}

}  // namespace
}  // namespace kiln
