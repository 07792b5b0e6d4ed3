// NVRTC as it is installed here, through the pool. No GPU is needed.

#include "compiler/nvrtc_worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/compile_pool.h"
#include "compiler/elf_inspect.h"
#include "compiler/ptxas_log.h"
#include "compiler/worker_process.h"
#include "tests/compiler/worker_test_main.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::NvrtcForTest;
using ::kiln::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

constexpr char kKernels[] = R"(
#include "lib/add.h"
// Four parameters of 8, 8, 4 and 8 bytes; 1200 bytes of shared memory.
extern "C" __global__ void __launch_bounds__(256)
alpha(const float* x, float* y, unsigned m, unsigned long long z) {
  __shared__ float s[300];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = Add(s[255 - threadIdx.x] * m, z);
}
// 70 live values in at most 42 registers (64 K / 1536): must spill.
extern "C" __global__ void __launch_bounds__(512, 3)
beta(const float* x, float* y, unsigned m) {
  float a[70];
#pragma unroll
  for (int i = 0; i < 70; i++) a[i] = x[i * m + threadIdx.x];
#pragma unroll 1
  for (int r = 0; r < (int)m; r++) {
#pragma unroll
    for (int i = 0; i < 70; i++) {
      a[i] = a[i] * a[(i + 7) % 70] + a[(i + 31) % 70];
    }
  }
#pragma unroll
  for (int i = 0; i < 70; i++) y[i * m + threadIdx.x] = a[i];
}
struct Odd { char c[5]; int q; };
extern "C" __global__ void delta(char a, Odd p, double d) {
  extern __shared__ double t[];
  t[threadIdx.x] = p.q + a + d;
}
extern "C" __global__ void nothing() {}
)";

SourceUnit Unit(const std::string& text,
                const std::vector<std::string>& entries) {
  SourceUnit unit;
  unit.name = "test/kernels.cu";
  unit.text = text;
  unit.headers = {{"lib/add.h",
                   "__device__ inline float Add(float a, float b) "
                   "{ return a + b; }\n"}};
  unit.entries = entries;
  return unit;
}

CompileJob Job(const std::string& text, const std::vector<std::string>& entries,
               const std::string& target = "sm_90a") {
  return {.unit = Unit(text, entries), .target = *ParseTarget(target)};
}

CompileJob KernelsJob(const std::string& target) {
  return Job(kKernels, {"alpha", "beta", "delta", "nothing"}, target);
}

// Compiles one job in a fresh worker.
CompileResult CompileOne(const CompilerSetup& setup, const CompileJob& job,
                         absl::Duration deadline = absl::Seconds(60)) {
  CompilePool pool({.jobs = 1, .deadline = deadline}, {setup});
  absl::StatusOr<std::vector<CompileResult>> results =
      pool.Run(std::vector<CompileJob>{job});
  if (results.ok()) return std::move(results->at(0));
  CompileResult failed;
  failed.status = results.status();
  return failed;
}

class NvrtcTargetTest : public ::testing::TestWithParam<const char*> {};

TEST_P(NvrtcTargetTest, CubinStatesWhatPtxasReports) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  const CompileJob job = KernelsJob(GetParam());
  const CompileResult result = CompileOne(setup, job);
  ASSERT_OK(result.status);
  ASSERT_OK_AND_ASSIGN(
      const std::vector<Kernel> kernels,
      InspectProgram(result.binary, job.target, job.unit.entries));
  ASSERT_THAT(kernels, SizeIs(4));

  const std::vector<PtxasReport> reports = ParsePtxasLog(result.log);
  ASSERT_THAT(reports, SizeIs(4)) << result.log;
  for (const PtxasReport& report : reports) {
    SCOPED_TRACE(report.entry);
    const Kernel* kernel = nullptr;
    for (const Kernel& one : kernels) {
      if (one.entry == report.entry) kernel = &one;
    }
    ASSERT_NE(kernel, nullptr);
    EXPECT_EQ(kernel->registers, report.registers);
    EXPECT_EQ(kernel->local_bytes, report.stack_bytes);
    EXPECT_EQ(kernel->static_shared_bytes, report.static_shared_bytes);
  }

  const Kernel& alpha = kernels[0];
  EXPECT_THAT(alpha.params,
              ElementsAre(KernelParam{0, 8}, KernelParam{8, 8},
                          KernelParam{16, 4}, KernelParam{24, 8}));
  EXPECT_EQ(alpha.param_bytes, 32u);
  EXPECT_EQ(alpha.static_shared_bytes, 1200u);
  EXPECT_EQ(alpha.local_bytes, 0u);
  EXPECT_EQ(alpha.max_threads, 256u);
  const Kernel& beta = kernels[1];
  EXPECT_EQ(beta.max_threads, 512u);
  EXPECT_LE(beta.registers, 42u);
  EXPECT_GT(beta.local_bytes, 0u);
  const Kernel& delta = kernels[2];
  EXPECT_THAT(delta.params, ElementsAre(KernelParam{0, 1}, KernelParam{4, 12},
                                        KernelParam{16, 8}));
  EXPECT_EQ(delta.param_bytes, 24u);
  EXPECT_EQ(delta.max_threads, 0u);
  const Kernel& nothing = kernels[3];
  EXPECT_THAT(nothing.params, SizeIs(0));
  EXPECT_EQ(nothing.param_bytes, 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Targets, NvrtcTargetTest,
    ::testing::Values("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100",
                      "sm_100a", "sm_103a", "sm_120", "sm_120a", "sm_121a"),
    [](const auto& instance) { return std::string(instance.param); });

TEST(NvrtcWorkerTest, InspectorTellsArchitecturesApart) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  const std::vector<std::string> targets = {"sm_80", "sm_90", "sm_90a",
                                            "sm_120", "sm_120a"};
  for (const std::string& made : targets) {
    const CompileJob job =
        Job("extern \"C\" __global__ void k() {}", {"k"}, made);
    const CompileResult result = CompileOne(setup, job);
    ASSERT_OK(result.status);
    for (const std::string& asked : targets) {
      SCOPED_TRACE(absl::StrCat("made ", made, ", asked ", asked));
      const auto kernels =
          InspectProgram(result.binary, *ParseTarget(asked), {"k"});
      if (made == asked) {
        EXPECT_OK(kernels);
      } else {
        EXPECT_THAT(kernels, StatusIs(absl::StatusCode::kInvalidArgument,
                                      absl::StrCat("cubin is for ", made,
                                                   "; expected ", asked)));
      }
    }
  }
}

// Other folder, other environment, other position in a worker's life.
TEST(NvrtcWorkerTest, GivesTheSameBytesAndLogEverywhere) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  const CompileJob job = KernelsJob("sm_90a");
  const CompileResult first = CompileOne(setup, job);
  ASSERT_OK(first.status);

  char home[4096];
  ASSERT_NE(getcwd(home, sizeof(home)), nullptr);
  std::string folder = absl::StrCat(::testing::TempDir(), "/kiln_XXXXXX");
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  ASSERT_EQ(chdir(folder.c_str()), 0);
  setenv("NVRTC_APPEND_FLAGS", "--device-debug", 1);
  setenv("NVRTC_PREPEND_FLAGS", "-DADDED", 1);
  CompilePool pool({.jobs = 1}, {setup});
  const auto results = pool.Run(
      std::vector<CompileJob>{KernelsJob("sm_120a"), KernelsJob("sm_80"), job});
  unsetenv("NVRTC_APPEND_FLAGS");
  unsetenv("NVRTC_PREPEND_FLAGS");
  ASSERT_EQ(chdir(home), 0);
  rmdir(folder.c_str());

  ASSERT_OK(results);
  ASSERT_OK(results->at(2).status);
  EXPECT_EQ(results->at(2).binary, first.binary);
  EXPECT_EQ(results->at(2).log, first.log);
}

TEST(NvrtcWorkerTest, RejectsASourceThatDoesNotCompile) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  const CompileResult result = CompileOne(
      setup, Job("extern \"C\" __global__ void k() { undeclared(); }", {"k"}));
  EXPECT_THAT(result.status,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("test/kernels.cu(1)"),
                             HasSubstr("undeclared"), HasSubstr("sm_90a"))));
  EXPECT_THAT(result.log, HasSubstr("undeclared"));
}

TEST(NvrtcWorkerTest, RejectsAnOptionThatDoesNotExist) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  CompileJob job = Job("extern \"C\" __global__ void k() {}", {"k"});
  job.unit.options = {"--no-such-option"};
  const CompileResult result = CompileOne(setup, job);
  EXPECT_FALSE(result.status.ok());
  EXPECT_THAT(result.log, HasSubstr("no-such-option"));
}

TEST(NvrtcWorkerTest, ReadsNoHeaderOutsideTheUnit) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  // In the working folder of this process, by its path, and by a toolkit name.
  const std::string header = "kiln_stray_header.h";
  std::ofstream(header) << "#define STRAY 1\n";
  char folder[4096];
  ASSERT_NE(getcwd(folder, sizeof(folder)), nullptr);
  for (const std::string& name :
       {absl::StrCat("\"", header, "\""),
        absl::StrCat("\"", folder, "/", header, "\""),
        absl::StrCat("<", folder, "/", header, ">"),
        std::string("<cuda_fp16.h>"), std::string("\"etc/passwd\""),
        std::string("ANY_MACRO")}) {
    const CompileResult result = CompileOne(
        setup, Job(absl::StrCat("#define ANY_MACRO \"lib/add.h\"\n # include ",
                                name, "\nextern \"C\" __global__ void k() {}"),
                   {"k"}));
    EXPECT_THAT(result.status,
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("test/kernels.cu(2): includes")))
        << name;
  }
  unlink(header.c_str());
}

TEST(NvrtcWorkerTest, DoesNotContractMultiplyAndAdd) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  // With contraction both kernels would be one FFMA and equal code.
  const CompileResult written =
      CompileOne(setup, Job("extern \"C\" __global__ void k(float* p) "
                            "{ p[0] = p[1] * p[2] + p[3]; }",
                            {"k"}));
  const CompileResult fused =
      CompileOne(setup, Job("extern \"C\" __global__ void k(float* p) "
                            "{ p[0] = __fmaf_rn(p[1], p[2], p[3]); }",
                            {"k"}));
  ASSERT_OK(written.status);
  ASSERT_OK(fused.status);
  EXPECT_NE(written.binary, fused.binary);
}

TEST(NvrtcWorkerTest, StopsAtTheDeadline) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  // Doubles its work with each level; level 30 takes hours.
  const char source[] = R"(
    template <int N, int M> struct T {
      static constexpr unsigned v = T<N - 1, 2 * M>::v + T<N - 1, 2 * M + 1>::v;
    };
    template <int M> struct T<0, M> { static constexpr unsigned v = M; };
    extern "C" __global__ void k(unsigned* p) { *p = T<30, 1>::v; }
  )";
  const CompileResult result =
      CompileOne(setup, Job(source, {"k"}), absl::Milliseconds(500));
  EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_LT(result.seconds, 30);
}

TEST(NvrtcWorkerTest, InspectorRefusesOtherEntriesThanDeclared) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  const CompileJob job = KernelsJob("sm_90a");
  const CompileResult result = CompileOne(setup, job);
  ASSERT_OK(result.status);
  EXPECT_THAT(InspectProgram(result.binary, job.target, {"alpha", "beta"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("alpha, beta, delta, nothing"),
                             HasSubstr("expected alpha, beta"))));
  EXPECT_THAT(InspectProgram(result.binary, job.target,
                             {"alpha", "beta", "delta", "nothing", "omega"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("omega")));
}

TEST(NvrtcWorkerTest, InspectorRefusesCallsOutOfTheCubin) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  const CompileJob job =
      Job("extern \"C\" __device__ int elsewhere(int);\n"
          "extern \"C\" __global__ void k(int* p) { *p = elsewhere(*p); }",
          {"k"});
  CompileJob relocatable = job;
  relocatable.unit.options = {"--relocatable-device-code=true"};
  const CompileResult result = CompileOne(setup, relocatable);
  ASSERT_OK(result.status);
  EXPECT_THAT(InspectProgram(result.binary, job.target, job.unit.entries),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(NvrtcWorkerTest, MakesAProgramWithItsKey) {
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  const CompileJob job = KernelsJob("sm_90a");
  ASSERT_OK_AND_ASSIGN(
      const Program program,
      MakeProgram(job, setup.toolchain, CompileOne(setup, job)));
  EXPECT_EQ(program.key, MakeProgramKey(job.unit, job.target, setup.toolchain));
  EXPECT_EQ(program.binary_digest, Sha256(program.binary));
  EXPECT_NE(program.FindKernel("alpha"), nullptr);
  EXPECT_GT(program.compile_seconds, 0);
}

TEST(NvrtcWorkerTest, SaysWhatIsWrongWithTheLibrary) {
  const std::string path =
      absl::StrCat(::testing::TempDir(), "/libnvrtc.so.13");
  std::ofstream(path) << "no library";
  const WorkerCommand command = {
      .executable = "/proc/self/exe",
      .arguments = {kNvrtcWorkerVerb, "--nvrtc", path}};
  ASSERT_OK_AND_ASSIGN(const auto worker, WorkerProcess::Start(command));
  EXPECT_THAT(
      AwaitHello(worker.get(), absl::Seconds(30)),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("libnvrtc-builtins")));
  unlink(path.c_str());
}

}  // namespace
}  // namespace kiln
