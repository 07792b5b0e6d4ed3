// CPU code generation: C++20 text from memory to an ELF shared object in
// memory, with Clang and LLD inside this process. Linked into kiln-cc-cpu only.
//
// The language mode is freestanding: no header exists but the unit's own, no
// library but the few functions that a compiler calls by itself.
// Floating point is exact: no contraction, no reassociation.

#ifndef KILN_COMPILER_CC_CPU_CODEGEN_H_
#define KILN_COMPILER_CC_CPU_CODEGEN_H_

#include <string>
#include <utility>
#include <vector>

namespace kiln {

// Only plain types cross this border: the other side is compiled without
// run-time type information and sees LLVM instead of Abseil.
struct CpuCodegenInput {
  std::string name;  // virtual path of the unit
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
  std::vector<std::string> exports;  // symbols that stay visible
  std::vector<std::string> options;  // appended to Clang's cc1 arguments
  int level = 3;                     // x86-64 psABI level, 2..4
};

struct CpuCodegenOutput {
  std::string binary;  // empty on failure
  std::string error;   // first reason, one line; empty on success
  std::string log;     // every diagnostic
  // False when LLD may not be called again in this process.
  bool reusable = true;
};

// Once per process, before CompileForCpu.
void InitializeCpuCodegen();

CpuCodegenOutput CompileForCpu(const CpuCodegenInput& input);

// "19.1.7".
std::string CpuCompilerVersion();

}  // namespace kiln

#endif  // KILN_COMPILER_CC_CPU_CODEGEN_H_
