// PlanToJson and PlanFromJson of compiler/spec/plan.h.

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "compiler/spec/plan.h"

namespace kiln {
namespace {

using Json = nlohmann::json;

Json TermToJson(const LaunchTerm& term) {
  return Json::array({term.mul, term.add, term.div});
}

absl::string_view StateName(PlanState state) {
  switch (state) {
    case PlanState::kMeasured:
      return "measured";
    case PlanState::kPredicted:
      return "predicted";
  }
  KILN_UNREACHABLE();
}

std::string Str(absl::string_view text) { return std::string(text); }

// Typed access to the members of an object that PlanToJson wrote. The first
// failure sticks; values read after it are defaults.
class Fields {
 public:
  Fields(const JsonNode& node, absl::Status* status)
      : node_(node), status_(status) {
    if (node.kind != JsonNode::Kind::kObject) Fail(node, "is no object");
  }

  ~Fields() {
    if (status_->ok() && used_ != node_.members.size()) {
      Fail(node_, "has unknown keys");
    }
  }

  Fields(const Fields&) = delete;
  Fields& operator=(const Fields&) = delete;

  const JsonNode& Get(absl::string_view key, JsonNode::Kind kind) {
    static const JsonNode* const kEmpty = new JsonNode;
    const JsonNode* value = node_.Find(key);
    if (value == nullptr) {
      Fail(node_, absl::StrCat("lacks ", key));
      return *kEmpty;
    }
    ++used_;
    if (value->kind != kind) {
      Fail(*value, absl::StrCat(key, " is not ", JsonKindName(kind)));
      return *kEmpty;
    }
    return *value;
  }

  bool Has(absl::string_view key) const { return node_.Find(key) != nullptr; }

  std::string Text(absl::string_view key) {
    return Get(key, JsonNode::Kind::kString).text;
  }

  bool Flag(absl::string_view key) {
    return Get(key, JsonNode::Kind::kBool).boolean;
  }

  // False when there is no such member.
  bool OptionalFlag(absl::string_view key) {
    return node_.Find(key) != nullptr && Flag(key);
  }

  double Number(absl::string_view key) {
    const JsonNode* value = node_.Find(key);
    if (value != nullptr && value->kind == JsonNode::Kind::kInteger) {
      ++used_;
      return value->number;
    }
    return Get(key, JsonNode::Kind::kFloat).number;
  }

  template <typename T>
  T Integer(absl::string_view key) {
    return IntegerOf<T>(Get(key, JsonNode::Kind::kInteger));
  }

  template <typename T>
  T IntegerOf(const JsonNode& value) {
    if (value.kind != JsonNode::Kind::kInteger) {
      Fail(value, "is not an integer");
      return 0;
    }
    if (value.integer < static_cast<int64_t>(std::numeric_limits<T>::min()) ||
        (sizeof(T) < 8 &&
         value.integer > static_cast<int64_t>(std::numeric_limits<T>::max()))) {
      Fail(value, absl::StrCat(value.integer, " is out of range"));
      return 0;
    }
    return static_cast<T>(value.integer);
  }

  // Maps a word back to an enumerator.
  template <typename T>
  T Word(absl::string_view key, std::initializer_list<T> values,
         absl::string_view (*name)(T)) {
    const JsonNode& value = Get(key, JsonNode::Kind::kString);
    for (const T candidate : values) {
      if (name(candidate) == value.text) return candidate;
    }
    Fail(value, absl::StrCat(key, " is unknown: ", JsonExcerpt(value)));
    return *values.begin();
  }

  void Fail(const JsonNode& node, absl::string_view what) {
    if (!status_->ok()) return;
    *status_ = absl::DataLossError(
        absl::StrCat("plan text, column ", node.column, ": ", what));
  }

  absl::Status* status() { return status_; }

 private:
  const JsonNode& node_;
  absl::Status* status_;
  size_t used_ = 0;
};

// u64 values travel as decimal text: JSON numbers end at 2^63 here.
std::string U64Text(uint64_t value) { return absl::StrCat(value); }

uint64_t U64FromText(Fields* fields, const JsonNode& node) {
  uint64_t value = 0;
  if (node.text.empty() || node.text.size() > 20) {
    fields->Fail(node, "is not a decimal number");
    return 0;
  }
  for (const char c : node.text) {
    if (c < '0' || c > '9' ||
        value > (std::numeric_limits<uint64_t>::max() -
                 static_cast<uint64_t>(c - '0')) /
                    10) {
      fields->Fail(node, "is not a decimal number");
      return 0;
    }
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  return value;
}

LaunchTerm TermFromJson(Fields* fields, const JsonNode& node) {
  LaunchTerm term;
  if (node.kind != JsonNode::Kind::kArray || node.items.size() != 3) {
    fields->Fail(node, "launch term is not three integers");
    return term;
  }
  term.mul = fields->IntegerOf<uint32_t>(node.items[0]);
  term.add = fields->IntegerOf<uint32_t>(node.items[1]);
  term.div = fields->IntegerOf<uint32_t>(node.items[2]);
  return term;
}

Json LinearToJson(const RequestGeometry& geometry) {
  const LinearShape& shape = geometry.linear;
  return {{"op", Str(OpName(geometry.op))},
          {"in_features", shape.in_features},
          {"out_features", shape.out_features},
          {"bias", shape.bias},
          {"io_dtype", Str(DTypeName(geometry.io_dtype))},
          {"format", Str(WeightFormatName(geometry.weights.format))},
          {"codebook", Str(CodebookName(geometry.weights.codebook))},
          {"bits", shape.bits},
          {"recipe", Str(RecipeName(geometry.recipe))},
          {"deterministic", geometry.deterministic}};
}

Json GeometryToJson(const RequestGeometry& geometry) {
  if (geometry.op == Op::kLinear) return LinearToJson(geometry);
  const Weights& weights = geometry.weights;
  Json out = {{"op", Str(OpName(geometry.op))},
              {"hidden", geometry.hidden},
              {"intermediate", geometry.intermediate},
              {"experts", geometry.experts},
              {"top_k", geometry.top_k},
              {"activation", Str(ActivationName(geometry.activation))},
              {"io_dtype", Str(DTypeName(geometry.io_dtype))},
              {"id_dtype", Str(DTypeName(geometry.id_dtype))},
              {"format", Str(WeightFormatName(weights.format))}};
  switch (weights.format) {
    case WeightFormat::kExl3:
      out["codebook"] = Str(CodebookName(weights.codebook));
      out["bits_gate"] = weights.bits.gate;
      out["bits_up"] = weights.bits.up;
      out["bits_down"] = weights.bits.down;
      out["shared_scales"] = weights.shared_scales;
      break;
    case WeightFormat::kTrellisMx:
      out["bits"] = weights.bits.gate;
      out["limit"] = geometry.mx.limit;
      out["smallm_max_tokens"] = geometry.mx.smallm_max_tokens;
      if (geometry.mx.direct_max_tokens != 0) {
        out["direct_max_tokens"] = geometry.mx.direct_max_tokens;
        out["remainder"] = Str(RemainderName(geometry.mx.remainder));
      }
      if (geometry.mx.boundary != MxBoundary::kCoupled) {
        out["boundary"] = Str(MxBoundaryName(geometry.mx.boundary));
      }
      break;
    case WeightFormat::kQsrt:
      out["pairs"] = Str(PairKindsName(geometry.qsrt.pairs));
      out["shared_scales"] = weights.shared_scales;
      out["decode_max_tokens"] = geometry.qsrt.decode_max_tokens;
      break;
  }
  out["recipe"] = Str(RecipeName(geometry.recipe));
  out["deterministic"] = geometry.deterministic;
  return out;
}

Codebook CodebookFromJson(Fields* fields) {
  return fields->Word<Codebook>(
      "codebook", {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1},
      CodebookName);
}

void FusedMoeFromJson(Fields* fields, RequestGeometry* out) {
  out->hidden = fields->Integer<int64_t>("hidden");
  out->intermediate = fields->Integer<int64_t>("intermediate");
  out->experts = fields->Integer<int64_t>("experts");
  out->top_k = fields->Integer<int64_t>("top_k");
  out->activation = fields->Word<Activation>(
      "activation",
      {Activation::kSilu, Activation::kSitu, Activation::kPerExpert},
      ActivationName);
  out->id_dtype =
      fields->Word<DType>("id_dtype", {DType::kI32, DType::kI64}, DTypeName);
  Weights& weights = out->weights;
  Bits& bits = weights.bits;
  weights.format = fields->Word<WeightFormat>(
      "format",
      {WeightFormat::kExl3, WeightFormat::kTrellisMx, WeightFormat::kQsrt},
      WeightFormatName);
  switch (weights.format) {
    case WeightFormat::kExl3:
      weights.codebook = CodebookFromJson(fields);
      bits.gate = fields->Integer<int>("bits_gate");
      bits.up = fields->Integer<int>("bits_up");
      bits.down = fields->Integer<int>("bits_down");
      weights.shared_scales = fields->Flag("shared_scales");
      break;
    case WeightFormat::kTrellisMx:
      bits.gate = bits.up = bits.down = fields->Integer<int>("bits");
      out->mx.limit = fields->Text("limit");
      out->mx.smallm_max_tokens =
          fields->Integer<uint32_t>("smallm_max_tokens");
      if (fields->Has("direct_max_tokens")) {
        out->mx.direct_max_tokens =
            fields->Integer<uint32_t>("direct_max_tokens");
        out->mx.remainder = fields->Word<Remainder>(
            "remainder", {Remainder::kNone, Remainder::kRp2}, RemainderName);
      }
      if (fields->Has("boundary")) {
        out->mx.boundary = fields->Word<MxBoundary>(
            "boundary", {MxBoundary::kIdentity}, MxBoundaryName);
      }
      break;
    case WeightFormat::kQsrt:
      out->qsrt.pairs = fields->Word<PairKinds>(
          "pairs", {PairKinds::kP24P33, PairKinds::kP33P43}, PairKindsName);
      weights.shared_scales = fields->Flag("shared_scales");
      out->qsrt.decode_max_tokens =
          fields->Integer<uint32_t>("decode_max_tokens");
      break;
  }
}

void LinearFromJson(Fields* fields, RequestGeometry* out) {
  out->linear.in_features = fields->Integer<int64_t>("in_features");
  out->linear.out_features = fields->Integer<int64_t>("out_features");
  out->linear.bias = fields->Flag("bias");
  out->linear.bits = fields->Integer<int>("bits");
  out->weights.format = fields->Word<WeightFormat>(
      "format", {WeightFormat::kExl3}, WeightFormatName);
  out->weights.codebook = CodebookFromJson(fields);
}

RequestGeometry GeometryFromJson(const JsonNode& node, absl::Status* status) {
  Fields fields(node, status);
  RequestGeometry out;
  out.op = fields.Word<Op>("op", {Op::kFusedMoe, Op::kLinear}, OpName);
  switch (out.op) {
    case Op::kFusedMoe:
      FusedMoeFromJson(&fields, &out);
      break;
    case Op::kLinear:
      LinearFromJson(&fields, &out);
      break;
  }
  out.io_dtype =
      fields.Word<DType>("io_dtype", {DType::kBf16, DType::kF16}, DTypeName);
  out.recipe = fields.Word<Recipe>("recipe", {Recipe::kW4A16, Recipe::kW4A8},
                                   RecipeName);
  out.deterministic = fields.Flag("deterministic");
  return out;
}

Json StepToJson(const Step& step) {
  Json grid = Json::array();
  for (const LaunchDim& dim : step.grid) {
    grid.push_back({{"a", TermToJson(dim.a)}, {"b", TermToJson(dim.b)}});
  }
  Json args = Json::array();
  for (const Arg& arg : step.args) {
    args.push_back({{"kind", static_cast<uint32_t>(arg.kind)},
                    {"value", U64Text(arg.value)}});
  }
  return {{"label", step.label},
          {"program", step.program},
          {"entry", step.entry},
          {"grid", std::move(grid)},
          {"block", step.block},
          {"dynamic_shared_bytes", step.dynamic_shared_bytes},
          {"args", std::move(args)}};
}

Step StepFromJson(const JsonNode& node, absl::Status* status) {
  Fields fields(node, status);
  Step step;
  step.label = fields.Text("label");
  step.program = fields.Integer<uint32_t>("program");
  step.entry = fields.Text("entry");
  step.dynamic_shared_bytes = fields.Integer<uint32_t>("dynamic_shared_bytes");
  const JsonNode& grid = fields.Get("grid", JsonNode::Kind::kArray);
  const JsonNode& block = fields.Get("block", JsonNode::Kind::kArray);
  const JsonNode& args = fields.Get("args", JsonNode::Kind::kArray);
  if (grid.items.size() != 3 || block.items.size() != 3) {
    fields.Fail(node, "grid or block has not three dimensions");
    return step;
  }
  for (size_t i = 0; i < 3; ++i) {
    Fields dim(grid.items[i], status);
    step.grid[i].a = TermFromJson(&dim, dim.Get("a", JsonNode::Kind::kArray));
    step.grid[i].b = TermFromJson(&dim, dim.Get("b", JsonNode::Kind::kArray));
    step.block[i] = fields.IntegerOf<uint32_t>(block.items[i]);
  }
  for (const JsonNode& item : args.items) {
    Fields arg(item, status);
    const auto kind = arg.Integer<uint32_t>("kind");
    if (kind < static_cast<uint32_t>(ArgKind::kParam) ||
        kind > static_cast<uint32_t>(ArgKind::kU64)) {
      arg.Fail(item, absl::StrCat("argument kind ", kind, " is unknown"));
    }
    Arg value;
    value.kind = static_cast<ArgKind>(kind);
    value.value = U64FromText(&arg, arg.Get("value", JsonNode::Kind::kString));
    step.args.push_back(value);
  }
  return step;
}

Json BodyToJson(const PlanBody& body) {
  Json params = Json::array();
  for (const ParamDecl& param : body.params) {
    params.push_back({{"name", param.name},
                      {"dtype", param.dtype},
                      {"shape", param.shape},
                      {"output", param.output}});
  }
  Json slices = Json::array();
  for (const ArenaSlice& slice : body.arena.slices) {
    slices.push_back({{"name", slice.name},
                      {"offset", slice.offset},
                      {"bytes", slice.bytes}});
  }
  Json steps = Json::array();
  for (const Step& step : body.steps) steps.push_back(StepToJson(step));
  Json out = {{"template", body.template_name},
              {"template_version", body.template_version},
              {"assignment", body.assignment.empty() ? Json::object()
                                                     : Json(body.assignment)},
              {"numerics_class", body.numerics_class},
              {"tolerance", body.tolerance},
              {"deterministic", body.deterministic},
              {"cpu_threads", body.cpu_threads},
              {"params", std::move(params)},
              {"arena_bytes", body.arena.bytes},
              {"arena_slices", std::move(slices)},
              {"steps", std::move(steps)}};
  if (body.overlapped) out["overlapped"] = true;
  return out;
}

PlanBody BodyFromJson(const JsonNode& node, absl::Status* status) {
  Fields fields(node, status);
  PlanBody body;
  body.template_name = fields.Text("template");
  body.template_version = fields.Integer<uint32_t>("template_version");
  for (const JsonNode::Member& member :
       fields.Get("assignment", JsonNode::Kind::kObject).members) {
    body.assignment[member.key] = fields.IntegerOf<int64_t>(member.value);
  }
  body.numerics_class = fields.Text("numerics_class");
  body.tolerance = fields.Number("tolerance");
  body.deterministic = fields.Flag("deterministic");
  body.overlapped = fields.OptionalFlag("overlapped");
  body.cpu_threads = fields.Integer<uint32_t>("cpu_threads");
  for (const JsonNode& item :
       fields.Get("params", JsonNode::Kind::kArray).items) {
    Fields param(item, status);
    ParamDecl& out = body.params.emplace_back();
    out.name = param.Text("name");
    out.dtype = param.Text("dtype");
    out.shape = param.Text("shape");
    out.output = param.Flag("output");
  }
  body.arena.bytes = fields.Integer<uint64_t>("arena_bytes");
  for (const JsonNode& item :
       fields.Get("arena_slices", JsonNode::Kind::kArray).items) {
    Fields slice(item, status);
    ArenaSlice& out = body.arena.slices.emplace_back();
    out.name = slice.Text("name");
    out.offset = slice.Integer<uint64_t>("offset");
    out.bytes = slice.Integer<uint64_t>("bytes");
  }
  for (const JsonNode& item :
       fields.Get("steps", JsonNode::Kind::kArray).items) {
    body.steps.push_back(StepFromJson(item, status));
  }
  return body;
}

Json EvidenceToJson(const Evidence& evidence) {
  Json out = {{"state", Str(StateName(evidence.state))},
              {"median_ns", evidence.median_ns},
              {"default_median_ns", evidence.default_median_ns},
              {"noise_floor", evidence.noise_floor},
              {"worst_error", evidence.worst_error},
              {"samples", evidence.samples},
              {"candidates", evidence.candidates}};
  const bool raced = evidence.blocks != 0 || evidence.discarded != 0 ||
                     evidence.pruned != 0 || evidence.race_seconds != 0;
  if (raced) {
    out["race"] = {{"blocks", evidence.blocks},
                   {"discarded", evidence.discarded},
                   {"pruned", evidence.pruned},
                   {"seconds", evidence.race_seconds}};
  }
  return out;
}

Evidence EvidenceFromJson(const JsonNode& node, absl::Status* status) {
  Fields fields(node, status);
  Evidence out;
  out.state = fields.Word<PlanState>(
      "state", {PlanState::kMeasured, PlanState::kPredicted}, StateName);
  out.median_ns = fields.Number("median_ns");
  out.default_median_ns = fields.Number("default_median_ns");
  out.noise_floor = fields.Number("noise_floor");
  out.worst_error = fields.Number("worst_error");
  out.samples = fields.Integer<uint32_t>("samples");
  out.candidates = fields.Integer<uint32_t>("candidates");
  // Rows of older versions lack it.
  if (fields.Has("race")) {
    Fields race(fields.Get("race", JsonNode::Kind::kObject), status);
    out.blocks = race.Integer<uint32_t>("blocks");
    out.discarded = race.Integer<uint32_t>("discarded");
    out.pruned = race.Integer<uint32_t>("pruned");
    out.race_seconds = race.Number("seconds");
  }
  return out;
}

}  // namespace

std::string PlanToJson(const Plan& plan) {
  Json programs = Json::array();
  for (const Digest& program : plan.programs) {
    programs.push_back(program.ToHex());
  }
  const Json root = {{"request", GeometryToJson(plan.geometry)},
                     {"target", plan.target.ToString()},
                     {"m_min", plan.interval.m_min},
                     {"m_max", plan.interval.m_max},
                     {"body", BodyToJson(plan.body)},
                     {"programs", std::move(programs)},
                     {"evidence", EvidenceToJson(plan.evidence)}};
  return root.dump();
}

absl::StatusOr<Plan> PlanFromJson(absl::string_view text) {
  absl::StatusOr<JsonNode> root = ParseJson(text, "plan");
  if (!root.ok()) return absl::DataLossError(root.status().message());
  absl::Status status;
  Plan plan;
  {
    Fields fields(*root, &status);
    plan.geometry = GeometryFromJson(
        fields.Get("request", JsonNode::Kind::kObject), &status);
    const JsonNode& target = fields.Get("target", JsonNode::Kind::kString);
    absl::StatusOr<Target> parsed = ParseTarget(target.text);
    if (parsed.ok()) {
      plan.target = *parsed;
    } else {
      fields.Fail(target, parsed.status().message());
    }
    plan.interval.m_min = fields.Integer<uint32_t>("m_min");
    plan.interval.m_max = fields.Integer<uint32_t>("m_max");
    plan.body =
        BodyFromJson(fields.Get("body", JsonNode::Kind::kObject), &status);
    for (const JsonNode& item :
         fields.Get("programs", JsonNode::Kind::kArray).items) {
      absl::StatusOr<Digest> digest = Digest::FromHex(item.text);
      if (digest.ok()) {
        plan.programs.push_back(*digest);
      } else {
        fields.Fail(item, digest.status().message());
      }
    }
    plan.evidence = EvidenceFromJson(
        fields.Get("evidence", JsonNode::Kind::kObject), &status);
  }
  RETURN_IF_ERROR(status);
  absl::Status valid = ValidatePlan(plan);
  if (!valid.ok()) return absl::DataLossError(valid.message());
  return plan;
}

}  // namespace kiln
