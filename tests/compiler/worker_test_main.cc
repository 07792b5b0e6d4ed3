#include "tests/compiler/worker_test_main.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "compiler/nvrtc_worker.h"
#include "compiler/worker_loop.h"

namespace kiln::testing {
namespace {

class FakeCompiler : public WorkerCompiler {
 public:
  WorkerHello Hello() const override {
    return {.compiler = "fake", .version = "1", .components = {}};
  }

  bool Reusable() const override { return reusable_; }

  WorkerResult Compile(const WorkerJob& job) override {
    const std::pair<std::string, std::string> words =
        absl::StrSplit(job.unit.text, absl::MaxSplits(' ', 1));
    const auto& [verb, rest] = words;
    WorkerResult result;
    result.binary = rest.empty() ? "nothing" : rest;
    if (verb == "refuse") {
      result.status = absl::InvalidArgumentError(rest);
      result.log = absl::StrCat("log of ", rest);
      result.binary.clear();
    } else if (verb == "sleep") {
      double seconds = 0;
      if (absl::SimpleAtod(rest, &seconds)) {
        absl::SleepFor(absl::Seconds(seconds));
      }
    } else if (verb == "crash") {
      std::fputs(rest.c_str(), stderr);
      abort();
    } else if (verb == "leave") {
      _exit(3);
    } else if (verb == "eat") {
      // Address space is what is limited, so none of it need be touched.
      std::vector<std::unique_ptr<char[]>> hoard;
      for (;;) hoard.emplace_back(new char[64 << 20]);
    } else if (verb == "once") {
      const int fd = open(rest.c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
      if (fd >= 0) kill(getpid(), SIGKILL);
    } else if (verb == "killed") {
      kill(getpid(), SIGKILL);
    } else if (verb == "last") {
      reusable_ = false;
    } else if (verb == "open") {
      if (open(rest.c_str(), O_RDWR | O_NOCTTY) < 0) {
        result.status = absl::InvalidArgumentError(std::strerror(errno));
      }
    } else if (verb == "environ") {
      char folder[4096] = "?";
      result.binary = absl::StrCat(getcwd(folder, sizeof(folder)), "\n");
      for (char** variable = environ; *variable != nullptr; ++variable) {
        absl::StrAppend(&result.binary, *variable, "\n");
      }
    }
    return result;
  }

 private:
  bool reusable_ = true;
};

}  // namespace

CompilerSetup FakeSetup(Backend backend) {
  CompilerSetup setup;
  setup.backend = backend;
  setup.toolchain.name = "fake";
  setup.toolchain.version = "1";
  setup.command = {.executable = "/proc/self/exe",
                   .arguments = {kFakeWorkerVerb}};
  return setup;
}

absl::StatusOr<CompilerSetup> NvrtcForTest() {
  static const absl::StatusOr<CompilerSetup> setup = ProbeNvrtc({});
  return setup;
}

absl::StatusOr<CompilerSetup> CcCpuForTest() {
  static const absl::StatusOr<CompilerSetup> setup = [] {
    const char* folder = std::getenv("KILN_BIN_DIR");
    return ProbeCcCpu(folder == nullptr ? DefaultCcCpuPath()
                                        : absl::StrCat(folder, "/kiln-cc-cpu"));
  }();
  return setup;
}

}  // namespace kiln::testing

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], kiln::kNvrtcWorkerVerb) == 0) {
    return kiln::NvrtcWorkerMain(argc, argv);
  }
  if (argc > 1 && std::strcmp(argv[1], kiln::testing::kFakeWorkerVerb) == 0) {
    return kiln::ServeCompiler(
        []() -> absl::StatusOr<std::unique_ptr<kiln::WorkerCompiler>> {
          return std::make_unique<kiln::testing::FakeCompiler>();
        });
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
