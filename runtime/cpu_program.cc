#include "runtime/cpu_program.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "runtime/bundle_format.h"
#include "runtime/status.h"

#ifndef MFD_EXEC
#define MFD_EXEC 0x0010U  // Linux 6.3
#endif

namespace kiln::runtime {
namespace {

constexpr uint32_t kProgramHeadersMax = 64;
constexpr uint64_t kRelocationsMax = uint64_t{1} << 20;

// Copies a T at `offset`, or fails when it is not wholly inside.
template <typename T>
bool ReadAt(const uint8_t* data, size_t bytes, uint64_t offset, T* value) {
  if (offset > bytes || bytes - offset < sizeof(T)) return false;
  memcpy(value, data + offset, sizeof(T));
  return true;
}

struct Segments {
  Elf64_Phdr headers[kProgramHeadersMax];
  uint32_t count = 0;

  // File offset of virtual address `address`, through the loadable segments.
  bool FileOffset(uint64_t address, uint64_t* offset) const {
    for (uint32_t i = 0; i < count; ++i) {
      const Elf64_Phdr& segment = headers[i];
      if (segment.p_type == PT_LOAD && address >= segment.p_vaddr &&
          address - segment.p_vaddr < segment.p_filesz) {
        *offset = segment.p_offset + (address - segment.p_vaddr);
        return true;
      }
    }
    return false;
  }
};

const char* CheckTag(int64_t tag, uint64_t value) {
  switch (tag) {
    case DT_NEEDED:
    case DT_AUXILIARY:
    case DT_FILTER:
      return "needs another library";
    case DT_INIT:
    case DT_FINI:
    case DT_INIT_ARRAY:
    case DT_FINI_ARRAY:
    case DT_PREINIT_ARRAY:
      return "has an initialiser or finaliser";
    case DT_RPATH:
    case DT_RUNPATH:
      return "has a library search path";
    case DT_TEXTREL:
      return "has text relocations";
    case DT_FLAGS:
      return (value & DF_TEXTREL) != 0 ? "has text relocations" : nullptr;
    default:
      return nullptr;
  }
}

// Relocations that make the loader call a resolver in the object.
const char* CheckRelocations(const uint8_t* data, size_t bytes,
                             const Segments& segments, uint64_t address,
                             uint64_t table_bytes) {
  if (table_bytes == 0) return nullptr;
  const uint64_t count = table_bytes / sizeof(Elf64_Rela);
  uint64_t offset = 0;
  if (table_bytes % sizeof(Elf64_Rela) != 0 || count > kRelocationsMax ||
      !segments.FileOffset(address, &offset)) {
    return "has a malformed relocation table";
  }
  for (uint64_t i = 0; i < count; ++i) {
    Elf64_Rela relocation;
    if (!ReadAt(data, bytes, offset + i * sizeof(relocation), &relocation)) {
      return "has a malformed relocation table";
    }
    const uint64_t type = ELF64_R_TYPE(relocation.r_info);
    if (type == R_X86_64_IRELATIVE) return "has indirect functions";
    if (type == R_X86_64_COPY) return "has copy relocations";
  }
  return nullptr;
}

const char* CheckDynamic(const uint8_t* data, size_t bytes,
                         const Segments& segments, const Elf64_Phdr& dynamic) {
  uint64_t rela = 0, rela_bytes = 0, plt = 0, plt_bytes = 0;
  bool ended = false;
  for (uint64_t at = 0; at + sizeof(Elf64_Dyn) <= dynamic.p_filesz && !ended;
       at += sizeof(Elf64_Dyn)) {
    Elf64_Dyn entry;
    if (!ReadAt(data, bytes, dynamic.p_offset + at, &entry)) {
      return "has a truncated dynamic section";
    }
    const uint64_t value = entry.d_un.d_val;
    const char* problem = CheckTag(entry.d_tag, value);
    if (problem != nullptr) return problem;
    switch (entry.d_tag) {
      case DT_NULL:
        ended = true;
        break;
      case DT_RELA:
        rela = value;
        break;
      case DT_RELASZ:
        rela_bytes = value;
        break;
      case DT_JMPREL:
        plt = value;
        break;
      case DT_PLTRELSZ:
        plt_bytes = value;
        break;
      case DT_REL:
        return "has a relocation table of another kind";
      default:
        break;
    }
  }
  if (!ended) return "has no end of its dynamic section";
  const char* problem =
      CheckRelocations(data, bytes, segments, rela, rela_bytes);
  if (problem != nullptr) return problem;
  return CheckRelocations(data, bytes, segments, plt, plt_bytes);
}

bool WriteAll(int fd, const void* data, size_t bytes) {
  const uint8_t* in = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t n = write(fd, in, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    in += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

int CreateMemoryFile() {
  const int fd =
      memfd_create("kiln-program", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_EXEC);
  if (fd >= 0 || errno != EINVAL) return fd;
  return memfd_create("kiln-program", MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

// "/proc/self/fd/N", spelt in a way no other load of this process uses. The
// dynamic loader takes two equal names for one library, and descriptor numbers
// repeat; so a counter's bits become "/." or "/", which the kernel ignores.
struct UniquePath {
  char text[256];

  explicit UniquePath(int fd) {
    static std::atomic<uint64_t> counter;
    uint64_t bits = counter.fetch_add(1, std::memory_order_relaxed) + 1;
    size_t at = 0;
    const auto append = [&](const char* piece) {
      const size_t bytes = strlen(piece);
      memcpy(text + at, piece, bytes + 1);
      at += bytes;
    };
    append("/proc/self/fd");
    for (; bits != 0; bits >>= 1) append((bits & 1) != 0 ? "/." : "/");
    char digits[12];
    size_t n = sizeof(digits);
    digits[--n] = '\0';
    unsigned rest = static_cast<unsigned>(fd);
    do {
      digits[--n] = static_cast<char>('0' + rest % 10);
      rest /= 10;
    } while (rest != 0);
    digits[--n] = '/';
    append(digits + n);
  }
};

}  // namespace

const char* CheckCpuObject(const void* object, size_t bytes) {
  const uint8_t* data = static_cast<const uint8_t*>(object);
  Elf64_Ehdr header;
  if (!ReadAt(data, bytes, 0, &header) ||
      memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) {
    return "is not an ELF file";
  }
  if (header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_ident[EI_DATA] != ELFDATA2LSB || header.e_type != ET_DYN ||
      header.e_machine != EM_X86_64) {
    return "is not a shared object for x86-64";
  }
  if (header.e_phentsize != sizeof(Elf64_Phdr) ||
      header.e_phnum > kProgramHeadersMax) {
    return "has malformed program headers";
  }
  Segments segments;
  segments.count = header.e_phnum;
  const Elf64_Phdr* dynamic = nullptr;
  for (uint32_t i = 0; i < segments.count; ++i) {
    Elf64_Phdr& segment = segments.headers[i];
    if (!ReadAt(data, bytes, header.e_phoff + i * sizeof(segment), &segment)) {
      return "has truncated program headers";
    }
    if (segment.p_filesz > bytes ||
        segment.p_offset > bytes - segment.p_filesz) {
      return "has a segment outside the file";
    }
    if (segment.p_type == PT_GNU_STACK && (segment.p_flags & PF_X) != 0) {
      return "asks for an executable stack";
    }
    if (segment.p_type == PT_INTERP) return "asks for an interpreter";
    if (segment.p_type == PT_LOAD && (segment.p_flags & PF_W) != 0 &&
        (segment.p_flags & PF_X) != 0) {
      return "has memory that is writable and executable";
    }
    if (segment.p_type == PT_DYNAMIC) dynamic = &segment;
  }
  if (dynamic == nullptr) return "has no dynamic section";
  return CheckDynamic(data, bytes, segments, *dynamic);
}

kiln_status_t LoadCpuProgram(const void* data, size_t bytes, void** handle,
                             kiln_error_t* error) {
  const char* problem = CheckCpuObject(data, bytes);
  if (problem != nullptr) {
    return Failure(error, KILN_STATUS_PROGRAM_REFUSED)
           << "program of " << bytes << " bytes " << problem;
  }
  const int fd = CreateMemoryFile();
  if (fd < 0) {
    return Failure(error, KILN_STATUS_SYSTEM, errno)
           << "cannot create memory for a program: " << strerrorname_np(errno);
  }
  if (!WriteAll(fd, data, bytes) ||
      fcntl(fd, F_ADD_SEALS,
            F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    const int reason = errno;
    close(fd);
    return Failure(error, KILN_STATUS_SYSTEM, reason)
           << "cannot fill memory for a program of " << bytes
           << " bytes: " << strerrorname_np(reason);
  }
  const UniquePath path(fd);
  void* library = dlopen(path.text, RTLD_NOW | RTLD_LOCAL);
  close(fd);
  if (library == nullptr) {
    const char* reason = dlerror();
    return Failure(error, KILN_STATUS_PROGRAM_REFUSED)
           << "the dynamic loader refused a program: "
           << (reason == nullptr ? "no reason given" : reason);
  }
  *handle = library;
  return KILN_STATUS_OK;
}

void UnloadCpuProgram(void* handle) { dlclose(handle); }

kiln_status_t FindCpuKernel(void* handle, const char* name,
                            uint32_t param_bytes, CpuKernel* kernel,
                            kiln_error_t* error) {
  constexpr char kSuffix[] = "_args_bytes";
  char bytes_name[KILN_FORMAT_STRING_BYTES_MAX + sizeof(kSuffix)];
  const size_t name_bytes = strlen(name);
  memcpy(bytes_name, name, name_bytes);
  memcpy(bytes_name + name_bytes, kSuffix, sizeof(kSuffix));
  void* code = dlsym(handle, name);
  const void* declared = dlsym(handle, bytes_name);
  if (code == nullptr || declared == nullptr) {
    return Failure(error, KILN_STATUS_KERNEL_MISSING)
           << "program does not export "
           << Quoted{code == nullptr ? name : bytes_name};
  }
  uint32_t args_bytes = 0;
  memcpy(&args_bytes, declared, sizeof(args_bytes));
  if (args_bytes != param_bytes) {
    return Failure(error, KILN_STATUS_PARAMETER_LAYOUT)
           << "kernel " << Quoted{name} << " takes " << args_bytes
           << " bytes of arguments, bundle declares " << param_bytes;
  }
  *kernel = reinterpret_cast<CpuKernel>(code);
  return KILN_STATUS_OK;
}

}  // namespace kiln::runtime
