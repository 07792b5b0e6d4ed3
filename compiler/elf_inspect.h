// InspectProgram: what a compiled binary really is, read from its bytes. It
// loads, runs and trusts nothing: any byte string gives kernels or an error.

#ifndef KILN_COMPILER_ELF_INSPECT_H_
#define KILN_COMPILER_ELF_INSPECT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "compiler/spec/program.h"
#include "compiler/spec/target.h"

namespace kiln {

// Largest binary that is looked at, in bytes.
inline constexpr uint64_t kProgramBytesMax = uint64_t{64} << 20;

// The kernels of `binary`, sorted by entry.
//
// A cubin must be for exactly `target` ("a" variant included), contain exactly
// the declared entries and call nothing outside itself. A CPU object must be an
// x86-64 shared object that needs no library and no symbol, runs nothing when
// it is loaded or unloaded (no constructor, no indirect function), has no
// segment both writable and executable, no relocation other than relative ones
// of data, no thread-local storage, and exports exactly ENTRY and
// ENTRY_args_bytes (u32, the size of the argument structure) for each declared
// entry.
//
//   entries: declared symbols, each once, in any order.
//   Errors: InvalidArgument, with what was found and what was expected.
absl::StatusOr<std::vector<Kernel>> InspectProgram(
    absl::string_view binary, const Target& target,
    absl::Span<const std::string> entries);

}  // namespace kiln

#endif  // KILN_COMPILER_ELF_INSPECT_H_
