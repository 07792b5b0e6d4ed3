// kiln-cc-cpu, the embedded Clang and LLD, through the pool.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/compile_pool.h"
#include "compiler/elf_inspect.h"
#include "tests/compiler/worker_test_main.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::CcCpuForTest;
using ::kiln::testing::IsOk;
using ::kiln::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

// Declares an entry the way templates do.
constexpr char kPrologue[] = R"(
#include "test/types.h"
#define ENTRY(name)                                         \
  extern "C" const unsigned name##_args_bytes;              \
  extern "C" const unsigned name##_args_bytes = sizeof(Args); \
  extern "C" void name(const void* args, unsigned bx, unsigned, unsigned)
)";

constexpr char kAxpy[] = R"(
struct Args { const f32* x; f32* y; f32 a; unsigned n; };
// Visible in the object file, but not declared as an entry.
extern "C" f32 helper(f32 v) { return v * 2.0f; }
ENTRY(axpy) {
  const Args& p = *static_cast<const Args*>(args);
  for (unsigned i = 0; i < p.n; ++i) {
    p.y[bx * p.n + i] += p.a * helper(p.x[bx * p.n + i]);
  }
}
ENTRY(clear) {
  const Args& p = *static_cast<const Args*>(args);
  for (unsigned i = 0; i < p.n; ++i) p.y[i] = 0;
}
)";

CompileJob Job(const std::string& text, const std::vector<std::string>& entries,
               const std::string& target = "cpu-x86-64-v3") {
  CompileJob job;
  job.unit.name = "test/kernels.cc";
  job.unit.text = absl::StrCat(kPrologue, "#line 1\n", text);
  job.unit.headers = {{"test/types.h", "using f32 = float;\n"}};
  job.unit.entries = entries;
  job.target = *ParseTarget(target);
  return job;
}

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

// A loaded object; null functions when it could not be loaded.
class Loaded {
 public:
  explicit Loaded(const std::string& binary) {
    const int fd = memfd_create("program", MFD_CLOEXEC);
    if (write(fd, binary.data(), binary.size()) ==
        static_cast<ssize_t>(binary.size())) {
      handle_ = dlopen(absl::StrCat("/proc/self/fd/", fd).c_str(),
                       RTLD_NOW | RTLD_LOCAL);
    }
    if (handle_ == nullptr) error_ = dlerror();
    close(fd);
  }

  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;

  ~Loaded() {
    if (handle_ != nullptr) dlclose(handle_);
  }

  void* Find(const char* name) const {
    return handle_ == nullptr ? nullptr : dlsym(handle_, name);
  }

  const std::string& error() const { return error_; }

 private:
  void* handle_ = nullptr;
  std::string error_;
};

using Entry = void (*)(const void*, uint32_t, uint32_t, uint32_t);

class CcCpuLevelTest : public ::testing::TestWithParam<int> {};

TEST_P(CcCpuLevelTest, MakesAnObjectThatPassesInspection) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const CompileJob job =
      Job(kAxpy, {"axpy", "clear"}, absl::StrCat("cpu-x86-64-v", GetParam()));
  const CompileResult result = CompileOne(setup, job);
  ASSERT_OK(result.status);
  ASSERT_OK_AND_ASSIGN(
      const std::vector<Kernel> kernels,
      InspectProgram(result.binary, job.target, job.unit.entries));
  ASSERT_THAT(kernels, SizeIs(2));
  EXPECT_EQ(kernels[0].entry, "axpy");
  EXPECT_EQ(kernels[1].entry, "clear");
  EXPECT_EQ(kernels[0].param_bytes, 24u);
  EXPECT_THAT(kernels[0].params, ElementsAre(KernelParam{0, 24}));
  EXPECT_EQ(kernels[0].registers, 0u);
}

INSTANTIATE_TEST_SUITE_P(Levels, CcCpuLevelTest, ::testing::Values(2, 3, 4));

TEST(CcCpuTest, CompiledCodeComputes) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const CompileResult result =
      CompileOne(setup, Job(kAxpy, {"axpy", "clear"}, "cpu-x86-64-v2"));
  ASSERT_OK(result.status);
  const Loaded loaded(result.binary);
  const auto axpy = reinterpret_cast<Entry>(loaded.Find("axpy"));
  ASSERT_NE(axpy, nullptr) << loaded.error();
  EXPECT_EQ(loaded.Find("helper"), nullptr) << "not declared, so not exported";
  std::vector<float> x = {1, 2, 3, 4, 5, 6}, y(6, 100);

  const struct {
    const float* x;
    float* y;
    float a;
    uint32_t n;
  } args = {x.data(), y.data(), 0.5f, 3};

  axpy(&args, 1, 0, 0);
  EXPECT_THAT(y, ElementsAre(100, 100, 100, 104, 105, 106));
}

TEST(CcCpuTest, RoundsTwiceWhereTheSourceSaysSo) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  if (HostCpuTarget()->level < 3) GTEST_SKIP() << "this processor has no FMA";
  const char source[] = R"(
    struct Args { const f32* x; f32* y; };
    ENTRY(k) {
      const Args& p = *static_cast<const Args*>(args);
      p.y[bx] = p.x[0] * p.x[1] + p.x[2];
    }
  )";
  const CompileResult result = CompileOne(setup, Job(source, {"k"}));
  ASSERT_OK(result.status);
  const Loaded loaded(result.binary);
  const auto k = reinterpret_cast<Entry>(loaded.Find("k"));
  ASSERT_NE(k, nullptr) << loaded.error();
  // (1 + 2^-12)^2 - 1: the product's 2^-24 is lost when it is rounded.
  const float x[3] = {1 + 0x1p-12f, 1 + 0x1p-12f, -1};
  float y = 0;

  const struct {
    const float* x;
    float* y;
  } args = {x, &y};

  k(&args, 0, 0, 0);
  EXPECT_EQ(y, 0x1p-11f);
}

// Copies and fills become calls of memory functions, which no library gives.
TEST(CcCpuTest, ProgramsBringTheirMemoryFunctions) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const char source[] = R"(
    struct Args { const char* x; char* y; unsigned long n; };
    ENTRY(k) {
      const Args& p = *static_cast<const Args*>(args);
      if (bx == 0) __builtin_memcpy(p.y, p.x, p.n);
      if (bx == 1) __builtin_memset(p.y, 7, p.n);
      if (bx == 2) __builtin_memmove(p.y + 1, p.y, p.n - 1);
      if (bx == 3) p.y[0] = (char)__builtin_memcmp(p.x, p.y, p.n);
    }
  )";
  const CompileJob job = Job(source, {"k"}, "cpu-x86-64-v2");
  const CompileResult result = CompileOne(setup, job);
  ASSERT_OK(result.status);
  EXPECT_OK(InspectProgram(result.binary, job.target, job.unit.entries));
  const Loaded loaded(result.binary);
  const auto k = reinterpret_cast<Entry>(loaded.Find("k"));
  ASSERT_NE(k, nullptr) << loaded.error();
  const std::string x = "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz";
  std::string y(x.size(), '?');

  const struct {
    const char* x;
    char* y;
    uint64_t n;
  } args = {x.data(), y.data(), x.size()};

  k(&args, 0, 0, 0);
  EXPECT_EQ(y, x);
  k(&args, 2, 0, 0);
  EXPECT_EQ(y, "a" + x.substr(0, x.size() - 1));
  k(&args, 3, 0, 0);
  EXPECT_EQ(y[0], 1);
  k(&args, 1, 0, 0);
  EXPECT_EQ(y, std::string(x.size(), '\7'));
}

// x86-64-v2 has no fused multiply-add; the program brings an exact one.
TEST(CcCpuTest, FusedMultiplyAddIsExactOnEveryLevel) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const char source[] = R"(
    struct Args { const f32* x; f32* y; };
    ENTRY(k) {
      const Args& p = *static_cast<const Args*>(args);
      p.y[bx] = __builtin_fmaf(p.x[3 * bx], p.x[3 * bx + 1], p.x[3 * bx + 2]);
    }
  )";
  ASSERT_OK_AND_ASSIGN(const Target host, HostCpuTarget());
  for (int level = 2; level <= host.level; ++level) {
    const CompileJob job =
        Job(source, {"k"}, absl::StrCat("cpu-x86-64-v", level));
    const CompileResult result = CompileOne(setup, job);
    ASSERT_OK(result.status);
    EXPECT_OK(InspectProgram(result.binary, job.target, job.unit.entries));
    const Loaded loaded(result.binary);
    const auto k = reinterpret_cast<Entry>(loaded.Find("k"));
    ASSERT_NE(k, nullptr) << loaded.error();
    std::mt19937 random(level);
    constexpr uint32_t kCount = 200000;
    std::vector<float> x(3 * kCount), y(kCount);
    for (uint32_t i = 0; i < kCount; ++i) {
      // All of float in turn with values that nearly cancel or nearly tie.
      for (int j = 0; j < 3; ++j) {
        const auto bits = static_cast<uint32_t>(random());
        std::memcpy(&x[3 * i + j], &bits, sizeof(bits));
      }
      if (i % 2 == 0) x[3 * i + 2] = -x[3 * i] * x[3 * i + 1];
      if (i % 4 == 0) x[3 * i + 2] *= std::ldexp(1.0f, i % 60 - 30);
    }

    const struct {
      const float* x;
      float* y;
    } args = {x.data(), y.data()};

    for (uint32_t i = 0; i < kCount; ++i) {
      k(&args, i, 0, 0);
      const float want = std::fma(x[3 * i], x[3 * i + 1], x[3 * i + 2]);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(y[i])) << i;
      } else {
        ASSERT_EQ(std::memcmp(&y[i], &want, sizeof(want)), 0)
            << x[3 * i] << " * " << x[3 * i + 1] << " + " << x[3 * i + 2]
            << " = " << want << ", not " << y[i];
      }
    }
  }
}

TEST(CcCpuTest, AUnitMayDefineItsOwnMemoryFunctions) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const char source[] = R"(
    extern "C" void* memcpy(void* to, const void* from, unsigned long n) {
      for (unsigned long i = 0; i < n; ++i) {
        static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
        asm volatile("" ::: "memory");
      }
      return to;
    }
    struct Args { const char* x; char* y; unsigned long n; };
    ENTRY(k) {
      const Args& p = *static_cast<const Args*>(args);
      memcpy(p.y, p.x, p.n + bx);
    }
  )";
  EXPECT_OK(CompileOne(setup, Job(source, {"k"})).status);
}

TEST(CcCpuTest, GivesTheSameBytesAndLogEverywhere) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const CompileJob job = Job(kAxpy, {"axpy", "clear"});
  const CompileResult first = CompileOne(setup, job);
  ASSERT_OK(first.status);

  char home[4096];
  ASSERT_NE(getcwd(home, sizeof(home)), nullptr);
  std::string folder = absl::StrCat(::testing::TempDir(), "/kiln_XXXXXX");
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  ASSERT_EQ(chdir(folder.c_str()), 0);
  setenv("SOURCE_DATE_EPOCH", "1", 1);
  CompilePool pool({.jobs = 1}, {setup});
  const auto results = pool.Run(std::vector<CompileJob>{
      Job(kAxpy, {"clear"}, "cpu-x86-64-v4"), Job("error", {"k"}), job, job});
  unsetenv("SOURCE_DATE_EPOCH");
  ASSERT_EQ(chdir(home), 0);
  rmdir(folder.c_str());

  ASSERT_OK(results);
  EXPECT_EQ(pool.stats().workers_started, 1);
  EXPECT_EQ(results->at(2).binary, first.binary);
  EXPECT_EQ(results->at(3).binary, first.binary);
  EXPECT_EQ(results->at(3).log, first.log);
}

TEST(CcCpuTest, RejectsASourceThatDoesNotCompile) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const CompileResult result = CompileOne(
      setup, Job("struct Args {};\nENTRY(k) { undeclared(); }", {"k"}));
  EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kInvalidArgument,
                                      AllOf(HasSubstr("test/kernels.cc:2:"),
                                            HasSubstr("undeclared"),
                                            HasSubstr("cpu-x86-64-v3"))));
  EXPECT_THAT(result.log, HasSubstr("ENTRY(k) { undeclared(); }"));
}

TEST(CcCpuTest, RejectsAMissingEntryAndNamesIt) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const CompileResult result =
      CompileOne(setup, Job(kAxpy, {"axpy", "clear", "omega"}));
  EXPECT_THAT(result.status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("omega")));
}

TEST(CcCpuTest, RejectsAnUndefinedFunctionAndNamesIt) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const CompileResult result = CompileOne(
      setup, Job("struct Args { int x; };\nextern \"C\" void printf(...);\n"
                 "ENTRY(k) { printf(args, bx); }",
                 {"k"}));
  EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kInvalidArgument,
                                      AllOf(HasSubstr("undefined symbol"),
                                            HasSubstr("printf"))));
  EXPECT_THAT(result.log, Not(HasSubstr("/proc/self/fd")));
}

TEST(CcCpuTest, FindsNoHeaderOutsideTheUnit) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  for (const char* header : {"<cstdint>", "<stddef.h>", "<immintrin.h>",
                             "\"/etc/passwd\"", "\"types.h\""}) {
    const CompileResult result =
        CompileOne(setup, Job(absl::StrCat("#include ", header, "\n"), {"k"}));
    EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kInvalidArgument,
                                        HasSubstr("file not found")))
        << header;
  }
}

TEST(CcCpuTest, InspectorRefusesCodeThatRunsWhenItIsLoaded) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const CompileJob job = Job(R"(
    struct Args { int x; };
    int state;
    // The empty asm keeps Clang from running it at compile time.
    __attribute__((constructor)) void Run() { asm("" : "+r"(state)); }
    ENTRY(k) { *(int*)args = state; }
  )",
                             {"k"});
  const CompileResult result = CompileOne(setup, job);
  ASSERT_OK(result.status);
  EXPECT_THAT(InspectProgram(result.binary, job.target, job.unit.entries),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("runs when it is loaded")));
}

TEST(CcCpuTest, InspectorRefusesThreadLocalStorage) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  CompileJob job = Job(R"(
    struct Args { int x; };
    thread_local int state;
    ENTRY(k) { *(int*)args = state++; }
  )",
                       {"k"});
  job.unit.options = {"-ftls-model=local-exec"};
  const CompileResult result = CompileOne(setup, job);
  if (result.status.ok()) {
    EXPECT_THAT(InspectProgram(result.binary, job.target, job.unit.entries),
                StatusIs(absl::StatusCode::kInvalidArgument));
  } else {
    EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kInvalidArgument));
  }
}

TEST(CcCpuTest, InspectorRefusesACpuObjectAsCubinAndTheReverse) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const CompileResult result = CompileOne(setup, Job(kAxpy, {"axpy", "clear"}));
  ASSERT_OK(result.status);
  EXPECT_THAT(
      InspectProgram(result.binary, *ParseTarget("sm_90a"), {"axpy", "clear"}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("ELF machine 62 and type 3")));
}

TEST(CcCpuTest, InspectorRefusesAnEntryWithoutItsArgumentSize) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const CompileJob job =
      Job("extern \"C\" void k(const void*, unsigned, unsigned, unsigned) {}",
          {"k"});
  EXPECT_THAT(
      CompileOne(setup, job).status,
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("k_args_bytes")));
}

TEST(CcCpuTest, StopsAtTheDeadline) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  const char source[] = R"(
    template <int N, int M> struct T {
      static constexpr unsigned v = T<N - 1, 2 * M>::v + T<N - 1, 2 * M + 1>::v;
    };
    template <int M> struct T<0, M> { static constexpr unsigned v = M; };
    struct Args { unsigned x; };
    ENTRY(k) { *(unsigned*)args = T<30, 1>::v; }
  )";
  const CompileResult result =
      CompileOne(setup, Job(source, {"k"}), absl::Milliseconds(500));
  EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kDeadlineExceeded));
}

// Deep recursion in the compiler overflows its stack: a real crash.
TEST(CcCpuTest, ACrashOfTheCompilerIsARejectAndTheNextCompileWorks) {
  KILN_SETUP_OR_SKIP(setup, CcCpuForTest());
  std::string deep = "struct Args { int x; };\nENTRY(k) { int v = ";
  for (int i = 0; i < 200000; ++i) deep += "-(";
  deep += "1";
  deep.append(200000, ')');
  deep += "; }";
  CompileJob job = Job(deep, {"k"});
  job.unit.options = {"-fbracket-depth", "1000000"};
  CompilePool pool({.jobs = 1}, {setup});
  ASSERT_OK_AND_ASSIGN(
      const auto results,
      pool.Run(std::vector<CompileJob>{job, Job(kAxpy, {"axpy", "clear"})}));
  EXPECT_THAT(results[0].status, StatusIs(absl::StatusCode::kInternal,
                                          HasSubstr("killed by signal")));
  EXPECT_OK(results[1].status);
}

}  // namespace
}  // namespace kiln
