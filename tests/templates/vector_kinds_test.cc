// Every vector file has a test that matches it: a file that nobody reads would
// pass for checked.

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <string>

#include "gtest/gtest.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

struct Kind {
  const char* name;  // of the file; what precedes "*.json" where it has a star
  const char* test;  // the source that matches all files of the kind
};

// A star where the test reads every file of such a name.
constexpr Kind kKinds[] = {
    {"btx_manifest*.json", "tests/templates/formats/btx_manifest_test.cc"},
    {"codebooks.json", "tests/templates/vectors_test.cc"},
    {"coupled_signs*.json", "tests/templates/formats/coupled_signs_test.cc"},
    {"e4m3_and_scale_layout.json", "tests/templates/formats/mxfp8_test.cc"},
    {"hadamard.json", "tests/templates/vectors_test.cc"},
    {"moe_*.json", "tests/templates/vectors_test.cc"},
    {"mxfp8.json", "tests/templates/formats/mxfp8_test.cc"},
    {"qsrt_atoms_v1*.json", "tests/templates/formats/qsrt_vectors_test.cc"},
    {"qsrt_geometry*.json", "tests/templates/formats/qsrt_vectors_test.cc"},
    {"tiles.json", "tests/templates/vectors_test.cc"},
};

// Of `path` below the folder of the vectors: a file that a test reads by its
// whole name must lie in the folder itself.
bool Reads(const Kind& kind, const std::filesystem::path& path) {
  const std::string name = kind.name;
  const size_t star = name.find('*');
  if (star == std::string::npos) return path == name;
  const std::string file = path.filename().string();
  return file.starts_with(name.substr(0, star)) &&
         file.ends_with(name.substr(star + 1));
}

bool IsKnown(const std::filesystem::path& path) {
  return std::any_of(std::begin(kKinds), std::end(kKinds),
                     [&](const Kind& kind) { return Reads(kind, path); });
}

TEST(VectorKindsTest, EveryFileIsOfAKindThatATestReads) {
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(
           testing::VectorsFolder())) {
    if (!entry.is_regular_file()) continue;
    ++files;
    EXPECT_TRUE(IsKnown(
        std::filesystem::relative(entry.path(), testing::VectorsFolder())))
        << entry.path() << ": no test reads files of this kind";
  }
  EXPECT_GT(files, 0) << testing::VectorsFolder();
}

TEST(VectorKindsTest, AFileThatNoTestReadsIsOfNoKind) {
  for (const char* path : {"moe_mcg_k3_silu.json", "deeper/moe_x.json",
                           "qsrt_atoms_v1_more.json", "mxfp8.json"}) {
    EXPECT_TRUE(IsKnown(path)) << path;
  }
  for (const char* path :
       {"npk.json", "moe_x.bin", "mxfp8_more.json", "deeper/mxfp8.json", ""}) {
    EXPECT_FALSE(IsKnown(path)) << path;
  }
}

// A name that its test no longer mentions would let a file pass unread.
TEST(VectorKindsTest, EveryKindsTestNamesTheKind) {
  for (const Kind& kind : kKinds) {
    const std::string source = testing::ReadAll(testing::SourcePath(kind.test));
    const std::string name = kind.name;
    const size_t star = name.find('*');
    const std::string quoted = star == std::string::npos
                                   ? "VectorsFolder() / \"" + name + "\""
                                   : "VectorsFolder(), \"" +
                                         name.substr(0, star) + "\", \"" +
                                         name.substr(star + 1) + "\"";
    EXPECT_NE(source.find(quoted), std::string::npos)
        << kind.test << " does not read " << kind.name;
  }
}

}  // namespace
}  // namespace kiln
