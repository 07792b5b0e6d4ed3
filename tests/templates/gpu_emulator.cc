#include "tests/templates/gpu_emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>

namespace kiln::testing::gpu {

Dim3 thread_index;
Dim3 block_index;
Dim3 grid_size;

namespace {

constexpr size_t kStackBytes = size_t{128} * 1024;

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "gpu emulator: %s; block (%u, %u), thread %u\n", what,
               block_index.x, block_index.y, thread_index.x);
  std::abort();
}

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
};

// Runs one thread of each block, for as long as the process lives. Its first
// turn begins at `start`, every other where `rest` was set: unlike
// swapcontext, a jump is no system call.
struct Fiber {
  ucontext_t start;
  jmp_buf rest;
  std::unique_ptr<unsigned char[]> stack;
  bool done = false;
  uint64_t barriers = 0;  // it has passed
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

// Instructions of a whole warp are numbered; those of even and of odd number
// have slots of their own, because a lane may be one ahead of the others.
struct Warp {
  uint64_t arrivals = 0;  // of lanes, at all instructions
  std::array<uint64_t, 32> instructions = {};
  std::array<Slots, 2> slots;
};

struct alignas(16) Piece {
  std::array<unsigned char, 16> bytes;
};

// The block that runs.
std::vector<Fiber> fibers(1024);
std::vector<Warp> warps;
std::vector<Piece> shared;
uint32_t shared_bytes;
uint32_t live;             // fibers that have not returned
uint32_t waiting;          // of them, at the barrier
uint64_t barriers_opened;  // so far
bool moved;                // something happened in this round
jmp_buf scheduler;
const std::function<void()>* body;

Fiber& Self() { return fibers[thread_index.x]; }

// Lets the others run.
void Yield() {
  if (_setjmp(Self().rest) == 0) _longjmp(scheduler, 1);
}

void OpenBarrierIfComplete() {
  if (live == 0 || waiting < live) return;
  waiting = 0;
  ++barriers_opened;
}

void Main() {
  while (true) {
    (*body)();
    Self().done = true;
    moved = true;
    --live;
    OpenBarrierIfComplete();
    Yield();
  }
}

// Gives the fiber of thread_index its turn.
void Resume() {
  if (_setjmp(scheduler) != 0) return;
  Fiber& fiber = Self();
  if (fiber.stack != nullptr) _longjmp(fiber.rest, 1);
  fiber.stack = std::make_unique<unsigned char[]>(kStackBytes);
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = kStackBytes;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, Main, 0);
  setcontext(&fiber.start);
}

void RunBlock(const Launch& launch) {
  warps.assign(launch.threads / 32, Warp());
  shared.assign((launch.shared_bytes + 15) / 16, Piece());
  for (Piece& piece : shared) piece.bytes.fill(0xFF);
  shared_bytes = launch.shared_bytes;
  live = launch.threads;
  waiting = 0;
  barriers_opened = 0;
  for (uint32_t i = 0; i < launch.threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.done = false;
    fiber.barriers = 0;
    fiber.open.clear();
    fiber.groups.clear();
  }
  while (live > 0) {
    moved = false;
    for (uint32_t i = 0; i < launch.threads; ++i) {
      thread_index.x =
          launch.order == Order::kForward ? i : launch.threads - 1 - i;
      if (!Self().done) Resume();
    }
    if (!moved) Fail("deadlock");
  }
}

}  // namespace

void Run(const Launch& launch, const std::function<void()>& thread) {
  if (launch.threads > fibers.size()) Fail("more threads than a block has");
  body = &thread;
  grid_size = launch.grid;
  for (uint32_t y = 0; y < launch.grid.y; ++y) {
    for (uint32_t x = 0; x < launch.grid.x; ++x) {
      block_index = {x, y, 0};
      RunBlock(launch);
    }
  }
}

void Barrier() {
  const uint64_t number = Self().barriers++;
  ++waiting;
  moved = true;
  OpenBarrierIfComplete();
  while (barriers_opened <= number) Yield();
}

const Slots& Exchange(const void* own, size_t bytes) {
  const uint32_t lane = thread_index.x % 32;
  Warp& warp = warps[thread_index.x / 32];
  const uint64_t number = warp.instructions[lane]++;
  Slots& slots = warp.slots[number % 2];
  std::memcpy(slots[lane].data(), own, bytes);
  ++warp.arrivals;
  moved = true;
  while (warp.arrivals < 32 * (number + 1)) Yield();
  return slots;
}

unsigned char* Shared(uint32_t offset, uint32_t bytes) {
  if (offset > shared_bytes || bytes > shared_bytes - offset) {
    Fail("an address behind the end of shared memory");
  }
  return reinterpret_cast<unsigned char*>(shared.data()) + offset;
}

void CopyLater(uint32_t to, const void* from, uint32_t bytes) {
  if (to % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) {
    Fail("a copy is not aligned to its size");
  }
  std::memset(Shared(to, bytes), 0xFF, bytes);
  Self().open.push_back({to, from, bytes});
}

void Commit() {
  Self().groups.push_back(std::move(Self().open));
  Self().open.clear();
}

void WaitForAllBut(size_t groups) {
  while (Self().groups.size() > groups) {
    for (const Copy& copy : Self().groups.front()) {
      unsigned char* to = Shared(copy.to, copy.bytes);
      if (copy.from == nullptr) {
        std::memset(to, 0, copy.bytes);
      } else {
        std::memcpy(to, copy.from, copy.bytes);
      }
    }
    Self().groups.pop_front();
  }
}

}  // namespace kiln::testing::gpu
