// Finding a plan and launching it. Nothing here allocates; on CUDA nothing
// locks or makes a system call of its own.

#ifndef KILN_RUNTIME_LAUNCH_H_
#define KILN_RUNTIME_LAUNCH_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "runtime/module_set.h"

namespace kiln::runtime {

inline bool SameWord(const char* a, const char* b) {
  uint64_t x;
  uint64_t y;
  memcpy(&x, a, 8);
  memcpy(&y, b, 8);
  return x == y;
}

// memcmp without a call: names are short.
inline bool SameBytes(const char* a, const char* b, size_t bytes) {
  if (bytes >= 8) {
    for (size_t at = 0; at + 8 < bytes; at += 8) {
      if (!SameWord(a + at, b + at)) return false;
    }
    return SameWord(a + bytes - 8, b + bytes - 8);
  }
  for (; bytes > 0; ++a, ++b, --bytes) {
    if (*a != *b) return false;
  }
  return true;
}

// The entry of that name, or null.
inline const NameBucket* FindName(const Modules& modules, const char* name) {
  size_t bytes = 0;
  const uint64_t hash = HashName(name, &bytes);
  for (uint64_t at = hash & modules.bucket_mask;
       modules.buckets[at].entry != nullptr;
       at = (at + 1) & modules.bucket_mask) {
    const NameBucket& bucket = modules.buckets[at];
    if (bucket.hash == hash && bucket.name_bytes == bytes &&
        SameBytes(bucket.name, name, bytes)) {
      return &bucket;
    }
  }
  return nullptr;
}

// Index into modules.plans of the plan that serves `m`, at most the capacity:
// the first whose m_max is not below m, since intervals leave no gap. Without
// branches: which way they go is as random as the engine's batches.
inline uint32_t PlanFor(const NameBucket& bucket, uint64_t m) {
  const uint32_t* at = bucket.ends;
  for (uint32_t count = bucket.plan_count; count > 1;) {
    const uint32_t half = count / 2;
    at += at[half - 1] < m ? half : 0;
    count -= half;
  }
  return bucket.first_plan + static_cast<uint32_t>(at - bucket.ends);
}

// Why there is no plan: ENTRY_NOT_FOUND without a bucket, else
// TOKENS_OUT_OF_RANGE.
[[gnu::cold]] kiln_status_t RefuseFind(const Modules& modules,
                                       const NameBucket* bucket,
                                       const char* name, uint64_t m,
                                       kiln_error_t* error);

struct LaunchArguments {
  uint64_t m = 0;  // at least 1
  const void* params = nullptr;
  size_t params_bytes = 0;
  void* arena = nullptr;
  size_t arena_bytes = 0;
  CUstream_st* stream = nullptr;
};

// Checks the arguments against the plan, then enqueues (CUDA) or runs (CPU) it.
kiln_status_t LaunchPlan(const Modules& modules, const LoadedPlan& plan,
                         const LaunchArguments& arguments, kiln_error_t* error);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_LAUNCH_H_
