#include "runtime/handle.h"

#include <pthread.h>

namespace kiln::runtime {
namespace {

constexpr uint64_t kGenerationMax = (uint64_t{1} << 28) - 1;

// Where the search for a free slot begins, by table; under the mutex.
uint32_t g_next_bundle;
uint32_t g_next_modules;
pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;

}  // namespace

// Zero is the initial state of every field, so neither needs a constructor.
HandleSlot g_bundle_slots[kHandleSlots];
HandleSlot g_modules_slots[kHandleSlots];

uint64_t MakeHandle(HandleKind kind, void* object) {
  const bool bundle = kind == HandleKind::kBundle;
  HandleSlot* slots = bundle ? g_bundle_slots : g_modules_slots;
  uint32_t& next = bundle ? g_next_bundle : g_next_modules;
  uint64_t handle = 0;
  pthread_mutex_lock(&g_mutex);
  for (uint32_t tried = 0; tried < kHandleSlots && handle == 0; ++tried) {
    const uint32_t index = next;
    next = (next + 1) % kHandleSlots;
    HandleSlot& slot = slots[index];
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

void* TakeHandle(HandleKind kind, uint64_t handle) {
  pthread_mutex_lock(&g_mutex);
  void* object = ResolveHandle(kind, handle);
  if (object != nullptr) {
    HandleSlot& slot = SlotOf(kind, handle);
    slot.handle.store(0, std::memory_order_release);
    slot.object.store(nullptr, std::memory_order_relaxed);
  }
  pthread_mutex_unlock(&g_mutex);
  return object;
}

}  // namespace kiln::runtime
