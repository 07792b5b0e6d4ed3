// Runs a plan of a CUDA template on the host, with entries that were compiled
// for gpu_emulator.h.

#ifndef KILN_TESTS_TEMPLATES_GPU_PLAN_H_
#define KILN_TESTS_TEMPLATES_GPU_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "gtest/gtest.h"
#include "tests/templates/gpu_emulator.h"
#include "tests/templates/plan_buffers.h"

namespace kiln::testing::gpu {

// Launches all steps of `body` for `tokens` tokens in an arena of `poison` and
// returns the output, [tokens][width].
//   slots: of the parameter block; that of the output, `out_slot`, is not read
inline std::vector<float> RunPlan(
    const PlanBody& body, const std::map<std::string, Entry>& entries,
    uint32_t tokens, std::span<const void* const> slots, uint64_t out_slot,
    size_t width, uint8_t poison, Order order = Order::kForward) {
  PoisonedArena arena(body.arena.bytes, poison);
  GuardedRows out(tokens, width);
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
          args.push_back(reinterpret_cast<uintptr_t>(arena.data()) +
                         body.arena.slices[arg.value].offset);
          break;
        case ArgKind::kParam:
          args.push_back(arg.value == out_slot
                             ? reinterpret_cast<uintptr_t>(out.data())
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
  return out.Take();
}

}  // namespace kiln::testing::gpu

#endif  // KILN_TESTS_TEMPLATES_GPU_PLAN_H_
