/* kiln.h: the whole public interface of libkiln_runtime (C11).
 *
 * An engine opens one bundle at start-up, loads the section that fits its
 * device, and from then on launches only what the bundle declares:
 *
 *   kiln_bundle_open_file  ->  kiln_modules_load  ->  kiln_entry_find
 *                                                 ->  kiln_launch ...
 *
 * Conventions, once:
 *  - Fallible functions return kiln_status_t; values are frozen. `error` may be
 *    NULL; it is written only on failure, and nothing is allocated for it.
 *  - A function that fails has changed nothing: outputs keep their old values
 *    (kiln_launch may have enqueued some of a plan's steps before the driver
 *    refused one).
 *  - Structs with a `struct_size` member: the caller sets it to sizeof. Any
 *    size this library does not know is refused (KILN_STATUS_STRUCT_SIZE).
 *  - Handles are opaque values; never dereference one. Using a handle after it
 *    was closed, or one of another kind, is detected and refused
 *    (KILN_STATUS_CLOSED_HANDLE). Releasing NULL is allowed and does nothing.
 *  - Strings returned by getters are NUL-terminated printable ASCII, owned by
 *    the bundle, and live until the bundle is closed and every modules set
 *    loaded from it is unloaded.
 *  - Thread-safety: an open bundle and a loaded modules set are immutable; any
 *    number of threads may read them and launch. Closing or unloading must not
 *    race with another use of the same handle.
 *  - The library reads no environment variable, writes no log, compiles
 *    nothing, and creates no CUDA context or stream. It waits for no device,
 *    but in kiln_modules_selftest. */

#ifndef KILN_RUNTIME_KILN_H_
#define KILN_RUNTIME_KILN_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ABI of this header. A program must find its own major in the library:
 * see kiln_runtime_version. */
#define KILN_RUNTIME_ABI_MAJOR 1
#define KILN_RUNTIME_ABI_MINOR 2

#if defined(KILN_RUNTIME_BUILDING)
#define KILN_API __attribute__((visibility("default")))
#else
#define KILN_API
#endif

typedef int32_t kiln_status_t;

/* runtime/README.md says what to do about each. */
enum {
  KILN_STATUS_OK = 0,

  /* The call itself is wrong. */
  KILN_STATUS_INVALID_ARGUMENT = 1,
  KILN_STATUS_STRUCT_SIZE = 2,   /* struct_size of another header */
  KILN_STATUS_CLOSED_HANDLE = 3, /* closed, or never a handle of this kind */
  KILN_STATUS_OUT_OF_MEMORY = 4,
  KILN_STATUS_SYSTEM = 5, /* the operating system refused; driver_code: errno */
  KILN_STATUS_DRIVER = 6, /* the driver refused; driver_code: CUresult */

  /* Opening a bundle. */
  KILN_STATUS_FILE_NOT_FOUND = 10,
  KILN_STATUS_FILE_UNREADABLE = 11,     /* permission, kind of file, I/O */
  KILN_STATUS_BUNDLE_NOT_A_BUNDLE = 12, /* wrong magic */
  KILN_STATUS_BUNDLE_VERSION = 13,      /* format or ABI of another release */
  KILN_STATUS_BUNDLE_TRUNCATED = 14,
  KILN_STATUS_BUNDLE_DAMAGED = 15,   /* content does not hash to its root */
  KILN_STATUS_BUNDLE_MALFORMED = 16, /* structure breaks a rule of the format */
  KILN_STATUS_BUNDLE_LIMIT = 17,     /* a count or size above its maximum */
  KILN_STATUS_ROOT_MISMATCH = 18,    /* not the root the caller pinned */

  /* Preflight: kiln_modules_load. */
  KILN_STATUS_TARGET_MISSING = 20,   /* the bundle has no section for it */
  KILN_STATUS_TARGET_MISMATCH = 21,  /* this device or host is another target */
  KILN_STATUS_TARGET_AMBIGUOUS = 22, /* CPU and CUDA sections, none chosen */
  KILN_STATUS_NO_DRIVER = 23,        /* libcuda.so.1 absent or incomplete */
  KILN_STATUS_DRIVER_TOO_OLD = 24,
  KILN_STATUS_NO_CONTEXT = 25,
  KILN_STATUS_DEVICE_LIMIT = 26, /* threads, grid or shared memory */
  KILN_STATUS_PROGRAM_REFUSED = 27,
  KILN_STATUS_KERNEL_MISSING = 28,
  KILN_STATUS_PARAMETER_LAYOUT = 29, /* the binary's layout is not declared */
  KILN_STATUS_PREDICTED_PLANS = 30,
  KILN_STATUS_UNQUALIFIED_PLANS = 31,
  KILN_STATUS_SELFTEST_MISMATCH = 32, /* other results than when frozen */

  /* Dispatch: kiln_entry_find, kiln_launch. */
  KILN_STATUS_ENTRY_NOT_FOUND = 40,
  KILN_STATUS_ENTRY_FOREIGN = 41, /* the entry belongs to another modules set */
  KILN_STATUS_TOKENS_OUT_OF_RANGE = 42,
  KILN_STATUS_PARAMS_MISSING = 43,
  KILN_STATUS_PARAMS_SHORT = 44,
  KILN_STATUS_PARAM_NULL = 45, /* a slot of the parameter block is null */
  KILN_STATUS_ARENA_MISSING = 46,
  KILN_STATUS_ARENA_SHORT = 47,
  KILN_STATUS_ARENA_MISALIGNED = 48,
  KILN_STATUS_STREAM_NOT_ALLOWED = 49, /* a stream was given on the CPU */
  KILN_STATUS_PARAM_MISALIGNED = 50    /* a slot points between its elements */
};

/* Filled on failure. `message` is NUL-terminated, one line, cut if too long. */
typedef struct kiln_error_t {
  kiln_status_t code;
  int32_t driver_code; /* CUresult or errno where the status says so, else 0 */
  char message[504];
} kiln_error_t;

/* "KILN_STATUS_OK" and so on; "KILN_STATUS_UNKNOWN" for other values. */
KILN_API const char* kiln_status_name(kiln_status_t status);

/* ABI of the library that was loaded. Either pointer may be NULL. */
KILN_API void kiln_runtime_version(uint32_t* major, uint32_t* minor);

typedef struct kiln_bundle_t kiln_bundle_t;
typedef struct kiln_modules_t kiln_modules_t;
/* One plan of a loaded modules set: an entry name at an interval of m. */
typedef struct kiln_entry_t kiln_entry_t;

/* cuda.h declares the same types as CUcontext and CUstream. */
struct CUctx_st;
struct CUstream_st;
struct kiln_driver_t; /* runtime/driver.h; for tests */

#define KILN_ROOT_BYTES 32

/* ------------------------------------------------------------------------- */
/* Bundles                                                                    */

typedef struct kiln_open_options_t {
  uint32_t struct_size;
  uint32_t flags; /* must be 0 */
  /* 32 bytes that the bundle's root must equal, or NULL to accept any root. */
  const uint8_t* expected_root;
} kiln_open_options_t;

/* Reads the whole regular file at `path` (symbolic links are followed) into
 * private memory and verifies it: magic, version, root over every byte,
 * structure, coverage of every entry. Later changes of the file do not matter.
 * Nothing in the file is executed. `options` may be NULL. */
KILN_API kiln_status_t kiln_bundle_open_file(const char* path,
                                             const kiln_open_options_t* options,
                                             kiln_bundle_t** bundle,
                                             kiln_error_t* error);

/* The same for `bytes` bytes in memory. They are copied; the caller may free
 * or change them afterwards. */
KILN_API kiln_status_t kiln_bundle_open_memory(
    const void* data, size_t bytes, const kiln_open_options_t* options,
    kiln_bundle_t** bundle, kiln_error_t* error);

/* Modules loaded from the bundle stay valid: they keep its memory. */
KILN_API kiln_status_t kiln_bundle_close(kiln_bundle_t* bundle,
                                         kiln_error_t* error);

/* ------------------------------------------------------------------------- */
/* Looking into a bundle. Indices are 0-based; one out of range is
 * KILN_STATUS_INVALID_ARGUMENT. Everything comes in the file's order: sections
 * by target, entries by name, plans by interval, programs by build digest. */

enum { KILN_BACKEND_CUDA = 1, KILN_BACKEND_CPU = 2 };

/* Flags of bundles, sections and plans. */
enum {
  KILN_CONTAINS_PREDICTED = 1,  /* a plan that was never run */
  KILN_CONTAINS_UNQUALIFIED = 2 /* a template without a qualification */
};

typedef struct kiln_bundle_info_t {
  uint32_t struct_size;
  uint32_t format_version;
  uint32_t flags;
  uint32_t section_count;
  uint64_t bytes; /* of the file */
  uint8_t root[KILN_ROOT_BYTES];
} kiln_bundle_info_t;

KILN_API kiln_status_t kiln_bundle_info(const kiln_bundle_t* bundle,
                                        kiln_bundle_info_t* info,
                                        kiln_error_t* error);

typedef struct kiln_section_info_t {
  uint32_t struct_size;
  uint32_t backend;
  uint32_t level; /* CUDA: 10 * major + minor; CPU: x86-64 psABI level */
  uint32_t arch_specific;      /* 1 for sm_90a and the like */
  uint32_t driver_version_min; /* as cuDriverGetVersion counts; 0 on the CPU */
  uint32_t flags;
  uint32_t entry_count;
  uint32_t program_count;
  const char* target; /* "sm_90a", "cpu-x86-64-v3" */
} kiln_section_info_t;

KILN_API kiln_status_t kiln_bundle_section(const kiln_bundle_t* bundle,
                                           uint32_t section,
                                           kiln_section_info_t* info,
                                           kiln_error_t* error);

typedef struct kiln_entry_info_t {
  uint32_t struct_size;
  uint32_t capacity; /* the plans cover 1..capacity */
  uint32_t plan_count;
  uint32_t attribute_count;
  const char* name;     /* the request's name */
  const char* op;       /* "fused_moe" */
  const char* geometry; /* one line for people */
} kiln_entry_info_t;

KILN_API kiln_status_t kiln_bundle_entry(const kiln_bundle_t* bundle,
                                         uint32_t section, uint32_t entry,
                                         kiln_entry_info_t* info,
                                         kiln_error_t* error);

/* The request's geometry, field by field, for programs: "hidden" = "2048". */
KILN_API kiln_status_t kiln_bundle_attribute(const kiln_bundle_t* bundle,
                                             uint32_t section, uint32_t entry,
                                             uint32_t attribute,
                                             const char** name,
                                             const char** value,
                                             kiln_error_t* error);

typedef struct kiln_plan_info_t {
  uint32_t struct_size;
  uint32_t flags; /* KILN_CONTAINS_* */
  uint32_t m_min; /* the plan serves m_min <= m <= m_max */
  uint32_t m_max;
  uint64_t arena_bytes;
  uint32_t param_count;
  uint32_t slice_count;
  uint32_t step_count;
  uint32_t cpu_threads;   /* most threads a step uses; 0 on the GPU */
  uint32_t deterministic; /* 1: repeats are bit-identical */
  uint32_t template_version;
  const char* template_name; /* "fused_moe.cuda" */
  const char* label;         /* "fused_moe.cuda{tokens_tile=8,warps=4}" */
  const char* numerics_class;
  double tolerance; /* relative Frobenius error per row that was allowed */
  /* Evidence of the race; zero when predicted. */
  double median_ns;
  double default_median_ns;
  double noise_floor; /* fraction */
  double worst_error; /* relative Frobenius error against the oracle */
  uint32_t samples;
  uint32_t candidates;
  /* Since ABI 1.2; the struct of 1.0, which ends before it, is taken too.
   * 1, CUDA only: each step behind the first may start before the one in front
   * of it has ended (programmatic stream serialization). */
  uint32_t overlapped;
  uint32_t reserved; /* 0 */
} kiln_plan_info_t;

KILN_API kiln_status_t kiln_bundle_plan(const kiln_bundle_t* bundle,
                                        uint32_t section, uint32_t entry,
                                        uint32_t plan, kiln_plan_info_t* info,
                                        kiln_error_t* error);

/* One 8-byte slot of the caller's parameter block: a pointer. */
typedef struct kiln_param_info_t {
  uint32_t struct_size;
  uint32_t output;   /* 1: the plan writes it */
  uint32_t offset;   /* bytes into the block: 8 * index */
  uint32_t bytes;    /* 8 */
  const char* name;  /* "topk_ids" */
  const char* dtype; /* "i32" */
  const char* shape; /* "[m, top_k]" */
} kiln_param_info_t;

KILN_API kiln_status_t kiln_bundle_param(const kiln_bundle_t* bundle,
                                         uint32_t section, uint32_t entry,
                                         uint32_t plan, uint32_t param,
                                         kiln_param_info_t* info,
                                         kiln_error_t* error);

typedef struct kiln_slice_info_t {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  const char* name;
  uint64_t offset; /* bytes from the arena base */
  uint64_t bytes;
} kiln_slice_info_t;

/* What golden replay puts into the buffer behind a slot; bundle_format.md,
 * "Golden replay". */
enum {
  KILN_FILL_NONE = 0,   /* an output, or not described */
  KILN_FILL_WORDS = 1,  /* (random & a) | b */
  KILN_FILL_INDICES = 2 /* random mod a */
};

/* The buffer has bytes + bytes_per_token * m bytes. */
typedef struct kiln_buffer_info_t {
  uint32_t struct_size;
  uint32_t fill;
  uint32_t element_bytes; /* 0: the bundle does not describe it */
  uint32_t reserved;      /* 0 */
  uint64_t bytes;
  uint64_t bytes_per_token;
  uint64_t a;
  uint64_t b;
} kiln_buffer_info_t;

KILN_API kiln_status_t kiln_bundle_buffer(const kiln_bundle_t* bundle,
                                          uint32_t section, uint32_t entry,
                                          uint32_t plan, uint32_t param,
                                          kiln_buffer_info_t* info,
                                          kiln_error_t* error);

/* 32 bytes: what golden replay of the plan must give; all zero if the bundle
 * has no digest for it. */
KILN_API kiln_status_t kiln_bundle_golden(const kiln_bundle_t* bundle,
                                          uint32_t section, uint32_t entry,
                                          uint32_t plan, uint8_t* digest,
                                          kiln_error_t* error);

KILN_API kiln_status_t kiln_bundle_slice(const kiln_bundle_t* bundle,
                                         uint32_t section, uint32_t entry,
                                         uint32_t plan, uint32_t slice,
                                         kiln_slice_info_t* info,
                                         kiln_error_t* error);

/* One grid dimension for live m:
 *   min(ceil((mul[0] * m + add[0]) / div[0]),
 *       ceil((mul[1] * m + add[1]) / div[1])), in 64-bit arithmetic.
 * A step with a dimension of 0 is skipped. */
typedef struct kiln_launch_dim_t {
  uint32_t mul[2];
  uint32_t add[2];
  uint32_t div[2];
} kiln_launch_dim_t;

typedef struct kiln_step_info_t {
  uint32_t struct_size;
  uint32_t program; /* index for kiln_bundle_program */
  uint32_t kernel;  /* index for kiln_bundle_kernel */
  uint32_t arg_count;
  const char* label;       /* "fc1" */
  const char* kernel_name; /* symbol in the binary */
  kiln_launch_dim_t grid[3];
  uint32_t block[3];
  uint32_t dynamic_shared_bytes;
} kiln_step_info_t;

KILN_API kiln_status_t kiln_bundle_step(const kiln_bundle_t* bundle,
                                        uint32_t section, uint32_t entry,
                                        uint32_t plan, uint32_t step,
                                        kiln_step_info_t* info,
                                        kiln_error_t* error);

enum {
  KILN_ARG_PARAM = 1,  /* 8 bytes: slot `value` of the parameter block */
  KILN_ARG_ARENA = 2,  /* 8 bytes: address of arena slice `value` */
  KILN_ARG_TOKENS = 3, /* 4 bytes: live m */
  KILN_ARG_U32 = 4,    /* 4 bytes: value */
  KILN_ARG_U64 = 5     /* 8 bytes: value */
};

typedef struct kiln_arg_info_t {
  uint32_t struct_size;
  uint32_t kind;
  uint32_t offset; /* bytes into the kernel's parameter block */
  uint32_t bytes;
  uint64_t value;
} kiln_arg_info_t;

KILN_API kiln_status_t kiln_bundle_arg(const kiln_bundle_t* bundle,
                                       uint32_t section, uint32_t entry,
                                       uint32_t plan, uint32_t step,
                                       uint32_t arg, kiln_arg_info_t* info,
                                       kiln_error_t* error);

typedef struct kiln_program_info_t {
  uint32_t struct_size;
  uint32_t kernel_count;
  uint8_t build_digest[32];
  uint8_t binary_digest[32];    /* SHA-256 of the binary */
  uint8_t toolchain_digest[32]; /* SHA-256 of the compiler library */
  uint64_t file_offset;         /* a multiple of 64 */
  uint64_t bytes;
  const void* data;      /* the binary, owned by the bundle */
  const char* toolchain; /* "nvrtc 13.0.88" */
} kiln_program_info_t;

KILN_API kiln_status_t kiln_bundle_program(const kiln_bundle_t* bundle,
                                           uint32_t section, uint32_t program,
                                           kiln_program_info_t* info,
                                           kiln_error_t* error);

typedef struct kiln_kernel_info_t {
  uint32_t struct_size;
  uint32_t param_count;
  uint32_t param_bytes;
  uint32_t registers; /* per thread; 0 on the CPU */
  uint32_t static_shared_bytes;
  uint32_t local_bytes; /* per thread */
  uint32_t max_threads; /* per block; 0 = not stated */
  uint32_t reserved;    /* 0 */
  const char* name;
} kiln_kernel_info_t;

KILN_API kiln_status_t kiln_bundle_kernel(const kiln_bundle_t* bundle,
                                          uint32_t section, uint32_t program,
                                          uint32_t kernel,
                                          kiln_kernel_info_t* info,
                                          kiln_error_t* error);

/* Offset and bytes of a kernel parameter as the binary declares it. */
KILN_API kiln_status_t kiln_bundle_kernel_param(
    const kiln_bundle_t* bundle, uint32_t section, uint32_t program,
    uint32_t kernel, uint32_t param, uint32_t* offset, uint32_t* bytes,
    kiln_error_t* error);

/* ------------------------------------------------------------------------- */
/* Loading                                                                    */

/* Flags of kiln_load_options_t: consent to plans nobody has run, and to plans
 * of templates without a recorded qualification. */
enum { KILN_LOAD_ALLOW_PREDICTED = 1, KILN_LOAD_ALLOW_UNQUALIFIED = 2 };

typedef struct kiln_load_options_t {
  uint32_t struct_size;
  uint32_t flags;
  /* The section to load, spelt exactly as in the bundle ("sm_90a"). Or "cuda",
   * "cpu" or NULL for the exact target of the device or host:
   *   CUDA: compute capability equal to the device's, the architecture-specific
   *         variant (sm_90a) preferred over the plain one (sm_90);
   *   CPU:  the highest x86-64 level that the host supports.
   * NULL with sections of both backends: CUDA if `context` is set, otherwise
   * KILN_STATUS_TARGET_AMBIGUOUS. */
  const char* target;
  /* CUDA: the context to load into; NULL = the calling thread's current one.
   * Whichever context is current stays current. Must be NULL on the CPU. */
  struct CUctx_st* context;
  /* CPU: threads that run blocks, the launching thread included; 0 = as many
   * as the calling thread's affinity mask allows. Ignored on CUDA. */
  uint32_t cpu_threads;
  uint32_t reserved; /* must be 0 */
  /* NULL = libcuda.so.1, opened on first use and kept. Tests pass a fake; it
   * must outlive the modules. */
  const struct kiln_driver_t* driver;
} kiln_load_options_t;

/* Loads every program of one section and checks everything that can be checked
 * before serving: target, driver version, device limits, every kernel present
 * with its parameters where the bundle declares them. All or nothing.
 *
 * CPU: a section of level L loads on hosts of level L or higher (psABI levels
 * are cumulative); its binaries are loaded from sealed anonymous memory, and a
 * pool of cpu_threads - 1 threads is created.
 * `options` may be NULL. Allocates; not for the serving path. */
KILN_API kiln_status_t kiln_modules_load(const kiln_bundle_t* bundle,
                                         const kiln_load_options_t* options,
                                         kiln_modules_t** modules,
                                         kiln_error_t* error);

/* The caller makes sure that no launch is running or enqueued and that no
 * captured graph will be replayed. The handle is gone even when the driver
 * reports an error here. */
KILN_API kiln_status_t kiln_modules_unload(kiln_modules_t* modules,
                                           kiln_error_t* error);

typedef struct kiln_modules_info_t {
  uint32_t struct_size;
  uint32_t backend;
  uint32_t section; /* index in the bundle */
  uint32_t entry_count;
  uint32_t program_count;
  uint32_t cpu_threads; /* in the pool, the launching thread included; or 0 */
  uint8_t root[KILN_ROOT_BYTES];
  const char* target;
} kiln_modules_info_t;

KILN_API kiln_status_t kiln_modules_info(const kiln_modules_t* modules,
                                         kiln_modules_info_t* info,
                                         kiln_error_t* error);

/* ------------------------------------------------------------------------- */
/* Golden replay: does this device compute what the device of freeze computed?
 */

enum {
  KILN_SELFTEST_PASSED = 1,
  KILN_SELFTEST_FAILED = 2,
  KILN_SELFTEST_COMPUTED = 3,          /* no digest to compare with; it ran */
  KILN_SELFTEST_NOT_DETERMINISTIC = 4, /* skipped: repeats may differ */
  KILN_SELFTEST_NO_DIGEST = 5 /* skipped: frozen where the device was not */
};

/* What became of one plan. */
typedef struct kiln_selftest_plan_t {
  uint32_t outcome;
  uint32_t entry; /* indices for kiln_bundle_plan */
  uint32_t plan;
  uint32_t m;                        /* tokens it ran with; 0: it did not run */
  uint8_t expected[KILN_ROOT_BYTES]; /* all zero: none in the bundle */
  uint8_t found[KILN_ROOT_BYTES];    /* all zero: it did not run */
} kiln_selftest_plan_t;

/* Run the plans without a digest too, if they were measured, are deterministic
 * and the bundle describes their buffers. */
enum { KILN_SELFTEST_COMPUTE = 1 };

typedef struct kiln_selftest_options_t {
  uint32_t struct_size;
  uint32_t flags;
  /* Called after each plan, in the file's order, on the calling thread; or
   * NULL. It must not use the modules. */
  void (*report)(void* user, const kiln_selftest_plan_t* plan);
  void* user;
} kiln_selftest_options_t;

typedef struct kiln_selftest_result_t {
  uint32_t struct_size;
  uint32_t passed;
  uint32_t computed;
  uint32_t not_deterministic;
  uint32_t no_digest;
} kiln_selftest_result_t;

/* Runs each plan once, with the m in the middle of its interval, on seeded
 * inputs that depend on the bundle alone, and compares a digest of its outputs
 * with the one that freeze computed. Other plans are counted as skipped: see
 * the result. `options` and `result` may be NULL.
 * On a mismatch the rest still runs; the first one is told
 * (KILN_STATUS_SELFTEST_MISMATCH).
 *
 * For start-up, before serving: allocates every buffer of the largest entry,
 * weights included, on the device, launches on the context's default stream
 * and waits for it; OUT_OF_MEMORY or DRIVER when that does not fit. Nothing
 * stays allocated. */
KILN_API kiln_status_t kiln_modules_selftest(
    const kiln_modules_t* modules, const kiln_selftest_options_t* options,
    kiln_selftest_result_t* result, kiln_error_t* error);

/* ------------------------------------------------------------------------- */
/* Launching. None of these allocates. On CUDA none locks or makes a system
 * call of its own; kiln_launch may be called while its stream is capturing.  */

/* The plan of entry `name` whose interval contains `m`; m = 0 gives the plan
 * that serves m = 1. Outside 1..capacity is KILN_STATUS_TOKENS_OUT_OF_RANGE,
 * never a neighbour. The result is valid until the modules are unloaded and
 * may be kept. */
KILN_API kiln_status_t kiln_entry_find(const kiln_modules_t* modules,
                                       const char* name, uint64_t m,
                                       const kiln_entry_t** entry,
                                       kiln_error_t* error);

/* Scratch that kiln_launch needs for any m of the entry's interval. An arena
 * may serve several entries if it is large enough for each and they do not run
 * at the same time; its contents never matter between launches. */
KILN_API kiln_status_t kiln_entry_arena_size(const kiln_entry_t* entry,
                                             uint64_t* bytes,
                                             uint64_t* alignment,
                                             kiln_error_t* error);

/* Slots in the parameter block, and its size in bytes (8 * count). Either
 * pointer may be NULL. */
KILN_API kiln_status_t kiln_entry_params(const kiln_entry_t* entry,
                                         uint32_t* count, uint32_t* bytes,
                                         kiln_error_t* error);

KILN_API kiln_status_t kiln_entry_param(const kiln_entry_t* entry,
                                        uint32_t index, kiln_param_info_t* info,
                                        kiln_error_t* error);

/* The plan behind the entry. */
KILN_API kiln_status_t kiln_entry_plan(const kiln_entry_t* entry,
                                       kiln_plan_info_t* info,
                                       kiln_error_t* error);

/* Enqueues the plan's steps for `m` live tokens.
 *   m            0 does nothing and looks at nothing else; otherwise it must
 *                lie in the entry's interval.
 *   params       parameter block: one 8-byte pointer per slot, none null, each
 *                a multiple of 16, or of what its buffer's sizes are multiples
 *                of if that is less (8 for two i32 ids per token). Read before
 *                the call returns.
 *   params_bytes at least 8 * slots.
 *   arena        256-byte aligned scratch on the device (CPU: in memory) that
 *                stays untouched by others until the launch has completed; may
 *                be NULL only if the plan needs none.
 *   stream       CUDA: a stream of the modules' context, NULL = its default
 *                stream; the call returns when the steps are enqueued. CPU:
 *                must be NULL; the call returns when the steps are done, and
 *                launches on one modules set run one after the other.
 * The modules' context need not be current. Buffers behind the pointers must
 * have the declared shapes; that cannot be checked here. */
KILN_API kiln_status_t kiln_launch(const kiln_modules_t* modules,
                                   const kiln_entry_t* entry, uint64_t m,
                                   const void* params, size_t params_bytes,
                                   void* arena, size_t arena_bytes,
                                   struct CUstream_st* stream,
                                   kiln_error_t* error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KILN_RUNTIME_KILN_H_ */
