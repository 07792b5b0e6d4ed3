// CpuPool: a fixed set of threads that run the blocks of one step at a time.
//
// Run hands out tickets, one per helper wanted. A helper that finds a ticket
// takes it, claims blocks until none is left, and reports. The calling thread
// claims blocks too; when they are gone it takes back the tickets nobody has
// taken, so a helper that wakes up late costs nothing.

#ifndef KILN_RUNTIME_CPU_POOL_H_
#define KILN_RUNTIME_CPU_POOL_H_

#include <pthread.h>
#include <stdint.h>

#include <atomic>

#include "runtime/cpu_program.h"
#include "runtime/kiln.h"

namespace kiln::runtime {

struct CpuJob {
  CpuKernel kernel = nullptr;
  const void* args = nullptr;
  uint32_t grid[3] = {0, 0, 0};
};

class CpuPool {
 public:
  // `threads` counts the calling thread: threads - 1 are created, with all
  // signals blocked and the affinity of the caller.
  //   Errors: OUT_OF_MEMORY, SYSTEM.
  static kiln_status_t Create(uint32_t threads, CpuPool** pool,
                              kiln_error_t* error);
  // Joins the threads. No launch may be running.
  static void Destroy(CpuPool* pool);

  CpuPool(const CpuPool&) = delete;
  CpuPool& operator=(const CpuPool&) = delete;

  uint32_t threads() const { return helper_count_ + 1; }

  // A launch holds the pool from Lock to Unlock, so that its steps are not
  // mixed with another launch's.
  void Lock() { pthread_mutex_lock(&launch_mutex_); }

  void Unlock() { pthread_mutex_unlock(&launch_mutex_); }

  // Runs every block of `job` on at most `threads` threads and returns when all
  // are done. Allocates nothing. Only between Lock and Unlock.
  void Run(const CpuJob& job, uint32_t threads);

 private:
  CpuPool() = default;
  ~CpuPool() = default;

  static void* ThreadMain(void* pool);
  void Help();
  void RunBlocks();

  pthread_mutex_t launch_mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_t* helpers_ = nullptr;
  uint32_t helper_count_ = 0;

  // The job; written while no ticket is out.
  CpuJob job_;
  uint64_t block_count_ = 0;
  uint64_t grain_ = 1;  // blocks per claim

  alignas(64) std::atomic<uint32_t> generation_{0};  // futex of idle helpers
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> tickets_{0};
  alignas(64) std::atomic<uint32_t> active_{0};  // futex of the caller
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<uint64_t> next_block_{0};
};

// Processors that the calling thread may run on, at least 1.
uint32_t AvailableProcessors();

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_CPU_POOL_H_
