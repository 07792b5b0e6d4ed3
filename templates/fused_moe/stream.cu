// Fused mixture of experts for at most 16 tokens, recipe w4a16, EXL3 trellis
// weights: two CUDA kernels and no other launch.
//
// Arithmetic: spec "Trellis weight formats and fused-MoE arithmetic" 4.2 and
// 4.5. Source for sm_80 and later; clusters and programmatic dependent launch
// are used from sm_90 on. Read templates/fused_moe/README.md, "Stream", first:
// it lists parameters, launch rules, shared memory and arena slices.
//
// Prelude (integers): as cuda.cu, except that KILN_PART is 1 (fc1) or 2 (fc2),
// with these axes:
//   KILN_SUM       0 rounded: weights are rounded to fp16 as the codebook says
//                  1 halves (3INST, MCG): both halves of a hash are operands of
//                    their own, so the tensor core adds them, unrounded
//                  2 bytes (MUL1): the four bytes of a hash are u8 operands,
//                  and
//                    activations are two s8 terms per 128 block
//                  3 biased (MUL1): 1024 + byte sum is the operand, the affine
//                    map is applied to the sum, unrounded
//   KILN_CLUSTER   blocks that share the K of one result; 1 below sm_90
//   KILN_CHANNELS  fc2 only: output channels per block, 128 or 256
//   KILN_WARPS     warps per block, a multiple of 8
//   KILN_CTAS      blocks per SM that registers must allow
//
// Shape of the computation. A run is up to 8 (bytes: 4) routes of one expert.
// Every block finds its run in topk_ids by itself. A warp owns 32 output
// channels and one slice of K, and keeps packed weights in registers only: lane
// (g, c) = (l / 4, l % 4) loads a quarter row, 4K bytes at offset 4K * g, of
// k-tile c of four neighbouring ones. That holds the weights of channels g and
// g + 8 for all 16 k of the tile; the four fragments they make are the A
// operands of four MMAs over a permuted K, whose B operand lane (g, c) reads as
// 16 neighbouring elements of row g. Partial sums of the slices meet in shared
// memory, across the cluster, and are added in the order of K.

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
constexpr u32 kTokensMax = 16;
constexpr u32 kRoutesMax = kTokensMax * kTopK;

constexpr int kRounded = 0;
constexpr int kHalves = 1;
constexpr int kBytes = 2;
constexpr int kBiased = 3;
constexpr int kSum = KILN_SUM;

constexpr u32 kCluster = KILN_CLUSTER;
constexpr u32 kWarps = KILN_WARPS;
constexpr u32 kThreads = kWarps * 32;
constexpr u32 kWarpTiles = 2;  // 16-channel tiles per warp
#if KILN_PART == 1
constexpr u32 kDepth = kHidden;
constexpr u32 kChannels = 256;  // 128 of gate, then the same 128 of up
constexpr u32 kOperands = 2;    // gate and up
#else
constexpr u32 kDepth = kInter;
constexpr u32 kChannels = KILN_CHANNELS;
constexpr u32 kOperands = 1;
#endif
// A result that one warp finishes, an item: the channels of a row that a 128
// block needs, gate and up together.
#if KILN_PART == 1
constexpr u32 kItemChannels = 256;
#else
constexpr u32 kItemChannels = 128;
#endif
constexpr u32 kStrips = kChannels / (16 * kWarpTiles);
constexpr u32 kGroups = kWarps / kStrips;  // slices of K within a block
constexpr u32 kSlices = kCluster * kGroups;

constexpr u32 kRunRows = kSum == kBytes ? 4 : 8;
constexpr u32 kElementBytes = kSum == kHalves || kSum == kBytes ? 4 : 2;
// 128 blocks of K that one block works on, at most.
constexpr u32 kBlocksMax = (kDepth / 128 + kCluster - 1) / kCluster;
// Padded by 16 bytes: rows then start in different 16-byte bank groups.
constexpr u32 kRowBytes = kBlocksMax * 128 * kElementBytes + 16;
constexpr u32 kOperandBytes = 8 * kRowBytes;
constexpr u32 kRowItems = kChannels / kItemChannels;
// Items that one block of the cluster finishes, at most; and a warp.
constexpr u32 kBlockItems = (kRunRows * kRowItems + kCluster - 1) / kCluster;
constexpr u32 kWarpItems = (kBlockItems + kWarps - 1) / kWarps;
// Padded so that the four tokens of a fragment lie in different banks.
constexpr u32 kPartialRow = kItemChannels + 4;
constexpr u32 kSliceFloats = kBlockItems * kPartialRow;

static_assert(kHidden % 128 == 0 && kInter % 128 == 0, "H and I: 128 blocks");
static_assert(kExperts >= 1 && kExperts <= 1024, "E in 1..1024");
static_assert(kTopK >= 1 && kTopK <= 32, "top_k in 1..32");
static_assert(kWarps % kStrips == 0, "warps: a multiple of the strips");
static_assert(KILN_CODEBOOK == 2 ? kSum != kHalves
                                 : kSum == kRounded || kSum == kHalves,
              "a sum mode of another codebook");

extern __shared__ uint4 kiln_stream_shared[];

__device__ __forceinline__ u32 SharedAddress(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// ---- launches and clusters -------------------------------------------------

#if __CUDA_ARCH__ >= 900
#if KILN_CLUSTER > 1
#define KILN_STREAM_CLUSTER __cluster_dims__(KILN_CLUSTER, 1, 1)
#else
#define KILN_STREAM_CLUSTER
#endif

// The next kernel may start; it waits before it reads what this one wrote.
__device__ __forceinline__ void LetNextStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void WaitForPrevious() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
#else
#define KILN_STREAM_CLUSTER
static_assert(kCluster == 1, "clusters need sm_90");

__device__ __forceinline__ void LetNextStart() {}

__device__ __forceinline__ void WaitForPrevious() {}
#endif

// A barrier of the cluster, in two halves.
__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
#endif
}

__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

// Stores a float at a shared address of this block, but in block `rank` of the
// cluster.
__device__ __forceinline__ void StoreTo(u32 address, u32 rank, float v) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) {
    asm volatile(
        "{\n"
        "  .reg .b32 remote;\n"
        "  mapa.shared::cluster.u32 remote, %0, %1;\n"
        "  st.shared::cluster.f32 [remote], %2;\n"
        "}" ::"r"(address),
        "r"(rank), "f"(v)
        : "memory");
    return;
  }
#endif
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

__device__ __forceinline__ void PrefetchLine(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Asks the L2 cache for `count` elements of 2 bytes, 128 bytes per thread.
__device__ __forceinline__ void Prefetch(const u16* from, u32 count) {
  for (u32 i = threadIdx.x * 64; i < count; i += kThreads * 64) {
    PrefetchLine(from + i);
  }
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

// Up to kRunRows routes of one expert.
struct Run {
  u32 expert;
  u32 rows;   // 0: there is no such run
  u32 route;  // lane i: the route of row i
};

struct RouterSpace {
  u32 counts[(kExperts + 31) / 32 * 32];  // routes of each expert
  u16 experts[kRoutesMax];                // expert of each route
  u32 rows[kWarps][kRunRows];
};

// Finds runs. Every warp finds the same by itself.
class Router {
 public:
  // Reads all ids. Synchronises the block when there are more than 32.
  __device__ __forceinline__ Router(const RouteId* __restrict__ ids, u32 tokens,
                                    RouterSpace* space)
      : space_(space), routes_(tokens * kTopK), lane_(threadIdx.x % 32) {
    u32* counts = space->counts;
    if (routes_ <= 32) {
      expert_ = lane_ < routes_ ? ExpertOf(ids[lane_]) : kExperts;
      same_ = __match_any_sync(kAll, expert_);
      rank_ = __popc(same_ & Below());
      leaders_ =
          __ballot_sync(kAll, expert_ < kExperts && rank_ % kRunRows == 0);
      return;
    }
    for (u32 e = threadIdx.x; e < kPerLane * 32; e += kThreads) counts[e] = 0;
    __syncthreads();
    for (u32 r = threadIdx.x; r < routes_; r += kThreads) {
      const u32 e = ExpertOf(ids[r]);
      space->experts[r] = static_cast<u16>(e);
      if (e < kExperts) atomicAdd(&counts[e], 1u);
    }
    __syncthreads();
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
    same_ = __shfl_sync(kAll, rank_, 31);
    rank_ -= expert_;
  }

  // How many there are.
  __device__ __forceinline__ u32 runs() const {
    return routes_ <= 32 ? __popc(leaders_) : same_;
  }

  // Run `index`, in an order that is the same in every block.
  __device__ __forceinline__ Run Find(u32 index) const {
    Run run;
    run.expert = run.rows = run.route = 0;
    if (index >= runs()) return run;
    u32* row = space_->rows[threadIdx.x / 32];
    if (routes_ <= 32) {
      const u32 first =
          __ffs(__ballot_sync(kAll, (leaders_ >> lane_ & 1) != 0 &&
                                        __popc(leaders_ & Below()) == index)) -
          1;
      run.expert = __shfl_sync(kAll, expert_, first);
      const u32 base = __shfl_sync(kAll, rank_, first);
      const bool mine = expert_ == run.expert && rank_ - base < kRunRows;
      run.rows = __popc(__ballot_sync(kAll, mine));
      if (mine) row[rank_ - base] = lane_;
    } else {
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
      run.expert = __shfl_sync(kAll, found, first);
      const u32 base = __shfl_sync(kAll, chunk, first) * kRunRows;
      u32 seen = 0;
      for (u32 at = 0; at < routes_; at += 32) {
        const bool match =
            at + lane_ < routes_ && space_->experts[at + lane_] == run.expert;
        const u32 mask = __ballot_sync(kAll, match);
        const u32 rank = seen + __popc(mask & Below());
        if (match && rank - base < kRunRows) row[rank - base] = at + lane_;
        seen += __popc(mask);
      }
      run.rows = seen - base < kRunRows ? seen - base : kRunRows;
    }
    __syncwarp();
    run.route = row[lane_ < run.rows ? lane_ : 0];
    __syncwarp();
    return run;
  }

 private:
  static constexpr u32 kPerLane = (kExperts + 31) / 32;

  static __device__ __forceinline__ u32 RunsOf(u32 count) {
    return (count + kRunRows - 1) / kRunRows;
  }

  __device__ __forceinline__ u32 Below() const { return (1u << lane_) - 1; }

  RouterSpace* space_;
  u32 routes_, lane_;
  // At most 32 routes: of route `lane`, its expert, the lanes with the same
  // one and how many of them come before; leaders_ start a run. Otherwise
  // expert_ counts the runs of the lane's experts, rank_ those of the experts
  // before, same_ all of them.
  u32 expert_, same_, rank_, leaders_;
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
  BlockStats of[kOperands][kRunRows][kHasStats ? kBlocksMax : 1];

  __device__ __forceinline__ BlockStats* At(u32 operand, u32 row, u32 block) {
    return &of[operand][row][kHasStats ? block : 0];
  }
};

__device__ __forceinline__ float WarpSum(float v) {
#pragma unroll
  for (u32 step = 16; step != 0; step /= 2) v += __shfl_xor_sync(kAll, v, step);
  return v;
}

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

__device__ __forceinline__ u32 RoundPair(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint2 Round4(const float (&v)[4]) {
  return make_uint2(RoundPair(v[0], v[1]), RoundPair(v[2], v[3]));
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
    float v[4];
    Unpack4(bits, v);
    float most = 0.0f;
    bool finite = true;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float size = v[i] < 0.0f ? -v[i] : v[i];
      finite = finite && size <= 65504.0f;
      most = size > most ? size : most;
    }
#pragma unroll
    for (u32 step = 16; step != 0; step /= 2) {
      const float other = __shfl_xor_sync(kAll, most, step);
      most = other > most ? other : most;
    }
    finite = __all_sync(kAll, finite);
    const float unit =
        finite ? most * (1.0f / 127.0f) : kd::BitsFloat(0x7FC00000u);
    const float inverse = finite && most > 0.0f ? 127.0f / most : 0.0f;
    u32 first[4], second[4];
    int sums[2] = {0, 0};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float scaled = v[i] * inverse;
      int q = __float2int_rn(scaled);
      q = q > 127 ? 127 : q < -127 ? -127 : q;
      int r = __float2int_rn((scaled - static_cast<float>(q)) * 254.0f);
      r = r > 127 ? 127 : r < -127 ? -127 : r;
      sums[0] += q;
      sums[1] += r;
      first[i] = (static_cast<u32>(q) & 0xFFu) * 0x01010101u;
      second[i] = (static_cast<u32>(r) & 0xFFu) * 0x01010101u;
    }
    *reinterpret_cast<uint4*>(to) =
        make_uint4(first[0], first[1], first[2], first[3]);
    *reinterpret_cast<uint4*>(to + kRunRows * kRowBytes) =
        make_uint4(second[0], second[1], second[2], second[3]);
    const int sum = __reduce_add_sync(kAll, sums[0]);
    const int rest = __reduce_add_sync(kAll, sums[1]);
    if (lane == 0) {
      stats->unit[0] = unit;
      stats->unit[1] = unit * (1.0f / 254.0f);
      stats->sum = unit * static_cast<float>(sum) +
                   stats->unit[1] * static_cast<float>(rest);
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
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from));
  return v;
}

__device__ __forceinline__ void Mma(float (&d)[4], u32 a0, u32 a1, u32 a2,
                                    u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void MmaBytes(int (&d)[4], u32 a0, u32 a1, u32 a2,
                                         u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 1024 + the byte sums of two hashes, in fp16.
__device__ __forceinline__ u32 BiasedPair(u32 x0, u32 x1) {
  u32 pair;
  asm("prmt.b32 %0, %1, %2, 0x5410;"
      : "=r"(pair)
      : "r"(kd::ByteSum(x0, kd::kMul1Bias)),
        "r"(kd::ByteSum(x1, kd::kMul1Bias)));
  return pair;
}

// Fragment kPart of a quarter row with its elements of B, k = 2 kPart + {0, 1}
// in low[0..1] and 2 kPart + {8, 9} in high[0..1]; 2-byte elements: pairs, in
// low[0] and high[0].
template <int kBits, int kPart, typename T>
__device__ __forceinline__ void Accumulate(const u32 (&w)[kBits + 1],
                                           const u32* low, const u32* high,
                                           T (&d)[4]) {
  const kd::SpanBits bits = kd::QuarterSpan<kBits, kPart>(w);
  if constexpr (kSum == kRounded) {
    u32 a[4];
    kd::DecodeFragment<KILN_CODEBOOK, kBits>(bits, a);
    Mma(d, a[0], a[1], a[2], a[3], low[0], high[0]);
  } else {
    u32 x[8];
    kd::HashFragment<KILN_CODEBOOK, kBits>(bits, x);
    if constexpr (kSum == kBiased) {
      Mma(d, BiasedPair(x[0], x[1]), BiasedPair(x[4], x[5]),
          BiasedPair(x[2], x[3]), BiasedPair(x[6], x[7]), low[0], high[0]);
    } else if constexpr (kSum == kHalves) {
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
template <int kBits, u32 kWidth>
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

// sums += this warp's slice of operand x weights: `blocks` 128 blocks.
//   from: as in Fill; ring holds the first step
//   operand: shared address of the lane's 16 elements of the first k-tiles
//   first, second, term: statistics of the rows whose sums the lane holds, at
//       their first block, and which term of theirs
//   one: 1
template <int kBits, u32 kWidth>
__device__ __forceinline__ void Multiply(const unsigned char* from, u32 blocks,
                                         Ring<kBits>* ring, u32 operand,
                                         const BlockStats* first,
                                         const BlockStats* second, u32 term,
                                         u32 one, Sums& sums) {
  const u32 lane = threadIdx.x % 32;
  // ElementOffset's exchange, seen from this lane's k-tile.
  const u32 swap = lane & 2 ? 32 : 0;
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
      from += kStepBytes<kBits, kWidth>;
      if (half == 0 || block + 1 < blocks) Fill<kBits>(from, ring);
      HoldLoads(one, 2 + half);
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

// Weights are an affine map of what kBytes and kBiased summed up: adds the part
// that depends on the activations alone.
__device__ __forceinline__ float Affine(float sum, const BlockStats* stats,
                                        u32 blocks) {
  if constexpr (kSum == kRounded || kSum == kHalves) return sum;
  constexpr float kScale = 887.0f / 131072.0f;  // kMul1Scale
  constexpr float kOffset = -10.3828125f;       // kMul1Offset
  constexpr float kRest = kSum == kBytes ? kOffset + 1024 * kScale : kOffset;
  float activations = 0.0f;
  for (u32 i = 0; i < blocks; ++i) activations += stats[i].sum;
  return kd::Fma(sum, kScale, activations * kRest);
}

// What a block keeps in shared memory beside routes and statistics.
struct Space {
  unsigned char* operands;  // [kOperands][8][kRowBytes]
  float* partials;          // [kSlices][kBlockItems][kPartialRow]
};

__device__ __forceinline__ Space FindSpace() {
  Space space;
  space.operands = reinterpret_cast<unsigned char*>(kiln_stream_shared);
  space.partials =
      reinterpret_cast<float*>(space.operands + kOperands * kOperandBytes);
  return space;
}

// The slice of K of this thread's block and, within it, of this warp's group,
// in 128 blocks.
struct Slice {
  u32 begin, blocks;              // of the block
  u32 group_begin, group_blocks;  // of the warp, from the block's begin on
};

__device__ __forceinline__ Slice FindSlice(u32 rank) {
  const u32 group = threadIdx.x / 32 / kStrips;
  Slice slice;
  slice.begin = kDepth / 128 * rank / kCluster;
  slice.blocks = kDepth / 128 * (rank + 1) / kCluster - slice.begin;
  slice.group_begin = slice.blocks * group / kGroups;
  slice.group_blocks = slice.blocks * (group + 1) / kGroups - slice.group_begin;
  return slice;
}

// Address of the lane's quarter row in the first k-tile of the warp's slice,
// `column` channels into an expert's matrix.
template <int kBits, u32 kWidth>
__device__ __forceinline__ const unsigned char* FirstWords(
    const u16* __restrict__ weights, u32 expert, const Slice& slice,
    u32 column) {
  constexpr u64 kExpertBytes = static_cast<u64>(kDepth) * kWidth * kBits / 8;
  constexpr u64 kTileRow = static_cast<u64>(kWidth) * 2 * kBits;
  const u32 lane = threadIdx.x % 32;
  const u32 row = (slice.begin + slice.group_begin) * 8 + lane % 4;
  return reinterpret_cast<const unsigned char*>(weights) +
         expert * kExpertBytes + row * kTileRow + column * (2 * kBits) +
         lane / 4 * (4 * kBits);
}

// Multiplies and hands the warp's sums to the blocks of the cluster that finish
// them: item i is the work of block i % kCluster.
//   wait: blocks of the cluster may not have started yet
template <int kBits, u32 kWidth>
__device__ __forceinline__ void MultiplyAndStore(
    const unsigned char* from, Ring<kBits>* ring, const Slice& slice,
    const Space& space, OperandStats& stats, u32 operand, u32 rows, u32 one,
    bool wait) {
  const u32 lane = threadIdx.x % 32;
  const u32 group = threadIdx.x / 32 / kStrips;
  const u32 strip = threadIdx.x / 32 % kStrips;
  // Columns of B beyond the run repeat its last row; nobody reads their sums.
  const u32 column = lane / 4;
  const u32 row = column % kRunRows < rows ? column % kRunRows : rows - 1;
  const u32 operand_row = column / kRunRows * kRunRows + row;
  const u32 at = SharedAddress(space.operands) + operand * kOperandBytes +
                 operand_row * kRowBytes +
                 (slice.group_begin * 128 + lane % 4 * 16) * kElementBytes;
  // Columns of the sums.
  const u32 token = lane % 4 * 2 % kRunRows;
  const BlockStats* token_stats[2];
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    token_stats[i] = stats.At(operand, token + i < rows ? token + i : rows - 1,
                              slice.group_begin);
  }
  Sums sums = {};
  Multiply<kBits, kWidth>(from, slice.group_blocks, ring, at, token_stats[0],
                          token_stats[1], lane % 4 * 2 / kRunRows, one, sums);
  if (wait) ClusterWait();
  const u32 slice_index = (blockIdx.x % kCluster) * kGroups + group;
  const u32 to = SharedAddress(space.partials) +
                 (slice_index * kSliceFloats +
                  strip * (kWarpTiles * 16) % kItemChannels + lane / 4) *
                     4;
#pragma unroll
  for (u32 d = 0; d < 2; ++d) {
    const u32 item =
        (token + d) * kRowItems + strip * (kWarpTiles * 16) / kItemChannels;
    const u32 at = to + item / kCluster * (kPartialRow * 4);
#pragma unroll
    for (u32 i = 0; i < kWarpTiles; ++i) {
#pragma unroll
      for (u32 high = 0; high < 2; ++high) {
        float sum = sums[i][high * 2 + d];
        // The two terms of a row are four columns apart.
        if constexpr (kSum == kBytes) sum += __shfl_xor_sync(kAll, sum, 2);
        if (lane % 4 * 2 < kRunRows && token + d < rows) {
          StoreTo(at + (i * 16 + high * 8) * 4, item % kCluster,
                  Affine(sum, token_stats[d], slice.group_blocks));
        }
      }
    }
  }
}

// Adds up the slices of K in their order, for four neighbouring channels of an
// item of this block, and rounds to fp16 (steps 4 and 8). Behind ClusterWait.
__device__ __forceinline__ void AddSlices(const Space& space, u32 item,
                                          u32 column, float (&v)[4]) {
  const float* from = space.partials + item / kCluster * kPartialRow + column;
  v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll
  for (u32 i = 0; i < kSlices; ++i) {
    const float4 part =
        *reinterpret_cast<const float4*>(from + i * kSliceFloats);
    v[0] += part.x;
    v[1] += part.y;
    v[2] += part.z;
    v[3] += part.w;
  }
  Unpack4(Round4(v), v);
}

}  // namespace

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

#if KILN_BITS_GATE != KILN_BITS_UP
// Gate and up differ in type, so the first weights wait for the operands.
template <int kBits>
__device__ __forceinline__ void LoadAndMultiply(
    const u16* __restrict__ weights, const Run& run, const Slice& slice,
    u32 column, const Space& space, OperandStats& stats, u32 operand, u32 one,
    bool first) {
  Ring<kBits> ring;
  const unsigned char* from =
      FirstWords<kBits, kInter>(weights, run.expert, slice, column);
  if (slice.group_blocks != 0) Fill<kBits>(from, &ring);
  MultiplyAndStore<kBits, kInter>(from, &ring, slice, space, stats, operand,
                                  run.rows, one, first);
}
#endif

// Zeros what fc2 counts in and the output of tokens without an active route.
// The blocks of the first run share the tokens.
__device__ __forceinline__ void Clear(const RouteId* __restrict__ ids,
                                      u32* __restrict__ arrivals,
                                      float* __restrict__ out, u32 tokens) {
  if (blockIdx.y != 0) return;
  const u32 lane = threadIdx.x % 32;
  for (u32 token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (u32 i = threadIdx.x; i < kHidden / 128; i += kThreads) {
      arrivals[token * (kHidden / 128) + i] = 0;
    }
    const bool active =
        lane < kTopK &&
        ExpertOf(ids[static_cast<u64>(token) * kTopK + lane]) < kExperts;
    if (__any_sync(kAll, active)) continue;
    float* to = out + static_cast<u64>(token) * kHidden;
    for (u32 i = threadIdx.x; i < kHidden; i += kThreads) to[i] = 0.0f;
  }
}

}  // namespace

// Steps 1 to 7. Blocks (x, y): x % kCluster the slice of K, x / kCluster the
// 128 block of intermediate channels, y the run (and every gridDim.y-th one
// behind it).
extern "C" __global__ void KILN_STREAM_CLUSTER __launch_bounds__(kThreads,
                                                                 KILN_CTAS)
    kiln_stream_fc1(const RouteId* __restrict__ ids, const u16* __restrict__ x,
                    const u16* __restrict__ gate_suh,
                    const u16* __restrict__ up_suh,
                    const u16* __restrict__ w_gate,
                    const u16* __restrict__ w_up,
                    const u16* __restrict__ rotations,
                    u16* __restrict__ activated, u32* __restrict__ arrivals,
                    float* __restrict__ out, u32 tokens) {
  __shared__ RouterSpace router_space;
  __shared__ OperandStats stats;
  LetNextStart();
  ClusterArrive();
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  const u32 rank = blockIdx.x % kCluster;
  const u32 channel = blockIdx.x / kCluster * 128;
  const bool is_up = warp % kStrips >= kStrips / 2;
  const u32 column = channel + warp % (kStrips / 2) * (kWarpTiles * 16);
  const Slice slice = FindSlice(rank);
  const Space space = FindSpace();
  // While the ids are on their way.
  if (tokens == 1) {
    Prefetch(x + slice.begin * 128, slice.blocks * 128);
  }
  if (KILN_SHARED_SUH) {
    Prefetch(gate_suh + slice.begin * 128, slice.blocks * 128);
    Prefetch(up_suh + slice.begin * 128, slice.blocks * 128);
  }
  const Router router(ids, tokens, &router_space);
  const u32 one = (tokens + kTokensMax - 1) / kTokensMax;
  bool first = true;

  Run run = router.Find(blockIdx.y);
  for (u32 index = blockIdx.y; run.rows != 0;) {
#if KILN_BITS_GATE == KILN_BITS_UP
    Ring<KILN_BITS_GATE> ring;
    const unsigned char* from = FirstWords<KILN_BITS_GATE, kInter>(
        is_up ? w_up : w_gate, run.expert, slice, column);
    if (slice.group_blocks != 0) Fill<KILN_BITS_GATE>(from, &ring);
#endif

    for (u32 item = warp; item < run.rows * slice.blocks * 2; item += kWarps) {
      const u32 operand = item % 2;
      const u32 block = item / 2 % slice.blocks;
      const u32 row = item / 2 / slice.blocks;
      const u32 k = (slice.begin + block) * 128 + lane * 4;
      const u32 token = __shfl_sync(kAll, run.route, row) / kTopK;
      const u64 table = KILN_SHARED_SUH ? 0 : run.expert;
      const uint2 bits =
          Rotate(x + static_cast<u64>(token) * kHidden + k,
                 (operand == 0 ? gate_suh : up_suh) + table * kHidden + k);
      StoreOperand(space.operands + operand * kOperandBytes,
                   stats.At(operand, row, block), row, block, bits);
    }
    __syncthreads();

    // For the activation.
    const u16* table = rotations + static_cast<u64>(run.expert) * (3 * kInter) +
                       channel + lane * 4;
    if (warp < 3 && lane % 16 == 0) PrefetchLine(table + warp * kInter);

#if KILN_BITS_GATE == KILN_BITS_UP
    MultiplyAndStore<KILN_BITS_GATE, kInter>(
        from, &ring, slice, space, stats, is_up ? 1 : 0, run.rows, one, first);
#else
    if (is_up) {
      LoadAndMultiply<KILN_BITS_UP>(w_up, run, slice, column, space, stats, 1,
                                    one, first);
    } else {
      LoadAndMultiply<KILN_BITS_GATE>(w_gate, run, slice, column, space, stats,
                                      0, one, first);
    }
#endif

    ClusterArrive();
    Run next;
    next.expert = next.rows = next.route = 0;
    if (index + gridDim.y < router.runs()) {
      next = router.Find(index + gridDim.y);
    }
    // A row's activation is the work of one warp of the cluster. The others
    // may leave: nobody reads what they hold.
    const u32 row = warp * kCluster + rank;
    if (kCluster == 1 || row < run.rows || next.rows != 0) ClusterWait();
    if (row < run.rows) {
      float gate[4], up[4], gate_svh[4], up_svh[4], down_suh[4];
      Load4(table, gate_svh);
      Load4(table + kInter, up_svh);
      Load4(table + 2 * kInter, down_suh);
      AddSlices(space, row, lane * 4, gate);
      AddSlices(space, row, 128 + lane * 4, up);
      kd::WarpHadamard128(gate, lane);
      kd::WarpHadamard128(up, lane);
      float value[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const float g = gate[i] * gate_svh[i];
        const float u = up[i] * up_svh[i];
        value[i] = kd::Silu(g) * u * down_suh[i];
      }
      kd::WarpHadamard128(value, lane);
      const u32 route = __shfl_sync(kAll, run.route, row);
      *reinterpret_cast<uint2*>(activated + static_cast<u64>(route) * kInter +
                                channel + lane * 4) = Round4(value);
    }
    run = next;
    index += gridDim.y;
    if (run.rows == 0) break;
    // Sums may be overwritten.
    ClusterArrive();
    ClusterWait();
    first = false;
  }
  Clear(ids, arrivals, out, tokens);
}

#else  // KILN_PART == 2

// Steps 8 to 10. Blocks as in fc1, x / kCluster the kChannels output channels.
extern "C" __global__ void KILN_STREAM_CLUSTER __launch_bounds__(kThreads,
                                                                 KILN_CTAS)
    kiln_stream_fc2(const RouteId* __restrict__ ids,
                    const float* __restrict__ weights,
                    const u16* __restrict__ activated,
                    const u16* __restrict__ w_down,
                    const u16* __restrict__ down_svh,
                    float* __restrict__ routed, u32* __restrict__ arrivals,
                    float* __restrict__ out, u32 tokens) {
  constexpr int kBits = KILN_BITS_DOWN;
  __shared__ RouterSpace router_space;
  __shared__ OperandStats stats;
  ClusterArrive();
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  const u32 rank = blockIdx.x % kCluster;
  const u32 channel = blockIdx.x / kCluster * kChannels;
  const Slice slice = FindSlice(rank);
  const Space space = FindSpace();
  if (KILN_SHARED_SUH) Prefetch(down_svh + channel, kChannels);
  const Router router(ids, tokens, &router_space);
  const u32 one = (tokens + kTokensMax - 1) / kTokensMax;
  bool first = true;

  Run run = router.Find(blockIdx.y);
  for (u32 index = blockIdx.y; run.rows != 0;) {
    Ring<kBits> ring;
    const unsigned char* from = FirstWords<kBits, kHidden>(
        w_down, run.expert, slice,
        channel + warp % kStrips * (kWarpTiles * 16));
    if (slice.group_blocks != 0) Fill<kBits>(from, &ring);
    if (!KILN_SHARED_SUH) {
      Prefetch(down_svh + static_cast<u64>(run.expert) * kHidden + channel,
               kChannels);
    }
    if (first) WaitForPrevious();

    for (u32 item = warp; item < run.rows * slice.blocks; item += kWarps) {
      const u32 block = item % slice.blocks;
      const u32 row = item / slice.blocks;
      const u32 route = __shfl_sync(kAll, run.route, row);
      const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(
          activated + static_cast<u64>(route) * kInter +
          (slice.begin + block) * 128 + lane * 4));
      StoreOperand(space.operands, stats.At(0, row, block), row, block, bits);
    }
    __syncthreads();
    MultiplyAndStore<kBits, kHidden>(from, &ring, slice, space, stats, 0,
                                     run.rows, one, first);

    ClusterArrive();
    Run next;
    next.expert = next.rows = next.route = 0;
    if (index + gridDim.y < router.runs()) {
      next = router.Find(index + gridDim.y);
    }
    // As in fc1; item i is 128 channels of row i / kRowItems.
    const u32 items = run.rows * kRowItems;
    if (kCluster == 1 || warp * kCluster + rank < items || next.rows != 0) {
      ClusterWait();
    }
#pragma unroll
    for (u32 i = 0; i < kWarpItems; ++i) {
      const u32 item = (i * kWarps + warp) * kCluster + rank;
      if (item >= items) break;
      const u32 inner = item % kRowItems * 128 + lane * 4;
      const u32 route = __shfl_sync(kAll, run.route, item / kRowItems);
      const u32 token = route / kTopK;
      float value[4], svh[4];
      Load4(down_svh + (KILN_SHARED_SUH ? u64{0} : u64{run.expert}) * kHidden +
                channel + inner,
            svh);
      AddSlices(space, item, lane * 4, value);
      kd::WarpHadamard128(value, lane);
      *reinterpret_cast<float4*>(routed + static_cast<u64>(route) * kHidden +
                                 channel + inner) =
          make_float4(value[0] * svh[0], value[1] * svh[1], value[2] * svh[2],
                      value[3] * svh[3]);
      // The last of a token's routes to arrive adds them up, in their order.
      const RouteId* own = ids + static_cast<u64>(token) * kTopK;
      const u32 active = __ballot_sync(
          kAll,
          lane < kTopK && ExpertOf(own[lane < kTopK ? lane : 0]) < kExperts);
      const float own_weight =
          lane < kTopK ? weights[static_cast<u64>(token) * kTopK + lane] : 0.0f;
      __threadfence();
      __syncwarp();
      u32 before = 0;
      if (lane == 0) {
        before = atomicAdd(
            &arrivals[token * (kHidden / 128) + (channel + inner) / 128], 1u);
      }
      before = __shfl_sync(kAll, before, 0);
      if (before + 1 != __popc(active)) continue;
      __threadfence();
      const float* rows =
          routed + static_cast<u64>(token) * kTopK * kHidden + channel + inner;
      constexpr u32 kAhead = kTopK < 8 ? kTopK : 8;
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (u32 base = 0; base < kTopK; base += kAhead) {
        float4 part[kAhead];
#pragma unroll
        for (u32 j = 0; j < kAhead; ++j) {
          part[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if ((active >> (base + j) % 32 & 1) != 0 && base + j < kTopK) {
            part[j] = __ldcg(reinterpret_cast<const float4*>(
                rows + static_cast<u64>(base + j) * kHidden));
          }
        }
#pragma unroll
        for (u32 j = 0; j < kAhead; ++j) {
          const float weight = __shfl_sync(kAll, own_weight, (base + j) % 32);
          if ((active >> (base + j) % 32 & 1) == 0 || base + j >= kTopK) {
            continue;
          }
          sum[0] = kd::Fma(weight, part[j].x, sum[0]);
          sum[1] = kd::Fma(weight, part[j].y, sum[1]);
          sum[2] = kd::Fma(weight, part[j].z, sum[2]);
          sum[3] = kd::Fma(weight, part[j].w, sum[3]);
        }
      }
      *reinterpret_cast<float4*>(out + static_cast<u64>(token) * kHidden +
                                 channel + inner) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    run = next;
    index += gridDim.y;
    if (run.rows == 0) break;
    ClusterArrive();
    ClusterWait();
    first = false;
  }
  // This grid must not end before the one it depends on.
  if (first) WaitForPrevious();
}

#endif  // KILN_PART == 2
