// LaunchWatch: what a race does right now, in memory that another process may
// look at: whose turn it is, and since when a launch has been running. Writing
// it costs a look at the clock and two stores, so nothing that is timed waits
// for anybody.

#ifndef KILN_TUNER_LAUNCH_WATCH_H_
#define KILN_TUNER_LAUNCH_WATCH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kiln {

// Written by the thread that races, read from anywhere. Zero bytes are a valid
// watch on which nothing runs.
struct LaunchWatch {
  // CLOCK_MONOTONIC in nanoseconds; 0 while nothing runs.
  std::atomic<uint64_t> running_since{0};
  // Contender whose turn it is, plus 1; 0 is nobody.
  std::atomic<uint64_t> turn{0};
  // Moves whenever a launch or a turn begins.
  std::atomic<uint64_t> moves{0};

  void BeginTurn(size_t contender);
  void EndTurns();
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Marks the time from here to the end of the scope as a launch that must come
// to an end. `watch` may be null.
class RunningLaunch {
 public:
  explicit RunningLaunch(LaunchWatch* watch);
  ~RunningLaunch();

  RunningLaunch(const RunningLaunch&) = delete;
  RunningLaunch& operator=(const RunningLaunch&) = delete;

 private:
  LaunchWatch* watch_;
};

}  // namespace kiln

#endif  // KILN_TUNER_LAUNCH_WATCH_H_
