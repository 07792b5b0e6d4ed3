#include "compiler/elf_file.h"

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// A string table entry; a table need not end with a zero to be read safely.
absl::StatusOr<absl::string_view> StringAt(absl::string_view table,
                                           uint64_t offset) {
  if (offset >= table.size()) {
    return absl::InvalidArgumentError(absl::StrCat("ELF name at offset ",
                                                   offset, " of a table of ",
                                                   table.size(), " bytes"));
  }
  const absl::string_view rest = table.substr(offset);
  const size_t end = rest.find('\0');
  if (end == absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("ELF name at offset ", offset, " has no end"));
  }
  return rest.substr(0, end);
}

// [offset, offset + size) of `bytes`, checked without overflow.
absl::StatusOr<absl::string_view> Slice(absl::string_view bytes,
                                        uint64_t offset, uint64_t size,
                                        absl::string_view what) {
  if (offset > bytes.size() || size > bytes.size() - offset) {
    return absl::InvalidArgumentError(
        absl::StrCat("ELF ", what, " spans ", size, " bytes from offset ",
                     offset, ", the file has ", bytes.size()));
  }
  return bytes.substr(offset, size);
}

absl::Status CheckHeader(const Elf64_Ehdr& header) {
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) {
    return absl::InvalidArgumentError("binary is no ELF file");
  }
  if (header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_ident[EI_DATA] != ELFDATA2LSB ||
      header.e_ident[EI_VERSION] != EV_CURRENT) {
    return absl::InvalidArgumentError(
        "binary is no 64-bit little-endian ELF file of version 1");
  }
  if (header.e_shnum == 0 || header.e_shentsize != sizeof(Elf64_Shdr) ||
      header.e_shstrndx >= header.e_shnum) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ELF section table has ", header.e_shnum, " entries of ",
        header.e_shentsize, " bytes with names in entry ", header.e_shstrndx));
  }
  if (header.e_phnum != 0 && header.e_phentsize != sizeof(Elf64_Phdr)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ELF program headers have ", header.e_phentsize,
                     " bytes, expected ", sizeof(Elf64_Phdr)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ElfFile> ElfFile::Parse(absl::string_view bytes) {
  ElfFile file;
  file.bytes_ = bytes;
  if (!ReadObject(bytes, 0, &file.header_)) {
    return absl::InvalidArgumentError(
        absl::StrCat("binary of ", bytes.size(), " bytes is no ELF file"));
  }
  RETURN_IF_ERROR(CheckHeader(file.header_));
  const Elf64_Ehdr& header = file.header_;

  ASSIGN_OR_RETURN(const absl::string_view section_table,
                   Slice(bytes, header.e_shoff,
                         header.e_shnum * sizeof(Elf64_Shdr), "section table"));
  for (size_t i = 0; i < header.e_shnum; ++i) {
    ElfSection section;
    ReadObject(section_table, i * sizeof(Elf64_Shdr), &section.header);
    if (section.header.sh_type != SHT_NOBITS &&
        section.header.sh_type != SHT_NULL) {
      ASSIGN_OR_RETURN(section.contents,
                       Slice(bytes, section.header.sh_offset,
                             section.header.sh_size, "section"));
    }
    file.sections_.push_back(section);
  }
  const absl::string_view names = file.sections_[header.e_shstrndx].contents;
  for (size_t i = 1; i < file.sections_.size(); ++i) {
    ElfSection& section = file.sections_[i];
    ASSIGN_OR_RETURN(section.name, StringAt(names, section.header.sh_name));
  }

  ASSIGN_OR_RETURN(
      const absl::string_view segment_table,
      Slice(bytes, header.e_phoff, header.e_phnum * sizeof(Elf64_Phdr),
            "program header table"));
  for (size_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    ReadObject(segment_table, i * sizeof(Elf64_Phdr), &segment);
    RETURN_IF_ERROR(
        Slice(bytes, segment.p_offset, segment.p_filesz, "segment").status());
    file.segments_.push_back(segment);
  }
  return file;
}

absl::StatusOr<const ElfSection*> ElfFile::FindSection(
    absl::string_view name) const {
  const ElfSection* found = nullptr;
  for (const ElfSection& section : sections_) {
    if (section.header.sh_type == SHT_NULL || section.name != name) continue;
    if (found != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("ELF file has two sections named ", name));
    }
    found = &section;
  }
  return found;
}

absl::StatusOr<const ElfSection*> ElfFile::FindSection(uint32_t type) const {
  const ElfSection* found = nullptr;
  for (const ElfSection& section : sections_) {
    if (section.header.sh_type != type) continue;
    if (found != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("ELF file has two sections of type ", type));
    }
    found = &section;
  }
  return found;
}

absl::StatusOr<std::vector<ElfSymbol>> ElfFile::Symbols(
    const ElfSection& section) const {
  if (section.header.sh_link >= sections_.size() ||
      section.header.sh_entsize != sizeof(Elf64_Sym) ||
      section.contents.size() % sizeof(Elf64_Sym) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ELF symbol table of ", section.contents.size(),
                     " bytes has entries of ", section.header.sh_entsize,
                     " bytes and names in section ", section.header.sh_link));
  }
  const absl::string_view names = sections_[section.header.sh_link].contents;
  std::vector<ElfSymbol> symbols(section.contents.size() / sizeof(Elf64_Sym));
  for (size_t i = 0; i < symbols.size(); ++i) {
    ElfSymbol& symbol = symbols[i];
    ReadObject(section.contents, i * sizeof(Elf64_Sym), &symbol.entry);
    if (symbol.entry.st_name == 0) continue;
    ASSIGN_OR_RETURN(symbol.name, StringAt(names, symbol.entry.st_name));
  }
  return symbols;
}

absl::StatusOr<absl::string_view> ElfFile::AtAddress(uint64_t address,
                                                     uint64_t bytes) const {
  for (const Elf64_Phdr& segment : segments_) {
    if (segment.p_type != PT_LOAD || address < segment.p_vaddr) continue;
    const uint64_t offset = address - segment.p_vaddr;
    if (offset > segment.p_filesz || bytes > segment.p_filesz - offset) {
      continue;
    }
    return bytes_.substr(segment.p_offset + offset, bytes);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "no loaded segment holds ", bytes, " bytes at address ", address));
}

}  // namespace kiln
