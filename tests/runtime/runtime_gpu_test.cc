// The runtime on a real driver: what the fake one cannot prove. Needs compute
// capability 9.0 (tests/data/runtime/scale_sm_90a.cubin); skips elsewhere.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "runtime/driver.h"
#include "runtime/kiln.h"
#include "tests/support/golden.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::FakeProgram;
using ::kiln::testing::OpenTiny;
using ::kiln::testing::ReadTestFile;
using ::kiln::testing::SourcePath;
using ::kiln::testing::TinyGeometry;
using ::testing::HasSubstr;

using Clock = std::chrono::steady_clock;
using DevicePointer = unsigned long long;

constexpr uint32_t kWidth = 96;
constexpr uint32_t kCapacity = 64;

// The driver calls that a test needs and the runtime does not make.
struct Cuda {
  int (*init)(unsigned) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*retain)(CUctx_st**, int) = nullptr;
  int (*release)(int) = nullptr;
  int (*set_current)(CUctx_st*) = nullptr;
  int (*get_current)(CUctx_st**) = nullptr;
  int (*attribute)(int*, int, int) = nullptr;
  int (*alloc)(DevicePointer*, size_t) = nullptr;
  int (*free)(DevicePointer) = nullptr;
  int (*upload)(DevicePointer, const void*, size_t) = nullptr;
  int (*download)(void*, DevicePointer, size_t) = nullptr;
  int (*fill)(DevicePointer, unsigned char, size_t) = nullptr;
  int (*stream_create)(CUstream_st**, unsigned) = nullptr;
  int (*stream_destroy)(CUstream_st*) = nullptr;
  int (*stream_synchronize)(CUstream_st*) = nullptr;
  int (*begin_capture)(CUstream_st*, int) = nullptr;
  int (*end_capture)(CUstream_st*, void**) = nullptr;
  int (*instantiate)(void**, void*, unsigned long long) = nullptr;
  int (*graph_launch)(void*, CUstream_st*) = nullptr;
  int (*graph_exec_destroy)(void*) = nullptr;
  int (*graph_destroy)(void*) = nullptr;

  bool Load() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return false;
    bool ok = true;
    const auto find = [&](const char* symbol, auto* function) {
      void* address = dlsym(library, symbol);
      ok = ok && address != nullptr;
      *function =
          reinterpret_cast<std::remove_reference_t<decltype(*function)>>(
              address);
    };
    find("cuInit", &init);
    find("cuDeviceGet", &device_get);
    find("cuDevicePrimaryCtxRetain", &retain);
    find("cuDevicePrimaryCtxRelease_v2", &release);
    find("cuCtxSetCurrent", &set_current);
    find("cuCtxGetCurrent", &get_current);
    find("cuDeviceGetAttribute", &attribute);
    find("cuMemAlloc_v2", &alloc);
    find("cuMemFree_v2", &free);
    find("cuMemcpyHtoD_v2", &upload);
    find("cuMemcpyDtoH_v2", &download);
    find("cuMemsetD8_v2", &fill);
    find("cuStreamCreate", &stream_create);
    find("cuStreamDestroy_v2", &stream_destroy);
    find("cuStreamSynchronize", &stream_synchronize);
    find("cuStreamBeginCapture_v2", &begin_capture);
    find("cuStreamEndCapture", &end_capture);
    find("cuGraphInstantiateWithFlags", &instantiate);
    find("cuGraphLaunch", &graph_launch);
    find("cuGraphExecDestroy", &graph_exec_destroy);
    find("cuGraphDestroy", &graph_destroy);
    return ok;
  }
};

Kernel MakeKernel(const std::string& name, std::vector<KernelParam> params) {
  Kernel kernel;
  kernel.entry = name;
  kernel.params = std::move(params);
  kernel.param_bytes = kernel.params.back().offset + kernel.params.back().bytes;
  return kernel;
}

// out[t][i] = 2 * x[t][i] + 5 + 1 for up to kCapacity tokens, in two steps.
// `copies` programs hold the same binary; the plan uses the first.
BundleSection ScaleSection(int copies) {
  const Target target{
      .backend = Backend::kCuda, .level = 90, .arch_specific = true};
  const std::string binary =
      ReadTestFile(SourcePath("tests/data/runtime/scale_sm_90a.cubin"));
  const std::vector<Kernel> kernels = {
      MakeKernel("add", {{0, 4}, {8, 8}, {16, 8}, {24, 4}}),
      MakeKernel("scale", {{0, 8}, {8, 8}, {16, 4}, {20, 4}, {24, 8}})};
  BundleSection section;
  section.target = target;
  section.driver_version_min = 12040;
  Plan plan;
  plan.geometry = TinyGeometry();
  plan.target = target;
  plan.interval = {1, kCapacity};
  plan.body.template_name = "scale.cuda";
  plan.body.params = {
      {.name = "x", .dtype = "f32", .shape = "[m, n]"},
      {.name = "out", .dtype = "f32", .shape = "[m, n]", .output = true}};
  plan.body.arena.Add("unused", 256);
  const uint32_t scratch =
      plan.body.arena.Add("scratch", sizeof(float) * kWidth * kCapacity);
  Step scale;
  scale.label = "scale";
  scale.entry = "scale";
  scale.grid = {LaunchDim::Of({.mul = 1, .add = 0, .div = 1}),
                LaunchDim::Constant(1), LaunchDim::Constant(1)};
  scale.block = {128, 1, 1};
  scale.dynamic_shared_bytes = 65536;
  scale.args = {Arg::Param(0), Arg::Arena(scratch), Arg::Tokens(),
                Arg::U32(kWidth), Arg::U64(5)};
  Step add;
  add.label = "add";
  add.entry = "add";
  add.grid = {LaunchDim::Of({.mul = kWidth, .add = 0, .div = 64}),
              LaunchDim::Constant(1), LaunchDim::Constant(1)};
  add.block = {64, 1, 1};
  add.args = {Arg::Tokens(), Arg::Arena(scratch), Arg::Param(1),
              Arg::U32(kWidth)};
  plan.body.steps = {scale, add};
  plan.evidence.state = PlanState::kMeasured;
  for (int i = 0; i < copies; ++i) {
    section.programs.push_back(
        FakeProgram("scale " + std::to_string(i), target, binary, kernels));
    Plan copy = plan;
    copy.programs = {section.programs.back()->key.digest};
    section.entries.push_back({.name = "scale" + std::to_string(1000 + i),
                               .geometry = plan.geometry,
                               .plans = {copy}});
  }
  return section;
}

class RuntimeGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_.Load() || cuda_.init(0) != 0 ||
        cuda_.device_get(&device_, 0) != 0) {
      GTEST_SKIP() << "no NVIDIA driver or no device";
    }
    int major = 0;
    int minor = 0;
    ASSERT_EQ(cuda_.attribute(&major, 75, device_), 0);
    ASSERT_EQ(cuda_.attribute(&minor, 76, device_), 0);
    if (major != 9 || minor != 0) {
      GTEST_SKIP() << "compute capability " << major << "." << minor
                   << ", the cubin is for 9.0";
    }
    ASSERT_EQ(cuda_.retain(&context_, device_), 0);
    ASSERT_EQ(cuda_.set_current(context_), 0);
    ASSERT_EQ(cuda_.stream_create(&stream_, 1), 0);
    const size_t bytes = sizeof(float) * kWidth * kCapacity;
    ASSERT_EQ(cuda_.alloc(&x_, bytes), 0);
    ASSERT_EQ(cuda_.alloc(&out_, bytes), 0);
    ASSERT_EQ(cuda_.alloc(&arena_, 2 * bytes), 0);
    ready_ = true;
  }

  void TearDown() override {
    if (!ready_) return;
    kiln_modules_unload(modules_, nullptr);
    kiln_bundle_close(bundle_, nullptr);
    for (const DevicePointer p : {x_, out_, arena_}) cuda_.free(p);
    cuda_.stream_destroy(stream_);
    cuda_.set_current(nullptr);
    cuda_.release(device_);
  }

  kiln_status_t Load(BundleSection section) {
    bundle_ = OpenTiny({std::move(section)});
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.context = context_;
    return kiln_modules_load(bundle_, &options, &modules_, &error_);
  }

  std::vector<float> Upload(uint32_t seed) {
    std::vector<float> x(kWidth * kCapacity);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>((i * 31 + seed) % 101);
    }
    EXPECT_EQ(cuda_.upload(x_, x.data(), x.size() * sizeof(float)), 0);
    EXPECT_EQ(cuda_.fill(out_, 0xff, x.size() * sizeof(float)), 0);
    EXPECT_EQ(cuda_.fill(arena_, 0xff, x.size() * sizeof(float)), 0);
    return x;
  }

  void Check(const std::vector<float>& x, uint32_t m) {
    ASSERT_EQ(cuda_.stream_synchronize(stream_), 0);
    std::vector<float> out(x.size());
    ASSERT_EQ(cuda_.download(out.data(), out_, out.size() * sizeof(float)), 0);
    for (size_t i = 0; i < out.size(); ++i) {
      if (i < m * kWidth) {
        ASSERT_EQ(out[i], 2 * x[i] + 6) << i;
      } else {
        uint32_t bits;
        std::memcpy(&bits, &out[i], 4);
        ASSERT_EQ(bits, 0xffffffffu) << i;
      }
    }
  }

  kiln_status_t Launch(const kiln_entry_t* entry, uint64_t m) {
    const DevicePointer params[2] = {x_, out_};
    return kiln_launch(modules_, entry, m, params, sizeof(params),
                       reinterpret_cast<void*>(arena_), size_t{1} << 15,
                       stream_, &error_);
  }

  Cuda cuda_;
  int device_ = 0;
  bool ready_ = false;
  CUctx_st* context_ = nullptr;
  CUstream_st* stream_ = nullptr;
  DevicePointer x_ = 0;
  DevicePointer out_ = 0;
  DevicePointer arena_ = 0;
  kiln_bundle_t* bundle_ = nullptr;
  kiln_modules_t* modules_ = nullptr;
  kiln_error_t error_ = {};
};

TEST_F(RuntimeGpuTest, LaunchesAndGivesTheRightResult) {
  ASSERT_EQ(Load(ScaleSection(1)), KILN_STATUS_OK) << error_.message;
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules_, "scale1000", 1, &entry, &error_),
            KILN_STATUS_OK);
  for (const uint32_t m : {1u, 2u, 7u, 63u, 64u}) {
    const std::vector<float> x = Upload(m);
    ASSERT_EQ(Launch(entry, m), KILN_STATUS_OK) << error_.message;
    Check(x, m);
  }
}

TEST_F(RuntimeGpuTest, LaunchesWithoutACurrentContext) {
  ASSERT_EQ(Load(ScaleSection(1)), KILN_STATUS_OK) << error_.message;
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules_, "scale1000", 9, &entry, &error_),
            KILN_STATUS_OK);
  const std::vector<float> x = Upload(3);
  ASSERT_EQ(cuda_.set_current(nullptr), 0);
  EXPECT_EQ(Launch(entry, 9), KILN_STATUS_OK) << error_.message;
  CUctx_st* current = context_;
  ASSERT_EQ(cuda_.get_current(&current), 0);
  EXPECT_EQ(current, nullptr);
  ASSERT_EQ(cuda_.set_current(context_), 0);
  Check(x, 9);
}

TEST_F(RuntimeGpuTest, CapturesAndReplaysWithChangedInputs) {
  ASSERT_EQ(Load(ScaleSection(1)), KILN_STATUS_OK) << error_.message;
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules_, "scale1000", 20, &entry, &error_),
            KILN_STATUS_OK);
  // The first launch of these modules is inside the capture.
  ASSERT_EQ(cuda_.begin_capture(stream_, 0), 0);
  EXPECT_EQ(Launch(entry, 20), KILN_STATUS_OK) << error_.message;
  void* graph = nullptr;
  ASSERT_EQ(cuda_.end_capture(stream_, &graph), 0);
  void* executable = nullptr;
  ASSERT_EQ(cuda_.instantiate(&executable, graph, 0), 0);
  for (uint32_t seed = 0; seed < 4; ++seed) {
    const std::vector<float> x = Upload(seed);
    ASSERT_EQ(cuda_.graph_launch(executable, stream_), 0);
    Check(x, 20);
  }
  cuda_.graph_exec_destroy(executable);
  cuda_.graph_destroy(graph);
}

TEST_F(RuntimeGpuTest, TheDriverAgreesOnlyWithTheRealLayout) {
  BundleSection section = ScaleSection(1);
  auto program = std::make_shared<Program>(*section.programs[0]);
  ASSERT_EQ(program->kernels[1].entry, "scale");
  // n as 8 bytes instead of 4: a layout that ArgOffsets and the declaration
  // agree on, and the cubin does not.
  program->kernels[1].params = {{0, 8}, {8, 8}, {16, 4}, {24, 8}, {32, 8}};
  program->kernels[1].param_bytes = 40;
  section.programs = {program};
  section.entries[0].plans[0].body.steps[0].args[3] = Arg::U64(kWidth);
  EXPECT_EQ(Load(section), KILN_STATUS_PARAMETER_LAYOUT);
  EXPECT_THAT(error_.message,
              HasSubstr("kernel 'scale' parameter 3 has 4 bytes at offset 20"));
  EXPECT_EQ(modules_, nullptr);
}

TEST_F(RuntimeGpuTest, RefusesBytesThatAreNoCubin) {
  BundleSection section = ScaleSection(1);
  auto program = std::make_shared<Program>(*section.programs[0]);
  program->binary.replace(0, 4, "nope");
  program->binary_digest = Sha256(program->binary);
  section.programs = {program};
  EXPECT_EQ(Load(section), KILN_STATUS_PROGRAM_REFUSED);
}

double Seconds(Clock::time_point from) {
  return std::chrono::duration<double>(Clock::now() - from).count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(),
                   values.begin() + static_cast<ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Prints numbers for the record; the bounds are loose enough for any machine
// and catch an accidental lock, copy or quadratic loop.
TEST_F(RuntimeGpuTest, CostsLittleMoreThanTheDriver) {
  constexpr int kPrograms = 256;
  const BundleSection section = ScaleSection(kPrograms);
  const std::string bytes = WriteBundle({section}).value();
  const kiln_driver_t* driver = nullptr;
  ASSERT_EQ(runtime::RealDriver(&driver, nullptr), KILN_STATUS_OK);

  std::vector<double> ours;
  std::vector<double> opens;
  std::vector<double> raw;
  std::vector<double> preflights;  // the calls that only the runtime makes
  for (int round = 0; round < 7; ++round) {
    Clock::time_point start = Clock::now();
    ASSERT_EQ(kiln_bundle_open_memory(bytes.data(), bytes.size(), nullptr,
                                      &bundle_, &error_),
              KILN_STATUS_OK);
    opens.push_back(Seconds(start));
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.context = context_;
    ASSERT_EQ(kiln_modules_load(bundle_, &options, &modules_, &error_),
              KILN_STATUS_OK)
        << error_.message;
    ours.push_back(Seconds(start));
    start = Clock::now();
    std::vector<CUmod_st*> modules(kPrograms);
    std::vector<CUfunc_st*> functions;
    for (int i = 0; i < kPrograms; ++i) {
      const std::string& binary =
          section.programs[static_cast<size_t>(i)]->binary;
      ASSERT_EQ(driver->module_load_data(&modules[static_cast<size_t>(i)],
                                         binary.data()),
                0);
      for (const char* name : {"add", "scale"}) {
        CUfunc_st* function = nullptr;
        ASSERT_EQ(driver->module_get_function(
                      &function, modules[static_cast<size_t>(i)], name),
                  0);
        ASSERT_EQ(driver->func_load(function), 0);
        functions.push_back(function);
        if (name[0] == 's') {
          ASSERT_EQ(
              driver->func_set_attribute(
                  function, runtime::kFunctionMaxDynamicSharedBytes, 65536),
              0);
        }
      }
    }
    raw.push_back(Seconds(start));
    start = Clock::now();
    for (size_t i = 0; i < functions.size(); ++i) {
      const size_t params = i % 2 == 0 ? 4 : 5;  // of add and scale
      for (size_t p = 0; p < params; ++p) {
        size_t offset = 0;
        size_t size = 0;
        ASSERT_EQ(driver->func_get_param_info(functions[i], p, &offset, &size),
                  0);
      }
      for (const int attribute : {runtime::kFunctionMaxThreadsPerBlock,
                                  runtime::kFunctionSharedBytes}) {
        int value = 0;
        ASSERT_EQ(driver->func_get_attribute(&value, attribute, functions[i]),
                  0);
      }
    }
    preflights.push_back(Seconds(start));
    for (CUmod_st* module : modules) driver->module_unload(module);
    if (round < 6) {
      kiln_modules_unload(modules_, nullptr);
      kiln_bundle_close(bundle_, nullptr);
    }
  }
  std::printf(
      "open + verify + load of %d programs (%zu bytes): %.2f ms; raw "
      "driver calls %.2f ms; ratio %.2f\n",
      kPrograms, bytes.size(), Median(ours) * 1e3, Median(raw) * 1e3,
      Median(ours) / Median(raw));
  std::printf(
      "of it open + verify: %.2f ms; preflight's driver calls, made raw: "
      "%.2f ms\n",
      Median(opens) * 1e3, Median(preflights) * 1e3);
  EXPECT_LT(Median(ours), 2 * Median(raw) + 0.02);

  const kiln_entry_t* entry = nullptr;
  constexpr int kFinds = 100000;
  Clock::time_point start = Clock::now();
  int failures = 0;
  for (int i = 0; i < kFinds; ++i) {
    failures += kiln_entry_find(modules_, "scale1200",
                                static_cast<uint64_t>(i % 64 + 1), &entry,
                                nullptr) != KILN_STATUS_OK;
  }
  ASSERT_EQ(failures, 0) << "a refusal is not what is timed here";
  std::printf("find: %.1f ns\n", Seconds(start) / kFinds * 1e9);

  // The same two launches raw, in alternating blocks.
  CUmod_st* module = nullptr;
  CUfunc_st* scale = nullptr;
  CUfunc_st* add = nullptr;
  ASSERT_EQ(
      driver->module_load_data(&module, section.programs[0]->binary.data()), 0);
  ASSERT_EQ(driver->module_get_function(&scale, module, "scale"), 0);
  ASSERT_EQ(driver->module_get_function(&add, module, "add"), 0);
  ASSERT_EQ(driver->func_set_attribute(
                scale, runtime::kFunctionMaxDynamicSharedBytes, 65536),
            0);
  DevicePointer x = x_;
  DevicePointer out = out_;
  DevicePointer scratch = arena_ + 256;
  uint32_t m = 8;
  uint32_t n = kWidth;
  unsigned long long tag = 5;
  void* scale_args[] = {&x, &scratch, &m, &n, &tag};
  void* add_args[] = {&m, &scratch, &out, &n};
  Upload(1);
  std::vector<double> launch_ours;
  std::vector<double> launch_raw;
  constexpr int kLaunches = 200;
  for (int block = 0; block < 201; ++block) {
    start = Clock::now();
    for (int i = 0; i < kLaunches; ++i) {
      failures += Launch(entry, 8) != KILN_STATUS_OK;
    }
    ASSERT_EQ(failures, 0);
    launch_ours.push_back(Seconds(start) / kLaunches);
    ASSERT_EQ(cuda_.stream_synchronize(stream_), 0);
    start = Clock::now();
    for (int i = 0; i < kLaunches; ++i) {
      driver->launch_kernel(scale, 8, 1, 1, 128, 1, 1, 65536, stream_,
                            scale_args, nullptr);
      driver->launch_kernel(add, 12, 1, 1, 64, 1, 1, 0, stream_, add_args,
                            nullptr);
    }
    launch_raw.push_back(Seconds(start) / kLaunches);
    ASSERT_EQ(cuda_.stream_synchronize(stream_), 0);
  }
  std::printf(
      "kiln_launch of two steps: %.0f ns; the same raw: %.0f ns; "
      "difference %.0f ns\n",
      Median(launch_ours) * 1e9, Median(launch_raw) * 1e9,
      (Median(launch_ours) - Median(launch_raw)) * 1e9);
  EXPECT_LT(Median(launch_ours), Median(launch_raw) + 2e-6);
  driver->module_unload(module);
}

}  // namespace
}  // namespace kiln
