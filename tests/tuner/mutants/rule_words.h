// Words that the rules of both kinds of kernels use.

#ifndef KILN_TESTS_TUNER_MUTANTS_RULE_WORDS_H_
#define KILN_TESTS_TUNER_MUTANTS_RULE_WORDS_H_

namespace kiln::testing {

// Sources that the CPU and CUDA kernels share.
inline constexpr char kTrellis[] = "device/trellis.h";
inline constexpr char kHadamard[] = "device/hadamard.h";
inline constexpr char kActivation[] = "device/activation.h";

// Kinds of faults: a rule's name, and a row of the table.
inline constexpr char kBound[] = "off by one in a bound";
inline constexpr char kStart[] = "off by one at a start";
inline constexpr char kIndex[] = "off by one in an index";
inline constexpr char kTail[] = "skipped tail";
inline constexpr char kStale[] = "stale arena";
inline constexpr char kReadOut[] = "out-of-bounds read";
inline constexpr char kWriteOut[] = "out-of-bounds write";
inline constexpr char kRounding[] = "wrong rounding";
inline constexpr char kSwap[] = "gate and up swapped";
inline constexpr char kDropped[] = "dropped route";
inline constexpr char kStride[] = "wrong stride";
inline constexpr char kRace[] = "race";
inline constexpr char kSign[] = "flipped sign";
inline constexpr char kScale[] = "wrong scale vector";
inline constexpr char kRotation[] = "wrong Hadamard";
inline constexpr char kCodebook[] = "wrong codebook";
inline constexpr char kExpert[] = "wrong expert";
inline constexpr char kOrder[] = "wrong order";
inline constexpr char kNan[] = "swallowed NaN";
inline constexpr char kInput[] = "written input";
inline constexpr char kActivate[] = "wrong activation";
inline constexpr char kBarrier[] = "missing barrier";

}  // namespace kiln::testing

#endif  // KILN_TESTS_TUNER_MUTANTS_RULE_WORDS_H_
