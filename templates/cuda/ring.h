// The ring of stages of a block of a grouped product, and what is copied to a
// stage: packed tiles, and rows of an operand.
//
// CUDA only, or under a test's emulator; no header other than Kiln's own.
#ifndef KILN_TEMPLATES_CUDA_RING_H_
#define KILN_TEMPLATES_CUDA_RING_H_

#include "cuda/grouped.h"
#include "cuda/warp.h"
#include "device/platform.h"

namespace kd {

// Copies kRows rows of kPieces times 16 bytes, `row_bytes` apart, to `to`, one
// behind the other. All kThreads threads of the block call it.
template <u32 kThreads, u32 kPieces, u32 kRows>
KILN_FN void CopyRows(const unsigned char* from, u64 row_bytes, u32 to) {
  constexpr u32 kAll = kPieces * kRows;
  KILN_UNROLLED
  for (u32 base = 0; base < kAll; base += kThreads) {
    const u32 piece = base + threadIdx.x;
    if (kAll % kThreads == 0 || piece < kAll) {
      CopyAsync16(to + piece * 16,
                  from + (piece / kPieces) * row_bytes + piece % kPieces * 16);
    }
  }
}

// A tile of kTokens operand rows in shared memory, kChannels input channels of
// each, and which of them this thread copies.
template <u32 kThreads, u32 kTokens, u32 kChannels>
struct OperandTile {
  // Rows are padded by 16 bytes: the 8 rows of an ldmatrix then lie in 8
  // different 16-byte bank groups.
  static constexpr u32 kRowHalves = kChannels + 8;
  static constexpr u32 kBytes = kTokens * kRowHalves * 2;
  // 16-byte pieces of a row; a thread always copies the same piece.
  static constexpr u32 kPieces = kChannels / 8;
  static constexpr u32 kRowsAtOnce = kThreads / kPieces;
  static constexpr u32 kCopies = (kTokens + kRowsAtOnce - 1) / kRowsAtOnce;

  // Rows of the operand, kNone beyond the tile's.
  u32 source[kCopies];

  // Row of the tile that source[i] is for.
  KILN_FN static u32 RowOf(u32 i) {
    return threadIdx.x / kPieces + i * kRowsAtOnce;
  }

  // Decides which rows this thread copies.
  //   rows: of the tile
  //   row_of(row): the operand's row of one of them
  template <class Which>
  KILN_FN void Find(u32 rows, Which row_of) {
    KILN_UNROLLED
    for (u32 i = 0; i < kCopies; ++i) {
      const u32 row = RowOf(i);
      source[i] = row < rows ? row_of(row) : kNone;
    }
  }

  // Copies channels channel .. channel + kChannels - 1 of an operand
  // [rows][kDepth] to `to`; rows beyond the tile's become zeros.
  template <u32 kDepth>
  KILN_FN void Copy(const u16* operand, u32 channel, u32 to) const {
    const u32 column = threadIdx.x % kPieces * 8;
    const u16* first = operand + channel + column;
    const u32 at = to + (RowOf(0) * kRowHalves + column) * 2;
    KILN_UNROLLED
    for (u32 i = 0; i < kCopies; ++i) {
      if (kTokens % kRowsAtOnce == 0 || RowOf(i) < kTokens) {
        const bool copy = source[i] != kNone;
        CopyAsyncOrZero<16>(
            at + i * (kRowsAtOnce * kRowHalves * 2),
            first + static_cast<u64>(copy ? source[i] : 0) * kDepth, copy);
      }
    }
  }
};

// Stages begin .. end - 1 through a ring of kStages buffers. All threads of the
// block call it.
//   weights(stage, buffer), operand(stage, buffer): begin to copy a stage's
//   parts; the operand's rows may be those of an earlier kernel
//   add(stage, buffer): once both have landed for every thread
template <u32 kStages, class Weights, class Operand, class Add>
KILN_FN void RunRing(u32 begin, u32 end, Weights weights, Operand operand,
                     Add add) {
  // Weights first: the rows to copy may not be known yet.
  KILN_UNROLLED
  for (u32 s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) weights(begin + s, s);
  }
  KILN_UNROLLED
  for (u32 s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) operand(begin + s, s);
    CommitCopies();
  }
  u32 slot = 0;
#pragma unroll 1
  for (u32 stage = begin; stage < end; ++stage) {
    WaitCopies<kStages - 2>();
    // Stage `stage` has landed for every thread, and the buffer of the stage
    // before it is free.
    __syncthreads();
    if (stage + kStages - 1 < end) {
      const u32 free_slot = slot == 0 ? kStages - 1 : slot - 1;
      weights(stage + kStages - 1, free_slot);
      operand(stage + kStages - 1, free_slot);
    }
    CommitCopies();
    add(stage, slot);
    slot = slot == kStages - 1 ? 0 : slot + 1;
  }
}

}  // namespace kd

#endif  // KILN_TEMPLATES_CUDA_RING_H_
