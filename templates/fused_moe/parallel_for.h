// ParallelFor: the references' loops over independent items.

#ifndef KILN_TEMPLATES_FUSED_MOE_PARALLEL_FOR_H_
#define KILN_TEMPLATES_FUSED_MOE_PARALLEL_FOR_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace kiln {

// Calls work(i) once for each i in [0, count), from up to `threads` threads,
// which live during the call only.
inline void ParallelFor(int64_t count, int threads,
                        const std::function<void(int64_t)>& work) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> workers;
  for (int64_t i = 1; i < std::min<int64_t>(threads, count); ++i) {
    workers.emplace_back(run);
  }
  run();
  for (std::thread& worker : workers) worker.join();
}

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_PARALLEL_FOR_H_
