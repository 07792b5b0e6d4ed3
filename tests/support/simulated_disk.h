// What a disk may hold after a power cut: everything that was synced, and of
// the rest anything.
//
// Of writes since a file's last sync, each sector of 512 bytes holds what it
// held at any time since then, or, where it was being written, garbage; the
// size of the file may be that of any time since then, as a whole. A new name,
// a rename or an unlink is there or not, unless its folder was synced. This is
// the model that SQLite is tested with: no more is expected of a disk than that
// a sync that returned is kept, and that bytes which nobody writes stay.

#ifndef KILN_TESTS_SUPPORT_SIMULATED_DISK_H_
#define KILN_TESTS_SUPPORT_SIMULATED_DISK_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/support/fault_fs.h"

namespace kiln::testing {

class SimulatedDisk {
 public:
  // What lies under `folder` now counts as synced.
  explicit SimulatedDisk(const std::string& folder);

  void Apply(const DiskEvent& event);

  // Writes into the empty folder `to` what a cut may leave now. Seed 0 drops
  // all that was not synced, 1 keeps all, 2 keeps what came first; the others
  // mix.
  void Cut(uint64_t seed, const std::string& to) const;

 private:
  struct File {
    std::string synced;
    std::vector<DiskEvent> pending;
  };

  // A change of names that is not synced yet.
  struct NameChange {
    std::string folder;
    DiskEvent event;
    size_t file = 0;
  };

  struct Names {
    std::map<std::string, size_t> files;  // path to index of files_
    std::set<std::string> folders;
  };

  static void Change(const NameChange& change, Names* names);

  std::string root_;
  std::vector<File> files_;
  std::map<uint64_t, size_t> by_inode_;
  Names live_;
  Names synced_;
  std::vector<NameChange> changes_;
};

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_SIMULATED_DISK_H_
