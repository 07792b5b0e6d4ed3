// Every call with which opening and loading ask the system for something fails
// once: memory, files, sealed memory, the dynamic loader, threads. The linker
// sends those calls through the wrappers below (--wrap).

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include "runtime/kiln.h"
#include "tests/support/tiny_bundle.h"

namespace {

// Calls are counted, and one fails, only while armed; single-threaded.
bool g_armed = false;
int g_calls = 0;
int g_fail_at = 0;
const char* g_failed = nullptr;

// What the runtime allocated and has not freed, also across arming.
constexpr int kLiveMax = 256;
void* g_live[kLiveMax];

bool Fails(const char* function) {
  if (!g_armed || ++g_calls != g_fail_at) return false;
  g_failed = function;
  return true;
}

void* Remember(void* data) {
  if (!g_armed || data == nullptr) return data;
  for (void*& slot : g_live) {
    if (slot == nullptr) {
      slot = data;
      return data;
    }
  }
  std::abort();
}

int Live() {
  int count = 0;
  for (void* slot : g_live) count += slot != nullptr ? 1 : 0;
  return count;
}

}  // namespace

extern "C" {

void* __real_malloc(size_t bytes);
void* __real_calloc(size_t count, size_t bytes);
int __real_posix_memalign(void** out, size_t alignment, size_t bytes);
void __real_free(void* data);
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int fd,
                  off_t offset);
int __real_mprotect(void* at, size_t bytes, int protection);
int __real_open(const char* path, int flags, ...);
int __real_fstat(int fd, struct stat* info);
ssize_t __real_read(int fd, void* data, size_t bytes);
ssize_t __real_write(int fd, const void* data, size_t bytes);
int __real_memfd_create(const char* name, unsigned flags);
int __real_fcntl(int fd, int command, ...);
void* __real_dlopen(const char* path, int flags);
void* __real_dlsym(void* library, const char* name);
int __real_pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                          void* (*main)(void*), void* argument);

void* __wrap_malloc(size_t bytes) {
  return Fails("malloc") ? nullptr : Remember(__real_malloc(bytes));
}

void* __wrap_calloc(size_t count, size_t bytes) {
  return Fails("calloc") ? nullptr : Remember(__real_calloc(count, bytes));
}

int __wrap_posix_memalign(void** out, size_t alignment, size_t bytes) {
  if (Fails("posix_memalign")) return ENOMEM;
  const int result = __real_posix_memalign(out, alignment, bytes);
  if (result == 0) Remember(*out);
  return result;
}

void __wrap_free(void* data) {
  for (void*& slot : g_live) {
    if (data != nullptr && slot == data) slot = nullptr;
  }
  __real_free(data);
}

void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd,
                  off_t offset) {
  if (!Fails("mmap")) {
    return __real_mmap(at, bytes, protection, flags, fd, offset);
  }
  errno = ENOMEM;
  return MAP_FAILED;
}

int __wrap_mprotect(void* at, size_t bytes, int protection) {
  if (!Fails("mprotect")) return __real_mprotect(at, bytes, protection);
  errno = ENOMEM;
  return -1;
}

int __wrap_open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const unsigned mode = (flags & O_CREAT) != 0 ? va_arg(list, unsigned) : 0;
  va_end(list);
  if (!Fails("open")) return __real_open(path, flags, mode);
  errno = EMFILE;
  return -1;
}

int __wrap_fstat(int fd, struct stat* info) {
  if (!Fails("fstat")) return __real_fstat(fd, info);
  errno = EIO;
  return -1;
}

ssize_t __wrap_read(int fd, void* data, size_t bytes) {
  if (!Fails("read")) return __real_read(fd, data, bytes);
  errno = EIO;
  return -1;
}

ssize_t __wrap_write(int fd, const void* data, size_t bytes) {
  if (!Fails("write")) return __real_write(fd, data, bytes);
  errno = ENOSPC;
  return -1;
}

int __wrap_memfd_create(const char* name, unsigned flags) {
  if (!Fails("memfd_create")) return __real_memfd_create(name, flags);
  errno = EMFILE;
  return -1;
}

int __wrap_fcntl(int fd, int command, ...) {
  va_list list;
  va_start(list, command);
  const long argument = va_arg(list, long);
  va_end(list);
  if (!Fails("fcntl")) return __real_fcntl(fd, command, argument);
  errno = EPERM;
  return -1;
}

void* __wrap_dlopen(const char* path, int flags) {
  return Fails("dlopen") ? nullptr : __real_dlopen(path, flags);
}

void* __wrap_dlsym(void* library, const char* name) {
  return Fails("dlsym") ? nullptr : __real_dlsym(library, name);
}

int __wrap_pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                          void* (*main)(void*), void* argument) {
  if (Fails("pthread_create")) return EAGAIN;
  return __real_pthread_create(thread, attributes, main, argument);
}

}  // extern "C"

namespace kiln {
namespace {

using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyKernelBinary;

int CountOf(const char* folder) {
  int count = 0;
  for ([[maybe_unused]] const auto& item :
       std::filesystem::directory_iterator(folder)) {
    ++count;
  }
  return count;
}

// Threads of this process, once there are `expected` or a second has passed: a
// thread that was joined stays in /proc a moment longer.
int ThreadsSettledAt(int expected) {
  int count = 0;
  for (int i = 0; i < 1000; ++i) {
    count = CountOf("/proc/self/task");
    if (count == expected) break;
    usleep(1000);
  }
  return count;
}

int MappedPrograms() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("kiln-program") != std::string::npos) ++count;
  }
  return count;
}

class LoadFaultsTest : public ::testing::Test {
 protected:
  LoadFaultsTest() {
    char name[] = "kiln_load_faults_XXXXXX";
    path_ = ::testing::TempDir() + name;
    const int fd = mkstemp(path_.data());
    EXPECT_GE(fd, 0);
    close(fd);
    options_.struct_size = sizeof(options_);
    options_.cpu_threads = 3;
  }

  ~LoadFaultsTest() override { std::remove(path_.c_str()); }

  void Write(const BundleSection& section) {
    std::ofstream(path_, std::ios::binary) << WriteBundle({section}).value();
  }

  // Opens and loads with the `fail_at`-th call failing; 0 = none. What was
  // opened is released. The status of the first refusal.
  kiln_status_t Cycle(int fail_at) {
    g_calls = 0;
    g_fail_at = fail_at;
    g_failed = nullptr;
    kiln_bundle_t* bundle = nullptr;
    kiln_modules_t* modules = nullptr;
    error_ = {};
    g_armed = true;
    kiln_status_t status =
        kiln_bundle_open_file(path_.c_str(), nullptr, &bundle, &error_);
    if (status == KILN_STATUS_OK) {
      status = kiln_modules_load(bundle, &options_, &modules, &error_);
    }
    g_armed = false;
    EXPECT_EQ(modules == nullptr, status != KILN_STATUS_OK);
    EXPECT_EQ(kiln_modules_unload(modules, nullptr), KILN_STATUS_OK);
    EXPECT_EQ(kiln_bundle_close(bundle, nullptr), KILN_STATUS_OK);
    return status;
  }

  // Fails every call in turn. Which functions failed, how often.
  std::map<std::string, int> FailEveryCall() {
    EXPECT_EQ(Cycle(0), KILN_STATUS_OK) << error_.message;
    const int descriptors = CountOf("/proc/self/fd");
    const int threads = ThreadsSettledAt(1);
    const int calls = g_calls;
    std::map<std::string, int> failed;
    for (int n = 1; n <= calls; ++n) {
      const kiln_status_t status = Cycle(n);
      const std::string function = g_failed == nullptr ? "" : g_failed;
      ++failed[function];
      const std::set<kiln_status_t> expected = {
          KILN_STATUS_OUT_OF_MEMORY, KILN_STATUS_SYSTEM,
          KILN_STATUS_FILE_UNREADABLE, KILN_STATUS_PROGRAM_REFUSED,
          KILN_STATUS_KERNEL_MISSING};
      EXPECT_TRUE(expected.contains(status)) << function << " " << status;
      EXPECT_EQ(error_.code, status) << function;
      EXPECT_NE(error_.message[0], '\0') << function;
      EXPECT_EQ(Live(), 0) << "leak after " << function << " failed";
      EXPECT_EQ(CountOf("/proc/self/fd"), descriptors) << function;
      EXPECT_EQ(ThreadsSettledAt(threads), threads) << function;
      EXPECT_EQ(MappedPrograms(), 0) << function;
      EXPECT_EQ(Cycle(0), KILN_STATUS_OK) << "after " << function;
      EXPECT_EQ(Live(), 0);
    }
    return failed;
  }

  std::string path_;
  kiln_load_options_t options_ = {};
  kiln_error_t error_ = {};
};

TEST_F(LoadFaultsTest, EveryFailingCallOnTheCpuLeavesNothingBehind) {
  Write(TinyCpuSection(TinyKernelBinary()));
  const std::map<std::string, int> failed = FailEveryCall();
  // None of them went missing from the count.
  for (const char* function :
       {"malloc", "calloc", "posix_memalign", "mmap", "mprotect", "open",
        "fstat", "read", "memfd_create", "write", "fcntl", "dlopen", "dlsym",
        "pthread_create"}) {
    EXPECT_TRUE(failed.contains(function)) << function;
  }
  EXPECT_EQ(failed.at("pthread_create"), 2);
  EXPECT_FALSE(failed.contains(""));
}

}  // namespace
}  // namespace kiln
