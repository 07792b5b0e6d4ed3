// The inspector's numbers against the driver's, on a real device: whatever the
// driver says about a loaded kernel, the cubin's bytes said before.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/compile_pool.h"
#include "tests/compiler/worker_test_main.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::NvrtcForTest;

// Prototypes and attribute numbers of cuda.h (CUDA 13.0).
using CuResult = int;
constexpr int kDeviceComputeMajor = 75;
constexpr int kDeviceComputeMinor = 76;
constexpr int kFuncMaxThreads = 0;
constexpr int kFuncSharedBytes = 1;
constexpr int kFuncLocalBytes = 3;
constexpr int kFuncRegisters = 4;

// libcuda as far as this test needs it.
class Driver {
 public:
  Driver() : handle_(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {}

  // Empty when a device is ready to use, else the reason why none is.
  std::string Open() {
    if (handle_ == nullptr) return dlerror();
    int device = 0;
    if (Call<CuResult (*)(unsigned)>("cuInit", 0u) != 0) return "no device";
    if (Call<CuResult (*)(int*, int)>("cuDeviceGet", &device, 0) != 0) {
      return "no device";
    }
    using Getter = CuResult (*)(int*, int, int);
    int major = 0, minor = 0;
    Call<Getter>("cuDeviceGetAttribute", &major, kDeviceComputeMajor, device);
    Call<Getter>("cuDeviceGetAttribute", &minor, kDeviceComputeMinor, device);
    level_ = 10 * major + minor;
    void* context = nullptr;
    if (Call<CuResult (*)(void**, int)>("cuDevicePrimaryCtxRetain", &context,
                                        device) != 0 ||
        Call<CuResult (*)(void*)>("cuCtxSetCurrent", context) != 0) {
      return "no context on the device";
    }
    return "";
  }

  int level() const { return level_; }

  void* Load(const std::string& cubin) {
    void* module = nullptr;
    EXPECT_EQ(Call<CuResult (*)(void**, const void*)>(
                  "cuModuleLoadData", &module,
                  static_cast<const void*>(cubin.data())),
              0);
    return module;
  }

  void* Find(void* module, const std::string& name) {
    void* function = nullptr;
    EXPECT_EQ(Call<CuResult (*)(void**, void*, const char*)>(
                  "cuModuleGetFunction", &function, module, name.c_str()),
              0)
        << name;
    return function;
  }

  uint32_t Attribute(void* function, int attribute) {
    int value = -1;
    EXPECT_EQ(Call<CuResult (*)(int*, int, void*)>("cuFuncGetAttribute", &value,
                                                   attribute, function),
              0);
    return static_cast<uint32_t>(value);
  }

  std::vector<KernelParam> Params(void* function) {
    std::vector<KernelParam> params;
    size_t offset = 0, bytes = 0;
    while (Call<CuResult (*)(void*, size_t, size_t*, size_t*)>(
               "cuFuncGetParamInfo", function, params.size(), &offset,
               &bytes) == 0) {
      params.push_back({.offset = static_cast<uint32_t>(offset),
                        .bytes = static_cast<uint32_t>(bytes)});
    }
    return params;
  }

 private:
  template <typename Function, typename... Args>
  CuResult Call(const char* symbol, Args... args) {
    const auto function = reinterpret_cast<Function>(dlsym(handle_, symbol));
    return function == nullptr ? -1 : function(args...);
  }

  void* handle_;
  int level_ = 0;
};

constexpr char kKernels[] = R"(
extern "C" __global__ void __launch_bounds__(256)
shared(const float* x, float* y, unsigned m, unsigned long long z) {
  __shared__ float s[300];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[255 - threadIdx.x] * m + z;
}
extern "C" __global__ void __launch_bounds__(512, 3)
spills(const float* x, float* y, unsigned m) {
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
extern "C" __global__ void dynamic(char a, Odd p, double d) {
  extern __shared__ double t[];
  t[threadIdx.x] = p.q + a + d;
}
extern "C" __global__ void nothing() {}
)";

TEST(CubinDriverTest, DriverConfirmsWhatTheInspectorRead) {
  Driver driver;
  if (const std::string reason = driver.Open(); !reason.empty()) {
    GTEST_SKIP() << "needs a CUDA device: " << reason;
  }
  KILN_SETUP_OR_SKIP(setup, NvrtcForTest());
  for (const char* variant : {"", "a"}) {
    const absl::StatusOr<Target> target =
        ParseTarget(absl::StrCat("sm_", driver.level(), variant));
    if (!target.ok()) continue;
    SCOPED_TRACE(target->ToString());
    CompileJob job;
    job.unit.name = "driver_test.cu";
    job.unit.text = kKernels;
    job.unit.entries = {"dynamic", "nothing", "shared", "spills"};
    job.target = *target;
    CompilePool pool({.jobs = 1}, {setup});
    ASSERT_OK_AND_ASSIGN(std::vector<CompileResult> results,
                         pool.Run(std::vector<CompileJob>{job}));
    ASSERT_OK_AND_ASSIGN(
        const Program program,
        MakeProgram(job, setup.toolchain, std::move(results[0])));
    void* module = driver.Load(program.binary);
    ASSERT_NE(module, nullptr);
    for (const Kernel& kernel : program.kernels) {
      SCOPED_TRACE(kernel.entry);
      void* function = driver.Find(module, kernel.entry);
      ASSERT_NE(function, nullptr);
      EXPECT_EQ(driver.Attribute(function, kFuncRegisters), kernel.registers);
      EXPECT_EQ(driver.Attribute(function, kFuncSharedBytes),
                kernel.static_shared_bytes);
      EXPECT_EQ(driver.Attribute(function, kFuncLocalBytes),
                kernel.local_bytes);
      EXPECT_EQ(driver.Params(function), kernel.params);
      if (kernel.max_threads != 0) {
        EXPECT_EQ(driver.Attribute(function, kFuncMaxThreads),
                  kernel.max_threads);
      }
    }
  }
}

}  // namespace
}  // namespace kiln
