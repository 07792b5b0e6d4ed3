// What kiln_entry_find and kiln_launch call. The linker sends these functions
// through the counters below (--wrap).

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <cstdlib>
#include <functional>

#include "compiler/base/sanitized.h"
#include "runtime/kiln.h"
#include "tests/support/fake_driver.h"
#include "tests/support/tiny_bundle.h"

namespace {

std::atomic<int> g_allocations{0};
std::atomic<int> g_locks{0};
std::atomic<int> g_system_calls{0};

}  // namespace

extern "C" {

void* __real_malloc(size_t bytes);
void* __real_calloc(size_t count, size_t bytes);
void* __real_realloc(void* data, size_t bytes);
void __real_free(void* data);
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int fd,
                  off_t offset);
int __real_pthread_mutex_lock(pthread_mutex_t* mutex);
long __real_syscall(long number, ...);

void* __wrap_malloc(size_t bytes) {
  ++g_allocations;
  return __real_malloc(bytes);
}

void* __wrap_calloc(size_t count, size_t bytes) {
  ++g_allocations;
  return __real_calloc(count, bytes);
}

void* __wrap_realloc(void* data, size_t bytes) {
  ++g_allocations;
  return __real_realloc(data, bytes);
}

void __wrap_free(void* data) { __real_free(data); }

void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd,
                  off_t offset) {
  ++g_system_calls;
  return __real_mmap(at, bytes, protection, flags, fd, offset);
}

int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  ++g_locks;
  return __real_pthread_mutex_lock(mutex);
}

long __wrap_syscall(long number, ...) {
  ++g_system_calls;
  va_list list;
  va_start(list, number);
  long argument[6];
  for (long& value : argument) value = va_arg(list, long);
  va_end(list);
  return __real_syscall(number, argument[0], argument[1], argument[2],
                        argument[3], argument[4], argument[5]);
}

}  // extern "C"

namespace kiln {
namespace {

using ::kiln::testing::FakeDriver;
using ::kiln::testing::OpenTiny;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::kiln::testing::TinyKernelBinary;

// A driver whose launch counts and does nothing else: the fake one keeps a log,
// which allocates.
int g_launched = 0;

int CountLaunch(CUfunc_st*, unsigned, unsigned, unsigned, unsigned, unsigned,
                unsigned, unsigned, CUstream_st*, void**, void**) {
  ++g_launched;
  return 0;
}

CUctx_st* g_current = nullptr;

int CurrentContext(CUctx_st** context) {
  *context = g_current;
  return 0;
}

// The fake driver anew, with calls of the launch path that allocate nothing.
kiln_driver_t CountingDriver() {
  FakeDriver::Get().Reset();
  g_current = FakeDriver::Get().context(0);
  kiln_driver_t driver = *FakeDriver::Get().table();
  driver.launch_kernel = CountLaunch;
  driver.ctx_get_current = CurrentContext;
  return driver;
}

TEST(LaunchPathTest, CountersCount) {
  g_allocations = g_locks = g_system_calls = 0;
  kiln_bundle_t* bundle = OpenTiny({TinyCudaSection()});
  EXPECT_GT(g_allocations, 0);
  EXPECT_GT(g_locks, 0);
  EXPECT_GT(g_system_calls, 0);
  kiln_bundle_close(bundle, nullptr);
}

TEST(LaunchPathTest, CudaAllocatesAndLocksNothingAndMakesNoSystemCall) {
  const kiln_driver_t driver = CountingDriver();
  kiln_bundle_t* bundle = OpenTiny({TinyCudaSection()});
  kiln_load_options_t options = {};
  options.struct_size = sizeof(options);
  options.driver = &driver;
  kiln_modules_t* modules = nullptr;
  kiln_error_t error = {};
  ASSERT_EQ(kiln_modules_load(bundle, &options, &modules, &error),
            KILN_STATUS_OK)
      << error.message;
  const uint64_t params[2] = {16, 32};
  void* arena = reinterpret_cast<void*>(0x100000);

  g_allocations = g_locks = g_system_calls = 0;
  const kiln_entry_t* entry = nullptr;
  const kiln_status_t found =
      kiln_entry_find(modules, "moe", 40, &entry, &error);
  const kiln_status_t launched =
      kiln_launch(modules, entry, 40, params, sizeof(params), arena, 1 << 20,
                  nullptr, &error);
  // Refusals are part of the path too.
  const kiln_entry_t* none = nullptr;
  const kiln_status_t refused =
      kiln_entry_find(modules, "moe", 4000, &none, &error);
  const kiln_status_t missing = kiln_launch(
      modules, entry, 40, params, sizeof(params), nullptr, 0, nullptr, &error);
  const int allocations = g_allocations;
  const int locks = g_locks;
  const int system_calls = g_system_calls;

  EXPECT_EQ(found, KILN_STATUS_OK);
  EXPECT_EQ(launched, KILN_STATUS_OK);
  EXPECT_EQ(refused, KILN_STATUS_TOKENS_OUT_OF_RANGE);
  EXPECT_EQ(missing, KILN_STATUS_ARENA_MISSING);
  EXPECT_EQ(g_launched, 2);
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(locks, 0);
  EXPECT_EQ(system_calls, 0);
  kiln_modules_unload(modules, nullptr);
  kiln_bundle_close(bundle, nullptr);
}

#if !KILN_SANITIZED

// Runs `work` in a child that the kernel kills at its first system call; true
// if it made none. Sanitizers make some of their own.
bool MakesNoSystemCall(const std::function<bool()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    // Everything but exit_group, which ends the experiment.
    const sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program = {.len = sizeof(rules) / sizeof(rules[0]),
                                .filter = const_cast<sock_filter*>(rules)};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
      _exit(2);
    }
    _exit(work() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  if (WIFSIGNALED(status)) {
    EXPECT_EQ(WTERMSIG(status), SIGSYS);
    return false;
  }
  EXPECT_EQ(WEXITSTATUS(status), 0) << "1: the work failed, 2: no seccomp";
  return true;
}

TEST(LaunchPathTest, TheKernelSeesNoSystemCall) {
  const kiln_driver_t driver = CountingDriver();
  kiln_bundle_t* bundle = OpenTiny({TinyCudaSection()});
  kiln_load_options_t options = {};
  options.struct_size = sizeof(options);
  options.driver = &driver;
  kiln_modules_t* modules = nullptr;
  ASSERT_EQ(kiln_modules_load(bundle, &options, &modules, nullptr),
            KILN_STATUS_OK);
  EXPECT_FALSE(MakesNoSystemCall([] { return getppid() != 0; }));
  EXPECT_TRUE(MakesNoSystemCall([&] {
    const uint64_t params[2] = {16, 32};
    void* arena = reinterpret_cast<void*>(0x100000);
    kiln_error_t error = {};
    bool ok = true;
    for (uint64_t m = 0; m <= 70; ++m) {
      const kiln_entry_t* entry = nullptr;
      const kiln_status_t found =
          kiln_entry_find(modules, "moe", m, &entry, &error);
      ok = ok && (found == KILN_STATUS_OK) == (m <= 64);
      if (found != KILN_STATUS_OK) continue;
      ok = ok && kiln_launch(modules, entry, m, params, sizeof(params), arena,
                             1 << 20, nullptr, &error) == KILN_STATUS_OK;
      // Refusals, with their texts.
      ok = ok && (kiln_launch(modules, entry, m, params, sizeof(params),
                              nullptr, 0, nullptr, &error) ==
                  (m == 0 ? KILN_STATUS_OK : KILN_STATUS_ARENA_MISSING));
    }
    return ok;
  }));
  kiln_modules_unload(modules, nullptr);
  kiln_bundle_close(bundle, nullptr);
}

#endif

TEST(LaunchPathTest, CpuAllocatesNothingAndTakesOneLock) {
  kiln_bundle_t* bundle = OpenTiny({TinyCpuSection(TinyKernelBinary())});
  kiln_load_options_t options = {};
  options.struct_size = sizeof(options);
  options.cpu_threads = 2;
  kiln_modules_t* modules = nullptr;
  kiln_error_t error = {};
  ASSERT_EQ(kiln_modules_load(bundle, &options, &modules, &error),
            KILN_STATUS_OK)
      << error.message;
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules, "sumsq", 8, &entry, &error),
            KILN_STATUS_OK);
  alignas(256) static char arena[1 << 16];
  static float x[8 * kiln::testing::kTinyWidth];
  static float out[8];
  const void* params[2] = {x, out};
  g_allocations = g_locks = 0;
  const kiln_status_t status =
      kiln_launch(modules, entry, 8, params, sizeof(params), arena,
                  sizeof(arena), nullptr, &error);
  const int allocations = g_allocations;
  const int locks = g_locks;
  EXPECT_EQ(status, KILN_STATUS_OK) << error.message;
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(locks, 1);
  kiln_modules_unload(modules, nullptr);
  kiln_bundle_close(bundle, nullptr);
}

}  // namespace
}  // namespace kiln
