#include "templates/fused_moe/op_qsrt.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"

namespace kiln {
namespace {

constexpr PairRate kP33 = {.low = 3, .high = 3};
constexpr PairRate kP24 = {.low = 2, .high = 4};
constexpr PairRate kP43 = {.low = 4, .high = 3};

// What the kernel calls an activation.
int ActivationNumber(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return 0;
    case Activation::kSitu:
      return 1;
    case Activation::kPerExpert:
      return 2;
  }
  KILN_UNREACHABLE();
}

}  // namespace

PairRate QsrtRate(PairKinds pairs, int mode) {
  if (mode == 0) return kP33;
  return pairs == PairKinds::kP24P33 ? kP24 : kP43;
}

uint32_t QsrtRates(const RequestGeometry& geometry) {
  return geometry.qsrt.pairs == PairKinds::kP24P33 ? 3 : 2;
}

std::vector<ParamDecl> QsrtParams(const RequestGeometry& geometry) {
  const std::string io(DTypeName(geometry.io_dtype));
  const std::string id(DTypeName(geometry.id_dtype));
  const std::string table =
      geometry.weights.shared_scales ? "[1, hidden]" : "[experts, hidden]";
  // Experts of P33 and P24 have equally many words. Those of P43 have 56 *
  // hidden, so what is declared beside P43 is the least that a layer can have;
  // its modes say how many words there are.
  const std::string words = "[experts, 48*hidden]";
  std::vector<ParamDecl> params = {
      {"x", io, "[m, hidden]", false},
      {"topk_ids", id, "[m, top_k]", false},
      {"topk_weights", "f32", "[m, top_k]", false},
      {"w_gate", "i16", words, false},
      {"w_up", "i16", words, false},
      {"w_down", "i16", words, false},
      {"modes_fc1", "i32", "[experts]", false},
      {"modes_fc2", "i32", "[experts]", false},
      {"gate_suh", "f16", table, false},
      {"up_suh", "f16", table, false},
      {"rotations", "f16", "[experts, 3*intermediate]", false},
      {"down_svh", "f16", table, false},
      {"out", "f32", "[m, hidden]", true},
  };
  if (geometry.activation == Activation::kPerExpert) {
    params.push_back({"activations", "i32", "[experts]", false});
  }
  return params;
}

std::vector<uint64_t> QsrtBytes(const RequestGeometry& geometry,
                                uint32_t tokens) {
  const auto h = static_cast<uint64_t>(geometry.hidden);
  const auto e = static_cast<uint64_t>(geometry.experts);
  const auto k = static_cast<uint64_t>(geometry.top_k);
  const uint64_t m = tokens;
  const uint64_t i = kQsrtIntermediate;
  // Half of the channels have each rate: 32 bytes for 256 weights and bit.
  const PairKinds pairs = geometry.qsrt.pairs;
  int bits = 0;
  for (const int mode : {0, 1}) {
    const PairRate rate = QsrtRate(pairs, mode);
    bits = std::max(bits, rate.low + rate.high);
  }
  const uint64_t matrix = e * h * i / 16 * static_cast<uint64_t>(bits);
  const uint64_t table = (geometry.weights.shared_scales ? 1 : e) * h * 2;
  std::vector<uint64_t> bytes = {
      m * h * DTypeBytes(geometry.io_dtype),
      m * k * DTypeBytes(geometry.id_dtype),
      m * k * 4,
      matrix,
      matrix,
      matrix,
      e * 4,
      e * 4,
      table,
      table,
      e * 3 * i * 2,
      table,
      m * h * 4,
  };
  if (geometry.activation == Activation::kPerExpert) bytes.push_back(e * 4);
  return bytes;
}

absl::string_view QsrtArmName(QsrtArm arm) {
  switch (arm) {
    case QsrtArm::kW4A16:
      return "w4a16";
    case QsrtArm::kW4A8:
      return "w4a8";
  }
  KILN_UNREACHABLE();
}

absl::string_view QsrtNumericsClass(QsrtArm arm) {
  switch (arm) {
    case QsrtArm::kW4A16:
      return "qsrt.w4a16.sequential";
    case QsrtArm::kW4A8:
      return "qsrt.w4a8.sequential";
  }
  KILN_UNREACHABLE();
}

absl::StatusOr<QsrtArm> QsrtArmOf(const RequestGeometry& geometry,
                                  const Interval& interval) {
  // 0, of w4a16, is below every interval.
  const uint32_t limit = geometry.qsrt.decode_max_tokens;
  if (interval.m_max <= limit) return QsrtArm::kW4A8;
  if (interval.m_min > limit) return QsrtArm::kW4A16;
  return absl::InvalidArgumentError(
      absl::StrCat("interval ", interval.m_min, "..", interval.m_max,
                   " has tokens on both sides of decode_max_tokens, ", limit,
                   "; make that a capacity"));
}

std::string QsrtArmConstraint(const Problem& problem, const AxisPoint& point) {
  const absl::StatusOr<QsrtArm> arm =
      QsrtArmOf(problem.geometry, problem.interval);
  if (!arm.ok()) return std::string(arm.status().message());
  const int64_t bits = *arm == QsrtArm::kW4A16 ? 16 : 8;
  if (point.at("activation_bits") == bits) return "";
  return absl::StrCat("activation_bits ", point.at("activation_bits"),
                      ": the interval is that of the ", QsrtArmName(*arm),
                      " arm, which has ", bits);
}

std::string QsrtPrelude(const RequestGeometry& geometry) {
  std::string out;
  const auto define = [&out](absl::string_view name, int64_t value) {
    absl::StrAppend(&out, "#define KILN_", name, " ", value, "\n");
  };
  const PairRate other = QsrtRate(geometry.qsrt.pairs, 1);
  define("HIDDEN", geometry.hidden);
  define("EXPERTS", geometry.experts);
  define("TOPK", geometry.top_k);
  define("OTHER_LOW", other.low);
  define("OTHER_HIGH", other.high);
  define("ACTIVATION", ActivationNumber(geometry.activation));
  define("SHARED_SUH", geometry.weights.shared_scales ? 1 : 0);
  define("X_BF16", geometry.io_dtype == DType::kBf16 ? 1 : 0);
  define("ID_I64", geometry.id_dtype == DType::kI64 ? 1 : 0);
  return out;
}

double QsrtTolerance(QsrtArm arm) {
  switch (arm) {
    case QsrtArm::kW4A16:
      return 2e-3;
    case QsrtArm::kW4A8:
      return 2e-2;
  }
  KILN_UNREACHABLE();
}

}  // namespace kiln
