/* SHA-256 (FIPS 180-4), the one digest of Kiln. Plain C interface without
 * allocation, so that the runtime, the bundle writer and the keys share it.
 * Uses the SHA extensions and AVX-512 of x86-64 where the processor has them.
 */

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
/* Writes 32 bytes; `hash` must be initialised again before further use. */
void kiln_sha256_final(kiln_sha256_t* hash, uint8_t* digest);

/* One call for a contiguous message. */
void kiln_sha256(const void* data, size_t bytes, uint8_t* digest);

/* `count` messages of 64 + `bytes` bytes: a head at heads[i], then the bytes at
 * tails[i]. Side by side, as far as the processor can: two in the SHA
 * extensions, sixteen in AVX-512. Writes `count` digests of 32 bytes. */
void kiln_sha256_many(const uint8_t (*heads)[64], const void* const* tails,
                      size_t bytes, size_t count, uint8_t* digests);

/* For tests: 0 forces the portable code, 1 restores the choice by CPUID, 2
 * is that without AVX-512. Not thread-safe. */
void kiln_sha256_allow_extensions(int allow);

#ifdef __cplusplus
}
#endif

#endif /* KILN_RUNTIME_SHA256_H_ */
