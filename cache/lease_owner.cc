#include "cache/lease_owner.h"

#include <unistd.h>

#include <atomic>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "compiler/base/file_util.h"

namespace kiln {
namespace {

// "boot id/namespace of process ids"; parts that the system does not tell are
// empty, and then nobody else is known to be dead.
const std::string& ThisBoot() {
  static const std::string& boot = *new std::string([] {
    const std::string file = ReadSystemFile("/proc/sys/kernel/random/boot_id");
    char link[64] = {};
    if (readlink("/proc/self/ns/pid", link, sizeof(link) - 1) < 0) link[0] = 0;
    return absl::StrCat(absl::StripTrailingAsciiWhitespace(file), "/", link);
  }());
  return boot;
}

// Start time of a process in ticks since boot; -1 without such a process, and
// for one that has ended and only waits to be reaped.
int64_t StartTicks(int64_t pid) {
  const std::string stat = ReadSystemFile(absl::StrCat("/proc/", pid, "/stat"));
  // The name in parentheses may contain anything; fields are counted behind it.
  // proc(5): state is the 3rd field, starttime the 22nd.
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return -1;
  const std::vector<absl::string_view> fields = absl::StrSplit(
      absl::string_view(stat).substr(name_end + 1), ' ', absl::SkipEmpty());
  int64_t ticks = -1;
  if (fields.size() < 20 || fields[0] == "Z" || fields[0] == "X" ||
      !absl::SimpleAtoi(fields[19], &ticks)) {
    return -1;
  }
  return ticks;
}

}  // namespace

LeaseOwner NewLeaseOwner() {
  LeaseOwner owner;
  owner.boot = ThisBoot();
  owner.pid = getpid();
  owner.start_ticks = StartTicks(owner.pid);
  static std::atomic<int64_t> tokens{0};
  owner.token = ++tokens;
  return owner;
}

bool MayBeAlive(const LeaseOwner& owner) {
  const std::string& here = ThisBoot();
  if (owner.boot == here) {
    return StartTicks(owner.pid) == owner.start_ticks;
  }
  const auto machine = [](const std::string& boot) {
    return boot.substr(0, boot.find('/'));
  };
  // The cache lies on a file system of this machine alone, so another boot is
  // an earlier one.
  return machine(owner.boot) == machine(here) || machine(here).empty();
}

}  // namespace kiln
