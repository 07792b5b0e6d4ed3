// Bundle: the bytes of a frozen file after everything about them was verified.
// Nothing below reads a bundle that OpenBundle has not accepted, so later code
// follows offsets and indices without checking them again.

#ifndef KILN_RUNTIME_BUNDLE_READER_H_
#define KILN_RUNTIME_BUNDLE_READER_H_

#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "runtime/bundle_format.h"
#include "runtime/kiln.h"

namespace kiln::runtime {

// Typed views of the tables. Valid while the bytes are.
struct BundleView {
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  const kiln_format_header_t* header = nullptr;
  const kiln_format_section_t* sections = nullptr;
  const kiln_format_program_t* programs = nullptr;
  const kiln_format_kernel_t* kernels = nullptr;
  const kiln_format_kernel_param_t* kernel_params = nullptr;
  const kiln_format_entry_t* entries = nullptr;
  const kiln_format_attribute_t* attributes = nullptr;
  const kiln_format_plan_t* plans = nullptr;
  const kiln_format_param_t* params = nullptr;
  const kiln_format_slice_t* slices = nullptr;
  const kiln_format_step_t* steps = nullptr;
  const kiln_format_arg_t* args = nullptr;
  const char* strings = nullptr;

  const char* Text(kiln_format_text_t text) const {
    return strings + text.offset;
  }

  uint32_t section_count() const {
    return header->tables[KILN_FORMAT_TABLE_SECTIONS].count;
  }
};

// Checks what the header of a file of `bytes` bytes says alone: magic, version,
// size and pinned root. `data` (8-byte aligned) holds the header, or the whole
// file if that is shorter.
kiln_status_t VerifyHead(const uint8_t* data, uint64_t bytes,
                         const uint8_t* expected_root, kiln_error_t* error);

// Verifies `bytes` bytes at `data` (8-byte aligned) and fills `view`.
// `expected_root` is 32 bytes or null. Reads only; allocates nothing.
//   Errors: the KILN_STATUS_BUNDLE_* codes and ROOT_MISMATCH.
kiln_status_t VerifyBundle(const uint8_t* data, size_t bytes,
                           const uint8_t* expected_root, BundleView* view,
                           kiln_error_t* error);

// ceil((mul * m + add) / div).
inline uint64_t EvaluateTerm(const kiln_format_term_t& term, uint64_t m) {
  const uint64_t scaled = term.mul * m + term.add;
  // Most dimensions of a step are constants, and a division is the slowest
  // thing that a launch computes.
  if (term.div == 1) return scaled;
  return scaled / term.div + (scaled % term.div != 0 ? 1 : 0);
}

// The smaller of the two terms.
inline uint64_t EvaluateDim(const kiln_format_term_t* terms, uint64_t m) {
  const uint64_t a = EvaluateTerm(terms[0], m);
  const uint64_t b = EvaluateTerm(terms[1], m);
  return a < b ? a : b;
}

// Bytes of one argument: 4 or 8.
uint32_t ArgBytes(uint32_t kind);

// A verified private copy. Reference-counted: the handle holds one reference
// and every modules set holds one.
struct Bundle {
  BundleView view;
  void* memory = nullptr;  // read-only anonymous mapping
  size_t memory_bytes = 0;
  std::atomic<uint32_t> references{1};
};

kiln_status_t OpenBundleFile(const char* path, const uint8_t* expected_root,
                             Bundle** bundle, kiln_error_t* error);
kiln_status_t OpenBundleMemory(const void* data, size_t bytes,
                               const uint8_t* expected_root, Bundle** bundle,
                               kiln_error_t* error);
void RetainBundle(Bundle* bundle);
void ReleaseBundle(Bundle* bundle);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_BUNDLE_READER_H_
