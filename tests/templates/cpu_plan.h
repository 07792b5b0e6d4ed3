// Running a plan of a CPU template on the specialisations of its source that a
// test was compiled with.

#ifndef KILN_TESTS_TEMPLATES_CPU_PLAN_H_
#define KILN_TESTS_TEMPLATES_CPU_PLAN_H_

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"
#include "tests/templates/plan_buffers.h"

namespace kiln::testing {

// Runs every block of an x * y * z grid once, on two threads.
//   run: of a block, by its three indices.
template <typename Run>
void RunBlocks(uint64_t x, uint64_t y, uint64_t z, const Run& run) {
  const uint64_t count = x * y * z;
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    for (uint64_t b = next++; b < count; b = next++) {
      run(static_cast<uint32_t>(b % x), static_cast<uint32_t>(b / x % y),
          static_cast<uint32_t>(b / x / y));
    }
  };
  std::thread other(work);
  work();
  other.join();
}

// Launches the steps of a plan for m tokens, with an arena of `poison`. Returns
// the output, [m][width].
//   steps: by entry; each has args_bytes, and run(args, x, y, z).
//   params: the buffers of the parameter block; that of `output` is not read.
template <typename Steps>
std::vector<float> RunCpuPlan(const PlanBody& body, const Steps& steps,
                              std::span<const void* const> params,
                              size_t output, uint32_t m, size_t width,
                              uint8_t poison) {
  PoisonedArena arena(body.arena.bytes, poison);
  GuardedRows out(m, width);
  for (const Step& step : body.steps) {
    const auto& entry = steps.at(step.entry);
    const std::vector<uint32_t> offsets = ArgOffsets(step.args);
    std::vector<uint8_t> args(offsets.back() + 8);
    EXPECT_EQ(args.size(), entry.args_bytes) << step.entry;
    for (size_t i = 0; i < step.args.size(); ++i) {
      const Arg& arg = step.args[i];
      if (arg.kind == ArgKind::kTokens) {
        std::memcpy(args.data() + offsets[i], &m, sizeof m);
        continue;
      }
      if (arg.kind == ArgKind::kU64) {
        std::memcpy(args.data() + offsets[i], &arg.value, sizeof arg.value);
        continue;
      }
      const void* at = nullptr;
      if (arg.kind == ArgKind::kArena) {
        at = arena.data() + body.arena.slices[arg.value].offset;
      } else {
        at = arg.value == output ? out.data() : params[arg.value];
      }
      std::memcpy(args.data() + offsets[i], &at, sizeof at);
    }
    RunBlocks(step.grid[0].Evaluate(m), step.grid[1].Evaluate(m),
              step.grid[2].Evaluate(m),
              [&](uint32_t x, uint32_t y, uint32_t z) {
                entry.run(args.data(), x, y, z);
              });
  }
  return out.Take();
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_CPU_PLAN_H_
