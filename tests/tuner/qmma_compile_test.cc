// What NVRTC makes of kernels for E4M3 tensor cores: the instruction that they
// are for, and no spills; and that no program over TrellisMX weights has a
// table of their law. No GPU is needed, and none has run these binaries.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "compiler/compile_pool.h"
#include "compiler/elf_file.h"
#include "compiler/ptxas_log.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/toolchain_probe.h"
#include "templates/fused_moe/template_mx_cuda.h"
#include "templates/fused_moe/template_mx_qmma.h"
#include "templates/fused_moe/template_qsrt_cuda.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"
#include "tuner/measure_ceilings.h"

namespace kiln {
namespace {

// Low 12 bits of a machine instruction of 16 bytes. NVIDIA documents none of
// them: they are what ptxas 13.0 makes of one MMA, as the first test shows.
constexpr uint32_t kHmma = 0x23C;        // of binary16
constexpr uint32_t kQmma = 0x27A;        // of E4M3
constexpr uint32_t kScaledQmma = 0x47A;  // of E4M3 with scales

// How often a kernel of a cubin has each instruction.
std::map<uint32_t, uint32_t> InstructionsOf(const std::string& cubin,
                                            const std::string& entry) {
  std::map<uint32_t, uint32_t> counts;
  const absl::StatusOr<ElfFile> file = ElfFile::Parse(cubin);
  EXPECT_OK(file);
  if (!file.ok()) return counts;
  const absl::StatusOr<const ElfSection*> text =
      file->FindSection(absl::StrCat(".text.", entry));
  EXPECT_OK(text);
  if (!text.ok() || *text == nullptr) {
    ADD_FAILURE() << "no kernel " << entry;
    return counts;
  }
  uint64_t word = 0;
  for (uint64_t at = 0; ReadObject((*text)->contents, at, &word); at += 16) {
    ++counts[word & 0xFFF];
  }
  return counts;
}

// Bytes of constants that a cubin has beside its instructions. Banks 0 and 4
// hold arguments and addresses.
uint64_t ConstantBytesOf(const std::string& cubin) {
  uint64_t bytes = 0;
  const absl::StatusOr<ElfFile> file = ElfFile::Parse(cubin);
  EXPECT_OK(file);
  if (!file.ok()) return bytes;
  for (const ElfSection& section : file->sections()) {
    const bool named = absl::StartsWith(section.name, ".nv.constant") &&
                       !absl::StartsWith(section.name, ".nv.constant0") &&
                       !absl::StartsWith(section.name, ".nv.constant4");
    if (named || section.name == ".nv.global.init" ||
        absl::StartsWith(section.name, ".rodata")) {
      bytes += section.header.sh_size;
    }
  }
  return bytes;
}

// More than the scalars, the name of the law and the terms of an exponential
// need, and less than a table of bytes for half of a state would.
constexpr uint64_t kNoTable = 512;

class QmmaCompileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string kiln = std::string(std::getenv("KILN_BIN_DIR")) + "/kiln";
    if (access(kiln.c_str(), X_OK) != 0) {
      GTEST_SKIP() << kiln << " is not built";
    }
    NvrtcProbeOptions options;
    options.worker = kiln;
    const absl::StatusOr<CompilerSetup> setup = ProbeNvrtc(options);
    if (!setup.ok()) GTEST_SKIP() << setup.status();
    setup_ = *setup;
  }

  std::vector<CompileResult> Compile(const std::vector<CompileJob>& jobs) {
    CompilePool pool({.jobs = 2}, {setup_});
    absl::StatusOr<std::vector<CompileResult>> results = pool.Run(jobs);
    EXPECT_OK(results);
    return results.ok() ? *std::move(results) : std::vector<CompileResult>();
  }

 private:
  CompilerSetup setup_;
};

Target TargetNamed(const std::string& name) {
  absl::StatusOr<Target> target = ParseTarget(name);
  EXPECT_OK(target);
  return *target;
}

TEST_F(QmmaCompileTest, TheMmaIsOneInstructionWhereTheTemplateIsOffered) {
  const auto job = [](const std::string& mma, const char* target) {
    CompileJob made;
    made.unit.name = "test/mma.cu";
    made.unit.text = absl::StrCat(R"(
#include "cuda/e4m3.h"
extern "C" __global__ void k(const kd::u32* in, float* out) {
  kd::u32 v[8];
  for (int i = 0; i < 8; ++i) v[i] = in[32 * i + threadIdx.x];
  const kd::u32 a[4] = {v[0], v[1], v[2], v[3]};
  float d[4];
  kd::MmaE4m3FromZero(d, a, v[4], v[5]);
  )",
                                  mma, R"(
  for (int i = 0; i < 4; ++i) out[32 * i + threadIdx.x] = d[i];
}
)");
    made.unit.headers = CudaHeaders({"cuda/e4m3.h"});
    made.unit.entries = {"k"};
    made.target = TargetNamed(target);
    return made;
  };
  const std::string scaled =
      "kd::MmaE4m3Scaled<0>(d, a, v[4], v[5], v[6], v[7]);"
      "kd::MmaE4m3Scaled<3>(d, a, v[4], v[5], v[6], v[7]);";
  const std::vector<CompileJob> jobs = {
      job("", "sm_89"),       job("", "sm_120"),      job("", "sm_90a"),
      job(scaled, "sm_120a"), job(scaled, "sm_121a"), job(scaled, "sm_120")};

  const struct {
    uint32_t qmma, scaled, hmma;
  } want[] = {{1, 0, 0}, {1, 0, 0}, {0, 0, 2}, {1, 2, 0}, {1, 2, 0}};

  const std::vector<CompileResult> results = Compile(jobs);
  ASSERT_EQ(results.size(), jobs.size());
  for (size_t i = 0; i < std::size(want); ++i) {
    SCOPED_TRACE(jobs[i].target.ToString());
    ASSERT_OK(results[i].status);
    std::map<uint32_t, uint32_t> counts =
        InstructionsOf(results[i].binary, "k");
    EXPECT_EQ(counts[kQmma], want[i].qmma);
    EXPECT_EQ(counts[kScaledQmma], want[i].scaled);
    EXPECT_EQ(counts[kHmma], want[i].hmma);
  }
  // Without the "a" there are no scales.
  EXPECT_FALSE(results.back().status.ok());
}

// A candidate whose second unit is the products.
struct Compiled {
  std::string name;
  Candidate candidate;
  uint32_t mmas = 0;  // that either product has
};

// For 64 input channels, 16 output channels and 8 tokens there are two, whose
// loops are unrolled.
uint32_t MmasOf(const Assignment& point) {
  return static_cast<uint32_t>(
      2 * (point.at("channels_tile") / 16 / point.at("warps")) *
      (point.at("tokens_tile") / 8));
}

RequestGeometry SmallGeometry(WeightFormat format) {
  RequestGeometry geometry;
  geometry.hidden = 1024;
  geometry.intermediate = 512;
  geometry.experts = 16;
  geometry.top_k = 4;
  geometry.weights.format = format;
  geometry.recipe = Recipe::kW4A8;
  return geometry;
}

// Of all points that are legal those with the fewest and the most registers.
std::vector<Compiled> MxCandidates(const Target& target) {
  const struct {
    int bits;
    int64_t tokens, channels, warps;
  } points[] = {{2, 8, 64, 4},
                {4, 8, 256, 4},
                {5, 16, 128, 4},
                {3, 32, 256, 4},
                {5, 96, 256, 8}};

  std::vector<Compiled> all;
  for (const auto& [bits, tokens, channels, warps] : points) {
    Problem problem;
    problem.geometry = SmallGeometry(WeightFormat::kTrellisMx);
    problem.geometry.weights.bits = {.gate = bits, .up = bits, .down = bits};
    problem.geometry.mx = {.limit = "10", .smallm_max_tokens = 0};
    problem.interval = {1, 64};
    problem.device = AssumedProfile(target);
    const Assignment point = {
        {"tokens_tile", tokens}, {"channels_tile", channels},
        {"k_tile", 128},         {"warps", warps},
        {"stages", 2},           {"split_fc1", 1},
        {"split_fc2", 1}};
    absl::StatusOr<Candidate> candidate =
        FusedMoeMxQmmaTemplate()->Instantiate(problem, point);
    EXPECT_OK(candidate.status());
    if (!candidate.ok()) continue;
    all.push_back({absl::StrCat("bits ", bits, " ", AssignmentText(point)),
                   *std::move(candidate), MmasOf(point)});
  }
  return all;
}

// The same; a kernel has its loops once for each of the three rates.
std::vector<Compiled> QsrtCandidates(const Target& target) {
  const struct {
    int64_t tokens, channels, warps;
  } points[] = {{8, 64, 4}, {16, 128, 8}, {96, 128, 4}};

  std::vector<Compiled> all;
  for (const auto& [tokens, channels, warps] : points) {
    Problem problem;
    problem.geometry = SmallGeometry(WeightFormat::kQsrt);
    problem.geometry.intermediate = 256;
    problem.geometry.qsrt = {.pairs = PairKinds::kP24P33,
                             .decode_max_tokens = 64};
    problem.interval = {1, 64};
    problem.device = AssumedProfile(target);
    const Assignment point = {
        {"activation_bits", 8},  {"operand_codes", 1},
        {"tokens_tile", tokens}, {"channels_tile", channels},
        {"k_tile", 128},         {"warps", warps},
        {"stages", 2},           {"codewords", 0},
        {"split_fc1", 1},        {"split_fc2", 1}};
    absl::StatusOr<Candidate> candidate =
        FusedMoeQsrtCudaTemplate()->Instantiate(problem, point);
    EXPECT_OK(candidate.status());
    if (!candidate.ok()) continue;
    all.push_back(
        {AssignmentText(point), *std::move(candidate), 3 * MmasOf(point)});
  }
  return all;
}

// Both arms at every rate, of the template for all GPUs.
// Programs that no plan has, so that nothing else compiles them.
TEST_F(QmmaCompileTest, LoopsOfTheCeilingsCompile) {
  std::vector<CompileJob> jobs;
  for (SourceUnit& unit : CeilingUnits({})) {
    jobs.push_back({.unit = std::move(unit), .target = TargetNamed("sm_90a")});
  }
  // Reading, MMAs, and twice three codebooks of 2 to 5 bits.
  ASSERT_EQ(jobs.size(), 2u + 2 * 3 * 4);
  const std::vector<CompileResult> results = Compile(jobs);
  ASSERT_EQ(results.size(), jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    EXPECT_OK(results[i].status) << jobs[i].unit.text.substr(0, 80);
  }
}

TEST_F(QmmaCompileTest, ProgramsOverTrellisMxHaveNoTable) {
  const Target target = TargetNamed("sm_90a");
  std::vector<CompileJob> jobs;
  for (int bits = 2; bits <= 5; ++bits) {
    Problem problem;
    problem.geometry = SmallGeometry(WeightFormat::kTrellisMx);
    problem.geometry.weights.bits = {.gate = bits, .up = bits, .down = bits};
    problem.geometry.mx = {.limit = "10",
                           .smallm_max_tokens = bits % 2 == 0 ? 8u : 0u};
    problem.interval = {1, 8};
    problem.device = AssumedProfile(target);
    const ParamSpace space = FusedMoeMxCudaTemplate()->Enumerate(problem, 1);
    ASSERT_EQ(space.points.size(), 1u);
    const std::vector<SourceUnit> units = FusedMoeMxCudaTemplate()->MakeUnits(
        problem.geometry, target, space.points.front());
    jobs.push_back({units.back(), target});
  }
  const std::vector<CompileResult> results = Compile(jobs);
  ASSERT_EQ(results.size(), jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    ASSERT_OK(results[i].status);
    EXPECT_LE(ConstantBytesOf(results[i].binary), kNoTable) << "K" << i + 2;
  }
}

class QmmaProductsTest : public QmmaCompileTest,
                         public ::testing::WithParamInterface<const char*> {
 protected:
  void ExpectThatInstruction(const std::vector<Compiled>& all,
                             WeightFormat weights) {
    const Target target = TargetNamed(GetParam());
    // The products of each, and the steps around them once: all share those.
    std::vector<CompileJob> jobs;
    for (const Compiled& one : all) {
      ASSERT_EQ(one.candidate.units.size(), 2u);
      jobs.push_back({one.candidate.units[1], target});
    }
    jobs.push_back({all.at(0).candidate.units[0], target});
    const std::vector<CompileResult> results = Compile(jobs);
    ASSERT_EQ(results.size(), jobs.size());
    const uint32_t used = target.arch_specific ? kScaledQmma : kQmma;
    const uint32_t other = target.arch_specific ? kQmma : kScaledQmma;
    for (size_t i = 0; i < jobs.size(); ++i) {
      SCOPED_TRACE(i < all.size() ? all[i].name : "around the products");
      ASSERT_OK(results[i].status);
      for (const PtxasReport& report : ParsePtxasLog(results[i].log)) {
        EXPECT_EQ(report.spill_store_bytes, 0u) << report.entry;
        EXPECT_EQ(report.spill_load_bytes, 0u) << report.entry;
        EXPECT_EQ(report.stack_bytes, 0u) << report.entry;
      }
      // QSRT's codebook is a table of 4096 binary16 numbers.
      if (weights == WeightFormat::kTrellisMx) {
        EXPECT_LE(ConstantBytesOf(results[i].binary), kNoTable);
      } else if (i != all.size()) {
        EXPECT_GE(ConstantBytesOf(results[i].binary), 8192u);
      }
      if (i == all.size()) continue;
      for (const std::string& entry : jobs[i].unit.entries) {
        std::map<uint32_t, uint32_t> counts =
            InstructionsOf(results[i].binary, entry);
        EXPECT_EQ(counts[used], all[i].mmas) << entry;
        EXPECT_EQ(counts[other], 0u) << entry;
        EXPECT_EQ(counts[kHmma], 0u) << entry;
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Targets, QmmaProductsTest,
                         ::testing::Values("sm_89", "sm_120", "sm_120a"),
                         [](const auto& v) { return std::string(v.param); });

TEST_P(QmmaProductsTest, OfTrellisMxAreMadeOfThatInstructionAndSpillNothing) {
  ExpectThatInstruction(MxCandidates(TargetNamed(GetParam())),
                        WeightFormat::kTrellisMx);
}

TEST_P(QmmaProductsTest, OfQsrtAreMadeOfThatInstructionAndSpillNothing) {
  ExpectThatInstruction(QsrtCandidates(TargetNamed(GetParam())),
                        WeightFormat::kQsrt);
}

}  // namespace
}  // namespace kiln
