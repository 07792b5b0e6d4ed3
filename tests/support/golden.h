// Files that tests read from the source tree, golden comparison, and a folder
// for what a test writes.
//
// Goldens lie in tests/golden; a file name carries the version of its format.
// KILN_UPDATE_GOLDENS=1 rewrites them; the difference is reviewed like code.

#ifndef KILN_TESTS_SUPPORT_GOLDEN_H_
#define KILN_TESTS_SUPPORT_GOLDEN_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace kiln::testing {

// `relative` inside the source tree. ctest sets KILN_SOURCE_DIR; a test that
// is started by hand must run in the source folder or set it.
inline std::string SourcePath(const std::string& relative) {
  const char* root = std::getenv("KILN_SOURCE_DIR");
  return (std::filesystem::path(root == nullptr ? "." : root) / relative)
      .string();
}

// The whole file; fails the test when it cannot be read.
inline std::string ReadTestFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << "cannot open " << path
                         << "; is KILN_SOURCE_DIR set to the source folder?";
  return std::string(std::istreambuf_iterator<char>(in),
                     std::istreambuf_iterator<char>());
}

// Compares `actual` with tests/golden/NAME.
inline void ExpectGolden(const std::string& actual, const std::string& name) {
  const std::string path = SourcePath("tests/golden/" + name);
  const char* update = std::getenv("KILN_UPDATE_GOLDENS");
  if (update != nullptr && std::string(update) == "1") {
    std::filesystem::create_directories(
        std::filesystem::path(path).parent_path());
    std::ofstream out(path, std::ios::binary);
    out << actual;
    ASSERT_TRUE(out.flush().good()) << "cannot write " << path;
    return;
  }
  EXPECT_EQ(actual, ReadTestFile(path))
      << path << " differs; KILN_UPDATE_GOLDENS=1 rewrites it";
}

// A new empty folder that is removed at the end of its scope.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "kiln_test.XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) {
      ADD_FAILURE() << "cannot create " << pattern;
    }
    path_ = pattern;
  }

  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }

  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_GOLDEN_H_
