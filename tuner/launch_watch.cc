#include "tuner/launch_watch.h"

#include <chrono>

namespace kiln {
namespace {

// The steady clock of libstdc++ on Linux is CLOCK_MONOTONIC.
uint64_t NowNs() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

// One thread writes, so no read-modify-write is needed.
void Move(LaunchWatch* watch) {
  watch->moves.store(watch->moves.load(std::memory_order_relaxed) + 1,
                     std::memory_order_relaxed);
}

}  // namespace

void LaunchWatch::BeginTurn(size_t contender) {
  turn.store(contender + 1, std::memory_order_relaxed);
  Move(this);
}

void LaunchWatch::EndTurns() {
  turn.store(0, std::memory_order_relaxed);
  Move(this);
}

RunningLaunch::RunningLaunch(LaunchWatch* watch) : watch_(watch) {
  if (watch_ == nullptr) return;
  Move(watch_);
  watch_->running_since.store(NowNs(), std::memory_order_relaxed);
}

RunningLaunch::~RunningLaunch() {
  if (watch_ != nullptr) {
    watch_->running_since.store(0, std::memory_order_relaxed);
  }
}

}  // namespace kiln
