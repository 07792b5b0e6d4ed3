// Runs a CUDA kernel on the host, one block after another, every thread a fiber
// of its own, so that what is wrong with its indices, barriers and buffers
// shows without a GPU. gpu_intrinsics.h is what such a kernel's file is
// compiled with.

#ifndef KILN_TESTS_TEMPLATES_GPU_EMULATOR_H_
#define KILN_TESTS_TEMPLATES_GPU_EMULATOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace kiln::testing::gpu {

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

// Of the fiber that runs.
extern Dim3 thread_index;
extern Dim3 block_index;
extern Dim3 grid_size;

// Which fiber of a round runs first: a result that depends on it is a race.
enum class Order { kForward, kBackward };

struct Launch {
  Dim3 grid;
  uint32_t threads = 0;       // of a block, a multiple of 32
  uint32_t shared_bytes = 0;  // dynamic
  Order order = Order::kForward;
};

// Returns once every thread of every block has. Aborts with a message on a
// deadlock, and where a lane misses in an instruction of a whole warp.
void Run(const Launch& launch, const std::function<void()>& thread);

// All threads of the block that have not returned.
void Barrier();

constexpr size_t kSlotBytes = 32;
using Slots = std::array<std::array<unsigned char, kSlotBytes>, 32>;

// Every lane of the warp gives `bytes` bytes and gets what all have given.
const Slots& Exchange(const void* own, size_t bytes);

template <typename T>
std::array<T, 32> Gather(const T& own) {
  static_assert(sizeof(T) <= kSlotBytes && std::is_trivially_copyable_v<T>);
  const Slots& slots = Exchange(&own, sizeof(T));
  std::array<T, 32> all;
  for (size_t lane = 0; lane < 32; ++lane) {
    std::memcpy(&all[lane], slots[lane].data(), sizeof(T));
  }
  return all;
}

// Dynamic shared memory of the block; aborts behind its end.
unsigned char* Shared(uint32_t offset, uint32_t bytes);

// The asynchronous copies of the thread that runs; a null source is zeros. They
// are made when they are waited for; until then their destination holds bytes
// of 0xFF.
void CopyLater(uint32_t to, const void* from, uint32_t bytes);
void Commit();
void WaitForAllBut(size_t groups);

// A kernel that is called with the arguments of a launch, 8 bytes each.
struct Entry {
  size_t args = 0;
  std::function<void(const std::vector<uint64_t>&)> call;
};

template <typename T>
T ArgumentAs(uint64_t value) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<uintptr_t>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <typename... Args>
Entry EntryOf(void (*kernel)(Args...)) {
  const auto call = [kernel]<size_t... I>(const std::vector<uint64_t>& args,
                                          std::index_sequence<I...>) {
    kernel(ArgumentAs<Args>(args[I])...);
  };
  return {.args = sizeof...(Args),
          .call = [call](const std::vector<uint64_t>& args) {
            call(args, std::index_sequence_for<Args...>());
          }};
}

}  // namespace kiln::testing::gpu

#endif  // KILN_TESTS_TEMPLATES_GPU_EMULATOR_H_
