// KILN_SANITIZED: 1 in a build with AddressSanitizer or ThreadSanitizer, which
// need address space and make system calls of their own; else 0.

#ifndef KILN_COMPILER_BASE_SANITIZED_H_
#define KILN_COMPILER_BASE_SANITIZED_H_

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KILN_SANITIZED 1  // g++
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define KILN_SANITIZED 1  // clang
#endif
#endif
#ifndef KILN_SANITIZED
#define KILN_SANITIZED 0
#endif

#endif  // KILN_COMPILER_BASE_SANITIZED_H_
