// The parts of a plan: launch rules, steps, arguments, arena, and the sources
// or programs that the steps launch. All are plain values.
//
// A candidate says what to compile (SourceUnit); a plan says what was compiled
// (the build digest of each unit). Everything else is the same value in both.

#ifndef KILN_COMPILER_SPEC_PLAN_H_
#define KILN_COMPILER_SPEC_PLAN_H_

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "compiler/spec/request.h"
#include "compiler/spec/target.h"

namespace kiln {

// ceil((mul * m + add) / div) for live tokens m, in 64-bit arithmetic.
struct LaunchTerm {
  uint32_t mul = 0;
  uint32_t add = 1;
  uint32_t div = 1;  // at least 1
  auto operator<=>(const LaunchTerm&) const = default;
};

// One grid dimension: the smaller of two terms. 0 means that the step has
// nothing to do and is skipped.
struct LaunchDim {
  LaunchTerm a;
  LaunchTerm b;

  static LaunchDim Constant(uint32_t n) {
    const LaunchTerm term{.mul = 0, .add = n, .div = 1};
    return {.a = term, .b = term};
  }

  static LaunchDim Of(LaunchTerm term) { return {.a = term, .b = term}; }

  uint64_t Evaluate(uint32_t m) const;

  auto operator<=>(const LaunchDim&) const = default;
};

enum class ArgKind : uint32_t {
  kParam = 1,   // 8 bytes: the value-th slot of the caller's parameter block
  kArena = 2,   // 8 bytes: address of the value-th arena slice
  kTokens = 3,  // 4 bytes: live m
  kU32 = 4,     // 4 bytes: value
  kU64 = 5,     // 8 bytes: value
};

// Bytes (and alignment) of an argument in the kernel's parameter block.
uint32_t ArgBytes(ArgKind kind);

struct Arg {
  ArgKind kind = ArgKind::kU32;
  uint64_t value = 0;

  static Arg Param(uint64_t slot) { return {ArgKind::kParam, slot}; }

  static Arg Arena(uint64_t slice) { return {ArgKind::kArena, slice}; }

  static Arg Tokens() { return {ArgKind::kTokens, 0}; }

  static Arg U32(uint32_t value) { return {ArgKind::kU32, value}; }

  static Arg U64(uint64_t value) { return {ArgKind::kU64, value}; }

  auto operator<=>(const Arg&) const = default;
};

// Offset of each argument in the kernel's parameter block: order of
// declaration, each at its natural alignment, as CUDA lays parameters out.
std::vector<uint32_t> ArgOffsets(const std::vector<Arg>& args);

struct Step {
  std::string label;     // for people, for example "fc1"
  uint32_t program = 0;  // index into the candidate's units or plan's programs
  std::string entry;     // symbol in that program
  std::array<LaunchDim, 3> grid;
  std::array<uint32_t, 3> block = {1, 1, 1};  // threads; 1 on the CPU
  uint32_t dynamic_shared_bytes = 0;          // 0 on the CPU
  std::vector<Arg> args;

  auto operator<=>(const Step&) const = default;
};

// Alignment of the arena base and of every slice, in bytes.
inline constexpr uint64_t kArenaAlignment = 256;
// Largest arena a plan may ask for, in bytes.
inline constexpr uint64_t kArenaBytesMax = uint64_t{1} << 40;

struct ArenaSlice {
  std::string name;
  uint64_t offset = 0;  // bytes from the arena base
  uint64_t bytes = 0;
  auto operator<=>(const ArenaSlice&) const = default;
};

// Caller-owned scratch. Its size depends on the capacity alone.
struct ArenaLayout {
  std::vector<ArenaSlice> slices;
  uint64_t bytes = 0;  // total, a multiple of kArenaAlignment

  // Appends a slice and returns its index.
  uint32_t Add(absl::string_view name, uint64_t bytes);

  auto operator<=>(const ArenaLayout&) const = default;
};

// One 8-byte slot of the caller's parameter block: a pointer.
struct ParamDecl {
  std::string name;   // "topk_ids"
  std::string dtype;  // "i32"
  std::string shape;  // "[m, top_k]", symbols as in the op's documentation
  bool output = false;
  auto operator<=>(const ParamDecl&) const = default;
};

// A point of a template's space: axis name to value, sorted by name.
using Assignment = std::map<std::string, int64_t>;

// "tokens_tile=8,warps=4".
std::string AssignmentText(const Assignment& assignment);

// One program to compile: specialised text plus the headers it names, all in
// memory. A pure function of a candidate; contains no path. Or the binary that
// a package's own compiler made of it.
struct SourceUnit {
  std::string name;  // virtual file name, "fused_moe/cuda.cu"
  uint32_t template_version = 0;
  std::string compute_dtype;  // the dtype arithmetic runs in, "f16"
  std::string text;           // prelude of #defines, then the source
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
  std::vector<std::string> entries;  // symbols it must export, sorted
  std::vector<std::string> options;  // extra compiler options, in order
  // The attached package that it comes from; absent for Kiln's own templates.
  std::optional<Digest> package = {};
  std::string binary = {};  // then there is no text, and nothing to compile

  bool operator==(const SourceUnit&) const = default;
};

// What a candidate and a plan have in common.
struct PlanBody {
  // "fused_moe.cuda"; of a package "acme.scalar@HEX", its digest in full.
  std::string template_name;
  uint32_t template_version = 0;
  Assignment assignment;
  // Candidates of one class give bit-identical results.
  std::string numerics_class;
  // Largest relative Frobenius error per row against the float64 oracle.
  double tolerance = 0;
  bool deterministic = true;
  // CUDA, sm_90 and later: steps but the first are launched with programmatic
  // stream serialization. One may start before the step in front of it has
  // ended, and waits itself before it reads what that one writes.
  bool overlapped = false;
  // CPU only: threads that share the blocks of a step; 0 on the GPU.
  uint32_t cpu_threads = 0;
  std::vector<ParamDecl> params;
  ArenaLayout arena;
  std::vector<Step> steps;

  // "fused_moe.cuda{tokens_tile=8,warps=4}"; the digest of a package is cut to
  // 12 digits.
  std::string Label() const;

  bool operator==(const PlanBody&) const = default;
};

// A candidate for one request, one interval and one target.
struct Candidate {
  PlanBody body;
  std::vector<SourceUnit> units;  // Step::program indexes this
};

// How a plan came about.
enum class PlanState { kMeasured, kPredicted };

struct Evidence {
  PlanState state = PlanState::kPredicted;
  double median_ns = 0;          // of the winner; 0 when predicted
  double default_median_ns = 0;  // of the default candidate in the same race
  double noise_floor = 0;        // A/A spread, as a fraction
  double worst_error = 0;        // relative Frobenius error against the oracle
  uint32_t samples = 0;          // timed blocks of the winner
  uint32_t candidates = 0;       // that entered the race
  // Of the whole race; 0 in rows that older versions stored.
  uint32_t blocks = 0;      // that count
  uint32_t discarded = 0;   // during which the device changed its clock
  uint32_t pruned = 0;      // legal candidates that were left out of it
  double race_seconds = 0;  // that timing took

  bool operator==(const Evidence&) const = default;
};

// The answer for one request and one interval on one target.
struct Plan {
  RequestGeometry geometry;
  Target target;
  Interval interval;
  PlanBody body;
  std::vector<Digest> programs;  // build digests; Step::program indexes this
  Evidence evidence;

  bool operator==(const Plan&) const = default;
};

// Checks what every plan must satisfy: indices in range, divisors at least 1,
// aligned slices inside the arena, steps non-empty. Internal on violation.
absl::Status ValidatePlan(const Plan& plan);

// JSON text with sorted keys, for the cache and for --json. The inverse refuses
// unknown or missing keys, wrong types and what ValidatePlan refuses with
// DataLoss.
std::string PlanToJson(const Plan& plan);
absl::StatusOr<Plan> PlanFromJson(absl::string_view text);

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_PLAN_H_
