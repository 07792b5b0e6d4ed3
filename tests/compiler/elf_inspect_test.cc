// The inspector against damaged and hostile files. Undamaged ones of every
// target are in nvrtc_worker_test.cc and cc_cpu_test.cc.

#include "compiler/elf_inspect.h"

#include <elf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/compile_pool.h"
#include "compiler/elf_file.h"
#include "compiler/ptxas_log.h"
#include "tests/compiler/worker_test_main.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::CcCpuForTest;
using ::kiln::testing::NvrtcForTest;
using ::kiln::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Sample {
  std::string binary;
  Target target;
  std::vector<std::string> entries;
};

absl::StatusOr<Sample> Compile(const absl::StatusOr<CompilerSetup>& setup,
                               const CompileJob& job) {
  if (!setup.ok()) return setup.status();
  CompilePool pool({.jobs = 1}, {*setup});
  absl::StatusOr<std::vector<CompileResult>> results =
      pool.Run(std::vector<CompileJob>{job});
  if (!results.ok()) return results.status();
  if (!results->at(0).status.ok()) return results->at(0).status;
  return Sample{std::move(results->at(0).binary), job.target, job.unit.entries};
}

absl::StatusOr<Sample> CubinSample() {
  CompileJob job;
  job.unit.name = "k.cu";
  job.unit.text =
      "extern \"C\" __global__ void __launch_bounds__(64) k(int* p, int n) {"
      " __shared__ int s[64]; s[threadIdx.x] = p[threadIdx.x];"
      " __syncthreads(); p[threadIdx.x] = s[63 - threadIdx.x] + n; }"
      "extern \"C\" __global__ void l() {}";
  job.unit.entries = {"k", "l"};
  job.target = *ParseTarget("sm_90a");
  static const absl::StatusOr<Sample> sample = Compile(NvrtcForTest(), job);
  return sample;
}

absl::StatusOr<Sample> CpuSample() {
  CompileJob job;
  job.unit.name = "k.cc";
  job.unit.text =
      "extern \"C\" const unsigned k_args_bytes;"
      "extern \"C\" const unsigned k_args_bytes = 16;"
      "static int one, two;"
      "static int* const table[] = {&one, &two};"
      "extern \"C\" void k(const void* a, unsigned x, unsigned, unsigned) {"
      " *table[x & 1] += *(const int*)a; }";
  job.unit.entries = {"k"};
  job.target = *ParseTarget("cpu-x86-64-v3");
  static const absl::StatusOr<Sample> sample = Compile(CcCpuForTest(), job);
  return sample;
}

absl::StatusOr<std::vector<Kernel>> Inspect(const Sample& sample,
                                            absl::string_view binary) {
  return InspectProgram(binary, sample.target, sample.entries);
}

template <typename T>
void Overwrite(std::string* bytes, size_t offset, const T& value) {
  ASSERT_LE(offset + sizeof(T), bytes->size());
  std::memcpy(bytes->data() + offset, &value, sizeof(T));
}

// Offset of a section's header in the file.
size_t SectionHeaderAt(const std::string& binary, const std::string& name) {
  const ElfFile elf = *ElfFile::Parse(binary);
  for (size_t i = 0; i < elf.sections().size(); ++i) {
    if (elf.sections()[i].name == name) {
      return elf.header().e_shoff + i * sizeof(Elf64_Shdr);
    }
  }
  ADD_FAILURE() << "no section " << name;
  return 0;
}

size_t SegmentHeaderAt(const std::string& binary, uint32_t type,
                       uint32_t flags) {
  const ElfFile elf = *ElfFile::Parse(binary);
  for (size_t i = 0; i < elf.segments().size(); ++i) {
    if (elf.segments()[i].p_type == type &&
        (elf.segments()[i].p_flags & flags) == flags) {
      return elf.header().e_phoff + i * sizeof(Elf64_Phdr);
    }
  }
  ADD_FAILURE() << "no segment of type " << type;
  return 0;
}

// Replaces the first entry of the dynamic table that has `tag`.
void RetagDynamic(std::string* binary, int64_t tag, int64_t replacement) {
  const ElfFile elf = *ElfFile::Parse(*binary);
  const ElfSection* section = *elf.FindSection(uint32_t{SHT_DYNAMIC});
  ASSERT_NE(section, nullptr);
  for (size_t at = 0; at < section->contents.size(); at += sizeof(Elf64_Dyn)) {
    Elf64_Dyn entry;
    ASSERT_TRUE(ReadObject(section->contents, at, &entry));
    if (entry.d_tag != tag) continue;
    entry.d_tag = replacement;
    Overwrite(binary, section->header.sh_offset + at, entry);
    return;
  }
  FAIL() << "no dynamic tag " << tag;
}

// Every prefix, then many random damages: any answer, but no crash and no read
// outside (which the sanitizer preset would report).
void Batter(const Sample& sample) {
  const std::string& good = sample.binary;
  const size_t step = std::max<size_t>(1, good.size() / 4000);
  for (size_t bytes = 0; bytes < good.size(); bytes += step) {
    // An exact heap copy, so that reading past the end is noticed.
    const std::string cut(good.data(), bytes);
    EXPECT_THAT(Inspect(sample, cut),
                StatusIs(absl::StatusCode::kInvalidArgument));
  }
  std::mt19937 random(7);
  const uint8_t favourites[] = {0x00, 0x01, 0x7F, 0x80, 0xFF};
  const auto damage = [&](std::string* bytes, size_t at) {
    (*bytes)[at] = static_cast<char>(
        random() % 2 == 0 ? favourites[random() % 5] : random());
  };
  Elf64_Ehdr header;
  ASSERT_TRUE(ReadObject(good, 0, &header));
  for (int round = 0; round < 6000; ++round) {
    std::string bad = good;
    const size_t count = 1 + random() % 4;
    for (size_t i = 0; i < count; ++i) {
      // Half of the damage goes where structure lies.
      size_t at = random() % bad.size();
      if (random() % 4 == 0) at = random() % sizeof(Elf64_Ehdr);
      if (random() % 4 == 0) {
        at = std::min<size_t>(
            header.e_shoff + random() % (header.e_shnum * sizeof(Elf64_Shdr)),
            bad.size() - 1);
      }
      damage(&bad, at);
    }
    static_cast<void>(Inspect(sample, bad));
  }
}

TEST(ElfInspectTest, SurvivesDamagedCubins) {
  const absl::StatusOr<Sample> sample = CubinSample();
  if (!sample.ok()) GTEST_SKIP() << sample.status();
  ASSERT_OK(Inspect(*sample, sample->binary));
  Batter(*sample);
}

TEST(ElfInspectTest, SurvivesDamagedCpuObjects) {
  const absl::StatusOr<Sample> sample = CpuSample();
  if (!sample.ok()) GTEST_SKIP() << sample.status();
  ASSERT_OK(Inspect(*sample, sample->binary));
  Batter(*sample);
}

TEST(ElfInspectTest, RefusesBytesThatAreNoElfFile) {
  const Target target = *ParseTarget("sm_90a");
  for (const std::string& bytes :
       {std::string(), std::string("ELF"), std::string(4096, '\0'),
        std::string("#!/bin/sh\nexit 0\n") + std::string(100, ' ')}) {
    EXPECT_THAT(
        InspectProgram(bytes, target, {"k"}),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no ELF file")));
  }
}

TEST(ElfInspectTest, RefusesMissingOrRepeatedDeclarations) {
  const Target target = *ParseTarget("sm_90a");
  EXPECT_THAT(InspectProgram("", target, {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("declares 0 entries")));
  EXPECT_THAT(
      InspectProgram("", target, {"k", "k"}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("each once")));
}

// ABI version 7, as written by CUDA 12: architecture in the low byte of the
// flags, the "a" variant in bit 11.
TEST(ElfInspectTest, ReadsTheFlagsOfTheOlderAbi) {
  const absl::StatusOr<Sample> sample = CubinSample();
  if (!sample.ok()) GTEST_SKIP() << sample.status();
  std::string old = sample->binary;
  old[EI_OSABI] = 0x33;
  old[EI_ABIVERSION] = 7;
  const size_t flags_at = offsetof(Elf64_Ehdr, e_flags);
  Overwrite(&old, flags_at, uint32_t{0x5A0D5A});
  EXPECT_OK(Inspect(*sample, old));
  Overwrite(&old, flags_at, uint32_t{0x5A055A});
  EXPECT_THAT(Inspect(*sample, old),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "cubin is for sm_90; expected sm_90a"));
}

TEST(ElfInspectTest, RefusesAnAbiItDoesNotKnow) {
  const absl::StatusOr<Sample> sample = CubinSample();
  if (!sample.ok()) GTEST_SKIP() << sample.status();
  std::string newer = sample->binary;
  newer[EI_ABIVERSION] = 9;
  EXPECT_THAT(Inspect(*sample, newer),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("OS ABI 65 version 9")));
}

TEST(ElfInspectTest, RefusesACubinWithoutResourceUsage) {
  const absl::StatusOr<Sample> sample = CubinSample();
  if (!sample.ok()) GTEST_SKIP() << sample.status();
  std::string bad = sample->binary;
  Overwrite(&bad,
            SectionHeaderAt(bad, ".nv.info") + offsetof(Elf64_Shdr, sh_size),
            uint64_t{0});
  EXPECT_THAT(Inspect(*sample, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("kernel k states 0 registers")));
}

// One change each to a good CPU object.
TEST(ElfInspectTest, RefusesCpuObjectsThatAreNotSelfContained) {
  const absl::StatusOr<Sample> sample = CpuSample();
  if (!sample.ok()) GTEST_SKIP() << sample.status();

  struct Case {
    const char* name;
    std::function<void(std::string*)> change;
    const char* message;
  };

  const auto retag = [](int64_t tag) {
    return [tag](std::string* b) { RetagDynamic(b, DT_FLAGS, tag); };
  };
  const std::vector<Case> cases = {
      {"needed", retag(DT_NEEDED), "needs a library"},
      {"init", retag(DT_INIT), "runs when it is loaded"},
      {"init array", retag(DT_INIT_ARRAY), "runs when it is loaded"},
      {"fini array", retag(DT_FINI_ARRAY), "dynamic tag"},
      {"search path", retag(DT_RUNPATH), "dynamic tag"},
      {"text relocation", retag(DT_TEXTREL), "dynamic tag"},
      {"filter", retag(DT_FILTER), "dynamic tag"},
      {"plt relocations", retag(DT_JMPREL), "dynamic tag"},
      {"writable code",
       [](std::string* b) {
         Overwrite(
             b,
             SegmentHeaderAt(*b, PT_LOAD, PF_X) + offsetof(Elf64_Phdr, p_flags),
             uint32_t{PF_R | PF_W | PF_X});
       },
       "both writable and executable"},
      {"executable stack",
       [](std::string* b) {
         Overwrite(b,
                   SegmentHeaderAt(*b, PT_GNU_STACK, 0) +
                       offsetof(Elf64_Phdr, p_flags),
                   uint32_t{PF_R | PF_W | PF_X});
       },
       "executable stack"},
      {"interpreter",
       [](std::string* b) {
         Overwrite(b, SegmentHeaderAt(*b, PT_GNU_STACK, 0),
                   uint32_t{PT_INTERP});
       },
       "segment of type 3"},
      {"thread-local storage",
       [](std::string* b) {
         Overwrite(b, SegmentHeaderAt(*b, PT_GNU_STACK, 0), uint32_t{PT_TLS});
       },
       "segment of type 7"},
      {"indirect function",
       [](std::string* b) {
         const ElfFile elf = *ElfFile::Parse(*b);
         const ElfSection* rela = *elf.FindSection(uint32_t{SHT_RELA});
         ASSERT_NE(rela, nullptr);
         Overwrite(b, rela->header.sh_offset + offsetof(Elf64_Rela, r_info),
                   uint64_t{R_X86_64_IRELATIVE});
       },
       "relocation of type 37"},
      {"relocation of code",
       [](std::string* b) {
         const ElfFile elf = *ElfFile::Parse(*b);
         const ElfSection* rela = *elf.FindSection(uint32_t{SHT_RELA});
         const ElfSection* text = *elf.FindSection(".text");
         ASSERT_NE(rela, nullptr);
         ASSERT_NE(text, nullptr);
         Overwrite(b, rela->header.sh_offset, text->header.sh_addr);
       },
       "relocation of type 8"},
      {"undefined symbol",
       [](std::string* b) {
         const ElfFile elf = *ElfFile::Parse(*b);
         const ElfSection* table = *elf.FindSection(uint32_t{SHT_DYNSYM});
         Overwrite(b,
                   table->header.sh_offset + sizeof(Elf64_Sym) +
                       offsetof(Elf64_Sym, st_shndx),
                   uint16_t{SHN_UNDEF});
       },
       "which it does not contain"},
      {"second dynamic table",
       [](std::string* b) {
         Overwrite(b,
                   SegmentHeaderAt(*b, PT_DYNAMIC, 0) +
                       offsetof(Elf64_Phdr, p_filesz),
                   uint64_t{16});
       },
       "two that differ"},
      {"second symbol table",
       [](std::string* b) {
         Overwrite(
             b, SectionHeaderAt(*b, ".dynsym") + offsetof(Elf64_Shdr, sh_addr),
             uint64_t{8});
       },
       "two that differ"},
      {"other machine",
       [](std::string* b) {
         Overwrite(b, offsetof(Elf64_Ehdr, e_machine), uint16_t{EM_AARCH64});
       },
       "ELF machine 183"},
      {"executable",
       [](std::string* b) {
         Overwrite(b, offsetof(Elf64_Ehdr, e_type), uint16_t{ET_EXEC});
       },
       "type 2"},
      {"argument size zero",
       [](std::string* b) {
         const ElfFile elf = *ElfFile::Parse(*b);
         const ElfSection* rodata = *elf.FindSection(".rodata");
         ASSERT_NE(rodata, nullptr);
         Overwrite(b, rodata->header.sh_offset, uint32_t{0});
       },
       "k_args_bytes is 0"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    std::string changed = sample->binary;
    one.change(&changed);
    ASSERT_NE(changed, sample->binary);
    EXPECT_THAT(
        Inspect(*sample, changed),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(one.message)));
  }
}

TEST(PtxasLogTest, ReadsEveryKernelAndSkipsTheRest) {
  const char log[] =
      "kernels.cu(3): warning #177-D: variable \"x\" was declared\n"
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'spill' for 'sm_90a'\n"
      "ptxas info    : Function properties for spill\n"
      "    968 bytes stack frame, 1636 bytes spill stores, 1852 bytes spill "
      "loads\n"
      "ptxas info    : Used 32 registers, used 0 barriers, 968 bytes "
      "cumulative "
      "stack size\n"
      "ptxas info    : Compiling entry function 'alpha' for 'sm_90a'\n"
      "ptxas info    : Function properties for alpha\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 16 registers, used 1 barriers, 1200 bytes smem";
  EXPECT_THAT(ParsePtxasLog(log),
              ElementsAre(PtxasReport{.entry = "spill",
                                      .registers = 32,
                                      .stack_bytes = 968,
                                      .spill_store_bytes = 1636,
                                      .spill_load_bytes = 1852,
                                      .static_shared_bytes = 0},
                          PtxasReport{.entry = "alpha",
                                      .registers = 16,
                                      .stack_bytes = 0,
                                      .spill_store_bytes = 0,
                                      .spill_load_bytes = 0,
                                      .static_shared_bytes = 1200}));
  EXPECT_TRUE(ParsePtxasLog("Used 7 registers\n'").empty());
}

}  // namespace
}  // namespace kiln
