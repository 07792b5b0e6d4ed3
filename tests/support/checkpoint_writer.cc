#include "tests/support/checkpoint_writer.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kiln::testing {
namespace {

// SplitMix64.
uint64_t Next(uint64_t* state) {
  uint64_t z = *state += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

std::string RandomBytes(uint64_t count, uint64_t* state) {
  std::string bytes(count, '\0');
  for (char& c : bytes) c = static_cast<char>(Next(state));
  return bytes;
}

// Binary16 of a random sign and a magnitude within [0.5, 2).
std::string RandomScales(uint64_t count, uint64_t* state) {
  std::string bytes;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t random = Next(state);
    const uint64_t exponent = 14 + (random >> 20 & 1);
    const uint64_t bits =
        (random & 1) << 15 | exponent << 10 | (random >> 30 & 0x3FF);
    bytes.push_back(static_cast<char>(bits));
    bytes.push_back(static_cast<char>(bits >> 8));
  }
  return bytes;
}

std::string LittleEndian32(uint32_t value) {
  std::string bytes;
  for (int i = 0; i < 4; ++i)
    bytes.push_back(static_cast<char>(value >> 8 * i));
  return bytes;
}

}  // namespace

std::string SafetensorsBytes(const std::string& json, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) {
    bytes.push_back(static_cast<char>(uint64_t{json.size()} >> 8 * i));
  }
  return bytes + json + data;
}

std::string SafetensorsBytes(const TestTensors& tensors) {
  return SafetensorsBytes(tensors, {{"format", "pt"}});
}

std::string SafetensorsBytes(
    const TestTensors& tensors,
    const std::map<std::string, std::string>& metadata) {
  std::string json = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    absl::StrAppend(&json, json.back() == '{' ? "" : ",", "\"", key, "\":\"",
                    value, "\"");
  }
  json += "}";
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    absl::StrAppend(&json, ",\"", name, "\":{\"dtype\":\"", tensor.type,
                    "\",\"shape\":[", absl::StrJoin(tensor.shape, ","),
                    "],\"data_offsets\":[", data.size(), ",",
                    data.size() + tensor.bytes.size(), "]}");
    data += tensor.bytes;
  }
  return SafetensorsBytes(json + "}", data);
}

TestFolder::TestFolder() {
  path_ = ::testing::TempDir() + "kiln_formats_XXXXXX";
  EXPECT_NE(mkdtemp(path_.data()), nullptr);
}

TestFolder::~TestFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TestFolder::Write(const std::string& name,
                              const std::string& contents) const {
  std::ofstream file(At(name), std::ios::binary);
  file << contents;
  file.close();
  EXPECT_TRUE(file.good()) << At(name);
  return At(name);
}

void WriteCheckpoint(const TestFolder& folder, const TestTensors& tensors,
                     size_t shards) {
  if (shards == 1) {
    folder.Write("model.safetensors", SafetensorsBytes(tensors));
    return;
  }
  std::string map;
  std::vector<TestTensors> parts(shards);
  size_t position = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t shard = position++ * shards / tensors.size();
    parts[shard][name] = tensor;
    absl::StrAppend(&map, map.empty() ? "" : ",\n", "\"", name, "\": \"shard-",
                    shard, ".safetensors\"");
  }
  for (size_t i = 0; i < shards; ++i) {
    folder.Write(absl::StrCat("shard-", i, ".safetensors"),
                 SafetensorsBytes(parts[i]));
  }
  folder.Write("model.safetensors.index.json",
               absl::StrCat("{\"metadata\": {\"total_size\": 1},\n",
                            "\"weight_map\": {", map, "}}\n"));
}

void AddExl3(const std::string& key, uint64_t in, uint64_t out, uint64_t bits,
             const std::string& codebook, uint64_t seed, TestTensors* tensors) {
  uint64_t state = seed;
  (*tensors)[key + ".trellis"] = {"I16",
                                  {in / 16, out / 16, 16 * bits},
                                  RandomBytes(in * out / 8 * bits, &state)};
  (*tensors)[key + ".suh"] = {"F16", {in}, RandomScales(in, &state)};
  (*tensors)[key + ".svh"] = {"F16", {out}, RandomScales(out, &state)};
  if (codebook == "mcg") {
    (*tensors)[key + ".mcg"] = {"I32", {}, LittleEndian32(0xCBAC1FED)};
  } else if (codebook == "mul1") {
    (*tensors)[key + ".mul1"] = {"I32", {}, LittleEndian32(0x83DCD12D)};
  }
}

std::string ExpertKey(const TestNaming& naming, int64_t layer, uint64_t expert,
                      const std::string& projection) {
  return absl::StrCat(naming.prefix, "layers.", layer, ".", naming.block, ".",
                      expert, ".", projection);
}

void AddExperts(const TestNaming& naming, int64_t layer, uint64_t hidden,
                uint64_t intermediate, uint64_t experts, const TestRates& rates,
                TestTensors* tensors) {
  for (uint64_t e = 0; e < experts; ++e) {
    const uint64_t seed = static_cast<uint64_t>(layer) * 4096 + e * 4;
    AddExl3(ExpertKey(naming, layer, e, naming.gate), hidden, intermediate,
            rates.gate, rates.codebook, seed, tensors);
    AddExl3(ExpertKey(naming, layer, e, naming.up), hidden, intermediate,
            rates.up, rates.codebook, seed + 1, tensors);
    AddExl3(ExpertKey(naming, layer, e, naming.down), intermediate, hidden,
            rates.down, rates.codebook, seed + 2, tensors);
  }
}

std::string DenseConfigJson(const std::string& model_type,
                            const TestDense& dense, int64_t layers,
                            const std::string& more) {
  return absl::StrCat(
      "{\"model_type\": \"", model_type, "\", \"hidden_act\": \"silu\", ",
      "\"hidden_size\": ", dense.hidden,
      ", \"intermediate_size\": ", dense.intermediate,
      ", \"num_attention_heads\": ", dense.query / 128,
      ", \"num_key_value_heads\": ", dense.key_value / 128,
      ", \"head_dim\": 128, \"vocab_size\": 1000, ",
      "\"torch_dtype\": \"bfloat16\", \"num_hidden_layers\": ", layers, more,
      "}");
}

std::string DenseKey(const TestDense& dense, int64_t layer,
                     const std::string& projection) {
  return absl::StrCat(dense.prefix, "layers.", layer, ".", projection);
}

void AddDenseLayer(const TestDense& dense, int64_t layer,
                   TestTensors* tensors) {
  const struct {
    const char* projection;
    uint64_t in;
    uint64_t out;
  } matrices[] = {{"self_attn.q_proj", dense.hidden, dense.query},
                  {"self_attn.k_proj", dense.hidden, dense.key_value},
                  {"self_attn.v_proj", dense.hidden, dense.key_value},
                  {"self_attn.o_proj", dense.query, dense.hidden},
                  {"mlp.gate_proj", dense.hidden, dense.intermediate},
                  {"mlp.up_proj", dense.hidden, dense.intermediate},
                  {"mlp.down_proj", dense.intermediate, dense.hidden}};

  uint64_t seed = static_cast<uint64_t>(layer) * 8;
  for (const auto& matrix : matrices) {
    AddExl3(DenseKey(dense, layer, matrix.projection), matrix.in, matrix.out,
            dense.bits, dense.codebook, seed++, tensors);
  }
}

void AddBias(const std::string& key, uint64_t out, uint64_t seed,
             TestTensors* tensors) {
  uint64_t state = seed;
  (*tensors)[key + ".bias"] = {"F16", {out}, RandomScales(out, &state)};
}

void WriteLargeCheckpoint(const TestFolder& folder) {
  constexpr int kLayers = 48;
  constexpr uint64_t kExperts = 64;
  constexpr size_t kShards = 100;
  constexpr uint64_t kHidden = 2048;
  constexpr uint64_t kIntermediate = 768;
  folder.Write(
      "config.json",
      absl::StrCat("{\"model_type\": \"qwen3_moe\", \"hidden_act\": \"silu\", ",
                   "\"hidden_size\": ", kHidden,
                   ", \"moe_intermediate_size\": ", kIntermediate,
                   ", \"num_experts\": ", kExperts,
                   ", \"num_experts_per_tok\": 8, ",
                   "\"num_hidden_layers\": ", kLayers, "}"));
  std::vector<std::string> heads(kShards);
  std::vector<uint64_t> sizes(kShards, 0);
  std::string map;
  size_t position = 0;
  const auto add = [&](const std::string& name, const char* type,
                       const std::string& shape, uint64_t bytes) {
    const size_t shard = position++ / 4 % kShards;
    absl::StrAppend(&heads[shard], heads[shard].empty() ? "{" : ",", "\"", name,
                    "\":{\"dtype\":\"", type, "\",\"shape\":[", shape,
                    "],\"data_offsets\":[", sizes[shard], ",",
                    sizes[shard] + bytes, "]}");
    sizes[shard] += bytes;
    absl::StrAppend(&map, map.empty() ? "" : ",\n", "\"", name, "\": \"shard-",
                    shard, ".safetensors\"");
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    for (uint64_t expert = 0; expert < kExperts; ++expert) {
      for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
        const bool down = projection[0] == 'd';
        const uint64_t in = down ? kIntermediate : kHidden;
        const uint64_t out = down ? kHidden : kIntermediate;
        const std::string key = ExpertKey({}, layer, expert, projection);
        add(key + ".trellis", "I16",
            absl::StrCat(in / 16, ",", out / 16, ",64"), in * out / 2);
        add(key + ".suh", "F16", absl::StrCat(in), 2 * in);
        add(key + ".svh", "F16", absl::StrCat(out), 2 * out);
        add(key + ".mcg", "I32", "", 4);
      }
    }
  }
  for (size_t i = 0; i < kShards; ++i) {
    const std::string name = absl::StrCat("shard-", i, ".safetensors");
    const std::string head = SafetensorsBytes(heads[i] + "}", "");
    folder.Write(name, head);
    std::error_code error;
    std::filesystem::resize_file(folder.At(name), head.size() + sizes[i],
                                 error);
    EXPECT_FALSE(error) << folder.At(name) << ": " << error.message();
  }
  folder.Write("model.safetensors.index.json",
               absl::StrCat("{\"weight_map\": {", map, "}}"));
}

}  // namespace kiln::testing
