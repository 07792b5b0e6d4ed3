// Every vector file has a test that matches it: a file that nobody reads would
// pass for checked.

#include <filesystem>
#include <string>

#include "gtest/gtest.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

struct Kind {
  const char* prefix;  // of the file's name
  const char* test;    // the source that matches all files of the kind
};

constexpr Kind kKinds[] = {
    {"btx_manifest", "tests/templates/formats/btx_manifest_test.cc"},
    {"codebooks", "tests/templates/vectors_test.cc"},
    {"coupled_signs", "tests/templates/formats/coupled_signs_test.cc"},
    {"e4m3_and_scale_layout", "tests/templates/formats/mxfp8_test.cc"},
    {"hadamard", "tests/templates/vectors_test.cc"},
    {"moe_", "tests/templates/vectors_test.cc"},
    {"mxfp8", "tests/templates/formats/mxfp8_test.cc"},
    {"qsrt_atoms_v1", "tests/templates/formats/qsrt_vectors_test.cc"},
    {"qsrt_geometry", "tests/templates/formats/qsrt_vectors_test.cc"},
    {"tiles", "tests/templates/vectors_test.cc"},
};

const Kind* KindOf(const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (name.starts_with(kind.prefix)) return &kind;
  }
  return nullptr;
}

TEST(VectorKindsTest, EveryFileIsOfAKindThatATestReads) {
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(
           testing::VectorsFolder())) {
    if (!entry.is_regular_file()) continue;
    ++files;
    EXPECT_NE(KindOf(entry.path().filename().string()), nullptr)
        << entry.path() << ": no test reads files of this kind";
  }
  EXPECT_GT(files, 0) << testing::VectorsFolder();
}

TEST(VectorKindsTest, EveryKindsTestReadsFilesOfTheKind) {
  for (const Kind& kind : kKinds) {
    const std::string source = testing::ReadAll(testing::SourcePath(kind.test));
    EXPECT_NE(source.find("\"" + std::string(kind.prefix)), std::string::npos)
        << kind.test << " does not name " << kind.prefix;
  }
}

}  // namespace
}  // namespace kiln
