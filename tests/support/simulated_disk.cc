#include "tests/support/simulated_disk.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>

#include "tests/support/golden.h"

namespace kiln::testing {
namespace {

using Kind = DiskEvent::Kind;
using Random = std::mt19937_64;

constexpr uint64_t kSectorBytes = 512;
// One of so many sectors that were being written holds garbage.
constexpr uint64_t kGarbageOneIn = 12;

std::string FolderOf(const std::string& path) {
  return std::filesystem::path(path).parent_path().string();
}

uint64_t InodeOf(const std::string& path) {
  struct stat info = {};
  EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
  return static_cast<uint64_t>(info.st_ino);
}

uint64_t SizeAfter(uint64_t size, const DiskEvent& event) {
  return event.kind == Kind::kTruncate
             ? event.offset
             : std::max(size, event.offset + event.data.size());
}

// The part of `event` that lies in [begin, begin + part->size()), applied.
void ApplyTo(const DiskEvent& event, uint64_t begin, std::string* part) {
  const uint64_t end = begin + part->size();
  if (event.kind == Kind::kTruncate) {
    for (uint64_t at = std::max(begin, event.offset); at < end; ++at) {
      (*part)[at - begin] = 0;
    }
    return;
  }
  const uint64_t from = std::max(begin, event.offset);
  const uint64_t to = std::min(end, event.offset + event.data.size());
  if (from >= to) return;
  part->replace(from - begin, to - from, event.data, from - event.offset,
                to - from);
}

// Which of `count` changes in a row survived, as a number of them.
size_t Survivors(uint64_t seed, size_t count, Random* random) {
  if (seed == 0) return 0;
  if (seed == 1) return count;
  return static_cast<size_t>((*random)() % (count + 1));
}

std::string AfterCut(const std::string& synced,
                     const std::vector<DiskEvent>& pending, uint64_t seed,
                     Random* random) {
  if (pending.empty()) return synced;
  const size_t cut = Survivors(seed, pending.size(), random);
  uint64_t size = synced.size();
  for (size_t i = 0; i < cut; ++i) size = SizeAfter(size, pending[i]);
  std::string bytes;
  for (uint64_t begin = 0; begin < size; begin += kSectorBytes) {
    std::string sector(std::min(kSectorBytes, size - begin), '\0');
    ApplyTo({.kind = Kind::kWrite, .offset = 0, .data = synced}, begin,
            &sector);
    const size_t here =
        seed <= 2 ? cut : Survivors(seed, pending.size(), random);
    for (size_t i = 0; i < pending.size(); ++i) {
      // A truncation is one with the size: it does not touch single sectors.
      const size_t kept = pending[i].kind == Kind::kTruncate ? cut : here;
      if (i < kept) ApplyTo(pending[i], begin, &sector);
    }
    if (seed > 2 && here > 0 && (*random)() % kGarbageOneIn == 0 &&
        pending[here - 1].kind == Kind::kWrite) {
      DiskEvent garbage = pending[here - 1];
      for (char& c : garbage.data) c = static_cast<char>((*random)());
      ApplyTo(garbage, begin, &sector);
    }
    bytes += sector;
  }
  return bytes;
}

}  // namespace

SimulatedDisk::SimulatedDisk(const std::string& folder) : root_(folder) {
  live_.folders.insert(folder);
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder)) {
    const std::string path = entry.path().string();
    if (entry.is_directory()) {
      live_.folders.insert(path);
      continue;
    }
    by_inode_[InodeOf(path)] = files_.size();
    live_.files[path] = files_.size();
    files_.push_back({.synced = ReadTestFile(path), .pending = {}});
  }
  synced_ = live_;
}

void SimulatedDisk::Change(const NameChange& change, Names* names) {
  const DiskEvent& event = change.event;
  if (names->folders.count(change.folder) == 0) return;
  switch (event.kind) {
    case Kind::kCreate:
      names->files[event.path] = change.file;
      return;
    case Kind::kMakeFolder:
      names->folders.insert(event.path);
      return;
    case Kind::kRename:
      names->files.erase(event.path);
      names->files[event.to] = change.file;
      return;
    case Kind::kUnlink:
      names->files.erase(event.path);
      return;
    default:
      return;
  }
}

void SimulatedDisk::Apply(const DiskEvent& event) {
  switch (event.kind) {
    case Kind::kMark:
      return;
    case Kind::kWrite:
    case Kind::kTruncate:
      files_[by_inode_.at(event.inode)].pending.push_back(event);
      return;
    case Kind::kSync: {
      File& file = files_[by_inode_.at(event.inode)];
      Random unused;
      file.synced = AfterCut(file.synced, file.pending, 1, &unused);
      file.pending.clear();
      return;
    }
    case Kind::kSyncFolder: {
      std::vector<NameChange> rest;
      for (NameChange& change : changes_) {
        if (change.folder == event.path) {
          Change(change, &synced_);
        } else {
          rest.push_back(std::move(change));
        }
      }
      changes_ = std::move(rest);
      return;
    }
    default:
      break;
  }
  NameChange change = {.folder = FolderOf(event.path), .event = event};
  if (event.kind == Kind::kCreate) {
    // The number of a file that was unlinked may be used again.
    change.file = files_.size();
    by_inode_[event.inode] = files_.size();
    files_.emplace_back();
  } else if (event.kind == Kind::kRename) {
    change.file = live_.files.at(event.path);
  }
  Change(change, &live_);
  changes_.push_back(std::move(change));
}

void SimulatedDisk::Cut(uint64_t seed, const std::string& to) const {
  Random random(seed);
  Names names = synced_;
  const size_t cut = Survivors(seed, changes_.size(), &random);
  for (size_t i = 0; i < changes_.size(); ++i) {
    if (seed <= 2 ? i < cut : random() % 2 == 0) Change(changes_[i], &names);
  }
  const auto target = [&](const std::string& path) {
    return to + path.substr(root_.size());
  };
  for (const std::string& folder : names.folders) {
    std::filesystem::create_directories(target(folder));
  }
  for (const auto& [path, index] : names.files) {
    if (names.folders.count(FolderOf(path)) == 0) continue;
    const File& file = files_[index];
    std::ofstream out(target(path), std::ios::binary);
    out << AfterCut(file.synced, file.pending, seed, &random);
    EXPECT_TRUE(out.flush().good()) << path;
  }
}

}  // namespace kiln::testing
