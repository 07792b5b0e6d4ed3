/* SHA-256 (FIPS 180-4), the one digest of Kiln. Plain C interface without
 * allocation, so that the runtime, the bundle writer and the keys share it.
 * Uses the SHA extensions of x86-64 where the processor has them. */

#ifndef KILN_RUNTIME_SHA256_H_
#define KILN_RUNTIME_SHA256_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KILN_SHA256_BYTES 32

typedef struct kiln_sha256_t {
  uint32_t state[8];
  uint64_t bytes; /* total hashed so far */
  uint8_t block[64];
} kiln_sha256_t;

void kiln_sha256_init(kiln_sha256_t* hash);
void kiln_sha256_update(kiln_sha256_t* hash, const void* data, size_t bytes);
/* Two updates of `bytes` bytes each, faster than one after the other where the
 * processor has SHA extensions and both have had as many bytes so far. */
void kiln_sha256_update_pair(kiln_sha256_t* first, const void* first_data,
                             kiln_sha256_t* second, const void* second_data,
                             size_t bytes);
/* Writes 32 bytes; `hash` must be initialised again before further use. */
void kiln_sha256_final(kiln_sha256_t* hash, uint8_t* digest);

/* One call for a contiguous message. */
void kiln_sha256(const void* data, size_t bytes, uint8_t* digest);

/* For tests: 0 forces the portable code, 1 restores the choice by CPUID.
 * Not thread-safe. */
void kiln_sha256_allow_extensions(int allow);

#ifdef __cplusplus
}
#endif

#endif /* KILN_RUNTIME_SHA256_H_ */
