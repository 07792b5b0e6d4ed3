#include "runtime/bundle_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>

#include "runtime/bundle_format.h"
#include "runtime/kiln.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::OpenTiny;
using ::kiln::testing::ReadTestFile;
using ::kiln::testing::RepairRoot;
using ::kiln::testing::SourcePath;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::testing::HasSubstr;

std::string TwoSections() {
  absl::StatusOr<std::string> bytes =
      WriteBundle({TinyCudaSection(), TinyCpuSection("not really ELF")});
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  return bytes.ok() ? *bytes : std::string();
}

struct Opened {
  kiln_status_t status = KILN_STATUS_OK;
  std::string message;
};

Opened Open(const std::string& bytes, const uint8_t* root = nullptr) {
  kiln_open_options_t options = {};
  options.struct_size = sizeof(options);
  options.expected_root = root;
  kiln_bundle_t* bundle = nullptr;
  kiln_error_t error = {};
  Opened result;
  result.status = kiln_bundle_open_memory(bytes.data(), bytes.size(), &options,
                                          &bundle, &error);
  result.message = error.message;
  EXPECT_EQ(result.status != KILN_STATUS_OK, bundle == nullptr);
  if (result.status != KILN_STATUS_OK) {
    EXPECT_EQ(error.code, result.status);
    EXPECT_FALSE(result.message.empty());
  }
  kiln_bundle_close(bundle, nullptr);
  return result;
}

TEST(BundleReaderTest, AcceptsWhatTheWriterWrites) {
  const Opened opened = Open(TwoSections());
  EXPECT_EQ(opened.status, KILN_STATUS_OK) << opened.message;
}

TEST(BundleReaderTest, AcceptsThePinnedRootAndNoOther) {
  const std::string bytes = TwoSections();
  uint8_t root[KILN_ROOT_BYTES];
  kiln_bundle_root(bytes.data(), bytes.size(), root);
  EXPECT_EQ(Open(bytes, root).status, KILN_STATUS_OK);
  root[31] ^= 1;
  const Opened opened = Open(bytes, root);
  EXPECT_EQ(opened.status, KILN_STATUS_ROOT_MISMATCH);
  EXPECT_THAT(opened.message, HasSubstr("expected"));
}

// Seeds of another version would teach a fuzzer one refusal and nothing else.
TEST(BundleReaderTest, AcceptsTheFuzzersSeeds) {
  int seeds = 0;
  for (const auto& file : std::filesystem::directory_iterator(
           SourcePath("tests/fuzz/corpus/bundle_reader"))) {
    const Opened opened = Open(ReadTestFile(file.path()));
    EXPECT_EQ(opened.status, KILN_STATUS_OK) << file.path() << opened.message;
    ++seeds;
  }
  EXPECT_GE(seeds, 2);
}

TEST(BundleReaderTest, RefusesEveryTruncation) {
  const std::string bytes = TwoSections();
  for (size_t n = 1; n < bytes.size(); ++n) {
    ASSERT_EQ(Open(bytes.substr(0, n)).status, KILN_STATUS_BUNDLE_TRUNCATED)
        << n << " bytes";
  }
}

TEST(BundleReaderTest, RefusesBytesAfterTheEnd) {
  EXPECT_EQ(Open(TwoSections() + '\0').status, KILN_STATUS_BUNDLE_MALFORMED);
}

TEST(BundleReaderTest, RefusesEveryChangedByte) {
  const std::string bytes = TwoSections();
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (const int change : {0x01, 0x80, 0xff}) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ change);
      ASSERT_NE(Open(changed).status, KILN_STATUS_OK)
          << "byte " << i << " ^ " << change;
    }
  }
}

// The same with the root made right again: structure alone must hold. Bytes
// that mean something to people only may change freely; whatever is accepted
// must still be readable from end to end, which the sanitizers watch.
TEST(BundleReaderTest, ChangedBytesUnderARightRootNeverBreakTheReader) {
  const std::string bytes = TwoSections();
  size_t accepted = 0;
  for (size_t i = offsetof(kiln_format_header_t, runtime_abi); i < bytes.size();
       ++i) {
    for (const int change : {0x01, 0x20, 0xff}) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ change);
      RepairRoot(&changed);
      if (Open(changed).status == KILN_STATUS_OK) ++accepted;
    }
  }
  EXPECT_LT(accepted, bytes.size());
}

kiln_format_header_t* Header(std::string* bytes) {
  return reinterpret_cast<kiln_format_header_t*>(bytes->data());
}

template <typename T>
T* Record(std::string* bytes, uint32_t table, uint32_t index) {
  return reinterpret_cast<T*>(bytes->data() +
                              Header(bytes)->tables[table].offset) +
         index;
}

struct Corruption {
  const char* name;
  std::function<void(std::string*)> apply;
  kiln_status_t status;
  const char* message;
};

class CorruptionTest : public ::testing::TestWithParam<Corruption> {};

TEST_P(CorruptionTest, IsRefusedUnderARightRoot) {
  std::string bytes = TwoSections();
  GetParam().apply(&bytes);
  RepairRoot(&bytes);
  const Opened opened = Open(bytes);
  EXPECT_EQ(opened.status, GetParam().status) << opened.message;
  EXPECT_THAT(opened.message, HasSubstr(GetParam().message));
}

#define KILN_SET(type, table, index, statement)                           \
  [](std::string* bytes) {                                                \
    auto* record = Record<type>(bytes, KILN_FORMAT_TABLE_##table, index); \
    statement;                                                            \
  }

constexpr kiln_status_t kMalformed = KILN_STATUS_BUNDLE_MALFORMED;

const Corruption kCorruptions[] = {
    {"OtherVersion", [](std::string* b) { Header(b)->version = 3; },
     KILN_STATUS_BUNDLE_VERSION, "format version 3, this runtime reads 2"},
    {"OtherAbi", [](std::string* b) { Header(b)->runtime_abi = 9; },
     KILN_STATUS_BUNDLE_VERSION, "runtime ABI 9"},
    {"OtherMagic", [](std::string* b) { (*b)[0] = 'x'; },
     KILN_STATUS_BUNDLE_NOT_A_BUNDLE, "magic"},
    {"HugeFile",
     [](std::string* b) { Header(b)->file_bytes = uint64_t{1} << 60; },
     KILN_STATUS_BUNDLE_LIMIT, "limit is"},
    {"HugeSectionCount",
     [](std::string* b) { Header(b)->tables[0].count = 0xffffffff; },
     KILN_STATUS_BUNDLE_LIMIT, "4294967295 sections, limit is 64"},
    {"HugeArgCount",
     [](std::string* b) {
       Header(b)->tables[KILN_FORMAT_TABLE_ARGS].count = 0xffffffff;
     },
     KILN_STATUS_BUNDLE_LIMIT, "arguments, limit is"},
    {"CountBeyondTheFile",
     [](std::string* b) {
       Header(b)->tables[KILN_FORMAT_TABLE_ARGS].count = 1u << 20;
     },
     kMalformed, "arguments table"},
    {"RecordSize",
     [](std::string* b) { Header(b)->tables[3].record_bytes = 16; }, kMalformed,
     "records have 16 bytes"},
    {"OverlappingTables",
     [](std::string* b) {
       Header(b)->tables[KILN_FORMAT_TABLE_PLANS].offset =
           Header(b)->tables[KILN_FORMAT_TABLE_ENTRIES].offset;
     },
     kMalformed, "plans table"},
    {"TableOffsetOverflow",
     [](std::string* b) {
       Header(b)->tables[KILN_FORMAT_TABLE_PLANS].offset = ~uint64_t{0} - 7;
     },
     kMalformed, "plans table"},
    {"HeaderFlags", [](std::string* b) { Header(b)->flags = 1; }, kMalformed,
     "flags"},
    {"SectionsOutOfOrder",
     [](std::string* b) {
       std::swap(*Record<kiln_format_section_t>(b, 0, 0),
                 *Record<kiln_format_section_t>(b, 0, 1));
     },
     kMalformed, "sections record 0"},
    {"TargetOfAnotherLevel",
     KILN_SET(kiln_format_section_t, SECTIONS, 1, record->level = 80),
     kMalformed, "target sm_90a does not match"},
    {"TargetOfAnotherVariant",
     KILN_SET(kiln_format_section_t, SECTIONS, 1, record->arch_specific = 0),
     kMalformed, "target sm_90a does not match"},
    {"UnknownBackend",
     KILN_SET(kiln_format_section_t, SECTIONS, 1, record->backend = 3),
     kMalformed, "unknown backend 3"},
    {"SharedPrograms",
     KILN_SET(kiln_format_section_t, SECTIONS, 1, record->programs.first = 0),
     kMalformed, "ranges"},
    {"SectionWithoutEntries",
     KILN_SET(kiln_format_section_t, SECTIONS, 1, record->entries.count = 0),
     kMalformed, "ranges"},
    {"ProgramOrder",
     KILN_SET(kiln_format_program_t, PROGRAMS, 2, record->build_digest[0] = 0),
     kMalformed, "build digest is out of order"},
    {"BinaryOffset",
     KILN_SET(kiln_format_program_t, PROGRAMS, 1, record->offset -= 64),
     kMalformed, "binary of"},
    {"BinaryBytes",
     KILN_SET(kiln_format_program_t, PROGRAMS, 2, record->bytes = ~uint64_t{0}),
     kMalformed, "binary of"},
    {"KernelRange",
     KILN_SET(kiln_format_program_t, PROGRAMS, 0, record->kernels.count = 500),
     kMalformed, "kernel range"},
    {"KernelName",
     KILN_SET(kiln_format_kernel_t, KERNELS, 0, record->name.offset = 1),
     kMalformed, "kernels record 0"},
    {"KernelNameBeyondTheTable",
     KILN_SET(kiln_format_kernel_t, KERNELS, 0,
              record->name.offset = 0xfffffff0),
     kMalformed, "kernels record 0"},
    {"KernelParamOverlap",
     KILN_SET(kiln_format_kernel_param_t, KERNEL_PARAMS, 5,
              record->offset = 1000),
     kMalformed, "kernels record"},
    {"EntryOrder",
     [](std::string* b) {
       auto* entry =
           Record<kiln_format_entry_t>(b, KILN_FORMAT_TABLE_ENTRIES, 1);
       std::swap(entry[0].name, entry[1].name);
     },
     kMalformed, "name is out of order"},
    {"Gap", KILN_SET(kiln_format_plan_t, PLANS, 4, record->m_min = 3),
     kMalformed, "does not continue at 2"},
    {"Overlap", KILN_SET(kiln_format_plan_t, PLANS, 4, record->m_min = 1),
     kMalformed, "does not continue at 2"},
    {"FirstIntervalAtZero",
     KILN_SET(kiln_format_plan_t, PLANS, 0, record->m_min = 0), kMalformed,
     "does not continue at 1"},
    {"Capacity",
     KILN_SET(kiln_format_entry_t, ENTRIES, 1, record->capacity = 9),
     kMalformed, "capacity is 9"},
    {"Arena", KILN_SET(kiln_format_plan_t, PLANS, 2, ++record->arena_bytes),
     kMalformed, "arena of"},
    {"SmallArena",
     KILN_SET(kiln_format_plan_t, PLANS, 2, record->arena_bytes = 256),
     kMalformed, "outside the arena"},
    {"Row40SliceOverlap",
     KILN_SET(kiln_format_slice_t, SLICES, 3, record->offset = 0), kMalformed,
     "arena slice"},
    {"NegativeEvidence",
     KILN_SET(kiln_format_plan_t, PLANS, 2, record->median_ns = -1), kMalformed,
     "a measure"},
    {"EvidenceIsNoNumber",
     KILN_SET(kiln_format_plan_t, PLANS, 2,
              memset(&record->noise_floor, 0xff, 8)),
     kMalformed, "a measure"},
    {"HiddenPrediction",
     KILN_SET(kiln_format_plan_t, PLANS, 2,
              record->flags = KILN_FORMAT_FLAG_PREDICTED),
     kMalformed, "flags are 0, its plans say 1"},
    {"GoldenOfAPlanThatDoesNotRepeatItself",
     KILN_SET(kiln_format_plan_t, PLANS, 2,
              (record->deterministic = 0, record->golden[7] = 1)),
     kMalformed, "golden digest"},
    {"GoldenWithoutBuffers",
     [](std::string* b) {
       Record<kiln_format_plan_t>(b, KILN_FORMAT_TABLE_PLANS, 2)->golden[0] = 1;
       auto* param =
           Record<kiln_format_param_t>(b, KILN_FORMAT_TABLE_PARAMS, 4);
       param->fill = 0;
       param->element_bytes = 0;
       param->bytes_per_token = param->fill_a = param->fill_b = 0;
     },
     kMalformed, "golden digest"},
    {"ElementOfThreeBytes",
     KILN_SET(kiln_format_param_t, PARAMS, 4, record->element_bytes = 3),
     kMalformed, "parameter 0 is malformed"},
    {"SizeThatIsNoElements",
     KILN_SET(kiln_format_param_t, PARAMS, 4, ++record->bytes_per_token),
     kMalformed, "parameter 0 is malformed"},
    {"HugeBuffer",
     KILN_SET(kiln_format_param_t, PARAMS, 4,
              record->bytes_per_token = uint64_t{1} << 40),
     kMalformed, "parameter 0 is malformed"},
    {"BufferThatOverflows",
     KILN_SET(kiln_format_param_t, PARAMS, 4,
              record->bytes = ~uint64_t{0} - 1),
     kMalformed, "parameter 0 is malformed"},
    {"EmptyBuffer",
     KILN_SET(kiln_format_param_t, PARAMS, 4, record->bytes_per_token = 0),
     kMalformed, "parameter 0 is malformed"},
    {"FillBeyondItsElement",
     KILN_SET(kiln_format_param_t, PARAMS, 4, record->fill_a = 0x18000),
     kMalformed, "parameter 0 is malformed"},
    {"FillWithTwoEncodings",
     KILN_SET(kiln_format_param_t, PARAMS, 4, record->fill_a |= 0x3f00),
     kMalformed, "parameter 0 is malformed"},
    {"IndicesBelowNothing",
     KILN_SET(kiln_format_param_t, PARAMS, 4,
              (record->fill = KILN_FORMAT_FILL_INDICES, record->fill_a = 0,
               record->fill_b = 0)),
     kMalformed, "parameter 0 is malformed"},
    {"UnknownFill",
     KILN_SET(kiln_format_param_t, PARAMS, 4, record->fill = 3), kMalformed,
     "parameter 0 is malformed"},
    {"InputWithoutFill",
     KILN_SET(kiln_format_param_t, PARAMS, 4,
              (record->fill = 0, record->fill_a = record->fill_b = 0)),
     kMalformed, "parameter 0 is malformed"},
    {"OutputWithFill",
     KILN_SET(kiln_format_param_t, PARAMS, 5,
              record->fill = KILN_FORMAT_FILL_WORDS),
     kMalformed, "parameter 1 is malformed"},
    {"ThreadsOnCuda",
     KILN_SET(kiln_format_plan_t, PLANS, 4, record->cpu_threads = 1),
     kMalformed, "cpu_threads"},
    {"NoThreadsOnCpu",
     KILN_SET(kiln_format_plan_t, PLANS, 0, record->cpu_threads = 0),
     kMalformed, "cpu_threads"},
    {"ForeignProgram",
     KILN_SET(kiln_format_step_t, STEPS, 4, record->program = 0), kMalformed,
     "is not in its section"},
    {"ForeignKernel",
     KILN_SET(kiln_format_step_t, STEPS, 4, record->kernel = 0), kMalformed,
     "is not in its section"},
    {"DivideByZero",
     KILN_SET(kiln_format_step_t, STEPS, 4, record->grid[1][1].div = 0),
     kMalformed, "divides by 0"},
    {"HugeGrid",
     [](std::string* b) {
       auto* step = Record<kiln_format_step_t>(b, KILN_FORMAT_TABLE_STEPS, 4);
       step->grid[2][0].add = step->grid[2][1].add = 70000;
     },
     kMalformed, "grid dimension 2 is 70000"},
    {"EmptyBlock", KILN_SET(kiln_format_step_t, STEPS, 4, record->block[1] = 0),
     kMalformed, "block dimension"},
    {"HugeBlock",
     KILN_SET(kiln_format_step_t, STEPS, 4, record->block[1] = 1024),
     kMalformed, "block of"},
    {"ArgOffset", KILN_SET(kiln_format_arg_t, ARGS, 18, ++record->offset),
     kMalformed, "steps record"},
    {"ArgKind", KILN_SET(kiln_format_arg_t, ARGS, 18, record->kind = 6),
     kMalformed, "of kind 6"},
    {"ArgSlot",
     [](std::string* b) {
       auto* arg = Record<kiln_format_arg_t>(b, KILN_FORMAT_TABLE_ARGS, 0);
       EXPECT_EQ(arg->kind, KILN_FORMAT_ARG_PARAM);
       arg->value = 2;
     },
     kMalformed, "has value 2"},
    {"StringWithControlCharacter",
     [](std::string* b) {
       (*b)[Header(b)->tables[KILN_FORMAT_TABLE_STRINGS].offset + 1] = '\x1b';
     },
     kMalformed, "printable ASCII"},
    {"StringsOutOfOrder",
     [](std::string* b) {
       (*b)[Header(b)->tables[KILN_FORMAT_TABLE_STRINGS].offset] = '~';
     },
     kMalformed, "out of order"},
    {"UnendedStrings",
     [](std::string* b) {
       const auto& table = Header(b)->tables[KILN_FORMAT_TABLE_STRINGS];
       (*b)[table.offset + table.count - 1] = 'x';
     },
     kMalformed, "not terminated"},
    {"Padding",
     [](std::string* b) { (*b)[Header(b)->binaries_offset - 1] = 1; },
     kMalformed, "padding"},
};

INSTANTIATE_TEST_SUITE_P(All, CorruptionTest, ::testing::ValuesIn(kCorruptions),
                         [](const auto& test) {
                           return std::string(test.param.name);
                         });

// Every table has a maximum, which is looked at before anything else.
TEST(BundleReaderLimitTest, EveryTableHasOne) {
  constexpr uint64_t kMaxima[KILN_FORMAT_TABLE_COUNT] = {
      KILN_FORMAT_SECTIONS_MAX, KILN_FORMAT_PROGRAMS_MAX,
      KILN_FORMAT_KERNELS_MAX,  KILN_FORMAT_KERNEL_PARAMS_MAX,
      KILN_FORMAT_ENTRIES_MAX,  KILN_FORMAT_ATTRIBUTES_MAX,
      KILN_FORMAT_PLANS_MAX,    KILN_FORMAT_PARAMS_MAX,
      KILN_FORMAT_SLICES_MAX,   KILN_FORMAT_STEPS_MAX,
      KILN_FORMAT_ARGS_MAX,     KILN_FORMAT_STRINGS_BYTES_MAX};
  for (uint32_t table = 0; table < KILN_FORMAT_TABLE_COUNT; ++table) {
    for (const uint64_t count :
         {kMaxima[table] + 1, uint64_t{0x80000000}, uint64_t{0xffffffff}}) {
      std::string bytes = TwoSections();
      Header(&bytes)->tables[table].count = static_cast<uint32_t>(count);
      RepairRoot(&bytes);
      const Opened opened = Open(bytes);
      EXPECT_EQ(opened.status, KILN_STATUS_BUNDLE_LIMIT) << opened.message;
      EXPECT_THAT(opened.message,
                  HasSubstr("limit is " + std::to_string(kMaxima[table])));
    }
  }
}

// More of everything than one owner may have, in several owners.
BundleSection LargeSection() {
  BundleSection section = TinyCudaSection();
  const BundleEntry& moe = section.entries[0];
  BundleEntry many = moe;
  many.plans.clear();
  for (uint32_t m = 1; m <= 600; ++m) {
    many.plans.push_back(moe.plans[0]);
    many.plans.back().interval = {m, m};
  }
  section.entries.clear();
  for (int i = 0; i < 2; ++i) {
    many.name = "many" + std::to_string(i);
    section.entries.push_back(many);
  }
  BundleEntry one = many;
  one.plans.resize(1);
  for (int i = 10; i < 30; ++i) {
    one.name = "one" + std::to_string(i);
    section.entries.push_back(one);
  }
  for (auto& shared : section.programs) {
    auto program = std::make_shared<Program>(*shared);
    for (int i = 100; i < 300; ++i) {
      Kernel kernel = program->kernels[0];
      kernel.entry = "kernel" + std::to_string(i);
      program->kernels.push_back(kernel);
    }
    shared = program;
  }
  return section;
}

TEST(BundleReaderLimitTest, EveryOwnerHasOne) {
  const std::string large = WriteBundle({LargeSection()}).value();
  ASSERT_EQ(Open(large).status, KILN_STATUS_OK) << Open(large).message;
  const Corruption corruptions[] = {
      {"kernels of a program",
       KILN_SET(kiln_format_program_t, PROGRAMS, 0,
                record->kernels.count = KILN_FORMAT_PROGRAM_KERNELS_MAX + 1),
       kMalformed, "programs record 0: bad kernel range"},
      {"parameters of a kernel",
       KILN_SET(kiln_format_kernel_t, KERNELS, 0,
                record->params.count = KILN_FORMAT_KERNEL_PARAMS_EACH_MAX + 1),
       kMalformed, "kernels record 0: bad parameter range or size"},
      {"bytes of a kernel's parameters",
       KILN_SET(kiln_format_kernel_t, KERNELS, 0,
                record->param_bytes = KILN_FORMAT_ARG_BLOCK_BYTES_MAX + 1),
       kMalformed, "kernels record 0: bad parameter range or size"},
      {"attributes of an entry",
       KILN_SET(
           kiln_format_entry_t, ENTRIES, 0,
           record->attributes.count = KILN_FORMAT_ENTRY_ATTRIBUTES_MAX + 1),
       kMalformed, "entries record 0: bad attribute or plan range"},
      {"plans of an entry",
       KILN_SET(kiln_format_entry_t, ENTRIES, 0,
                record->plans.count = KILN_FORMAT_ENTRY_PLANS_MAX + 1),
       kMalformed, "entries record 0: bad attribute or plan range"},
      {"parameters of a plan",
       KILN_SET(kiln_format_plan_t, PLANS, 0,
                record->params.count = KILN_FORMAT_PLAN_PARAMS_MAX + 1),
       kMalformed, "plans record 0: bad parameter, slice or step range"},
      {"slices of a plan",
       KILN_SET(kiln_format_plan_t, PLANS, 0,
                record->slices.count = KILN_FORMAT_PLAN_SLICES_MAX + 1),
       kMalformed, "plans record 0: bad parameter, slice or step range"},
      {"steps of a plan",
       KILN_SET(kiln_format_plan_t, PLANS, 0,
                record->steps.count = KILN_FORMAT_PLAN_STEPS_MAX + 1),
       kMalformed, "plans record 0: bad parameter, slice or step range"},
      {"arguments of a step",
       KILN_SET(kiln_format_step_t, STEPS, 0,
                record->args.count = KILN_FORMAT_STEP_ARGS_MAX + 1),
       kMalformed, "steps record 0: bad argument range"},
      {"tokens",
       KILN_SET(kiln_format_plan_t, PLANS, 599,
                record->m_max = KILN_FORMAT_TOKENS_MAX + 1),
       kMalformed, "interval 600..1073741825"},
      {"arena",
       KILN_SET(kiln_format_plan_t, PLANS, 0,
                record->arena_bytes = KILN_FORMAT_ARENA_BYTES_MAX + 256),
       kMalformed, "is too large"},
      {"grid x",
       KILN_SET(kiln_format_step_t, STEPS, 0,
                (record->grid[0][0].add = record->grid[0][1].add = 1u << 31,
                 record->grid[0][0].div = record->grid[0][1].div = 1)),
       kMalformed, "limit is 2147483647"},
      {"grid y",
       KILN_SET(kiln_format_step_t, STEPS, 0,
                record->grid[1][0].add = record->grid[1][1].add = 65536),
       kMalformed, "limit is 65535"},
      {"block", KILN_SET(kiln_format_step_t, STEPS, 0, record->block[0] = 1025),
       kMalformed, "block dimension of 1025 threads"}};

  for (const Corruption& corruption : corruptions) {
    std::string bytes = large;
    corruption.apply(&bytes);
    RepairRoot(&bytes);
    const Opened opened = Open(bytes);
    EXPECT_EQ(opened.status, corruption.status) << corruption.name;
    EXPECT_THAT(opened.message, HasSubstr(corruption.message))
        << corruption.name;
  }
}

TEST(EvaluateDimTest, TakesTheSmallerTermIn64Bits) {
  const kiln_format_term_t terms[2] = {{0xffffffff, 0xffffffff, 1}, {1, 0, 4}};
  EXPECT_EQ(runtime::EvaluateDim(terms, 0), 0u);
  EXPECT_EQ(runtime::EvaluateDim(terms, 1), 1u);
  EXPECT_EQ(runtime::EvaluateDim(terms, 5), 2u);
  const kiln_format_term_t large[2] = {{0xffffffff, 0xffffffff, 1},
                                       {0xffffffff, 0xffffffff, 1}};
  EXPECT_EQ(runtime::EvaluateDim(large, KILN_FORMAT_TOKENS_MAX),
            uint64_t{0xffffffff} * ((uint64_t{1} << 30) + 1));
}

}  // namespace
}  // namespace kiln
