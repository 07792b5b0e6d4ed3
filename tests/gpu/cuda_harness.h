// What the CUDA kernel harnesses share: NVRTC and the driver opened at run
// time, guarded device memory, seeded problems, the oracle, graph timing.

#ifndef KILN_TESTS_GPU_CUDA_HARNESS_H_
#define KILN_TESTS_GPU_CUDA_HARNESS_H_

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/half.h"
#include "device/platform.h"
#include "templates/fused_moe/reference.h"

namespace kiln::gpu {

using kd::u16;
using kd::u32;
using u64 = uint64_t;

[[noreturn]] inline void Die(const std::string& text) {
  std::fprintf(stderr, "error: %s\n", text.c_str());
  std::exit(2);
}

inline u64 CeilDiv(u64 a, u64 b) { return (a + b - 1) / b; }

// SplitMix64.
class Random {
 public:
  explicit Random(u64 seed) : state_(seed) {}

  u64 Next() {
    u64 z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  u32 Below(u32 n) { return static_cast<u32>(Next() % n); }

  float Uniform() {  // [0, 1)
    return static_cast<float>(Next() >> 40) * 0x1p-24f;
  }

  float Normal() {
    const float r = std::sqrt(-2.0f * std::log(1.0f - Uniform()));
    return r * std::cos(6.2831853f * Uniform());
  }

 private:
  u64 state_;
};

// ---- NVRTC and the driver, opened at run time ------------------------------

struct Nvrtc {
  using Program = void*;
  int (*version)(int*, int*);
  int (*create)(Program*, const char*, const char*, int, const char* const*,
                const char* const*);
  int (*compile)(Program, int, const char* const*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*destroy)(Program*);
};

template <typename F>
void Resolve(void* library, const char* name, F* function) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) Die(std::string(name) + " is missing");
  std::memcpy(function, &symbol, sizeof(symbol));
}

inline Nvrtc OpenNvrtc(const std::string& path) {
  void* library = nullptr;
  std::vector<std::string> names = {"libnvrtc.so.13", "libnvrtc.so.12",
                                    "libnvrtc.so",
                                    "/usr/local/cuda/lib64/libnvrtc.so"};
  if (!path.empty()) names = {path};
  for (const std::string& name : names) {
    library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
  }
  if (library == nullptr) Die("NVRTC not found; give --nvrtc FILE");
  Nvrtc n;
  Resolve(library, "nvrtcVersion", &n.version);
  Resolve(library, "nvrtcCreateProgram", &n.create);
  Resolve(library, "nvrtcCompileProgram", &n.compile);
  Resolve(library, "nvrtcGetCUBINSize", &n.cubin_size);
  Resolve(library, "nvrtcGetCUBIN", &n.cubin);
  Resolve(library, "nvrtcGetProgramLogSize", &n.log_size);
  Resolve(library, "nvrtcGetProgramLog", &n.log);
  Resolve(library, "nvrtcDestroyProgram", &n.destroy);
  return n;
}

using Address = unsigned long long;
using Handle = void*;

// CUlaunchAttribute and CUlaunchConfig of cuda.h.
struct LaunchAttribute {
  static constexpr int kProgrammaticStreamSerialization = 6;
  int id;
  int pad;

  union {
    int value;
    char bytes[64];
  };
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  int (*init)(unsigned);
  int (*device_get)(int*, int);
  int (*device_name)(char*, int, int);
  int (*device_attribute)(int*, int, int);
  int (*retain)(Handle*, int);
  int (*set_current)(Handle);
  int (*alloc)(Address*, size_t);
  int (*release)(Address);
  int (*to_device)(Address, const void*, size_t);
  int (*to_host)(void*, Address, size_t);
  int (*copy)(Address, Address, size_t);
  int (*fill)(Address, unsigned char, size_t);
  int (*synchronize)();
  int (*module_load)(Handle*, const void*);
  int (*module_unload)(Handle);
  int (*function)(Handle*, Handle, const char*);
  int (*function_get)(int*, int, Handle);
  int (*function_set)(Handle, int, int);
  int (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned,
                unsigned, unsigned, Handle, void**, void**);
  int (*launch_ex)(const LaunchConfig*, Handle, void**, void**);
  int (*active_clusters)(int*, Handle, const LaunchConfig*);
  int (*stream_create)(Handle*, unsigned);
  int (*stream_synchronize)(Handle);
  int (*begin_capture)(Handle, int);
  int (*end_capture)(Handle, Handle*);
  int (*instantiate)(Handle*, Handle, unsigned long long);
  int (*graph_launch)(Handle, Handle);
  int (*graph_exec_destroy)(Handle);
  int (*graph_destroy)(Handle);
  int (*event_create)(Handle*, unsigned);
  int (*event_record)(Handle, Handle);
  int (*event_synchronize)(Handle);
  int (*event_elapsed)(float*, Handle, Handle);
  int (*error_name)(int, const char**);
};

inline Driver OpenDriver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    std::fprintf(stderr, "skipped: libcuda.so.1 not found, no NVIDIA driver\n");
    std::exit(77);  // ctest counts it as skipped
  }
  Driver d;
  Resolve(library, "cuInit", &d.init);
  Resolve(library, "cuDeviceGet", &d.device_get);
  Resolve(library, "cuDeviceGetName", &d.device_name);
  Resolve(library, "cuDeviceGetAttribute", &d.device_attribute);
  Resolve(library, "cuDevicePrimaryCtxRetain", &d.retain);
  Resolve(library, "cuCtxSetCurrent", &d.set_current);
  Resolve(library, "cuMemAlloc_v2", &d.alloc);
  Resolve(library, "cuMemFree_v2", &d.release);
  Resolve(library, "cuMemcpyHtoD_v2", &d.to_device);
  Resolve(library, "cuMemcpyDtoH_v2", &d.to_host);
  Resolve(library, "cuMemcpyDtoD_v2", &d.copy);
  Resolve(library, "cuMemsetD8_v2", &d.fill);
  Resolve(library, "cuCtxSynchronize", &d.synchronize);
  Resolve(library, "cuModuleLoadData", &d.module_load);
  Resolve(library, "cuModuleUnload", &d.module_unload);
  Resolve(library, "cuModuleGetFunction", &d.function);
  Resolve(library, "cuFuncGetAttribute", &d.function_get);
  Resolve(library, "cuFuncSetAttribute", &d.function_set);
  Resolve(library, "cuLaunchKernel", &d.launch);
  Resolve(library, "cuLaunchKernelEx", &d.launch_ex);
  Resolve(library, "cuOccupancyMaxActiveClusters", &d.active_clusters);
  Resolve(library, "cuStreamCreate", &d.stream_create);
  Resolve(library, "cuStreamSynchronize", &d.stream_synchronize);
  Resolve(library, "cuStreamBeginCapture_v2", &d.begin_capture);
  Resolve(library, "cuStreamEndCapture", &d.end_capture);
  Resolve(library, "cuGraphInstantiateWithFlags", &d.instantiate);
  Resolve(library, "cuGraphLaunch", &d.graph_launch);
  Resolve(library, "cuGraphExecDestroy", &d.graph_exec_destroy);
  Resolve(library, "cuGraphDestroy", &d.graph_destroy);
  Resolve(library, "cuEventCreate", &d.event_create);
  Resolve(library, "cuEventRecord", &d.event_record);
  Resolve(library, "cuEventSynchronize", &d.event_synchronize);
  Resolve(library, "cuEventElapsedTime", &d.event_elapsed);
  Resolve(library, "cuGetErrorName", &d.error_name);
  return d;
}

inline Driver driver;  // filled once by main before any use

inline void Check(int result, const char* what) {
  if (result == 0) return;
  const char* name = nullptr;
  driver.error_name(result, &name);
  Die(std::string(what) + ": " + (name == nullptr ? "unknown" : name));
}

// Device memory with a poisoned red zone on both sides.
class Buffer {
 public:
  static constexpr size_t kRed = 4096;
  static constexpr unsigned char kRedByte = 0xA5;

  explicit Buffer(size_t bytes) : bytes_(bytes) {
    Check(driver.alloc(&base_, bytes + 2 * kRed), "cuMemAlloc");
    Check(driver.fill(base_, kRedByte, bytes + 2 * kRed), "cuMemsetD8");
    Poison();
  }

  template <typename T>
  explicit Buffer(const std::vector<T>& host)
      : Buffer(host.size() * sizeof(T)) {
    Check(driver.to_device(address(), host.data(), bytes_), "cuMemcpyHtoD");
  }

  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  ~Buffer() { driver.release(base_); }

  Address address() const { return base_ + kRed; }

  size_t bytes() const { return bytes_; }

  void Poison() { Check(driver.fill(address(), 0xFF, bytes_), "cuMemsetD8"); }

  bool RedZonesIntact() const {
    std::vector<unsigned char> red(2 * kRed);
    Check(driver.to_host(red.data(), base_, kRed), "cuMemcpyDtoH");
    Check(driver.to_host(red.data() + kRed, address() + bytes_, kRed),
          "cuMemcpyDtoH");
    return std::all_of(red.begin(), red.end(),
                       [](unsigned char b) { return b == kRedByte; });
  }

 private:
  Address base_ = 0;
  size_t bytes_;
};

// Cubin of `text` for `arch`; dies with the compiler's log.
inline std::string CompileCubin(
    const Nvrtc& nvrtc, const std::string& arch, const std::string& name,
    const std::string& text,
    const std::vector<std::pair<std::string, std::string>>& headers) {
  std::vector<const char*> names, texts;
  for (const auto& [header, content] : headers) {
    names.push_back(header.c_str());
    texts.push_back(content.c_str());
  }
  Nvrtc::Program program = nullptr;
  if (nvrtc.create(&program, text.c_str(), name.c_str(),
                   static_cast<int>(texts.size()), texts.data(),
                   names.data()) != 0) {
    Die("nvrtcCreateProgram failed");
  }
  const std::string architecture = "--gpu-architecture=" + arch;
  // As Kiln compiles: see NvrtcFixedOptions.
  const char* options[] = {architecture.c_str(), "--std=c++20", "--fmad=false"};
  const int result = nvrtc.compile(program, 3, options);
  size_t bytes = 0;
  if (result != 0) {
    nvrtc.log_size(program, &bytes);
    std::string log(bytes, '\0');
    nvrtc.log(program, log.data());
    Die("compile failed:\n" + text.substr(0, 700) + "\n" + log);
  }
  nvrtc.cubin_size(program, &bytes);
  std::string cubin(bytes, '\0');
  nvrtc.cubin(program, cubin.data());
  nvrtc.destroy(&program);
  return cubin;
}

// Runs fn(0..count-1) on `threads` threads.
template <typename Fn>
void ParallelFor(size_t count, int threads, Fn fn) {
  std::atomic<size_t> next{0};
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&] {
      for (size_t i = next++; i < count; i = next++) fn(i);
    });
  }
  for (std::thread& worker : workers) worker.join();
}

// Brings up the driver and its first device; prints what it is.
struct Device {
  std::string arch;  // "sm_90a"
  int processors = 0, shared_max = 0;
};

inline Device OpenDevice(const Nvrtc& nvrtc) {
  driver = OpenDriver();
  Check(driver.init(0), "cuInit");
  Device d;
  int device = 0, major = 0, minor = 0;
  char name[128] = {};
  Handle context = nullptr;
  Check(driver.device_get(&device, 0), "cuDeviceGet");
  Check(driver.device_name(name, sizeof(name), device), "cuDeviceGetName");
  Check(driver.device_attribute(&major, 75, device), "attribute");
  Check(driver.device_attribute(&minor, 76, device), "attribute");
  Check(driver.device_attribute(&d.processors, 16, device), "attribute");
  Check(driver.device_attribute(&d.shared_max, 97, device), "attribute");
  Check(driver.retain(&context, device), "cuDevicePrimaryCtxRetain");
  Check(driver.set_current(context), "cuCtxSetCurrent");
  d.arch = "sm_" + std::to_string(major * 10 + minor);
  if (major >= 9) d.arch += "a";
  int nvrtc_major = 0, nvrtc_minor = 0;
  nvrtc.version(&nvrtc_major, &nvrtc_minor);
  std::printf("%s, %s, %d SMs, %d B of shared memory, NVRTC %d.%d\n", name,
              d.arch.c_str(), d.processors, d.shared_max, nvrtc_major,
              nvrtc_minor);
  return d;
}

// ---- what is run -----------------------------------------------------------

enum class Routing { kUniform, kInactive, kOneExpert, kDuplicates };

struct Problem {
  std::string name;
  u32 hidden = 256, inter = 256, experts = 8, top_k = 2;
  int codebook = 1;
  std::array<int, 3> bits = {4, 4, 4};  // gate, up, down
  bool bf16 = true, id_i64 = false, shared = true;
  Routing routing = Routing::kUniform;
  std::vector<u32> tokens = {1, 5, 17, 100};
};

// ---- data ------------------------------------------------------------------

struct Data {
  std::vector<u16> x, w_gate, w_up, w_down;
  std::vector<u16> gate_suh, up_suh, rotations, down_svh;
  std::vector<int32_t> ids32;
  std::vector<int64_t> ids64;
  std::vector<float> topk_weights;
};

inline u16 Half(float v) { return kd::f32_to_f16(v); }

inline void FillRandom(Random* random, std::vector<u16>* words) {
  size_t i = 0;
  for (; i + 4 <= words->size(); i += 4) {
    const u64 bits = random->Next();
    std::memcpy(words->data() + i, &bits, 8);
  }
  for (; i < words->size(); ++i) (*words)[i] = static_cast<u16>(random->Next());
}

// One token's routes, appended.
inline void AppendIds(const Problem& p, Random* random,
                      std::vector<int64_t>* ids) {
  std::vector<u32> order(p.experts);
  for (u32 e = 0; e < p.experts; ++e) order[e] = e;
  const int64_t far = p.id_i64 ? (int64_t{1} << 32) + 1 : INT32_MAX;
  for (u32 j = 0; j < p.top_k; ++j) {
    const u32 left = p.experts - j % p.experts;
    std::swap(order[j % p.experts], order[j % p.experts + random->Below(left)]);
    int64_t id = order[j % p.experts];
    switch (p.routing) {
      case Routing::kUniform:
        break;
      case Routing::kInactive: {
        const int64_t odd[] = {-1, static_cast<int64_t>(p.experts), far,
                               INT32_MIN};
        if (random->Below(2) == 0) id = odd[random->Below(4)];
        break;
      }
      case Routing::kOneExpert:
        id = p.experts - 1;
        break;
      case Routing::kDuplicates:
        id = random->Below(2) == 0 ? 0 : id;
        break;
    }
    ids->push_back(id);
  }
}

inline Data MakeData(const Problem& p, u32 tokens, bool weights) {
  Random random(0x5EEDC0DEull + p.hidden * 31u + p.inter * 7u + p.experts);
  Data d;
  const size_t h = p.hidden, i = p.inter, e = p.experts;
  d.x.resize(tokens * h);
  for (u16& v : d.x) {
    const float value = random.Normal();
    if (p.bf16) {
      const u32 bits = kd::FloatBits(value);
      v = static_cast<u16>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    } else {
      v = Half(value);
    }
  }
  std::vector<int64_t> ids;
  for (u32 t = 0; t < tokens; ++t) AppendIds(p, &random, &ids);
  if (p.routing == Routing::kInactive) {
    // A token without any active route.
    std::fill_n(ids.begin() + p.top_k * (tokens / 2), p.top_k, -1);
  }
  if (p.id_i64) {
    d.ids64 = ids;
  } else {
    for (int64_t id : ids) d.ids32.push_back(static_cast<int32_t>(id));
  }
  for (size_t r = 0; r < ids.size(); ++r) {
    d.topk_weights.push_back(0.05f + random.Uniform());
  }
  const auto scales = [&random](size_t n, float scale, bool zeros) {
    std::vector<u16> v(n);
    for (u16& s : v) {
      const float size = scale * (0.5f + random.Uniform());
      s = Half(random.Below(2) == 0 ? size : -size);
      if (zeros && random.Below(64) == 0) s = 0;
    }
    return v;
  };
  const size_t tables = p.shared ? 1 : e;
  const float to_unit_h = 0.8f / std::sqrt(static_cast<float>(h));
  const float to_unit_i = 0.8f / std::sqrt(static_cast<float>(i));
  d.gate_suh = scales(tables * h, 1, false);
  d.up_suh = scales(tables * h, 1, false);
  d.down_svh = scales(tables * h, to_unit_i, true);
  for (size_t n = 0; n < e; ++n) {
    for (const float scale : {to_unit_h, to_unit_h, 1.0f}) {
      const std::vector<u16> part = scales(i, scale, scale != 1.0f);
      d.rotations.insert(d.rotations.end(), part.begin(), part.end());
    }
  }
  if (weights) {
    d.w_gate.resize(e * h * i / 16 * static_cast<size_t>(p.bits[0]));
    d.w_up.resize(e * h * i / 16 * static_cast<size_t>(p.bits[1]));
    d.w_down.resize(e * h * i / 16 * static_cast<size_t>(p.bits[2]));
    FillRandom(&random, &d.w_gate);
    FillRandom(&random, &d.w_up);
    FillRandom(&random, &d.w_down);
  }
  return d;
}

inline kiln::FusedMoeProblem HostProblem(const Problem& p, const Data& d,
                                         u32 tokens) {
  kiln::FusedMoeProblem h;
  h.tokens = tokens;
  h.hidden = p.hidden;
  h.intermediate = p.inter;
  h.experts = p.experts;
  h.top_k = p.top_k;
  h.codebook = p.codebook == 0   ? kiln::Codebook::k3Inst
               : p.codebook == 1 ? kiln::Codebook::kMcg
                                 : kiln::Codebook::kMul1;
  h.bits.gate = p.bits[0];
  h.bits.up = p.bits[1];
  h.bits.down = p.bits[2];
  h.shared_scales = p.shared;
  h.x_dtype = p.bf16 ? kiln::DType::kBf16 : kiln::DType::kF16;
  h.id_dtype = p.id_i64 ? kiln::DType::kI64 : kiln::DType::kI32;
  h.x = d.x.data();
  h.topk_ids = p.id_i64 ? static_cast<const void*>(d.ids64.data())
                        : static_cast<const void*>(d.ids32.data());
  h.topk_weights = d.topk_weights.data();
  h.w_gate = d.w_gate.data();
  h.w_up = d.w_up.data();
  h.w_down = d.w_down.data();
  h.gate_suh = d.gate_suh.data();
  h.up_suh = d.up_suh.data();
  h.rotations = d.rotations.data();
  h.down_svh = d.down_svh.data();
  return h;
}

struct DeviceData {
  DeviceData(const Problem& p, const Data& d)
      : x(d.x),
        weights(d.topk_weights),
        gate_suh(d.gate_suh),
        up_suh(d.up_suh),
        rotations(d.rotations),
        down_svh(d.down_svh) {
    ids = p.id_i64 ? std::make_unique<Buffer>(d.ids64)
                   : std::make_unique<Buffer>(d.ids32);
    const auto matrix = [&p](const std::vector<u16>& host, int bits) {
      const size_t bytes = size_t{p.experts} * p.hidden * p.inter / 8 *
                           static_cast<size_t>(bits);
      return host.empty() ? std::make_unique<Buffer>(bytes)
                          : std::make_unique<Buffer>(host);
    };
    w_gate = matrix(d.w_gate, p.bits[0]);
    w_up = matrix(d.w_up, p.bits[1]);
    w_down = matrix(d.w_down, p.bits[2]);
  }

  Buffer x, weights, gate_suh, up_suh, rotations, down_svh;
  std::unique_ptr<Buffer> ids, w_gate, w_up, w_down;
};

struct Oracle {
  std::vector<int64_t> rows;
  std::vector<double> exact, staged;
};

inline Oracle MakeOracle(const Problem& p, const Data& d, u32 m, int threads) {
  Oracle o;
  const u64 work = u64{p.hidden} * p.inter;
  const u32 rows = work > 500000 ? 8 : 24;
  for (u32 i = 0; i < std::min(m, rows); ++i) {
    o.rows.push_back(m <= rows ? i : u64{i} * (m - 1) / (rows - 1));
  }
  if (p.routing == Routing::kInactive && m > rows) {
    o.rows.push_back(p.tokens.back() / 2 < m ? p.tokens.back() / 2 : 0);
  }
  o.exact.resize(o.rows.size() * p.hidden);
  o.staged.resize(o.rows.size() * p.hidden);
  const kiln::FusedMoeProblem h = HostProblem(p, d, m);
  kiln::FusedMoeReferenceRows(h, o.rows, kiln::ReferenceMode::kFloat64,
                              o.exact.data(), threads);
  kiln::FusedMoeReferenceRows(h, o.rows, kiln::ReferenceMode::kStaged,
                              o.staged.data(), threads);
  return o;
}

// Relative Frobenius error of the worst row; infinite on NaN, or where the
// reference is zero and the result is not.
inline double WorstError(const Oracle& o, const std::vector<double>& want,
                         const std::vector<float>& out, u32 hidden) {
  double worst = 0;
  for (size_t i = 0; i < o.rows.size(); ++i) {
    double error = 0, size = 0;
    for (u32 c = 0; c < hidden; ++c) {
      const double got = out[static_cast<size_t>(o.rows[i]) * hidden + c];
      const double ref = want[i * hidden + c];
      error += (got - ref) * (got - ref);
      size += ref * ref;
    }
    const double relative =
        size > 0 ? std::sqrt(error / size) : (error == 0 ? 0 : INFINITY);
    worst = std::isnan(relative) ? INFINITY : std::max(worst, relative);
  }
  return worst;
}

inline double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

// Runs `record` under capture and returns microseconds of one replay: median.
template <typename Record>
double TimeGraph(Handle stream, int replays, Record record) {
  Handle graph = nullptr, exec = nullptr, start = nullptr, stop = nullptr;
  Check(driver.begin_capture(stream, 0), "cuStreamBeginCapture");
  record();
  Check(driver.end_capture(stream, &graph), "cuStreamEndCapture");
  Check(driver.instantiate(&exec, graph, 0), "cuGraphInstantiate");
  Check(driver.event_create(&start, 0), "cuEventCreate");
  Check(driver.event_create(&stop, 0), "cuEventCreate");
  std::vector<double> times;
  for (int i = 0; i < replays + 3; ++i) {
    Check(driver.event_record(start, stream), "cuEventRecord");
    Check(driver.graph_launch(exec, stream), "cuGraphLaunch");
    Check(driver.event_record(stop, stream), "cuEventRecord");
    Check(driver.event_synchronize(stop), "cuEventSynchronize");
    float ms = 0;
    Check(driver.event_elapsed(&ms, start, stop), "cuEventElapsedTime");
    if (i >= 3) times.push_back(ms * 1e3);
  }
  driver.graph_exec_destroy(exec);
  driver.graph_destroy(graph);
  return Median(times);
}

// Distinct layers whose reuse distance exceeds the L2 by far, each with its own
// routing.
struct Layers {
  Layers(const Problem& p, u32 most, u32 layers) : count(layers) {
    Data d = MakeData(p, most, true);
    for (u32 layer = 0; layer < count; ++layer) {
      Random random(0x5EEDC0DEull + layer);
      std::vector<int64_t> wide;
      for (u32 t = 0; t < most; ++t) AppendIds(p, &random, &wide);
      d.ids32.assign(wide.begin(), wide.end());
      ids.push_back(d.ids32);
      data.push_back(std::make_unique<DeviceData>(p, d));
      // Later layers copy their weights on the device.
      for (std::vector<u16>* w : {&d.w_gate, &d.w_up, &d.w_down}) w->clear();
      if (layer > 0) {
        const DeviceData& first = *data.front();
        const DeviceData& copy = *data.back();
        for (const auto& [to, from] :
             {std::pair(copy.w_gate.get(), first.w_gate.get()),
              std::pair(copy.w_up.get(), first.w_up.get()),
              std::pair(copy.w_down.get(), first.w_down.get())}) {
          Check(driver.copy(to->address(), from->address(), from->bytes()),
                "cuMemcpyDtoD");
        }
      }
    }
    Check(driver.stream_create(&stream, 1), "cuStreamCreate");
  }

  // Mean number of experts that the first m tokens of a layer use.
  double ActiveExperts(const Problem& p, u32 m) const {
    double active = 0;
    for (const std::vector<int32_t>& list : ids) {
      active += static_cast<double>(
          std::set<int32_t>(list.begin(), list.begin() + m * p.top_k).size());
    }
    return active / count;
  }

  u32 count;
  std::vector<std::unique_ptr<DeviceData>> data;
  std::vector<std::vector<int32_t>> ids;
  Handle stream = nullptr;
};

}  // namespace kiln::gpu

#endif  // KILN_TESTS_GPU_CUDA_HARNESS_H_
