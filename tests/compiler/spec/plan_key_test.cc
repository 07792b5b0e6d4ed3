#include "compiler/spec/plan_key.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tests/compiler/spec/canonical_difference.h"
#include "tests/compiler/spec/sample_plan.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::DifferingPaths;
using ::kiln::testing::SampleGeometry;
using ::kiln::testing::SampleMxDirectGeometry;
using ::kiln::testing::SampleMxGeometry;
using ::kiln::testing::SamplePlan;
using ::kiln::testing::SampleQsrtGeometry;

struct Inputs {
  RequestGeometry geometry = SampleGeometry();
  Interval interval{.m_min = 3, .m_max = 4};
  DeviceProfile device;
  CandidateSpace space;

  Inputs() {
    device.target = {.backend = Backend::kCuda, .level = 90};
    device.compute_capability = 90;
    device.multiprocessors = 132;
    device.memory_gib = 144;
    device.l2_bytes = 50 << 20;
    device.driver_version = 13000;
    space.templates = {{"fused_moe.a", 1, Sha256("a")},
                       {"fused_moe.b", 1, Sha256("b")}};
    space.toolchain = {"nvrtc", "13.0.88", Sha256("library")};
    space.candidates_max = 16;
  }

  PlanKey Key() const { return MakePlanKey(geometry, interval, device, space); }
};

TEST(PlanKeyTest, EveryFieldMovesTheDigestAndIsNamedAlone) {
  const struct {
    const char* path;
    std::function<void(Inputs*)> apply;
  } changes[] = {
      {"request/hidden", [](Inputs* i) { i->geometry.hidden += 128; }},
      {"request/intermediate",
       [](Inputs* i) { i->geometry.intermediate += 128; }},
      {"request/experts", [](Inputs* i) { i->geometry.experts += 1; }},
      {"request/top_k", [](Inputs* i) { i->geometry.top_k += 1; }},
      {"request/io_dtype",
       [](Inputs* i) { i->geometry.io_dtype = DType::kF16; }},
      {"request/id_dtype",
       [](Inputs* i) { i->geometry.id_dtype = DType::kI64; }},
      {"request/codebook",
       [](Inputs* i) { i->geometry.weights.codebook = Codebook::kMul1; }},
      {"request/bits_gate",
       [](Inputs* i) { i->geometry.weights.bits.gate = 8; }},
      {"request/bits_up", [](Inputs* i) { i->geometry.weights.bits.up = 8; }},
      {"request/bits_down",
       [](Inputs* i) { i->geometry.weights.bits.down = 8; }},
      {"request/shared_scales",
       [](Inputs* i) { i->geometry.weights.shared_scales = true; }},
      {"request/deterministic",
       [](Inputs* i) { i->geometry.deterministic = false; }},
      {"interval/m_min", [](Inputs* i) { i->interval.m_min = 2; }},
      {"interval/m_max", [](Inputs* i) { i->interval.m_max = 5; }},
      {"device/target",
       [](Inputs* i) { i->device.target.arch_specific = true; }},
      {"device/assumed", [](Inputs* i) { i->device.assumed = true; }},
      {"device/compute_capability",
       [](Inputs* i) { i->device.compute_capability = 100; }},
      {"device/processor", [](Inputs* i) { i->device.processor = "x"; }},
      {"device/multiprocessors",
       [](Inputs* i) { i->device.multiprocessors = 114; }},
      {"device/memory_gib", [](Inputs* i) { i->device.memory_gib = 80; }},
      {"device/l2_bytes", [](Inputs* i) { i->device.l2_bytes += 1; }},
      {"device/mig", [](Inputs* i) { i->device.mig = "1g.18gb"; }},
      {"device/driver_version",
       [](Inputs* i) { i->device.driver_version = 13010; }},
      {"candidates/limit", [](Inputs* i) { i->space.candidates_max = 8; }},
      {"candidates/arena_bytes_max",
       [](Inputs* i) { i->space.arena_bytes_max = 1 << 20; }},
      {"candidates/balance", [](Inputs* i) { i->space.balance = "b"; }},
      {"candidates/numerics_class",
       [](Inputs* i) { i->space.numerics_class = "c"; }},
      {"candidates/warm_l2", [](Inputs* i) { i->space.warm_l2 = true; }},
      {"candidates/fused_moe.a/version",
       [](Inputs* i) { i->space.templates[0].version = 2; }},
      {"candidates/fused_moe.a/sources",
       [](Inputs* i) { i->space.templates[0].sources = Sha256("c"); }},
      {"candidates/fused_moe.b/version",
       [](Inputs* i) { i->space.templates[1].version = 2; }},
      {"candidates/fused_moe.b/sources",
       [](Inputs* i) { i->space.templates[1].sources = Sha256("c"); }},
      {"candidates/compiler/name",
       [](Inputs* i) { i->space.toolchain.name = "clang"; }},
      {"candidates/compiler/version",
       [](Inputs* i) { i->space.toolchain.version = "13.1"; }},
      {"candidates/compiler/content",
       [](Inputs* i) { i->space.toolchain.content = Sha256("other"); }},
  };

  const PlanKey base = Inputs().Key();
  std::set<Digest> seen = {base.digest};
  std::set<std::string> covered;
  for (const auto& change : changes) {
    Inputs inputs;
    change.apply(&inputs);
    const PlanKey key = inputs.Key();
    EXPECT_TRUE(seen.insert(key.digest).second) << change.path;
    EXPECT_EQ(DifferingPaths(base.preimage, key.preimage),
              std::vector<std::string>{change.path});
    covered.insert(change.path);
  }
  // A new field must be added above; fields with one legal value cannot move.
  const std::set<std::string> fixed = {"request/op", "request/activation",
                                       "request/format", "request/recipe",
                                       "measurement_policy"};
  ASSERT_OK_AND_ASSIGN(const CanonicalRecord record,
                       DecodeCanonical(base.preimage));
  EXPECT_EQ(record.domain, "kiln.measure/1");
  for (const CanonicalField& field : record.fields) {
    EXPECT_EQ(covered.count(field.path) + fixed.count(field.path), 1u)
        << field.path;
  }
}

TEST(PlanKeyTest, FieldsOfTrellisMxMoveTheDigestAndAreNamedAlone) {
  Inputs base;
  base.geometry = SampleMxGeometry();

  const struct {
    const char* path;
    std::function<void(RequestGeometry*)> apply;
  } changes[] = {
      {"request/bits",
       [](RequestGeometry* g) {
         g->weights.bits = {.gate = 4, .up = 4, .down = 4};
       }},
      {"request/limit", [](RequestGeometry* g) { g->mx.limit = "10"; }},
      {"request/smallm_max_tokens",
       [](RequestGeometry* g) { g->mx.smallm_max_tokens = 0; }},
  };

  for (const auto& change : changes) {
    Inputs inputs = base;
    change.apply(&inputs.geometry);
    EXPECT_NE(inputs.Key().digest, base.Key().digest) << change.path;
    EXPECT_EQ(DifferingPaths(base.Key().preimage, inputs.Key().preimage),
              std::vector<std::string>{change.path});
  }
}

TEST(PlanKeyTest, FieldsOfTheDirectArmMoveTheDigestAndAreNamedAlone) {
  Inputs base;
  base.geometry = SampleMxDirectGeometry();

  const struct {
    const char* path;
    std::function<void(RequestGeometry*)> apply;
  } changes[] = {
      {"request/direct_max_tokens",
       [](RequestGeometry* g) { g->mx.direct_max_tokens = 16; }},
      {"request/remainder",
       [](RequestGeometry* g) { g->mx.remainder = Remainder::kNone; }},
  };

  for (const auto& change : changes) {
    Inputs inputs = base;
    change.apply(&inputs.geometry);
    EXPECT_NE(inputs.Key().digest, base.Key().digest) << change.path;
    EXPECT_EQ(DifferingPaths(base.Key().preimage, inputs.Key().preimage),
              std::vector<std::string>{change.path});
  }
}

// The boundary that is not the usual one is a field more.
TEST(PlanKeyTest, TheBoundaryMovesTheDigestAndIsNamedAlone) {
  Inputs coupled;
  coupled.geometry = SampleMxDirectGeometry();
  Inputs identity = coupled;
  identity.geometry.mx.boundary = MxBoundary::kIdentity;
  EXPECT_NE(identity.Key().digest, coupled.Key().digest);
  EXPECT_EQ(DifferingPaths(coupled.Key().preimage, identity.Key().preimage),
            std::vector<std::string>{"request/boundary"});
}

TEST(PlanKeyTest, FieldsOfQsrtMoveTheDigestAndAreNamedAlone) {
  Inputs base;
  base.geometry = SampleQsrtGeometry();

  const struct {
    const char* path;
    std::function<void(RequestGeometry*)> apply;
  } changes[] = {
      {"request/activation",
       [](RequestGeometry* g) { g->activation = Activation::kPerExpert; }},
      {"request/pairs",
       [](RequestGeometry* g) { g->qsrt.pairs = PairKinds::kP33P43; }},
      {"request/shared_scales",
       [](RequestGeometry* g) { g->weights.shared_scales = false; }},
      {"request/decode_max_tokens",
       [](RequestGeometry* g) { g->qsrt.decode_max_tokens = 9; }},
      {"request/recipe",
       [](RequestGeometry* g) { g->recipe = Recipe::kW4A16; }},
  };

  for (const auto& change : changes) {
    Inputs inputs = base;
    change.apply(&inputs.geometry);
    EXPECT_NE(inputs.Key().digest, base.Key().digest) << change.path;
    EXPECT_EQ(DifferingPaths(base.Key().preimage, inputs.Key().preimage),
              std::vector<std::string>{change.path});
  }
}

TEST(PlanKeyTest, ProvenanceAndLimitsDoNotMoveIt) {
  Inputs inputs;
  inputs.device.name = "some marketing name";
  inputs.device.shared_bytes_max = 1;
  inputs.device.registers_per_sm = 1;
  EXPECT_EQ(inputs.Key(), Inputs().Key());
}

TEST(PlanKeyTest, TheDigestIsThatOfThePreimage) {
  const PlanKey key = Inputs().Key();
  EXPECT_EQ(key.digest, Sha256(key.preimage));
}

TEST(CandidateDigestTest, EveryFieldThatCanChangeAResultMovesIt) {
  const Plan plan = SamplePlan();
  const std::function<void(PlanBody*)> changes[] = {
      [](PlanBody* b) { b->template_name = "fused_moe.cpu"; },
      [](PlanBody* b) { b->template_version += 1; },
      [](PlanBody* b) { b->assignment["warps"] = 8; },
      [](PlanBody* b) { b->assignment.erase("warps"); },
      [](PlanBody* b) { b->numerics_class = "other"; },
      [](PlanBody* b) { b->tolerance += 1e-12; },
      [](PlanBody* b) { b->deterministic = false; },
      [](PlanBody* b) { b->overlapped = true; },
      [](PlanBody* b) { b->cpu_threads += 1; },
      [](PlanBody* b) { b->params[0].name = "y"; },
      [](PlanBody* b) { b->params[0].dtype = "f16"; },
      [](PlanBody* b) { b->params[0].shape = "[m]"; },
      [](PlanBody* b) { b->params[0].output = true; },
      [](PlanBody* b) { b->arena.bytes += 256; },
      [](PlanBody* b) { b->arena.slices[1].offset += 256; },
      [](PlanBody* b) { b->arena.slices[0].bytes -= 1; },
      [](PlanBody* b) { b->steps[0].program = 1; },
      [](PlanBody* b) { b->steps[0].entry = "other"; },
      [](PlanBody* b) { b->steps[0].grid[0].a.mul += 1; },
      [](PlanBody* b) { b->steps[0].grid[0].a.add += 1; },
      [](PlanBody* b) { b->steps[0].grid[0].a.div += 1; },
      [](PlanBody* b) { b->steps[0].grid[0].b.mul += 1; },
      [](PlanBody* b) { b->steps[0].grid[2] = LaunchDim::Constant(9); },
      [](PlanBody* b) { b->steps[0].block[1] += 1; },
      [](PlanBody* b) { b->steps[0].dynamic_shared_bytes += 16; },
      [](PlanBody* b) { b->steps[0].args.pop_back(); },
      [](PlanBody* b) { b->steps[0].args[3] = Arg::U32(1); },
      [](PlanBody* b) { b->steps[0].args[3] = Arg::U64(0xFFFFFFFFu); },
      [](PlanBody* b) { std::swap(b->steps[0], b->steps[1]); },
      [](PlanBody* b) { b->steps.pop_back(); },
  };
  std::set<Digest> seen = {CandidateDigest(plan.body, plan.programs)};
  int index = 0;
  for (const auto& change : changes) {
    PlanBody body = plan.body;
    change(&body);
    EXPECT_TRUE(seen.insert(CandidateDigest(body, plan.programs)).second)
        << "change " << index;
    ++index;
  }
  EXPECT_TRUE(
      seen.insert(CandidateDigest(plan.body, {plan.programs[1]})).second);
}

TEST(CandidateDigestTest, NamesForPeopleDoNotMoveIt) {
  const Plan plan = SamplePlan();
  PlanBody body = plan.body;
  body.steps[0].label = "renamed";
  body.arena.slices[0].name = "renamed";
  EXPECT_EQ(CandidateDigest(body, plan.programs),
            CandidateDigest(plan.body, plan.programs));
}

TEST(PlanKeyTest, TheOrderOfTemplatesDoesNotMoveIt) {
  Inputs inputs;
  std::reverse(inputs.space.templates.begin(), inputs.space.templates.end());
  EXPECT_EQ(inputs.Key(), Inputs().Key());
}

TEST(PlanKeyTest, OneTemplateMoreOrLessMovesIt) {
  Inputs inputs;
  inputs.space.templates.pop_back();
  EXPECT_NE(inputs.Key(), Inputs().Key());
}

}  // namespace
}  // namespace kiln
