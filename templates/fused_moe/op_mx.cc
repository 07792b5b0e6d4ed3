#include "templates/fused_moe/op_mx.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"

namespace kiln {
namespace {

constexpr char kBitsAxis[] = "activation_bits";
constexpr char kTermsAxis[] = "activation_terms";

}  // namespace

uint32_t MxSlot(const RequestGeometry& geometry, MxParam param) {
  const auto slot = static_cast<uint32_t>(param);
  if (geometry.mx.boundary == MxBoundary::kCoupled) return slot;
  constexpr auto kVectors = static_cast<uint32_t>(MxParam::kGateUpSuh);
  KILN_CHECK(slot < kVectors || param == MxParam::kOut);
  return std::min(slot, kVectors);
}

Arg MxArg(const RequestGeometry& geometry, MxParam param) {
  const bool is_vector = param >= MxParam::kGateUpSuh && param < MxParam::kOut;
  if (is_vector && geometry.mx.boundary == MxBoundary::kIdentity) {
    return Arg::U64(0);
  }
  return Arg::Param(MxSlot(geometry, param));
}

std::vector<ParamDecl> MxParams(const RequestGeometry& geometry) {
  const std::string io(DTypeName(geometry.io_dtype));
  const std::string id(DTypeName(geometry.id_dtype));
  const std::string words =
      absl::StrCat(", ", 16 * geometry.weights.bits.gate, "]");
  // Of rows of w2_scale.
  const std::string panels = geometry.hidden % 256 == 0
                                 ? "hidden/256"
                                 : absl::StrCat((geometry.hidden + 255) / 256);
  std::vector<ParamDecl> all = {
      {"x", io, "[m, hidden]", false},
      {"topk_ids", id, "[m, top_k]", false},
      {"topk_weights", "f32", "[m, top_k]", false},
      {"w13", "i16",
       absl::StrCat("[2, experts, hidden/16, intermediate/16", words), false},
      {"w2", "i16", absl::StrCat("[experts, intermediate/16, hidden/16", words),
       false},
      {"w13_scale", "u32", "[experts, 2*intermediate/256, hidden/128, 256]",
       false},
      {"w2_scale", "u32",
       absl::StrCat("[experts, ", panels, ", intermediate/128, 256]"), false},
      {"gate_up_suh", "f16", "[hidden]", false},
      {"rotations", "f16", "[experts, 6*intermediate]", false},
      {"down_svh", "f16", "[hidden]", false},
      {"out", "f32", "[m, hidden]", true},
  };
  return MxSlotsOf(geometry, std::move(all));
}

std::vector<uint64_t> MxBytes(const RequestGeometry& geometry,
                              uint32_t tokens) {
  const auto h = static_cast<uint64_t>(geometry.hidden);
  const auto i = static_cast<uint64_t>(geometry.intermediate);
  const auto e = static_cast<uint64_t>(geometry.experts);
  const auto k = static_cast<uint64_t>(geometry.top_k);
  const uint64_t m = tokens;
  // One matrix of all experts: bits / 8 bytes a weight, one scale for 32.
  const uint64_t stream =
      e * h * i / 8 * static_cast<uint64_t>(geometry.weights.bits.gate);
  const uint64_t scales = e * h * i / 32;
  // Rows of scales come in panels of 256.
  const uint64_t scales_w2 = e * ((h + 255) / 256 * 256) * i / 32;
  std::vector<uint64_t> all = {
      m * h * DTypeBytes(geometry.io_dtype),
      m * k * DTypeBytes(geometry.id_dtype),
      m * k * 4,
      2 * stream,
      stream,
      2 * scales,
      scales_w2,
      h * 2,
      e * 6 * i * 2,
      h * 2,
      m * h * 4,
  };
  return MxSlotsOf(geometry, std::move(all));
}

absl::string_view MxArmName(MxArm arm) {
  switch (arm) {
    case MxArm::kSmallM:
      return "smallm";
    case MxArm::kDirectRp2:
      return "direct rp2";
    case MxArm::kDirect:
      return "direct";
    case MxArm::kGrouped:
      return "grouped";
  }
  KILN_UNREACHABLE();
}

absl::string_view MxNumericsClass(MxArm arm) {
  switch (arm) {
    case MxArm::kSmallM:
      return "mx.w4a16.fold32";
    case MxArm::kDirectRp2:
      return "mx.w4a8rp2.fold32";
    case MxArm::kDirect:
    case MxArm::kGrouped:
      return "mx.w4a8.fold32";
  }
  KILN_UNREACHABLE();
}

absl::StatusOr<MxArm> MxArmOf(const RequestGeometry& geometry,
                              const Interval& interval) {
  const TrellisMx& mx = geometry.mx;
  const bool direct = mx.direct_max_tokens != 0;
  const uint32_t limit = direct ? mx.direct_max_tokens : mx.smallm_max_tokens;
  if (interval.m_min > limit) return MxArm::kGrouped;
  if (interval.m_max > limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("interval ", interval.m_min, "..", interval.m_max,
                     " has tokens on both sides of ",
                     direct ? "direct_max_tokens" : "smallm_max_tokens", ", ",
                     limit, "; make that a capacity"));
  }
  if (!direct) return MxArm::kSmallM;
  return mx.remainder == Remainder::kRp2 ? MxArm::kDirectRp2 : MxArm::kDirect;
}

uint32_t MxActivationTerms(const Problem& problem) {
  const absl::StatusOr<MxArm> arm = MxArmOf(problem.geometry, problem.interval);
  return arm.ok() && *arm == MxArm::kDirectRp2 ? 2 : 1;
}

std::vector<Axis> MxArmAxes(const Problem& problem) {
  std::vector<Axis> axes = {{kBitsAxis, {16, 8}}};
  const uint32_t terms = MxActivationTerms(problem);
  if (terms != 1) axes.push_back({kTermsAxis, {terms}});
  return axes;
}

std::string MxArmConstraint(const Problem& problem, const AxisPoint& point) {
  const absl::StatusOr<MxArm> arm = MxArmOf(problem.geometry, problem.interval);
  if (!arm.ok()) return std::string(arm.status().message());
  const int64_t bits = *arm == MxArm::kSmallM ? 16 : 8;
  if (point.at(kBitsAxis) == bits) return "";
  return absl::StrCat(kBitsAxis, " ", point.at(kBitsAxis),
                      ": the interval is that of the ", MxArmName(*arm),
                      " arm, which has ", bits);
}

std::string MxArmPrelude(const Assignment& assignment) {
  std::vector<std::string> names = {kBitsAxis};
  if (assignment.count(kTermsAxis) != 0) names.push_back(kTermsAxis);
  return AxisPrelude(assignment, names);
}

std::string MxPrelude(const RequestGeometry& geometry) {
  float limit = std::numeric_limits<float>::infinity();
  if (geometry.mx.limit != "inf") {
    KILN_CHECK(absl::SimpleAtof(geometry.mx.limit, &limit));
  }
  std::string out;
  const auto define = [&out](absl::string_view name, int64_t value) {
    absl::StrAppend(&out, "#define KILN_", name, " ", value, "\n");
  };
  define("HIDDEN", geometry.hidden);
  define("INTER", geometry.intermediate);
  define("EXPERTS", geometry.experts);
  define("TOPK", geometry.top_k);
  define("BITS", geometry.weights.bits.gate);
  define("COUPLED", geometry.mx.boundary == MxBoundary::kCoupled ? 1 : 0);
  define("LIMIT_BITS", std::bit_cast<uint32_t>(limit));
  define("X_BF16", geometry.io_dtype == DType::kBf16 ? 1 : 0);
  define("ID_I64", geometry.id_dtype == DType::kI64 ? 1 : 0);
  return out;
}

double MxTolerance(MxArm arm) {
  switch (arm) {
    case MxArm::kSmallM:
      return 2e-3;
    case MxArm::kDirectRp2:
    case MxArm::kDirect:
    case MxArm::kGrouped:
      return 4e-3;
  }
  KILN_UNREACHABLE();
}

}  // namespace kiln
