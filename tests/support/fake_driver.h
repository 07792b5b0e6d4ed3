// FakeDriver: a CUDA driver in memory behind the runtime's driver table. It
// records every call, can fail the n-th one, and knows what is still loaded.
//
// The table holds plain function pointers, so there is one fake per process;
// every test starts with Reset. Single-threaded.
//
// A module image is text, one line per kernel, ended by a NUL:
//   "fc1 0:8 8:8 16:4 shared=1024 threads=256\n"
// that is: name, offset:bytes of each parameter, static shared memory, most
// threads per block. Any other text is an invalid image.

#ifndef KILN_TESTS_SUPPORT_FAKE_DRIVER_H_
#define KILN_TESTS_SUPPORT_FAKE_DRIVER_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "runtime/driver.h"

struct CUctx_st {
  int device = 0;
};

struct CUfunc_st {
  std::string name;
  CUmod_st* module = nullptr;
  std::vector<std::array<size_t, 2>> params;  // offset, bytes
  int shared_bytes = 0;
  int threads_max = 1024;
  int dynamic_shared_bytes_max = -1;  // -1: never set
  bool loaded = false;
};

struct CUmod_st {
  CUctx_st* context = nullptr;
  std::map<std::string, CUfunc_st> functions;
};

namespace kiln::testing {

struct FakeLaunch {
  std::string kernel;
  CUctx_st* context = nullptr;  // of the kernel
  CUctx_st* current = nullptr;  // at the time of the call
  std::array<uint32_t, 3> grid{};
  std::array<uint32_t, 3> block{};
  uint32_t shared_bytes = 0;
  CUstream_st* stream = nullptr;
  bool overlapped = false;  // may start before the launch in front has ended
  std::vector<uint8_t> params;
};

class FakeDriver {
 public:
  static FakeDriver& Get();

  // The state of a fresh process on a machine with one sm_90 device whose
  // context `context(0)` is current. A second context exists: `context(1)`.
  void Reset();

  const kiln_driver_t* table() const { return &table_; }

  CUctx_st* context(int index) { return &contexts_[index]; }

  // The n-th call from now (1 is the next) returns `result` and does nothing.
  // cuGetErrorName does not count: it cannot matter.
  void FailCall(int n, int result) {
    fail_at_ = calls_.size() + static_cast<size_t>(n);
    fail_result_ = result;
  }

  bool failed() const { return failed_; }

  // Symbols in the order of the calls.
  const std::vector<std::string>& calls() const { return calls_; }

  int CountOf(const std::string& symbol) const;

  const std::vector<FakeLaunch>& launches() const { return launches_; }

  void ClearLog() {
    calls_.clear();
    launches_.clear();
    fail_at_ = 0;
    failed_ = false;
  }

  size_t live_modules() const { return modules_.size(); }

  // Pieces of device memory, which is host memory here.
  size_t live_memory() const { return memory_.size(); }

  CUctx_st* current() const {
    return context_stack.empty() ? nullptr : context_stack.back();
  }

  size_t context_stackdepth() const { return context_stack.size(); }

  const CUfunc_st* Find(const std::string& kernel) const;

  // What the machine is.
  int driver_version = 13000;
  std::map<int, int> device_attributes;
  std::vector<CUctx_st*> context_stack;  // current one last; may be emptied
  // Runs at each launch; for kernels that compute something.
  std::function<void(const FakeLaunch&)> on_launch;

 private:
  friend struct FakeDriverCalls;

  FakeDriver();
  // Records the call; true if it must fail.
  bool Enter(const char* symbol, int* result);

  kiln_driver_t table_;
  std::array<CUctx_st, 2> contexts_;
  std::vector<std::string> calls_;
  std::vector<FakeLaunch> launches_;
  std::set<CUmod_st*> modules_;
  std::map<uint64_t, std::vector<uint8_t>> memory_;  // by address
  size_t fail_at_ = 0;
  int fail_result_ = 0;
  bool failed_ = false;
};

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_FAKE_DRIVER_H_
