#include "compiler/elf_inspect.h"

#include <elf.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/elf_file.h"

namespace kiln {
namespace {

// ---- cubins ----
//
// Facts about the format: LLVM's BinaryFormat/ELF.h (machine, e_flags up to ABI
// version 7), and, for ABI version 8 and the attributes, what ptxas 13.0 writes
// for known sources; the tests compare with its own report.

constexpr uint16_t kMachineCuda = 190;

// e_ident of CUDA's two ABIs.
constexpr uint8_t kOsAbiV1 = 0x33;
constexpr uint8_t kAbiVersionV1Max = 7;
constexpr uint8_t kOsAbiV2 = 0x41;
constexpr uint8_t kAbiVersionV2 = 8;

// ABI 1: sm in bits 0-7, "a" variant in bit 11. ABI 2: sm in bits 8-15, the
// variant in an attribute of .nv.compat.
constexpr uint32_t kFlagsV1ArchSpecific = 0x800;

// Bit of st_other that marks a kernel.
constexpr uint8_t kSymbolIsKernel = 0x10;

// An attribute is: format (1 byte), code (1), value. The format says what the
// value is: nothing or one byte (2 bytes of room), 2 bytes, or a 2-byte length
// and as many bytes.
constexpr uint8_t kFormatNone = 1;
constexpr uint8_t kFormatByte = 2;
constexpr uint8_t kFormatHalf = 3;
constexpr uint8_t kFormatSized = 4;

// Attribute codes of .nv.info and .nv.info.KERNEL.
constexpr uint8_t kAttrMaxThreads = 0x05;
constexpr uint8_t kAttrParamCbank = 0x0a;
constexpr uint8_t kAttrRequiredThreads = 0x10;
constexpr uint8_t kAttrFrameSize = 0x11;
constexpr uint8_t kAttrMinStackSize = 0x12;
constexpr uint8_t kAttrParamInfo = 0x17;
constexpr uint8_t kAttrParamBytes = 0x19;
constexpr uint8_t kAttrRegisters = 0x2f;
constexpr uint8_t kAttrParamInfoV2 = 0x45;
// Attribute code of .nv.compat: 1 when only the very architecture can run it.
constexpr uint8_t kCompatArchSpecific = 0x09;

// From sm_90 on the driver keeps the first 1 KiB of each block's shared memory
// and .nv.shared.KERNEL includes it; the section below is then present.
constexpr uint32_t kReservedSharedBytes = 1024;
constexpr absl::string_view kReservedSharedSection = ".nv.shared.reserved.0";

// Architectural limits, to refuse nonsense: registers and threads.
constexpr uint32_t kRegistersMax = 255;
constexpr uint32_t kThreadsMax = 1024;
constexpr uint32_t kParamBytesMax = 32764;  // CUDA 12.1 and newer, sm_70 and up
constexpr size_t kParamsMax = 4096;

struct Attribute {
  uint8_t code = 0;
  uint32_t value = 0;       // formats byte and half
  absl::string_view bytes;  // format sized

  // The i-th 32-bit word of a sized value; 0 beyond its end.
  uint32_t Word(size_t i) const {
    uint32_t word = 0;
    ReadObject(bytes, 4 * i, &word);
    return word;
  }

  uint16_t Half(size_t i) const {
    uint16_t half = 0;
    ReadObject(bytes, 2 * i, &half);
    return half;
  }
};

absl::StatusOr<std::vector<Attribute>> ParseAttributes(
    absl::string_view section, absl::string_view name) {
  std::vector<Attribute> attributes;
  while (!section.empty()) {
    uint8_t format = 0;
    Attribute attribute;
    uint16_t half = 0;
    if (!ReadObject(section, 0, &format) ||
        !ReadObject(section, 1, &attribute.code) ||
        !ReadObject(section, 2, &half)) {
      return absl::InvalidArgumentError(
          absl::StrCat("cubin section ", name, " ends inside an attribute"));
    }
    section.remove_prefix(4);
    switch (format) {
      case kFormatNone:
        break;
      case kFormatByte:
        attribute.value = half & 0xFF;
        break;
      case kFormatHalf:
        attribute.value = half;
        break;
      case kFormatSized:
        if (half > section.size()) {
          return absl::InvalidArgumentError(
              absl::StrCat("cubin section ", name, " has an attribute of ",
                           half, " bytes where ", section.size(), " are left"));
        }
        attribute.bytes = section.substr(0, half);
        section.remove_prefix(half);
        break;
      default:
        return absl::InvalidArgumentError(
            absl::StrCat("cubin section ", name,
                         " has an attribute of unknown format ", format));
    }
    attributes.push_back(attribute);
  }
  return attributes;
}

// Attributes of a section; none when it does not exist.
absl::StatusOr<std::vector<Attribute>> AttributesOf(const ElfFile& elf,
                                                    const std::string& name) {
  ASSIGN_OR_RETURN(const ElfSection* section, elf.FindSection(name));
  if (section == nullptr) return std::vector<Attribute>();
  return ParseAttributes(section->contents, name);
}

absl::StatusOr<Target> CubinTarget(const ElfFile& elf) {
  const Elf64_Ehdr& header = elf.header();
  const uint8_t os_abi = header.e_ident[EI_OSABI];
  const uint8_t abi_version = header.e_ident[EI_ABIVERSION];
  Target target;
  target.backend = Backend::kCuda;
  if (os_abi == kOsAbiV1 && abi_version <= kAbiVersionV1Max) {
    target.level = static_cast<int>(header.e_flags & 0xFF);
    target.arch_specific = (header.e_flags & kFlagsV1ArchSpecific) != 0;
    return target;
  }
  if (os_abi != kOsAbiV2 || abi_version != kAbiVersionV2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cubin has OS ABI ", os_abi, " version ", abi_version,
        "; this build reads ", kOsAbiV1, " up to version ", kAbiVersionV1Max,
        " and ", kOsAbiV2, " version ", kAbiVersionV2));
  }
  target.level = static_cast<int>((header.e_flags >> 8) & 0xFF);
  ASSIGN_OR_RETURN(const std::vector<Attribute> compat,
                   AttributesOf(elf, ".nv.compat"));
  for (const Attribute& attribute : compat) {
    if (attribute.code == kCompatArchSpecific) {
      target.arch_specific = attribute.value == 1;
    }
  }
  return target;
}

// Kernel symbols by name, with their symbol index. InvalidArgument for calls
// out of the cubin.
absl::StatusOr<std::map<std::string, uint32_t>> CubinKernels(
    const std::vector<ElfSymbol>& symbols) {
  std::map<std::string, uint32_t> kernels;
  for (uint32_t i = 0; i < symbols.size(); ++i) {
    const ElfSymbol& symbol = symbols[i];
    if (symbol.name.empty()) continue;
    if (!symbol.defined()) {
      // The toolchain's own marks; everything else would be linked by name.
      if (absl::StartsWith(symbol.name, ".nv.")) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "cubin needs ", symbol.name, ", which it does not contain"));
    }
    if (symbol.type() != STT_FUNC ||
        (symbol.entry.st_other & kSymbolIsKernel) == 0) {
      continue;
    }
    if (!kernels.emplace(std::string(symbol.name), i).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("cubin has two kernels named ", symbol.name));
    }
  }
  return kernels;
}

// InvalidArgument unless both name the same set. Both are sorted.
absl::Status CheckNames(const std::set<std::string>& found,
                        const std::set<std::string>& expected,
                        absl::string_view what) {
  if (found == expected) return absl::OkStatus();
  const auto list = [](const std::set<std::string>& names) {
    return names.empty() ? std::string("nothing") : absl::StrJoin(names, ", ");
  };
  return absl::InvalidArgumentError(absl::StrCat(
      "program ", what, " ", list(found), "; expected ", list(expected)));
}

// Registers and stack, which .nv.info gives by symbol index.
absl::Status ReadUsage(const std::vector<Attribute>& attributes,
                       uint32_t symbol, Kernel* kernel) {
  bool has_registers = false;
  for (const Attribute& attribute : attributes) {
    if (attribute.bytes.size() < 8 || attribute.Word(0) != symbol) continue;
    switch (attribute.code) {
      case kAttrRegisters:
        kernel->registers = attribute.Word(1);
        has_registers = true;
        break;
      case kAttrFrameSize:
      case kAttrMinStackSize:  // includes called functions
        kernel->local_bytes = std::max(kernel->local_bytes, attribute.Word(1));
        break;
      default:
        break;
    }
  }
  if (!has_registers || kernel->registers > kRegistersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("kernel ", kernel->entry, " states ", kernel->registers,
                     " registers, expected 1 to ", kRegistersMax));
  }
  return absl::OkStatus();
}

absl::Status ReadThreads(const Attribute& attribute, Kernel* kernel) {
  uint64_t threads = 1;
  for (size_t i = 0; i < 3; ++i) {
    const uint64_t extent = attribute.Word(i);
    threads = extent > kThreadsMax ? kThreadsMax + 1 : threads * extent;
    if (threads == 0 || threads > kThreadsMax) {
      return absl::InvalidArgumentError(absl::StrCat(
          "kernel ", kernel->entry, " states thread limits ", attribute.Word(0),
          " x ", attribute.Word(1), " x ", attribute.Word(2), ", at most ",
          kThreadsMax, " threads exist"));
    }
  }
  kernel->max_threads = static_cast<uint32_t>(threads);
  return absl::OkStatus();
}

// Sorts parameters by position and checks that they are numbered without gaps
// and lie, in order and apart, inside the parameter block.
absl::Status PlaceParams(std::map<uint32_t, KernelParam> by_ordinal,
                         Kernel* kernel) {
  if (kernel->param_bytes > kParamBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("kernel ", kernel->entry, " states ", kernel->param_bytes,
                     " parameter bytes, at most ", kParamBytesMax));
  }
  uint32_t end = 0;
  for (const auto& [ordinal, param] : by_ordinal) {
    if (ordinal != kernel->params.size() || param.bytes == 0 ||
        param.offset < end ||
        uint64_t{param.offset} + param.bytes > kernel->param_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "kernel ", kernel->entry, " states parameter ", ordinal, " of ",
          param.bytes, " bytes at offset ", param.offset, ", after parameter ",
          kernel->params.size(), " ended at ", end, ", in a block of ",
          kernel->param_bytes, " bytes"));
    }
    end = param.offset + param.bytes;
    kernel->params.push_back(param);
  }
  return absl::OkStatus();
}

// Parameters and thread limit, from .nv.info.KERNEL.
absl::Status ReadInterface(const std::vector<Attribute>& attributes,
                           Kernel* kernel) {
  std::map<uint32_t, KernelParam> params;
  for (const Attribute& attribute : attributes) {
    switch (attribute.code) {
      case kAttrParamInfo: {
        // index u32 · ordinal u16 · offset u16 · flags u32, whose upper 14
        // bits are the size.
        const KernelParam param{.offset = attribute.Half(3),
                                .bytes = attribute.Word(2) >> 18};
        if (attribute.bytes.size() < 12 || params.size() >= kParamsMax ||
            !params.emplace(attribute.Half(2), param).second) {
          return absl::InvalidArgumentError(
              absl::StrCat("kernel ", kernel->entry,
                           " describes a parameter twice or incompletely"));
        }
        break;
      }
      case kAttrParamInfoV2:
        return absl::InvalidArgumentError(
            absl::StrCat("kernel ", kernel->entry,
                         " takes large parameters; pass a pointer instead"));
      case kAttrParamBytes:
        kernel->param_bytes = attribute.value;
        break;
      case kAttrParamCbank: {
        // constant section u32 · offset u16 · bytes u16
        const uint32_t bytes = attribute.Half(3);
        kernel->param_bytes = std::max(kernel->param_bytes, bytes);
        break;
      }
      case kAttrMaxThreads:
      case kAttrRequiredThreads:
        RETURN_IF_ERROR(ReadThreads(attribute, kernel));
        break;
      default:
        break;
    }
  }
  return PlaceParams(std::move(params), kernel);
}

absl::Status ReadShared(const ElfFile& elf, bool reserved, Kernel* kernel) {
  ASSIGN_OR_RETURN(const ElfSection* section,
                   elf.FindSection(absl::StrCat(".nv.shared.", kernel->entry)));
  if (section == nullptr) return absl::OkStatus();
  const uint64_t bytes = section->header.sh_size;
  const uint64_t driver = reserved ? kReservedSharedBytes : 0;
  if (bytes < driver || bytes - driver > kProgramBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "kernel ", kernel->entry, " states ", bytes,
        " bytes of shared memory, of which ", driver, " are the driver's"));
  }
  kernel->static_shared_bytes = static_cast<uint32_t>(bytes - driver);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Kernel>> InspectCubin(
    const ElfFile& elf, const Target& target,
    const std::set<std::string>& entries) {
  if (elf.header().e_machine != kMachineCuda ||
      elf.header().e_type != ET_EXEC) {
    return absl::InvalidArgumentError(absl::StrCat(
        "binary has ELF machine ", elf.header().e_machine, " and type ",
        elf.header().e_type, "; a cubin has ", kMachineCuda, " and ", ET_EXEC));
  }
  ASSIGN_OR_RETURN(const Target found, CubinTarget(elf));
  if (found != target) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cubin is for ", found.ToString(), "; expected ", target.ToString()));
  }
  ASSIGN_OR_RETURN(const ElfSection* table,
                   elf.FindSection(uint32_t{SHT_SYMTAB}));
  if (table == nullptr) {
    return absl::InvalidArgumentError("cubin has no symbol table");
  }
  ASSIGN_OR_RETURN(const std::vector<ElfSymbol> symbols, elf.Symbols(*table));
  ASSIGN_OR_RETURN(const auto indices, CubinKernels(symbols));
  std::set<std::string> names;
  for (const auto& [name, index] : indices) names.insert(name);
  RETURN_IF_ERROR(CheckNames(names, entries, "contains kernels"));

  ASSIGN_OR_RETURN(const std::vector<Attribute> usage,
                   AttributesOf(elf, ".nv.info"));
  ASSIGN_OR_RETURN(const ElfSection* reserved,
                   elf.FindSection(kReservedSharedSection));
  std::vector<Kernel> kernels;
  for (const auto& [name, index] : indices) {
    Kernel kernel;
    kernel.entry = name;
    ASSIGN_OR_RETURN(const ElfSection* text,
                     elf.FindSection(absl::StrCat(".text.", name)));
    if (text == nullptr || text->contents.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("kernel ", name, " has no code"));
    }
    RETURN_IF_ERROR(ReadUsage(usage, index, &kernel));
    ASSIGN_OR_RETURN(const std::vector<Attribute> interface,
                     AttributesOf(elf, absl::StrCat(".nv.info.", name)));
    RETURN_IF_ERROR(ReadInterface(interface, &kernel));
    RETURN_IF_ERROR(ReadShared(elf, reserved != nullptr, &kernel));
    kernels.push_back(std::move(kernel));
  }
  return kernels;
}

// ---- CPU objects ----

// Names the argument structure's size of an entry.
std::string ArgsBytesSymbol(const std::string& entry) {
  return absl::StrCat(entry, "_args_bytes");
}

// Largest argument structure, in bytes.
constexpr uint32_t kArgsBytesMax = 4096;

absl::Status CheckSegments(const ElfFile& elf) {
  bool stack = false;
  for (const Elf64_Phdr& segment : elf.segments()) {
    switch (segment.p_type) {
      case PT_LOAD:
        if ((segment.p_flags & PF_W) != 0 && (segment.p_flags & PF_X) != 0) {
          return absl::InvalidArgumentError(absl::StrCat(
              "CPU object has a segment at address ", segment.p_vaddr,
              " that is both writable and executable"));
        }
        if (segment.p_memsz < segment.p_filesz) {
          return absl::InvalidArgumentError(absl::StrCat(
              "CPU object has a segment of ", segment.p_memsz,
              " bytes in memory and ", segment.p_filesz, " in the file"));
        }
        break;
      case PT_GNU_STACK:
        stack = true;
        if ((segment.p_flags & PF_X) != 0) {
          return absl::InvalidArgumentError(
              "CPU object asks for an executable stack");
        }
        break;
      case PT_PHDR:
      case PT_DYNAMIC:
      case PT_GNU_RELRO:
      case PT_GNU_EH_FRAME:
      case PT_GNU_PROPERTY:
      case PT_NOTE:
        break;
      default:
        // PT_INTERP, PT_TLS and anything unknown.
        return absl::InvalidArgumentError(
            absl::StrCat("CPU object has a segment of type ", segment.p_type,
                         ", which no program needs"));
    }
  }
  if (!stack) {
    return absl::InvalidArgumentError(
        "CPU object does not say that its stack is not executable");
  }
  return absl::OkStatus();
}

// Values of the dynamic table. Only tags of a self-contained object may occur:
// no library, no search path, no code at load or unload, no text relocation.
absl::StatusOr<std::map<int64_t, uint64_t>> DynamicTable(const ElfFile& elf) {
  static const std::set<int64_t> allowed = {
      DT_HASH,    DT_STRTAB,   DT_SYMTAB, DT_RELA,      DT_RELASZ,
      DT_RELAENT, DT_STRSZ,    DT_SYMENT, DT_RELACOUNT, DT_FLAGS,
      DT_FLAGS_1, DT_GNU_HASH, DT_VERSYM,
  };
  ASSIGN_OR_RETURN(const ElfSection* section,
                   elf.FindSection(uint32_t{SHT_DYNAMIC}));
  const Elf64_Phdr* segment = nullptr;
  for (const Elf64_Phdr& one : elf.segments()) {
    if (one.p_type == PT_DYNAMIC) segment = &one;
  }
  // The loader goes by the segment, the tools by the section.
  if (section == nullptr || segment == nullptr ||
      section->header.sh_offset != segment->p_offset ||
      section->header.sh_size != segment->p_filesz) {
    return absl::InvalidArgumentError(
        "CPU object has no dynamic table, or two that differ");
  }
  std::map<int64_t, uint64_t> table;
  Elf64_Dyn entry;
  for (uint64_t at = 0; ReadObject(section->contents, at, &entry);
       at += sizeof(entry)) {
    if (entry.d_tag == DT_NULL) return table;
    if (allowed.count(entry.d_tag) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("CPU object has dynamic tag ", entry.d_tag,
                       entry.d_tag == DT_NEEDED ? " (needs a library)" : "",
                       entry.d_tag == DT_INIT_ARRAY || entry.d_tag == DT_INIT
                           ? " (code that runs when it is loaded)"
                           : "",
                       "; programs must be self-contained"));
    }
    if (!table.emplace(entry.d_tag, entry.d_un.d_val).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("CPU object has dynamic tag ", entry.d_tag, " twice"));
    }
  }
  return absl::InvalidArgumentError("CPU object's dynamic table has no end");
}

bool IsInWritableSegment(const ElfFile& elf, uint64_t address, uint64_t bytes) {
  for (const Elf64_Phdr& segment : elf.segments()) {
    if (segment.p_type == PT_LOAD && (segment.p_flags & PF_W) != 0 &&
        address >= segment.p_vaddr &&
        address - segment.p_vaddr <= segment.p_memsz &&
        bytes <= segment.p_memsz - (address - segment.p_vaddr)) {
      return true;
    }
  }
  return false;
}

absl::Status CheckRelocations(const ElfFile& elf,
                              const std::map<int64_t, uint64_t>& dynamic) {
  const auto at = dynamic.find(DT_RELA);
  const auto bytes = dynamic.find(DT_RELASZ);
  if (at == dynamic.end() && bytes == dynamic.end()) return absl::OkStatus();
  if (at == dynamic.end() || bytes == dynamic.end()) {
    return absl::InvalidArgumentError("CPU object has half a relocation table");
  }
  ASSIGN_OR_RETURN(const absl::string_view table,
                   elf.AtAddress(at->second, bytes->second));
  Elf64_Rela entry;
  for (uint64_t i = 0; ReadObject(table, i, &entry); i += sizeof(entry)) {
    const auto type = static_cast<uint32_t>(ELF64_R_TYPE(entry.r_info));
    if (type != R_X86_64_RELATIVE ||
        !IsInWritableSegment(elf, entry.r_offset, 8)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "CPU object has a relocation of type ", type, " at address ",
          entry.r_offset, "; only relative ones of data are accepted"));
    }
  }
  return absl::OkStatus();
}

// Exported symbols by name.
absl::StatusOr<std::map<std::string, ElfSymbol>> Exports(
    const ElfFile& elf, const std::map<int64_t, uint64_t>& dynamic) {
  ASSIGN_OR_RETURN(const ElfSection* table,
                   elf.FindSection(uint32_t{SHT_DYNSYM}));
  const auto at = dynamic.find(DT_SYMTAB);
  const auto names = dynamic.find(DT_STRTAB);
  // As above: what is checked must be what the loader uses.
  if (table == nullptr || at == dynamic.end() || names == dynamic.end() ||
      table->header.sh_addr != at->second ||
      table->header.sh_link >= elf.sections().size() ||
      elf.sections()[table->header.sh_link].header.sh_addr != names->second) {
    return absl::InvalidArgumentError(
        "CPU object has no dynamic symbol table, or two that differ");
  }
  ASSIGN_OR_RETURN(const std::vector<ElfSymbol> symbols, elf.Symbols(*table));
  std::map<std::string, ElfSymbol> exports;
  for (const ElfSymbol& symbol : symbols) {
    if (symbol.name.empty()) continue;
    if (!symbol.defined()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "CPU object needs ", symbol.name, ", which it does not contain"));
    }
    if (!exports.emplace(std::string(symbol.name), symbol).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("CPU object exports ", symbol.name, " twice"));
    }
  }
  return exports;
}

absl::Status CheckEntryCode(const ElfFile& elf, const std::string& entry,
                            const ElfSymbol& symbol) {
  for (const Elf64_Phdr& segment : elf.segments()) {
    if (symbol.type() == STT_FUNC && segment.p_type == PT_LOAD &&
        (segment.p_flags & PF_X) != 0 &&
        symbol.entry.st_value >= segment.p_vaddr &&
        symbol.entry.st_value - segment.p_vaddr < segment.p_filesz) {
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("CPU object's entry ", entry, " is no function"));
}

absl::StatusOr<uint32_t> ReadArgsBytes(const ElfFile& elf,
                                       const std::string& name,
                                       const ElfSymbol& symbol) {
  uint32_t bytes = 0;
  if (symbol.type() != STT_OBJECT || symbol.entry.st_size != sizeof(bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("CPU object's ", name, " has ", symbol.entry.st_size,
                     " bytes; expected a u32 constant"));
  }
  ASSIGN_OR_RETURN(const absl::string_view raw,
                   elf.AtAddress(symbol.entry.st_value, sizeof(bytes)));
  ReadObject(raw, 0, &bytes);
  if (bytes == 0 || bytes > kArgsBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("CPU object's ", name, " is ", bytes, ", expected 1 to ",
                     kArgsBytesMax));
  }
  return bytes;
}

absl::StatusOr<std::vector<Kernel>> InspectCpuObject(
    const ElfFile& elf, const std::set<std::string>& entries) {
  const Elf64_Ehdr& header = elf.header();
  if (header.e_machine != EM_X86_64 || header.e_type != ET_DYN) {
    return absl::InvalidArgumentError(absl::StrCat(
        "binary has ELF machine ", header.e_machine, " and type ",
        header.e_type, "; a CPU object has ", EM_X86_64, " and ", ET_DYN));
  }
  RETURN_IF_ERROR(CheckSegments(elf));
  ASSIGN_OR_RETURN(const auto dynamic, DynamicTable(elf));
  RETURN_IF_ERROR(CheckRelocations(elf, dynamic));
  ASSIGN_OR_RETURN(const auto exports, Exports(elf, dynamic));

  std::set<std::string> expected, found;
  for (const std::string& entry : entries) {
    expected.insert(entry);
    expected.insert(ArgsBytesSymbol(entry));
  }
  for (const auto& [name, symbol] : exports) found.insert(name);
  RETURN_IF_ERROR(CheckNames(found, expected, "exports"));

  std::vector<Kernel> kernels;
  for (const std::string& entry : entries) {
    RETURN_IF_ERROR(CheckEntryCode(elf, entry, exports.at(entry)));
    const std::string constant = ArgsBytesSymbol(entry);
    Kernel kernel;
    kernel.entry = entry;
    ASSIGN_OR_RETURN(kernel.param_bytes,
                     ReadArgsBytes(elf, constant, exports.at(constant)));
    kernel.params = {{.offset = 0, .bytes = kernel.param_bytes}};
    kernels.push_back(std::move(kernel));
  }
  return kernels;
}

}  // namespace

absl::StatusOr<std::vector<Kernel>> InspectProgram(
    absl::string_view binary, const Target& target,
    absl::Span<const std::string> entries) {
  if (binary.size() > kProgramBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("binary has ", binary.size(), " bytes, at most ",
                     kProgramBytesMax, " are accepted"));
  }
  const std::set<std::string> expected(entries.begin(), entries.end());
  if (expected.empty() || expected.size() != entries.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("program declares ", entries.size(),
                     " entries; expected at least one, each once"));
  }
  ASSIGN_OR_RETURN(const ElfFile elf, ElfFile::Parse(binary));
  switch (target.backend) {
    case Backend::kCuda:
      return InspectCubin(elf, target, expected);
    case Backend::kCpu:
      return InspectCpuObject(elf, expected);
  }
  KILN_UNREACHABLE();
}

}  // namespace kiln
