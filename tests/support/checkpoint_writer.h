// Writes small checkpoints and safetensors files for tests, with its own
// encoder: what the readers under test must accept, and what they must refuse.

#ifndef KILN_TESTS_SUPPORT_CHECKPOINT_WRITER_H_
#define KILN_TESTS_SUPPORT_CHECKPOINT_WRITER_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kiln::testing {

struct TestTensor {
  std::string type;  // as in the file, for example "I16"
  std::vector<uint64_t> shape;
  std::string bytes;
};

// Tensor name to tensor. The map's order is the order of the bytes.
using TestTensors = std::map<std::string, TestTensor>;

// A whole file: 8-byte length, `json`, `data`.
std::string SafetensorsBytes(const std::string& json, const std::string& data);
std::string SafetensorsBytes(const TestTensors& tensors);
std::string SafetensorsBytes(
    const TestTensors& tensors,
    const std::map<std::string, std::string>& metadata);

// A folder below the test's temporary folder, removed with its files.
class TestFolder {
 public:
  TestFolder();
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  ~TestFolder();

  const std::string& path() const { return path_; }

  std::string At(const std::string& name) const { return path_ + "/" + name; }

  // Writes path()/name and returns its path.
  std::string Write(const std::string& name, const std::string& contents) const;

 private:
  std::string path_;
};

// Writes the tensors as `shards` files of about equal numbers of tensors and
// their index, or as model.safetensors for one shard.
void WriteCheckpoint(const TestFolder& folder, const TestTensors& tensors,
                     size_t shards);

// An EXL3 group `key` of random payload: finite scales of order one. `codebook`
// is "3inst", "mcg" or "mul1".
void AddExl3(const std::string& key, uint64_t in, uint64_t out, uint64_t bits,
             const std::string& codebook, uint64_t seed, TestTensors* tensors);

// Names of the experts' tensors in one model family.
struct TestNaming {
  std::string prefix = "model.";  // before "layers."
  std::string block = "mlp.experts";
  std::string gate = "gate_proj";
  std::string up = "up_proj";
  std::string down = "down_proj";
};

struct TestRates {
  uint64_t gate = 4;
  uint64_t up = 4;
  uint64_t down = 4;
  std::string codebook = "mcg";
};

// All routed experts of one layer.
void AddExperts(const TestNaming& naming, int64_t layer, uint64_t hidden,
                uint64_t intermediate, uint64_t experts, const TestRates& rates,
                TestTensors* tensors);

// One layer of a dense model of Llama's form.
struct TestDense {
  std::string prefix = "model.";  // before "layers."
  uint64_t hidden = 256;
  uint64_t query = 384;      // 3 heads of 128
  uint64_t key_value = 128;  // 1 head
  uint64_t intermediate = 512;
  uint64_t bits = 4;
  std::string codebook = "mcg";
};

// config.json of `layers` such layers, a vocabulary of 1000; `more` is its end.
std::string DenseConfigJson(const std::string& model_type,
                            const TestDense& dense, int64_t layers,
                            const std::string& more = "");

// "model.layers.3.self_attn.q_proj".
std::string DenseKey(const TestDense& dense, int64_t layer,
                     const std::string& projection);

// The seven matrices of a layer.
void AddDenseLayer(const TestDense& dense, int64_t layer, TestTensors* tensors);

// `<key>.bias` of binary16 values of order one.
void AddBias(const std::string& key, uint64_t out, uint64_t seed,
             TestTensors* tensors);

// A checkpoint of the size of real ones: 48 layers of 64 experts, H 2048, I
// 768, 36,864 tensors in 100 shards with their index and config.json. The files
// are sparse: no room for the tensors' bytes.
void WriteLargeCheckpoint(const TestFolder& folder);

// "model.layers.3.mlp.experts.7.gate_proj".
std::string ExpertKey(const TestNaming& naming, int64_t layer, uint64_t expert,
                      const std::string& projection);

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_CHECKPOINT_WRITER_H_
