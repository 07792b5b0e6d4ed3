/* bundle_format.h: the bytes of a frozen bundle, format version 2.
 *
 * Layout. Little-endian; offsets count from the start of the file; the parts
 * follow each other in this order without gaps, except for zero bytes that
 * bring the next part to its alignment:
 *
 *   offset            part               record bytes  alignment
 *   0                 header             272
 *   272               sections           48            8
 *   after sections    programs           128           8
 *                     kernels            40            8
 *                     kernel parameters  8             8
 *                     entries            48            8
 *                     attributes         16            8
 *                     plans              168           8
 *                     parameters         72            8
 *                     arena slices       24            8
 *                     steps              112           8
 *                     arguments          16            8
 *                     strings            1             8
 *                     binaries           -             64 each
 *
 * Ownership is by ranges, and ranges tile: reading sections in order, their
 * program ranges are 0..a, a..b, ... of the program table, and so on down to
 * arguments. So no record is shared, skipped or reached twice, there can be no
 * cycle, and equal content has exactly one encoding. Binaries tile the rest of
 * the file in the order of the program table; the file ends with the last one.
 *
 * Strings are printable ASCII, each stored once, sorted, NUL-terminated, and
 * referred to by offset into the string table and length without the NUL.
 *
 * The root in the header is a Merkle tree hash over the whole file with the 32
 * root bytes taken as zero (kiln_bundle_root). Every byte is below it: header,
 * tables, padding, binaries.
 *
 * There are no timestamps, paths, users or host names. bundle_format.md says
 * the same in prose, with a worked example. A change of layout is a new
 * KILN_FORMAT_VERSION; files of another version are refused, never migrated.
 *
 * Plain C11, so that any tool can read it. Depends on nothing. */

#ifndef KILN_RUNTIME_BUNDLE_FORMAT_H_
#define KILN_RUNTIME_BUNDLE_FORMAT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define KILN_FORMAT_ASSERT_(condition) static_assert(condition, #condition)
extern "C" {
#else
#define KILN_FORMAT_ASSERT_(condition) _Static_assert(condition, #condition)
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bundles are read in place on little-endian machines only"
#endif

/* A bit-7 byte, a CR LF and a ^Z, so that a transfer in text mode is noticed:
 * 89 4B 49 4C 4E 0D 0A 1A. */
#define KILN_FORMAT_MAGIC "\x89KILN\r\n\x1a"
#define KILN_FORMAT_MAGIC_BYTES 8

#define KILN_FORMAT_VERSION 2u

#define KILN_FORMAT_BINARY_ALIGNMENT 64u
#define KILN_FORMAT_ARENA_ALIGNMENT 256u

/* Maxima. A writer refuses to exceed them and a reader refuses a file that
 * does, before it allocates or loops. */
#define KILN_FORMAT_FILE_BYTES_MAX (UINT64_C(1) << 34)
#define KILN_FORMAT_BINARY_BYTES_MAX (UINT64_C(1) << 30)
#define KILN_FORMAT_STRINGS_BYTES_MAX (UINT64_C(1) << 26)
#define KILN_FORMAT_STRING_BYTES_MAX 4095u /* without the NUL */
#define KILN_FORMAT_SECTIONS_MAX 64u
#define KILN_FORMAT_PROGRAMS_MAX (1u << 18)
#define KILN_FORMAT_KERNELS_MAX (1u << 20)
#define KILN_FORMAT_KERNEL_PARAMS_MAX (1u << 24)
#define KILN_FORMAT_ENTRIES_MAX (1u << 18)
#define KILN_FORMAT_ATTRIBUTES_MAX (1u << 22)
#define KILN_FORMAT_PLANS_MAX (1u << 20)
#define KILN_FORMAT_PARAMS_MAX (1u << 24)
#define KILN_FORMAT_SLICES_MAX (1u << 24)
#define KILN_FORMAT_STEPS_MAX (1u << 22)
#define KILN_FORMAT_ARGS_MAX (1u << 26)
/* Per owner. */
#define KILN_FORMAT_PROGRAM_KERNELS_MAX 256u
#define KILN_FORMAT_KERNEL_PARAMS_EACH_MAX 256u
#define KILN_FORMAT_ENTRY_ATTRIBUTES_MAX 256u
#define KILN_FORMAT_ENTRY_PLANS_MAX 1024u
#define KILN_FORMAT_PLAN_PARAMS_MAX 256u
#define KILN_FORMAT_PLAN_SLICES_MAX 256u
#define KILN_FORMAT_PLAN_STEPS_MAX 256u
#define KILN_FORMAT_STEP_ARGS_MAX 256u
/* Values. */
#define KILN_FORMAT_ARG_BLOCK_BYTES_MAX 4096u /* one kernel's parameters */
#define KILN_FORMAT_ARENA_BYTES_MAX (UINT64_C(1) << 40)
#define KILN_FORMAT_PARAM_BYTES_MAX (UINT64_C(1) << 40) /* at m_max */
#define KILN_FORMAT_TOKENS_MAX (1u << 30)               /* largest capacity */
#define KILN_FORMAT_GRID_X_MAX 2147483647u
#define KILN_FORMAT_GRID_YZ_MAX 65535u
#define KILN_FORMAT_BLOCK_THREADS_MAX 1024u
#define KILN_FORMAT_CPU_THREADS_MAX 1024u

enum { KILN_FORMAT_BACKEND_CUDA = 1, KILN_FORMAT_BACKEND_CPU = 2 };

/* Of the header, a section and a plan; a section has a flag if one of its plans
 * does, the header if one of its sections does. */
enum {
  KILN_FORMAT_FLAG_PREDICTED = 1,  /* plans that were never run */
  KILN_FORMAT_FLAG_UNQUALIFIED = 2 /* templates without a qualification */
};

enum {
  KILN_FORMAT_ARG_PARAM = 1,  /* 8 bytes: slot `value` of the caller's block */
  KILN_FORMAT_ARG_ARENA = 2,  /* 8 bytes: address of arena slice `value` */
  KILN_FORMAT_ARG_TOKENS = 3, /* 4 bytes: live m; value is 0 */
  KILN_FORMAT_ARG_U32 = 4,    /* 4 bytes: value */
  KILN_FORMAT_ARG_U64 = 5     /* 8 bytes: value */
};

/* What golden replay puts into each element of a buffer. `random` is
 * kiln_golden_random of the slot and the element's index. */
enum {
  KILN_FORMAT_FILL_NONE = 0,   /* outputs, and inputs that nobody described */
  KILN_FORMAT_FILL_WORDS = 1,  /* (random & fill_a) | fill_b */
  KILN_FORMAT_FILL_INDICES = 2 /* random mod fill_a; fill_b is 0 */
};

/* The tables of kiln_format_header_t::tables, in file order. */
enum {
  KILN_FORMAT_TABLE_SECTIONS = 0,
  KILN_FORMAT_TABLE_PROGRAMS = 1,
  KILN_FORMAT_TABLE_KERNELS = 2,
  KILN_FORMAT_TABLE_KERNEL_PARAMS = 3,
  KILN_FORMAT_TABLE_ENTRIES = 4,
  KILN_FORMAT_TABLE_ATTRIBUTES = 5,
  KILN_FORMAT_TABLE_PLANS = 6,
  KILN_FORMAT_TABLE_PARAMS = 7,
  KILN_FORMAT_TABLE_SLICES = 8,
  KILN_FORMAT_TABLE_STEPS = 9,
  KILN_FORMAT_TABLE_ARGS = 10,
  KILN_FORMAT_TABLE_STRINGS = 11,
  KILN_FORMAT_TABLE_COUNT = 12
};

typedef struct kiln_format_table_t {
  uint64_t offset;
  uint32_t count;
  uint32_t record_bytes;
} kiln_format_table_t;

typedef struct kiln_format_range_t {
  uint32_t first; /* index into the owned table */
  uint32_t count;
} kiln_format_range_t;

typedef struct kiln_format_text_t {
  uint32_t offset; /* into the string table */
  uint32_t bytes;  /* without the NUL */
} kiln_format_text_t;

typedef struct kiln_format_header_t {
  uint8_t magic[KILN_FORMAT_MAGIC_BYTES];
  uint32_t version;      /* KILN_FORMAT_VERSION */
  uint32_t header_bytes; /* 272 */
  uint64_t file_bytes;
  uint8_t root[32];
  uint32_t runtime_abi; /* KILN_RUNTIME_ABI_MAJOR of the loading runtime */
  uint32_t flags;
  uint64_t binaries_offset; /* of the first binary; a multiple of 64 */
  uint64_t reserved;        /* 0 */
  kiln_format_table_t tables[KILN_FORMAT_TABLE_COUNT];
} kiln_format_header_t;

/* Sorted by target text; each target once. */
typedef struct kiln_format_section_t {
  kiln_format_text_t target; /* "sm_90a" */
  uint32_t backend;
  uint32_t level;              /* CUDA: 10 * major + minor; CPU: psABI level */
  uint32_t arch_specific;      /* CUDA: 1 for a trailing "a"; CPU: 0 */
  uint32_t driver_version_min; /* as cuDriverGetVersion counts; CPU: 0 */
  uint32_t flags;
  uint32_t reserved; /* 0 */
  kiln_format_range_t programs;
  kiln_format_range_t entries;
} kiln_format_section_t;

/* Sorted by build digest within a section, each once. */
typedef struct kiln_format_program_t {
  uint8_t build_digest[32];
  uint8_t binary_digest[32]; /* SHA-256 of the binary */
  uint8_t toolchain_digest[32];
  uint64_t offset; /* of the binary in the file */
  uint64_t bytes;  /* at least 1 */
  kiln_format_range_t kernels;
  kiln_format_text_t toolchain; /* "nvrtc 13.0.88" */
} kiln_format_program_t;

/* Sorted by name within a program. */
typedef struct kiln_format_kernel_t {
  kiln_format_text_t name; /* symbol in the binary */
  kiln_format_range_t params;
  uint32_t param_bytes; /* of the whole parameter block */
  uint32_t registers;   /* per thread; CPU: 0 */
  uint32_t static_shared_bytes;
  uint32_t local_bytes; /* per thread */
  uint32_t max_threads; /* per block; 0 = not stated */
  uint32_t reserved;    /* 0 */
} kiln_format_kernel_t;

/* Ascending offsets without overlap. On the CPU one record covers the whole
 * argument structure. */
typedef struct kiln_format_kernel_param_t {
  uint32_t offset;
  uint32_t bytes;
} kiln_format_kernel_param_t;

/* Sorted by name within a section. */
typedef struct kiln_format_entry_t {
  kiln_format_text_t name;
  kiln_format_text_t op;       /* "fused_moe" */
  kiln_format_text_t geometry; /* one line for people */
  uint32_t capacity;           /* m_max of the last plan */
  uint32_t reserved;           /* 0 */
  kiln_format_range_t attributes;
  kiln_format_range_t plans;
} kiln_format_entry_t;

/* One field of the request's geometry, in the writer's order. */
typedef struct kiln_format_attribute_t {
  kiln_format_text_t name;
  kiln_format_text_t value;
} kiln_format_attribute_t;

/* Sorted by interval; the first starts at 1, each next one token after the end
 * of the one before. Doubles are IEEE 754 binary64, finite, not negative. */
typedef struct kiln_format_plan_t {
  uint32_t m_min;
  uint32_t m_max;
  uint64_t arena_bytes; /* a multiple of 256 */
  kiln_format_range_t params;
  kiln_format_range_t slices;
  kiln_format_range_t steps;
  uint32_t flags;
  uint32_t deterministic; /* 1: repeats are bit-identical */
  uint32_t cpu_threads;   /* CUDA: 0; CPU: at least 1 */
  uint32_t template_version;
  kiln_format_text_t template_name;
  kiln_format_text_t label;
  kiln_format_text_t numerics_class;
  double tolerance;
  double median_ns;
  double default_median_ns;
  double noise_floor;
  double worst_error;
  uint32_t samples;
  uint32_t candidates;
  /* 1, CUDA only: steps behind the first are launched with programmatic stream
   * serialization. */
  uint32_t overlapped;
  uint32_t reserved; /* 0 */
  /* Golden replay: SHA-256 over the plan's outputs on golden inputs, computed
   * on a device when the bundle was frozen; 0: none. Only of a plan that was
   * measured, is deterministic, and whose every parameter has a size. */
  uint8_t golden[32];
} kiln_format_plan_t;

/* One 8-byte slot of the caller's parameter block: a pointer to a buffer of
 * bytes + bytes_per_token * m bytes. */
typedef struct kiln_format_param_t {
  kiln_format_text_t name;
  kiln_format_text_t dtype;
  kiln_format_text_t shape;
  uint32_t output;        /* 1: written by the plan */
  uint32_t fill;          /* KILN_FORMAT_FILL_* */
  uint32_t element_bytes; /* 1, 2, 4 or 8; 0: no size declared */
  uint32_t reserved;      /* 0 */
  uint64_t bytes;         /* both sizes: multiples of element_bytes */
  uint64_t bytes_per_token;
  uint64_t fill_a; /* both fit an element */
  uint64_t fill_b;
} kiln_format_param_t;

/* Ascending offsets, multiples of 256, no overlap. */
typedef struct kiln_format_slice_t {
  kiln_format_text_t name;
  uint64_t offset;
  uint64_t bytes;
} kiln_format_slice_t;

/* ceil((mul * m + add) / div), div at least 1, in 64-bit arithmetic. */
typedef struct kiln_format_term_t {
  uint32_t mul;
  uint32_t add;
  uint32_t div;
} kiln_format_term_t;

typedef struct kiln_format_step_t {
  kiln_format_text_t label; /* "fc1" */
  uint32_t program;         /* index into the program table */
  uint32_t kernel;          /* index into the kernel table */
  /* Grid dimension d is the smaller of grid[d][0] and grid[d][1]; 0 in any
   * dimension skips the step. */
  kiln_format_term_t grid[3][2];
  uint32_t block[3]; /* threads; CPU: 1, 1, 1 */
  uint32_t dynamic_shared_bytes;
  kiln_format_range_t args;
} kiln_format_step_t;

/* Offsets are natural: each argument at the next multiple of its size. They
 * equal the kernel's declared parameters. */
typedef struct kiln_format_arg_t {
  uint32_t kind;
  uint32_t offset; /* in the kernel's parameter block */
  uint64_t value;
} kiln_format_arg_t;

KILN_FORMAT_ASSERT_(sizeof(kiln_format_table_t) == 16);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_range_t) == 8);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_text_t) == 8);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_header_t) == 272);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_header_t, file_bytes) == 16);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_header_t, root) == 24);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_header_t, runtime_abi) == 56);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_header_t, binaries_offset) == 64);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_header_t, tables) == 80);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_section_t) == 48);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_section_t, programs) == 32);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_program_t) == 128);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_program_t, offset) == 96);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_kernel_t) == 40);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_kernel_param_t) == 8);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_entry_t) == 48);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_entry_t, attributes) == 32);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_attribute_t) == 16);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_plan_t) == 168);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_plan_t, params) == 16);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_plan_t, flags) == 40);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_plan_t, template_name) == 56);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_plan_t, tolerance) == 80);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_plan_t, samples) == 120);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_plan_t, overlapped) == 128);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_plan_t, golden) == 136);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_param_t) == 72);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_param_t, bytes) == 40);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_slice_t) == 24);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_term_t) == 12);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_step_t) == 112);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_step_t, grid) == 16);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_step_t, block) == 88);
KILN_FORMAT_ASSERT_(offsetof(kiln_format_step_t, args) == 104);
KILN_FORMAT_ASSERT_(sizeof(kiln_format_arg_t) == 16);

/* kiln_bundle_root: the Merkle tree hash of a bundle, in the manner of RFC 6962
 * section 2.1. The file is cut into leaves of KILN_FORMAT_LEAF_BYTES (the last
 * may be shorter); bytes 24..55, the root's own place, count as zero.
 *   leaf(d)  = SHA-256(00 || d)
 *   node     = SHA-256(01 || left || right)
 *   tree(n)  = node(tree(first k leaves), tree(the rest)), k the largest power
 *              of two below n
 * `bytes` must be at least sizeof(kiln_format_header_t). Writes 32 bytes.
 * Defined in bundle_root.cc; allocates nothing. */
#define KILN_FORMAT_LEAF_BYTES 65536u
void kiln_bundle_root(const void* data, size_t bytes, uint8_t* root);

/* Golden replay: a plan runs once with the m in the middle of its interval, on
 * inputs that follow from slot and element alone. */
static inline uint32_t kiln_golden_tokens(uint32_t m_min, uint32_t m_max) {
  return m_min + (m_max - m_min) / 2;
}

/* Element `index` of parameter slot `slot`, both from 0. A counter passed
 * through the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable
 * pseudorandom number generators", OOPSLA 2014). */
static inline uint64_t kiln_golden_random(uint32_t slot, uint64_t index) {
  uint64_t z = (index + 1) * UINT64_C(0x9E3779B97F4A7C15) +
               (slot + UINT64_C(1)) * UINT64_C(0xD1B54A32D192ED03);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KILN_RUNTIME_BUNDLE_FORMAT_H_ */
