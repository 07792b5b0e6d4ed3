// Who holds a lease, and whether that process still lives. Internal to cache/.

#ifndef KILN_CACHE_LEASE_OWNER_H_
#define KILN_CACHE_LEASE_OWNER_H_

#include <cstdint>
#include <string>

namespace kiln {

struct LeaseOwner {
  // Boot id of the machine and its namespace of process ids, joined by '/'.
  std::string boot = {};
  int64_t pid = 0;
  // When the process began, in clock ticks since boot: a reused process id is
  // another process.
  int64_t start_ticks = 0;
  // Tells two owners of one process apart.
  int64_t token = 0;

  bool operator==(const LeaseOwner&) const = default;
};

// An owner in this process, unlike every other. Thread-safe.
LeaseOwner NewLeaseOwner();

// False only when the owner certainly has ended: its process is gone, or the
// machine was booted since. A process of another namespace cannot be looked at
// and counts as alive.
bool MayBeAlive(const LeaseOwner& owner);

}  // namespace kiln

#endif  // KILN_CACHE_LEASE_OWNER_H_
