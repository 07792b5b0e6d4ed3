// Fused mixture of experts, recipe w4a16, EXL3 trellis weights: the two matrix
// products on Hopper's warpgroup MMA (sm_90a), for many rows per expert.
// Routing, rotation, activation and combining are those of cuda.cu (part 0,
// with KILN_OPERAND_ORDER 1), and so are parameters and results of the two
// entries.
//
// Prelude as cuda.cu. Axes:
//   KILN_TOKENS_TILE T  rows of one expert per tile: 32, 64, ... 320
//   KILN_CTAS           1 or 2 blocks per SM (2: T up to 64)
//   KILN_DECODED        1: kiln_moe_decode has decoded the weights, into memory
//   KILN_ATOMIC_SUM     1: fc2 adds weighted rows to the tokens of `out`, which
//                       kiln_moe_route clears and kiln_moe_finish finishes
//
// Shape of the computation. As in cuda.cu weights are the A operand and go from
// the decoder straight into it, tokens are N; but wgmma runs beside the
// decoding of the next step instead of taking its issue slots. A block owns 128
// output channels of one tile at a time: two warpgroups of 64 channels decode
// and multiply, a third one copies (operand rows by cp.async, packed weights by
// bulk copies) into a ring of steps of 64 input channels and runs ahead into
// the next tile. The grid is as large as the device; blocks take every
// gridDim.x'th item. A sum runs over k in ascending steps: T, KILN_CTAS and
// KILN_DECODED do not change a bit.
//
// Order of the operand. Lane (g, c) of a warp, c = lane % 4, reads the packed
// weights of channels g and g + 8 of k-tile c of four: neighbouring words,
// which it decodes into the fragments of four MMAs. MMA j then has input
// channels 16c + 2j + {0, 1, 8, 9} of the step where its lanes have k slots 2c
// + {0, 1, 8, 9}, so the 64 channels of a row lie in that order in memory; see
// StoreOperand in cuda.cu.

#include "cuda/grouped.h"
#include "cuda/warp.h"
#include "device/fragment.h"
#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"

namespace {

using kd::Row;
using kd::Tile;
using kd::Totals;
using kd::u16;
using kd::u32;
using kd::u64;

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kInter = KILN_INTER;
constexpr u32 kTopK = KILN_TOPK;

constexpr u32 kTokens = KILN_TOKENS_TILE;
constexpr u32 kStages = KILN_DECODED ? 3 : 4;
// Decoded weights are stored as if they were packed to 16 bits: the four
// k-tiles of a step are the fragments of its four MMAs.
constexpr int kDecodedBits = 16;
constexpr int kGateBits = KILN_DECODED ? kDecodedBits : KILN_BITS_GATE;
constexpr int kUpBits = KILN_DECODED ? kDecodedBits : KILN_BITS_UP;
constexpr int kDownBits = KILN_DECODED ? kDecodedBits : KILN_BITS_DOWN;
constexpr u32 kChannels = 128;
constexpr u32 kDepthStep = 64;
// A tile multiplies only as many units of rows as hold its rows, up to 8 by one
// MMA.
constexpr u32 kUnit = 32;
constexpr u32 kUnits = kTokens / kUnit;
// Beyond 256 rows, two MMAs, registers suffice for one number of units only.
constexpr u32 kLiveMin = kTokens <= 256 ? 1 : kUnits;
// Rows that a warpgroup passes on through shared memory at once.
constexpr u32 kResultRows = kTokens <= 128 ? 32 : 64;
// A warp's 16 channels by the rows of a tile. One variable serves all numbers
// of live units: the compiler keeps the sums of every MMA chain in registers of
// their own.
using Sums = float[kTokens / 2];
constexpr u32 kConsumers = 256;  // threads that multiply
constexpr u32 kProducers = 128;  // threads that copy
constexpr u32 kThreads = kConsumers + kProducers;
// Of a thread; three warpgroups share what the compiler may give to each.
constexpr u32 kConsumerRegisters = KILN_CTAS == 1 ? 216 : 104;
constexpr u32 kProducerRegisters = KILN_CTAS == 1 ? 72 : 32;

constexpr u32 kRowBytes = kDepthStep * 2;
constexpr u32 kOperandBytes = kTokens * kRowBytes;
// 16-byte pieces of a row of a step; the producers copy 16 rows at once.
constexpr u32 kRowPieces = kRowBytes / 16;
constexpr u32 kRowsAtOnce = kProducers / kRowPieces;
constexpr u32 kRowCopies = kTokens / kRowsAtOnce;

static_assert(kHidden % 128 == 0 && kInter % 128 == 0, "H and I: 128 blocks");
static_assert(kTokens % kRowsAtOnce == 0 && kTokens % kUnit == 0,
              "T: a multiple of the MMA's rows");
static_assert(KILN_CTAS == 1 || kTokens <= 64, "two blocks: T up to 64");

// Bytes of 16 input channels of a block's packed weights, and their stride in
// shared memory: padded so that the four k-tiles of a step lie in other banks.
template <int kBits>
constexpr u32 kKTileBytes = 2 * kChannels* kBits;
template <int kBits>
constexpr u32 kKTileStride = kKTileBytes<kBits> + 32;

// ---- barriers, bulk copies -------------------------------------------------

__device__ __forceinline__ void InitBarrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier),
               "r"(count)
               : "memory");
}

__device__ __forceinline__ void Arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// Arrives, and the phase also waits for so many bytes of bulk copies.
__device__ __forceinline__ void ArriveExpecting(u32 barrier, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

// Arrives when this thread's copies so far have landed.
__device__ __forceinline__ void ArriveAfterCopies(u32 barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier)
      : "memory");
}

__device__ __forceinline__ void WaitBarrier(u32 barrier, u32 parity) {
  u32 done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void CopyBulk(u32 to, const void* from, u32 bytes,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Waits for the 128 threads of a consuming warpgroup.
__device__ __forceinline__ void SyncWarpgroup(u32 group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// ---- warpgroup MMA ---------------------------------------------------------

__device__ __forceinline__ void BeginMmas() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void CommitMmas() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <u32 kPending>
__device__ __forceinline__ void WaitMmas() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Rows of 128 bytes, 16-byte pieces swizzled by the row; groups of 8 rows are
// 1024 bytes apart.
__device__ __forceinline__ u64 OperandDescriptor(u32 address) {
  constexpr u64 kRowGroups = u64{1024 / 16} << 32;
  constexpr u64 kSwizzle128 = u64{1} << 62;
  return kSwizzle128 | kRowGroups | (u64{1} << 16) | (address >> 4);
}

// Sums of one MMA: 64 channels x 32 rows a list.
#define KILN_SUMS_0                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define KILN_SUMS_1                          \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define KILN_SUMS_2                          \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define KILN_SUMS_3                          \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define KILN_SUMS_4                          \
  "%64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define KILN_SUMS_5                          \
  "%80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define KILN_SUMS_6                              \
  "%96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define KILN_SUMS_7                                  \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define KILN_EIGHT(d, i)                                                    \
  "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), \
      "+f"((d)[(i) + 4]), "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]),           \
      "+f"((d)[(i) + 7])
#define KILN_SIXTEEN(d, i) KILN_EIGHT(d, i), KILN_EIGHT(d, (i) + 8)

// Sums of units kFirst to kFirst + kLive (+)= a x their operand rows, from the
// descriptor's on; 64 channels, 16 k. Without `add` what they held is dropped.
template <u32 kLive, u32 kFirst>
__device__ __forceinline__ void MultiplyUnits(Sums& sums, const u32 (&a)[4],
                                              u64 rows, u32 add) {
  float* const d = &sums[kFirst * 16];
  if constexpr (kLive == 1) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.b32 p, %21, 0;\n"
        "  wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{" KILN_SUMS_0
        "}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n"
        "}"
        : KILN_SIXTEEN(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add));
  } else if constexpr (kLive == 2) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.b32 p, %37, 0;\n"
        "  wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{" KILN_SUMS_0 ", " KILN_SUMS_1
        "}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
        "}"
        : KILN_SIXTEEN(d, 0), KILN_SIXTEEN(d, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add));
  } else if constexpr (kLive == 3) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.b32 p, %53, 0;\n"
        "  wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
        "{" KILN_SUMS_0 ", " KILN_SUMS_1 ", " KILN_SUMS_2
        "}, "
        "{%48, %49, %50, %51}, %52, p, 1, 1, 0;\n"
        "}"
        : KILN_SIXTEEN(d, 0), KILN_SIXTEEN(d, 16), KILN_SIXTEEN(d, 32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add));
  } else if constexpr (kLive == 4) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.b32 p, %69, 0;\n"
        "  wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{" KILN_SUMS_0 ", " KILN_SUMS_1 ", " KILN_SUMS_2 ", " KILN_SUMS_3
        "}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n"
        "}"
        : KILN_SIXTEEN(d, 0), KILN_SIXTEEN(d, 16), KILN_SIXTEEN(d, 32),
          KILN_SIXTEEN(d, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add));
  } else if constexpr (kLive == 5) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.b32 p, %85, 0;\n"
        "  wgmma.mma_async.sync.aligned.m64n160k16.f32.f16.f16 "
        "{" KILN_SUMS_0 ", " KILN_SUMS_1 ", " KILN_SUMS_2 ", " KILN_SUMS_3
        ", " KILN_SUMS_4
        "}, "
        "{%80, %81, %82, %83}, %84, p, 1, 1, 0;\n"
        "}"
        : KILN_SIXTEEN(d, 0), KILN_SIXTEEN(d, 16), KILN_SIXTEEN(d, 32),
          KILN_SIXTEEN(d, 48), KILN_SIXTEEN(d, 64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add));
  } else if constexpr (kLive == 6) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.b32 p, %101, 0;\n"
        "  wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 "
        "{" KILN_SUMS_0 ", " KILN_SUMS_1 ", " KILN_SUMS_2 ", " KILN_SUMS_3
        ", " KILN_SUMS_4 ", " KILN_SUMS_5
        "}, "
        "{%96, %97, %98, %99}, %100, p, 1, 1, 0;\n"
        "}"
        : KILN_SIXTEEN(d, 0), KILN_SIXTEEN(d, 16), KILN_SIXTEEN(d, 32),
          KILN_SIXTEEN(d, 48), KILN_SIXTEEN(d, 64), KILN_SIXTEEN(d, 80)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add));
  } else if constexpr (kLive == 7) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.b32 p, %117, 0;\n"
        "  wgmma.mma_async.sync.aligned.m64n224k16.f32.f16.f16 "
        "{" KILN_SUMS_0 ", " KILN_SUMS_1 ", " KILN_SUMS_2 ", " KILN_SUMS_3
        ", " KILN_SUMS_4 ", " KILN_SUMS_5 ", " KILN_SUMS_6
        "}, "
        "{%112, %113, %114, %115}, %116, p, 1, 1, 0;\n"
        "}"
        : KILN_SIXTEEN(d, 0), KILN_SIXTEEN(d, 16), KILN_SIXTEEN(d, 32),
          KILN_SIXTEEN(d, 48), KILN_SIXTEEN(d, 64), KILN_SIXTEEN(d, 80),
          KILN_SIXTEEN(d, 96)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add));
  } else if constexpr (kLive == 8) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.b32 p, %133, 0;\n"
        "  wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
        "{" KILN_SUMS_0 ", " KILN_SUMS_1 ", " KILN_SUMS_2 ", " KILN_SUMS_3
        ", " KILN_SUMS_4 ", " KILN_SUMS_5 ", " KILN_SUMS_6 ", " KILN_SUMS_7
        "}, "
        "{%128, %129, %130, %131}, %132, p, 1, 1, 0;\n"
        "}"
        : KILN_SIXTEEN(d, 0), KILN_SIXTEEN(d, 16), KILN_SIXTEEN(d, 32),
          KILN_SIXTEEN(d, 48), KILN_SIXTEEN(d, 64), KILN_SIXTEEN(d, 80),
          KILN_SIXTEEN(d, 96), KILN_SIXTEEN(d, 112)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(add));
  }
}

// The same of kLive units from the first on, as one MMA or two.
template <u32 kLive>
__device__ __forceinline__ void Multiply(Sums& sums, const u32 (&a)[4],
                                         u64 rows, u32 add) {
  if constexpr (kLive <= 8) {
    MultiplyUnits<kLive, 0>(sums, a, rows, add);
  } else {
    // The larger one last: what follows runs beside it.
    MultiplyUnits<kLive - 8, 0>(sums, a, rows, add);
    MultiplyUnits<8, kLive - 8>(
        sums, a, rows + (kLive - 8) * (kUnit * kRowBytes) / 16, add);
  }
}

// ---- the ring --------------------------------------------------------------

// Shared memory: operand rows, packed weights, barriers, each kStages times;
// then for each consuming warpgroup two buffers of rows on their way out.
extern __shared__ __align__(1024) unsigned char kiln_moe_shared[];

template <int kBits>
constexpr u32 kWeightsAt = kStages* kOperandBytes;
template <int kBits>
constexpr u32 kBarriersAt =
    kWeightsAt<kBits> + kStages * 4 * kKTileStride<kBits>;

constexpr u32 kResultBytes = kResultRows * 128;
template <int kBits>
constexpr u32 kResultsAt = kBarriersAt<kBits> + kStages * 16;

// A place of the ring and how often it came round. kMaxBits: of the larger of
// two matrices that use the ring in turn.
template <int kMaxBits>
struct Place {
  u32 slot = 0;
  u32 parity = 0;

  __device__ __forceinline__ u32 operand() const {
    return kd::SharedAddress(kiln_moe_shared) + slot * kOperandBytes;
  }

  __device__ __forceinline__ u32 weights() const {
    return kd::SharedAddress(kiln_moe_shared) + kWeightsAt<kMaxBits> +
           slot * (4 * kKTileStride<kMaxBits>);
  }

  __device__ __forceinline__ u32 full() const {
    return kd::SharedAddress(kiln_moe_shared) + kBarriersAt<kMaxBits> +
           slot * 16;
  }

  __device__ __forceinline__ u32 empty() const { return full() + 8; }

  __device__ __forceinline__ void Advance() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <int kMaxBits>
__device__ __forceinline__ void InitRing() {
  if (threadIdx.x == 0) {
    Place<kMaxBits> place;
    for (; place.parity == 0; place.Advance()) {
      InitBarrier(place.full(), kProducers + kProducers / 32);
      InitBarrier(place.empty(), kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}

// What a producer thread copies of a tile's rows: a piece of every 16th row.
using Pieces = const u16* [kRowCopies];

// The pieces of the first step. Rows beyond the tile, which share an MMA with
// others, are its last one again.
//   row_of(sorted row): row of the operand
template <u32 kDepth, typename RowOf>
__device__ __forceinline__ void FindPieces(const u16* operand, const Tile& tile,
                                           Pieces& pieces,
                                           const RowOf& row_of) {
  const u32 thread = threadIdx.x - kConsumers;
#pragma unroll
  for (u32 i = 0; i < kRowCopies; ++i) {
    const u32 at = thread / kRowPieces + i * kRowsAtOnce;
    const u32 row = row_of(tile.first + (at < tile.rows ? at : tile.rows - 1));
    pieces[i] =
        operand + static_cast<u64>(row) * kDepth + thread % kRowPieces * 8;
  }
}

// One step of an item, by the producers: copies the pieces kOffset bytes ahead.
// Each warp brings one k-tile of the step's weights, its first at `weights`.
template <int kBits, u32 kOffset, int kMaxBits>
__device__ __forceinline__ void ProduceStep(const unsigned char* weights,
                                            const Pieces& pieces, u32 rows,
                                            Place<kMaxBits>& place) {
  const u32 thread = threadIdx.x - kConsumers;
  const u32 row = thread / kRowPieces;
  WaitBarrier(place.empty(), place.parity ^ 1);
  const u32 full = place.full();
  if (thread % 32 == 0) {
    // The phase cannot end before this arrival, so the bytes may come first.
    CopyBulk(place.weights() + thread / 32 * kKTileStride<kBits>, weights,
             kKTileBytes<kBits>, full);
    ArriveExpecting(full, kKTileBytes<kBits>);
  }
  // Rows of a thread are 16 apart, so that their swizzle is the same.
  const u32 to =
      place.operand() + row * kRowBytes + (thread % kRowPieces ^ row % 8) * 16;
#pragma unroll
  for (u32 i = 0; i < kRowCopies; ++i) {
    if (i % 4 == 0 && i != 0 && i * kRowsAtOnce >= rows) break;
    kd::CopyAsync16<kOffset>(to + i * (kRowsAtOnce * kRowBytes), pieces[i]);
  }
  ArriveAfterCopies(full);
  place.Advance();
}

// All steps of one item.
//   weights: byte address of the block's first tile in the expert's K16 row 0
template <int kBits, u32 kDepth, u32 kWidth, int kMaxBits>
__device__ __forceinline__ void Produce(
    const unsigned char* __restrict__ weights, Pieces& pieces, u32 rows,
    Place<kMaxBits>& place) {
  constexpr u64 kKTileRow = static_cast<u64>(kWidth) * 2 * kBits;
  weights += (threadIdx.x - kConsumers) / 32 * kKTileRow;
  // Addresses move on once for so many steps.
  constexpr u32 kAtOnce = kDepth / kDepthStep % 4 == 0 ? 4 : 2;
#pragma unroll 1
  for (u32 step = 0; step < kDepth / kDepthStep; step += kAtOnce) {
    ProduceStep<kBits, 0>(weights, pieces, rows, place);
    ProduceStep<kBits, kRowBytes>(weights + 4 * kKTileRow, pieces, rows, place);
    if constexpr (kAtOnce == 4) {
      ProduceStep<kBits, 2 * kRowBytes>(weights + 8 * kKTileRow, pieces, rows,
                                        place);
      ProduceStep<kBits, 3 * kRowBytes>(weights + 12 * kKTileRow, pieces, rows,
                                        place);
    }
    weights += 4 * kAtOnce * kKTileRow;
#pragma unroll
    for (u32 i = 0; i < kRowCopies; ++i) {
      pieces[i] += kAtOnce * kDepthStep;
      // Not worked out again from the start for every step.
      asm volatile("" : "+l"(pieces[i]));
    }
  }
}

// Where a consumer's weights of slot 0 lie: the K words that hold channels g
// and g + 8 of k-tile c, and the word before them on the tile's ring; of
// decoded weights its fragment of the first MMA. Kept in registers: the
// compiler would work them out again in every step.
template <int kBits, int kMaxBits>
struct WordsAddress {
  u32 own, before;

  __device__ __forceinline__ WordsAddress() {
    const u32 lane = threadIdx.x % 32;
    if constexpr (kBits == kDecodedBits) {
      own = kd::SharedAddress(kiln_moe_shared) + kWeightsAt<kMaxBits> +
            threadIdx.x / 32 * (kd::kTileWords<kBits> * 4) + lane * 16;
      before = own;
      asm volatile("" : "+r"(own));
      return;
    }
    const u32 group = lane / 4;
    const u32 tile = kd::SharedAddress(kiln_moe_shared) + kWeightsAt<kMaxBits> +
                     lane % 4 * kKTileStride<kBits> +
                     threadIdx.x / 32 * (kd::kTileWords<kBits> * 4);
    own = tile + group * (kBits * 4);
    before =
        tile + ((group == 0 ? kd::kTileWords<kBits> : group * kBits) - 1) * 4;
    asm volatile("" : "+r"(own), "+r"(before));
  }
};

template <int kBits, int kMaxBits>
__device__ __forceinline__ void LoadWords(
    const WordsAddress<kBits, kMaxBits>& at, const Place<kMaxBits>& place,
    u32 (&words)[kBits + 1]) {
  const u32 offset = place.slot * (4 * kKTileStride<kMaxBits>);
  if constexpr (kBits == kDecodedBits) {
    words[0] = at.own + offset;
    return;
  }
  kd::LoadShared(at.before + offset, words[0]);
  const u32 own = at.own + offset;
  if constexpr (kBits % 4 == 0) {
#pragma unroll
    for (u32 i = 0; i < kBits; i += 4) {
      kd::LoadShared(own + i * 4, words[1 + i], words[2 + i], words[3 + i],
                     words[4 + i]);
    }
  } else if constexpr (kBits % 2 == 0) {
#pragma unroll
    for (u32 i = 0; i < kBits; i += 2) {
      kd::LoadShared(own + i * 4, words[1 + i], words[2 + i]);
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < kBits; ++i) kd::LoadShared(own + i * 4, words[1 + i]);
  }
}

// The A fragment of one MMA, a quarter of a step.
using Fragment = u32[4];

// The compiler must not give the registers of a fragment to anything else
// before this.
__device__ __forceinline__ void KeepUntilHere(Fragment& a) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]));
}

// Decodes a quarter of a step, or loads it, and starts its MMA. words: as
// LoadWords leaves them; of decoded weights the first is an address. The MMA of
// the quarter before, which reads `other`, is done when this returns.
template <u32 kLive, u32 kQuarter, int kBits>
__device__ __forceinline__ void StartQuarter(const u32 (&words)[kBits + 1],
                                             u64 operand, u32 add, Sums& sums,
                                             Fragment& own, Fragment& other) {
  if constexpr (kBits == kDecodedBits) {
    kd::LoadShared(words[0] + kQuarter * kKTileStride<kBits>, own[0], own[1],
                   own[2], own[3]);
  } else {
    kd::DecodeFragment<KILN_CODEBOOK, kBits>(
        kd::QuarterSpan<kBits, kQuarter>(words), own);
  }
  BeginMmas();
  Multiply<kLive>(sums, own, operand + kQuarter * 2, add);
  CommitMmas();
  WaitMmas<1>();
  KeepUntilHere(other);
}

// All steps of one item, by a consumer: the sums of kLive units of rows. While
// one MMA runs, the next one's weights are decoded: a warp that starts an MMA
// waits until its last one has ended, so there is work between any two.
//
// Rows that cp.async brought are read by wgmma without a proxy fence, as
// CUTLASS does: the barrier's phase ends when they are in shared memory. The
// fence would have every consumer wait for all copies on their way.
template <u32 kLive, int kBits, u32 kDepth, int kMaxBits>
__device__ __forceinline__ void Consume(const WordsAddress<kBits, kMaxBits>& at,
                                        Place<kMaxBits>& place, Sums& sums,
                                        Fragment& even, Fragment& odd) {
  constexpr u32 kSteps = kDepth / kDepthStep;
  const bool first_lane = threadIdx.x % 32 == 0;
  u32 words[kBits + 1];
  u32 previous = 0;  // barrier of the step before
  WaitBarrier(place.full(), place.parity);
  LoadWords(at, place, words);
#pragma unroll 1
  for (u32 step = 0; step < kSteps; ++step) {
    const u64 operand = OperandDescriptor(place.operand());
    StartQuarter<kLive, 0, kBits>(words, operand, step, sums, even, odd);
    __syncwarp();
    if (first_lane && step != 0) Arrive(previous);
    previous = place.empty();
    place.Advance();
    StartQuarter<kLive, 1, kBits>(words, operand, 1, sums, odd, even);
    // The next step's words arrive while this one's last ones are decoded.
    u32 next[kBits + 1];
    if (step + 1 < kSteps) {
      WaitBarrier(place.full(), place.parity);
      LoadWords(at, place, next);
    }
    StartQuarter<kLive, 2, kBits>(words, operand, 1, sums, even, odd);
    StartQuarter<kLive, 3, kBits>(words, operand, 1, sums, odd, even);
#pragma unroll
    for (u32 i = 0; i <= kBits; ++i) words[i] = next[i];
  }
  WaitMmas<0>();
  KeepUntilHere(odd);
  __syncwarp();
  if (first_lane) Arrive(previous);
}

// Four 8 x 8 matrices of fp16 as an MMA leaves them, stored transposed: lane l
// names where 8 values of row l % 8 of matrix l / 8 go.
__device__ __forceinline__ void StoreTransposed(u32 to, u32 a, u32 b, u32 c,
                                                u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], "
      "{%1, %2, %3, %4};" ::"r"(to),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

__device__ __forceinline__ void CopyBulkOut(u16* to, u32 from, u32 bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// Until this thread's bulk copies have read shared memory.
__device__ __forceinline__ void WaitBulkReads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void WaitBulkWrites() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The rows of the sums, as fp16, to a warpgroup's block of 64 channels of the
// product, where rows of 128 bytes follow each other: bulk copies from two
// buffers in turn, so that nobody waits for memory. See ProductPiece in
// cuda.cu.
//   next: which of the two buffers, 0 or 1
//   to: of the tile's first row, whose number in the product is `first`
template <int kMaxBits>
__device__ __forceinline__ void StoreSums(const Sums& sums, u16* to, u32 first,
                                          u32 rows, u32& next) {
  const u32 group = threadIdx.x / 128;
  const u32 thread = threadIdx.x % 128;
  const u32 lane = thread % 32;
  const u32 base = kd::SharedAddress(kiln_moe_shared) + kResultsAt<kMaxBits> +
                   group * (2 * kResultBytes);
  // Matrices: channels 0-7 and 8-15 of rows 0-7, then of rows 8-15.
  const u32 piece = thread / 32 * 2 + lane / 8 % 2;
  const u32 offset =
      (lane / 16 * 8 + lane % 8) * 128 + (piece ^ (first + lane % 8) % 8) * 16;
#pragma unroll
  for (u32 at = 0; at < kTokens; at += kResultRows) {
    if (at >= rows) break;
    const u32 buffer = base + next * kResultBytes;
#pragma unroll
    for (u32 i = 0; i < kResultRows && at + i < kTokens; i += 16) {
      const float* d = &sums[(at + i) / 2];
      StoreTransposed(buffer + offset + i * 128, kd::RoundPair(d[0], d[1]),
                      kd::RoundPair(d[2], d[3]), kd::RoundPair(d[4], d[5]),
                      kd::RoundPair(d[6], d[7]));
    }
    // Seen by the bulk copy; and the other buffer is free after the barrier.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (thread == 0) WaitBulkReads();
    __syncwarp();
    SyncWarpgroup(group);
    if (thread == 0) {
      const u32 left = rows - at;
      CopyBulkOut(to + at * 64, buffer,
                  (left < kResultRows ? left : kResultRows) * 128);
    }
    __syncwarp();
    next ^= 1;
  }
}

#if KILN_ATOMIC_SUM

// Rows that a warpgroup adds at once, of 64 channels as fp32; 16 bytes more
// than these keep the rows that a warp writes in other banks.
constexpr u32 kAddedRows = 32;
constexpr u32 kAddedRowBytes = 64 * 4 + 16;
constexpr u32 kAddedBytes = kAddedRows * kAddedRowBytes;

__device__ __forceinline__ void StoreShared(u32 to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

__device__ __forceinline__ void AddToMemory(float* to, const u32 (&v)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "f"(__uint_as_float(v[0])), "f"(__uint_as_float(v[1])),
               "f"(__uint_as_float(v[2])), "f"(__uint_as_float(v[3]))
               : "memory");
}

// Adds the rows of the sums, as fp16 and times their route's weight, to this
// warpgroup's 64 of the 128 channels from `out` on of their tokens. Rows meet
// in memory in any order. In shared memory two buffers in turn, where rows are
// transposed; then for each warpgroup weight and token of the tile's rows.
//   rows: of the tile, `live` of them
template <int kMaxBits>
__device__ __forceinline__ void AddSums(const Sums& sums, const Row* rows,
                                        u32 live,
                                        const float* __restrict__ weights,
                                        float* out, u32& next) {
  const u32 group = threadIdx.x / 128;
  const u32 thread = threadIdx.x % 128;
  const u32 lane = thread % 32;
  const u32 shared = kd::SharedAddress(kiln_moe_shared) + kResultsAt<kMaxBits>;
  const u32 base = shared + group * (2 * kAddedBytes);
  const u32 routes = shared + 2 * 2 * kAddedBytes + group * (kTokens * 8);
  out += group * 64 + thread % 16 * 4;
  for (u32 row = thread; row < live; row += 128) {
    const u32 route = rows[row].route;
    StoreShared(routes + row * 8, weights[route]);
    StoreShared(routes + row * 8 + 4, __uint_as_float(route / kTopK));
  }
  SyncWarpgroup(group);
  // Lane (g, c): channels g and g + 8 of rows 2c and 2c + 1 of every eight.
  const u32 to = base + lane % 4 * (2 * kAddedRowBytes) +
                 (thread / 32 * 16 + lane / 4) * 4;
#pragma unroll
  for (u32 at = 0; at < kTokens; at += kAddedRows) {
    if (at >= live) break;
    const u32 buffer = next * kAddedBytes;
#pragma unroll
    for (u32 i = 0; i < kAddedRows; i += 8) {
      const float* d = &sums[(at + i) / 2];
      u32 known[4];  // of two rows: weight, token
      kd::LoadShared(routes + (at + i + lane % 4 * 2) * 8, known[0], known[1],
                     known[2], known[3]);
#pragma unroll
      for (u32 odd = 0; odd < 2; ++odd) {
        const float weight = __uint_as_float(known[2 * odd]);
        const u32 place = to + buffer + (i + odd) * kAddedRowBytes;
        const u32 pair = kd::RoundPair(d[odd], d[odd + 2]);
        StoreShared(place,
                    weight * kd::f16_to_f32(static_cast<u16>(pair & 0xFFFFu)));
        StoreShared(place + 8 * 4,
                    weight * kd::f16_to_f32(static_cast<u16>(pair >> 16)));
      }
    }
    // The other buffer has been read by all who pass.
    SyncWarpgroup(group);
#pragma unroll
    for (u32 i = 0; i < kAddedRows; i += 8) {
      const u32 row = i + thread / 16;
      if (at + row < live) {
        u32 token, value[4];
        kd::LoadShared(routes + (at + row) * 8 + 4, token);
        kd::LoadShared(base + buffer + row * kAddedRowBytes + thread % 16 * 16,
                       value[0], value[1], value[2], value[3]);
        AddToMemory(out + static_cast<u64>(token) * kHidden, value);
      }
    }
    next ^= 1;
  }
}

#endif  // KILN_ATOMIC_SUM

// Consume with as many units as the tile has rows for.
template <u32 kLive, int kBits, u32 kDepth, int kMaxBits>
__device__ __forceinline__ void ConsumeTile(
    const WordsAddress<kBits, kMaxBits>& at, Place<kMaxBits>& place, u32 rows,
    Sums& sums, Fragment& even, Fragment& odd) {
  if constexpr (kLive > kLiveMin) {
    if (rows <= (kLive - 1) * kUnit) {
      ConsumeTile<kLive - 1, kBits, kDepth>(at, place, rows, sums, even, odd);
      return;
    }
  }
  Consume<kLive, kBits, kDepth>(at, place, sums, even, odd);
}

// Where this warpgroup's 64 of the 128 channels from `column` on of a sorted
// row lie in a product.
__device__ __forceinline__ u16* ResultRow(u16* product, u32 column, u32 row,
                                          u32 tokens) {
  const u64 total = static_cast<u64>(tokens) * kTopK;
  return product + ((column / 64 + threadIdx.x / 128) * total + row) * 64;
}

template <u32 kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <u32 kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#if KILN_DECODED

// Weights that a block decodes: 64 input channels by 128 output channels.
constexpr u32 kDecodeThreads = 256;

// Decodes one block's weights of a matrix [kDepth][kWidth] of every expert; a
// warp has 16 channels, of which each lane decodes what it multiplies.
template <int kBits, u32 kDepth, u32 kWidth>
__device__ __forceinline__ void DecodeBlock(const u16* __restrict__ weights,
                                            u16* __restrict__ decoded) {
  constexpr u32 kColumns = kWidth / kChannels;
  constexpr u32 kSteps = kDepth / kDepthStep;
  const u32 expert = blockIdx.x / (kColumns * kSteps);
  const u32 step = blockIdx.x / kColumns % kSteps;
  const u32 column = blockIdx.x % kColumns * kChannels + threadIdx.x / 32 * 16;
  const u32 lane = threadIdx.x % 32;
  const u32 group = lane / 4;
  const u32* tile = reinterpret_cast<const u32*>(
      kd::ExpertTiles<kBits, kDepth, kWidth>(weights, expert, column) +
      (step * 4 + lane % 4) * (static_cast<u64>(kWidth) * 2 * kBits));
  u32 words[kBits + 1];
  words[0] = tile[(group == 0 ? kd::kTileWords<kBits> : group * kBits) - 1];
#pragma unroll
  for (u32 i = 0; i < kBits; ++i) words[1 + i] = tile[group * kBits + i];
  u16* to = decoded +
            (static_cast<u64>(expert) * kDepth + step * kDepthStep) * kWidth +
            column * 16 + lane * 8;
  const auto store = [&](u32 quarter, const Fragment& a) {
    *reinterpret_cast<uint4*>(to + static_cast<u64>(quarter) * (16 * kWidth)) =
        make_uint4(a[0], a[1], a[2], a[3]);
  };
  Fragment a;
  kd::DecodeFragment<KILN_CODEBOOK, kBits>(kd::QuarterSpan<kBits, 0>(words), a);
  store(0, a);
  kd::DecodeFragment<KILN_CODEBOOK, kBits>(kd::QuarterSpan<kBits, 1>(words), a);
  store(1, a);
  kd::DecodeFragment<KILN_CODEBOOK, kBits>(kd::QuarterSpan<kBits, 2>(words), a);
  store(2, a);
  kd::DecodeFragment<KILN_CODEBOOK, kBits>(kd::QuarterSpan<kBits, 3>(words), a);
  store(3, a);
}

#endif  // KILN_DECODED

}  // namespace

#if KILN_DECODED

// Before step 4, for a step of so many rows that decoding every weight once and
// reading it as fp16 is cheaper than decoding it for every tile. Grid: E * H *
// I / 8192 blocks for each of gate, up and down.
extern "C" __global__ void __launch_bounds__(kDecodeThreads)
    kiln_moe_decode(const u16* __restrict__ w_gate,
                    const u16* __restrict__ w_up,
                    const u16* __restrict__ w_down, u16* __restrict__ gate,
                    u16* __restrict__ up, u16* __restrict__ down) {
  kd::BeginStep();
  if (blockIdx.y == 0) {
    DecodeBlock<KILN_BITS_GATE, kHidden, kInter>(w_gate, gate);
  } else if (blockIdx.y == 1) {
    DecodeBlock<KILN_BITS_UP, kHidden, kInter>(w_up, up);
  } else {
    DecodeBlock<KILN_BITS_DOWN, kInter, kHidden>(w_down, down);
  }
}

#endif  // KILN_DECODED

// Step 4. Item x: tile x / (2I / 128) and 128 of the 2I channels gate | up.
extern "C" __global__ void __launch_bounds__(kThreads, KILN_CTAS)
    kiln_moe_fc1(const u16* gate_operand, const u16* up_operand,
                 const u16* __restrict__ w_gate, const u16* __restrict__ w_up,
                 const Row* rows, const Tile* tiles, const Totals* totals,
                 u16* __restrict__ fc1, u32 tokens) {
  constexpr u32 kBlocks = 2 * kInter / kChannels;
  constexpr int kMaxBits = kGateBits > kUpBits ? kGateBits : kUpBits;
  InitRing<kMaxBits>();
  kd::BeginStep();
  const u32 items = totals->tiles * kBlocks;
  Place<kMaxBits> place;
  if (threadIdx.x >= kConsumers) {
    GiveRegisters<kProducerRegisters>();
    Pieces pieces;
#pragma unroll 1
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
      const Tile tile = tiles[item / kBlocks];
      const u32 column = item % kBlocks * kChannels;
      const bool is_up = column >= kInter;
      const u32 inner = is_up ? column - kInter : column;
      const u16* operand = is_up ? up_operand : gate_operand;
#if KILN_SHARED_SUH
      FindPieces<kHidden>(operand, tile, pieces,
                          [rows](u32 at) { return rows[at].route / kTopK; });
#else
      FindPieces<kHidden>(operand, tile, pieces, [](u32 at) { return at; });
#endif
#if KILN_DECODED || KILN_BITS_GATE == KILN_BITS_UP
      Produce<kGateBits, kHidden, kInter>(
          kd::ExpertTiles<kGateBits, kHidden, kInter>(is_up ? w_up : w_gate,
                                                      tile.expert, inner),
          pieces, tile.rows, place);
#else
      if (is_up) {
        Produce<kUpBits, kHidden, kInter>(
            kd::ExpertTiles<kUpBits, kHidden, kInter>(w_up, tile.expert, inner),
            pieces, tile.rows, place);
      } else {
        Produce<kGateBits, kHidden, kInter>(
            kd::ExpertTiles<kGateBits, kHidden, kInter>(w_gate, tile.expert,
                                                        inner),
            pieces, tile.rows, place);
      }
#endif
    }
    return;
  }
  TakeRegisters<kConsumerRegisters>();
  u32 next = 0;
  const WordsAddress<kGateBits, kMaxBits> gate;
#if !KILN_DECODED && KILN_BITS_GATE != KILN_BITS_UP
  const WordsAddress<kUpBits, kMaxBits> up;
#endif
#pragma unroll 1
  for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
    const Tile tile = tiles[item / kBlocks];
    const u32 column = item % kBlocks * kChannels;
    Sums sums;
    Fragment even, odd;
#if KILN_DECODED || KILN_BITS_GATE == KILN_BITS_UP
    ConsumeTile<kUnits, kGateBits, kHidden>(gate, place, tile.rows, sums, even,
                                            odd);
#else
    if (column >= kInter) {
      ConsumeTile<kUnits, kUpBits, kHidden>(up, place, tile.rows, sums, even,
                                            odd);
    } else {
      ConsumeTile<kUnits, kGateBits, kHidden>(gate, place, tile.rows, sums,
                                              even, odd);
    }
#endif
    StoreSums<kMaxBits>(sums, ResultRow(fc1, column, tile.first, tokens),
                        tile.first, tile.rows, next);
  }
  WaitBulkWrites();
}

// Step 8. Item x: tile x / (H / 128) and 128 of the H channels.
extern "C" __global__ void __launch_bounds__(kThreads, KILN_CTAS)
    kiln_moe_fc2(const u16* activated, const u16* __restrict__ w_down,
                 const Tile* tiles, const Totals* totals,
#if KILN_ATOMIC_SUM
                 const Row* rows, const float* __restrict__ weights, float* out
#else
                 u16* __restrict__ fc2, u32 tokens
#endif
    ) {
  constexpr u32 kBlocks = kHidden / kChannels;
  InitRing<kDownBits>();
  kd::BeginStep();
  const u32 items = totals->tiles * kBlocks;
  Place<kDownBits> place;
  if (threadIdx.x >= kConsumers) {
    GiveRegisters<kProducerRegisters>();
    Pieces pieces;
#pragma unroll 1
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
      const Tile tile = tiles[item / kBlocks];
      FindPieces<kInter>(activated, tile, pieces, [](u32 at) { return at; });
      Produce<kDownBits, kInter, kHidden>(
          kd::ExpertTiles<kDownBits, kInter, kHidden>(
              w_down, tile.expert, item % kBlocks * kChannels),
          pieces, tile.rows, place);
    }
    return;
  }
  TakeRegisters<kConsumerRegisters>();
  u32 next = 0;
  const WordsAddress<kDownBits, kDownBits> down;
#pragma unroll 1
  for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
    const Tile tile = tiles[item / kBlocks];
    Sums sums;
    Fragment even, odd;
    ConsumeTile<kUnits, kDownBits, kInter>(down, place, tile.rows, sums, even,
                                           odd);
#if KILN_ATOMIC_SUM
    AddSums<kDownBits>(sums, rows + tile.first, tile.rows, weights,
                       out + item % kBlocks * kChannels, next);
#else
    StoreSums<kDownBits>(
        sums, ResultRow(fc2, item % kBlocks * kChannels, tile.first, tokens),
        tile.first, tile.rows, next);
#endif
  }
  WaitBulkWrites();
}
