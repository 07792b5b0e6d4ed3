#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <new>

#include "runtime/bundle_reader.h"
#include "runtime/status.h"

namespace kiln::runtime {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;

// Writable anonymous memory, sealed read-only once it is filled. A large one
// asks for huge pages: mapping, filling and unmapping page by page costs as
// much as hashing does.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes), mapped_(bytes) {
    const bool huge = bytes >= kHugePage / 2;
    if (huge) mapped_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    data_ =
        mmap(nullptr, mapped_ + (huge ? kHugePage : 0), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | (huge ? 0 : MAP_POPULATE), -1, 0);
    if (!huge || !ok()) return;
    // Huge pages begin at their multiples: give the rest back.
    auto* begin = static_cast<uint8_t*>(data_);
    const size_t past = reinterpret_cast<uintptr_t>(begin) % kHugePage;
    const size_t head = past == 0 ? 0 : kHugePage - past;
    if (head != 0) munmap(begin, head);
    munmap(begin + head + mapped_, kHugePage - head);
    data_ = begin + head;
    // Where the kernel refuses either, pages come as they are touched.
    (void)madvise(data_, mapped_, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
    (void)madvise(data_, bytes, MADV_POPULATE_WRITE);
#endif
  }

  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  ~Memory() {
    if (ok()) munmap(data_, mapped_);
  }

  bool ok() const { return data_ != MAP_FAILED; }

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

  size_t bytes() const { return bytes_; }

  // What is to be unmapped.
  size_t mapped() const { return mapped_; }

  // All of it, since a part would split a huge page.
  bool Seal() const { return mprotect(data_, mapped_, PROT_READ) == 0; }

  void* Release() {
    void* data = data_;
    data_ = MAP_FAILED;
    return data;
  }

 private:
  void* data_;
  size_t bytes_;
  size_t mapped_;
};

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}

  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }

 private:
  int fd_;
};

kiln_status_t Adopt(Memory* memory, const uint8_t* expected_root, Bundle** out,
                    kiln_error_t* error) {
  if (!memory->Seal()) {
    return Failure(error, KILN_STATUS_SYSTEM, errno)
           << "cannot protect " << memory->bytes() << " bytes of memory";
  }
  BundleView view;
  const kiln_status_t status = VerifyBundle(memory->data(), memory->bytes(),
                                            expected_root, &view, error);
  if (status != KILN_STATUS_OK) return status;
  void* place = malloc(sizeof(Bundle));
  if (place == nullptr) {
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "out of memory opening a bundle";
  }
  Bundle* bundle = new (place) Bundle;
  bundle->view = view;
  bundle->memory_bytes = memory->mapped();
  bundle->memory = memory->Release();
  *out = bundle;
  return KILN_STATUS_OK;
}

kiln_status_t CheckSize(uint64_t bytes, kiln_error_t* error) {
  if (bytes == 0) {
    return Failure(error, KILN_STATUS_BUNDLE_TRUNCATED)
           << "bundle is truncated: 0 bytes";
  }
  if (bytes > KILN_FORMAT_FILE_BYTES_MAX) {
    return Failure(error, KILN_STATUS_BUNDLE_LIMIT)
           << "bundle has " << bytes << " bytes, limit is "
           << KILN_FORMAT_FILE_BYTES_MAX;
  }
  return KILN_STATUS_OK;
}

Failure NoMemory(uint64_t bytes, kiln_error_t* error) {
  Failure failure(error, KILN_STATUS_OUT_OF_MEMORY);
  failure << "out of memory: bundle of " << bytes << " bytes";
  return failure;
}

// Bytes done..end of a file that has `bytes`.
kiln_status_t ReadTo(int fd, const char* path, uint64_t bytes, uint64_t done,
                     uint64_t end, uint8_t* to, kiln_error_t* error) {
  while (done < end) {
    const ssize_t n = read(fd, to, end - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return Failure(error, KILN_STATUS_FILE_UNREADABLE, errno)
             << "cannot read bundle " << Quoted{path} << " at byte " << done;
    }
    if (n == 0) {
      return Failure(error, KILN_STATUS_BUNDLE_TRUNCATED)
             << "bundle " << Quoted{path} << " shrank from " << bytes << " to "
             << done << " bytes while it was read";
    }
    done += static_cast<uint64_t>(n);
    to += n;
  }
  return KILN_STATUS_OK;
}

}  // namespace

kiln_status_t OpenBundleFile(const char* path, const uint8_t* expected_root,
                             Bundle** bundle, kiln_error_t* error) {
  // O_NONBLOCK: a FIFO in place of a file must not hang the engine's start.
  const FileDescriptor fd(
      open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (fd.get() < 0) {
    const int reason = errno;
    const bool absent = reason == ENOENT || reason == ENOTDIR;
    return Failure(error,
                   absent ? KILN_STATUS_FILE_NOT_FOUND
                          : KILN_STATUS_FILE_UNREADABLE,
                   reason)
           << "cannot open bundle " << Quoted{path}
           << (absent ? ": no such file" : ": errno ")
           << (absent ? "" : strerrorname_np(reason));
  }
  struct stat info;
  if (fstat(fd.get(), &info) != 0) {
    return Failure(error, KILN_STATUS_FILE_UNREADABLE, errno)
           << "cannot examine bundle " << Quoted{path};
  }
  if (!S_ISREG(info.st_mode)) {
    return Failure(error, KILN_STATUS_FILE_UNREADABLE)
           << "bundle " << Quoted{path} << " is not a regular file";
  }
  const uint64_t bytes = static_cast<uint64_t>(info.st_size);
  kiln_status_t status = CheckSize(bytes, error);
  if (status != KILN_STATUS_OK) return status;
  // A large file that is something else costs neither memory nor time.
  alignas(kiln_format_header_t) uint8_t head[sizeof(kiln_format_header_t)];
  const uint64_t head_bytes = bytes < sizeof(head) ? bytes : sizeof(head);
  status = ReadTo(fd.get(), path, bytes, 0, head_bytes, head, error);
  if (status != KILN_STATUS_OK) return status;
  status = VerifyHead(head, bytes, expected_root, error);
  if (status != KILN_STATUS_OK) return status;
  Memory memory(bytes);
  if (!memory.ok()) return NoMemory(bytes, error);
  memcpy(memory.data(), head, head_bytes);
  status = ReadTo(fd.get(), path, bytes, head_bytes, bytes,
                  memory.data() + head_bytes, error);
  if (status != KILN_STATUS_OK) return status;
  return Adopt(&memory, expected_root, bundle, error);
}

kiln_status_t OpenBundleMemory(const void* data, size_t bytes,
                               const uint8_t* expected_root, Bundle** bundle,
                               kiln_error_t* error) {
  const kiln_status_t size = CheckSize(bytes, error);
  if (size != KILN_STATUS_OK) return size;
  Memory memory(bytes);
  if (!memory.ok()) return NoMemory(bytes, error);
  memcpy(memory.data(), data, bytes);
  return Adopt(&memory, expected_root, bundle, error);
}

void RetainBundle(Bundle* bundle) {
  bundle->references.fetch_add(1, std::memory_order_relaxed);
}

void ReleaseBundle(Bundle* bundle) {
  if (bundle->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  munmap(bundle->memory, bundle->memory_bytes);
  bundle->~Bundle();
  free(bundle);
}

}  // namespace kiln::runtime
