// A valid plan in which every field has a value of its own, for tests that
// change one field at a time.

#ifndef KILN_TESTS_COMPILER_SPEC_SAMPLE_PLAN_H_
#define KILN_TESTS_COMPILER_SPEC_SAMPLE_PLAN_H_

#include "compiler/spec/plan.h"

namespace kiln::testing {

inline RequestGeometry SampleGeometry() {
  RequestGeometry geometry;
  geometry.hidden = 2048;
  geometry.intermediate = 768;
  geometry.experts = 128;
  geometry.top_k = 8;
  geometry.weights.codebook = Codebook::kMcg;
  geometry.weights.bits = {.gate = 3, .up = 4, .down = 5};
  return geometry;
}

inline RequestGeometry SampleLinear() {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.linear = {
      .in_features = 4096, .out_features = 1024, .bits = 5, .bias = true};
  geometry.io_dtype = DType::kF16;
  geometry.weights.codebook = Codebook::kMul1;
  geometry.deterministic = true;
  return geometry;
}

// The same over TrellisMX weights.
inline RequestGeometry SampleMxGeometry() {
  RequestGeometry geometry = SampleGeometry();
  geometry.weights.format = WeightFormat::kTrellisMx;
  geometry.weights.bits = {.gate = 3, .up = 3, .down = 3};
  geometry.recipe = Recipe::kW4A8;
  geometry.mx = {.limit = "7.5", .smallm_max_tokens = 8};
  return geometry;
}

// The same with the direct arm instead of the small-M arm.
inline RequestGeometry SampleMxDirectGeometry() {
  RequestGeometry geometry = SampleMxGeometry();
  geometry.mx = {
      .limit = "7.5", .direct_max_tokens = 8, .remainder = Remainder::kRp2};
  return geometry;
}

// The same without a boundary.
inline RequestGeometry SampleMxIdentityGeometry() {
  RequestGeometry geometry = SampleMxDirectGeometry();
  geometry.mx.boundary = MxBoundary::kIdentity;
  return geometry;
}

// The same over QSRT weights.
inline RequestGeometry SampleQsrtGeometry() {
  RequestGeometry geometry;
  geometry.hidden = 3584;
  geometry.intermediate = 256;
  geometry.experts = 896;
  geometry.top_k = 16;
  geometry.activation = Activation::kSitu;
  geometry.weights.format = WeightFormat::kQsrt;
  geometry.weights.shared_scales = true;
  geometry.recipe = Recipe::kW4A8;
  geometry.qsrt = {.pairs = PairKinds::kP24P33, .decode_max_tokens = 8};
  return geometry;
}

inline Plan SamplePlan() {
  Plan plan;
  plan.geometry = SampleGeometry();
  plan.target = {.backend = Backend::kCuda, .level = 90, .arch_specific = true};
  plan.interval = {.m_min = 3, .m_max = 17};
  plan.programs = {Sha256("first"), Sha256("second")};
  plan.evidence = {.state = PlanState::kMeasured,
                   .median_ns = 12345.0625,
                   .default_median_ns = 23456.1,
                   .noise_floor = 0.0123456789012345,
                   .worst_error = 1e-7,
                   .samples = 40,
                   .candidates = 12};
  PlanBody& body = plan.body;
  body.template_name = "fused_moe.cuda";
  body.template_version = 7;
  body.assignment = {{"tokens_tile", 8}, {"warps", 4}};
  body.numerics_class = "exl3.f16";
  body.tolerance = 2e-3;
  body.deterministic = true;
  body.cpu_threads = 6;
  body.params = {{"x", "bf16", "[m, hidden]", false},
                 {"out", "f32", "[m, hidden]", true}};
  const uint32_t routes = body.arena.Add("routes", 1000);
  const uint32_t hidden = body.arena.Add("activations", 256 * 1024);
  Step first;
  first.label = "route";
  first.entry = "route_kernel";
  first.grid = {LaunchDim{{1, 7, 8}, {2, 9, 4}}, LaunchDim::Constant(3),
                LaunchDim::Constant(1)};
  first.block = {128, 2, 1};
  first.args = {Arg::Param(0), Arg::Tokens(), Arg::Arena(routes),
                Arg::U32(0xFFFFFFFFu), Arg::U64(~uint64_t{0})};
  Step second;
  second.label = "fc";
  second.program = 1;
  second.entry = "fc_kernel";
  second.grid = {LaunchDim::Of({1, 0, 16}), LaunchDim::Constant(24),
                 LaunchDim::Constant(2)};
  second.block = {256, 1, 1};
  second.dynamic_shared_bytes = 49152;
  second.args = {Arg::Arena(hidden), Arg::Param(1)};
  body.steps = {first, second};
  return plan;
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_COMPILER_SPEC_SAMPLE_PLAN_H_
