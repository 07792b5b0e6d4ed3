// Toolchain, ProgramKey and Program: what a compiled binary is and what decides
// whether it may be reused.

#ifndef KILN_COMPILER_SPEC_PROGRAM_H_
#define KILN_COMPILER_SPEC_PROGRAM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/base/digest.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/target.h"

namespace kiln {

// A compiler as a value. Two toolchains are equal when their bytes are.
struct Toolchain {
  std::string name;     // "nvrtc" or "clang"
  std::string version;  // "13.0.88", "19.1.7"
  Digest content;       // SHA-256 over the compiler library's bytes

  bool operator==(const Toolchain&) const = default;
};

// Identity of a program (the build digest) with its pre-image.
struct ProgramKey {
  Digest digest;
  std::string preimage;  // CanonicalEncoder bytes

  bool operator==(const ProgramKey&) const = default;
};

// What makes, or made, the binary of `unit`: `compiler`, or for a unit with a
// binary the package that brought it ("package 1f3a5b7c9d0e").
Toolchain ToolchainOf(const SourceUnit& unit, const Toolchain& compiler);

// Everything that can change the binary: source and header bytes, entries,
// options, the dtype arithmetic runs in, the full target, the toolchain (that
// of ToolchainOf); and for a package, which one it is.
ProgramKey MakeProgramKey(const SourceUnit& unit, const Target& target,
                          const Toolchain& compiler);

// One parameter of an entry, in bytes from the start of the parameter block.
struct KernelParam {
  uint32_t offset = 0;
  uint32_t bytes = 0;
  auto operator<=>(const KernelParam&) const = default;
};

// One launchable symbol of a program, as the inspector found it in the binary.
struct Kernel {
  std::string entry;
  // In order. CUDA: each parameter as the cubin declares it. CPU: one
  // pseudo-parameter that covers the whole argument structure.
  std::vector<KernelParam> params;
  uint32_t param_bytes = 0;  // of the whole parameter block
  uint32_t registers = 0;    // per thread; 0 on the CPU
  uint32_t static_shared_bytes = 0;
  uint32_t local_bytes = 0;  // per thread, spills included; 0 on the CPU
  uint32_t max_threads = 0;  // from __launch_bounds__; 0 = not stated

  bool operator==(const Kernel&) const = default;
};

// A compiled and inspected binary. Immutable once made.
struct Program {
  ProgramKey key;
  Target target;
  Toolchain toolchain;
  std::string binary;           // cubin, or ELF shared object
  Digest binary_digest;         // SHA-256 of binary
  std::vector<Kernel> kernels;  // sorted by entry; exactly the declared ones
  std::string log;              // compiler output, may be empty
  double compile_seconds = 0;   // provenance only

  // The kernel named `entry`, or null.
  const Kernel* FindKernel(absl::string_view entry) const;
};

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_PROGRAM_H_
