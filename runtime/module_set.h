// Modules: one section of a bundle, loaded and checked, in the form the launch
// path reads. Immutable once loaded.

#ifndef KILN_RUNTIME_MODULE_SET_H_
#define KILN_RUNTIME_MODULE_SET_H_

#include <stddef.h>
#include <stdint.h>

#include "runtime/bundle_reader.h"
#include "runtime/cpu_pool.h"
#include "runtime/cpu_program.h"
#include "runtime/driver.h"
#include "runtime/kiln.h"

// Where a name may be read past its end within its page. AddressSanitizer would
// report it.
#if defined(__SANITIZE_ADDRESS__)
#define KILN_RUNTIME_NO_WHOLE_PIECES
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KILN_RUNTIME_NO_WHOLE_PIECES
#endif
#endif
#if defined(__SSE2__) && !defined(KILN_RUNTIME_NO_WHOLE_PIECES)
#define KILN_RUNTIME_WHOLE_PIECES
#include <emmintrin.h>
#endif

namespace kiln::runtime {

// What differs between launches in a step's parameter block.
struct Patch {
  uint32_t kind;    // KILN_FORMAT_ARG_PARAM, _ARENA or _TOKENS
  uint32_t offset;  // in the block
  uint64_t value;   // slot index, byte offset into the arena, or unused
};

struct LoadedStep {
  const kiln_format_step_t* record;
  CUfunc_st* function;  // CUDA
  CpuKernel kernel;     // CPU
  // The block with its constants filled in, 8-byte aligned, a multiple of 8.
  const uint8_t* block;
  uint32_t block_bytes;  // what the kernel takes, without trailing padding
  uint32_t patch_count;
  const Patch* patches;
};

struct LoadedPlan {
  const kiln_format_plan_t* record;
  const kiln_format_entry_t* entry;
  const LoadedStep* steps;
};

// One bucket of the name table, with all that finding a plan reads; `entry` is
// null while it is empty.
struct NameBucket {
  uint64_t hash;
  const char* name;
  const uint32_t* ends;  // m_max of each plan, ascending
  uint32_t name_bytes;
  uint32_t plan_count;
  uint32_t first_plan;  // index into Modules::plans
  uint32_t capacity;
  const kiln_format_entry_t* entry;
};

struct Modules {
  Bundle* bundle;  // one reference
  const kiln_format_section_t* section;
  uint64_t handle;

  // CUDA.
  const kiln_driver_t* driver;
  CUctx_st* context;
  CUmod_st** cuda_modules;  // one per program of the section; null = not loaded

  // CPU.
  void** libraries;  // one per program of the section; null = not loaded
  CpuPool* pool;

  uint32_t plan_count;
  LoadedPlan* plans;  // of every entry, in file order
  LoadedStep* steps;
  Patch* patches;
  uint8_t* blocks;
  uint32_t* ends;  // m_max of every plan
  NameBucket* buckets;
  uint64_t bucket_mask;

  bool cuda() const { return section->backend == KILN_FORMAT_BACKEND_CUDA; }

  const char* target() const { return bundle->view.Text(section->target); }
};

// Options with every default filled in and the struct checked.
struct LoadOptions {
  uint32_t flags = 0;
  const char* target = nullptr;
  CUctx_st* context = nullptr;
  uint32_t cpu_threads = 0;
  const kiln_driver_t* driver = nullptr;
};

// See kiln_modules_load. On failure nothing stays loaded.
kiln_status_t LoadModules(Bundle* bundle, const LoadOptions& options,
                          Modules** modules, kiln_error_t* error);
// Unloads and frees. Goes on after a driver error and returns the first one.
kiln_status_t UnloadModules(Modules* modules, kiln_error_t* error);

// Up to 16 bytes of a name, padded with zeros. Fewer than 16 end the name.
struct NamePiece {
  uint64_t low = 0;
  uint64_t high = 0;
  size_t bytes = 0;
};

// Reads nothing behind the name.
NamePiece ReadNamePieceByBytes(const char* name);

// Reads no page that the name does not touch: a piece near the end of a page is
// read byte by byte. All others are read whole, as strlen does, which is most
// of what makes finding a plan fast.
inline NamePiece ReadNamePiece(const char* name) {
#ifdef KILN_RUNTIME_WHOLE_PIECES
  constexpr uintptr_t kPage = 4096;
  if (reinterpret_cast<uintptr_t>(name) % kPage <= kPage - 16) {
    // The last 16 - n bytes of a piece of n are masked away.
    alignas(16) static constexpr uint8_t kMask[32] = {
        255, 255, 255, 255, 255, 255, 255, 255,
        255, 255, 255, 255, 255, 255, 255, 255};
    NamePiece piece;
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(name));
    const int zeros =
        _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_setzero_si128()));
    piece.bytes = static_cast<size_t>(__builtin_ctz(zeros | 0x10000));
    bytes = _mm_and_si128(
        bytes, _mm_loadu_si128(
                   reinterpret_cast<const __m128i*>(kMask + 16 - piece.bytes)));
    piece.low = static_cast<uint64_t>(_mm_cvtsi128_si64(bytes));
    piece.high = static_cast<uint64_t>(
        _mm_cvtsi128_si64(_mm_unpackhi_epi64(bytes, bytes)));
    return piece;
  }
#endif
  return ReadNamePieceByBytes(name);
}

// Hash of an entry name, and its length. The words of a piece are multiplied to
// 128 bits and folded, so that every bit of them reaches every bit of the hash
// and the low ones may choose a bucket.
inline uint64_t HashName(const char* name, size_t* bytes) {
  __extension__ typedef unsigned __int128 Wide;
  uint64_t hash = 0xD1B54A32D192ED03u;
  for (size_t at = 0;;) {
    const NamePiece piece = ReadNamePiece(name + at);
    const Wide product = Wide{hash ^ piece.low} *
                         (piece.high ^ (0x9E3779B97F4A7C15u + piece.bytes));
    hash =
        static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    at += piece.bytes;
    if (piece.bytes == 16) continue;
    *bytes = at;
    return hash;
  }
}

// Makes `context` current, if it is not, from Enter to Leave. CUDA only.
class ContextScope {
 public:
  explicit ContextScope(const kiln_driver_t* driver) : driver_(driver) {}

  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  ~ContextScope() { (void)Leave(nullptr); }

  kiln_status_t Enter(CUctx_st* context, kiln_error_t* error);
  // Does nothing the second time.
  kiln_status_t Leave(kiln_error_t* error);

 private:
  const kiln_driver_t* driver_;
  bool pushed_ = false;
};

// "cuModuleLoadData of kernel 'fc1' failed: CUDA_ERROR_INVALID_IMAGE (200)".
// `subject` is put after the call, and may be null.
kiln_status_t DriverFailure(const kiln_driver_t* driver, kiln_status_t code,
                            int result, const char* call, const char* subject,
                            kiln_error_t* error);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_MODULE_SET_H_
