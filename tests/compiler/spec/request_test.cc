#include "compiler/spec/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "compiler/base/digest.h"
#include "tests/compiler/spec/sample_plan.h"

namespace kiln {
namespace {

using ::kiln::testing::SampleGeometry;
using ::kiln::testing::SampleMxDirectGeometry;
using ::kiln::testing::SampleMxGeometry;
using ::kiln::testing::SampleMxIdentityGeometry;
using ::kiln::testing::SampleQsrtGeometry;
using ::testing::ElementsAre;

TEST(RequestGeometryTest, PrintsOneLine) {
  RequestGeometry geometry = SampleGeometry();
  EXPECT_EQ(geometry.ToString(),
            "fused_moe H2048 I768 E128 k8 exl3-mcg K3/4/5 silu w4a16 bf16 i32");
  geometry.weights.bits = {.gate = 4, .up = 4, .down = 4};
  geometry.weights.codebook = Codebook::k3Inst;
  geometry.weights.shared_scales = true;
  geometry.deterministic = false;
  geometry.io_dtype = DType::kF16;
  geometry.id_dtype = DType::kI64;
  EXPECT_EQ(geometry.ToString(),
            "fused_moe H2048 I768 E128 k8 exl3-3inst K4 silu w4a16 f16 i64 "
            "shared scales nondeterministic");
}

TEST(RequestGeometryTest, PrintsALinearMatrix) {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.linear = {.in_features = 4096, .out_features = 1024, .bits = 5};
  geometry.weights.codebook = Codebook::kMul1;
  EXPECT_EQ(geometry.ToString(), "linear [4096, 1024] exl3-mul1 K5 w4a16 bf16");
  geometry.linear.bias = true;
  geometry.deterministic = false;
  geometry.io_dtype = DType::kF16;
  EXPECT_EQ(geometry.ToString(),
            "linear [4096, 1024] exl3-mul1 K5 w4a16 f16 bias nondeterministic");
}

TEST(RequestGeometryTest, PrintsTrellisMx) {
  RequestGeometry geometry = SampleMxGeometry();
  EXPECT_EQ(geometry.ToString(),
            "fused_moe H2048 I768 E128 k8 trellis_mx K3 silu limit 7.5 w4a8 "
            "small-m 8 bf16 i32");
  geometry = SampleMxDirectGeometry();
  EXPECT_EQ(geometry.ToString(),
            "fused_moe H2048 I768 E128 k8 trellis_mx K3 silu limit 7.5 w4a8 "
            "direct 8 rp2 bf16 i32");
  geometry.mx.remainder = Remainder::kNone;
  EXPECT_EQ(geometry.ToString(),
            "fused_moe H2048 I768 E128 k8 trellis_mx K3 silu limit 7.5 w4a8 "
            "direct 8 bf16 i32");
  EXPECT_EQ(SampleMxIdentityGeometry().ToString(),
            "fused_moe H2048 I768 E128 k8 trellis_mx K3 identity silu limit "
            "7.5 w4a8 direct 8 rp2 bf16 i32");
}

TEST(RequestGeometryTest, PrintsQsrt) {
  RequestGeometry geometry = SampleQsrtGeometry();
  EXPECT_EQ(geometry.ToString(),
            "fused_moe H3584 I256 E896 k16 qsrt p24_p33 situ w4a8 decode 8 "
            "bf16 i32 shared scales");
  geometry.qsrt = {.pairs = PairKinds::kP33P43};
  geometry.recipe = Recipe::kW4A16;
  geometry.activation = Activation::kPerExpert;
  geometry.weights.shared_scales = false;
  EXPECT_EQ(geometry.ToString(),
            "fused_moe H3584 I256 E896 k16 qsrt p33_p43 per_expert w4a16 bf16 "
            "i32");
}

TEST(IsClampLimitTest, TakesPositiveDecimalsAndInf) {
  for (const char* good :
       {"inf", "10", "7.5", "0.25", "0.015625", "999999999"}) {
    EXPECT_TRUE(IsClampLimit(good)) << good;
  }
  for (const char* bad :
       {"", "0", "0.0", "01", "1.50", "-1", "+1", "1e1", ".5", "1.", "nan",
        "INF", "1234567890", "1 ", "0.015624999", "0.000000001"}) {
    EXPECT_FALSE(IsClampLimit(bad)) << bad;
  }
}

// The fields of a geometry in a key, "path=value".
std::vector<std::string> Encoded(const RequestGeometry& geometry) {
  CanonicalEncoder encoder("test/1");
  geometry.Encode(&encoder);
  const absl::StatusOr<CanonicalRecord> record =
      DecodeCanonical(encoder.bytes());
  EXPECT_TRUE(record.ok()) << record.status();
  std::vector<std::string> fields;
  for (const CanonicalField& field : record->fields) {
    fields.push_back(field.path + "=" + field.value);
  }
  return fields;
}

// Stored plans are found by these bytes: a change here orphans all of them.
TEST(RequestGeometryTest, AKeyOfFusedMoeHasTheFieldsItAlwaysHad) {
  EXPECT_THAT(
      Encoded(SampleGeometry()),
      ElementsAre("request/op=fused_moe", "request/hidden=2048",
                  "request/intermediate=768", "request/experts=128",
                  "request/top_k=8", "request/activation=silu",
                  "request/io_dtype=bf16", "request/id_dtype=i32",
                  "request/format=exl3", "request/codebook=mcg",
                  "request/bits_gate=3", "request/bits_up=4",
                  "request/bits_down=5", "request/shared_scales=false",
                  "request/recipe=w4a16", "request/deterministic=true"));
}

TEST(RequestGeometryTest, AKeyOfLinearHasItsOwnFieldsOnly) {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.linear = {
      .in_features = 4096, .out_features = 1024, .bits = 5, .bias = true};
  EXPECT_THAT(
      Encoded(geometry),
      ElementsAre("request/op=linear", "request/in_features=4096",
                  "request/out_features=1024", "request/bias=true",
                  "request/io_dtype=bf16", "request/format=exl3",
                  "request/codebook=mcg", "request/bits=5",
                  "request/recipe=w4a16", "request/deterministic=true"));
}

TEST(RequestGeometryTest, AKeyOfTrellisMxHasItsOwnFieldsOfWeights) {
  EXPECT_THAT(Encoded(SampleMxGeometry()),
              ElementsAre("request/op=fused_moe", "request/hidden=2048",
                          "request/intermediate=768", "request/experts=128",
                          "request/top_k=8", "request/activation=silu",
                          "request/io_dtype=bf16", "request/id_dtype=i32",
                          "request/format=trellis_mx", "request/bits=3",
                          "request/limit=7.5", "request/smallm_max_tokens=8",
                          "request/recipe=w4a8", "request/deterministic=true"));
}

TEST(RequestGeometryTest, TheDirectArmAddsItsFieldsToTheKeyOfTrellisMx) {
  EXPECT_THAT(
      Encoded(SampleMxDirectGeometry()),
      ElementsAre("request/op=fused_moe", "request/hidden=2048",
                  "request/intermediate=768", "request/experts=128",
                  "request/top_k=8", "request/activation=silu",
                  "request/io_dtype=bf16", "request/id_dtype=i32",
                  "request/format=trellis_mx", "request/bits=3",
                  "request/limit=7.5", "request/smallm_max_tokens=0",
                  "request/direct_max_tokens=8", "request/remainder=rp2",
                  "request/recipe=w4a8", "request/deterministic=true"));
}

TEST(RequestGeometryTest, TheIdentityBoundaryIsAFieldOfTheKeyTheCoupledIsNot) {
  std::vector<std::string> fields = Encoded(SampleMxDirectGeometry());
  fields.insert(fields.end() - 2, "request/boundary=identity");
  EXPECT_EQ(Encoded(SampleMxIdentityGeometry()), fields);
}

TEST(RequestGeometryTest, AKeyOfQsrtHasItsOwnFieldsOfWeights) {
  EXPECT_THAT(
      Encoded(SampleQsrtGeometry()),
      ElementsAre("request/op=fused_moe", "request/hidden=3584",
                  "request/intermediate=256", "request/experts=896",
                  "request/top_k=16", "request/activation=situ",
                  "request/io_dtype=bf16", "request/id_dtype=i32",
                  "request/format=qsrt", "request/pairs=p24_p33",
                  "request/shared_scales=true", "request/decode_max_tokens=8",
                  "request/recipe=w4a8", "request/deterministic=true"));
}

TEST(RequestTest, IntervalsLeaveNoGap) {
  Request request;
  request.capacities = {1, 2, 16, 4096};
  EXPECT_THAT(request.Intervals(),
              ElementsAre(Interval{1, 1}, Interval{2, 2}, Interval{3, 16},
                          Interval{17, 4096}));
  request.capacities = {64};
  EXPECT_THAT(request.Intervals(), ElementsAre(Interval{1, 64}));
}

}  // namespace
}  // namespace kiln
