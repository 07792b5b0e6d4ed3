#include "compiler/spec/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tests/compiler/spec/canonical_difference.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::DifferingPaths;
using ::testing::ElementsAre;

struct Inputs {
  SourceUnit unit;
  Target target;
  Toolchain toolchain;

  ProgramKey Key() const { return MakeProgramKey(unit, target, toolchain); }
};

Inputs Sample() {
  Inputs inputs;
  inputs.unit.name = "fused_moe/cuda.cu";
  inputs.unit.template_version = 3;
  inputs.unit.compute_dtype = "f16";
  inputs.unit.text = "#define KILN_HIDDEN 2048\nextern void f();\n";
  inputs.unit.headers = {{"device/half.h", "half"}, {"device/trellis.h", "t"}};
  inputs.unit.entries = {"fc1", "fc2"};
  inputs.unit.options = {"-O3", "-g"};
  inputs.target = {.backend = Backend::kCuda, .level = 90};
  inputs.toolchain = {
      .name = "nvrtc", .version = "13.0.88", .content = Sha256("library")};
  return inputs;
}

struct Change {
  const char* name;
  std::function<void(Inputs*)> apply;
  std::vector<std::string> paths;  // that differ
};

std::vector<Change> Changes() {
  return {
      {"architecture suffix",
       [](Inputs* i) { i->target.arch_specific = true; },
       {"target"}},
      {"architecture", [](Inputs* i) { i->target.level = 100; }, {"target"}},
      {"dtype",
       [](Inputs* i) { i->unit.compute_dtype = "bf16"; },
       {"compute_dtype"}},
      {"compiler",
       [](Inputs* i) { i->toolchain.name = "clang"; },
       {"compiler/name"}},
      {"compiler version",
       [](Inputs* i) { i->toolchain.version = "13.1"; },
       {"compiler/version"}},
      {"compiler bytes",
       [](Inputs* i) { i->toolchain.content = Sha256("patched"); },
       {"compiler/content"}},
      {"template version",
       [](Inputs* i) { i->unit.template_version = 4; },
       {"template/version"}},
      {"source text",
       [](Inputs* i) { i->unit.text += " "; },
       {"sources/fused_moe/cuda.cu"}},
      {"header text",
       [](Inputs* i) { i->unit.headers[1].second = "u"; },
       {"sources/device/trellis.h"}},
      {"header name",
       [](Inputs* i) { i->unit.headers[1].first = "device/other.h"; },
       {"sources/device/other.h", "sources/device/trellis.h"}},
      {"one header less",
       [](Inputs* i) { i->unit.headers.pop_back(); },
       {"sources/device/trellis.h"}},
      {"entry",
       [](Inputs* i) { i->unit.entries[0] = "fc0"; },
       {"entries/entry"}},
      {"one entry more",
       [](Inputs* i) { i->unit.entries.push_back("fc3"); },
       {"entries/entry"}},
      {"option",
       [](Inputs* i) { i->unit.options[0] = "-O2"; },
       {"options/option"}},
      {"order of options",
       [](Inputs* i) { std::swap(i->unit.options[0], i->unit.options[1]); },
       {"options/option"}},
      {"source name",
       [](Inputs* i) { i->unit.name = "fused_moe/x.cu"; },
       {"sources/fused_moe/cuda.cu", "sources/fused_moe/x.cu",
        "template/source"}},
  };
}

TEST(ProgramKeyTest, EveryFieldMovesTheDigestAndIsNamed) {
  const ProgramKey base = Sample().Key();
  std::set<Digest> seen = {base.digest};
  for (const Change& change : Changes()) {
    Inputs inputs = Sample();
    change.apply(&inputs);
    const ProgramKey key = inputs.Key();
    EXPECT_TRUE(seen.insert(key.digest).second) << change.name;
    EXPECT_EQ(DifferingPaths(base.preimage, key.preimage), change.paths)
        << change.name;
  }
}

TEST(ProgramKeyTest, TheDigestIsThatOfThePreimage) {
  const ProgramKey key = Sample().Key();
  EXPECT_EQ(key.digest, Sha256(key.preimage));
  EXPECT_EQ(key, Sample().Key());
  ASSERT_OK_AND_ASSIGN(const CanonicalRecord record,
                       DecodeCanonical(key.preimage));
  EXPECT_EQ(record.domain, "kiln.build/1");
}

TEST(ProgramTest, FindKernelReturnsTheEntryOrNull) {
  Program program;
  program.kernels.resize(2);
  program.kernels[0].entry = "fc1";
  program.kernels[1].entry = "fc2";
  EXPECT_EQ(program.FindKernel("fc2"), &program.kernels[1]);
  EXPECT_EQ(program.FindKernel("fc"), nullptr);
}

TEST(ProgramKeyTest, OfAPackageNamesThePackage) {
  const Inputs own = Sample();
  Inputs packaged = Sample();
  packaged.unit.package = Sha256("package");
  EXPECT_THAT(DifferingPaths(own.Key().preimage, packaged.Key().preimage),
              ElementsAre("package"));
  EXPECT_EQ(ToolchainOf(packaged.unit, own.toolchain), own.toolchain);
}

TEST(ProgramKeyTest, OfABroughtBinaryDependsOnItAndOnNoCompiler) {
  Inputs one = Sample();
  one.unit.package = Sha256("package");
  one.unit.text.clear();
  one.unit.binary = "ELF";
  Inputs other = one;
  other.toolchain.version = "14.0";
  EXPECT_EQ(one.Key(), other.Key());
  other.unit.binary = "ELG";
  EXPECT_THAT(DifferingPaths(one.Key().preimage, other.Key().preimage),
              ElementsAre("binary"));
  const Toolchain made_by = ToolchainOf(one.unit, one.toolchain);
  EXPECT_EQ(made_by.name, "package");
  EXPECT_EQ(made_by.version, Sha256("package").Short());
  EXPECT_EQ(made_by.content, Sha256("package"));
}

}  // namespace
}  // namespace kiln
