#include "runtime/selftest.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <new>

#include "runtime/launch.h"
#include "runtime/sha256.h"
#include "runtime/status.h"

namespace kiln::runtime {
namespace {

// Values on their way to or from the device; a multiple of every element.
constexpr size_t kStagingBytes = size_t{1} << 20;
// What outputs and arena hold before the launch: NaN in every float format.
constexpr uint8_t kPoison = 0xff;

bool IsZero(const uint8_t* digest) {
  for (int i = 0; i < KILN_SHA256_BYTES; ++i) {
    if (digest[i] != 0) return false;
  }
  return true;
}

uint64_t BufferBytes(const kiln_format_param_t& param, uint64_t m) {
  return param.bytes + param.bytes_per_token * m;
}

bool SameBuffer(const kiln_format_param_t& a, const kiln_format_param_t& b) {
  return a.output == b.output && a.fill == b.fill &&
         a.element_bytes == b.element_bytes && a.bytes == b.bytes &&
         a.bytes_per_token == b.bytes_per_token && a.fill_a == b.fill_a &&
         a.fill_b == b.fill_b;
}

// Elements `first`, `first` + 1, ... of a slot's buffer, little-endian.
void MakeElements(const kiln_format_param_t& param, uint32_t slot,
                  uint64_t first, uint8_t* to, size_t bytes) {
  const uint32_t element = param.element_bytes;
  const bool indices = param.fill == KILN_FORMAT_FILL_INDICES;
  const auto fill = [&](auto zero) {
    using T = decltype(zero);
    for (size_t i = 0; i < bytes / sizeof(T); ++i) {
      const uint64_t random = kiln_golden_random(slot, first + i);
      const T value =
          static_cast<T>(indices ? random % param.fill_a
                                 : (random & param.fill_a) | param.fill_b);
      memcpy(to + i * sizeof(T), &value, sizeof(T));
    }
  };
  switch (element) {
    case 1:
      return fill(uint8_t{});
    case 2:
      return fill(uint16_t{});
    case 4:
      return fill(uint32_t{});
    default:
      return fill(uint64_t{});
  }
}

// One piece of memory that the programs reach, 256-byte aligned.
class TestBuffer {
 public:
  TestBuffer() = default;
  TestBuffer(const TestBuffer&) = delete;
  TestBuffer& operator=(const TestBuffer&) = delete;

  ~TestBuffer() { Free(); }

  uint64_t address() const { return address_; }

  uint64_t bytes() const { return bytes_; }

  kiln_status_t Allocate(const Modules& modules, uint64_t bytes,
                         kiln_error_t* error) {
    Free();
    if (modules.cuda()) {
      const int result = modules.driver->mem_alloc(&address_, bytes);
      if (result != kCudaSuccess) {
        address_ = 0;
        if (result == kCudaErrorOutOfMemory) return NoMemory(bytes, error);
        return Failed(modules, result, "cuMemAlloc", error);
      }
      driver_ = modules.driver;
    } else {
      // More than the machine has is refused here; touching it would end the
      // process instead.
      const uint64_t machine = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                               static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
      void* memory = nullptr;
      if (bytes > machine ||
          posix_memalign(&memory, KILN_FORMAT_ARENA_ALIGNMENT, bytes) != 0) {
        return NoMemory(bytes, error);
      }
      address_ = reinterpret_cast<uintptr_t>(memory);
    }
    bytes_ = bytes;
    return KILN_STATUS_OK;
  }

  kiln_status_t Poison(const Modules& modules, kiln_error_t* error) {
    if (driver_ == nullptr) {
      memset(Host(0), kPoison, bytes_);
      return KILN_STATUS_OK;
    }
    const int result = driver_->mem_set(address_, kPoison, bytes_);
    if (result == kCudaSuccess) return KILN_STATUS_OK;
    return Failed(modules, result, "cuMemsetD8", error);
  }

  kiln_status_t Write(const Modules& modules, uint64_t at, const uint8_t* from,
                      size_t bytes, kiln_error_t* error) {
    if (driver_ == nullptr) {
      memcpy(Host(at), from, bytes);
      return KILN_STATUS_OK;
    }
    const int result = driver_->mem_copy_in(address_ + at, from, bytes);
    if (result == kCudaSuccess) return KILN_STATUS_OK;
    return Failed(modules, result, "cuMemcpyHtoD", error);
  }

  // Waits for launches on the default stream, and reports what they did wrong.
  kiln_status_t Read(const Modules& modules, uint64_t at, uint8_t* to,
                     size_t bytes, kiln_error_t* error) const {
    if (driver_ == nullptr) {
      memcpy(to, Host(at), bytes);
      return KILN_STATUS_OK;
    }
    const int result = driver_->mem_copy_out(to, address_ + at, bytes);
    if (result == kCudaSuccess) return KILN_STATUS_OK;
    return Failed(modules, result, "cuMemcpyDtoH", error);
  }

 private:
  uint8_t* Host(uint64_t at) const {
    return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(address_ + at));
  }

  static kiln_status_t NoMemory(uint64_t bytes, kiln_error_t* error) {
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "golden replay: no memory for a buffer of " << bytes << " bytes";
  }

  static kiln_status_t Failed(const Modules& modules, int result,
                              const char* call, kiln_error_t* error) {
    return DriverFailure(modules.driver, KILN_STATUS_DRIVER, result, call,
                         nullptr, error);
  }

  void Free() {
    if (address_ != 0) {
      if (driver_ != nullptr) {
        (void)driver_->mem_free(address_);
      } else {
        free(Host(0));
      }
    }
    driver_ = nullptr;
    address_ = 0;
    bytes_ = 0;
  }

  const kiln_driver_t* driver_ = nullptr;  // null: host memory
  uint64_t address_ = 0;
  uint64_t bytes_ = 0;
};

// The buffers of one entry. Elements do not depend on m, so what was filled
// for the largest m serves every plan.
class Replayer {
 public:
  Replayer(const Modules& modules, uint8_t* staging)
      : modules_(modules), staging_(staging) {}

  // Runs `plan` with `m` tokens and digests its outputs.
  //   m_max: the largest m that plans with these buffers will ask for.
  kiln_status_t Run(const LoadedPlan& plan, uint64_t m, uint64_t m_max,
                    uint8_t* digest, kiln_error_t* error) {
    kiln_status_t status = Prepare(plan, m, m_max, error);
    if (status != KILN_STATUS_OK) return status;
    const kiln_format_range_t params = plan.record->params;
    uint64_t block[KILN_FORMAT_PLAN_PARAMS_MAX];
    for (uint32_t i = 0; i < params.count; ++i) block[i] = slots_[i].address();
    LaunchArguments arguments;
    arguments.m = m;
    arguments.params = block;
    arguments.params_bytes = 8 * params.count;
    arguments.arena =
        reinterpret_cast<void*>(static_cast<uintptr_t>(arena_.address()));
    arguments.arena_bytes = arena_.bytes();
    status = LaunchPlan(modules_, plan, arguments, error);
    if (status != KILN_STATUS_OK) return status;
    kiln_sha256_t hash;
    kiln_sha256_init(&hash);
    for (uint32_t i = 0; i < params.count; ++i) {
      const kiln_format_param_t& param = Param(params, i);
      if (param.output == 0) continue;
      status = Digest(slots_[i], BufferBytes(param, m), &hash, error);
      if (status != KILN_STATUS_OK) return status;
    }
    kiln_sha256_final(&hash, digest);
    return KILN_STATUS_OK;
  }

 private:
  const kiln_format_param_t& Param(kiln_format_range_t range,
                                   uint32_t index) const {
    return modules_.bundle->view.params[range.first + index];
  }

  kiln_status_t Prepare(const LoadedPlan& plan, uint64_t m, uint64_t m_max,
                        kiln_error_t* error) {
    const kiln_format_range_t params = plan.record->params;
    for (uint32_t i = 0; i < params.count; ++i) {
      const kiln_format_param_t& param = Param(params, i);
      const bool fits = held_[i] != nullptr && SameBuffer(param, *held_[i]) &&
                        slots_[i].bytes() >= BufferBytes(param, m);
      if (fits && param.output == 0) continue;
      kiln_status_t status = KILN_STATUS_OK;
      if (!fits) {
        held_[i] = nullptr;
        status = slots_[i].Allocate(modules_, BufferBytes(param, m_max), error);
        if (status == KILN_STATUS_OK && param.output == 0) {
          status = Fill(param, i, error);
        }
      }
      if (status == KILN_STATUS_OK && param.output != 0) {
        status = slots_[i].Poison(modules_, error);
      }
      if (status != KILN_STATUS_OK) return status;
      held_[i] = &param;
    }
    const uint64_t arena = plan.record->arena_bytes;
    if (arena == 0) return KILN_STATUS_OK;
    if (arena_.bytes() < arena) {
      const kiln_status_t status = arena_.Allocate(modules_, arena, error);
      if (status != KILN_STATUS_OK) return status;
    }
    return arena_.Poison(modules_, error);
  }

  kiln_status_t Fill(const kiln_format_param_t& param, uint32_t slot,
                     kiln_error_t* error) {
    const uint64_t bytes = slots_[slot].bytes();
    for (uint64_t at = 0; at < bytes; at += kStagingBytes) {
      const size_t take = Piece(bytes - at);
      MakeElements(param, slot, at / param.element_bytes, staging_, take);
      const kiln_status_t status =
          slots_[slot].Write(modules_, at, staging_, take, error);
      if (status != KILN_STATUS_OK) return status;
    }
    return KILN_STATUS_OK;
  }

  kiln_status_t Digest(const TestBuffer& buffer, uint64_t bytes,
                       kiln_sha256_t* hash, kiln_error_t* error) {
    for (uint64_t at = 0; at < bytes; at += kStagingBytes) {
      const size_t take = Piece(bytes - at);
      const kiln_status_t status =
          buffer.Read(modules_, at, staging_, take, error);
      if (status != KILN_STATUS_OK) return status;
      kiln_sha256_update(hash, staging_, take);
    }
    return KILN_STATUS_OK;
  }

  static size_t Piece(uint64_t left) {
    return left < kStagingBytes ? static_cast<size_t>(left) : kStagingBytes;
  }

  const Modules& modules_;
  uint8_t* staging_;
  TestBuffer slots_[KILN_FORMAT_PLAN_PARAMS_MAX];
  // What a slot was made for; null while it is not ready.
  const kiln_format_param_t* held_[KILN_FORMAT_PLAN_PARAMS_MAX] = {};
  TestBuffer arena_;
};

// Whether freeze could replay the plan: it ran before, it repeats itself, and
// every buffer is described.
bool CanRun(const BundleView& view, const kiln_format_plan_t& plan) {
  bool outputs = false;
  for (uint32_t i = 0; i < plan.params.count; ++i) {
    const kiln_format_param_t& param = view.params[plan.params.first + i];
    if (param.element_bytes == 0) return false;
    outputs = outputs || param.output != 0;
  }
  return outputs && plan.deterministic != 0 &&
         (plan.flags & KILN_FORMAT_FLAG_PREDICTED) == 0;
}

class Selftest {
 public:
  Selftest(const Modules& modules, const kiln_selftest_options_t& options,
           uint8_t* staging, kiln_error_t* error)
      : modules_(modules),
        options_(options),
        staging_(staging),
        error_(error) {}

  kiln_status_t Run(kiln_selftest_result_t* result) {
    const BundleView& view = modules_.bundle->view;
    const kiln_format_range_t entries = modules_.section->entries;
    for (uint32_t e = 0; e < entries.count; ++e) {
      const kiln_status_t status = RunEntry(view.entries[entries.first + e], e);
      if (status != KILN_STATUS_OK) return status;
    }
    if (failed_) return KILN_STATUS_SELFTEST_MISMATCH;
    result->passed = counts_[KILN_SELFTEST_PASSED];
    result->computed = counts_[KILN_SELFTEST_COMPUTED];
    result->not_deterministic = counts_[KILN_SELFTEST_NOT_DETERMINISTIC];
    result->no_digest = counts_[KILN_SELFTEST_NO_DIGEST];
    return KILN_STATUS_OK;
  }

 private:
  bool Runs(const kiln_format_plan_t& plan) const {
    if (!IsZero(plan.golden)) return true;
    return (options_.flags & KILN_SELFTEST_COMPUTE) != 0 &&
           CanRun(modules_.bundle->view, plan);
  }

  kiln_status_t RunEntry(const kiln_format_entry_t& entry, uint32_t index) {
    const uint32_t first =
        entry.plans.first - static_cast<uint32_t>(modules_.plans[0].record -
                                                  modules_.bundle->view.plans);
    uint64_t m_max = 0;
    for (uint32_t p = 0; p < entry.plans.count; ++p) {
      const kiln_format_plan_t& plan = *modules_.plans[first + p].record;
      const uint64_t m = kiln_golden_tokens(plan.m_min, plan.m_max);
      if (Runs(plan) && m > m_max) m_max = m;
    }
    // Too large for the stacks of some engines' threads.
    auto* replayer = static_cast<Replayer*>(malloc(sizeof(Replayer)));
    if (replayer == nullptr) {
      return Failure(error_, KILN_STATUS_OUT_OF_MEMORY)
             << "golden replay: out of memory";
    }
    new (replayer) Replayer(modules_, staging_);
    kiln_status_t status = KILN_STATUS_OK;
    for (uint32_t p = 0; p < entry.plans.count && status == KILN_STATUS_OK;
         ++p) {
      kiln_selftest_plan_t report = {};
      report.entry = index;
      report.plan = p;
      status = RunPlan(modules_.plans[first + p], m_max, replayer, &report);
    }
    replayer->~Replayer();
    free(replayer);
    return status;
  }

  kiln_status_t RunPlan(const LoadedPlan& plan, uint64_t m_max,
                        Replayer* replayer, kiln_selftest_plan_t* report) {
    const kiln_format_plan_t& record = *plan.record;
    memcpy(report->expected, record.golden, sizeof(report->expected));
    if (Runs(record)) {
      report->m = kiln_golden_tokens(record.m_min, record.m_max);
      const kiln_status_t status =
          replayer->Run(plan, report->m, m_max, report->found, error_);
      if (status != KILN_STATUS_OK) return status;
      report->outcome =
          IsZero(record.golden) ? KILN_SELFTEST_COMPUTED
          : memcmp(report->found, record.golden, sizeof(record.golden)) == 0
              ? KILN_SELFTEST_PASSED
              : KILN_SELFTEST_FAILED;
    } else {
      report->outcome = record.deterministic == 0
                            ? KILN_SELFTEST_NOT_DETERMINISTIC
                            : KILN_SELFTEST_NO_DIGEST;
    }
    ++counts_[report->outcome];
    if (report->outcome == KILN_SELFTEST_FAILED && !failed_) {
      failed_ = true;
      Mismatch(plan, *report);
    }
    if (options_.report != nullptr) options_.report(options_.user, report);
    return KILN_STATUS_OK;
  }

  void Mismatch(const LoadedPlan& plan, const kiln_selftest_plan_t& report) {
    const BundleView& view = modules_.bundle->view;
    (void)(Failure(error_, KILN_STATUS_SELFTEST_MISMATCH)
           << "entry " << Quoted{view.Text(plan.entry->name)} << " ("
           << view.Text(plan.entry->op) << "), plan for m "
           << plan.record->m_min << ".." << plan.record->m_max
           << ": golden replay with m " << report.m << " gives "
           << Hex{report.found, 6} << ", frozen with "
           << Hex{report.expected, 6} << "; bundle "
           << Hex{view.header->root, 6} << ", target " << modules_.target()
           << "; this device or driver computes otherwise, or the bundle is "
              "not the one that was frozen: compare the root, then kiln "
              "prewarm and kiln freeze here");
  }

  const Modules& modules_;
  const kiln_selftest_options_t& options_;
  uint8_t* staging_;
  kiln_error_t* error_;
  uint32_t counts_[KILN_SELFTEST_NO_DIGEST + 1] = {};
  bool failed_ = false;
};

}  // namespace

kiln_status_t RunSelftest(const Modules& modules,
                          const kiln_selftest_options_t& options,
                          kiln_selftest_result_t* result, kiln_error_t* error) {
  auto* staging = static_cast<uint8_t*>(malloc(kStagingBytes));
  if (staging == nullptr) {
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "golden replay: out of memory";
  }
  kiln_status_t status = KILN_STATUS_OK;
  if (modules.cuda()) {
    ContextScope scope(modules.driver);
    status = scope.Enter(modules.context, error);
    if (status == KILN_STATUS_OK) {
      status = Selftest(modules, options, staging, error).Run(result);
      const kiln_status_t left =
          scope.Leave(status == KILN_STATUS_OK ? error : nullptr);
      if (status == KILN_STATUS_OK) status = left;
    }
  } else {
    status = Selftest(modules, options, staging, error).Run(result);
  }
  free(staging);
  return status;
}

}  // namespace kiln::runtime
