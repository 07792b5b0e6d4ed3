#include "compiler/bundle_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>

#include "compiler/bundle_attributes.h"
#include "runtime/bundle_format.h"
#include "runtime/kiln.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::ExampleSection;
using ::kiln::testing::ExpectGolden;
using ::kiln::testing::ReadTestFile;
using ::kiln::testing::SourcePath;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::kiln::testing::TinyGeometry;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(BundleWriterTest, BytesDoNotDependOnTheOrderOfTheInput) {
  ASSERT_OK_AND_ASSIGN(
      const std::string expected,
      WriteBundle({TinyCudaSection(), TinyCpuSection("object")}));
  BundleSection cuda = TinyCudaSection();
  std::reverse(cuda.entries.begin(), cuda.entries.end());
  std::reverse(cuda.programs.begin(), cuda.programs.end());
  for (BundleEntry& entry : cuda.entries) {
    std::reverse(entry.plans.begin(), entry.plans.end());
  }
  // The same programs once more, as several plans would bring them.
  const auto programs = cuda.programs;
  cuda.programs.insert(cuda.programs.end(), programs.begin(), programs.end());
  EXPECT_THAT(WriteBundle({TinyCpuSection("object"), cuda}),
              ::kiln::testing::IsOkAndHolds(expected));
}

TEST(BundleWriterTest, BytesAreTheGoldenBytes) {
  ASSERT_OK_AND_ASSIGN(
      const std::string bytes,
      WriteBundle({TinyCudaSection(), TinyCpuSection("object")}));
  const char* update = std::getenv("KILN_UPDATE_GOLDENS");
  if (update != nullptr) ExpectGolden(bytes, "bundle.v2.bin");
  // Not through ExpectGolden alone: its message would print every byte.
  const std::string golden =
      ReadTestFile(SourcePath("tests/golden/bundle.v2.bin"));
  const size_t common = std::min(bytes.size(), golden.size());
  const auto difference = std::mismatch(
      bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(common),
      golden.begin());
  EXPECT_TRUE(bytes == golden)
      << "the format changed: " << bytes.size() << " bytes, golden has "
      << golden.size() << ", first difference at byte "
      << difference.first - bytes.begin()
      << "; a new layout needs a new KILN_FORMAT_VERSION";
}

// What earlier releases froze is refused by name, not misread.
TEST(BundleWriterTest, FilesOfEarlierVersionsAreRefused) {
  const std::string old =
      ReadTestFile(SourcePath("tests/golden/bundle.v1.bin"));
  kiln_bundle_t* bundle = nullptr;
  kiln_error_t error = {};
  EXPECT_EQ(
      kiln_bundle_open_memory(old.data(), old.size(), nullptr, &bundle, &error),
      KILN_STATUS_BUNDLE_VERSION);
  EXPECT_THAT(error.message,
              HasSubstr("format version 1, this runtime reads 2"));
}

// Lines of the form "0010  01 02 ..." of a document, joined.
std::string HexDumpOf(const std::string& document) {
  std::string bytes;
  std::istringstream lines(document);
  for (std::string line; std::getline(lines, line);) {
    if (line.size() < 8 || line.find_first_not_of("0123456789abcdef") != 4 ||
        line[4] != ' ') {
      continue;
    }
    EXPECT_EQ(std::stoul(line.substr(0, 4), nullptr, 16), bytes.size()) << line;
    std::istringstream words(line.substr(4, 2 + 16 * 3));
    for (std::string word; words >> word && word.size() == 2;) {
      bytes.push_back(static_cast<char>(std::stoul(word, nullptr, 16)));
    }
  }
  return bytes;
}

TEST(BundleWriterTest, TheDocumentShowsTheBytesOfItsExample) {
  ASSERT_OK_AND_ASSIGN(const std::string bytes,
                       WriteBundle({ExampleSection()}));
  const std::string shown =
      HexDumpOf(ReadTestFile(SourcePath("runtime/bundle_format.md")));
  EXPECT_EQ(ToHex(shown), ToHex(bytes))
      << "runtime/bundle_format.md must be brought up to date";
}

TEST(BundleWriterTest, ProvenanceIsNotInTheBytes) {
  ASSERT_OK_AND_ASSIGN(const std::string expected,
                       WriteBundle({TinyCudaSection()}));
  BundleSection section = TinyCudaSection();
  auto program = std::make_shared<Program>(*section.programs[0]);
  program->log = "compiled on Tuesday";
  program->compile_seconds = 17;
  section.programs[0] = program;
  EXPECT_THAT(WriteBundle({section}), ::kiln::testing::IsOkAndHolds(expected));
}

TEST(BundleWriterTest, LeavesOutProgramsThatNoPlanNames) {
  ASSERT_OK_AND_ASSIGN(const std::string expected,
                       WriteBundle({TinyCudaSection()}));
  BundleSection section = TinyCudaSection();
  auto program = std::make_shared<Program>(*section.programs[0]);
  program->key.digest = Sha256("unused");
  section.programs.push_back(program);
  EXPECT_THAT(WriteBundle({section}), ::kiln::testing::IsOkAndHolds(expected));
}

TEST(BundleWriterTest, BinariesAreAlignedAndTheRootIsInTheHeader) {
  ASSERT_OK_AND_ASSIGN(const std::string bytes,
                       WriteBundle({TinyCudaSection()}));
  kiln_format_header_t header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  EXPECT_EQ(header.file_bytes, bytes.size());
  EXPECT_EQ(header.binaries_offset % 64, 0u);
  EXPECT_EQ(header.runtime_abi, uint32_t{KILN_RUNTIME_ABI_MAJOR});
  uint8_t root[32];
  kiln_bundle_root(bytes.data(), bytes.size(), root);
  EXPECT_EQ(std::memcmp(root, header.root, 32), 0);
  ASSERT_OK_AND_ASSIGN(const Digest read, BundleRoot(bytes));
  EXPECT_EQ(std::memcmp(root, read.bytes.data(), 32), 0);
  EXPECT_THAT(BundleRoot("KILN"), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(BundleWriterTest, MarksPredictedAndUnqualifiedPlans) {
  BundleSection section = TinyCudaSection();
  section.entries[0].plans[1].evidence = Evidence{};
  EXPECT_THAT(WriteBundle({section}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("target sm_90a: entry moe: plan for m "
                                       "2..4: plan is predicted"),
                             HasSubstr("--allow-predicted"))));
  section.unqualified_templates = {"fused_moe.cuda"};
  EXPECT_THAT(
      WriteBundle({section},
                  {.allow_predicted = true, .allow_unqualified = false}),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("template fused_moe.cuda has no qualification")));
  ASSERT_OK_AND_ASSIGN(const std::string bytes,
                       WriteBundle({section}, {.allow_predicted = true}));
  kiln_format_header_t header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  EXPECT_EQ(header.flags, uint32_t{KILN_FORMAT_FLAG_PREDICTED |
                                   KILN_FORMAT_FLAG_UNQUALIFIED});
}

Plan& PlanOf(BundleSection* section, size_t plan) {
  return section->entries[0].plans[plan];
}

// A copy of program `index` that may be changed.
Program* Edit(BundleSection* section, size_t index) {
  auto program = std::make_shared<Program>(*section->programs[index]);
  Program* edited = program.get();
  section->programs[index] = program;
  return edited;
}

struct Refusal {
  const char* name;
  std::function<void(BundleSection*)> apply;
  absl::StatusCode code;
  const char* message;
};

class BundleRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(BundleRefusalTest, NamesWhatIsWrong) {
  BundleSection section = TinyCudaSection();
  GetParam().apply(&section);
  EXPECT_THAT(WriteBundle({section}),
              StatusIs(GetParam().code, HasSubstr(GetParam().message)));
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

const Refusal kRefusals[] = {
    {"NoEntries", [](BundleSection* s) { s->entries.clear(); }, kInvalid,
     "target sm_90a: no entries"},
    {"NoPlans", [](BundleSection* s) { s->entries[0].plans.clear(); }, kInvalid,
     "entry moe: no plans"},
    {"RepeatedName", [](BundleSection* s) { s->entries[0].name = "dense"; },
     kInvalid, "entry dense appears twice"},
    {"NoName", [](BundleSection* s) { s->entries[0].name = ""; }, kInvalid,
     "an entry has no name"},
    {"UnprintableName", [](BundleSection* s) { s->entries[0].name = "m\xc3"; },
     kInvalid, "entry name has a character that is not printable ASCII"},
    {"LongName",
     [](BundleSection* s) { s->entries[0].name = std::string(5000, 'x'); },
     absl::StatusCode::kResourceExhausted, "5000 bytes, limit is 4095"},
    {"Gap", [](BundleSection* s) { PlanOf(s, 1).interval.m_min = 3; }, kInvalid,
     "entry moe: interval 3..4 leaves a gap, expected it to begin at 2"},
    {"Overlap", [](BundleSection* s) { PlanOf(s, 1).interval.m_max = 7; },
     kInvalid, "interval 5..64 overlaps, expected it to begin at 8"},
    {"FirstIsNotOne",
     [](BundleSection* s) {
       s->entries[0].plans.erase(s->entries[0].plans.begin());
     },
     kInvalid, "interval 2..4 leaves a gap, expected it to begin at 1"},
    {"EmptyInterval",
     [](BundleSection* s) {
       PlanOf(s, 1).interval = {4, 2};
     },
     absl::StatusCode::kInternal, "interval 4..2 is empty"},
    {"BuffersOfAnotherCount",
     [](BundleSection* s) { s->entries[0].buffers.pop_back(); }, kInvalid,
     "1 buffers, the plan for m 1..1 has 2 parameters"},
    {"BufferOfOddElements",
     [](BundleSection* s) { s->entries[0].buffers[0].element_bytes = 3; },
     kInvalid, "buffer of parameter x: elements have 3 bytes"},
    {"BufferOfHalfAnElement",
     [](BundleSection* s) { ++s->entries[0].buffers[0].bytes_per_token; },
     kInvalid, "513 per token are not elements of 2 bytes"},
    {"HugeBuffer",
     [](BundleSection* s) {
       s->entries[0].buffers[0].bytes = uint64_t{1} << 41;
     },
     absl::StatusCode::kResourceExhausted, "exceed 1099511627776"},
    {"OutputWithAFill",
     [](BundleSection* s) {
       s->entries[0].buffers[1].kind = BufferFill::Kind::kWords;
     },
     kInvalid, "an output has a fill"},
    {"FillBeyondItsElement",
     [](BundleSection* s) { s->entries[0].buffers[0].a = 0x10000; }, kInvalid,
     "is not of its kind"},
    {"GoldenOfNoPlan",
     [](BundleSection* s) {
       s->entries[0].golden[{1, 9}] = Sha256("x");
     },
     kInvalid, "golden digest for m 1..9 is not of a measured"},
    {"GoldenOfAPlanThatMayDiffer",
     [](BundleSection* s) {
       PlanOf(s, 0).body.deterministic = false;
       s->entries[0].golden[{1, 1}] = Sha256("x");
     },
     kInvalid, "golden digest for m 1..1 is not of a measured"},
    {"GoldenWithoutBuffers",
     [](BundleSection* s) {
       s->entries[0].buffers.clear();
       s->entries[0].golden[{1, 1}] = Sha256("x");
     },
     kInvalid, "golden digest for m 1..1 is not of a measured"},
    {"PlanOfAnotherTarget",
     [](BundleSection* s) { PlanOf(s, 1).target.level = 80; }, kInvalid,
     "plan for m 2..4 is for target sm_80a"},
    {"PlanOfAnotherGeometry",
     [](BundleSection* s) { PlanOf(s, 1).geometry.experts = 8; }, kInvalid,
     "is for geometry fused_moe H256 I128 E8"},
    {"MissingProgram", [](BundleSection* s) { s->programs.pop_back(); },
     absl::StatusCode::kNotFound, "step fc2: program "},
    {"ProgramOfAnotherTarget",
     [](BundleSection* s) { Edit(s, 1)->target.arch_specific = false; },
     kInvalid, "is for target sm_90"},
    {"MissingKernel",
     [](BundleSection* s) { PlanOf(s, 0).body.steps[1].entry = "fc3"; },
     absl::StatusCode::kNotFound, "has no kernel fc3"},
    {"MoreArguments",
     [](BundleSection* s) {
       PlanOf(s, 0).body.steps[1].args.push_back(Arg::U32(1));
     },
     kInvalid,
     "step fc2: passes 5 arguments, kernel fc2 declares 4 parameters"},
    {"ArgumentOfAnotherSize",
     [](BundleSection* s) {
       PlanOf(s, 0).body.steps[1].args[1] = Arg::Param(0);
     },
     kInvalid,
     "argument 1 has 8 bytes at offset 8, kernel fc2 declares 4 bytes at 8"},
    {"LongerBlock",
     [](BundleSection* s) { Edit(s, 1)->kernels[0].param_bytes = 48; },
     kInvalid, "arguments take 32 bytes, kernel fc2 declares 48"},
    {"NoArgumentSlot",
     [](BundleSection* s) {
       PlanOf(s, 0).body.steps[1].args[2] = Arg::Param(2);
     },
     absl::StatusCode::kInternal, "argument out of range: 2"},
    {"HugeGrid",
     [](BundleSection* s) {
       PlanOf(s, 2).body.steps[0].grid[1] =
           LaunchDim::Of({.mul = 2000, .add = 0, .div = 1});
     },
     absl::StatusCode::kResourceExhausted,
     "grid dimension 1 at m 64: 128000 exceeds the limit of 65535"},
    {"HugeBlock",
     [](BundleSection* s) { PlanOf(s, 0).body.steps[0].block[1] = 4; },
     absl::StatusCode::kResourceExhausted,
     "block threads: 512 exceeds the limit of 256"},
    {"HugeCapacity",
     [](BundleSection* s) { PlanOf(s, 2).interval.m_max = 1u << 31; },
     absl::StatusCode::kResourceExhausted, "interval end"},
    {"ThreadsOnCuda",
     [](BundleSection* s) { PlanOf(s, 0).body.cpu_threads = 2; }, kInvalid,
     "cpu_threads is 2 on a CUDA target"},
    {"EvidenceIsNoNumber",
     [](BundleSection* s) { PlanOf(s, 0).evidence.median_ns = NAN; }, kInvalid,
     "median_ns is nan"},
    {"WrongBinaryDigest", [](BundleSection* s) { Edit(s, 0)->binary += 'x'; },
     absl::StatusCode::kDataLoss, "its binary hashes to"},
    {"TwoBinariesUnderOneKey",
     [](BundleSection* s) {
       s->programs.push_back(s->programs[0]);
       Program* other = Edit(s, 2);
       other->binary += "more";
       other->binary_digest = Sha256(other->binary);
     },
     absl::StatusCode::kDataLoss, "has two different binaries: "},
    {"UnsortedKernels",
     [](BundleSection* s) {
       Program* program = Edit(s, 0);
       program->kernels.push_back(program->kernels[0]);
     },
     kInvalid, "names must be set, distinct and sorted"},
    {"OverlappingParameters",
     [](BundleSection* s) {
       Program* program = Edit(s, 0);
       Kernel extra = program->kernels[0];
       extra.entry = "zzz";
       extra.params[1].offset = 4;
       program->kernels.push_back(extra);
     },
     kInvalid, "kernel zzz: parameters are empty or overlap"},
};

INSTANTIATE_TEST_SUITE_P(All, BundleRefusalTest, ::testing::ValuesIn(kRefusals),
                         [](const auto& test) {
                           return std::string(test.param.name);
                         });

TEST(BundleWriterTest, TwoBinariesUnderOneKeyAreBothNamed) {
  BundleSection section = TinyCudaSection();
  section.programs.push_back(section.programs[0]);
  Program* other = Edit(&section, 2);
  other->binary += "more";
  other->binary_digest = Sha256(other->binary);
  EXPECT_THAT(
      WriteBundle({section}),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr(section.programs[0]->key.digest.ToHex()),
                     HasSubstr(section.programs[0]->binary_digest.ToHex()),
                     HasSubstr(other->binary_digest.ToHex()))));
}

TEST(BundleWriterTest, RefusesNothingAndTheSameTargetTwice) {
  EXPECT_THAT(WriteBundle({}), StatusIs(kInvalid, "bundle has no sections"));
  EXPECT_THAT(WriteBundle({TinyCudaSection(), TinyCudaSection()}),
              StatusIs(kInvalid, "target sm_90a appears twice"));
}

TEST(BundleWriterTest, ACpuKernelDeclaresOneBlock) {
  BundleSection section = TinyCpuSection("object");
  Program* program = Edit(&section, 0);
  ASSERT_EQ(program->kernels[3].entry, "sum");
  program->kernels[3].params = {{0, 8}, {8, 16}};
  EXPECT_THAT(WriteBundle({section}),
              StatusIs(kInvalid, HasSubstr("a CPU kernel declares one")));
}

TEST(BundleWriterTest, ACpuPlanSaysHowManyThreadsItUses) {
  BundleSection section = TinyCpuSection("object");
  section.entries[0].plans[0].body.cpu_threads = 0;
  EXPECT_THAT(WriteBundle({section}),
              StatusIs(kInvalid, HasSubstr("cpu_threads is 0")));
}

TEST(BundleAttributesTest, GeometryComesBackFromItsFields) {
  RequestGeometry geometry = TinyGeometry();
  EXPECT_THAT(GeometryFromAttributes(GeometryAttributes(geometry)),
              ::kiln::testing::IsOkAndHolds(geometry));
  geometry.weights.codebook = Codebook::kMul1;
  geometry.weights.shared_scales = true;
  geometry.io_dtype = DType::kF16;
  geometry.id_dtype = DType::kI64;
  geometry.deterministic = false;
  geometry.weights.bits = {.gate = 1, .up = 2, .down = 8};
  EXPECT_THAT(GeometryFromAttributes(GeometryAttributes(geometry)),
              ::kiln::testing::IsOkAndHolds(geometry));
}

RequestGeometry MxGeometry(const TrellisMx& mx) {
  RequestGeometry geometry = TinyGeometry();
  geometry.weights.format = WeightFormat::kTrellisMx;
  geometry.weights.codebook = RequestGeometry().weights.codebook;
  geometry.weights.bits = {.gate = 5, .up = 5, .down = 5};
  geometry.recipe = Recipe::kW4A8;
  geometry.mx = mx;
  return geometry;
}

TEST(BundleAttributesTest, GeometryOfTrellisMxComesBackFromItsFields) {
  for (const TrellisMx& mx :
       {TrellisMx{.limit = "inf", .smallm_max_tokens = 16},
        TrellisMx{.limit = "10", .direct_max_tokens = 8},
        TrellisMx{.limit = "10",
        .direct_max_tokens = 16,
        .remainder = Remainder::kRp2},
        TrellisMx{.limit = "10", .boundary = MxBoundary::kIdentity}}) {
    const RequestGeometry geometry = MxGeometry(mx);
    EXPECT_THAT(GeometryFromAttributes(GeometryAttributes(geometry)),
                ::kiln::testing::IsOkAndHolds(geometry));
  }
}

TEST(BundleAttributesTest, ABoundaryIsWrittenWhereItIsNotCoupledAlone) {
  std::vector<CanonicalField> fields = GeometryAttributes(
      MxGeometry({.limit = "10", .boundary = MxBoundary::kIdentity}));
  const auto found =
      std::find_if(fields.begin(), fields.end(),
                   [](const auto& field) { return field.path == "boundary"; });
  ASSERT_NE(found, fields.end());
  for (const char* other : {"coupled", "none"}) {
    found->value = other;
    EXPECT_THAT(GeometryFromAttributes(fields),
                StatusIs(kInvalid, HasSubstr("boundary")));
  }
}

TEST(BundleAttributesTest, GeometryOfQsrtComesBackFromItsFields) {
  RequestGeometry geometry = TinyGeometry();
  geometry.weights = Weights();
  geometry.weights.format = WeightFormat::kQsrt;
  geometry.weights.shared_scales = true;
  geometry.activation = Activation::kPerExpert;
  geometry.recipe = Recipe::kW4A8;
  geometry.qsrt = {.pairs = PairKinds::kP33P43, .decode_max_tokens = 16};
  EXPECT_THAT(GeometryFromAttributes(GeometryAttributes(geometry)),
              ::kiln::testing::IsOkAndHolds(geometry));
}

// No kernel of exl3 has another activation than SiLU.
TEST(BundleAttributesTest, AnActivationOfAnotherFormatIsRefused) {
  RequestGeometry geometry = TinyGeometry();
  geometry.activation = Activation::kSitu;
  EXPECT_THAT(GeometryFromAttributes(GeometryAttributes(geometry)),
              ::kiln::testing::StatusIs(
                  absl::StatusCode::kInvalidArgument,
                  ::testing::HasSubstr("geometry field activation is 'situ'")));
}

RequestGeometry LinearGeometry() {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.linear = {
      .in_features = 128, .out_features = 256, .bits = 4, .bias = true};
  geometry.io_dtype = DType::kF16;
  geometry.weights.codebook = Codebook::k3Inst;
  return geometry;
}

TEST(BundleAttributesTest, TheGeometryOfLinearComesBackToo) {
  EXPECT_THAT(GeometryFromAttributes(GeometryAttributes(LinearGeometry())),
              ::kiln::testing::IsOkAndHolds(LinearGeometry()));
}

void ExpectEveryFieldIsNeeded(const RequestGeometry& geometry) {
  const std::vector<CanonicalField> good = GeometryAttributes(geometry);
  for (size_t i = 0; i < good.size(); ++i) {
    std::vector<CanonicalField> fields = good;
    fields.erase(fields.begin() + static_cast<ptrdiff_t>(i));
    EXPECT_THAT(GeometryFromAttributes(fields), StatusIs(kInvalid))
        << good[i].path;
    fields = good;
    fields[i].value = "strange";
    EXPECT_THAT(GeometryFromAttributes(fields),
                StatusIs(kInvalid, HasSubstr(good[i].path)));
    fields = good;
    fields.push_back(good[i]);
    EXPECT_THAT(GeometryFromAttributes(fields), StatusIs(kInvalid));
  }
}

TEST(BundleAttributesTest, RefusesFieldsThatWereNotWritten) {
  ExpectEveryFieldIsNeeded(TinyGeometry());
  ExpectEveryFieldIsNeeded(LinearGeometry());
  ExpectEveryFieldIsNeeded(MxGeometry(
      {.limit = "10", .direct_max_tokens = 16, .remainder = Remainder::kRp2}));
}

}  // namespace
}  // namespace kiln
