// Small sections to build bundles from: one CUDA section whose programs the
// fake driver understands, one CPU section around tests/runtime/tiny_kernel.c.
// Plain values, so a test changes what it wants before it calls WriteBundle.

#ifndef KILN_TESTS_SUPPORT_TINY_BUNDLE_H_
#define KILN_TESTS_SUPPORT_TINY_BUNDLE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "compiler/bundle_writer.h"
#include "runtime/kiln.h"

namespace kiln::testing {

// Entry "moe" with plans for 1..1, 2..4 and 5..64 of two steps each ("fc1",
// "fc2") and entry "dense" with one plan for 1..8, all measured. Target sm_90a.
//   fc1: 2 parameters, an arena slice, m and a u32, 1 KiB of static and 64 KiB
//   of dynamic shared memory; grid (ceil(m / 4), 8, 1)
//   fc2: an arena slice, a parameter, m; grid (min(m, 32), 1, 1)
inline constexpr uint32_t kTinyHidden = 256;  // H
BundleSection TinyCudaSection();

// Entry "sumsq" with plans for 1..2 (one thread) and 3..256 (two threads):
// out[t] = sum of x[t][i]^2 over `kTinyWidth` elements. Needs `binary`, the
// bytes of tiny_kernel.so. Target cpu-x86-64-v2.
//   parameters: x f32 [m, width], out f32 [m]
inline constexpr uint32_t kTinyWidth = 24;
BundleSection TinyCpuSection(const std::string& binary);

// The bundle that runtime/bundle_format.md explains byte by byte: entry "moe"
// for 1..4 tokens, one step, one program, target sm_80.
BundleSection ExampleSection();

// A program of target `target` with one kernel per line of `image`, which is in
// the fake driver's form.
std::shared_ptr<const Program> FakeProgram(const std::string& name,
                                           const Target& target,
                                           const std::string& image,
                                           std::vector<Kernel> kernels);

RequestGeometry TinyGeometry();

// Writes, opens and asserts; the caller closes.
kiln_bundle_t* OpenTiny(std::vector<BundleSection> sections);

// Puts the right root into bytes that were changed by hand.
void RepairRoot(std::string* bytes);

// The bytes of tiny_kernel.so.
std::string TinyKernelBinary();

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_TINY_BUNDLE_H_
