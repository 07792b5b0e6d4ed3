// Handles: values of pointer type that are never dereferenced. A handle names a
// slot of a static table and the generation in which the slot was taken, so a
// handle that was closed, a handle of another kind and plain garbage are told
// apart from a live one without touching freed memory.
//
//   bits 63..36 generation, 35..24 slot, 23..4 plan (entries only), 3..0 kind
//
// A slot whose 2^28 generations are used up is retired, so no handle value is
// ever issued twice in a process.

#ifndef KILN_RUNTIME_HANDLE_H_
#define KILN_RUNTIME_HANDLE_H_

#include <stdint.h>

#include <atomic>

namespace kiln::runtime {

enum class HandleKind : uint64_t { kBundle = 11, kModules = 13, kEntry = 14 };

// Most bundles, and most modules sets, open at one time.
inline constexpr uint32_t kHandleSlots = 4096;

// Takes a slot for `object`. 0 if none is left.
uint64_t MakeHandle(HandleKind kind, void* object);

struct HandleSlot {
  std::atomic<uint64_t> handle;  // 0 while free
  std::atomic<void*> object;
  uint64_t generation;  // last one issued; under the table's mutex
};

extern HandleSlot g_bundle_slots[kHandleSlots];
extern HandleSlot g_modules_slots[kHandleSlots];

inline HandleSlot& SlotOf(HandleKind kind, uint64_t handle) {
  HandleSlot* slots =
      kind == HandleKind::kBundle ? g_bundle_slots : g_modules_slots;
  return slots[static_cast<uint32_t>(handle >> 24) % kHandleSlots];
}

// The live object, or null. `kind` is the kind the caller expects. Lock-free.
inline void* ResolveHandle(HandleKind kind, uint64_t handle) {
  if ((handle & 15) != static_cast<uint64_t>(kind)) return nullptr;
  const HandleSlot& slot = SlotOf(kind, handle);
  if (slot.handle.load(std::memory_order_acquire) != handle) return nullptr;
  return slot.object.load(std::memory_order_relaxed);
}

// Ends the handle and returns its object; null if it was not live.
void* TakeHandle(HandleKind kind, uint64_t handle);

// An entry handle is its modules handle with a plan index in it.
inline uint64_t EntryHandle(uint64_t modules, uint32_t plan) {
  return (modules & ~uint64_t{0xffffff}) | (uint64_t{plan} << 4) |
         static_cast<uint64_t>(HandleKind::kEntry);
}

inline uint64_t ModulesOfEntry(uint64_t entry) {
  return (entry & ~uint64_t{0xffffff}) |
         static_cast<uint64_t>(HandleKind::kModules);
}

inline uint32_t PlanOfEntry(uint64_t entry) {
  return static_cast<uint32_t>(entry >> 4) & 0xfffff;
}

inline bool IsEntry(uint64_t handle) {
  return (handle & 15) == static_cast<uint64_t>(HandleKind::kEntry);
}

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_HANDLE_H_
