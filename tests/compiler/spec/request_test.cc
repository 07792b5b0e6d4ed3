#include "compiler/spec/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/compiler/spec/sample_plan.h"

namespace kiln {
namespace {

using ::kiln::testing::SampleGeometry;
using ::testing::ElementsAre;

TEST(RequestGeometryTest, PrintsOneLine) {
  RequestGeometry geometry = SampleGeometry();
  EXPECT_EQ(geometry.ToString(),
            "fused_moe H2048 I768 E128 k8 exl3-mcg K3/4/5 silu w4a16 bf16 i32");
  geometry.weights.bits = {.gate = 4, .up = 4, .down = 4};
  geometry.weights.codebook = Codebook::k3Inst;
  geometry.weights.shared_scales = true;
  geometry.deterministic = true;
  geometry.io_dtype = DType::kF16;
  geometry.id_dtype = DType::kI64;
  EXPECT_EQ(geometry.ToString(),
            "fused_moe H2048 I768 E128 k8 exl3-3inst K4 silu w4a16 f16 i64 "
            "shared scales deterministic");
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
