// ElfFile: a bounds-checked view of a 64-bit little-endian ELF file in memory.
// Knows sections, symbols and segments, and nothing about what they mean.

#ifndef KILN_COMPILER_ELF_FILE_H_
#define KILN_COMPILER_ELF_FILE_H_

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

struct ElfSection {
  absl::string_view name;
  Elf64_Shdr header;
  absl::string_view contents;  // empty for SHT_NOBITS
};

struct ElfSymbol {
  absl::string_view name;
  Elf64_Sym entry;

  unsigned type() const { return ELF64_ST_TYPE(entry.st_info); }

  unsigned binding() const { return ELF64_ST_BIND(entry.st_info); }

  bool defined() const { return entry.st_shndx != SHN_UNDEF; }
};

// Copies a T from `bytes` at `offset`. False when it does not lie inside.
template <typename T>
bool ReadObject(absl::string_view bytes, uint64_t offset, T* value) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T)) return false;
  std::memcpy(value, bytes.data() + offset, sizeof(T));
  return true;
}

// Borrows the bytes it was made from.
class ElfFile {
 public:
  // Checks the header and every section and program header.
  //   Errors: InvalidArgument.
  static absl::StatusOr<ElfFile> Parse(absl::string_view bytes);

  const Elf64_Ehdr& header() const { return header_; }

  const std::vector<ElfSection>& sections() const { return sections_; }

  const std::vector<Elf64_Phdr>& segments() const { return segments_; }

  // The section of that name, or null. InvalidArgument when several have it.
  absl::StatusOr<const ElfSection*> FindSection(absl::string_view name) const;
  // The only section of a type, or null. InvalidArgument when there are more.
  absl::StatusOr<const ElfSection*> FindSection(uint32_t type) const;

  // Symbols of a SHT_SYMTAB or SHT_DYNSYM section, the empty first one
  // included, so that positions are symbol indices.
  absl::StatusOr<std::vector<ElfSymbol>> Symbols(
      const ElfSection& section) const;

  // The file bytes that a loader puts at [address, address + bytes).
  //   Errors: InvalidArgument unless one PT_LOAD holds them all in the file.
  absl::StatusOr<absl::string_view> AtAddress(uint64_t address,
                                              uint64_t bytes) const;

 private:
  absl::string_view bytes_;
  Elf64_Ehdr header_{};
  std::vector<ElfSection> sections_;
  std::vector<Elf64_Phdr> segments_;
};

}  // namespace kiln

#endif  // KILN_COMPILER_ELF_FILE_H_
