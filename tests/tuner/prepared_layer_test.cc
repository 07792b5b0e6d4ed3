// A prepared TrellisMX layer through its frozen bundle against the oracle over
// the sidecar that it was prepared from, bit for bit.

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/manifest.h"
#include "device/half.h"
#include "gtest/gtest.h"
#include "runtime/kiln.h"
#include "templates/formats/npk_prepare.h"
#include "templates/formats/npk_reference.h"
#include "templates/fused_moe/op_mx.h"
#include "tests/support/golden.h"
#include "tests/support/npk_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/mx_call.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/freeze.h"
#include "tuner/loaded_plan.h"
#include "tuner/prewarm.h"

namespace kiln {
namespace {

using testing::CcCpuPath;
using testing::MxCall;
using testing::ScratchFolder;
using testing::WhyNoCcCpu;

// The layer of SmallNpk, with each of the two arms for few tokens.
constexpr char kModel[] = R"({
 "schema": "kiln.model/1", "name": "Prepared",
 "requests": [
  {"name": "direct", "op": "fused_moe", "layers": 1,
   "hidden": 512, "intermediate": 128, "experts": 3, "top_k": 2,
   "activation": "silu", "io_dtype": "bf16", "id_dtype": "i32",
   "weights": {"format": "trellis_mx", "bits": 3, "limit": "10"},
   "recipe": "w4a8", "direct_max_tokens": 16, "remainder": "rp2",
   "capacities": [16, 64]},
  {"name": "smallm", "op": "fused_moe", "layers": 1,
   "hidden": 512, "intermediate": 128, "experts": 3, "top_k": 2,
   "activation": "silu", "io_dtype": "bf16", "id_dtype": "i32",
   "weights": {"format": "trellis_mx", "bits": 3, "limit": "10"},
   "recipe": "w4a8", "smallm_max_tokens": 16, "capacities": [16, 64]}]})";

class Silent : public ProgressSink {
 public:
  void Update(Stage, size_t, size_t, const std::string&) override {}

  void Note(const std::string&) override {}
};

// Loaded as an engine does, unloaded at the end of its scope.
class Engine {
 public:
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  ~Engine() {
    if (modules_ != nullptr) kiln_modules_unload(modules_, nullptr);
  }

  absl::Status Load(const std::string& bundle) {
    kiln_error_t error = {};
    kiln_bundle_t* opened = nullptr;
    RETURN_IF_ERROR(
        RuntimeStatus(kiln_bundle_open_memory(bundle.data(), bundle.size(),
                                              nullptr, &opened, &error),
                      error));
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.flags = KILN_LOAD_ALLOW_UNQUALIFIED;
    const kiln_status_t status =
        kiln_modules_load(opened, &options, &modules_, &error);
    kiln_bundle_close(opened, nullptr);
    return RuntimeStatus(status, error);
  }

  absl::Status Launch(const std::string& name, uint64_t m,
                      const std::vector<const void*>& params) const {
    kiln_error_t error = {};
    const kiln_entry_t* entry = nullptr;
    RETURN_IF_ERROR(RuntimeStatus(
        kiln_entry_find(modules_, name.c_str(), m, &entry, &error), error));
    uint64_t bytes = 0;
    uint64_t alignment = 0;
    RETURN_IF_ERROR(RuntimeStatus(
        kiln_entry_arena_size(entry, &bytes, &alignment, &error), error));
    std::vector<char> arena(bytes + alignment, '\xFF');
    const auto at = std::bit_cast<uintptr_t>(arena.data());
    void* aligned = arena.data() + (alignment - at % alignment) % alignment;
    return RuntimeStatus(kiln_launch(modules_, entry, m, params.data(),
                                     static_cast<uint32_t>(8 * params.size()),
                                     aligned, bytes, nullptr, &error),
                         error);
  }

 private:
  kiln_modules_t* modules_ = nullptr;
};

class PreparedLayerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoCcCpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_OK_AND_ASSIGN(manifest_, ParseManifest(kModel, "model.json"));
    WriteAndPrepare();
    FreezeAndLoad();
  }

  // The sidecar of a rank, and its tensors as `kiln prepare` writes them.
  void WriteAndPrepare() {
    const NpkMetadata metadata = testing::SmallNpk();
    const std::string path = folder_.File(
        NpkFileName(metadata.layer, metadata.rank, metadata.world_size));
    ASSERT_OK(WriteFileAtomically(
        path,
        testing::NpkBytes(metadata, testing::RandomNpkTensors(metadata, 5))));
    ASSERT_OK_AND_ASSIGN(sidecar_, NpkSidecar::Open(path));
    PrepareOptions options;
    options.layer = metadata.layer;
    options.rank = metadata.rank;
    options.ranks = metadata.world_size;
    ASSERT_OK_AND_ASSIGN(
        const PreparedNpkLayer prepared,
        PrepareNpkLayer(folder_.path(), folder_.path(), options));
    ASSERT_OK_AND_ASSIGN(SafetensorsFile file,
                         SafetensorsFile::Open(prepared.path));
    for (const SafetensorsTensor& tensor : file.header().tensors()) {
      ASSERT_OK_AND_ASSIGN(const auto bytes, file.Bytes(tensor));
      prepared_[std::string(tensor.name)].assign(bytes.begin(), bytes.end());
    }
  }

  void FreezeAndLoad() {
    absl::StatusOr<Target> target = HostCpuTarget();
    ASSERT_OK(target);
    PrewarmOptions options;
    options.targets = {*target};
    options.candidates_max = 1;
    options.jobs = 2;
    options.race_seconds_max = 0.05;
    options.race_worker = std::string(std::getenv("KILN_BIN_DIR")) + "/kiln";
    options.toolchain = [](Backend, ProbeMemo* memo) {
      return ProbeCcCpu(CcCpuPath(), memo);
    };
    const ScratchFolder folder;
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(folder.path(), CacheMode::kReadWrite));
    Silent silent;
    ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                         Prewarm(manifest_, options, &cache, &silent));
    ASSERT_TRUE(report.complete);
    FreezePolicy policy;
    policy.allow_unqualified = true;
    policy.regret_cap = std::nullopt;
    ASSERT_OK_AND_ASSIGN(const FreezeResult frozen,
                         Freeze(manifest_, options, policy, &cache));
    ASSERT_EQ(frozen.plans, 4u);
    ASSERT_EQ(frozen.golden, 4u);
    ASSERT_OK(engine_.Load(frozen.bytes));
  }

  // A launch of m tokens gives the bits of the sidecar's oracle in every row.
  void ExpectTheBits(const Request& request, uint32_t m, uint64_t seed) {
    const RequestGeometry& g = request.geometry;
    MxCall call(g, m, seed);
    std::vector<const void*> params;
    const std::vector<ParamDecl> declared = MxParams(g);
    size_t used = 0;
    for (size_t s = 0; s < declared.size(); ++s) {
      std::string& buffer = call.buffers[s];
      if (const auto it = prepared_.find(declared[s].name);
          it != prepared_.end()) {
        ASSERT_EQ(buffer.size(), it->second.size()) << declared[s].name;
        buffer = it->second;
        ++used;
      }
      params.push_back(buffer.data());
    }
    ASSERT_EQ(used, prepared_.size());
    std::string& out = call.buffers[call.out_slot()];
    out.assign(out.size(), '\xFF');
    params[call.out_slot()] = out.data();
    ASSERT_OK(engine_.Launch(request.name, m, params));

    NpkProblem problem;
    problem.weights = &*sidecar_;
    problem.tokens = m;
    problem.top_k = g.top_k;
    problem.x = reinterpret_cast<const uint16_t*>(call.at(MxParam::kX).data());
    problem.topk_ids =
        reinterpret_cast<const int32_t*>(call.at(MxParam::kTopkIds).data());
    problem.topk_weights =
        reinterpret_cast<const float*>(call.at(MxParam::kTopkWeights).data());
    std::vector<int64_t> rows(m);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<double> expected(m * static_cast<size_t>(g.hidden));
    ASSERT_EQ(out.size(), expected.size() * sizeof(float));
    ReferenceMode mode = ReferenceMode::kSequentialW4A8;
    if (m <= g.mx.smallm_max_tokens) mode = ReferenceMode::kSequential;
    if (m <= g.mx.direct_max_tokens) mode = ReferenceMode::kSequentialW4A8Rp2;
    NpkReferenceRows(problem, rows, mode, expected.data());
    size_t zeros = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      float found;
      std::memcpy(&found, out.data() + i * sizeof(found), sizeof(found));
      ASSERT_TRUE(std::isfinite(found)) << "element " << i;
      ASSERT_EQ(kd::FloatBits(found),
                kd::FloatBits(static_cast<float>(expected[i])))
          << "row " << i / static_cast<size_t>(g.hidden) << ", column "
          << i % static_cast<size_t>(g.hidden);
      zeros += found == 0 ? 1 : 0;
    }
    EXPECT_LT(zeros, expected.size());
  }

  Manifest manifest_;
  ScratchFolder folder_;
  std::optional<NpkSidecar> sidecar_;
  std::map<std::string, std::string> prepared_;  // by tensor
  Engine engine_;
};

TEST_F(PreparedLayerTest, GivesTheBitsOfItsSidecarAtSevenCountsAlsoRepeated) {
  for (const Request& request : manifest_.requests) {
    for (const uint32_t m : {1u, 2u, 8u, 16u, 17u, 32u, 64u}) {
      for (const uint64_t seed : {1u, 2u}) {
        SCOPED_TRACE(::testing::Message()
                     << request.name << " m " << m << " inputs " << seed);
        ASSERT_NO_FATAL_FAILURE(ExpectTheBits(request, m, 100 * m + seed));
      }
    }
  }
}

}  // namespace
}  // namespace kiln
