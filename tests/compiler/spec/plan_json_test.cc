#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "compiler/spec/plan.h"
#include "tests/compiler/spec/sample_plan.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::ExpectGolden;
using ::kiln::testing::IsOkAndHolds;
using ::kiln::testing::SampleLinear;
using ::kiln::testing::SampleMxDirectGeometry;
using ::kiln::testing::SampleMxGeometry;
using ::kiln::testing::SampleMxIdentityGeometry;
using ::kiln::testing::SamplePlan;
using ::kiln::testing::SampleQsrtGeometry;
using ::kiln::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

TEST(PlanJsonTest, RoundTripsEveryField) {
  const Plan plan = SamplePlan();
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
}

TEST(PlanJsonTest, RoundTripsTheGeometryOfLinear) {
  Plan plan = SamplePlan();
  plan.geometry = SampleLinear();
  const std::string text = PlanToJson(plan);
  EXPECT_THAT(PlanFromJson(text), IsOkAndHolds(plan));
  EXPECT_EQ(Json::parse(text)["request"],
            Json::parse(R"({"op": "linear", "in_features": 4096,
                            "out_features": 1024, "bias": true, "bits": 5,
                            "io_dtype": "f16", "format": "exl3",
                            "codebook": "mul1", "recipe": "w4a16",
                            "deterministic": true})"));
}

TEST(PlanJsonTest, RoundTripsEveryFieldOfTrellisMx) {
  Plan plan = SamplePlan();
  plan.geometry = SampleMxGeometry();
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
  plan.geometry = SampleMxDirectGeometry();
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
  plan.geometry.mx.remainder = Remainder::kNone;
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
  plan.geometry = SampleMxIdentityGeometry();
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
}

TEST(PlanJsonTest, OnlyThePlanOfAnIdentityLayerNamesItsBoundary) {
  Plan plan = SamplePlan();
  plan.geometry = SampleMxDirectGeometry();
  EXPECT_THAT(PlanToJson(plan), Not(HasSubstr("boundary")));
  plan.geometry = SampleMxIdentityGeometry();
  const std::string text = PlanToJson(plan);
  EXPECT_THAT(text, HasSubstr("\"boundary\":\"identity\""));
  for (const char* other : {"coupled", "none"}) {
    EXPECT_THAT(PlanFromJson(absl::StrReplaceAll(text, {{"identity", other}})),
                StatusIs(absl::StatusCode::kDataLoss,
                         HasSubstr("boundary is unknown")));
  }
}

TEST(PlanJsonTest, OnlyThePlanOfADirectArmNamesIt) {
  Plan plan = SamplePlan();
  plan.geometry = SampleMxGeometry();
  EXPECT_THAT(PlanToJson(plan), Not(HasSubstr("direct")));
  EXPECT_THAT(PlanToJson(plan), Not(HasSubstr("remainder")));
  plan.geometry = SampleMxDirectGeometry();
  std::string text = PlanToJson(plan);
  EXPECT_THAT(text, HasSubstr("\"direct_max_tokens\":8"));
  EXPECT_THAT(text, HasSubstr("\"remainder\":\"rp2\""));
  EXPECT_THAT(PlanFromJson(absl::StrReplaceAll(
                  text, {{"\"remainder\":\"rp2\"", "\"remainder\":\"rp3\""}})),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("remainder is unknown: \"rp3\"")));
}

TEST(PlanJsonTest, RoundTripsEveryFieldOfQsrt) {
  Plan plan = SamplePlan();
  plan.geometry = SampleQsrtGeometry();
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
  plan.geometry.activation = Activation::kPerExpert;
  plan.geometry.weights.shared_scales = false;
  plan.geometry.recipe = Recipe::kW4A16;
  plan.geometry.qsrt = {.pairs = PairKinds::kP33P43};
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
}

TEST(PlanJsonTest, IsStable) {
  ExpectGolden(Json::parse(PlanToJson(SamplePlan())).dump(1) + "\n",
               "plan.v1.json");
}

TEST(PlanJsonTest, RoundTripsUnusualValues) {
  Plan plan = SamplePlan();
  plan.target = {.backend = Backend::kCpu, .level = 3};
  plan.evidence.state = PlanState::kPredicted;
  plan.evidence.median_ns = std::numeric_limits<double>::denorm_min();
  plan.evidence.noise_floor = std::numeric_limits<double>::max();
  plan.evidence.worst_error = 3;  // integral: written without a fraction
  plan.evidence.blocks = 40;
  plan.evidence.discarded = 2;
  plan.evidence.pruned = 154;
  plan.evidence.race_seconds = 1.5;
  plan.body.assignment = {};
  plan.body.assignment["min"] = std::numeric_limits<int64_t>::min();
  plan.body.assignment["max"] = std::numeric_limits<int64_t>::max();
  plan.body.steps[0].label = "quote \" backslash \\ newline \n \u00fc";
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
  plan.body.assignment = {};
  plan.body.params.clear();
  plan.body.steps[0].args.clear();
  plan.body.steps[1].args.clear();
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
}

// Steps may overlap on sm_90 and later only; other plans leave the member out.
TEST(PlanJsonTest, KeepsOverlappedStepsWhereTheyAreLegal) {
  Plan plan = SamplePlan();
  EXPECT_EQ(PlanToJson(plan).find("overlapped"), std::string::npos);
  plan.body.overlapped = true;
  plan.target = {.backend = Backend::kCuda, .level = 90};
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)), IsOkAndHolds(plan));
  plan.target = {.backend = Backend::kCuda, .level = 89};
  EXPECT_THAT(PlanFromJson(PlanToJson(plan)),
              StatusIs(absl::StatusCode::kDataLoss));
}

TEST(PlanJsonTest, RefusesEveryTruncation) {
  const std::string text = PlanToJson(SamplePlan());
  for (size_t size = 0; size < text.size(); ++size) {
    ASSERT_THAT(PlanFromJson(absl::string_view(text).substr(0, size)),
                StatusIs(absl::StatusCode::kDataLoss))
        << size;
  }
}

TEST(PlanJsonTest, ReadsDamagedTextAsAnErrorOrAsAValidPlan) {
  const std::string text = PlanToJson(SamplePlan());
  std::mt19937_64 random(5);
  int errors = 0;
  int plans = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = text;
    const uint64_t flips = 1 + random() % 3;
    for (uint64_t flip = 0; flip < flips; ++flip) {
      damaged[random() % damaged.size()] ^=
          static_cast<char>(1u << (random() % 8));
    }
    const absl::StatusOr<Plan> plan = PlanFromJson(damaged);
    if (!plan.ok()) {
      ASSERT_THAT(plan, StatusIs(absl::StatusCode::kDataLoss)) << damaged;
      ++errors;
      continue;
    }
    // A changed digit or letter of a name is still a plan, and one that holds
    // what every plan must; the cache's digest is what tells it from the old.
    ++plans;
    ASSERT_OK(ValidatePlan(*plan));
    ASSERT_THAT(PlanFromJson(PlanToJson(*plan)), IsOkAndHolds(*plan));
  }
  EXPECT_GT(errors, 1000);
  EXPECT_GT(plans, 100);
}

// Every value of the document, by pointer.
void AllPointers(const Json& node, const Json::json_pointer& at,
                 std::vector<Json::json_pointer>* out) {
  if (!at.empty()) out->push_back(at);
  if (node.is_object()) {
    for (const auto& [key, value] : node.items()) {
      AllPointers(value, at / key, out);
    }
  } else if (node.is_array()) {
    for (size_t i = 0; i < node.size(); ++i) AllPointers(node[i], at / i, out);
  }
}

void ExpectEveryMemberIsNeeded(const Plan& plan) {
  const Json root = Json::parse(PlanToJson(plan));
  std::vector<Json::json_pointer> pointers;
  AllPointers(root, Json::json_pointer(), &pointers);
  ASSERT_GT(pointers.size(), 100u);
  for (const Json::json_pointer& at : pointers) {
    const Json& parent = root.at(at.parent_pointer());
    const bool assignment =
        at.parent_pointer().to_string() == "/body/assignment";
    if (parent.is_object() && !assignment) {
      Json lacks = root;
      lacks.at(at.parent_pointer()).erase(at.back());
      EXPECT_THAT(PlanFromJson(lacks.dump()),
                  StatusIs(absl::StatusCode::kDataLoss))
          << "without " << at;
      Json extra = root;
      extra.at(at.parent_pointer())["surplus"] = 1;
      EXPECT_THAT(PlanFromJson(extra.dump()),
                  StatusIs(absl::StatusCode::kDataLoss))
          << "beside " << at;
    }
    for (const Json& other :
         {Json(nullptr), Json(true), Json(-1), Json(0.5), Json("no such word"),
          Json::array(), Json::object()}) {
      Json mistyped = root;
      Json& place = mistyped.at(at);
      if (other.type() == place.type()) continue;
      // A number where a number belongs, signed or not, is no wrong type.
      if (other.is_number() && place.is_number()) continue;
      place = other;
      EXPECT_THAT(PlanFromJson(mistyped.dump()),
                  StatusIs(absl::StatusCode::kDataLoss))
          << at << " = " << other;
    }
  }
}

TEST(PlanJsonTest, RefusesEveryMissingExtraOrMistypedMember) {
  ExpectEveryMemberIsNeeded(SamplePlan());
}

TEST(PlanJsonTest, RefusesThemInAPlanOfLinear) {
  Plan plan = SamplePlan();
  plan.geometry = SampleLinear();
  ExpectEveryMemberIsNeeded(plan);
}

TEST(PlanJsonTest, RefusesValuesOutOfRange) {
  const struct {
    const char* pointer;
    Json value;
    const char* message;
  } cases[] = {
      {"/m_max", int64_t{1} << 32, "4294967296 is out of range"},
      {"/m_max", -1, "-1 is out of range"},
      {"/m_max", 0.5, "m_max is not an integer"},
      {"/m_min", 0, "interval 0..17 is empty"},
      {"/request/bits_up", int64_t{1} << 31, "out of range"},
      {"/request/op", "gemm", "op is unknown: \"gemm\""},
      {"/request/io_dtype", "i32", "io_dtype is unknown: \"i32\""},
      {"/target", "sm_91", "target \"sm_91\" is unknown"},
      {"/programs/0", "abc", "digest has 3 characters"},
      {"/evidence/state", "guessed", "state is unknown: \"guessed\""},
      {"/body/steps/0/args/0/kind", 6, "argument kind 6 is unknown"},
      {"/body/steps/0/args/0/value", "18446744073709551616",
       "is not a decimal number"},
      {"/body/steps/0/args/0/value", "", "is not a decimal number"},
      {"/body/steps/0/args/0/value", "1x", "is not a decimal number"},
      {"/body/steps/0/block", Json::array({1, 1}), "three dimensions"},
      {"/body/steps/0/grid/0/a", Json::array({1, 1}), "three integers"},
      {"/body/steps/0/grid/0/a", Json::array({1, 1, 0}), "divides by 0"},
      {"/body/arena_bytes", 257, "not a multiple of 256"},
  };

  const Json root = Json::parse(PlanToJson(SamplePlan()));
  for (const auto& c : cases) {
    Json changed = root;
    changed.at(Json::json_pointer(c.pointer)) = c.value;
    EXPECT_THAT(PlanFromJson(changed.dump()),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(c.message)))
        << c.pointer;
  }
}

}  // namespace
}  // namespace kiln
