// Runs a plan of a CUDA template on the host, with entries that were compiled
// for gpu_emulator.h.

#ifndef KILN_TESTS_TEMPLATES_GPU_PLAN_H_
#define KILN_TESTS_TEMPLATES_GPU_PLAN_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "gtest/gtest.h"
#include "tests/templates/gpu_emulator.h"

namespace kiln::testing::gpu {

// Launches all steps of `body` for `tokens` tokens in an arena of `poison` and
// returns the output, [tokens][width].
//   slots: of the parameter block; that of the output, `out_slot`, is not read
inline std::vector<float> RunPlan(
    const PlanBody& body, const std::map<std::string, Entry>& entries,
    uint32_t tokens, std::span<const void* const> slots, uint64_t out_slot,
    size_t width, uint8_t poison, Order order = Order::kForward) {
  std::vector<uint8_t> arena(body.arena.bytes + 256, poison);
  uint8_t* base = arena.data();
  base += 256 - reinterpret_cast<uintptr_t>(base) % 256;
  // The output with a guard row on both sides.
  std::vector<float> out((tokens + 2) * width, NAN);
  for (const Step& step : body.steps) {
    const Entry& entry = entries.at(step.entry);
    EXPECT_EQ(step.args.size(), entry.args) << step.entry;
    std::vector<uint64_t> args;
    for (const Arg& arg : step.args) {
      switch (arg.kind) {
        case ArgKind::kTokens:
          args.push_back(tokens);
          break;
        case ArgKind::kArena:
          args.push_back(reinterpret_cast<uintptr_t>(base) +
                         body.arena.slices[arg.value].offset);
          break;
        case ArgKind::kParam:
          args.push_back(arg.value == out_slot
                             ? reinterpret_cast<uintptr_t>(out.data() + width)
                             : reinterpret_cast<uintptr_t>(slots[arg.value]));
          break;
        default:
          args.push_back(arg.value);
      }
    }
    Launch launch;
    launch.grid = {static_cast<uint32_t>(step.grid[0].Evaluate(tokens)),
                   static_cast<uint32_t>(step.grid[1].Evaluate(tokens)), 1};
    launch.threads = step.block[0];
    launch.shared_bytes = step.dynamic_shared_bytes;
    launch.order = order;
    Run(launch, [&] { entry.call(args); });
  }
  for (size_t i = 0; i < width; ++i) {
    EXPECT_TRUE(std::isnan(out[i]));
    EXPECT_TRUE(std::isnan(out[out.size() - 1 - i]));
  }
  return std::vector<float>(out.begin() + static_cast<ptrdiff_t>(width),
                            out.end() - static_cast<ptrdiff_t>(width));
}

}  // namespace kiln::testing::gpu

#endif  // KILN_TESTS_TEMPLATES_GPU_PLAN_H_
