#include "templates/formats/encoder_checkpoint.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "compiler/base/as_text.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/pending_folder.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "device/half.h"
#include "templates/formats/checkpoint.h"
#include "templates/formats/dense_layers.h"
#include "templates/formats/describe.h"
#include "templates/formats/encoder_matrix.h"
#include "templates/formats/exl3.h"
#include "templates/formats/routed_experts.h"

namespace kiln {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr uint64_t kTileWeights = 256;

// One tensor of the input and what becomes of it.
struct Item {
  enum class Kind { kCopied, kMatrix, kBias };

  const SafetensorsTensor* input = nullptr;
  Kind kind = Kind::kCopied;
  // Of a matrix.
  std::string key;  // without ".weight"
  int bits = 0;
  uint64_t in = 0;
  uint64_t out = 0;
};

int BitsOf(const Bits& bits, size_t projection) {
  return std::array{bits.gate, bits.up, bits.down}[projection];
}

absl::Status Refuse(const SafetensorsTensor& tensor, absl::string_view rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", QuoteTensorName(tensor.name), " ", rule));
}

// Real numbers of a shape that config.json gives.
absl::Status CheckReal(const SafetensorsTensor& tensor,
                       std::initializer_list<uint64_t> shape) {
  if (!std::equal(shape.begin(), shape.end(), tensor.shape().begin(),
                  tensor.shape().end())) {
    return Refuse(tensor,
                  absl::StrCat("is ", tensor.TypeAndShape(), ", must be [",
                               absl::StrJoin(shape, ", "), "] by config.json"));
  }
  if (tensor.type != StoredType::kF32 && tensor.type != StoredType::kF16 &&
      tensor.type != StoredType::kBf16) {
    return Refuse(tensor, absl::StrCat("is ", tensor.TypeAndShape(),
                                       ", must be F32, F16 or BF16"));
  }
  return absl::OkStatus();
}

constexpr absl::string_view kOnlyPlain =
    "is no \".weight\": only plain matrices are encoded";

SafetensorsTensor MakeTensor(absl::string_view name, StoredType type,
                             std::initializer_list<uint64_t> shape) {
  SafetensorsTensor tensor;
  tensor.name = name;
  tensor.type = type;
  tensor.rank = shape.size();
  std::copy(shape.begin(), shape.end(), tensor.dims.begin());
  return tensor;
}

// FNV-1a: a seed of its own for each matrix.
uint64_t SeedOf(uint64_t seed, absl::string_view key) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : key) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  }
  return hash ^ seed;
}

// config.json with "quantization_config" as its last member. The rest of the
// text stays as it is.
absl::StatusOr<std::string> AddQuantization(std::string text,
                                            const std::string& path,
                                            const EncodeOptions& options) {
  ASSIGN_OR_RETURN(const JsonNode root, ParseJson(text, path));
  if (const JsonNode* node = root.Find("quantization_config");
      node != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": has \"quantization_config\" ", JsonExcerpt(*node),
                     "; only checkpoints of real numbers are encoded"));
  }
  const Bits& bits = options.bits;
  std::string rate = absl::StrCat(bits.gate);
  if (bits.up != bits.gate || bits.down != bits.gate) {
    // The mean over an expert, whose three matrices have equal sizes.
    rate = absl::StrCat((bits.gate + bits.up + bits.down) / 3.0);
  }
  const size_t end = text.rfind('}');
  KILN_CHECK(end != std::string::npos);
  const size_t last = text.find_last_not_of(" \t\r\n", end - 1);
  text.resize(last + 1);
  absl::StrAppend(&text,
                  ",\n  \"quantization_config\": {\"quant_method\": \"exl3\", ",
                  "\"bits\": ", rate, ", \"codebook\": \"",
                  CodebookName(options.codebook), "\"}\n}\n");
  return text;
}

class CheckpointEncoder {
 public:
  CheckpointEncoder(const EncodeOptions& options, const AnyModelConfig& config,
                    Checkpoint* checkpoint)
      : options_(options), config_(config), checkpoint_(checkpoint) {}

  // Decides about every tensor.
  absl::Status Plan() {
    for (const SafetensorsFile& shard : checkpoint_->shards()) {
      std::vector<Item>& items = shards_.emplace_back();
      for (const SafetensorsTensor& tensor : shard.header().tensors()) {
        ASSIGN_OR_RETURN(Item item, PlanTensor(tensor));
        if (item.kind == Item::Kind::kMatrix) {
          ++result_.matrices;
          result_.weights += item.in * item.out;
        }
        items.push_back(std::move(item));
      }
    }
    if (result_.matrices > 0) return absl::OkStatus();
    const auto* experts = std::get_if<ModelConfig>(&config_);
    return absl::FailedPreconditionError(
        experts == nullptr
            ? absl::StrCat("has no matrix of a layer, such as "
                           "\"model.layers.0.",
                           kDenseProjections[0].name, ".weight\"")
            : absl::StrCat("has no tensor of a routed expert, such as "
                           "\"model.layers.0.",
                           experts->naming.block, ".0.",
                           experts->naming.projections[0], ".weight\""));
  }

  absl::StatusOr<EncodedCheckpoint> Write(PendingFolder* output) {
    std::map<std::string, std::string> weight_map;
    for (size_t i = 0; i < shards_.size(); ++i) {
      const std::string& input = checkpoint_->shards()[i].path();
      const std::string name = input.substr(input.rfind('/') + 1);
      RETURN_IF_ERROR(
          WriteShard(shards_[i], output->At(name), name, &weight_map));
    }
    result_.relative_error = energy_ > 0 ? squared_error_ / energy_ : 0;
    if (shards_.size() > 1) {
      RETURN_IF_ERROR(WriteIndex(output->At(kIndexName), weight_map));
    }
    return result_;
  }

 private:
  absl::StatusOr<Item> PlanTensor(const SafetensorsTensor& tensor) const {
    Item item;
    item.input = &tensor;
    if (!std::all_of(tensor.name.begin(), tensor.name.end(), [](char c) {
          return c > 0x20 && c < 0x7F && c != '"' && c != '\\';
        })) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", QuoteTensorName(tensor.name),
                       " has a name with other characters than printable "
                       "ASCII without quotes and backslashes"));
    }
    if (const auto* dense = std::get_if<DenseConfig>(&config_)) {
      RETURN_IF_ERROR(PlanDense(*dense, &item));
    } else {
      RETURN_IF_ERROR(PlanExpert(std::get<ModelConfig>(config_), &item));
    }
    if (item.kind != Item::Kind::kMatrix) return item;
    if (item.in % kHadamardBlock != 0 || item.out % kHadamardBlock != 0) {
      return Refuse(
          tensor,
          absl::StrCat("is ", tensor.TypeAndShape(),
                       ", both must be multiples of 128 (the Hadamard block)"));
    }
    item.key = std::string(absl::StripSuffix(tensor.name, ".weight"));
    return item;
  }

  absl::Status PlanExpert(const ModelConfig& config, Item* item) const {
    ASSIGN_OR_RETURN(const std::optional<RealMatrix> matrix,
                     FindRealMatrix(*item->input, config));
    if (!matrix.has_value()) return absl::OkStatus();
    item->kind = Item::Kind::kMatrix;
    item->bits = BitsOf(options_.bits, matrix->name.projection);
    item->in = matrix->in;
    item->out = matrix->out;
    return absl::OkStatus();
  }

  absl::Status PlanDense(const DenseConfig& config, Item* item) const {
    const SafetensorsTensor& tensor = *item->input;
    ASSIGN_OR_RETURN(const std::optional<DenseTensorName> name,
                     ParseDenseTensorName(tensor.name, config));
    if (!name.has_value()) return absl::OkStatus();
    const auto [in, out] = DenseShape(config, name->projection);
    item->in = static_cast<uint64_t>(in);
    item->out = static_cast<uint64_t>(out);
    item->bits = options_.bits.gate;
    if (name->suffix == "bias") {
      item->kind = Item::Kind::kBias;
      return CheckReal(tensor, {item->out});
    }
    if (name->suffix != "weight") return Refuse(tensor, kOnlyPlain);
    item->kind = Item::Kind::kMatrix;
    return CheckReal(tensor, {item->out, item->in});
  }

  absl::Status WriteShard(const std::vector<Item>& items,
                          const std::string& path, const std::string& file_name,
                          std::map<std::string, std::string>* weight_map) {
    std::deque<std::string> names;
    std::vector<SafetensorsTensor> tensors;
    const auto add = [&](const std::string& name, StoredType type,
                         std::initializer_list<uint64_t> shape) {
      tensors.push_back(MakeTensor(names.emplace_back(name), type, shape));
    };
    for (const Item& item : items) {
      if (item.kind == Item::Kind::kCopied) {
        tensors.push_back(*item.input);
        continue;
      }
      if (item.kind == Item::Kind::kBias) {
        add(std::string(item.input->name), StoredType::kF16, {item.out});
        continue;
      }
      const auto bits = static_cast<uint64_t>(item.bits);
      add(item.key + ".trellis", StoredType::kI16,
          {item.in / 16, item.out / 16, 16 * bits});
      add(item.key + ".suh", StoredType::kF16, {item.in});
      add(item.key + ".svh", StoredType::kF16, {item.out});
      if (options_.codebook == Codebook::kMcg) {
        add(item.key + ".mcg", StoredType::kI32, {});
      } else if (options_.codebook == Codebook::kMul1) {
        add(item.key + ".mul1", StoredType::kI32, {});
      }
    }
    for (const SafetensorsTensor& tensor : tensors) {
      (*weight_map)[std::string(tensor.name)] = file_name;
    }
    const std::string head = MakeSafetensorsHead(tensors, {{"format", "pt"}});
    PendingFile file(path);
    RETURN_IF_ERROR(file.Append(head));
    result_.bytes += head.size();
    for (const Item& item : items) {
      ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes,
                       checkpoint_->Bytes(*item.input));
      switch (item.kind) {
        case Item::Kind::kMatrix:
          RETURN_IF_ERROR(EncodeMatrix(item, bytes, &file));
          break;
        case Item::Kind::kBias:
          RETURN_IF_ERROR(NarrowBias(item, bytes, &file));
          break;
        case Item::Kind::kCopied:
          RETURN_IF_ERROR(file.Append(AsText(bytes)));
          result_.bytes += bytes.size();
          break;
      }
    }
    return file.Commit();
  }

  // EXL3 has biases of binary16.
  absl::Status NarrowBias(const Item& item, std::span<const uint8_t> bytes,
                          PendingFile* file) {
    ASSIGN_OR_RETURN(const std::vector<float> values,
                     ReadReals(*item.input, bytes));
    std::vector<uint16_t> narrow;
    for (const float value : values) {
      narrow.push_back(kd::f32_to_f16(value));
      if (std::isfinite(kd::f16_to_f32(narrow.back()))) continue;
      return Refuse(*item.input,
                    absl::StrCat("has at channel ", narrow.size() - 1,
                                 " a value that is not finite as binary16"));
    }
    result_.bytes += narrow.size() * sizeof(uint16_t);
    return file->Append(AsText(narrow));
  }

  absl::Status EncodeMatrix(const Item& item, std::span<const uint8_t> bytes,
                            PendingFile* file) {
    ASSIGN_OR_RETURN(const std::vector<float> stored,
                     ReadReals(*item.input, bytes));
    std::vector<float> weights(stored.size());
    for (uint64_t row = 0; row < item.out; ++row) {
      for (uint64_t column = 0; column < item.in; ++column) {
        weights[column * item.out + row] = stored[row * item.in + column];
      }
    }
    GridEncoder& encoder = EncoderOf(item.bits);
    encoder.set_progress([&](size_t tiles) {
      const std::lock_guard<std::mutex> lock(progress_mutex_);
      done_ += tiles;
      if (options_.progress) {
        options_.progress(done_, result_.weights / kTileWeights, item.key);
      }
    });
    absl::StatusOr<Exl3Encoding> encoding = EncodeExl3(
        weights, item.in, item.out, SeedOf(options_.seed, item.key), &encoder);
    if (!encoding.ok()) {
      return Annotate(
          encoding.status(),
          absl::StrCat(checkpoint_->PathOf(*item.input), ": tensor ",
                       QuoteTensorName(item.input->name)));
    }
    const double error =
        encoding->energy > 0 ? encoding->squared_error / encoding->energy : 0;
    if (result_.worst.empty() || error > result_.worst_error) {
      result_.worst = item.key;
      result_.worst_error = error;
    }
    energy_ += encoding->energy;
    squared_error_ += encoding->squared_error;

    std::vector<uint32_t> marker;
    if (options_.codebook == Codebook::kMcg) marker = {kMcgMarker};
    if (options_.codebook == Codebook::kMul1) marker = {kMul1Marker};
    for (const absl::string_view part :
         {AsText(encoding->trellis), AsText(encoding->suh),
          AsText(encoding->svh), AsText(marker)}) {
      RETURN_IF_ERROR(file->Append(part));
      result_.bytes += part.size();
    }
    return absl::OkStatus();
  }

  // Encoders are kept: making one costs a table and its rows of costs.
  GridEncoder& EncoderOf(int bits) {
    std::unique_ptr<GridEncoder>& encoder = encoders_[bits];
    if (encoder == nullptr) {
      encoder = std::make_unique<GridEncoder>(
          CodebookAlphabet(options_.codebook), bits, options_.threads);
    }
    return *encoder;
  }

  absl::Status WriteIndex(
      const std::string& path,
      const std::map<std::string, std::string>& weight_map) const {
    std::string text =
        absl::StrCat("{\n  \"metadata\": {\"total_size\": ", result_.bytes,
                     "},\n  \"weight_map\": {");
    const char* before = "\n";
    for (const auto& [tensor, shard] : weight_map) {
      absl::StrAppend(&text, before, "    ", JsonQuote(tensor), ": ",
                      JsonQuote(shard));
      before = ",\n";
    }
    text += "\n  }\n}\n";
    return WriteFileAtomically(path, text);
  }

  const EncodeOptions& options_;
  const AnyModelConfig& config_;
  Checkpoint* checkpoint_;
  std::vector<std::vector<Item>> shards_;
  std::map<int, std::unique_ptr<GridEncoder>> encoders_;
  std::mutex progress_mutex_;
  uint64_t done_ = 0;  // tiles
  EncodedCheckpoint result_;
  double energy_ = 0;
  double squared_error_ = 0;
};

}  // namespace

absl::StatusOr<std::optional<RealMatrix>> FindRealMatrix(
    const SafetensorsTensor& tensor, const ModelConfig& config) {
  ASSIGN_OR_RETURN(const std::optional<ExpertTensorName> name,
                   ParseExpertTensorName(tensor.name, config));
  if (!name.has_value()) return std::nullopt;
  if (name->suffix != "weight") return Refuse(tensor, kOnlyPlain);
  RealMatrix matrix;
  matrix.name = *name;
  const bool down = name->projection == kProjections - 1;
  matrix.in = static_cast<uint64_t>(down ? config.intermediate : config.hidden);
  matrix.out =
      static_cast<uint64_t>(down ? config.hidden : config.intermediate);
  RETURN_IF_ERROR(CheckReal(tensor, {matrix.out, matrix.in}));
  return matrix;
}

absl::StatusOr<std::vector<float>> ReadReals(const SafetensorsTensor& tensor,
                                             std::span<const uint8_t> bytes) {
  std::vector<float> values;
  if (tensor.type == StoredType::kF32) {
    values.resize(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    return values;
  }
  if (tensor.type != StoredType::kF16 && tensor.type != StoredType::kBf16) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", QuoteTensorName(tensor.name), " is ",
                     tensor.TypeAndShape(), ", must be F32, F16 or BF16"));
  }
  values.resize(bytes.size() / sizeof(uint16_t));
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
    values[i] = tensor.type == StoredType::kF16 ? kd::f16_to_f32(bits)
                                                : kd::bf16_to_f32(bits);
  }
  return values;
}

absl::StatusOr<EncodedCheckpoint> EncodeCheckpoint(
    const std::string& folder, const std::string& output,
    const EncodeOptions& options) {
  KILN_CHECK(options.threads >= 1);
  ASSIGN_OR_RETURN(const AnyModelConfig config, ReadAnyModelConfig(folder));
  const Bits& bits = options.bits;
  if (std::holds_alternative<DenseConfig>(config) &&
      (bits.up != bits.gate || bits.down != bits.gate)) {
    return absl::InvalidArgumentError(absl::StrCat(
        folder,
        ": is a dense model, whose matrices get one rate; the bits are ",
        bits.gate, ", ", bits.up, " and ", bits.down));
  }
  const std::string config_path = absl::StrCat(folder, "/config.json");
  ASSIGN_OR_RETURN(std::string config_text,
                   ReadFile(config_path, kModelConfigBytesMax));
  ASSIGN_OR_RETURN(config_text, AddQuantization(std::move(config_text),
                                                config_path, options));
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(folder));
  CheckpointEncoder encoder(options, config, &checkpoint);
  if (absl::Status status = encoder.Plan(); !status.ok()) {
    return Annotate(status, folder);
  }
  PendingFolder pending(output);
  RETURN_IF_ERROR(pending.status());
  ASSIGN_OR_RETURN(const EncodedCheckpoint encoded, encoder.Write(&pending));
  // Last: a folder with a configuration is a whole checkpoint.
  RETURN_IF_ERROR(WriteFileAtomically(pending.At("config.json"), config_text));
  pending.Commit();
  return encoded;
}

}  // namespace kiln
