// PackageManifest: package.json, schema "kiln.package/1". What a kernel package
// offers, and the SHA-256 of every file that it consists of. The parser refuses
// what it does not know; it reads no other file. The keys are in
// templates/package/README.md.

#ifndef KILN_TEMPLATES_PACKAGE_MANIFEST_H_
#define KILN_TEMPLATES_PACKAGE_MANIFEST_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"
#include "compiler/spec/target.h"
#include "templates/axes.h"
#include "templates/package/expression.h"

namespace kiln {

// Limits of a manifest; beyond them is an error that names the limit.
inline constexpr uint64_t kPackageManifestBytesMax = 1u << 20;
inline constexpr size_t kPackageFilesMax = 256;
inline constexpr size_t kPackageAxesMax = 16;
inline constexpr size_t kPackageAxisValuesMax = 64;
inline constexpr size_t kPackagePointsMax = 4096;  // of all axes together
inline constexpr size_t kPackageListMax = 64;      // of anything else
inline constexpr size_t kPackageNameBytesMax = 64;
inline constexpr size_t kPackagePathBytesMax = 255;
// Threads of a block, and of a processor that shares the blocks of a step.
inline constexpr int64_t kPackageThreadsMax = 1024;
inline constexpr int64_t kPackageSharedBytesMax = 1 << 20;
inline constexpr auto kPackageSliceBytesMax =
    static_cast<int64_t>(kArenaBytesMax);

// Sizes from `low` to `high`, both included.
struct SizeRange {
  int64_t low = 1;
  int64_t high = INT64_MAX;
  bool operator==(const SizeRange&) const = default;
};

// A size of the op by its name in expressions, and what a package serves of it.
struct ServedSize {
  std::string name;  // "hidden"
  SizeRange range;
  bool operator==(const ServedSize&) const = default;
};

// The geometries that a package serves: those that are in all of the lists.
struct ServedGeometries {
  std::vector<Recipe> recipes;
  std::vector<WeightFormat> formats;
  std::vector<Codebook> codebooks;
  std::vector<int64_t> bits;  // of any projection
  std::vector<bool> shared_scales;
  std::vector<Activation> activations;
  std::vector<DType> io_dtypes;
  std::vector<DType> id_dtypes;
  std::vector<Target> targets;    // empty: all of the backend
  std::vector<ServedSize> sizes;  // that are limited
  SizeRange capacity;             // tokens

  bool operator==(const ServedGeometries&) const = default;
};

struct PackageFile {
  std::string path;  // relative to the package's folder
  // Absent where the manifest has "", which only the reader of
  // ParseUnpinnedPackageManifest accepts.
  std::optional<Digest> sha256;
  // Of the value in the manifest, for `kiln package pin`; from 1.
  uint32_t line = 1;
  uint32_t column = 1;
  size_t written_bytes = 0;  // that the value has between its quotes

  bool operator==(const PackageFile&) const = default;
};

// A binary that the package's own compiler made.
struct PackageBinary {
  std::string file;
  Target target;
  Assignment assignment;  // of some axes: it serves every point that agrees
  bool operator==(const PackageBinary&) const = default;
};

// Has a source that Kiln compiles, or binaries.
struct PackageProgram {
  std::string source;  // path; empty with binaries
  std::vector<PackageBinary> binaries;
  std::vector<std::string> entries;  // sorted
  bool operator==(const PackageProgram&) const = default;
};

struct PackageSlice {
  std::string name;
  Expression bytes;
  bool operator==(const PackageSlice&) const = default;
};

struct PackageArg {
  ArgKind kind = ArgKind::kTokens;
  size_t index = 0;  // of kParam and kArena
  Expression value;  // of kU32 and kU64
  bool operator==(const PackageArg&) const = default;
};

struct PackageStep {
  std::string label;
  size_t program = 0;
  std::string entry;  // of that program
  std::array<Expression, 3> grid;
  std::array<Expression, 3> block;  // CUDA only
  Expression shared_bytes;          // CUDA only
  std::vector<PackageArg> args;
  bool operator==(const PackageStep&) const = default;
};

struct PackageManifest {
  std::string name;  // "acme.scalar"
  uint32_t version = 1;
  Op op = Op::kFusedMoe;
  Backend backend = Backend::kCpu;
  ServedGeometries serves;
  std::vector<Axis> axes;
  std::vector<Condition> conditions;
  std::string compute_dtype;  // the dtype arithmetic runs in, "f32"
  bool deterministic = false;
  // Those whose value changes the bits of a result; sorted.
  std::vector<std::string> numerics_axes;
  Expression threads;  // CPU only
  std::vector<PackageFile> files;
  bool own_compiler = false;
  std::vector<PackageProgram> programs;
  std::vector<PackageSlice> arena;
  std::vector<PackageStep> steps;

  bool operator==(const PackageManifest&) const = default;
};

// Names of the op's sizes in expressions, and what they are of a geometry:
// hidden, intermediate, experts, top_k, bits_gate, bits_up, bits_down.
ExpressionValues GeometryValues(const RequestGeometry& geometry);

// Parses and checks a manifest. `file` is only used in messages.
//   Errors: InvalidArgument, "file:line:column: ...".
absl::StatusOr<PackageManifest> ParsePackageManifest(absl::string_view text,
                                                     absl::string_view file);

// The same, but "sha256" may be any short text: for an author who wants it
// filled in.
absl::StatusOr<PackageManifest> ParseUnpinnedPackageManifest(
    absl::string_view text, absl::string_view file);

// The text with the "sha256" values of `digests`, by the order of
// `manifest.files`, and otherwise as it was. `manifest` is what the text parses
// to.
std::string PinPackageManifest(absl::string_view text,
                               const PackageManifest& manifest,
                               const std::vector<Digest>& digests);

// Every point of the axes, the last varying fastest.
std::vector<Assignment> PackagePoints(const std::vector<Axis>& axes);

}  // namespace kiln

#endif  // KILN_TEMPLATES_PACKAGE_MANIFEST_H_
