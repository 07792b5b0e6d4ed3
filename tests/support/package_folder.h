// A small kernel package in a scratch folder, for tests that change one thing.

#ifndef KILN_TESTS_SUPPORT_PACKAGE_FOLDER_H_
#define KILN_TESTS_SUPPORT_PACKAGE_FOLDER_H_

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_replace.h"
#include "compiler/base/digest.h"
#include "tests/support/golden.h"

namespace kiln::testing {

// Does nothing useful, but everything about it is well-formed. SHA is where
// the digest of kernel.cc goes.
inline constexpr char kPackageSource[] =
    "#include \"device/cpu_entry.h\"\n"
    "#include \"sub/more.h\"\n"
    "namespace { struct Args { float* out; };\n"
    "void F(const Args&, kd::u32, kd::u32, kd::u32) {} }\n"
    "KILN_CPU_ENTRY(acme_f, Args, F)\n";
inline constexpr char kPackageHeader[] = "#define ACME 1\n";
inline constexpr char kPackageText[] = R"json({
 "schema": "kiln.package/1", "name": "acme.small", "version": 3,
 "op": "fused_moe", "backend": "cpu",
 "serves": {"recipes": ["w4a16"], "formats": ["exl3"], "codebooks": ["mcg"],
  "bits": [4], "scales": ["per_expert"], "activations": ["silu"],
  "io_dtypes": ["bf16"], "id_dtypes": ["i64"], "hidden": [128, 512],
  "capacity": [1, 64]},
 "axes": [{"name": "tile", "values": [4, 8]},
          {"name": "unroll", "values": [1]}],
 "conditions": ["capacity >= tile"],
 "compute_dtype": "f32", "deterministic": true, "numerics_axes": ["tile"],
 "threads": "min(processors, 2)",
 "files": [{"path": "kernel.cc", "sha256": "SHA_SOURCE"},
           {"path": "sub/more.h", "sha256": "SHA_HEADER"}],
 "programs": [{"source": "kernel.cc", "entries": ["acme_f"]}],
 "arena": [{"name": "scratch", "bytes": "4 * capacity * hidden"}],
 "steps": [{"label": "all", "entry": "acme_f",
  "grid": ["min(top_k * m, ceil_div(top_k * m + experts, tile))",
           "hidden / 128"],
  "args": ["param:out", "arena:scratch", "u32:2 * tile", "tokens",
           "u64:capacity"]}]})json";

inline void WriteTestFile(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(
      std::filesystem::path(path).parent_path());
  std::ofstream out(path, std::ios::binary);
  out << text;
  ASSERT_TRUE(out.flush().good()) << path;
}

// The manifest of the package above with its real digests.
inline std::string PinnedPackageText(const std::string& text = kPackageText) {
  return absl::StrReplaceAll(text,
                             {{"SHA_SOURCE", Sha256(kPackageSource).ToHex()},
                              {"SHA_HEADER", Sha256(kPackageHeader).ToHex()}});
}

// The folder of that package; goes with its scope.
class PackageFolder {
 public:
  PackageFolder() {
    Write("package.json", PinnedPackageText());
    Write("kernel.cc", kPackageSource);
    Write("sub/more.h", kPackageHeader);
  }

  void Write(const std::string& file, const std::string& text) {
    WriteTestFile(scratch_.File(file), text);
  }

  // The manifest with one text in place of another, which must be there.
  void Change(const std::string& from, const std::string& to) {
    const std::string old = ReadTestFile(scratch_.File("package.json"));
    const std::string changed = absl::StrReplaceAll(old, {{from, to}});
    ASSERT_NE(changed, old) << from;
    Write("package.json", changed);
  }

  const std::string& path() const { return scratch_.path(); }

  std::string File(const std::string& name) const {
    return scratch_.File(name);
  }

 private:
  ScratchFolder scratch_;
};

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_PACKAGE_FOLDER_H_
