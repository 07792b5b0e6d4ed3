#include "runtime/handle.h"

#include <pthread.h>

#include <atomic>

namespace kiln::runtime {
namespace {

constexpr uint64_t kGenerationMax = (uint64_t{1} << 28) - 1;

struct Slot {
  std::atomic<uint64_t> handle;  // 0 while free
  std::atomic<void*> object;
  uint64_t generation;  // last one issued; under the mutex
};

struct Table {
  Slot slots[kHandleSlots];
  uint32_t next;  // where the search for a free slot begins; under the mutex
};

// Zero is the initial state of every field, so neither needs a constructor.
Table g_bundles;
Table g_modules;
pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;

Table& TableOf(HandleKind kind) {
  return kind == HandleKind::kBundle ? g_bundles : g_modules;
}

uint32_t SlotOf(uint64_t handle) {
  return static_cast<uint32_t>(handle >> 24) % kHandleSlots;
}

}  // namespace

uint64_t MakeHandle(HandleKind kind, void* object) {
  Table& table = TableOf(kind);
  uint64_t handle = 0;
  pthread_mutex_lock(&g_mutex);
  for (uint32_t tried = 0; tried < kHandleSlots && handle == 0; ++tried) {
    const uint32_t index = table.next;
    table.next = (table.next + 1) % kHandleSlots;
    Slot& slot = table.slots[index];
    if (slot.handle.load(std::memory_order_relaxed) != 0 ||
        slot.generation == kGenerationMax) {
      continue;
    }
    ++slot.generation;
    handle = (slot.generation << 36) | (uint64_t{index} << 24) |
             static_cast<uint64_t>(kind);
    slot.object.store(object, std::memory_order_relaxed);
    slot.handle.store(handle, std::memory_order_release);
  }
  pthread_mutex_unlock(&g_mutex);
  return handle;
}

void* ResolveHandle(HandleKind kind, uint64_t handle) {
  if ((handle & 15) != static_cast<uint64_t>(kind)) return nullptr;
  Slot& slot = TableOf(kind).slots[SlotOf(handle)];
  if (slot.handle.load(std::memory_order_acquire) != handle) return nullptr;
  return slot.object.load(std::memory_order_relaxed);
}

void* TakeHandle(HandleKind kind, uint64_t handle) {
  pthread_mutex_lock(&g_mutex);
  void* object = ResolveHandle(kind, handle);
  if (object != nullptr) {
    Slot& slot = TableOf(kind).slots[SlotOf(handle)];
    slot.handle.store(0, std::memory_order_release);
    slot.object.store(nullptr, std::memory_order_relaxed);
  }
  pthread_mutex_unlock(&g_mutex);
  return object;
}

}  // namespace kiln::runtime
