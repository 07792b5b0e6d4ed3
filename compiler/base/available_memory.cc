#include "compiler/base/available_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <new>
#include <optional>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "compiler/base/file_util.h"

namespace kiln {
namespace {

constexpr char kAdvice[] =
    "free some, lift the limit of the process (ulimit -v) if it has one, or do "
    "this on a machine with more";

std::optional<uint64_t> ReadNumber(const std::string& path) {
  uint64_t value = 0;
  if (!absl::SimpleAtoi(ReadSystemFile(path), &value)) return std::nullopt;
  return value;
}

// Bytes of files that the control group counts as its own and drops when it
// needs the memory.
uint64_t CachedFileBytes() {
  uint64_t bytes = 0;
  const std::string stat = ReadSystemFile("/sys/fs/cgroup/memory.stat");
  for (absl::string_view line : absl::StrSplit(stat, '\n')) {
    uint64_t value = 0;
    if ((absl::ConsumePrefix(&line, "active_file ") ||
         absl::ConsumePrefix(&line, "inactive_file ")) &&
        absl::SimpleAtoi(line, &value)) {
      bytes += value;
    }
  }
  return bytes;
}

// What the process's own limit on its address space leaves.
uint64_t AddressSpaceLeft() {
  struct rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::numeric_limits<uint64_t>::max();
  }
  // The first number is the size in pages.
  uint64_t pages = 0;
  const std::string statm = ReadSystemFile("/proc/self/statm");
  if (!absl::SimpleAtoi(statm.substr(0, statm.find(' ')), &pages)) return 0;
  const uint64_t used = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

}  // namespace

uint64_t AvailableMemoryBytes() {
  uint64_t available = std::numeric_limits<uint64_t>::max();
  const std::string meminfo = ReadSystemFile("/proc/meminfo");
  for (absl::string_view line : absl::StrSplit(meminfo, '\n')) {
    if (!absl::ConsumePrefix(&line, "MemAvailable:")) continue;
    absl::ConsumeSuffix(&line, "kB");
    uint64_t kilobytes = 0;
    if (absl::SimpleAtoi(line, &kilobytes)) available = kilobytes << 10;
  }
  const auto limit = ReadNumber("/sys/fs/cgroup/memory.max");
  const auto used = ReadNumber("/sys/fs/cgroup/memory.current");
  if (limit && used) {
    const uint64_t held = *used - std::min(*used, CachedFileBytes());
    available = std::min(available, *limit > held ? *limit - held : 0);
  }
  return available;
}

absl::Status CheckMemoryFor(absl::string_view what, uint64_t bytes) {
  const uint64_t available =
      std::min(AvailableMemoryBytes(), AddressSpaceLeft());
  if (bytes <= available) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": needs ", bytes, " bytes of memory, ", available,
                   " are available; ", kAdvice));
}

absl::Status ExhaustedStatus(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) == nullptr) {
    return absl::ResourceExhaustedError(error.what());
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("memory ran out while ",
                   std::min(AvailableMemoryBytes(), AddressSpaceLeft()),
                   " bytes were available; ", kAdvice));
}

}  // namespace kiln
