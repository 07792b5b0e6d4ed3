// The runtime on a real driver: what the fake one cannot prove. Needs compute
// capability 9.0 (tests/data/runtime/scale_sm_90a.cubin); skips elsewhere.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/bundle_format.h"
#include "runtime/driver.h"
#include "runtime/kiln.h"
#include "tests/support/scale_bundle.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::kScaleCapacity;
using ::kiln::testing::kScaleWidth;
using ::kiln::testing::OpenTiny;
using ::kiln::testing::RepairRoot;
using ::kiln::testing::ScaleSection;
using ::testing::HasSubstr;

using Clock = std::chrono::steady_clock;

constexpr uint32_t kWidth = kScaleWidth;
constexpr uint32_t kCapacity = kScaleCapacity;

using DevicePointer = unsigned long long;

// The driver calls that a test needs and the runtime does not make.
struct Cuda {
  int (*init)(unsigned) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*name)(char*, int, int) = nullptr;
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
    find("cuDeviceGetName", &name);
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

// Golden replay of the loaded modules; the digests are left in `found`.
kiln_status_t Selftest(kiln_modules_t* modules, uint32_t flags,
                       std::vector<Digest>* found, kiln_error_t* error) {
  kiln_selftest_options_t options = {};
  options.struct_size = sizeof(options);
  options.flags = flags;
  options.report = [](void* user, const kiln_selftest_plan_t* plan) {
    Digest digest;
    std::memcpy(digest.bytes.data(), plan->found, digest.bytes.size());
    static_cast<std::vector<Digest>*>(user)->push_back(digest);
  };
  options.user = found;
  return kiln_modules_selftest(modules, &options, nullptr, error);
}

TEST_F(RuntimeGpuTest, GoldenReplayPassesHereAndCatchesAChangedInstruction) {
  BundleSection section = ScaleSection(1);
  ASSERT_EQ(Load(section), KILN_STATUS_OK) << error_.message;
  std::vector<Digest> found;
  ASSERT_EQ(Selftest(modules_, KILN_SELFTEST_COMPUTE, &found, &error_),
            KILN_STATUS_OK)
      << error_.message;
  ASSERT_EQ(found.size(), 1u);
  // The kernels by hand, on the inputs that the format defines.
  const uint32_t m = kiln_golden_tokens(1, kCapacity);
  std::vector<float> out(m * kWidth);
  for (uint32_t i = 0; i < out.size(); ++i) {
    const uint32_t bits =
        (static_cast<uint32_t>(kiln_golden_random(0, i)) & 0x807fffffu) |
        0x3f800000u;
    float x;
    std::memcpy(&x, &bits, 4);
    out[i] = 2 * x + 5 + 1;
  }
  EXPECT_EQ(found[0], Sha256({reinterpret_cast<const char*>(out.data()),
                              out.size() * sizeof(float)}));
  kiln_modules_unload(modules_, nullptr);
  kiln_bundle_close(bundle_, nullptr);
  modules_ = nullptr;
  bundle_ = nullptr;

  section.entries[0].golden = {{Interval{1, kCapacity}, found[0]}};
  std::string bytes = WriteBundle({section}).value();
  // Kernel add's 1.0f becomes 1.5f: the cubin still loads.
  for (const bool changed : {false, true}) {
    if (changed) {
      const size_t at =
          bytes.find(std::string("\0\0\x80\x3f", 4), bytes.find("\x7f"
                                                                "ELF"));
      ASSERT_NE(at, std::string::npos);
      bytes[at + 2] = '\xc0';
      RepairRoot(&bytes);
    }
    ASSERT_EQ(kiln_bundle_open_memory(bytes.data(), bytes.size(), nullptr,
                                      &bundle_, &error_),
              KILN_STATUS_OK);
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.context = context_;
    ASSERT_EQ(kiln_modules_load(bundle_, &options, &modules_, &error_),
              KILN_STATUS_OK)
        << error_.message;
    EXPECT_EQ(Selftest(modules_, 0, &found, &error_),
              changed ? KILN_STATUS_SELFTEST_MISMATCH : KILN_STATUS_OK)
        << error_.message;
    kiln_modules_unload(modules_, nullptr);
    kiln_bundle_close(bundle_, nullptr);
    modules_ = nullptr;
    bundle_ = nullptr;
  }
}

// Many entries on many streams, each with its own buffers and arena, every m of
// the capacity; programs are all they share.
TEST_F(RuntimeGpuTest, StreamsDoNotDisturbEachOther) {
  constexpr size_t kStreams = 8;
  ASSERT_EQ(Load(ScaleSection(kStreams)), KILN_STATUS_OK) << error_.message;

  struct Lane {
    CUstream_st* stream = nullptr;
    DevicePointer x = 0;
    DevicePointer out = 0;
    DevicePointer arena = 0;
    std::vector<float> host;
  };

  std::vector<Lane> lanes(kStreams);
  const size_t bytes = sizeof(float) * kWidth * kCapacity;
  for (size_t l = 0; l < kStreams; ++l) {
    Lane& lane = lanes[l];
    ASSERT_EQ(cuda_.stream_create(&lane.stream, 1), 0);
    ASSERT_EQ(cuda_.alloc(&lane.x, bytes), 0);
    ASSERT_EQ(cuda_.alloc(&lane.out, bytes * kCapacity), 0);
    ASSERT_EQ(cuda_.alloc(&lane.arena, 2 * bytes), 0);
    for (size_t i = 0; i < kWidth * kCapacity; ++i) {
      lane.host.push_back(static_cast<float>((i * 7 + l * 131) % 1009));
    }
    ASSERT_EQ(cuda_.upload(lane.x, lane.host.data(), bytes), 0);
  }
  for (uint32_t m = 1; m <= kCapacity; ++m) {
    for (size_t l = 0; l < kStreams; ++l) {
      const kiln_entry_t* entry = nullptr;
      const std::string name = "scale" + std::to_string(1000 + l);
      ASSERT_EQ(kiln_entry_find(modules_, name.c_str(), m, &entry, &error_),
                KILN_STATUS_OK);
      const DevicePointer params[2] = {lanes[l].x,
                                       lanes[l].out + (m - 1) * bytes};
      ASSERT_EQ(kiln_launch(modules_, entry, m, params, sizeof(params),
                            reinterpret_cast<void*>(lanes[l].arena), 2 * bytes,
                            lanes[l].stream, &error_),
                KILN_STATUS_OK)
          << error_.message;
    }
  }
  std::vector<float> out(kWidth * kCapacity);
  for (Lane& lane : lanes) {
    ASSERT_EQ(cuda_.stream_synchronize(lane.stream), 0);
    for (uint32_t m = 1; m <= kCapacity; ++m) {
      ASSERT_EQ(cuda_.download(out.data(), lane.out + (m - 1) * bytes,
                               sizeof(float) * kWidth * m),
                0);
      for (size_t i = 0; i < kWidth * m; ++i) {
        ASSERT_EQ(out[i], 2 * lane.host[i] + 6) << m;
      }
    }
    for (const DevicePointer p : {lane.x, lane.out, lane.arena}) cuda_.free(p);
    cuda_.stream_destroy(lane.stream);
  }
}

TEST_F(RuntimeGpuTest, AnotherDeviceWorksWhileThisOneIsCurrent) {
  int other = 0;
  CUctx_st* second = nullptr;
  if (cuda_.device_get(&other, 1) != 0) GTEST_SKIP() << "one device only";
  ASSERT_EQ(cuda_.retain(&second, other), 0);
  bundle_ = OpenTiny({ScaleSection(1)});
  kiln_modules_t* modules[2] = {};
  CUctx_st* contexts[2] = {context_, second};
  for (int d = 0; d < 2; ++d) {
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.context = contexts[d];
    ASSERT_EQ(kiln_modules_load(bundle_, &options, &modules[d], &error_),
              KILN_STATUS_OK)
        << error_.message;
  }
  // Buffers and stream of the second device; the first one stays current.
  const size_t bytes = sizeof(float) * kWidth * kCapacity;
  DevicePointer memory[3] = {};
  CUstream_st* stream = nullptr;
  ASSERT_EQ(cuda_.set_current(second), 0);
  ASSERT_EQ(cuda_.stream_create(&stream, 1), 0);
  for (DevicePointer& piece : memory) {
    ASSERT_EQ(cuda_.alloc(&piece, 2 * bytes), 0);
  }
  std::vector<float> x(kWidth * kCapacity, 3.0f);
  ASSERT_EQ(cuda_.upload(memory[0], x.data(), bytes), 0);
  ASSERT_EQ(cuda_.set_current(context_), 0);
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules[1], "scale1000", 5, &entry, &error_),
            KILN_STATUS_OK);
  EXPECT_EQ(kiln_launch(modules[1], entry, 5, memory, 2 * sizeof(memory[0]),
                        reinterpret_cast<void*>(memory[2]), 2 * bytes, stream,
                        &error_),
            KILN_STATUS_OK)
      << error_.message;
  CUctx_st* current = nullptr;
  ASSERT_EQ(cuda_.get_current(&current), 0);
  EXPECT_EQ(current, context_);
  ASSERT_EQ(cuda_.set_current(second), 0);
  ASSERT_EQ(cuda_.stream_synchronize(stream), 0);
  std::vector<float> out(5 * kWidth);
  ASSERT_EQ(cuda_.download(out.data(), memory[1], out.size() * 4), 0);
  for (const float value : out) EXPECT_EQ(value, 12.0f);
  for (const DevicePointer piece : memory) cuda_.free(piece);
  cuda_.stream_destroy(stream);
  ASSERT_EQ(cuda_.set_current(context_), 0);
  for (kiln_modules_t* loaded : modules) kiln_modules_unload(loaded, nullptr);
  cuda_.release(other);
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

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q *
                                    static_cast<double>(values.size() - 1))];
}

// Into gtest's report, from which tools/runtime_receipt.py makes a receipt.
void Record(const char* key, double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  ::testing::Test::RecordProperty(key, text);
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
  std::vector<double> roots;
  std::vector<double> ratios;
  for (int round = 0; round < 15; ++round) {
    Clock::time_point start = Clock::now();
    ASSERT_EQ(kiln_bundle_open_memory(bytes.data(), bytes.size(), nullptr,
                                      &bundle_, &error_),
              KILN_STATUS_OK);
    opens.push_back(Seconds(start));
    const Clock::time_point hashing = Clock::now();
    uint8_t root[KILN_ROOT_BYTES];
    kiln_bundle_root(bytes.data(), bytes.size(), root);
    roots.push_back(Seconds(hashing));
    const double pause = Seconds(hashing);
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.context = context_;
    ASSERT_EQ(kiln_modules_load(bundle_, &options, &modules_, &error_),
              KILN_STATUS_OK)
        << error_.message;
    ours.push_back(Seconds(start) - pause);
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
    ratios.push_back(ours.back() / raw.back());
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
    if (round < 14) {
      kiln_modules_unload(modules_, nullptr);
      kiln_bundle_close(bundle_, nullptr);
    }
  }
  std::printf(
      "open + verify + load of %d programs (%zu bytes): %.2f ms; raw driver "
      "calls %.2f ms; ratio of medians %.3f, of each round %.3f (quartiles "
      "%.3f..%.3f)\n",
      kPrograms, bytes.size(), Median(ours) * 1e3, Median(raw) * 1e3,
      Median(ours) / Median(raw), Median(ratios), Quantile(ratios, 0.25),
      Quantile(ratios, 0.75));
  std::printf(
      "of it open + verify: %.2f ms, of which hashing: %.2f ms; preflight's "
      "driver calls, made raw: %.2f ms\n",
      Median(opens) * 1e3, Median(roots) * 1e3, Median(preflights) * 1e3);
  EXPECT_LT(Median(ours), 2 * Median(raw) + 0.02);
  char device_name[128] = {};
  int version = 0;
  ASSERT_EQ(cuda_.name(device_name, sizeof(device_name) - 1, device_), 0);
  ASSERT_EQ(driver->driver_get_version(&version), 0);
  RecordProperty("device", device_name);
  RecordProperty("target", section.target.ToString());
  RecordProperty("driver_version", version);
  Record("load_ms", Median(ours) * 1e3);
  Record("load_raw_ms", Median(raw) * 1e3);
  Record("load_over_raw", Median(ratios));
  Record("open_ms", Median(opens) * 1e3);
  Record("root_ms", Median(roots) * 1e3);

  const kiln_entry_t* entry = nullptr;
  constexpr int kFinds = 100000;
  int failures = 0;
  std::vector<double> finds;
  for (int round = 0; round < 11; ++round) {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kFinds; ++i) {
      failures += kiln_entry_find(modules_, "scale1200",
                                  static_cast<uint64_t>(i % 64 + 1), &entry,
                                  nullptr) != KILN_STATUS_OK;
    }
    finds.push_back(Seconds(begin) / kFinds * 1e9);
  }
  ASSERT_EQ(failures, 0) << "a refusal is not what is timed here";
  std::printf("find: %.1f ns (quartiles %.1f..%.1f)\n", Median(finds),
              Quantile(finds, 0.25), Quantile(finds, 0.75));
  Record("find_ns", Median(finds));

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
  // Three ways to enqueue the same two steps, and raw twice: how much two equal
  // things differ here. The order turns from block to block, since the first
  // one after a wait finds another queue than the last.
  size_t scale_bytes = 32;
  size_t add_bytes = 28;
  alignas(8) uint8_t scale_block[32] = {};
  alignas(8) uint8_t add_block[32] = {};
  std::memcpy(scale_block, &x, 8);
  std::memcpy(scale_block + 8, &scratch, 8);
  std::memcpy(scale_block + 16, &m, 4);
  std::memcpy(scale_block + 20, &n, 4);
  std::memcpy(scale_block + 24, &tag, 8);
  std::memcpy(add_block, &m, 4);
  std::memcpy(add_block + 8, &scratch, 8);
  std::memcpy(add_block + 16, &out, 8);
  std::memcpy(add_block + 24, &n, 4);
  const auto extra = [](void* block, size_t* size) {
    return std::array<void*, 5>{
        reinterpret_cast<void*>(runtime::kLaunchParamBufferPointer), block,
        reinterpret_cast<void*>(runtime::kLaunchParamBufferSize), size,
        reinterpret_cast<void*>(runtime::kLaunchParamEnd)};
  };
  std::array<void*, 5> scale_extra = extra(scale_block, &scale_bytes);
  std::array<void*, 5> add_extra = extra(add_block, &add_bytes);
  const auto raw_launch = [&] {
    failures += driver->launch_kernel(scale, 8, 1, 1, 128, 1, 1, 65536, stream_,
                                      scale_args, nullptr);
    failures += driver->launch_kernel(add, 12, 1, 1, 64, 1, 1, 0, stream_,
                                      add_args, nullptr);
  };
  const auto block_launch = [&] {
    failures += driver->launch_kernel(scale, 8, 1, 1, 128, 1, 1, 65536, stream_,
                                      nullptr, scale_extra.data());
    failures += driver->launch_kernel(add, 12, 1, 1, 64, 1, 1, 0, stream_,
                                      nullptr, add_extra.data());
  };
  const auto our_launch = [&] {
    failures += Launch(entry, 8) != KILN_STATUS_OK;
  };
  constexpr int kLaunches = 200;
  constexpr int kWays = 4;
  std::vector<double> times[kWays];
  const auto time_block = [&](int way) {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kLaunches; ++i) {
      if (way == 0) our_launch();
      if (way == 1 || way == 2) raw_launch();
      if (way == 3) block_launch();
    }
    times[way].push_back(Seconds(begin) / kLaunches * 1e9);
    ASSERT_EQ(cuda_.stream_synchronize(stream_), 0);
  };
  for (int block = 0; block < 400; ++block) {
    for (int i = 0; i < kWays; ++i) {
      const int turned = (i + block) % kWays;
      time_block(block / kWays % 2 == 0 ? turned : kWays - 1 - turned);
    }
  }
  ASSERT_EQ(failures, 0);
  const auto difference = [&](int a, int b) {
    std::vector<double> out_ns;
    for (size_t i = 0; i < times[a].size(); ++i) {
      out_ns.push_back(times[a][i] - times[b][i]);
    }
    return out_ns;
  };
  CUctx_st* current = nullptr;
  const Clock::time_point begin = Clock::now();
  for (int i = 0; i < 100000; ++i) driver->ctx_get_current(&current);
  const double get_current_ns = Seconds(begin) / 100000 * 1e9;
  std::printf("cuCtxGetCurrent, which every launch calls: %.1f ns\n",
              get_current_ns);
  Record("get_current_ns", get_current_ns);
  std::printf("kiln_launch of two steps: p50 %.0f ns; the same raw: %.0f ns\n",
              Median(times[0]), Median(times[1]));
  Record("launch_ns", Median(times[0]));
  Record("launch_raw_ns", Median(times[1]));
  for (const auto& [name, key, a, b] :
       {std::tuple{"kiln_launch - raw", "launch_minus_raw_ns", 0, 1},
        std::tuple{"raw - raw (control)", "raw_minus_raw_ns", 2, 1},
        std::tuple{"raw with a packed block - raw", "packed_minus_raw_ns", 3,
                   1}}) {
    const std::vector<double> ns = difference(a, b);
    Record(key, Median(ns));
    std::printf("%s: p50 %.0f ns (quartiles %.0f..%.0f), of p50s %.0f ns\n",
                name, Median(ns), Quantile(ns, 0.25), Quantile(ns, 0.75),
                Median(times[a]) - Median(times[b]));
  }
  EXPECT_LT(Median(times[0]), Median(times[1]) + 2e3);
  driver->module_unload(module);
}

}  // namespace
}  // namespace kiln
