#include "tuner/ceilings.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "compiler/base/check.h"
#include "compiler/base/digest.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "templates/op_contract.h"

namespace kiln {
namespace {

using Json = nlohmann::json;

// Steps of the balance per factor of two.
constexpr double kStepsPerOctave = 3;
// More than any two positive doubles are apart.
constexpr double kStepsMax = 8192;
// Floors count these when the K of interest was not measured.
constexpr Codebook kCodebooks[] = {Codebook::k3Inst, Codebook::kMcg,
                                   Codebook::kMul1};

double StepOf(double ratio) { return kStepsPerOctave * std::log2(ratio); }

double FromStep(double step) { return std::exp2(step / kStepsPerOctave); }

Json RatesToJson(const std::map<TrellisRate, double>& rates) {
  Json out = Json::object();
  for (const auto& [rate, value] : rates) {
    out[absl::StrCat(CodebookName(rate.first), "/", rate.second)] = value;
  }
  return out;
}

absl::StatusOr<double> PositiveNumber(const JsonNode& parent,
                                      absl::string_view key) {
  const JsonNode* node = parent.Find(key);
  if (node == nullptr ||
      (node->kind != JsonNode::Kind::kFloat &&
       node->kind != JsonNode::Kind::kInteger) ||
      !(node->number > 0) || !std::isfinite(node->number)) {
    return absl::DataLossError(
        absl::StrCat("ceilings: ", key, " is no positive number"));
  }
  return node->number;
}

// A whole number of steps, of either sign.
absl::StatusOr<double> StepFromJson(const JsonNode& parent,
                                    absl::string_view key) {
  const JsonNode* node = parent.Find(key);
  if (node == nullptr ||
      (node->kind != JsonNode::Kind::kFloat &&
       node->kind != JsonNode::Kind::kInteger) ||
      !(std::abs(node->number) < kStepsMax) ||
      node->number != std::round(node->number)) {
    return absl::DataLossError(
        absl::StrCat("ceilings: ", key, " of kept_balance is no step"));
  }
  return node->number;
}

absl::StatusOr<std::map<TrellisRate, double>> RatesFromJson(
    const JsonNode& root, absl::string_view key) {
  const JsonNode* node = root.Find(key);
  if (node == nullptr || node->kind != JsonNode::Kind::kObject) {
    return absl::DataLossError(absl::StrCat("ceilings: lacks ", key));
  }
  std::map<TrellisRate, double> rates;
  for (const JsonNode::Member& member : node->members) {
    const std::vector<std::string> parts = absl::StrSplit(member.key, '/');
    int bits = 0;
    const auto codebook = std::find_if(
        std::begin(kCodebooks), std::end(kCodebooks),
        [&](Codebook known) { return CodebookName(known) == parts[0]; });
    if (parts.size() != 2 || codebook == std::end(kCodebooks) ||
        !absl::SimpleAtoi(parts[1], &bits) || bits < 1 || bits > 8) {
      return absl::DataLossError(absl::StrCat(
          "ceilings: ", JsonQuote(member.key), " is no codebook and bits"));
    }
    ASSIGN_OR_RETURN((rates[{*codebook, bits}]),
                     PositiveNumber(*node, member.key));
  }
  return rates;
}

// Rate of one kind that all codebooks share nearly enough for a balance: that
// of MCG at 4 bits, or what comes nearest.
double TypicalRate(const std::map<TrellisRate, double>& rates) {
  for (const Codebook codebook :
       {Codebook::kMcg, Codebook::kMul1, Codebook::k3Inst}) {
    const double rate = DecodeRate(rates, codebook, 4);
    if (rate > 0) return rate;
  }
  return 0;
}

}  // namespace

std::optional<BalanceSteps> Ceilings::Steps() const {
  const double decode = TypicalRate(decode_weights_per_s);
  if (!(read_bytes_per_s > 0 && mma_flops_per_s > 0 && decode > 0)) {
    return std::nullopt;
  }
  return BalanceSteps{.decode = StepOf(decode / read_bytes_per_s),
                      .mma = StepOf(mma_flops_per_s / read_bytes_per_s)};
}

std::optional<BalanceSteps> Ceilings::RoundedSteps() const {
  std::optional<BalanceSteps> steps = Steps();
  if (!steps.has_value()) return steps;
  if (kept_balance.has_value()) return kept_balance;
  // Zero without a sign: "-0" would be another key.
  return BalanceSteps{.decode = std::round(steps->decode) + 0.0,
                      .mma = std::round(steps->mma) + 0.0};
}

std::string Ceilings::Balance() const {
  const std::optional<BalanceSteps> steps = RoundedSteps();
  return steps.has_value()
             ? absl::StrCat("decode ", steps->decode, " mma ", steps->mma)
             : "";
}

void Ceilings::KeepBalanceOf(const Ceilings& before) {
  const std::optional<BalanceSteps> kept = before.RoundedSteps();
  const std::optional<BalanceSteps> now = Steps();
  if (!kept.has_value() || !now.has_value()) return;
  if (std::abs(now->decode - kept->decode) < 1 &&
      std::abs(now->mma - kept->mma) < 1) {
    kept_balance = kept;
  }
}

Ceilings Ceilings::Rounded() const {
  Ceilings out;
  const std::optional<BalanceSteps> steps = RoundedSteps();
  if (!steps.has_value()) return out;
  out.read_bytes_per_s = 1;
  out.mma_flops_per_s = FromStep(steps->mma);
  for (const Codebook codebook : kCodebooks) {
    out.decode_weights_per_s[{codebook, 4}] = FromStep(steps->decode);
  }
  return out;
}

std::string CeilingsToJson(const Ceilings& ceilings) {
  Json out = {{"read_bytes_per_s", ceilings.read_bytes_per_s},
              {"mma_flops_per_s", ceilings.mma_flops_per_s},
              {"decode", RatesToJson(ceilings.decode_weights_per_s)},
              {"hash", RatesToJson(ceilings.hash_weights_per_s)},
              {"measured_unix", ceilings.measured_unix}};
  if (ceilings.kept_balance.has_value()) {
    out["kept_balance"] = {{"decode", ceilings.kept_balance->decode},
                           {"mma", ceilings.kept_balance->mma}};
  }
  return out.dump();
}

absl::StatusOr<Ceilings> CeilingsFromJson(absl::string_view text) {
  const absl::StatusOr<JsonNode> root = ParseJson(text, "ceilings");
  if (!root.ok()) return absl::DataLossError(root.status().message());
  Ceilings out;
  ASSIGN_OR_RETURN(out.read_bytes_per_s,
                   PositiveNumber(*root, "read_bytes_per_s"));
  ASSIGN_OR_RETURN(out.mma_flops_per_s,
                   PositiveNumber(*root, "mma_flops_per_s"));
  ASSIGN_OR_RETURN(out.decode_weights_per_s, RatesFromJson(*root, "decode"));
  ASSIGN_OR_RETURN(out.hash_weights_per_s, RatesFromJson(*root, "hash"));
  const JsonNode* measured = root->Find("measured_unix");
  if (measured == nullptr || measured->kind != JsonNode::Kind::kInteger) {
    return absl::DataLossError("ceilings: lacks measured_unix");
  }
  out.measured_unix = measured->integer;
  if (const JsonNode* kept = root->Find("kept_balance"); kept != nullptr) {
    BalanceSteps& steps = out.kept_balance.emplace();
    ASSIGN_OR_RETURN(steps.decode, StepFromJson(*kept, "decode"));
    ASSIGN_OR_RETURN(steps.mma, StepFromJson(*kept, "mma"));
  }
  return out;
}

std::string CeilingsKey(const DeviceProfile& device) {
  CanonicalEncoder encoder("kiln.device/1");
  device.Encode(&encoder);
  const absl::StatusOr<CanonicalRecord> record =
      DecodeCanonical(encoder.bytes());
  KILN_CHECK(record.ok());
  return CeilingsKey(record->fields);
}

std::string CeilingsKey(const std::vector<CanonicalField>& fields) {
  std::string key = "kiln.ceilings/1";
  for (const CanonicalField& field : fields) {
    if (!absl::StartsWith(field.path, "device/")) continue;
    absl::StrAppend(&key, "\n", field.path, "=", field.value);
  }
  return key;
}

double DecodeRate(const std::map<TrellisRate, double>& rates, Codebook codebook,
                  int bits) {
  double rate = 0;
  int nearest = 0;
  for (const auto& [key, value] : rates) {
    if (key.first != codebook) continue;
    const int distance = std::abs(key.second - bits);
    if (rate == 0 || distance < nearest) {
      rate = value;
      nearest = distance;
    }
  }
  return rate;
}

Work WorkOf(const RequestGeometry& geometry, uint32_t m, double experts,
            const Ceilings& ceilings, bool summed_by_mma) {
  const OpWork op = ContractOf(geometry).Work(geometry);
  const auto tokens = static_cast<double>(m);
  const auto& rates = summed_by_mma && !ceilings.hash_weights_per_s.empty()
                          ? ceilings.hash_weights_per_s
                          : ceilings.decode_weights_per_s;
  Work work;
  work.experts = experts;
  for (const OpMatrix& matrix : op.matrices) {
    work.bytes += experts * matrix.weights * matrix.bits / 8;
    work.weights += experts * matrix.weights;
    const double rate =
        DecodeRate(rates, geometry.weights.codebook, matrix.bits);
    if (rate > 0) work.decode_seconds += experts * matrix.weights / rate;
    work.flops += 2 * matrix.weights * tokens * op.routes;
  }
  work.bytes += experts * op.scale_bytes;
  work.bytes += tokens * op.token_bytes;
  return work;
}

double Floor::Seconds() const { return std::max(bytes_s, decode_s + mma_s); }

absl::string_view Floor::Bound() const {
  if (bytes_s >= decode_s + mma_s) return "bytes";
  return decode_s >= mma_s ? "decode" : "mma";
}

Floor FloorOf(const Work& work, const Ceilings& ceilings) {
  Floor floor;
  if (ceilings.read_bytes_per_s > 0) {
    floor.bytes_s = work.bytes / ceilings.read_bytes_per_s;
  }
  if (ceilings.mma_flops_per_s > 0) {
    floor.mma_s = work.flops / ceilings.mma_flops_per_s;
  }
  floor.decode_s = work.decode_seconds;
  return floor;
}

bool IsSummedByMma(absl::string_view numerics_class) {
  // Modes 1 and 2 of stream.cu.
  return absl::StartsWith(numerics_class, "w4a16.halves.") ||
         absl::StartsWith(numerics_class, "w4a16.bytes2.");
}

}  // namespace kiln
