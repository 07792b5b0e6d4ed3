#include "templates/formats/npk_header.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/as_text.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "compiler/spec/request.h"
#include "templates/formats/exl3.h"
#include "templates/formats/npk_law.h"

namespace kiln {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kScaleGroup = 32;
constexpr int64_t kCoupledHidden = 512;
constexpr int64_t kCoupledInner = 128;
constexpr size_t kModelIdBytesMax = 256;
constexpr char kCoupledName[] = "coupled-h512-h128.v1";
constexpr char kIdentityName[] = "identity";
constexpr char kSignGenerator[] = "npk1-mt19937";
constexpr char kNoSigns[] = "none";

constexpr const char* kNames[kNpkTensors] = {
    "w13_stream",  "w2_stream",    "w13_scale", "w2_scale",
    "gate_up_suh", "inner_scales", "down_svh",  "sign_draw"};

bool IsPlain(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return c >= 0x20 && c < 0x7F && c != '"' && c != '\\';
  });
}

std::string Quote(absl::string_view text) {
  return absl::StrCat("\"", text, "\"");
}

// Keys sorted, no spaces, ASCII.
absl::Status AppendCanonical(const JsonNode& node, std::string* out) {
  switch (node.kind) {
    case JsonNode::Kind::kInteger:
      absl::StrAppend(out, node.integer);
      return absl::OkStatus();
    case JsonNode::Kind::kString:
      if (!IsPlain(node.text)) break;
      absl::StrAppend(out, Quote(node.text));
      return absl::OkStatus();
    case JsonNode::Kind::kArray: {
      const char* before = "[";
      for (const JsonNode& item : node.items) {
        *out += before;
        RETURN_IF_ERROR(AppendCanonical(item, out));
        before = ",";
      }
      *out += node.items.empty() ? "[]" : "]";
      return absl::OkStatus();
    }
    case JsonNode::Kind::kObject: {
      std::map<absl::string_view, const JsonNode*> members;
      for (const JsonNode::Member& member : node.members) {
        if (!IsPlain(member.key)) {
          return NpkRuleError(1, absl::StrCat("the key ", JsonQuote(member.key),
                                              " is not printable ASCII"));
        }
        members[member.key] = &member.value;
      }
      const char* before = "{";
      for (const auto& [key, value] : members) {
        absl::StrAppend(out, before, Quote(key), ":");
        RETURN_IF_ERROR(AppendCanonical(*value, out));
        before = ",";
      }
      *out += members.empty() ? "{}" : "}";
      return absl::OkStatus();
    }
    default:
      break;
  }
  return NpkRuleError(
      1, absl::StrCat("the header holds ", JsonExcerpt(node),
                      ", must hold objects, arrays, whole numbers and strings "
                      "of printable ASCII"));
}

std::string WithLength(std::string json) {
  while ((kLengthBytes + json.size()) % kAlignment != 0) json += ' ';
  std::string head;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    head.push_back(static_cast<char>(json.size() >> (8 * i) & 0xFF));
  }
  return head + json;
}

// "4.25".
std::string PayloadBpw(int bits) { return absl::StrCat(bits, ".25"); }

std::map<std::string, std::string> MakeMetadata(const NpkMetadata& metadata,
                                                std::span<const Digest> digests,
                                                const Digest& signs) {
  const bool coupled = metadata.boundary == NpkBoundary::kCoupled;
  std::map<std::string, std::string> out = {
      {"schema", kNpkSchema},
      {"law", kd::kNpkLaw},
      {"bits", absl::StrCat(metadata.bits)},
      {"window", metadata.bits == 5 ? "w3" : "w2"},
      {"boundary", coupled ? kCoupledName : kIdentityName},
      {"layer", absl::StrCat(metadata.layer)},
      {"rank", absl::StrCat(metadata.rank)},
      {"world_size", absl::StrCat(metadata.world_size)},
      {"experts", absl::StrCat(metadata.experts)},
      {"hidden", absl::StrCat(metadata.hidden)},
      {"intermediate_local", absl::StrCat(metadata.intermediate)},
      {"intermediate_global", absl::StrCat(metadata.intermediate_global)},
      {"first_atom", absl::StrCat(metadata.first_atom())},
      {"activation", "silu"},
      {"limit", metadata.limit},
      {"order", "gate-up"},
      {"sign_generator", coupled ? kSignGenerator : kNoSigns},
      {"model_id", metadata.model_id},
      {"encoder_sha256", metadata.encoder.ToHex()},
      {"design_sha256", metadata.design.ToHex()},
      {"payload_bpw", PayloadBpw(metadata.bits)}};
  for (size_t i = 0; i < digests.size(); ++i) {
    out[absl::StrCat("sha256.", kNames[i])] = digests[i].ToHex();
  }
  if (coupled) out["sha256.signs"] = signs.ToHex();
  return out;
}

// Reads the metadata strings. Rules V15 and V5; the first error stays.
class MetadataReader {
 public:
  explicit MetadataReader(const JsonNode& node) {
    for (const JsonNode::Member& member : node.members) {
      values_[member.key] = member.value.text;
    }
  }

  // The value, taken out; V15 when it is missing.
  std::string Take(const std::string& key) {
    const auto found = values_.find(key);
    if (found == values_.end()) {
      Fail(15, absl::StrCat("the metadata lack ", Quote(key)));
      return "";
    }
    std::string value = found->second;
    values_.erase(found);
    return value;
  }

  bool Has(const std::string& key) const { return values_.contains(key); }

  // A decimal number without sign and leading zeros.
  int64_t TakeNumber(const std::string& key) {
    const std::string text = Take(key);
    constexpr size_t kDigitsMax = 9;
    int64_t value = 0;
    const bool digits =
        !text.empty() && text.size() <= kDigitsMax &&
        std::all_of(text.begin(), text.end(),
                    [](char c) { return c >= '0' && c <= '9'; }) &&
        (text.size() == 1 || text[0] != '0');
    if (!digits || !absl::SimpleAtoi(text, &value)) {
      Fail(15, absl::StrCat(Quote(key), " is ", JsonQuote(text),
                            ", must be a decimal number of at most 9 digits, "
                            "without sign and leading zeros"));
    }
    return value;
  }

  Digest TakeDigest(const std::string& key) {
    const std::string text = Take(key);
    absl::StatusOr<Digest> digest = Digest::FromHex(text);
    if (!digest.ok() || digest->ToHex() != text) {
      Fail(15, absl::StrCat(Quote(key), " is ", JsonQuote(text),
                            ", must be 64 lower-case hexadecimal digits"));
      return Digest();
    }
    return *digest;
  }

  // One of a few words; V5.
  size_t TakeOneOf(const std::string& key,
                   const std::vector<std::string>& words) {
    const std::string text = Take(key);
    const auto found = std::find(words.begin(), words.end(), text);
    if (found != words.end()) {
      return static_cast<size_t>(found - words.begin());
    }
    Fail(5, absl::StrCat(Quote(key), " is ", JsonQuote(text), ", must be ",
                         absl::StrJoin(words, " or ")));
    return 0;
  }

  void Fail(int rule, absl::string_view message) {
    if (status_.ok()) status_ = NpkRuleError(rule, message);
  }

  // The first error, or that of a key that nobody took.
  absl::Status Finish() {
    if (status_.ok() && !values_.empty()) {
      Fail(15, absl::StrCat("unknown metadata key ",
                            JsonQuote(values_.begin()->first)));
    }
    return status_;
  }

 private:
  std::map<std::string, std::string> values_;
  absl::Status status_;
};

absl::StatusOr<NpkHeader> ReadMetadata(const JsonNode& node) {
  if (node.kind != JsonNode::Kind::kObject) {
    return NpkRuleError(15,
                        absl::StrCat("\"__metadata__\" is ", JsonExcerpt(node),
                                     ", must be an object of strings"));
  }
  for (const JsonNode::Member& member : node.members) {
    if (member.value.kind == JsonNode::Kind::kString) continue;
    return NpkRuleError(
        15, absl::StrCat(JsonQuote(member.key), " is ",
                         JsonExcerpt(member.value), ", must be a string"));
  }
  NpkHeader header;
  NpkMetadata& m = header.metadata;
  MetadataReader reader(node);
  reader.TakeOneOf("schema", {kNpkSchema});
  reader.TakeOneOf("law", {kd::kNpkLaw});
  const int64_t bits = reader.TakeNumber("bits");
  if (bits < kd::kNpkBitsMin || bits > kd::kNpkBitsMax) {
    reader.Fail(5, absl::StrCat("\"bits\" is ", bits, ", must be within 2..5"));
  }
  m.bits = static_cast<int>(bits);
  const bool three_words = reader.TakeOneOf("window", {"w2", "w3"}) == 1;
  if (three_words != (bits == 5)) {
    reader.Fail(
        5, absl::StrCat("\"window\" is ", three_words ? "w3" : "w2", " at ",
                        bits, " bits, must be w3 exactly at 5 bits"));
  }
  const bool coupled =
      reader.TakeOneOf("boundary", {kIdentityName, kCoupledName}) == 1;
  m.boundary = coupled ? NpkBoundary::kCoupled : NpkBoundary::kIdentity;
  m.layer = reader.TakeNumber("layer");
  m.rank = reader.TakeNumber("rank");
  m.world_size = reader.TakeNumber("world_size");
  m.experts = reader.TakeNumber("experts");
  m.hidden = reader.TakeNumber("hidden");
  m.intermediate = reader.TakeNumber("intermediate_local");
  m.intermediate_global = reader.TakeNumber("intermediate_global");
  const int64_t first_atom = reader.TakeNumber("first_atom");
  reader.TakeOneOf("activation", {"silu"});
  m.limit = reader.Take("limit");
  reader.TakeOneOf("order", {"gate-up"});
  reader.TakeOneOf("sign_generator", {coupled ? kSignGenerator : kNoSigns});
  m.model_id = reader.Take("model_id");
  m.encoder = reader.TakeDigest("encoder_sha256");
  m.design = reader.TakeDigest("design_sha256");
  const std::string bpw = reader.Take("payload_bpw");
  const size_t tensors = coupled ? kNpkTensors : kNpkTensors / 2;
  for (size_t i = 0; i < tensors; ++i) {
    header.digests[i] = reader.TakeDigest(absl::StrCat("sha256.", kNames[i]));
  }
  if (coupled) header.signs = reader.TakeDigest("sha256.signs");
  RETURN_IF_ERROR(reader.Finish());
  RETURN_IF_ERROR(CheckNpkTexts(m));

  // V6: geometry.
  const auto within = [](absl::string_view key, int64_t value, int64_t multiple,
                         int64_t max) {
    if (value > 0 && value <= max && value % multiple == 0) {
      return absl::OkStatus();
    }
    return NpkRuleError(
        6, absl::StrCat("\"", key, "\" is ", value, ", must be within ",
                        multiple, "..", max, " and a multiple of ", multiple));
  };
  constexpr auto kMax = static_cast<int64_t>(kChannelsMax);
  RETURN_IF_ERROR(within("experts", m.experts, 1, kNpkExpertsMax));
  RETURN_IF_ERROR(
      within("hidden", m.hidden, coupled ? kCoupledHidden : 128, kMax));
  RETURN_IF_ERROR(within("intermediate_local", m.intermediate,
                         coupled ? kCoupledInner : kNpkAtom, kMax));
  // V7: the rank's slice.
  if (m.world_size < 1 || m.rank >= m.world_size) {
    return NpkRuleError(
        7, absl::StrCat("\"rank\" is ", m.rank,
                        ", must be below \"world_size\", ", m.world_size));
  }
  if (m.world_size > kMax / m.intermediate ||
      m.world_size * m.intermediate != m.intermediate_global) {
    return NpkRuleError(
        7, absl::StrCat("\"intermediate_global\" is ", m.intermediate_global,
                        ", must be \"world_size\" ", m.world_size,
                        " times \"intermediate_local\" ", m.intermediate,
                        ", at most ", kMax));
  }
  if (first_atom != m.first_atom()) {
    return NpkRuleError(
        7, absl::StrCat("\"first_atom\" is ", first_atom, ", must be ",
                        m.first_atom(), ", rank * intermediate_local / 32"));
  }
  // V13: a stated rate that the tensors of V4 always have.
  if (bpw != PayloadBpw(m.bits)) {
    return NpkRuleError(
        13, absl::StrCat("\"payload_bpw\" is ", JsonQuote(bpw),
                         ", the tensors have ", PayloadBpw(m.bits)));
  }
  return header;
}

// A list of numbers under `key` of a tensor's entry.
bool IsList(const JsonNode& node, std::span<const uint64_t> wanted) {
  return node.kind == JsonNode::Kind::kArray &&
         std::equal(node.items.begin(), node.items.end(), wanted.begin(),
                    wanted.end(), [](const JsonNode& item, uint64_t value) {
                      return item.kind == JsonNode::Kind::kInteger &&
                             item.integer >= 0 &&
                             static_cast<uint64_t>(item.integer) == value;
                    });
}

// "[2, 3, 32]", or what else it is.
std::string ShowList(const JsonNode& node) {
  if (node.kind != JsonNode::Kind::kArray ||
      node.items.size() > kSafetensorsRankMax) {
    return JsonExcerpt(node);
  }
  return absl::StrCat("[",
                      absl::StrJoin(node.items, ", ",
                                    [](std::string* out, const JsonNode& item) {
                                      absl::StrAppend(out, JsonExcerpt(item));
                                    }),
                      "]");
}

// Rules V2, V4 and V3.
absl::Status CheckTensors(const JsonNode& root, const NpkMetadata& metadata,
                          uint64_t data_bytes) {
  const std::vector<SafetensorsTensor> wanted = NpkTensorsOf(metadata);
  std::set<absl::string_view> names;
  for (const SafetensorsTensor& tensor : wanted) names.insert(tensor.name);
  for (const JsonNode::Member& member : root.members) {
    if (member.key == "__metadata__" || names.contains(member.key)) continue;
    return NpkRuleError(
        2, absl::StrCat("tensor ", QuoteTensorName(member.key),
                        " does not belong to this boundary; tensors: ",
                        absl::StrJoin(names, ", ")));
  }
  for (const SafetensorsTensor& tensor : wanted) {
    const JsonNode* entry = root.Find(tensor.name);
    const std::string name =
        absl::StrCat("tensor ", QuoteTensorName(tensor.name));
    if (entry == nullptr) {
      return NpkRuleError(2, absl::StrCat(name, " is missing"));
    }
    const JsonNode* type = entry->Find("dtype");
    const JsonNode* shape = entry->Find("shape");
    const JsonNode* offsets = entry->Find("data_offsets");
    if (entry->members.size() != 3 || type == nullptr || shape == nullptr ||
        offsets == nullptr) {
      return NpkRuleError(
          4,
          absl::StrCat(name, " must have dtype, shape and data_offsets, has ",
                       JsonExcerpt(*entry)));
    }
    if (type->text != StoredTypeName(tensor.type) ||
        !IsList(*shape, tensor.shape())) {
      return NpkRuleError(4, absl::StrCat(name, " is ", JsonExcerpt(*type), " ",
                                          ShowList(*shape), ", must be ",
                                          tensor.TypeAndShape()));
    }
    const std::array<uint64_t, 2> place = {tensor.begin, tensor.end};
    if (!IsList(*offsets, place)) {
      return NpkRuleError(3, absl::StrCat(name, " lies at ", ShowList(*offsets),
                                          ", must lie at [", tensor.begin, ", ",
                                          tensor.end, "]"));
    }
  }
  if (wanted.back().end != data_bytes) {
    return NpkRuleError(
        3, absl::StrCat(
               "the last tensor ends at byte ", wanted.back().end, " of ",
               data_bytes, " behind the header; the file is ",
               wanted.back().end > data_bytes ? "cut short" : "too long"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status NpkRuleError(int rule, absl::string_view message) {
  return absl::InvalidArgumentError(
      absl::StrCat("rule V", rule, ": ", message));
}

absl::Status CheckNpkTexts(const NpkMetadata& metadata) {
  if (!IsClampLimit(metadata.limit)) {
    return NpkRuleError(
        15, absl::StrCat("\"limit\" is ", JsonQuote(metadata.limit),
                         ", must be inf or a decimal number of at least "
                         "0.015625, without exponent or needless zeros"));
  }
  if (metadata.model_id.size() > kModelIdBytesMax ||
      !IsPlain(metadata.model_id)) {
    return NpkRuleError(
        15, absl::StrCat("\"model_id\" is ", JsonQuote(metadata.model_id), ", ",
                         metadata.model_id.size(), " bytes, must be at most ",
                         kModelIdBytesMax,
                         " of printable ASCII without quotes and "
                         "backslashes"));
  }
  return absl::OkStatus();
}

double NpkMetadata::LimitValue() const {
  double value = 0;
  if (limit == "inf" || !absl::SimpleAtod(limit, &value)) {
    return std::numeric_limits<double>::infinity();
  }
  return value;
}

std::vector<SafetensorsTensor> NpkTensorsOf(const NpkMetadata& metadata) {
  const auto e = static_cast<uint64_t>(metadata.experts);
  const auto h = static_cast<uint64_t>(metadata.hidden);
  const auto i = static_cast<uint64_t>(metadata.intermediate);
  const auto words = static_cast<uint64_t>(16 * metadata.bits);

  struct Row {
    StoredType type;
    std::vector<uint64_t> shape;
  };

  std::vector<Row> rows = {{StoredType::kI16, {2, e, h / 16, i / 16, words}},
                           {StoredType::kI16, {e, i / 16, h / 16, words}},
                           {StoredType::kU8, {e, 2 * i, h / kScaleGroup}},
                           {StoredType::kU8, {e, h, i / kScaleGroup}}};
  if (metadata.boundary == NpkBoundary::kCoupled) {
    rows.push_back({StoredType::kF16, {h}});
    rows.push_back({StoredType::kF16, {e, 3, i}});
    rows.push_back({StoredType::kF16, {h}});
    rows.push_back({StoredType::kU8, {e}});
  }
  std::vector<SafetensorsTensor> tensors;
  uint64_t at = 0;
  for (size_t n = 0; n < rows.size(); ++n) {
    SafetensorsTensor& tensor = tensors.emplace_back();
    tensor.name = kNames[n];
    tensor.type = rows[n].type;
    tensor.rank = rows[n].shape.size();
    std::copy(rows[n].shape.begin(), rows[n].shape.end(), tensor.dims.begin());
    KILN_CHECK(at % kAlignment == 0);
    tensor.begin = at;
    uint64_t bytes = StoredTypeBits(tensor.type) / 8;
    for (const uint64_t dim : rows[n].shape) bytes *= dim;
    tensor.end = at += bytes;
  }
  return tensors;
}

std::string MakeNpkHead(const NpkMetadata& metadata,
                        std::span<const Digest> digests, const Digest& signs) {
  const std::vector<SafetensorsTensor> tensors = NpkTensorsOf(metadata);
  KILN_CHECK(digests.size() == tensors.size());
  std::vector<std::string> pairs;
  for (const auto& [key, value] : MakeMetadata(metadata, digests, signs)) {
    pairs.push_back(absl::StrCat(Quote(key), ":", Quote(value)));
  }
  std::map<absl::string_view, std::string> members;
  members["__metadata__"] = absl::StrCat("{", absl::StrJoin(pairs, ","), "}");
  for (const SafetensorsTensor& tensor : tensors) {
    members[tensor.name] =
        absl::StrCat("{\"data_offsets\":[", tensor.begin, ",", tensor.end,
                     "],\"dtype\":", Quote(StoredTypeName(tensor.type)),
                     ",\"shape\":[", absl::StrJoin(tensor.shape(), ","), "]}");
  }
  std::string json;
  for (const auto& [key, value] : members) {
    absl::StrAppend(&json, json.empty() ? "{" : ",", Quote(key), ":", value);
  }
  return WithLength(json + "}");
}

absl::StatusOr<NpkHeader> ParseNpkHeader(std::span<const uint8_t> file) {
  if (file.size() < kLengthBytes) {
    return NpkRuleError(
        1, absl::StrCat("the file has ", file.size(), " bytes, at least 8"));
  }
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | file[i];
  if (length > kNpkHeaderBytesMax || length > file.size() - kLengthBytes) {
    return NpkRuleError(
        1, absl::StrCat("the header's length is ", length, ", must be at most ",
                        std::min<uint64_t>(kNpkHeaderBytesMax,
                                           file.size() - kLengthBytes)));
  }
  const absl::string_view text = AsText(file.first(kLengthBytes + length));
  absl::StatusOr<JsonNode> root =
      ParseJson(text.substr(kLengthBytes), "header");
  if (!root.ok()) return NpkRuleError(1, root.status().message());
  if (root->kind != JsonNode::Kind::kObject) {
    return NpkRuleError(1, absl::StrCat("the header is ", JsonExcerpt(*root),
                                        ", must be an object"));
  }
  std::string canonical;
  RETURN_IF_ERROR(AppendCanonical(*root, &canonical));
  canonical = WithLength(std::move(canonical));
  if (canonical != text) {
    const size_t at =
        static_cast<size_t>(std::mismatch(canonical.begin(), canonical.end(),
                                          text.begin(), text.end())
                                .first -
                            canonical.begin());
    return NpkRuleError(
        1, absl::StrCat("the header differs at byte ", at,
                        " from its canonical form: sorted keys, no spaces, "
                        "padded with spaces to a multiple of 64"));
  }
  const JsonNode* metadata = root->Find("__metadata__");
  if (metadata == nullptr) {
    return NpkRuleError(15, "the header lacks \"__metadata__\"");
  }
  ASSIGN_OR_RETURN(NpkHeader header, ReadMetadata(*metadata));
  header.data_begin = text.size();
  RETURN_IF_ERROR(
      CheckTensors(*root, header.metadata, file.size() - header.data_begin));
  return header;
}

}  // namespace kiln
