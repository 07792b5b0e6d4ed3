// Correctness and speed of templates/fused_moe/cuda.cu on a GPU, without the
// planner, the cache or the runtime: needs the templates folder, NVRTC and a
// driver. Compares with templates/fused_moe/reference.h; runs every case twice
// on poisoned memory; demands bit-equal results from axes that promise them.
//
//   cuda_kernel_harness [--templates DIR] [--nvrtc FILE] [--quick]
//       [--self-check | --compile-only ARCH | --bench-only | --no-bench]
//       [--filter TEXT] [--threads N] [--bench-tokens M,M,...] [--sweep]
//       [--codebook 0|1|2] [--bits 1..8]
//
// --self-check needs no GPU: it holds the fragment decoder against trellis.h
// and the mma, ldmatrix and movmatrix layouts that the kernels assume against
// each other. --compile-only compiles every program of the suite for ARCH.
// --sweep times both products over many axes, for calibrating the cost model
// of templates/fused_moe/template_cuda.cc. --codebook and --bits are for
// timing; the cases cover all of them.
// Exit status: 0 all passed, 1 a case failed, 2 wrong use or missing library.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/fragment.h"
#include "device/half.h"
#include "device/trellis.h"
#include "templates/fused_moe/reference.h"
#include "tests/gpu/cuda_harness.h"

namespace kiln::gpu {
namespace {

// Layers of a timed graph.
constexpr u32 kLayers = 12;

struct Axes {
  u32 tokens = 16, channels = 128, k_tile = 64, warps = 4, stages = 4;
  u32 ctas = 1;
  u32 sum = 0;
  auto operator<=>(const Axes&) const = default;
};

// A candidate: axes of both products (which share the token tile) and slices.
struct Choice {
  Axes fc1, fc2;
  u32 slices1 = 1, slices2 = 1;
};

std::string Text(const Axes& a) {
  return "t" + std::to_string(a.tokens) + ",c" + std::to_string(a.channels) +
         ",k" + std::to_string(a.k_tile) + ",w" + std::to_string(a.warps) +
         ",s" + std::to_string(a.stages) + ",b" + std::to_string(a.ctas) +
         (a.sum == 0 ? "" : ",sum" + std::to_string(a.sum));
}

std::string Text(const Choice& c) {
  std::string text = Text(c.fc1);
  if (c.fc2 != c.fc1) text += "+" + Text(c.fc2);
  return text + ",split" + std::to_string(c.slices1) + "/" +
         std::to_string(c.slices2);
}

u64 SharedBytes(const Axes& a, int bits) {
  return u64{a.stages} *
         (u64{a.k_tile} * a.channels * static_cast<u32>(bits) / 8 +
          u64{a.tokens} * (a.k_tile + 8) * 2);
}

// The constraints of README.md, "CUDA". smem_max: bytes a block may ask for.
bool IsLegal(const Problem& p, const Axes& a, u64 shared_bytes_max) {
  const int bits = *std::max_element(p.bits.begin(), p.bits.end());
  return p.inter % a.channels == 0 && p.hidden % a.channels == 0 &&
         a.channels >= 16 * a.warps &&
         a.channels / 16 / a.warps * (a.tokens / 8) * 4 <= 128 &&
         (a.sum == 0 || (p.codebook == 2 && a.tokens == 8)) &&
         SharedBytes(a, bits) <= shared_bytes_max;
}

std::string Prelude(const Problem& p, int part, const Axes* a) {
  std::ostringstream s;
  const auto define = [&s](const char* name, long long value) {
    s << "#define KILN_" << name << " " << value << "\n";
  };
  define("HIDDEN", p.hidden);
  define("INTER", p.inter);
  define("EXPERTS", p.experts);
  define("TOPK", p.top_k);
  define("CODEBOOK", p.codebook);
  define("BITS_GATE", p.bits[0]);
  define("BITS_UP", p.bits[1]);
  define("BITS_DOWN", p.bits[2]);
  define("X_BF16", p.bf16 ? 1 : 0);
  define("ID_I64", p.id_i64 ? 1 : 0);
  define("SHARED_SUH", p.shared ? 1 : 0);
  define("PART", part);
  if (a != nullptr) {
    define("TOKENS_TILE", a->tokens);
    define("CHANNELS_TILE", a->channels);
    define("K_TILE", a->k_tile);
    define("WARPS", a->warps);
    define("STAGES", a->stages);
    define("CTAS", a->ctas);
    define("SUM", a->sum);
  }
  return s.str();
}

// Appended to the template: decodes on the device what the host can check.
constexpr char kDecodeCheck[] = R"(
extern "C" __global__ void kiln_check_states(kd::u32* out) {
  const kd::u32 s = blockIdx.x * blockDim.x + threadIdx.x;
  kd::u32 low, high;
  kd::HashHalves<KILN_CODEBOOK, KILN_CODEBOOK == 2>(
      s << 16 | (s * 40503u + 7u & 0xFFFFu), &low, &high);
  out[s] = kd::HashValues<KILN_CODEBOOK>(high, low);
}
template <int K>
__device__ void CheckTile(const kd::u32* tiles, kd::u32* out) {
  const kd::u32* tile = tiles + blockIdx.x * 64;
  kd::u32 a[4];
  kd::DecodeFragment<KILN_CODEBOOK, K>(
      kd::LoadSpan<K>(tile, kd::FindLaneSpan<K>(threadIdx.x)), a);
  for (int i = 0; i < 4; ++i) {
    out[((K - 1) * gridDim.x + blockIdx.x) * 128 + threadIdx.x * 4 + i] = a[i];
  }
}
extern "C" __global__ void kiln_check_tiles(const kd::u32* tiles,
                                            kd::u32* out) {
  CheckTile<1>(tiles, out);
  CheckTile<2>(tiles, out);
  CheckTile<3>(tiles, out);
  CheckTile<4>(tiles, out);
  CheckTile<5>(tiles, out);
  CheckTile<6>(tiles, out);
  CheckTile<7>(tiles, out);
  CheckTile<8>(tiles, out);
}
)";

// ---- programs --------------------------------------------------------------

class Programs {
 public:
  Programs(const Nvrtc& nvrtc, std::string templates, std::string arch)
      : nvrtc_(nvrtc), arch_(std::move(arch)) {
    source_ = Read(templates + "/fused_moe/cuda.cu");
    for (const char* file :
         {"cuda/grouped.h", "cuda/mul1_affine.h", "cuda/warp.h",
          "device/activation.h", "device/fragment.h", "device/hadamard.h",
          "device/half.h", "device/platform.h", "device/trellis.h"}) {
      headers_.emplace_back(file, Read(templates + "/" + file));
    }
  }

  // Cubin of prelude + template + suffix; compiled once per prelude.
  const std::string& Get(const std::string& prelude,
                         const std::string& suffix = "") {
    const std::string key = prelude + suffix;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = cubins_.find(key);
      if (found != cubins_.end()) return found->second;
    }
    std::string cubin = Compile(prelude + source_ + suffix);
    const std::lock_guard<std::mutex> lock(mutex_);
    return cubins_.emplace(key, std::move(cubin)).first->second;
  }

  // Compiles all of them on `threads` threads.
  void Prepare(const std::vector<std::string>& preludes, int threads) {
    const std::set<std::string> unique(preludes.begin(), preludes.end());
    const std::vector<std::string> list(unique.begin(), unique.end());
    std::atomic<size_t> next{0};
    std::atomic<long long> busy_us{0};
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; ++t) {
      workers.emplace_back([&] {
        for (size_t i = next++; i < list.size(); i = next++) {
          const auto begin = std::chrono::steady_clock::now();
          Get(list[i]);
          busy_us += std::chrono::duration_cast<std::chrono::microseconds>(
                         std::chrono::steady_clock::now() - begin)
                         .count();
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
    const double wall =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
            .count();
    std::printf("compiled %zu programs for %s in %.1f s, %.0f ms each\n",
                list.size(), arch_.c_str(), wall,
                static_cast<double>(busy_us) / 1e3 /
                    static_cast<double>(std::max<size_t>(1, list.size())));
    std::fflush(stdout);
  }

 private:
  static std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) Die("cannot read " + path + "; give --templates DIR");
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

  std::string Compile(const std::string& text) const {
    return CompileCubin(nvrtc_, arch_, "fused_moe/cuda.cu", text, headers_);
  }

  Nvrtc nvrtc_;
  std::string arch_;
  std::string source_;
  std::vector<std::pair<std::string, std::string>> headers_;
  std::mutex mutex_;
  std::map<std::string, std::string> cubins_;
};

std::vector<std::string> PreludesOf(const Problem& p, const Choice& c) {
  std::vector<std::string> preludes = {Prelude(p, 0, nullptr)};
  if (c.fc1 == c.fc2) {
    preludes.push_back(Prelude(p, 1, &c.fc1));
  } else {
    preludes.push_back(Prelude(p, 2, &c.fc1));
    preludes.push_back(Prelude(p, 3, &c.fc2));
  }
  return preludes;
}

// Loaded once per cubin.
class Modules {
 public:
  explicit Modules(Programs* programs) : programs_(programs) {}

  ~Modules() { Clear(); }

  Handle Function(const std::string& prelude, const char* name,
                  const std::string& suffix = "") {
    Handle& module = modules_[prelude + suffix];
    if (module == nullptr) {
      Check(driver.module_load(&module, programs_->Get(prelude, suffix).data()),
            "cuModuleLoadData");
    }
    Handle function = nullptr;
    Check(driver.function(&function, module, name), name);
    return function;
  }

  void Clear() {
    for (auto& [key, module] : modules_) driver.module_unload(module);
    modules_.clear();
  }

 private:
  Programs* programs_;
  std::map<std::string, Handle> modules_;
};

// ---- the plan --------------------------------------------------------------

struct Term {
  u64 mul, add, div;

  u64 At(u64 m) const { return CeilDiv(mul * m + add, div); }
};

struct Step {
  std::string name;
  Handle function = nullptr;
  Term a, b;  // grid.x = min(a(m), b(m))
  u32 grid_y = 1;
  u32 threads = 0;
  u32 shared_bytes = 0;
  std::vector<int> args;  // indices of Plan::slot
};

// Sizes and steps of README.md, "CUDA".
class Plan {
 public:
  Plan(const Problem& p, const Choice& c, u32 capacity, Modules* modules)
      : p_(p), c_(c), capacity_(capacity), modules_(modules) {
    LayOut();
    AddSteps();
  }

  u64 arena_bytes() const { return arena_bytes_; }

  const std::vector<Step>& steps() const { return steps_; }

  // Launches step `index` for m tokens.
  void Launch(size_t index, const DeviceData& d, Address arena, Address out,
              u32 m, Handle stream) const {
    const Step& step = steps_[index];
    const u64 grid = std::min(step.a.At(m), step.b.At(m));
    if (grid == 0) return;
    std::array<Address, kSlots> pointers = {};
    std::array<u32, kSlots> words = {};
    FillSlots(d, arena, out, m, &pointers, &words);
    std::vector<void*> args;
    for (int slot : step.args) {
      const size_t s = static_cast<size_t>(slot);
      args.push_back(slot >= kTokens ? static_cast<void*>(&words[s])
                                     : static_cast<void*>(&pointers[s]));
    }
    Check(driver.launch(step.function, static_cast<unsigned>(grid), step.grid_y,
                        1, step.threads, 1, 1, step.shared_bytes, stream,
                        args.data(), nullptr),
          step.name.c_str());
  }

  void LaunchAll(const DeviceData& d, Address arena, Address out, u32 m,
                 Handle stream) const {
    for (size_t i = 0; i < steps_.size(); ++i) {
      Launch(i, d, arena, out, m, stream);
    }
  }

 private:
  // Argument slots: caller parameters, arena slices, then 4-byte values.
  enum Slot : int {
    kX,
    kIds,
    kWeights,
    kWGate,
    kWUp,
    kWDown,
    kGateSuh,
    kUpSuh,
    kRotations,
    kDownSvh,
    kOut,
    kTiles,
    kTotals,
    kRows,
    kPositions,
    kGateOperand,
    kUpOperand,
    kFc1,
    kActivated,
    kFc2,
    kNoCounts,
    kTokens,
    kSegments,
    kLength,
    kTile,
    kSlices1,
    kSlices2,
    kSlots
  };

  static constexpr int kFirstSlice = kTiles;

  void LayOut() {
    const u64 routes = u64{capacity_} * p_.top_k;
    const u64 t = c_.fc1.tokens;
    const u64 tiles = std::min(routes, (routes + p_.experts * (t - 1)) / t);
    const u64 operand_rows = p_.shared ? capacity_ : routes;
    const auto product = [&](u64 width, u32 slices) {
      return slices == 1 ? routes * width * 2 : routes * width * 4 * slices;
    };
    const u64 sizes[] = {tiles * 16,
                         16,
                         routes * 8,
                         routes * 4,
                         operand_rows * p_.hidden * 2,
                         operand_rows * p_.hidden * 2,
                         product(2 * u64{p_.inter}, c_.slices1),
                         routes * p_.inter * 2,
                         product(p_.hidden, c_.slices2)};
    for (u64 bytes : sizes) {
      offsets_.push_back(arena_bytes_);
      arena_bytes_ += CeilDiv(bytes, 256) * 256;
    }
  }

  void AddStep(std::string name, const std::string& prelude, const char* entry,
               Term a, Term b, u32 grid_y, u32 threads, u64 shared_bytes,
               std::vector<int> args) {
    Step step;
    step.name = std::move(name);
    step.function = modules_->Function(prelude, entry);
    step.a = a;
    step.b = b;
    step.grid_y = grid_y;
    step.threads = threads;
    step.shared_bytes = static_cast<u32>(shared_bytes);
    step.args = std::move(args);
    if (shared_bytes > 48 * 1024) {
      Check(
          driver.function_set(step.function, 8, static_cast<int>(shared_bytes)),
          "shared memory limit");
    }
    steps_.push_back(std::move(step));
  }

  void AddSteps() {
    const std::vector<std::string> preludes = PreludesOf(p_, c_);
    const std::string& support = preludes[0];
    const std::string& fc1 = preludes[1];
    const std::string& fc2 = preludes.back();
    const u64 h_blocks = p_.hidden / 128, i_blocks = p_.inter / 128;
    const u64 e = p_.experts, k = p_.top_k, t = c_.fc1.tokens;
    const auto only = [](Term term) { return std::pair(term, term); };
    if (p_.shared) {
      // Of the blocks that rotate, at most two for each of 132 SMs.
      const Term a = {h_blocks, 32, 32}, b = {0, 1 + 264, 1};
      AddStep("route", support, "kiln_moe_route", a, b, 1, 1024, 64 * e,
              {kIds, kNoCounts, kRows, kPositions, kTiles, kTotals, kX,
               kGateSuh, kUpSuh, kGateOperand, kUpOperand, kTokens, kSegments,
               kLength, kTile});
    } else {
      const auto [a, b] = only({0, 1, 1});
      AddStep("route", support, "kiln_moe_route", a, b, 1, 1024, 64 * e,
              {kIds, kNoCounts, kRows, kPositions, kTiles, kTotals, kTokens,
               kLength, kTile});
      const auto [c, d] = only({k * h_blocks, 0, 4});
      AddStep("rotate", support, "kiln_moe_rotate", c, d, 1, 128, 0,
              {kX, kGateSuh, kUpSuh, kRows, kTotals, kGateOperand, kUpOperand});
    }
    const auto tiles = [&](u64 blocks) {
      return std::pair(Term{k * blocks, 0, 1},
                       Term{k * blocks, blocks * e * (t - 1), t});
    };
    {
      const auto [a, b] = tiles(2 * p_.inter / c_.fc1.channels);
      AddStep("fc1", fc1, "kiln_moe_fc1", a, b, c_.slices1, c_.fc1.warps * 32,
              SharedBytes(c_.fc1, std::max(p_.bits[0], p_.bits[1])),
              {kGateOperand, kUpOperand, kWGate, kWUp, kRows, kTiles, kTotals,
               kFc1, kTokens});
    }
    {
      const auto [a, b] = only({k * i_blocks, 0, 4});
      AddStep(
          "activate", support, "kiln_moe_activate", a, b, 1, 128, 0,
          {kFc1, kRotations, kRows, kTotals, kActivated, kTokens, kSlices1});
    }
    {
      const auto [a, b] = tiles(p_.hidden / c_.fc2.channels);
      AddStep("fc2", fc2, "kiln_moe_fc2", a, b, c_.slices2, c_.fc2.warps * 32,
              SharedBytes(c_.fc2, p_.bits[2]),
              {kActivated, kWDown, kTiles, kTotals, kFc2, kTokens});
    }
    {
      const auto [a, b] = only({h_blocks, 0, 4});
      AddStep("combine", support, "kiln_moe_combine", a, b, 1, 128, 0,
              {kFc2, kDownSvh, kWeights, kPositions, kRows, kOut, kTokens,
               kSlices2});
    }
  }

  void FillSlots(const DeviceData& d, Address arena, Address out, u32 m,
                 std::array<Address, kSlots>* pointers,
                 std::array<u32, kSlots>* words) const {
    const Address caller[] = {d.x.address(),
                              d.ids->address(),
                              d.weights.address(),
                              d.w_gate->address(),
                              d.w_up->address(),
                              d.w_down->address(),
                              d.gate_suh.address(),
                              d.up_suh.address(),
                              d.rotations.address(),
                              d.down_svh.address(),
                              out};
    std::copy(std::begin(caller), std::end(caller), pointers->begin());
    for (size_t i = 0; i < offsets_.size(); ++i) {
      (*pointers)[kFirstSlice + i] = arena + offsets_[i];
    }
    (*pointers)[kNoCounts] = 0;
    (*words)[kTokens] = m;
    (*words)[kSegments] = 1;
    (*words)[kLength] = 0;
    (*words)[kTile] = c_.fc1.tokens;
    (*words)[kSlices1] = c_.slices1;
    (*words)[kSlices2] = c_.slices2;
  }

  Problem p_;
  Choice c_;
  u32 capacity_;
  Modules* modules_;
  u64 arena_bytes_ = 0;
  std::vector<u64> offsets_;
  std::vector<Step> steps_;
};

// ---- self check: no GPU ----------------------------------------------------

bool Fail(const std::string& what) {
  std::printf("FAIL %s\n", what.c_str());
  return false;
}

template <int CB, int K>
u32 ExpectedFragmentOf(const u32* tile, u32 lane, u32 reg) {
  // mma.m16n8k16 A: register 1 and 3 are rows + 8, 2 and 3 are depth + 8.
  const u32 n = lane / 4 + (reg % 2) * 8;
  const u32 k = lane % 4 * 2 + (reg / 2) * 8;
  u32 pair = 0;
  for (u32 i = 0; i < 2; ++i) {
    const u32 state = kd::Window<K>(tile, kd::ElementPosition(k + i, n));
    pair |= static_cast<u32>(kd::DecodeState<CB>(state)) << (16 * i);
  }
  return pair;
}

template <int CB, int K>
bool FragmentMatches(Random* random) {
  u32 tile[kd::kTileWords<8>];
  for (u32& word : tile) word = static_cast<u32>(random->Next());
  for (u32 lane = 0; lane < 32; ++lane) {
    u32 a[4];
    kd::DecodeFragment<CB, K>(kd::LoadSpan<K>(tile, kd::FindLaneSpan<K>(lane)),
                              a);
    for (u32 reg = 0; reg < 4; ++reg) {
      if (a[reg] != ExpectedFragmentOf<CB, K>(tile, lane, reg)) return false;
    }
  }
  return true;
}

template <int CB>
bool FragmentsMatch(Random* random) {
  for (int round = 0; round < 64; ++round) {
    if (!FragmentMatches<CB, 1>(random) || !FragmentMatches<CB, 2>(random) ||
        !FragmentMatches<CB, 3>(random) || !FragmentMatches<CB, 4>(random) ||
        !FragmentMatches<CB, 5>(random) || !FragmentMatches<CB, 6>(random) ||
        !FragmentMatches<CB, 7>(random) || !FragmentMatches<CB, 8>(random)) {
      return false;
    }
  }
  for (u32 s = 0; s < 65536; ++s) {
    const u32 other = (s * 40503u + 7u) & 0xFFFFu;
    u32 low, high, masked, same;
    kd::HashHalves<CB, false>(s << 16 | other, &low, &high);
    kd::HashHalves<CB, true>(s << 16 | other, &masked, &same);
    const u32 want = kd::DecodeState<CB>(s) |
                     static_cast<u32>(kd::DecodeState<CB>(other)) << 16;
    if (kd::HashValues<CB>(high, low) != want) return false;
    if (masked != low || same != high) return false;
  }
  return true;
}

// One warp's product of a 16-channel strip with 8 tokens over 32 k, moved
// through the layouts of ldmatrix, mma and movmatrix exactly as the kernels
// do, against the plain sum.
bool LayoutsAgree() {
  Random random(7);
  constexpr u32 kPitch = 32 + 8;
  std::vector<float> w(32 * 16), x(8 * kPitch);
  for (float& v : w) v = std::round(random.Normal() * 8);
  for (float& v : x) v = std::round(random.Normal() * 8);
  // ldmatrix.x4: lane l receives of matrix i row l/4, columns 2(l%4), +1;
  // the row addresses of matrix i are those of lanes 8i..8i+7.
  const auto loaded = [&x](u32 lane, u32 matrix, u32 half) {
    const u32 source = matrix * 8 + lane / 4;
    const u32 token = source % 8, column = source / 8 * 8;
    return x[token * kPitch + column + lane % 4 * 2 + half];
  };
  float sums[32][4] = {};
  for (u32 step = 0; step < 2; ++step) {
    // mma.m16n8k16: A as in ExpectedFragmentOf; B register r, half h of lane
    // l is depth 2(l%4) + 8r + h, column l/4; D register d of lane l is row
    // l/4 + 8(d/2), column 2(l%4) + d%2.
    float b[16][8];
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 r = 0; r < 2; ++r) {
        for (u32 h = 0; h < 2; ++h) {
          b[lane % 4 * 2 + 8 * r + h][lane / 4] = loaded(lane, step * 2 + r, h);
        }
      }
    }
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 d = 0; d < 4; ++d) {
        const u32 row = lane / 4 + d / 2 * 8, column = lane % 4 * 2 + d % 2;
        for (u32 k = 0; k < 16; ++k) {
          sums[lane][d] += w[(step * 16 + k) * 16 + row] * b[k][column];
        }
      }
    }
  }
  // movmatrix.trans: lane l, half h receives element (2(l%4) + h, l/4).
  float out[8][16];
  for (u32 lane = 0; lane < 32; ++lane) {
    for (u32 part = 0; part < 2; ++part) {
      for (u32 h = 0; h < 2; ++h) {
        const u32 row = lane % 4 * 2 + h, column = lane / 4;
        const float v = sums[row * 4 + column / 2][part * 2 + column % 2];
        out[lane / 4][part * 8 + lane % 4 * 2 + h] = v;
      }
    }
  }
  for (u32 t = 0; t < 8; ++t) {
    for (u32 n = 0; n < 16; ++n) {
      float want = 0;
      for (u32 k = 0; k < 32; ++k) want += w[k * 16 + n] * x[t * kPitch + k];
      if (out[t][n] != want) return false;
    }
  }
  return true;
}

// The launch rule of the products never gives fewer blocks than tiles exist,
// and the tile slice of the arena holds them.
bool TileBoundHolds() {
  Random random(11);
  for (int round = 0; round < 20000; ++round) {
    const u64 experts = 1 + random.Below(64);
    const u64 routes = 1 + random.Below(400);
    const u64 t = u64{8} << random.Below(5);
    const u64 blocks = 1 + random.Below(24);
    std::vector<u64> counts(experts);
    const u32 hot = 1 + random.Below(static_cast<u32>(experts));
    for (u64 r = 0; r < routes; ++r) ++counts[random.Below(hot)];
    u64 tiles = 0;
    for (u64 count : counts) tiles += CeilDiv(count, t);
    const u64 grid = std::min(
        routes * blocks, CeilDiv(blocks * (routes + experts * (t - 1)), t));
    const u64 slots = std::min(routes, (routes + experts * (t - 1)) / t);
    if (grid < tiles * blocks || slots < tiles) return false;
  }
  return true;
}

// Rows of an ldmatrix lie in different 16-byte bank groups.
bool BanksDiffer() {
  for (const u32 k_tile : {32u, 64u, 128u}) {
    std::set<u32> groups;
    for (u32 row = 0; row < 8; ++row) {
      groups.insert(row * (k_tile + 8) * 2 / 16 % 8);
    }
    if (groups.size() != 8) return false;
  }
  return true;
}

bool SelfCheck() {
  Random random(3);
  bool ok = true;
  if (!FragmentsMatch<0>(&random)) ok = Fail("host fragments, 3inst");
  if (!FragmentsMatch<1>(&random)) ok = Fail("host fragments, mcg");
  if (!FragmentsMatch<2>(&random)) ok = Fail("host fragments, mul1");
  if (!LayoutsAgree()) ok = Fail("mma layouts");
  if (!TileBoundHolds()) ok = Fail("tile bound");
  if (!BanksDiffer()) ok = Fail("operand banks");
  std::printf("self check: %s\n", ok ? "passed" : "FAILED");
  return ok;
}

// ---- decode on the device --------------------------------------------------

template <int CB, int K>
u64 TileErrors(const std::vector<u32>& tiles, const std::vector<u32>& out) {
  const size_t count = tiles.size() / 64;
  u64 errors = 0;
  for (size_t t = 0; t < count; ++t) {
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 reg = 0; reg < 4; ++reg) {
        const u32 got = out[((K - 1) * count + t) * 128 + lane * 4 + reg];
        const u32 want =
            ExpectedFragmentOf<CB, K>(tiles.data() + t * 64, lane, reg);
        errors += got != want ? 1 : 0;
      }
    }
  }
  return errors;
}

template <int CB>
u64 DecodeErrors(const std::vector<u32>& states, const std::vector<u32>& tiles,
                 const std::vector<u32>& out) {
  u64 errors = 0;
  for (u32 s = 0; s < 65536; ++s) {
    const u32 other = (s * 40503u + 7u) & 0xFFFFu;
    const u32 want = kd::DecodeState<CB>(s) |
                     static_cast<u32>(kd::DecodeState<CB>(other)) << 16;
    errors += states[s] != want ? 1 : 0;
  }
  return errors + TileErrors<CB, 1>(tiles, out) +
         TileErrors<CB, 2>(tiles, out) + TileErrors<CB, 3>(tiles, out) +
         TileErrors<CB, 4>(tiles, out) + TileErrors<CB, 5>(tiles, out) +
         TileErrors<CB, 6>(tiles, out) + TileErrors<CB, 7>(tiles, out) +
         TileErrors<CB, 8>(tiles, out);
}

bool CheckDecode(int codebook, Modules* modules) {
  constexpr u32 kTiles = 64;
  Problem p;
  p.codebook = codebook;
  const Axes axes;
  const std::string prelude = Prelude(p, 3, &axes);
  Random random(5);
  std::vector<u32> tiles(kTiles * 64);
  for (u32& word : tiles) word = static_cast<u32>(random.Next());
  const Buffer device_tiles(tiles);
  const Buffer states(65536 * 4), fragments(8 * kTiles * 128 * 4);
  Address tiles_at = device_tiles.address(), states_at = states.address(),
          fragments_at = fragments.address();
  void* state_args[] = {&states_at};
  Check(driver.launch(
            modules->Function(prelude, "kiln_check_states", kDecodeCheck), 256,
            1, 1, 256, 1, 1, 0, nullptr, state_args, nullptr),
        "kiln_check_states");
  void* tile_args[] = {&tiles_at, &fragments_at};
  Check(driver.launch(
            modules->Function(prelude, "kiln_check_tiles", kDecodeCheck),
            kTiles, 1, 1, 32, 1, 1, 0, nullptr, tile_args, nullptr),
        "kiln_check_tiles");
  Check(driver.synchronize(), "decode check");
  std::vector<u32> got_states(65536), got(8 * kTiles * 128);
  Check(driver.to_host(got_states.data(), states_at, states.bytes()), "copy");
  Check(driver.to_host(got.data(), fragments_at, fragments.bytes()), "copy");
  const u64 errors = codebook == 0   ? DecodeErrors<0>(got_states, tiles, got)
                     : codebook == 1 ? DecodeErrors<1>(got_states, tiles, got)
                                     : DecodeErrors<2>(got_states, tiles, got);
  std::printf("decode codebook %d: %s\n", codebook,
              errors == 0 ? "bit-exact" : "DIFFERS");
  return errors == 0;
}

// ---- correctness -----------------------------------------------------------

struct Tally {
  u64 passed = 0, failed = 0;
  double worst_exact = 0, worst_staged = 0;
};

constexpr double kExactMax = 2e-3;  // against float64 without rounding

// Against the staged rounding boundaries; biased sums leave one out.
double StagedMax(const Choice& c) { return c.fc1.sum == 0 ? 5e-4 : 1.5e-3; }

// What the bits of a result depend on beside the slices: of biased sums, which
// warps add up the operand.
u32 SumOrder(const Axes& a) { return a.sum == 0 ? 0 : a.warps; }

void RunProblem(const Problem& p, const std::vector<Choice>& choices,
                Modules* modules, int threads, Tally* tally) {
  const u32 capacity = p.tokens.back();
  const Data data = MakeData(p, capacity, true);
  const DeviceData device(p, data);
  std::map<u32, Oracle> oracles;
  for (u32 m : p.tokens) oracles[m] = MakeOracle(p, data, m, threads);
  // First result of each (m, slices, orders of sums): others must equal it bit
  // for bit.
  std::map<std::array<u32, 5>, std::pair<std::vector<float>, std::string>>
      classes;
  double worst_exact = 0, worst_staged = 0;
  u64 failed = 0, runs = 0;
  for (const Choice& choice : choices) {
    const Plan plan(p, choice, capacity, modules);
    Buffer arena(plan.arena_bytes());
    for (u32 m : p.tokens) {
      const size_t count = size_t{m} * p.hidden;
      std::vector<float> out(count), again(count);
      Buffer result(count * 4);
      std::string problem;
      for (std::vector<float>* to : {&out, &again}) {
        arena.Poison();
        result.Poison();
        plan.LaunchAll(device, arena.address(), result.address(), m, nullptr);
        Check(driver.synchronize(), (p.name + " " + Text(choice)).c_str());
        Check(driver.to_host(to->data(), result.address(), count * 4), "copy");
      }
      if (std::memcmp(out.data(), again.data(), count * 4) != 0) {
        problem += " second run differs;";
      }
      if (!arena.RedZonesIntact() || !result.RedZonesIntact()) {
        problem += " wrote outside its buffers;";
      }
      if (!std::all_of(out.begin(), out.end(),
                       [](float v) { return std::isfinite(v); })) {
        problem += " output not fully written;";
      }
      const Oracle& oracle = oracles[m];
      const double exact = WorstError(oracle, oracle.exact, out, p.hidden);
      const double staged = WorstError(oracle, oracle.staged, out, p.hidden);
      worst_exact = std::max(worst_exact, exact);
      worst_staged = std::max(worst_staged, staged);
      if (exact > kExactMax || staged > StagedMax(choice)) {
        char text[96];
        std::snprintf(text, sizeof(text), " error %.2e, staged %.2e;", exact,
                      staged);
        problem += text;
      }
      const std::array<u32, 5> key = {m, choice.slices1, choice.slices2,
                                      SumOrder(choice.fc1),
                                      SumOrder(choice.fc2)};
      const auto [first, fresh] = classes.try_emplace(key, out, Text(choice));
      if (!fresh &&
          std::memcmp(first->second.first.data(), out.data(), count * 4) != 0) {
        problem += " bits differ from " + first->second.second + ";";
      }
      ++runs;
      if (!problem.empty()) {
        ++failed;
        std::printf("FAIL %s m=%u %s:%s\n", p.name.c_str(), m,
                    Text(choice).c_str(), problem.c_str());
      }
    }
  }
  std::printf("%-34s %4llu runs, worst %.2e exact %.2e staged%s\n",
              p.name.c_str(), static_cast<unsigned long long>(runs),
              worst_exact, worst_staged, failed == 0 ? "" : "  FAILED");
  std::fflush(stdout);
  tally->failed += failed;
  tally->passed += runs - failed;
  tally->worst_exact = std::max(tally->worst_exact, worst_exact);
  tally->worst_staged = std::max(tally->worst_staged, worst_staged);
}

struct Case {
  Problem problem;
  std::vector<Choice> choices;
};

Choice Same(Axes a, u32 slices1 = 1, u32 slices2 = 1) {
  return {a, a, slices1, slices2};
}

// The same choices, and for MUL1 those again whose tiles may have biased sums,
// with them.
std::vector<Choice> WithBiased(const Problem& p, std::vector<Choice> choices) {
  for (size_t i = 0, count = choices.size(); i < count; ++i) {
    Choice biased = choices[i];
    biased.fc1.sum = biased.fc2.sum = 3;
    if (p.codebook == 2 && biased.fc1.tokens == 8) choices.push_back(biased);
  }
  return choices;
}

std::vector<Choice> Sweep(const Problem& p, u64 shared_max, bool quick) {
  std::vector<Choice> choices;
  const std::pair<u32, u32> splits[] = {{1, 1}, {2, 3}, {4, 1}, {16, 16}};
  for (u32 t : {8u, 16u, 32u, 48u, 64u, 96u, 128u}) {
    for (u32 c : {64u, 128u, 256u}) {
      for (u32 k : {32u, 64u, 128u}) {
        for (u32 w : {4u, 8u}) {
          for (u32 s : {2u, 3u, 4u, 6u}) {
            const Axes a = {t, c, k, w, s, 1};
            if (!IsLegal(p, a, shared_max)) continue;
            if (quick && (t / 8 + c / 64 + k / 32 + w / 4 + s) % 7 != 0) {
              continue;
            }
            const size_t n = choices.size();
            choices.push_back(
                Same(a, splits[n % 4].first, splits[n % 4].second));
          }
        }
      }
    }
  }
  // Different axes for the two products.
  Choice mixed = Same({16, 128, 64, 4, 4, 1}, 2, 3);
  mixed.fc2 = {16, 64, 32, 4, 3, 2};
  choices.push_back(mixed);
  return choices;
}

std::vector<Case> Cases(u64 shared_max, bool quick) {
  std::vector<Case> cases;
  const Choice plain = Same({16, 128, 64, 4, 4, 1});
  const Choice small = Same({8, 64, 128, 4, 3, 1}, 2, 2);
  for (int codebook = 0; codebook < 3; ++codebook) {
    for (int k = 1; k <= 8; ++k) {
      Problem p;
      p.name =
          "codebook " + std::to_string(codebook) + " K" + std::to_string(k);
      p.codebook = codebook;
      p.bits = {k, k, k};
      cases.push_back({p, {plain, small}});
    }
  }
  for (int bits = 0; bits < 8; ++bits) {
    Problem p;
    p.shared = (bits & 1) != 0;
    p.id_i64 = (bits & 2) != 0;
    p.bf16 = (bits & 4) != 0;
    p.codebook = 2;
    p.bits = {3, 3, 3};
    p.experts = 12;
    p.top_k = 3;
    p.name = std::string(p.shared ? "shared" : "per-expert") +
             (p.id_i64 ? " i64" : " i32") + (p.bf16 ? " bf16" : " f16");
    cases.push_back({p, {plain, small}});
    for (const Routing r :
         {Routing::kInactive, Routing::kOneExpert, Routing::kDuplicates}) {
      Problem q = p;
      q.routing = r;
      q.name += r == Routing::kInactive    ? " inactive"
                : r == Routing::kOneExpert ? " one expert"
                                           : " duplicates";
      cases.push_back({q, {plain, small}});
    }
  }
  const std::array<int, 3> mixes[] = {{2, 4, 3}, {5, 1, 8}, {8, 7, 6}};
  for (const std::array<int, 3>& mix : mixes) {
    Problem p;
    p.bits = mix;
    p.codebook = mix[0] == 5 ? 0 : 1;
    p.name = "mixed bits " + std::to_string(mix[0]) + std::to_string(mix[1]) +
             std::to_string(mix[2]);
    cases.push_back({p, {plain, small}});
  }
  const auto shape = [&cases](std::string name, u32 h, u32 i, u32 e, u32 k,
                              int codebook, int bits, std::vector<u32> tokens,
                              std::vector<Choice> choices, bool shared) {
    Problem p;
    p.name = std::move(name);
    p.hidden = h;
    p.inter = i;
    p.experts = e;
    p.top_k = k;
    p.codebook = codebook;
    p.bits = {bits, bits, bits};
    p.tokens = std::move(tokens);
    p.shared = shared;
    cases.push_back({p, std::move(choices)});
  };
  shape("one expert, one route", 128, 128, 1, 1, 1, 4, {1, 7, 33}, {plain},
        true);
  shape("1024 experts, top 8", 128, 128, 1024, 8, 1, 2, {1, 16, 600},
        {plain, small}, false);
  shape("top 32", 256, 128, 64, 32, 0, 5, {1, 3, 50}, {plain, small}, true);
  shape("H384 I640", 384, 640, 6, 2, 2, 6, {1, 17, 90}, {plain, small}, true);
  {
    Problem p;
    p.hidden = 512;
    p.inter = 768;
    p.experts = 12;
    p.top_k = 3;
    p.tokens = {1, 5, 16, 17, 100};
    p.name = "axes, mcg K4";
    cases.push_back({p, Sweep(p, shared_max, quick)});
    p.bits = {3, 3, 3};
    p.shared = false;
    p.name = "axes, mcg K3 per-expert";
    cases.push_back({p, Sweep(p, shared_max, true)});
    p.codebook = 2;
    p.bits = {4, 4, 4};
    p.shared = true;
    p.name = "axes, mul1 K4";
    cases.push_back({p, Sweep(p, shared_max, true)});
  }
  shape("Mixtral-like H1024 I3584 E8", 1024, 3584, 8, 2, 0, 3, {1, 5, 64, 300},
        {plain, small, Same({64, 128, 64, 4, 4, 1})}, false);
  std::vector<u32> tokens = {1, 5, 16, 17, 100, 1000};
  if (!quick) tokens.push_back(4096);
  shape("Qwen3-30B-A3B H2048 I768 E128", 2048, 768, 128, 8, 1, 4, tokens,
        {plain, small, Same({64, 256, 64, 8, 4, 1}),
         Same({8, 128, 128, 4, 4, 1}, 4, 2)},
        true);
  for (Case& c : cases) c.choices = WithBiased(c.problem, std::move(c.choices));
  return cases;
}

// ---- speed -----------------------------------------------------------------

// Fast choices for m tokens, found by --sweep on an H200.
std::vector<Choice> BenchChoices(u32 m) {
  if (m <= 4) {
    return {
        Same({8, 64, 128, 4, 2, 1}, 4, 2),  Same({8, 64, 128, 4, 3, 1}, 2, 2),
        Same({8, 64, 128, 4, 4, 1}, 4, 2),  Same({8, 64, 64, 4, 6, 1}, 4, 2),
        Same({8, 128, 128, 4, 2, 1}, 4, 2), Same({8, 128, 128, 4, 3, 1}, 8, 2),
        Same({8, 128, 64, 4, 2, 1}, 8, 2)};
  }
  if (m <= 16) {
    return {
        Same({8, 128, 128, 4, 2, 1}, 2, 1), Same({8, 128, 128, 4, 2, 1}, 1, 1),
        Same({8, 128, 128, 4, 2, 1}, 4, 2), Same({8, 128, 128, 4, 3, 1}, 2, 1),
        Same({8, 256, 128, 4, 2, 1}, 4, 2), Same({8, 256, 128, 4, 2, 1}, 2, 1)};
  }
  if (m <= 64) {
    return {Same({8, 128, 128, 4, 2, 1}, 1, 1),
            Same({8, 128, 128, 4, 3, 1}, 1, 1),
            Same({8, 256, 128, 4, 2, 1}, 1, 1),
            Same({8, 256, 128, 4, 2, 1}, 2, 1),
            Same({16, 128, 128, 4, 2, 1}, 1, 1),
            Same({16, 256, 128, 8, 2, 1}, 1, 1)};
  }
  if (m <= 256) {
    return {Same({32, 128, 128, 4, 2, 1}, 1, 1),
            Same({32, 256, 128, 8, 2, 1}, 1, 1),
            Same({32, 256, 128, 8, 3, 1}, 1, 1),
            Same({32, 256, 128, 4, 2, 1}, 1, 1),
            Same({16, 128, 128, 4, 2, 1}, 1, 1)};
  }
  return {
      Same({64, 128, 64, 4, 3, 1}, 1, 1),  Same({64, 256, 128, 8, 3, 1}, 1, 1),
      Same({96, 128, 64, 4, 3, 1}, 1, 1),  Same({96, 256, 64, 8, 3, 1}, 1, 1),
      Same({128, 128, 64, 4, 3, 1}, 1, 1), Same({128, 256, 64, 8, 4, 1}, 1, 1),
      Same({128, 256, 128, 8, 2, 1}, 1, 1)};
}

// Memory of one plan for every layer, and its timing.
class Timing {
 public:
  Timing(const Layers& layers, u64 arena_bytes, u32 m, u32 hidden)
      : layers_(layers), m_(m), out_(size_t{m} * hidden * 4) {
    for (u32 layer = 0; layer < kLayers; ++layer) {
      arenas_.push_back(std::make_unique<Buffer>(arena_bytes));
    }
    // The timing stream does not wait for the default one.
    Check(driver.synchronize(), "cuCtxSynchronize");
  }

  // Microseconds per layer of the whole plan.
  double Whole(const Plan& plan, int replays) const {
    return TimeGraph(layers_.stream, replays,
                     [&] {
                       for (u32 i = 0; i < kLayers; ++i) {
                         plan.LaunchAll(*layers_.data[i], arenas_[i]->address(),
                                        out_.address(), m_, layers_.stream);
                       }
                     }) /
           kLayers;
  }

  // The same of one step; the steps before it must have run.
  double Step(const Plan& plan, size_t step, int replays) const {
    return TimeGraph(layers_.stream, replays,
                     [&] {
                       for (u32 i = 0; i < kLayers; ++i) {
                         plan.Launch(step, *layers_.data[i],
                                     arenas_[i]->address(), out_.address(), m_,
                                     layers_.stream);
                       }
                     }) /
           kLayers;
  }

 private:
  const Layers& layers_;
  u32 m_;
  Buffer out_;
  std::vector<std::unique_ptr<Buffer>> arenas_;
};

void Bench(const Problem& p, const std::vector<u32>& tokens, Programs* programs,
           Modules* modules, int threads) {
  const u32 most = *std::max_element(tokens.begin(), tokens.end());
  std::vector<std::string> preludes;
  for (u32 m : tokens) {
    for (const Choice& c : WithBiased(p, BenchChoices(m))) {
      for (std::string& text : PreludesOf(p, c)) preludes.push_back(text);
    }
  }
  programs->Prepare(preludes, threads);
  const Layers layers(p, most, kLayers);
  constexpr const char* kNames[] = {"3inst", "mcg", "mul1"};
  std::printf("\n%s %s K%d: us per layer, cold weights, graph of %u layers\n",
              p.name.c_str(), kNames[p.codebook], p.bits[0], kLayers);
  for (u32 m : tokens) {
    const double active = layers.ActiveExperts(p, m);
    const double bytes =
        active * p.hidden * p.inter * (p.bits[0] + p.bits[1] + p.bits[2]) / 8.0;
    std::printf("m=%u: %.1f active experts, %.1f MB of weights\n", m, active,
                bytes / 1e6);
    for (const Choice& c : WithBiased(p, BenchChoices(m))) {
      if (!IsLegal(p, c.fc1, 227 * 1024) || !IsLegal(p, c.fc2, 227 * 1024)) {
        continue;
      }
      const Plan plan(p, c, m, modules);
      const Timing timing(layers, plan.arena_bytes(), m, p.hidden);
      const int replays = m <= 256 ? 20 : 8;
      const double all = timing.Whole(plan, replays);
      std::printf("  %-36s %8.1f us %5.0f GB/s |", Text(c).c_str(), all,
                  bytes / all / 1e3);
      for (size_t s = 0; s < plan.steps().size(); ++s) {
        std::printf(" %s %.1f", plan.steps()[s].name.c_str(),
                    timing.Step(plan, s, replays));
      }
      int registers = 0, local = 0;
      driver.function_get(&registers, 4, plan.steps()[1].function);
      driver.function_get(&local, 3, plan.steps()[1].function);
      std::printf(" | %d regs%s\n", registers, local > 0 ? " SPILLS" : "");
      std::fflush(stdout);
    }
  }
}

// Axes worth timing for m tokens.
std::vector<Axes> SweepAxes(const Problem& p, u32 m) {
  std::vector<u32> tiles = {64, 96, 128};
  if (m <= 1024) tiles = {48, 64, 96, 128};
  if (m <= 256) tiles = {16, 32, 48};
  if (m <= 64) tiles = {8, 16, 32};
  if (m <= 16) tiles = {8, 16};
  if (m <= 4) tiles = {8};
  std::vector<Axes> list;
  for (u32 t : tiles) {
    for (u32 c : {64u, 128u, 256u}) {
      for (u32 k : {32u, 64u, 128u}) {
        for (u32 w : {4u, 8u}) {
          for (u32 s : {2u, 3u, 4u, 6u}) {
            const Axes a = {t, c, k, w, s, 1};
            // Shallow stages pay only where an operand tile is large.
            if (IsLegal(p, a, 227 * 1024) && (k > 32 || t >= 48)) {
              list.push_back(a);
            }
          }
        }
      }
    }
  }
  return list;
}

// One line per number of tokens, axes and product: microseconds per layer for
// each number of K slices. For calibrating a cost model.
void SweepSpeed(const Problem& p, const std::vector<u32>& tokens,
                Programs* programs, Modules* modules, int threads) {
  std::vector<std::string> preludes;
  for (u32 m : tokens) {
    for (const Axes& a : SweepAxes(p, m)) {
      for (std::string& text : PreludesOf(p, Same(a))) {
        preludes.push_back(text);
      }
    }
  }
  programs->Prepare(preludes, threads);
  const Layers layers(p, *std::max_element(tokens.begin(), tokens.end()),
                      kLayers);
  for (u32 m : tokens) {
    std::vector<std::pair<u32, u32>> splits = {{1, 1}};
    if (m <= 256) splits.push_back({2, 2});
    if (m <= 64) splits.push_back({4, 3});
    if (m <= 16) splits.push_back({8, 6});
    u64 arena = 0;
    std::vector<Axes> list = SweepAxes(p, m);
    for (const Axes& a : list) {
      for (const auto& [s1, s2] : splits) {
        arena =
            std::max(arena, Plan(p, Same(a, s1, s2), m, modules).arena_bytes());
      }
    }
    const Timing timing(layers, arena, m, p.hidden);
    const int replays = m <= 64 ? 7 : 3;
    for (const Axes& a : list) {
      std::string text[2];
      for (const auto& [s1, s2] : splits) {
        const Plan plan(p, Same(a, s1, s2), m, modules);
        timing.Whole(plan, 1);
        const size_t first = plan.steps().size() - 4;  // fc1
        for (size_t i = 0; i < 2; ++i) {
          char number[48];
          std::snprintf(number, sizeof(number), " %u:%.2f", i == 0 ? s1 : s2,
                        timing.Step(plan, first + 2 * i, replays));
          text[i] += number;
        }
        if (a == list.front()) {
          std::printf("support m=%u t%u split%u/%u whole %.2f", m, a.tokens, s1,
                      s2, timing.Whole(plan, replays));
          for (size_t i = 0; i < plan.steps().size(); ++i) {
            std::printf(" %s %.2f", plan.steps()[i].name.c_str(),
                        timing.Step(plan, i, replays));
          }
          std::printf("\n");
        }
      }
      std::printf("sweep m=%u %s fc1%s fc2%s\n", m, Text(a).c_str(),
                  text[0].c_str(), text[1].c_str());
    }
    std::fflush(stdout);
  }
}

struct Options {
  std::string templates = "templates", nvrtc, filter, compile_only;
  bool quick = false, self_check = false, bench = true, correctness = true;
  bool sweep = false;
  int threads = 0, codebook = 1, bits = 4;
  std::vector<u32> bench_tokens = {1, 4, 16, 64, 256, 1024, 4096};
};

Options Parse(int argc, char** argv) {
  Options o;
  const auto value = [&](int* i) -> std::string {
    if (*i + 1 >= argc) Die(std::string(argv[*i]) + " needs a value");
    return argv[++*i];
  };
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    if (a == "--templates") {
      o.templates = value(&i);
    } else if (a == "--nvrtc") {
      o.nvrtc = value(&i);
    } else if (a == "--filter") {
      o.filter = value(&i);
    } else if (a == "--codebook") {
      o.codebook = std::atoi(value(&i).c_str());
    } else if (a == "--bits") {
      o.bits = std::atoi(value(&i).c_str());
    } else if (a == "--threads") {
      o.threads = std::atoi(value(&i).c_str());
    } else if (a == "--compile-only") {
      o.compile_only = value(&i);
    } else if (a == "--quick") {
      o.quick = true;
    } else if (a == "--self-check") {
      o.self_check = true;
    } else if (a == "--bench-only") {
      o.correctness = false;
    } else if (a == "--sweep") {
      o.sweep = true;
      o.correctness = false;
    } else if (a == "--no-bench") {
      o.bench = false;
    } else if (a == "--bench-tokens") {
      std::istringstream list(value(&i));
      o.bench_tokens.clear();
      for (std::string m; std::getline(list, m, ',');) {
        o.bench_tokens.push_back(
            static_cast<u32>(std::strtoul(m.c_str(), nullptr, 10)));
      }
    } else {
      Die("unknown option " + a);
    }
  }
  if (o.threads <= 0) {
    o.threads = static_cast<int>(
        std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
  }
  return o;
}

std::vector<Case> Selected(const Options& o, u64 shared_max) {
  std::vector<Case> cases = Cases(shared_max, o.quick);
  std::erase_if(cases, [&o](const Case& c) {
    return c.problem.name.find(o.filter) == std::string::npos;
  });
  return cases;
}

std::vector<std::string> AllPreludes(const std::vector<Case>& cases) {
  std::vector<std::string> preludes;
  for (const Case& c : cases) {
    for (const Choice& choice : c.choices) {
      for (std::string& text : PreludesOf(c.problem, choice)) {
        preludes.push_back(std::move(text));
      }
    }
  }
  return preludes;
}

int Main(int argc, char** argv) {
  const Options o = Parse(argc, argv);
  if (!SelfCheck()) return 1;
  if (o.self_check) return 0;
  const Nvrtc nvrtc = OpenNvrtc(o.nvrtc);
  if (!o.compile_only.empty()) {
    Programs programs(nvrtc, o.templates, o.compile_only);
    programs.Prepare(AllPreludes(Selected(o, 227 * 1024)), o.threads);
    return 0;
  }

  const Device device = OpenDevice(nvrtc);
  Programs programs(nvrtc, o.templates, device.arch);
  Modules modules(&programs);
  Tally tally;
  bool ok = true;
  if (o.correctness) {
    for (int codebook = 0; codebook < 3; ++codebook) {
      ok = CheckDecode(codebook, &modules) && ok;
    }
    const std::vector<Case> cases =
        Selected(o, static_cast<u64>(device.shared_max));
    programs.Prepare(AllPreludes(cases), o.threads);
    for (const Case& c : cases) {
      RunProblem(c.problem, c.choices, &modules, o.threads, &tally);
      modules.Clear();
    }
    std::printf("%llu passed, %llu failed, worst %.2e exact %.2e staged\n",
                static_cast<unsigned long long>(tally.passed),
                static_cast<unsigned long long>(tally.failed),
                tally.worst_exact, tally.worst_staged);
    std::fflush(stdout);
  }
  ok = ok && tally.failed == 0;
  if (o.bench) {
    Problem p;
    p.name = "Qwen3-30B-A3B H2048 I768 E128 k8";
    p.hidden = 2048;
    p.inter = 768;
    p.experts = 128;
    p.top_k = 8;
    p.codebook = o.codebook;
    p.bits = {o.bits, o.bits, o.bits};
    (o.sweep ? SweepSpeed : Bench)(p, o.bench_tokens, &programs, &modules,
                                   o.threads);
  }
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace kiln::gpu

int main(int argc, char** argv) { return kiln::gpu::Main(argc, argv); }
