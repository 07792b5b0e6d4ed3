// Fused mixture of experts for at most 64 tokens, recipe w4a16, EXL3 trellis
// weights: three CUDA kernels and no other launch.
//
// Arithmetic: spec "Trellis weight formats and fused-MoE arithmetic" 4.2 and
// 4.5. Source for sm_80 and later; programmatic dependent launch is used from
// sm_90 on. Read templates/fused_moe/README.md, "Stream", first: it lists
// parameters, launch rules, shared memory and arena slices.
//
// Prelude (integers): as cuda.cu, except that KILN_PART is 1 (fc1), 2 (fc2) or
// 3 (combine), with these axes:
//   KILN_SUM     0 rounded: weights are rounded to fp16 as the codebook says
//                1 halves (3INST, MCG): both halves of a hash are operands of
//                  their own, so the tensor core adds them, unrounded
//                2 bytes (MUL1): the four bytes of a hash are u8 operands, and
//                  activations are two s8 terms per 128 block
//                3 biased (MUL1): 1024 + byte sum is the operand, the affine
//                  map is applied to the sum, unrounded
//   KILN_SPLIT   fc1, fc2: blocks that share the K of a result
//   KILN_COLUMNS fc1, fc2: how often 256 channels a block serves with the same
//                operands, one after the other
//   KILN_SLICES  fc2, combine: KILN_SPLIT of the kernel before
//   KILN_CTAS    fc1, fc2: blocks per SM that registers must allow
//
// Shape of the computation. A run is up to 8 (bytes: 4) routes of one expert.
// Every block finds its run in topk_ids by itself. A warp owns 32 output
// channels and one slice of K, and keeps packed weights in registers only: lane
// (g, c) = (l / 4, l % 4) loads a quarter row, 4K bytes at offset 4K * g, of
// k-tile c of four neighbouring ones. That holds the weights of channels g and
// g + 8 for all 16 k of the tile; the four fragments they make are the A
// operands of four MMAs over a permuted K, whose B operand lane (g, c) reads as
// 16 neighbouring elements of row g. Sums of a slice go to memory as they are;
// who reads them next adds the slices in the order of K: fc2 when it makes its
// operands, combine when it adds up the routes of a token.

#include "cuda/mul1_affine.h"
#include "cuda/warp.h"
#include "device/activation.h"
#include "device/fragment.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"

namespace {

using kd::u16;
using kd::u32;
using kd::u64;

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kInter = KILN_INTER;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;
constexpr u32 kAll = 0xFFFFFFFFu;  // every lane

static_assert(kHidden % 128 == 0 && kInter % 128 == 0, "H and I: 128 blocks");
static_assert(kExperts >= 1 && kExperts <= 1024, "E in 1..1024");
static_assert(kTopK >= 1 && kTopK <= 32, "top_k in 1..32");

// ---- launches --------------------------------------------------------------

// The next kernel may be set up from now on.
__device__ __forceinline__ void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Earlier kernels have ended, and what they wrote is visible. Every block calls
// it, so that none of this grid ends before those it depends on.
__device__ __forceinline__ void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- routing ---------------------------------------------------------------

#if KILN_ID_I64
using RouteId = long long;
#else
using RouteId = int;
#endif

// kExperts when the route is inactive. The test is made in the width of the
// id, so 2^32 + e does not alias expert e.
__device__ __forceinline__ u32 ExpertOf(RouteId id) {
  return id >= 0 && id < static_cast<RouteId>(kExperts) ? static_cast<u32>(id)
                                                        : kExperts;
}

// ---- rows ------------------------------------------------------------------

__device__ __forceinline__ void Unpack4(uint2 bits, float (&v)[4]) {
  v[0] = kd::f16_to_f32(static_cast<u16>(bits.x));
  v[1] = kd::f16_to_f32(static_cast<u16>(bits.x >> 16));
  v[2] = kd::f16_to_f32(static_cast<u16>(bits.y));
  v[3] = kd::f16_to_f32(static_cast<u16>(bits.y >> 16));
}

__device__ __forceinline__ void Load4(const u16* __restrict__ from,
                                      float (&v)[4]) {
  Unpack4(*reinterpret_cast<const uint2*>(from), v);
}

__device__ __forceinline__ uint2 Round4(const float (&v)[4]) {
  return make_uint2(kd::RoundPair(v[0], v[1]), kd::RoundPair(v[2], v[3]));
}

// Sums of kSlices slices of K, `stride` apart, in their order, rounded to fp16
// (steps 4 and 8): four neighbouring channels of a row.
template <u32 kSlices>
__device__ __forceinline__ void AddSlices(const float* from, u64 stride,
                                          float (&v)[4]) {
  float4 part[kSlices];
#pragma unroll
  for (u32 i = 0; i < kSlices; ++i) {
    part[i] = __ldcg(reinterpret_cast<const float4*>(from + i * stride));
  }
  v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll
  for (u32 i = 0; i < kSlices; ++i) {
    v[0] += part[i].x;
    v[1] += part[i].y;
    v[2] += part[i].z;
    v[3] += part[i].w;
  }
  Unpack4(Round4(v), v);
}

}  // namespace

#if KILN_PART != 3

namespace {

constexpr u32 kTokensMax = 64;
constexpr u32 kRoutesMax = kTokensMax * kTopK;

constexpr int kRounded = 0;
constexpr int kHalves = 1;
constexpr int kBytes = 2;
constexpr int kBiased = 3;
constexpr int kSum = KILN_SUM;
static_assert(KILN_CODEBOOK == 2 ? kSum <= kBiased && kSum != kHalves
                                 : kSum != kBytes && kSum != kBiased,
              "a sum mode of another codebook");

constexpr u32 kSplit = KILN_SPLIT;
constexpr u32 kWarps = 8;
constexpr u32 kThreads = kWarps * 32;
constexpr u32 kWarpTiles = 2;  // 16-channel tiles per warp
constexpr u32 kWarpChannels = kWarpTiles * 16;
constexpr u32 kChannels = kWarps * kWarpChannels;  // of a block at a time
#if KILN_PART == 1
constexpr u32 kDepth = kHidden;
constexpr u32 kWidth = kInter;       // channels of a matrix
constexpr u32 kStride = 2 * kInter;  // of a row of sums
#else
constexpr u32 kDepth = kInter;
constexpr u32 kWidth = kHidden;
constexpr u32 kStride = kHidden;
#endif
constexpr u32 kBlockChannels = KILN_COLUMNS * kChannels;
// Blocks side by side of one matrix; the last may have idle warps.
constexpr u32 kColumns = (kWidth + kBlockChannels - 1) / kBlockChannels;

constexpr u32 kRunRows = kSum == kBytes ? 4 : 8;
constexpr u32 kElementBytes = kSum == kHalves || kSum == kBytes ? 4 : 2;
// 128 blocks of K that one block works on, at most.
constexpr u32 kBlocksMax = (kDepth / 128 + kSplit - 1) / kSplit;
// Padded by 16 bytes: rows then start in different 16-byte bank groups.
constexpr u32 kRowBytes = kBlocksMax * 128 * kElementBytes + 16;
static_assert(kSplit <= kDepth / 128, "every slice has a block of 128");

__device__ __forceinline__ void PrefetchLine(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Asks the L2 cache for `count` elements of 2 bytes, 128 bytes per thread.
__device__ __forceinline__ void Prefetch(const u16* from, u32 count) {
  for (u32 i = threadIdx.x * 64; i < count; i += kThreads * 64) {
    PrefetchLine(from + i);
  }
}

// Up to kRunRows routes of one expert.
struct Run {
  u32 expert;
  u32 rows;   // 0: there is no such run
  u32 route;  // lane i: the route of row i
};

struct RouterSpace {
  u32 counts[(kExperts + 31) / 32 * 32];  // routes of each expert
  u16 experts[kRoutesMax];                // expert of each route
  u32 routes[kWarps][kRunRows];           // of a run, as a warp found it
  u32 expert, rows, runs;                 // of the run that warp 0 found
};

// Finds runs. Up to 32 routes every warp finds the same by itself; the block's
// first warp finds one among more.
class Router {
 public:
  // Reads all ids.
  __device__ __forceinline__ Router(const RouteId* __restrict__ ids, u32 tokens,
                                    RouterSpace* space)
      : space_(space), routes_(tokens * kTopK), lane_(threadIdx.x % 32) {
    if (routes_ <= 32) {
      expert_ = lane_ < routes_ ? ExpertOf(ids[lane_]) : kExperts;
      rank_ = __popc(__match_any_sync(kAll, expert_) & Below());
      leaders_ =
          __ballot_sync(kAll, expert_ < kExperts && rank_ % kRunRows == 0);
      runs_ = __popc(leaders_);
      return;
    }
    u32* counts = space->counts;
    for (u32 r = threadIdx.x; r < routes_; r += kThreads) {
      space->experts[r] = static_cast<u16>(ExpertOf(ids[r]));
    }
    for (u32 e = threadIdx.x; e < kPerLane * 32; e += kThreads) counts[e] = 0;
    __syncthreads();
    for (u32 r = threadIdx.x; r < routes_; r += kThreads) {
      const u32 e = space->experts[r];
      if (e < kExperts) atomicAdd(&counts[e], 1u);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    // Runs of this lane's experts, and of those before them.
    expert_ = 0;
    for (u32 i = 0; i < kPerLane; ++i) {
      expert_ += RunsOf(counts[lane_ * kPerLane + i]);
    }
    rank_ = expert_;
    for (u32 step = 1; step < 32; step *= 2) {
      const u32 before = __shfl_up_sync(kAll, rank_, step);
      if (lane_ >= step) rank_ += before;
    }
    runs_ = __shfl_sync(kAll, rank_, 31);
    rank_ -= expert_;
  }

  // How many there are; known after a call of Find.
  __device__ __forceinline__ u32 runs() const { return runs_; }

  // Run `index`, in an order that is the same in every block. All threads call
  // it; what an earlier call returned may be in use no more.
  __device__ __forceinline__ Run Find(u32 index) {
    Run run;
    run.expert = run.rows = 0;
    const u32 warp = routes_ <= 32 ? threadIdx.x / 32 : 0;
    if (routes_ <= 32) {
      if (index < runs_) FindAmongLanes(index, &run);
      __syncwarp();
    } else {
      if (threadIdx.x < 32) {
        if (index < runs_) FindAmongCounts(index, &run);
        if (lane_ == 0) {
          space_->expert = run.expert;
          space_->rows = run.rows;
          space_->runs = runs_;
        }
      }
      __syncthreads();
      run.expert = space_->expert;
      run.rows = space_->rows;
      runs_ = space_->runs;
    }
    run.route =
        run.rows == 0 ? 0 : space_->routes[warp][lane_ < run.rows ? lane_ : 0];
    return run;
  }

 private:
  static constexpr u32 kPerLane = (kExperts + 31) / 32;

  static __device__ __forceinline__ u32 RunsOf(u32 count) {
    return (count + kRunRows - 1) / kRunRows;
  }

  __device__ __forceinline__ u32 Below() const { return (1u << lane_) - 1; }

  __device__ __forceinline__ void FindAmongLanes(u32 index, Run* run) {
    const u32 first =
        __ffs(__ballot_sync(kAll, (leaders_ >> lane_ & 1) != 0 &&
                                      __popc(leaders_ & Below()) == index)) -
        1;
    run->expert = __shfl_sync(kAll, expert_, first);
    const u32 base = __shfl_sync(kAll, rank_, first);
    const bool mine = expert_ == run->expert && rank_ - base < kRunRows;
    run->rows = __popc(__ballot_sync(kAll, mine));
    if (mine) space_->routes[threadIdx.x / 32][rank_ - base] = lane_;
  }

  __device__ __forceinline__ void FindAmongCounts(u32 index, Run* run) {
    const u32 first = __ffs(__ballot_sync(kAll, index - rank_ < expert_)) - 1;
    u32 left = index - rank_, found = 0, chunk = 0;
    bool done = false;
    for (u32 i = 0; i < kPerLane; ++i) {
      const u32 runs = RunsOf(space_->counts[lane_ * kPerLane + i]);
      if (!done && left < runs) {
        done = true;
        found = lane_ * kPerLane + i;
        chunk = left;
      }
      left -= runs;
    }
    run->expert = __shfl_sync(kAll, found, first);
    const u32 base = __shfl_sync(kAll, chunk, first) * kRunRows;
    u32 seen = 0;
    for (u32 at = 0; at < routes_; at += 32) {
      const bool match =
          at + lane_ < routes_ && space_->experts[at + lane_] == run->expert;
      const u32 mask = __ballot_sync(kAll, match);
      const u32 rank = seen + __popc(mask & Below());
      if (match && rank - base < kRunRows) {
        space_->routes[0][rank - base] = at + lane_;
      }
      seen += __popc(mask);
    }
    run->rows = seen - base < kRunRows ? seen - base : kRunRows;
  }

  RouterSpace* space_;
  u32 routes_, lane_;
  // At most 32 routes: of route `lane`, its expert and how many routes of it
  // come before; leaders_ start a run. Otherwise, in warp 0: expert_ counts the
  // runs of the lane's experts, rank_ those of the experts before.
  u32 expert_, rank_, leaders_;
  u32 runs_;
};

// ---- operands --------------------------------------------------------------

// Of one row and 128 block, for the affine map of a MUL1 mode: the sum of the
// activations; for bytes also the values of a unit of either term.
struct BlockStats {
  float sum;
  float unit[2];
};

constexpr bool kHasStats = kSum == kBytes || kSum == kBiased;

struct OperandStats {
  BlockStats of[kRunRows][kHasStats ? kBlocksMax : 1];

  __device__ __forceinline__ BlockStats* At(u32 row, u32 block) {
    return &of[row][kHasStats ? block : 0];
  }
};

__device__ __forceinline__ float WarpSum(float v) {
#pragma unroll
  for (u32 step = 16; step != 0; step /= 2) v += __shfl_xor_sync(kAll, v, step);
  return v;
}

// Byte offset in an operand row of element k. 4-byte elements: the two 8-byte
// halves of lanes c and c + 2 would share banks, so every second pair of
// k-tiles has its 8-element halves exchanged.
__device__ __forceinline__ u32 ElementOffset(u32 k) {
  return kElementBytes == 2 ? k * 2 : (k ^ (k / 32 % 2 * 8)) * 4;
}

// Stores the 128 block `block` (of this block's slice) of one operand row; lane
// l holds elements 4l .. 4l + 3 in fp16. Every lane takes part.
__device__ __forceinline__ void StoreOperand(unsigned char* operand,
                                             BlockStats* stats, u32 row,
                                             u32 block, uint2 bits) {
  const u32 lane = threadIdx.x % 32;
  unsigned char* to =
      operand + row * kRowBytes + ElementOffset(block * 128 + lane * 4);
  if constexpr (kSum == kRounded || kSum == kBiased) {
    *reinterpret_cast<uint2*>(to) = bits;
    if constexpr (kSum == kBiased) {
      float v[4];
      Unpack4(bits, v);
      const float sum = WarpSum((v[0] + v[1]) + (v[2] + v[3]));
      if (lane == 0) stats->sum = sum;
    }
  } else if constexpr (kSum == kHalves) {
    *reinterpret_cast<uint4*>(to) = make_uint4(
        __byte_perm(bits.x, 0, 0x1010), __byte_perm(bits.x, 0, 0x3232),
        __byte_perm(bits.y, 0, 0x1010), __byte_perm(bits.y, 0, 0x3232));
  } else {
    // Two terms: scaled to 127 at most, rounded; what is left of that, times
    // 254, rounded. A number plus kMagic has its rounded value in its last
    // bits.
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
    constexpr u32 kMagicBits = 0x4B400000;
    constexpr u32 kMost = 0x477FE000;  // 65504, the largest of fp16
    float v[4];
    Unpack4(bits, v);
    u32 size = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 other = kd::FloatBits(v[i]) & 0x7FFFFFFFu;
      size = other > size ? other : size;
    }
    size = __reduce_max_sync(kAll, size);
    const float most = kd::BitsFloat(size);
    const float unit =
        size <= kMost ? most * (1.0f / 127.0f) : kd::BitsFloat(0x7FC00000u);
    const float inverse =
        size <= kMost && size != 0 ? __fdividef(127.0f, most) : 0.0f;
    u32 first[4], second[4];
    u32 sum = 0, rest = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float scaled = v[i] * inverse;
      const float q = scaled + kMagic;
      const float r = kd::Fma(scaled - (q - kMagic), 254.0f, kMagic);
      sum += kd::FloatBits(q) - kMagicBits;
      rest += kd::FloatBits(r) - kMagicBits;
      first[i] = __byte_perm(kd::FloatBits(q), 0, 0x0000);
      second[i] = __byte_perm(kd::FloatBits(r), 0, 0x0000);
    }
    *reinterpret_cast<uint4*>(to) =
        make_uint4(first[0], first[1], first[2], first[3]);
    *reinterpret_cast<uint4*>(to + kRunRows * kRowBytes) =
        make_uint4(second[0], second[1], second[2], second[3]);
    // Both sums are below 2^14 in size.
    const int both =
        static_cast<int>(__reduce_add_sync(kAll, sum + (rest << 16)));
    if (lane == 0) {
      const int low = static_cast<short>(both);
      stats->unit[0] = unit;
      stats->unit[1] = unit * (1.0f / 254.0f);
      stats->sum = unit * static_cast<float>(low) +
                   stats->unit[1] * static_cast<float>((both - low) >> 16);
    }
  }
}

// ---- products --------------------------------------------------------------

// fp32 sums of a warp: [tile][4] as mma.m16n8 leaves them.
using Sums = float[kWarpTiles][4];

// A lane's words of one k-tile.
template <int kBits>
__device__ __forceinline__ void LoadWords(const unsigned char* from,
                                          u32 (&w)[kBits]) {
  if constexpr (kBits % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kBits; i += 4) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
                   : "l"(from + i * 4));
    }
  } else if constexpr (kBits % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kBits; i += 2) {
      asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                   : "=r"(w[i]), "=r"(w[i + 1])
                   : "l"(from + i * 4));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
      asm volatile("ld.global.nc.u32 %0, [%1];"
                   : "=r"(w[i])
                   : "l"(from + i * 4));
    }
  }
}

__device__ __forceinline__ uint4 LoadShared16(u32 from) {
  uint4 v;
  kd::LoadShared(from, v.x, v.y, v.z, v.w);
  return v;
}

__device__ __forceinline__ void Mma(float (&d)[4], u32 a0, u32 a1, u32 a2,
                                    u32 a3, u32 b0, u32 b1) {
  const u32 a[4] = {a0, a1, a2, a3};
  kd::Mma(d, a, b0, b1);
}

__device__ __forceinline__ void MmaBytes(int (&d)[4], u32 a0, u32 a1, u32 a2,
                                         u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Fragment kPart of a quarter row with its elements of B, k = 2 kPart + {0, 1}
// in low[0..1] and 2 kPart + {8, 9} in high[0..1]; 2-byte elements: pairs, in
// low[0] and high[0].
template <int kBits, int kPart, typename T>
__device__ __forceinline__ void Accumulate(const u32 (&w)[kBits + 1],
                                           const u32* low, const u32* high,
                                           T (&d)[4]) {
  const kd::SpanBits bits = kd::QuarterSpan<kBits, kPart>(w);
  if constexpr (kSum == kRounded || kSum == kBiased) {
    u32 a[4];
    if constexpr (kSum == kBiased) {
      kd::DecodeBiased<kBits>(bits, a);
    } else {
      kd::DecodeFragment<KILN_CODEBOOK, kBits>(bits, a);
    }
    kd::Mma(d, a, low[0], high[0]);
  } else {
    u32 x[8];
    kd::HashFragment<KILN_CODEBOOK, kBits, false>(bits, x);
    if constexpr (kSum == kHalves) {
#pragma unroll
      for (u32 i = 0; i < 8; ++i) x[i] = kd::FlipPair(x[i]);
      Mma(d, x[0], x[4], x[1], x[5], low[0], low[1]);
      Mma(d, x[2], x[6], x[3], x[7], high[0], high[1]);
    } else {
      MmaBytes(d, x[0], x[4], x[1], x[5], low[0], low[1]);
      MmaBytes(d, x[2], x[6], x[3], x[7], high[0], high[1]);
    }
  }
}

// What MMAs add to: kBytes sums integers, of one 128 block.
__device__ __forceinline__ auto& SumsOf(float (&sums)[4], int (&whole)[4]) {
  if constexpr (kSum == kBytes) {
    return whole;
  } else {
    return sums;
  }
}

// Packed weights of the next 64 deep step, on their way.
template <int kBits>
struct Ring {
  u32 w[kWarpTiles][kBits];
};

// Bytes from one step of K to the next.
template <int kBits>
constexpr u64 kStepBytes = static_cast<u64>(kWidth) * 8 * kBits;

// Loads a step. from: address of the lane's quarter row in its first k-tile.
template <int kBits>
__device__ __forceinline__ void Fill(const unsigned char* from,
                                     Ring<kBits>* ring) {
#pragma unroll
  for (u32 i = 0; i < kWarpTiles; ++i) {
    LoadWords<kBits>(from + i * (32 * kBits), ring->w[i]);
  }
}

// A branch that is never taken, since `one` differs from `other`: loads issued
// before it are not moved behind the decoding they are to hide behind.
__device__ __forceinline__ void HoldLoads(u32 one, u32 other) {
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.eq.u32 p, %0, %1;\n"
      "  @!p bra HELD%=;\n"
      "  trap;\n"
      "HELD%=:\n"
      "}" ::"r"(one),
      "r"(other)
      : "memory");
}

// Multiplies one step of 64 k: the words w of both tiles, the operand at a
// shared address of the lane's 16 elements. whole: as SumsOf.
template <int kBits>
__device__ __forceinline__ void MultiplyStep(
    const u32 (&w)[kWarpTiles][kBits + 1], u32 operand, Sums& sums,
    int (&whole)[kWarpTiles][4]) {
  if constexpr (kElementBytes == 2) {
    const uint4 low = LoadShared16(operand);
    const uint4 high = LoadShared16(operand + 16);
#pragma unroll
    for (u32 i = 0; i < kWarpTiles; ++i) {
      Accumulate<kBits, 0>(w[i], &low.x, &high.x, sums[i]);
      Accumulate<kBits, 1>(w[i], &low.y, &high.y, sums[i]);
      Accumulate<kBits, 2>(w[i], &low.z, &high.z, sums[i]);
      Accumulate<kBits, 3>(w[i], &low.w, &high.w, sums[i]);
    }
  } else {
    // ElementOffset's exchange, seen from this lane's k-tile.
    const u32 swap = threadIdx.x & 2 ? 32 : 0;
#pragma unroll
    for (u32 pair = 0; pair < 2; ++pair) {
      const uint4 low = LoadShared16(operand + pair * 16 + swap);
      const uint4 high = LoadShared16(operand + pair * 16 + 32 - swap);
#pragma unroll
      for (u32 i = 0; i < kWarpTiles; ++i) {
        auto& d = SumsOf(sums[i], whole[i]);
        if (pair == 0) {
          Accumulate<kBits, 0>(w[i], &low.x, &high.x, d);
          Accumulate<kBits, 1>(w[i], &low.z, &high.z, d);
        } else {
          Accumulate<kBits, 2>(w[i], &low.x, &high.x, d);
          Accumulate<kBits, 3>(w[i], &low.z, &high.z, d);
        }
      }
    }
  }
}

// sums += this block's slice of operand x weights: `blocks` 128 blocks.
//   from: as in Fill; ring holds the first step. next: the same of the channels
//       that follow, whose first step is loaded, or null
//   operand: shared address of the lane's 16 elements of the first k-tiles
//   first, second, term: statistics of the rows whose sums the lane holds, at
//       their first block, and which term of theirs
//   one: 1
template <int kBits>
__device__ __forceinline__ void Multiply(const unsigned char* from,
                                         const unsigned char* next, u32 blocks,
                                         Ring<kBits>* ring, u32 operand,
                                         const BlockStats* first,
                                         const BlockStats* second, u32 term,
                                         u32 one, Sums& sums) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll 1
  for (u32 block = 0; block < blocks; ++block) {
    int whole[kWarpTiles][4] = {};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      // All loads in flight share a scoreboard, so those that are needed now
      // must be the only ones: consume them, then ask for more.
      u32 w[kWarpTiles][kBits + 1];
#pragma unroll
      for (u32 i = 0; i < kWarpTiles; ++i) {
        w[i][0] = __shfl_sync(kAll, ring->w[i][kBits - 1], (lane + 28) % 32);
#pragma unroll
        for (int n = 0; n < kBits; ++n) w[i][n + 1] = ring->w[i][n];
      }
      from = half == 1 && block + 1 == blocks ? next : from + kStepBytes<kBits>;
      if (from != nullptr) Fill<kBits>(from, ring);
      HoldLoads(one, 2 + half);
      MultiplyStep<kBits>(w, operand, sums, whole);
      operand += 64 * kElementBytes;
    }
    if constexpr (kSum == kBytes) {
      const float units[2] = {first[block].unit[term],
                              second[block].unit[term]};
#pragma unroll
      for (u32 i = 0; i < kWarpTiles; ++i) {
#pragma unroll
        for (u32 d = 0; d < 4; ++d) {
          sums[i][d] = kd::Fma(static_cast<float>(whole[i][d]), units[d % 2],
                               sums[i][d]);
        }
      }
    }
  }
}

// Weights are an affine map of what kBytes and kBiased summed up. The part that
// depends on the activations of a row alone.
__device__ __forceinline__ float AffineRest(const BlockStats* stats,
                                            u32 blocks) {
  if constexpr (!kHasStats) return 0.0f;
  constexpr float kRest = kSum == kBytes
                              ? kd::kBiasedOffset + 1024 * kd::kBiasedScale
                              : kd::kBiasedOffset;
  float activations = 0.0f;
  for (u32 i = 0; i < blocks; ++i) activations += stats[i].sum;
  return activations * kRest;
}

__device__ __forceinline__ float Affine(float sum, float rest) {
  return kHasStats ? kd::Fma(sum, kd::kBiasedScale, rest) : sum;
}

// The slice of K of this thread's block, in 128 blocks.
struct Slice {
  u32 index, begin, end;

  __device__ __forceinline__ u32 blocks() const {
    return kDepth / 128 % kSplit == 0 ? kBlocksMax : end - begin;
  }
};

__device__ __forceinline__ Slice FindSlice(u32 index) {
  Slice slice;
  slice.index = index;
  slice.begin = kDepth / 128 * index / kSplit;
  slice.end = kDepth / 128 * (index + 1) / kSplit;
  return slice;
}

// Address of the lane's quarter row in the first k-tile of the slice, `column`
// channels into an expert's matrix.
template <int kBits>
__device__ __forceinline__ const unsigned char* FirstWords(
    const u16* __restrict__ weights, u32 expert, const Slice& slice,
    u32 column) {
  constexpr u64 kExpertBytes = static_cast<u64>(kDepth) * kWidth * kBits / 8;
  constexpr u64 kTileRow = static_cast<u64>(kWidth) * 2 * kBits;
  const u32 lane = threadIdx.x % 32;
  const u32 row = slice.begin * 8 + lane % 4;
  return reinterpret_cast<const unsigned char*>(weights) +
         expert * kExpertBytes + row * kTileRow + column * (2 * kBits) +
         lane / 4 * (4 * kBits);
}

// Where a run's sums go: row r of the slices' [kSplit][routes][kStride].
__device__ __forceinline__ void StoreSums(const Sums& sums, const Run& run,
                                          const OperandStats& stats,
                                          const Slice& slice, float* to,
                                          u32 routes) {
  const u32 lane = threadIdx.x % 32;
  to += static_cast<u64>(slice.index) * routes * kStride + lane / 4;
#pragma unroll
  for (u32 d = 0; d < 2; ++d) {
    if (d >= run.rows) break;
    const u32 row = lane % 4 * 2 % kRunRows + d;
    const bool live = lane % 4 * 2 < kRunRows && row < run.rows;
    const u32 route = __shfl_sync(kAll, run.route, row);
    const float rest = AffineRest(stats.of[live ? row : 0], slice.blocks());
    float* const at = to + static_cast<u64>(route) * kStride;
#pragma unroll
    for (u32 i = 0; i < kWarpTiles; ++i) {
#pragma unroll
      for (u32 high = 0; high < 2; ++high) {
        float sum = sums[i][high * 2 + d];
        // The two terms of a row are four columns apart.
        if constexpr (kSum == kBytes) sum += __shfl_xor_sync(kAll, sum, 2);
        if (live) at[i * 16 + high * 8] = Affine(sum, rest);
      }
    }
  }
}

// What a block keeps in shared memory beside its operand rows.
struct Space {
  RouterSpace router;
  OperandStats stats;
};

// Multiplies a run by this warp's channels of `weights`: 32 from `column` on,
// and as many at every further kChannels of the block.
//   operand(row, block): steps 1 to 3 or 5 to 7 for a 128 block of the slice;
//       lane l gets elements 4l .. 4l + 3 in fp16
//   sums: of this matrix's channel 0
template <int kBits, typename Operand>
__device__ __forceinline__ void MultiplyRun(const u16* __restrict__ weights,
                                            const Run& run, const Slice& slice,
                                            u32 column, u32 tokens,
                                            Operand operand, float* sums,
                                            Space* space) {
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  unsigned char* const rows = kd::DynamicShared();
  const auto words = [&](u32 at) {
    return at < kWidth ? FirstWords<kBits>(weights, run.expert, slice, at)
                       : nullptr;
  };
  Ring<kBits> ring;
  const unsigned char* from = words(column);
  if (from != nullptr) Fill<kBits>(from, &ring);
  WaitForPrevious();
  for (u32 item = warp; item < run.rows * slice.blocks(); item += kWarps) {
    const u32 row = item / slice.blocks();
    const u32 block = item % slice.blocks();
    StoreOperand(rows, space->stats.At(row, block), row, block,
                 operand(row, block));
  }
  __syncthreads();

  // Columns of B beyond the run repeat its last row; nobody reads their sums.
  const u32 b = lane / 4;
  const u32 row = b % kRunRows < run.rows ? b % kRunRows : run.rows - 1;
  const u32 at = kd::SharedAddress(rows) +
                 (b / kRunRows * kRunRows + row) * kRowBytes +
                 lane % 4 * 16 * kElementBytes;
  // Columns of the sums.
  const u32 token = lane % 4 * 2 % kRunRows;
  const BlockStats* of[2];
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    of[i] = space->stats.At(token + i < run.rows ? token + i : run.rows - 1, 0);
  }
  const u32 term = lane % 4 * 2 / kRunRows;
  const u32 one = (tokens + kTokensMax - 1) / kTokensMax;
#pragma unroll 1
  for (u32 i = 0; i < KILN_COLUMNS && from != nullptr; ++i) {
    const unsigned char* const next =
        i + 1 < KILN_COLUMNS ? words(column + kChannels) : nullptr;
    Sums total = {};
    Multiply<kBits>(from, next, slice.blocks(), &ring, at, of[0], of[1], term,
                    one, total);
    StoreSums(total, run, space->stats, slice, sums + column, tokens * kTopK);
    from = next;
    column += kChannels;
  }
}

}  // namespace

#endif  // KILN_PART != 3

#if KILN_PART == 1

namespace {

// Steps 1 to 3 for one 128 block of one operand row.
__device__ __forceinline__ uint2 Rotate(const u16* __restrict__ x,
                                        const u16* __restrict__ suh) {
  const uint2 bits = *reinterpret_cast<const uint2*>(x);
  float value[4], scale[4];
#if KILN_X_BF16
  const u32 halves[4] = {bits.x & 0xFFFFu, bits.x >> 16, bits.y & 0xFFFFu,
                         bits.y >> 16};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    value[i] = kd::f16_to_f32(
        kd::f32_to_f16(kd::bf16_to_f32(static_cast<u16>(halves[i]))));
  }
#else
  Unpack4(bits, value);
#endif
  Load4(suh, scale);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) value[i] *= scale[i];
  Unpack4(Round4(value), value);
  kd::WarpHadamard128(value, threadIdx.x % 32);
  return Round4(value);
}

}  // namespace

// Steps 1 to 3 and the products of step 4. Blocks (x, y): x % kSplit the slice
// of K, x / kSplit the channels of gate, then of up; y the run (and every
// gridDim.y-th one behind it).
extern "C" __global__ void __launch_bounds__(kThreads, KILN_CTAS)
    kiln_stream_fc1(const RouteId* __restrict__ ids, const u16* __restrict__ x,
                    const u16* __restrict__ gate_suh,
                    const u16* __restrict__ up_suh,
                    const u16* __restrict__ w_gate,
                    const u16* __restrict__ w_up, float* sums, u32 tokens) {
  __shared__ Space space;
  LetNextStart();
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  const Slice slice = FindSlice(blockIdx.x % kSplit);
  const bool is_up = blockIdx.x / kSplit >= kColumns;
  const u32 column =
      blockIdx.x / kSplit % kColumns * kBlockChannels + warp * kWarpChannels;
  const u16* const suh = is_up ? up_suh : gate_suh;
  // While the ids are on their way.
  if (tokens == 1) Prefetch(x + slice.begin * 128, slice.blocks() * 128);
  if (KILN_SHARED_SUH) Prefetch(suh + slice.begin * 128, slice.blocks() * 128);
  Router router(ids, tokens, &space.router);
  for (u32 index = blockIdx.y;; index += gridDim.y) {
    const Run run = router.Find(index);
    if (run.rows == 0) break;
    const auto operand = [&](u32 row, u32 block) {
      const u32 k = (slice.begin + block) * 128 + lane * 4;
      const u32 token = __shfl_sync(kAll, run.route, row) / kTopK;
      const u64 table = KILN_SHARED_SUH ? 0 : run.expert;
      return Rotate(x + static_cast<u64>(token) * kHidden + k,
                    suh + table * kHidden + k);
    };
    float* const to = sums + (is_up ? kInter : 0);
    if (KILN_BITS_GATE == KILN_BITS_UP || !is_up) {
      MultiplyRun<KILN_BITS_GATE>(is_up ? w_up : w_gate, run, slice, column,
                                  tokens, operand, to, &space);
    } else {
      MultiplyRun<KILN_BITS_UP>(w_up, run, slice, column, tokens, operand, to,
                                &space);
    }
    if (index + gridDim.y >= router.runs()) break;
    // Operand rows may be overwritten.
    __syncthreads();
  }
}

#elif KILN_PART == 2

// Sum of fc1, steps 4 to 7 and the products of step 8. Blocks as in fc1,
// x / KILN_SPLIT the output channels.
extern "C" __global__ void __launch_bounds__(kThreads, KILN_CTAS)
    kiln_stream_fc2(const RouteId* __restrict__ ids, const float* fc1,
                    const u16* __restrict__ rotations,
                    const u16* __restrict__ w_down, float* sums, u32 tokens) {
  __shared__ Space space;
  LetNextStart();
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  const Slice slice = FindSlice(blockIdx.x % kSplit);
  const u32 column =
      blockIdx.x / kSplit * kBlockChannels + warp * kWarpChannels;
  const u64 stride = static_cast<u64>(tokens) * kTopK * (2 * kInter);
  Router router(ids, tokens, &space.router);
  for (u32 index = blockIdx.y;; index += gridDim.y) {
    const Run run = router.Find(index);
    if (run.rows == 0) break;
    const u16* const table = rotations +
                             static_cast<u64>(run.expert) * (3 * kInter) +
                             slice.begin * 128;
    for (u32 i = 0; i < 3; ++i) {
      Prefetch(table + i * kInter, slice.blocks() * 128);
    }
    const auto operand = [&](u32 row, u32 block) {
      const u32 k = block * 128 + lane * 4;
      const u32 route = __shfl_sync(kAll, run.route, row);
      const float* const from =
          fc1 + static_cast<u64>(route) * (2 * kInter) + slice.begin * 128 + k;
      float gate[4], up[4], gate_svh[4], up_svh[4], down_suh[4], value[4];
      Load4(table + k, gate_svh);
      Load4(table + kInter + k, up_svh);
      Load4(table + 2 * kInter + k, down_suh);
      AddSlices<KILN_SLICES>(from, stride, gate);
      AddSlices<KILN_SLICES>(from + kInter, stride, up);
      kd::WarpHadamard128(gate, lane);
      kd::WarpHadamard128(up, lane);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const float g = gate[i] * gate_svh[i];
        const float u = up[i] * up_svh[i];
        value[i] = kd::Silu(g) * u * down_suh[i];
      }
      kd::WarpHadamard128(value, lane);
      return Round4(value);
    };
    MultiplyRun<KILN_BITS_DOWN>(w_down, run, slice, column, tokens, operand,
                                sums, &space);
    if (index + gridDim.y >= router.runs()) break;
    __syncthreads();
  }
  WaitForPrevious();
}

#else  // KILN_PART == 3

// Sum of fc2, steps 8 to 10. Block x has 128 channels of a token, a warp every
// kCombineWarps-th route of it.
constexpr u32 kCombineWarps = kTopK < 8 ? kTopK : 8;

extern "C" __global__ void __launch_bounds__(kCombineWarps * 32)
    kiln_stream_combine(const RouteId* __restrict__ ids,
                        const float* __restrict__ weights, const float* fc2,
                        const u16* __restrict__ down_svh,
                        float* __restrict__ out, u32 tokens) {
  __shared__ float4 rows[kTopK][32];
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  const u64 token = blockIdx.x / (kHidden / 128);
  const u32 channel = blockIdx.x % (kHidden / 128) * 128 + lane * 4;
  const u32 expert =
      lane < kTopK ? ExpertOf(ids[token * kTopK + lane]) : kExperts;
  const float weight = lane < kTopK ? weights[token * kTopK + lane] : 0.0f;
  const u32 active = __ballot_sync(kAll, expert < kExperts);
  const u64 stride = static_cast<u64>(tokens) * kTopK * kHidden;
  float svh[4];
  if (KILN_SHARED_SUH) Load4(down_svh + channel, svh);
  WaitForPrevious();
  for (u32 route = warp; route < kTopK; route += kCombineWarps) {
    if ((active >> route & 1) == 0) continue;
    if (!KILN_SHARED_SUH) {
      const u64 table = __shfl_sync(kAll, expert, route);
      Load4(down_svh + table * kHidden + channel, svh);
    }
    float v[4];
    AddSlices<KILN_SLICES>(fc2 + (token * kTopK + route) * kHidden + channel,
                           stride, v);
    kd::WarpHadamard128(v, lane);
    rows[route][lane] =
        make_float4(v[0] * svh[0], v[1] * svh[1], v[2] * svh[2], v[3] * svh[3]);
  }
  __syncthreads();
  if (warp != 0) return;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (u32 route = 0; route < kTopK; ++route) {
    const float by = __shfl_sync(kAll, weight, route);
    if ((active >> route & 1) == 0) continue;
    const float4 row = rows[route][lane];
    sum.x = kd::Fma(by, row.x, sum.x);
    sum.y = kd::Fma(by, row.y, sum.y);
    sum.z = kd::Fma(by, row.z, sum.z);
    sum.w = kd::Fma(by, row.w, sum.w);
  }
  *reinterpret_cast<float4*>(out + token * kHidden + channel) = sum;
}

#endif  // KILN_PART
