#include "tests/support/scale_bundle.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/support/golden.h"
#include "tests/support/tiny_bundle.h"

namespace kiln::testing {
namespace {

Kernel MakeKernel(const std::string& name, std::vector<KernelParam> params) {
  Kernel kernel;
  kernel.entry = name;
  kernel.params = std::move(params);
  kernel.param_bytes = kernel.params.back().offset + kernel.params.back().bytes;
  return kernel;
}

}  // namespace

BundleSection ScaleSection(int copies, bool distinct) {
  const Target target{
      .backend = Backend::kCuda, .level = 90, .arch_specific = true};
  const std::string binary =
      ReadTestFile(SourcePath("tests/data/runtime/scale_sm_90a.cubin"));
  const std::vector<Kernel> kernels = {
      MakeKernel("add", {{0, 4}, {8, 8}, {16, 8}, {24, 4}}),
      MakeKernel("scale", {{0, 8}, {8, 8}, {16, 4}, {20, 4}, {24, 8}})};
  BundleSection section;
  section.target = target;
  section.driver_version_min = 12040;
  Plan plan;
  plan.geometry = TinyGeometry();
  plan.target = target;
  plan.interval = {1, kScaleCapacity};
  plan.body.template_name = "scale.cuda";
  plan.body.params = {
      {.name = "x", .dtype = "f32", .shape = "[m, n]"},
      {.name = "out", .dtype = "f32", .shape = "[m, n]", .output = true}};
  plan.body.arena.Add("unused", 256);
  const uint32_t scratch = plan.body.arena.Add(
      "scratch", sizeof(float) * kScaleWidth * kScaleCapacity);
  Step scale;
  scale.label = "scale";
  scale.entry = "scale";
  scale.grid = {LaunchDim::Of({.mul = 1, .add = 0, .div = 1}),
                LaunchDim::Constant(1), LaunchDim::Constant(1)};
  scale.block = {128, 1, 1};
  scale.dynamic_shared_bytes = 65536;
  scale.args = {Arg::Param(0), Arg::Arena(scratch), Arg::Tokens(),
                Arg::U32(kScaleWidth), Arg::U64(5)};
  Step add;
  add.label = "add";
  add.entry = "add";
  add.grid = {LaunchDim::Of({.mul = kScaleWidth, .add = 0, .div = 64}),
              LaunchDim::Constant(1), LaunchDim::Constant(1)};
  add.block = {64, 1, 1};
  add.args = {Arg::Tokens(), Arg::Arena(scratch), Arg::Param(1),
              Arg::U32(kScaleWidth)};
  plan.body.steps = {scale, add};
  plan.evidence.state = PlanState::kMeasured;
  for (int i = 0; i < copies; ++i) {
    std::string image = binary;
    if (distinct) {
      // Kernel add's 1.0f, which stands in the cubin once.
      const size_t at = image.find(std::string("\0\0\x80\x3f", 4));
      EXPECT_NE(at, std::string::npos);
      image[at] = static_cast<char>(i & 255);
      image[at + 1] = static_cast<char>(i >> 8);
    }
    section.programs.push_back(
        FakeProgram("scale " + std::to_string(i), target, image, kernels));
    Plan copy = plan;
    copy.programs = {section.programs.back()->key.digest};
    section.entries.push_back(
        {.name = "scale" + std::to_string(1000 + i),
         .geometry = plan.geometry,
         .plans = {copy},
         .buffers = {{.kind = BufferFill::Kind::kWords,
                      .element_bytes = 4,
                      .bytes_per_token = sizeof(float) * kScaleWidth,
                      .a = 0x807fffff,
                      .b = 0x3f800000},
                     {.kind = BufferFill::Kind::kNone,
                      .element_bytes = 4,
                      .bytes_per_token = sizeof(float) * kScaleWidth}}});
  }
  return section;
}

}  // namespace kiln::testing
