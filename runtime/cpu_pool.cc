#include "runtime/cpu_pool.h"

#include <errno.h>
#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#include "runtime/status.h"

namespace kiln::runtime {
namespace {

// Pauses before a thread sleeps: tens of microseconds, the distance between two
// steps of a plan, and far less than a thread's wake-up would cost there.
constexpr int kSpins = 2000;

constexpr size_t kStackBytes = size_t{2} << 20;

// Round to nearest, no flushing of denormals, all exceptions masked: the state
// in which candidates were proved, whatever the engine has set for itself.
constexpr unsigned kFloatControl = 0x1f80;

void FutexWait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void FutexWake(std::atomic<uint32_t>* word, int count) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

}  // namespace

uint32_t AvailableProcessors() {
  // The kernel refuses a mask smaller than its own; grow until it fits.
  for (int processors = 1024; processors <= (1 << 16); processors *= 4) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(processors));
    if (set == nullptr) return 1;
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(processors));
    CPU_ZERO_S(bytes, set);
    const bool ok = sched_getaffinity(0, bytes, set) == 0;
    const int count = ok ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (ok) return count < 1 ? 1 : static_cast<uint32_t>(count);
  }
  return 1;
}

kiln_status_t CpuPool::Create(uint32_t threads, CpuPool** out,
                              kiln_error_t* error) {
  void* place = nullptr;
  if (posix_memalign(&place, alignof(CpuPool), sizeof(CpuPool)) != 0) {
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "out of memory creating a thread pool";
  }
  CpuPool* pool = new (place) CpuPool;
  pool->helpers_ = static_cast<pthread_t*>(calloc(threads, sizeof(pthread_t)));
  if (pool->helpers_ == nullptr) {
    Destroy(pool);
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "out of memory creating a thread pool";
  }
  // Threads inherit the mask; the engine's signal handlers are not ours.
  sigset_t all;
  sigset_t old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  int failed = 0;
  while (pool->helper_count_ + 1 < threads && failed == 0) {
    failed = pthread_create(&pool->helpers_[pool->helper_count_], &attributes,
                            ThreadMain, pool);
    if (failed == 0) ++pool->helper_count_;
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  if (failed != 0) {
    const uint32_t created = pool->helper_count_;
    Destroy(pool);
    return Failure(error, KILN_STATUS_SYSTEM, failed)
           << "cannot create thread " << created + 2 << " of " << threads
           << ": " << strerrorname_np(failed);
  }
  *out = pool;
  return KILN_STATUS_OK;
}

void CpuPool::Destroy(CpuPool* pool) {
  pool->stop_.store(true);
  pool->generation_.fetch_add(1);
  FutexWake(&pool->generation_, INT_MAX);
  for (uint32_t i = 0; i < pool->helper_count_; ++i) {
    pthread_join(pool->helpers_[i], nullptr);
  }
  free(pool->helpers_);
  pool->~CpuPool();
  free(pool);
}

void* CpuPool::ThreadMain(void* pool) {
  static_cast<CpuPool*>(pool)->Help();
  return nullptr;
}

void CpuPool::Help() {
  uint32_t seen = 0;
  while (true) {
    for (int spin = 0; spin < kSpins && generation_.load() == seen; ++spin) {
      _mm_pause();
    }
    while (generation_.load() == seen) {
      sleepers_.fetch_add(1);
      FutexWait(&generation_, seen);
      sleepers_.fetch_sub(1);
    }
    seen = generation_.load();
    if (stop_.load()) return;
    // Any ticket will do: while one is out, the job stands.
    uint32_t tickets = tickets_.load();
    while (tickets != 0 &&
           !tickets_.compare_exchange_weak(tickets, tickets - 1)) {
    }
    if (tickets == 0) continue;
    RunBlocks();
    if (active_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
      FutexWake(&active_, 1);
    }
  }
}

void CpuPool::RunBlocks() {
  const CpuJob job = job_;
  const unsigned control = _mm_getcsr();
  _mm_setcsr(kFloatControl);
  while (true) {
    const uint64_t begin = next_block_.fetch_add(grain_);
    if (begin >= block_count_) break;
    const uint64_t left = block_count_ - begin;
    uint64_t n = left < grain_ ? left : grain_;
    uint32_t x = static_cast<uint32_t>(begin % job.grid[0]);
    const uint64_t row = begin / job.grid[0];
    uint32_t y = static_cast<uint32_t>(row % job.grid[1]);
    uint32_t z = static_cast<uint32_t>(row / job.grid[1]);
    for (; n > 0; --n) {
      job.kernel(job.args, x, y, z);
      if (++x < job.grid[0]) continue;
      x = 0;
      if (++y < job.grid[1]) continue;
      y = 0;
      ++z;
    }
  }
  _mm_setcsr(control);
}

void CpuPool::Run(const CpuJob& job, uint32_t threads) {
  job_ = job;
  block_count_ = uint64_t{job.grid[0]} * job.grid[1] * job.grid[2];
  uint64_t helpers = threads > 0 ? threads - 1 : 0;
  if (helpers > helper_count_) helpers = helper_count_;
  if (block_count_ == 0) return;
  if (helpers > block_count_ - 1) helpers = block_count_ - 1;
  // One block per claim unless there are so many that the last claims cannot
  // matter: then at most 1/256 of a thread's share.
  grain_ = block_count_ / ((helpers + 1) * 256) + 1;
  next_block_.store(0);
  if (helpers == 0) {
    RunBlocks();
    return;
  }
  const uint32_t wanted = static_cast<uint32_t>(helpers);
  active_.store(wanted);
  tickets_.store(wanted);
  generation_.fetch_add(1);
  if (sleepers_.load() != 0) {
    FutexWake(&generation_, static_cast<int>(wanted));
  }
  RunBlocks();
  const uint32_t unclaimed = tickets_.exchange(0);
  if (unclaimed != 0) active_.fetch_sub(unclaimed);
  for (int spin = 0; spin < kSpins && active_.load() != 0; ++spin) {
    _mm_pause();
  }
  if (active_.load() == 0) return;
  caller_sleeps_.store(true);
  for (uint32_t active = active_.load(); active != 0; active = active_.load()) {
    FutexWait(&active_, active);
  }
  caller_sleeps_.store(false);
}

}  // namespace kiln::runtime
