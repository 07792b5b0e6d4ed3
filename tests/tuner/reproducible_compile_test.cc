// A program is a function of its key: compiling it in other folders, by other
// users, in other environments and with other numbers of processes gives the
// same key and the same bytes.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <clocale>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/compile_pool.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/toolchain_probe.h"
#include "templates/registry.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/planner.h"

namespace kiln {
namespace {

using ::kiln::testing::CcCpuPath;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::SmallAssignment;
using ::kiln::testing::SmallGeometry;
using ::kiln::testing::SmallUnit;
using ::kiln::testing::WhyNoCcCpu;

// Where and how a compile runs.
struct Surroundings {
  const char* name;
  std::vector<std::pair<std::string, std::string>> variables = {};
  mode_t mask = 022;
  int jobs = 1;
  size_t copies = 1;        // of the job, in one run
  bool other_user = false;  // where this process may change its user
  bool new_folder = false;  // as the working folder, home and TMPDIR
  bool moved_compiler = false;
};

const std::vector<Surroundings>& AllSurroundings() {
  static const auto& all = *new std::vector<Surroundings>{
      {.name = "as they are"},
      {.name = "another folder", .new_folder = true},
      {.name = "another user",
       .variables = {{"USER", "somebody"}, {"LOGNAME", "somebody"}},
       .other_user = true,
       .new_folder = true,
       .moved_compiler = true},
      {.name = "a strict umask", .mask = 077},
      {.name = "four workers", .jobs = 4, .copies = 4},
      {.name = "one warm worker", .jobs = 1, .copies = 3},
      {.name = "a moved compiler", .new_folder = true, .moved_compiler = true},
      {.name = "hostile variables",
       .variables = {{"SOURCE_DATE_EPOCH", "1"},
                     {"CPATH", "/usr/include"},
                     {"CPLUS_INCLUDE_PATH", "/usr/include"},
                     {"CCC_OVERRIDE_OPTIONS", "+-O0"},
                     {"LANG", "tr_TR.UTF-8"},
                     {"LC_ALL", "tr_TR.UTF-8"},
                     {"TZ", "Asia/Kathmandu"},
                     {"CUDA_HOME", "/nonexistent"},
                     {"NVRTC_DISABLE_CONCURRENT_NVVM", "1"},
                     {"KILN_CACHE", "/nonexistent"}}},
  };
  return all;
}

// The result of one run of the executable `compiler` from a child process: the
// key and the binary's digest, or the failure.
std::string CompileIn(
    const Surroundings& how, std::string compiler,
    const std::function<absl::StatusOr<CompilerSetup>(const std::string&)>&
        probe,
    const SourceUnit& unit, const Target& target) {
  const ScratchFolder folder;
  EXPECT_EQ(chmod(folder.path().c_str(), 0777), 0);
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    const auto run = [&]() -> std::string {
      if (how.moved_compiler) {
        const std::string moved = folder.File("a compiler");
        std::filesystem::copy_file(compiler, moved);
        compiler = moved;
      }
      if (how.new_folder) {
        if (chdir(folder.path().c_str()) != 0) return "chdir failed";
        setenv("HOME", folder.path().c_str(), 1);
        setenv("TMPDIR", folder.path().c_str(), 1);
      }
      for (const auto& [name, value] : how.variables) {
        setenv(name.c_str(), value.c_str(), 1);
      }
      std::setlocale(LC_ALL, "");
      umask(how.mask);
      constexpr uid_t kNobody = 65534;
      if (how.other_user && geteuid() == 0 &&
          (setgid(kNobody) != 0 || setuid(kNobody) != 0)) {
        return "setuid failed";
      }
      const absl::StatusOr<CompilerSetup> setup = probe(compiler);
      if (!setup.ok()) return setup.status().ToString();
      CompilePool pool({.jobs = how.jobs}, {*setup});
      const std::vector<CompileJob> jobs(how.copies, {unit, target});
      absl::StatusOr<std::vector<CompileResult>> results = pool.Run(jobs);
      if (!results.ok()) return results.status().ToString();
      std::string first;
      for (CompileResult& result : *results) {
        const absl::StatusOr<Program> program =
            MakeProgram(jobs[0], setup->toolchain, std::move(result));
        if (!program.ok()) return program.status().ToString();
        const std::string line =
            absl::StrCat("key ", program->key.digest.ToHex(), " binary ",
                         program->binary_digest.ToHex(), " log ", program->log);
        if (first.empty()) first = line;
        if (line != first) return absl::StrCat(first, " and then ", line);
      }
      return first;
    };
    const std::string text = run();
    const bool sent = write(ends[1], text.data(), text.size()) ==
                      static_cast<ssize_t>(text.size());
    _exit(sent ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  ssize_t got = 0;
  while ((got = read(ends[0], buffer, sizeof(buffer))) > 0) {
    text.append(buffer, static_cast<size_t>(got));
  }
  close(ends[0]);
  int state = 0;
  EXPECT_EQ(waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
  return text;
}

void ExpectSameEverywhere(
    const std::string& compiler,
    const std::function<absl::StatusOr<CompilerSetup>(const std::string&)>&
        probe,
    const SourceUnit& unit, const Target& target) {
  std::string first;
  for (const Surroundings& how : AllSurroundings()) {
    const std::string result = CompileIn(how, compiler, probe, unit, target);
    EXPECT_EQ(result.substr(0, 4), "key ") << how.name;
    if (first.empty()) first = result;
    EXPECT_EQ(result, first) << how.name;
  }
}

TEST(ReproducibleCompileTest, CpuProgramsHaveTheSameBytesEverywhere) {
  if (const std::string why = WhyNoCcCpu(); !why.empty()) GTEST_SKIP() << why;
  ASSERT_OK_AND_ASSIGN(const Target target, HostCpuTarget());
  ExpectSameEverywhere(
      CcCpuPath(),
      [](const std::string& compiler) { return ProbeCcCpu(compiler); },
      SmallUnit(SmallGeometry(), SmallAssignment()), target);
}

TEST(ReproducibleCompileTest, GpuProgramsHaveTheSameBytesEverywhere) {
  const std::string kiln = std::string(std::getenv("KILN_BIN_DIR")) + "/kiln";
  if (access(kiln.c_str(), X_OK) != 0) GTEST_SKIP() << kiln << " is not built";
  const auto probe = [](const std::string& worker) {
    NvrtcProbeOptions options;
    options.worker = worker;
    return ProbeNvrtc(options);
  };
  const absl::StatusOr<CompilerSetup> setup = probe(kiln);
  if (!setup.ok()) GTEST_SKIP() << setup.status();
  ASSERT_OK_AND_ASSIGN(const Target target, ParseTarget("sm_90a"));
  RequestGeometry geometry = SmallGeometry();
  Planner planner(geometry, AssumedProfile(target), setup->toolchain, {1});
  ASSERT_OK_AND_ASSIGN(const IntervalPlan plan,
                       planner.Plan({.m_min = 1, .m_max = 1}));
  const PlannedCandidate& candidate = plan.candidates.at(0);
  const std::vector<SourceUnit> units = candidate.kernel_template->MakeUnits(
      geometry, target, candidate.body.assignment);
  ExpectSameEverywhere(kiln, probe, units.at(0), target);
}

}  // namespace
}  // namespace kiln
