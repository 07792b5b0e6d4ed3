// The vector files of the format specification on a GPU. Needs NVRTC, a driver
// and a folder with the files (tests/data/vectors).
//
//   vector_harness [--vectors DIR] [--nvrtc FILE] [--quick] [--filter TEXT]
//       [--threads N] [--self-check | --compile-only ARCH]
//
// Layers: every moe_*.json, the extent of qsrt_atoms_v1*.json and, for
// TrellisMX, layers of random streams go through every template that serves
// them on the device. Points are taken so that every value of every axis comes
// in, --quick, or comes in beside every value of the first one. Each runs on
// poisoned and on cleared memory, for every count up to the file's tokens, and
// its rows must be those that the file expects.
//
// Parts: mxfp8.json, e4m3_and_scale_layout.json, hadamard.json, codebooks.json
// and tiles.json meet what the kernels are made of (vector_kernels.h), bit for
// bit but for Hadamard transforms. Every decoder decodes all 65,536 states at
// each position of a lane.
//
// What has nothing on a GPU: sqg_fp16, which no kernel decodes; the offsets of
// a plane of scales, the geometry of atoms and btx_manifest.json, which are
// laid out or read on the host; and coupled_signs.json, since signs are drawn
// by `kiln prepare` and lie in a prepared layer as binary16 numbers. No file
// has a layer that signs are part of. The layers of TrellisMX have those of
// draws 1 to 7; what they must give is computed by the references, which the
// host's tests hold against the specification.
//
// --filter takes the layers whose names, or the parts if their name "parts",
// have a text. --self-check needs no GPU and no NVRTC: it builds every layer,
// holds the host's references against it, takes its points for sm_80, sm_90a
// and sm_120a, and holds the tables that the device must meet against the
// files' digests. --compile-only compiles what would run.
// Exit status: 0 all passed, 1 a case failed, 2 wrong use or missing library,
// 77 no driver.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "device/half.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "templates/formats/mxfp8.h"
#include "templates/formats/npk_law.h"
#include "templates/formats/qsrt_extent.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/op_qsrt.h"
#include "templates/fused_moe/qsrt_workload.h"
#include "templates/fused_moe/template_mx_cuda.h"
#include "templates/fused_moe/trellis_codebook.h"
#include "templates/registry.h"
#include "tests/gpu/template_harness.h"
#include "tests/gpu/vector_kernels.h"
#include "tests/support/native_layer.h"
#include "tests/templates/mx_call.h"
#include "tests/templates/qsrt_call.h"
#include "tests/templates/qsrt_vector_atoms.h"
#include "tests/templates/test_data.h"

namespace kiln::gpu {
namespace {

using nlohmann::json;
using testing::FilesNamed;
using testing::ReadJson;
using testing::Sha256Hex;
using testing::VectorsFolder;

// ---- layers ----------------------------------------------------------------

// Rows that a layer must give.
struct Rows {
  const char* what;
  ReferenceMode mode;          // of a reference that gives them
  std::vector<double> values;  // [tokens][H]
  double limit;                // of the relative error of a row
};

struct Layer {
  std::string name;
  RequestGeometry geometry;
  uint32_t tokens = 0;
  std::vector<uint32_t> capacities;  // that plans are made for
  std::vector<std::string> buffers;  // by slot; that of the output is not read
  size_t out_slot = 0;
  std::vector<Rows> expected;
};

// Of a row in binary16: sums of another order now and then round a number to
// its other neighbour. Biased sums of EXL3 weights leave one boundary out.
constexpr double kHalfMax = 1e-3;
constexpr double kBiasedMax = 1.5e-3;
// Of a row in E4M3: an operand of fc2 that moves to its neighbour, an eighth of
// itself, is up to this much of a row (intermediate 128); not to quantise at
// all is 4e-2.
constexpr double kCodeMax = 5e-3;

std::vector<double> Flatten(const json& rows) {
  std::vector<double> values;
  for (const json& row : rows) {
    for (const json& value : row) values.push_back(value.get<double>());
  }
  return values;
}

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

std::string HalvesOf(const json& list) {
  return Bytes(list.get<std::vector<uint16_t>>());
}

// The experts of a case's routes, -1 for none: its map is applied.
std::vector<int32_t> ExpertsOf(const json& c) {
  std::vector<int32_t> experts;
  const json& map = c.at("expert_map");
  for (const json& row : c.at("topk_ids")) {
    for (const json& item : row) {
      auto id = item.get<int32_t>();
      if (!map.is_null()) {
        const bool inside = id >= 0 && id < static_cast<int32_t>(map.size());
        id = inside ? map.at(static_cast<size_t>(id)).get<int32_t>() : -1;
      }
      experts.push_back(id);
    }
  }
  return experts;
}

// One rate's words of a case, whose digest it has.
std::string WordsOf(const json& c, const char* name, uint64_t stream) {
  const auto count = c.at("E").get<size_t>() * c.at("H").get<size_t>() *
                     c.at("I").get<size_t>() / 16 * c.at("K").get<size_t>();
  const std::vector<uint16_t> words =
      testing::SplitMix64(c.at("seed").get<uint64_t>() + stream).Words(count);
  if (Sha256Hex(words) != c.at("payload_sha256").at(name)) {
    Die(std::string("the words of ") + name + " have another digest");
  }
  return Bytes(words);
}

Layer Exl3Layer(const std::string& name, const json& c, Codebook codebook) {
  Layer layer;
  layer.name = name;
  RequestGeometry& g = layer.geometry;
  g.hidden = c.at("H");
  g.intermediate = c.at("I");
  g.experts = c.at("E");
  g.top_k = c.at("topk");
  g.weights.codebook = codebook;
  const int bits = c.at("K");
  g.weights.bits = {.gate = bits, .up = bits, .down = bits};
  g.weights.shared_scales = c.at("shared_h_scales");
  g.io_dtype = DType::kF16;
  g.id_dtype = DType::kI32;
  g.deterministic = false;  // sums without an order included
  if (c.at("activation") != "silu") Die(name + ": no EXL3 layer is like that");
  layer.tokens = c.at("M");
  layer.capacities = {layer.tokens, 64};
  std::string rotations;
  const std::string tables[] = {HalvesOf(c.at("gate_svh")),
                                HalvesOf(c.at("up_svh")),
                                HalvesOf(c.at("down_suh"))};
  const auto row = static_cast<size_t>(2 * g.intermediate);
  for (size_t e = 0; e < static_cast<size_t>(g.experts); ++e) {
    for (const std::string& table : tables) {
      rotations += table.substr(e * row, row);
    }
  }
  std::vector<float> weights;
  for (const double w : Flatten(c.at("topk_weights_f32"))) {
    weights.push_back(static_cast<float>(w));
  }
  layer.buffers = {HalvesOf(c.at("x_fp16")),
                   Bytes(ExpertsOf(c)),
                   Bytes(weights),
                   WordsOf(c, "gate", 1),
                   WordsOf(c, "up", 2),
                   WordsOf(c, "down", 3),
                   HalvesOf(c.at("gate_suh")),
                   HalvesOf(c.at("up_suh")),
                   rotations,
                   HalvesOf(c.at("down_svh")),
                   ""};
  layer.out_slot = static_cast<size_t>(FusedMoeParam::kOut);
  layer.expected = {{"float64", ReferenceMode::kFloat64,
                     Flatten(c.at("expected_f64")), kFusedMoeTolerance},
                    {"staged", ReferenceMode::kStaged,
                     Flatten(c.at("expected_staged_w4a16_f32")), kHalfMax}};
  return layer;
}

RequestGeometry QsrtGeometry(int64_t hidden, int64_t experts, int64_t top_k,
                             Recipe recipe) {
  RequestGeometry g;
  g.hidden = hidden;
  g.intermediate = kQsrtIntermediate;
  g.experts = experts;
  g.top_k = top_k;
  g.io_dtype = DType::kF16;
  g.id_dtype = DType::kI32;
  g.weights.format = WeightFormat::kQsrt;
  g.recipe = recipe;
  g.qsrt.pairs = PairKinds::kP24P33;
  g.qsrt.decode_max_tokens = recipe == Recipe::kW4A8 ? 64 : 0;
  return g;
}

ReferenceMode StagedOf(const RequestGeometry& g) {
  return g.recipe == Recipe::kW4A8 ? ReferenceMode::kStagedW4A8
                                   : ReferenceMode::kStaged;
}

// Of a call that is filled.
Layer QsrtLayer(std::string name, testing::QsrtCall call,
                std::vector<double> expected) {
  const bool codes = call.geometry.recipe == Recipe::kW4A8;
  Layer layer;
  layer.name = std::move(name) + (codes ? " w4a8" : " w4a16");
  layer.geometry = call.geometry;
  layer.tokens = call.tokens;
  layer.capacities = {layer.tokens, 64};
  layer.buffers = std::move(call.buffers);
  layer.out_slot = static_cast<size_t>(QsrtParam::kOut);
  layer.expected = {{"staged", StagedOf(layer.geometry), std::move(expected),
                     codes ? kCodeMax : kHalfMax}};
  return layer;
}

// A file's one rate as the low record of its pair of rates.
//   pairs: of the request; P33 is of both
Layer SqgLayer(const std::string& name, const json& c, Recipe recipe,
               PairKinds pairs) {
  RequestGeometry g = QsrtGeometry(c.at("H"), c.at("E"), c.at("topk"), recipe);
  g.qsrt.pairs = pairs;
  g.weights.shared_scales = c.at("shared_h_scales");
  g.activation =
      c.at("activation") == "situ" ? Activation::kSitu : Activation::kSilu;
  const int bits = c.at("K");
  if (bits != 2 && bits != 3) Die(name + ": no pair of rates begins so");
  if (c.at("M") != testing::kQsrtFileTokens) Die(name + ": other tokens");
  const QsrtWorkload workload(g, 11);
  testing::QsrtCall call(workload, DrawKind::kUniform, 0,
                         testing::kQsrtFileTokens);
  std::vector<double> expected;
  // P24 is mode 1, P33 mode 0.
  testing::FillFromQsrtFile(name, bits == 2 ? 1 : 0, static_cast<size_t>(bits),
                            bits == 2 ? 4 : 3, &call, &expected);
  if (::testing::Test::HasFailure()) Die(name + ": not the call's sizes");
  call.at(QsrtParam::kTopkIds) = Bytes(ExpertsOf(c));
  return QsrtLayer(name + " " + std::string(PairKindsName(pairs)),
                   std::move(call), std::move(expected));
}

// An extent whose decoded matrices qsrt_vectors_test holds against the file,
// which has no activations: what it gives is that of the references.
Layer AtomsLayer(const std::string& name, const json& e, Recipe recipe) {
  const testing::QsrtVectorAtoms atoms(e);
  if (!atoms.decoded()) Die(name + ": payload_base64 is none");
  std::vector<int32_t> fc1, fc2;
  for (const json& expert : e.at("experts")) {
    fc1.push_back(expert.at("fc1_mode_P24"));
    fc2.push_back(expert.at("fc2_mode_P24"));
  }
  const auto source = TrellisFromQsrt(atoms.extent());
  if (!source.ok()) Die(name + ": " + std::string(source.status().message()));

  RequestGeometry g =
      QsrtGeometry(atoms.extent().hidden,
                   static_cast<int64_t>(atoms.ids().size()), 2, recipe);
  g.weights.shared_scales = (*source)->layout().shared_scales;
  g.io_dtype = DType::kBf16;
  const QsrtWorkload workload(g, 11);
  testing::QsrtCall call(workload, DrawKind::kUniform, 0, 6);
  const std::pair<FusedMoeParam, QsrtParam> tensors[] = {
      {FusedMoeParam::kWGate, QsrtParam::kWGate},
      {FusedMoeParam::kWUp, QsrtParam::kWUp},
      {FusedMoeParam::kWDown, QsrtParam::kWDown},
      {FusedMoeParam::kGateSuh, QsrtParam::kGateSuh},
      {FusedMoeParam::kUpSuh, QsrtParam::kUpSuh},
      {FusedMoeParam::kRotations, QsrtParam::kRotations},
      {FusedMoeParam::kDownSvh, QsrtParam::kDownSvh}};
  for (const auto& [from, to] : tensors) {
    std::string tensor = testing::ReadSlot(source->get(), from);
    if (tensor.size() != call.at(to).size()) Die(name + ": not the op's sizes");
    call.at(to) = std::move(tensor);
  }
  call.Set(QsrtParam::kModesFc1, fc1);
  call.Set(QsrtParam::kModesFc2, fc2);
  // Its scales do not take back the growth of products, which a binary16 would
  // not hold for x of order one: 2^-6 of it.
  std::string& x = call.at(QsrtParam::kX);
  for (size_t at = 0; at < x.size(); at += 2) {
    uint16_t bits = 0;
    std::memcpy(&bits, x.data() + at, 2);
    if ((bits & 0x7F80) > 6 << 7) bits -= 6 << 7;
    std::memcpy(x.data() + at, &bits, 2);
  }
  const std::vector<double> expected = call.Expected(StagedOf(g));
  return QsrtLayer(name, std::move(call), expected);
}

// A layer of random streams and scales whose signs are those of the draws.
//   arm: kSmallM, kDirectRp2 or kGrouped
Layer MxLayer(int bits, MxArm arm, MxBoundary boundary) {
  RequestGeometry g;
  g.hidden = 512;
  g.intermediate = 256;
  g.experts = 5;
  g.top_k = 3;
  g.io_dtype = DType::kBf16;
  g.id_dtype = DType::kI32;
  g.weights.format = WeightFormat::kTrellisMx;
  g.weights.bits = {.gate = bits, .up = bits, .down = bits};
  g.recipe = Recipe::kW4A8;
  g.mx.limit = "10";
  g.mx.boundary = boundary;
  constexpr uint32_t kCapacity = 16;
  g.mx.smallm_max_tokens = arm == MxArm::kSmallM ? kCapacity : 0;
  if (arm == MxArm::kDirectRp2) {
    g.mx.direct_max_tokens = kCapacity;
    g.mx.remainder = Remainder::kRp2;
  }
  const testing::MxCall call(g, 5, 77 + static_cast<uint64_t>(bits));
  Layer layer;
  layer.name = "trellis_mx K" + std::to_string(bits) + " " +
               std::string(MxArmName(arm)) +
               (boundary == MxBoundary::kCoupled ? ", signs" : ", identity");
  layer.geometry = g;
  layer.tokens = 5;
  layer.capacities = {5, kCapacity};
  layer.buffers = call.buffers;
  layer.out_slot = call.out_slot();
  const ReferenceMode mode = arm == MxArm::kSmallM ? ReferenceMode::kStaged
                             : arm == MxArm::kDirectRp2
                                 ? ReferenceMode::kStagedW4A8Rp2
                                 : ReferenceMode::kStagedW4A8;
  layer.expected = {{"staged", mode, call.Expected(mode),
                     arm == MxArm::kGrouped ? kMxOneTermTolerance : kHalfMax}};
  return layer;
}

std::vector<Layer> AllLayers() {
  std::vector<Layer> layers;
  const auto files = FilesNamed(VectorsFolder(), "moe_", ".json");
  const auto atoms = FilesNamed(VectorsFolder(), "qsrt_atoms_v1", ".json");
  if (files.empty() || atoms.empty()) {
    Die("no moe_*.json and qsrt_atoms_v1*.json below " +
        VectorsFolder().string() + "; give --vectors DIR");
  }
  for (const std::filesystem::path& path : files) {
    const json file = ReadJson(path);
    const json& c = file.at("case");
    const std::string name =
        std::filesystem::relative(path, VectorsFolder()).string();
    const std::string codebook = c.at("codebook");
    std::optional<Codebook> exl3;
    for (const TrellisCodebook known :
         {TrellisCodebook::k3Inst, TrellisCodebook::kMcg,
          TrellisCodebook::kMul1}) {
      if (TrellisCodebook(known).name() == codebook) exl3 = known.request();
    }
    if (exl3.has_value()) {
      layers.push_back(Exl3Layer(name, c, *exl3));
    } else if (codebook == "sqg_e4m3") {
      for (const Recipe recipe : {Recipe::kW4A16, Recipe::kW4A8}) {
        layers.push_back(SqgLayer(name, c, recipe, PairKinds::kP24P33));
        if (c.at("K") != 3) continue;
        layers.push_back(SqgLayer(name, c, recipe, PairKinds::kP33P43));
      }
    } else {
      Die(name + ": no kernel decodes " + codebook);
    }
  }
  for (const std::filesystem::path& path : atoms) {
    const json file = ReadJson(path);
    for (const Recipe recipe : {Recipe::kW4A16, Recipe::kW4A8}) {
      layers.push_back(
          AtomsLayer(path.filename().string(), file.at("extent"), recipe));
    }
  }
  for (const MxArm arm : {MxArm::kSmallM, MxArm::kDirectRp2, MxArm::kGrouped}) {
    for (int bits = 2; bits <= 5; ++bits) {
      layers.push_back(MxLayer(bits, arm, MxBoundary::kCoupled));
    }
    layers.push_back(MxLayer(4, arm, MxBoundary::kIdentity));
  }
  return layers;
}

// ---- points ----------------------------------------------------------------

kiln::Problem ProblemOf(const Layer& layer, uint32_t capacity,
                        const std::string& arch) {
  kiln::Problem problem;
  problem.geometry = layer.geometry;
  problem.interval = {1, capacity};
  problem.device = AssumedProfile({.backend = Backend::kCuda,
                                   .level = std::atoi(arch.c_str() + 3),
                                   .arch_specific = arch.back() == 'a'});
  return problem;
}

// Templates that serve a layer on `arch`, with some candidate for as few tokens
// as it has.
std::vector<const KernelTemplate*> TemplatesOf(const Layer& layer,
                                               const std::string& arch) {
  std::vector<const KernelTemplate*> found;
  const kiln::Problem problem = ProblemOf(layer, layer.tokens, arch);
  for (const KernelTemplate* from :
       TemplatesFor(layer.geometry, Backend::kCuda)) {
    if (from->Supports(layer.geometry, problem.device.target).ok() &&
        from->Enumerate(problem, 1).legal != 0) {
      found.push_back(from);
    }
  }
  return found;
}

using Value = std::pair<std::string, int64_t>;

// What a point shows: the values of its axes, or each beside that of the axis
// that the kernels differ in most.
std::set<std::pair<Value, Value>> Shown(const Assignment& point, bool quick) {
  const char* first = point.count("tokens_tile") != 0 ? "tokens_tile" : "sum";
  Value lead;
  if (!quick && point.count(first) != 0) lead = {first, point.at(first)};
  std::set<std::pair<Value, Value>> shown;
  for (const auto& [axis, value] : point) shown.insert({lead, {axis, value}});
  return shown;
}

// Few points of a layer that show what all of them do.
std::vector<Assignment> PointsOf(const Layer& layer, const KernelTemplate* from,
                                 const std::string& arch, bool quick) {
  const std::vector<Assignment> all =
      from->Enumerate(ProblemOf(layer, layer.tokens, arch),
                      std::numeric_limits<size_t>::max())
          .points;
  std::vector<std::set<std::pair<Value, Value>>> shows;
  std::set<std::pair<Value, Value>> left;
  for (const Assignment& point : all) {
    shows.push_back(Shown(point, quick));
    left.insert(shows.back().begin(), shows.back().end());
  }
  std::vector<Assignment> points;
  while (!left.empty()) {
    size_t best = 0, most = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      const auto fresh = static_cast<size_t>(
          std::count_if(shows[i].begin(), shows[i].end(),
                        [&](const auto& s) { return left.count(s) != 0; }));
      if (fresh > most) {
        most = fresh;
        best = i;
      }
    }
    for (const auto& s : shows[best]) left.erase(s);
    points.push_back(all[best]);
  }
  return points;
}

// ---- running layers --------------------------------------------------------

double LimitOf(const Rows& rows, const Assignment& point) {
  const auto sum = point.find("sum");
  const bool biased = sum != point.end() && sum->second != 0;
  return biased ? std::max(rows.limit, kBiasedMax) : rows.limit;
}

class LayerSuite {
 public:
  LayerSuite(std::string arch, bool quick, Programs* programs)
      : arch_(std::move(arch)), quick_(quick), programs_(programs) {}

  // Compiles what the layers need; dies where NVRTC refuses it.
  void Compile(const std::vector<Layer>& layers, int threads) const {
    std::vector<SourceUnit> units = {VectorUnit()};
    size_t points = 0;
    for (const Layer& layer : layers) {
      const Target target = ProblemOf(layer, 1, arch_).device.target;
      for (const KernelTemplate* from : TemplatesOf(layer, arch_)) {
        for (const Assignment& point : PointsOf(layer, from, arch_, quick_)) {
          ++points;
          for (SourceUnit& unit :
               from->MakeUnits(layer.geometry, target, point)) {
            units.push_back(std::move(unit));
          }
        }
      }
    }
    programs_->Prepare(units, threads);
    std::printf("%zu points of %zu layers compiled for %s\n", points,
                layers.size(), arch_.c_str());
    std::fflush(stdout);
  }

  bool Run(const Layer& layer) {
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<Address> slots;
    for (size_t i = 0; i < layer.buffers.size(); ++i) {
      if (i == layer.out_slot) {
        slots.push_back(0);  // that of each launch
        continue;
      }
      const std::string& bytes = layer.buffers[i];
      if (bytes.empty()) Die(layer.name + ": an empty buffer");
      buffers.push_back(std::make_unique<Buffer>(
          std::vector<char>(bytes.begin(), bytes.end())));
      slots.push_back(buffers.back()->address());
    }
    bool ok = true;
    const auto templates = TemplatesOf(layer, arch_);
    if (templates.empty()) {
      std::printf("FAIL %s: no template serves it on %s\n", layer.name.c_str(),
                  arch_.c_str());
      return false;
    }
    for (const KernelTemplate* from : templates) {
      ok = RunTemplate(layer, from, slots) && ok;
    }
    for (const auto& buffer : buffers) {
      if (buffer->RedZonesIntact()) continue;
      std::printf("FAIL %s: wrote beside an input\n", layer.name.c_str());
      ok = false;
    }
    programs_->Clear();
    return ok;
  }

 private:
  bool RunTemplate(const Layer& layer, const KernelTemplate* from,
                   const std::vector<Address>& slots) {
    const auto width = static_cast<size_t>(layer.geometry.hidden);
    std::vector<double> worst(layer.expected.size(), 0);
    u64 runs = 0, failed = 0;
    const std::vector<Assignment> points = PointsOf(layer, from, arch_, quick_);
    for (const Assignment& point : points) {
      for (const uint32_t capacity : layer.capacities) {
        const kiln::Problem problem = ProblemOf(layer, capacity, arch_);
        if (!Legal(from, problem, point)) continue;
        const Candidate candidate = Make(from, problem, point);
        const Loaded plan(candidate, programs_);
        for (u32 m = 1; m <= layer.tokens; ++m) {
          std::string wrong;
          const std::vector<float> out =
              Launch(layer, plan, slots, m, 0xFF, &wrong);
          const std::vector<float> again =
              Launch(layer, plan, slots, m, 0x00, &wrong);
          if (candidate.body.deterministic &&
              std::memcmp(out.data(), again.data(), out.size() * 4) != 0) {
            wrong += " another result in cleared memory;";
          }
          for (size_t r = 0; r < layer.expected.size(); ++r) {
            const Rows& rows = layer.expected[r];
            const double error = std::max(ErrorOf(out, rows.values, width),
                                          ErrorOf(again, rows.values, width));
            worst[r] = std::max(worst[r], error);
            if (error <= LimitOf(rows, point)) continue;
            char text[64];
            std::snprintf(text, sizeof(text), " %.2e from %s;", error,
                          rows.what);
            wrong += text;
          }
          ++runs;
          if (wrong.empty()) continue;
          ++failed;
          std::printf("FAIL %s m=%u of %u %s:%s\n", layer.name.c_str(), m,
                      capacity, AssignmentText(point).c_str(), wrong.c_str());
        }
      }
    }
    if (runs == 0) ++failed;
    std::string errors;
    for (size_t r = 0; r < worst.size(); ++r) {
      char text[64];
      std::snprintf(text, sizeof(text), " %.2e %s", worst[r],
                    layer.expected[r].what);
      errors += text;
    }
    std::printf("%-46s %-22s %3zu points %5llu runs, worst%s%s\n",
                layer.name.c_str(), std::string(from->name()).c_str(),
                points.size(), static_cast<unsigned long long>(runs),
                errors.c_str(), failed == 0 ? "" : "  FAILED");
    std::fflush(stdout);
    return failed == 0;
  }

  // Of the worst of the rows that were computed; infinite where one is NaN.
  static double ErrorOf(const std::vector<float>& out,
                        const std::vector<double>& want, size_t width) {
    for (const float value : out) {
      if (std::isnan(value)) return INFINITY;
    }
    return testing::WorstError(out, want, width);
  }

  static std::vector<float> Launch(const Layer& layer, const Loaded& plan,
                                   std::vector<Address> slots, u32 m,
                                   unsigned char fill, std::string* wrong) {
    Buffer arena(plan.body().arena.bytes);
    std::vector<float> out(m * static_cast<size_t>(layer.geometry.hidden));
    Buffer result(out.size() * sizeof(float));
    if (arena.bytes() > 0) {
      Check(driver.fill(arena.address(), fill, arena.bytes()), "cuMemsetD8");
    }
    slots[layer.out_slot] = result.address();
    for (size_t i = 0; i < plan.body().steps.size(); ++i) {
      plan.Launch(i, slots, arena.address(), m, nullptr);
    }
    Check(driver.synchronize(), layer.name.c_str());
    Check(driver.to_host(out.data(), result.address(), result.bytes()),
          "cuMemcpyDtoH");
    if (!arena.RedZonesIntact() || !result.RedZonesIntact()) {
      *wrong += " wrote outside its buffers;";
    }
    return out;
  }

  std::string arch_;
  bool quick_;
  Programs* programs_;
};

// ---- parts: what the device must give --------------------------------------

// One decoder of vector_kernels.h at one rate.
struct Decoder {
  std::string name;            // of its entries, "sqg_half_3"
  std::vector<uint16_t> want;  // by state
  size_t digest_bytes = 0;     // of a number, 0 where no digest is known
  std::string digest;
  std::string tile;  // its codebook in tiles.json, or empty
  int bits = 0;
};

std::string DigestOf(const std::vector<uint16_t>& values, size_t bytes) {
  if (bytes == 2) return Sha256Hex(values);
  return Sha256Hex(std::vector<uint8_t>(values.begin(), values.end()));
}

// The law's code where the sign of zero stays.
uint8_t NpkCode(uint32_t state) {
  const uint32_t w = (state * kd::kNpkMultiplier & kd::kNpkMask) ^ kd::kNpkFlip;
  const uint16_t sum =
      kd::hadd(static_cast<uint16_t>(w), static_cast<uint16_t>(w >> 16));
  return E4m3Of(kd::f16_to_f32(kd::hadd(sum, sum)));
}

template <typename Fn>
std::vector<uint16_t> ByState(Fn fn) {
  std::vector<uint16_t> values(65536);
  for (uint32_t s = 0; s < 65536; ++s) values[s] = static_cast<uint16_t>(fn(s));
  return values;
}

std::vector<Decoder> AllDecoders() {
  const json file = ReadJson(VectorsFolder() / "codebooks.json");
  const json& hashes = file.at("sha256");
  std::vector<Decoder> decoders;
  for (const TrellisCodebook codebook :
       {TrellisCodebook::k3Inst, TrellisCodebook::kMcg,
        TrellisCodebook::kMul1}) {
    const std::string name(TrellisCodebook(codebook).name());
    for (int bits = 1; bits <= 8; ++bits) {
      decoders.push_back({name + "_" + std::to_string(bits),
                          TrellisTableOf(codebook, bits).bits, 2,
                          hashes.at(name + "_65536_fp16_le"), name, bits});
    }
  }
  for (int bits = 2; bits <= 5; ++bits) {
    const std::string rate = std::to_string(bits);
    // The definition's digest of a device that keeps the sign of zero.
    decoders.push_back(
        {"npk_codes_" + rate, ByState(NpkCode), 1,
         "3a3231fe28889169c94820440869435b4c2b7ccb21ffd70a07ba8e3461b84618", "",
         bits});
    // Half of each number.
    decoders.push_back({"npk_half_" + rate, ByState([](uint32_t s) {
                          return kd::f32_to_f16(E4m3Value(kd::NpkByte(s)) / 2);
                        }),
                        0, "", "", bits});
  }
  for (int bits = 2; bits <= 4; ++bits) {
    const std::string rate = std::to_string(bits);
    const TrellisTable& table = TrellisTableOf(TrellisCodebook::kSqgE4m3, bits);
    const auto bfloat = [&](uint32_t s) {
      return kd::FloatBits(table.value[s]) >> 16;
    };
    decoders.push_back(
        {"sqg_half_" + rate, table.bits, 0, "", "sqg_e4m3", bits});
    decoders.push_back(
        {"sqg_bfloat_" + rate, ByState(bfloat), 0, "", "", bits});
    decoders.push_back({"sqg_codes_" + rate, ByState([&](uint32_t s) {
                          return SqgE4m3Bytes()[SqgRank(s, bits) >> 4];
                        }),
                        1, hashes.at("sqg_e4m3_K" + rate + "_65536_bytes"), "",
                        bits});
    decoders.push_back({"sqg_look_up_half_" + rate, ByState([&](uint32_t s) {
                          return kd::f32_to_f16(table.value[s] / 32);
                        }),
                        0, "", "", bits});
    decoders.push_back(
        {"sqg_look_up_bfloat_" + rate, ByState(bfloat), 0, "", "", bits});
  }
  return decoders;
}

// ---- parts: on the device --------------------------------------------------

class PartSuite {
 public:
  explicit PartSuite(Programs* programs) : programs_(programs) {}

  bool Run() {
    bool ok = RunStates();
    ok = RunTiles() && ok;
    for (const u32 own : {4u, 16u, 32u}) ok = RunMxfp8(own) && ok;
    ok = RunCodes() && ok;
    ok = RunHadamard() && ok;
    programs_->Clear();
    return ok;
  }

 private:
  // Launches an entry whose arguments are addresses.
  void Launch(const std::string& entry, u32 blocks, u32 threads,
              std::vector<Address> addresses) const {
    std::vector<void*> args;
    for (Address& address : addresses) args.push_back(&address);
    const Handle function = programs_->Function(unit_, entry);
    Check(driver.launch(function, blocks, 1, 1, threads, 1, 1, 0, nullptr,
                        args.data(), nullptr),
          entry.c_str());
    Check(driver.synchronize(), entry.c_str());
  }

  template <typename T>
  static std::vector<T> Read(const Buffer& buffer) {
    std::vector<T> values(buffer.bytes() / sizeof(T));
    Check(driver.to_host(values.data(), buffer.address(), buffer.bytes()),
          "cuMemcpyDtoH");
    if (!buffer.RedZonesIntact()) Die("a kernel wrote beside its buffer");
    return values;
  }

  static bool Report(const char* file, const std::string& what, u64 compared,
                     u64 failed, double worst = 0) {
    std::printf("%-26s %-24s %8llu compared, %llu wrong, worst %.2e%s\n", file,
                what.c_str(), static_cast<unsigned long long>(compared),
                static_cast<unsigned long long>(failed), worst,
                failed == 0 && compared > 0 ? "" : "  FAILED");
    std::fflush(stdout);
    return failed == 0 && compared > 0;
  }

  bool RunStates() const {
    bool ok = true;
    for (const Decoder& decoder : AllDecoders()) {
      const Buffer out(size_t{8} * 65536 * sizeof(uint16_t));
      Launch("states_" + decoder.name, 65536 / 256, 256, {out.address()});
      const auto got = Read<uint16_t>(out);
      u64 compared = 0, failed = 0;
      for (size_t position = 0; position < 8; ++position) {
        const std::vector<uint16_t> states(
            got.begin() + static_cast<ptrdiff_t>(position * 65536),
            got.begin() + static_cast<ptrdiff_t>((position + 1) * 65536));
        for (size_t s = 0; s < 65536; ++s) {
          ++compared;
          if (states[s] == decoder.want[s]) continue;
          if (failed++ == 0) {
            std::printf("FAIL %s: state %zu at %zu is 0x%04X, not 0x%04X\n",
                        decoder.name.c_str(), s, position, states[s],
                        decoder.want[s]);
          }
        }
        if (decoder.digest_bytes != 0 &&
            DigestOf(states, decoder.digest_bytes) != decoder.digest) {
          ++failed;
        }
      }
      ok = Report("codebooks.json", decoder.name, compared, failed) && ok;
    }
    return ok;
  }

  bool RunTiles() const {
    const json file = ReadJson(VectorsFolder() / "tiles.json");
    const auto to_k =
        file.at("stream_position_to_k").get<std::vector<size_t>>();
    const auto to_n =
        file.at("stream_position_to_n").get<std::vector<size_t>>();
    bool ok = true;
    const std::vector<Decoder> decoders = AllDecoders();
    for (const json& tile : file.at("tiles")) {
      const Buffer words(tile.at("words").get<std::vector<uint16_t>>());
      for (const Decoder& decoder : decoders) {
        if (decoder.bits != tile.at("K").get<int>() || decoder.tile.empty()) {
          continue;
        }
        const auto want =
            tile.at("fp16").at(decoder.tile).get<std::vector<uint16_t>>();
        const Buffer out(256 * sizeof(uint16_t));
        Launch("tile_" + decoder.name, 1, 32, {words.address(), out.address()});
        const auto got = Read<uint16_t>(out);
        u64 failed = 0;
        for (size_t p = 0; p < 256; ++p) {
          failed += got[p] == want.at(16 * to_k.at(p) + to_n.at(p)) ? 0 : 1;
        }
        ok = Report("tiles.json", decoder.name, 256, failed) && ok;
      }
    }
    return ok;
  }

  // The same number, or both NaN.
  static bool Same(float a, float b) {
    return std::isnan(b) ? std::isnan(a) : kd::FloatBits(a) == kd::FloatBits(b);
  }

  //   own: numbers that a thread has of a block
  bool RunMxfp8(u32 own) const {
    const json file = ReadJson(VectorsFolder() / "mxfp8.json");
    const json& blocks = file.at("blocks");
    // Whole warps: the rest is zero.
    const size_t count = CeilDiv(blocks.size(), 32) * 32;
    std::vector<uint32_t> bits(count * kMxfp8Block, 0);
    for (size_t b = 0; b < blocks.size(); ++b) {
      const auto of = blocks[b].at("x_f32_bits").get<std::vector<uint32_t>>();
      if (of.size() != kMxfp8Block) Die("mxfp8.json: a block is no block");
      std::copy(of.begin(), of.end(),
                bits.begin() + static_cast<ptrdiff_t>(b * kMxfp8Block));
    }
    const size_t threads = bits.size() / own;
    const Buffer x(bits);
    const Buffer codes(bits.size());
    const Buffer scale(threads);
    const Buffer rounded(bits.size() * sizeof(float));
    const Buffer power(threads * sizeof(float));
    Launch("quantise_" + std::to_string(own), static_cast<u32>(threads / 32),
           32,
           {x.address(), codes.address(), scale.address(), rounded.address(),
            power.address()});
    const auto got_codes = Read<uint8_t>(codes);
    const auto got_scale = Read<uint8_t>(scale);
    const auto got_rounded = Read<float>(rounded);
    const auto got_power = Read<float>(power);
    u64 compared = 0, failed = 0;
    for (size_t b = 0; b < blocks.size(); ++b) {
      const json& block = blocks[b];
      // Blocks that are not finite must be all NaN.
      const bool finite = !block.contains("policy");
      const auto want_scale = static_cast<uint8_t>(
          finite ? block.at("scale_byte").get<int>() : kScaleNan);
      const auto payload =
          finite ? block.at("payload").get<std::vector<uint8_t>>()
                 : std::vector<uint8_t>(kMxfp8Block, uint8_t{0x7F});
      u64 wrong = 0;
      for (size_t i = 0; i < kMxfp8Block; ++i) {
        const size_t at = b * kMxfp8Block + i;
        const size_t thread = at / own;
        compared += 4;
        wrong += got_codes[at] == payload.at(i) ? 0 : 1;
        wrong += got_scale[thread] == want_scale ? 0 : 1;
        wrong += Same(got_rounded[at], E4m3Value(payload.at(i))) ? 0 : 1;
        wrong +=
            Same(got_power[thread], static_cast<float>(Ue8m0Value(want_scale)))
                ? 0
                : 1;
      }
      failed += wrong;
      if (wrong == 0) continue;
      std::printf("FAIL mxfp8.json: \"%s\", %u numbers a thread\n",
                  block.at("name").get<std::string>().c_str(), own);
    }
    return Report("mxfp8.json", std::to_string(own) + " a thread", compared,
                  failed);
  }

  bool RunCodes() const {
    const json file = ReadJson(VectorsFolder() / "e4m3_and_scale_layout.json");
    const json& want = file.at("e4m3fn_values");
    const Buffer values(256 * sizeof(float));
    const Buffer again(256);
    const Buffer powers(256 * sizeof(float));
    Launch("codes", 1, 256,
           {values.address(), again.address(), powers.address()});
    const auto got = Read<float>(values);
    const auto got_again = Read<uint8_t>(again);
    const auto got_powers = Read<float>(powers);
    u64 failed = 0;
    for (size_t code = 0; code < 256; ++code) {
      const json& value = want.at(code);
      const float number = value.is_null() ? NAN : value.get<float>();
      const size_t back = value.is_null() ? 0x7F : code;
      failed += Same(got[code], number) ? 0 : 1;
      failed += got_again[code] == back ? 0 : 1;
      failed += Same(got_powers[code],
                     static_cast<float>(Ue8m0Value(static_cast<uint8_t>(code))))
                    ? 0
                    : 1;
    }
    return Report("e4m3_and_scale_layout.json", "E4M3 and UE8M0", 3 * 256,
                  failed);
  }

  bool RunHadamard() const {
    const json file = ReadJson(VectorsFolder() / "hadamard.json");
    bool ok = true;
    for (const json& item : file.at("cases")) {
      const auto numbers = item.at("x").get<std::vector<float>>();
      const auto want = item.at("y").get<std::vector<double>>();
      const size_t size = numbers.size();
      if (size != 128 && size != 512) Die("hadamard.json: another size");
      // Each quarter of 512 numbers, or all.
      std::vector<float> x;
      while (x.size() < 512) x.insert(x.end(), numbers.begin(), numbers.end());
      const Buffer in(x);
      const Buffer out(512 * sizeof(float));
      Launch("hadamard_" + std::to_string(size), 1, 32,
             {in.address(), out.address()});
      const auto got = Read<float>(out);
      double norm = 0;
      for (const double value : want) norm += value * value;
      u64 failed = 0;
      double worst = 0;
      for (size_t i = 0; i < 512; ++i) {
        const double error =
            std::fabs(got[i] - want.at(i % size)) / std::sqrt(norm);
        worst = std::max(worst, error);
        // Up to nine additions and a product, as on the host.
        if (!(error <= 16 * 0x1p-24)) ++failed;
      }
      ok = Report("hadamard.json", item.at("name").get<std::string>(), 512,
                  failed, worst) &&
           ok;
    }
    return ok;
  }

  Programs* programs_;
  SourceUnit unit_ = VectorUnit();
};

// ---- without a device ------------------------------------------------------

// What the references of the host give for the buffers of an EXL3 or QSRT
// layer.
std::vector<double> ReferenceRows(const Layer& layer, ReferenceMode mode) {
  std::vector<const void*> slots;
  for (const std::string& buffer : layer.buffers) {
    slots.push_back(buffer.data());
  }
  const RequestGeometry& g = layer.geometry;
  std::vector<int64_t> rows(layer.tokens);
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<double> out(rows.size() * static_cast<size_t>(g.hidden));
  if (g.weights.format == WeightFormat::kQsrt) {
    const QsrtProblem problem(g, layer.tokens, slots);
    FusedMoeReferenceRows(problem.problem(), rows, mode, out.data(), 2);
    return out;
  }
  const auto halves = [&](FusedMoeParam param) {
    return static_cast<const uint16_t*>(slots[static_cast<size_t>(param)]);
  };
  FusedMoeProblem p;
  p.tokens = layer.tokens;
  p.hidden = g.hidden;
  p.intermediate = g.intermediate;
  p.experts = g.experts;
  p.top_k = g.top_k;
  p.codebook = g.weights.codebook;
  p.bits.gate = g.weights.bits.gate;
  p.bits.up = g.weights.bits.up;
  p.bits.down = g.weights.bits.down;
  p.shared_scales = g.weights.shared_scales;
  p.x_dtype = g.io_dtype;
  p.id_dtype = g.id_dtype;
  p.x = halves(FusedMoeParam::kX);
  p.topk_ids = slots[static_cast<size_t>(FusedMoeParam::kTopkIds)];
  p.topk_weights = static_cast<const float*>(
      slots[static_cast<size_t>(FusedMoeParam::kTopkWeights)]);
  p.w_gate = halves(FusedMoeParam::kWGate);
  p.w_up = halves(FusedMoeParam::kWUp);
  p.w_down = halves(FusedMoeParam::kWDown);
  p.gate_suh = halves(FusedMoeParam::kGateSuh);
  p.up_suh = halves(FusedMoeParam::kUpSuh);
  p.rotations = halves(FusedMoeParam::kRotations);
  p.down_svh = halves(FusedMoeParam::kDownSvh);
  FusedMoeReferenceRows(p, rows, mode, out.data(), 2);
  return out;
}

// Whether the buffers are those of the rows; what TrellisMX must give was
// computed from them.
bool ReferencesAgree(const Layer& layer) {
  if (layer.geometry.weights.format == WeightFormat::kTrellisMx) return true;
  bool ok = true;
  for (const Rows& rows : layer.expected) {
    const std::vector<double> found = ReferenceRows(layer, rows.mode);
    const double error = testing::WorstError(
        std::vector<float>(found.begin(), found.end()), rows.values,
        static_cast<size_t>(layer.geometry.hidden));
    // As vectors_test has it.
    const bool codes = rows.mode == ReferenceMode::kStagedW4A8;
    if (error <= (codes ? 3e-3 : 1e-4)) continue;
    std::printf("FAIL %s: the reference is %.2e from %s\n", layer.name.c_str(),
                error, rows.what);
    ok = false;
  }
  return ok;
}

bool SelfCheck(const std::vector<Layer>& layers, bool quick) {
  bool ok = true;
  for (const Layer& layer : layers) {
    const size_t numbers =
        layer.tokens * static_cast<size_t>(layer.geometry.hidden);
    for (const Rows& rows : layer.expected) {
      const bool some =
          std::any_of(rows.values.begin(), rows.values.end(),
                      [](double v) { return std::fabs(v) > 1e-3; });
      if (rows.values.size() == numbers && some) continue;
      std::printf("FAIL %s: expects no rows of %s\n", layer.name.c_str(),
                  rows.what);
      ok = false;
    }
    ok = ReferencesAgree(layer) && ok;
    for (const char* arch : {"sm_80", "sm_90a", "sm_120a"}) {
      size_t points = 0, plans = 0;
      for (const KernelTemplate* from : TemplatesOf(layer, arch)) {
        for (const Assignment& point : PointsOf(layer, from, arch, quick)) {
          ++points;
          for (const uint32_t capacity : layer.capacities) {
            const kiln::Problem problem = ProblemOf(layer, capacity, arch);
            const auto body = from->MakeBody(problem, point);
            if (!body.ok()) continue;
            ++plans;
            if (body->params.size() == layer.buffers.size()) continue;
            std::printf("FAIL %s: %zu buffers for %zu slots\n",
                        layer.name.c_str(), layer.buffers.size(),
                        body->params.size());
            ok = false;
          }
        }
      }
      std::printf("%-46s %-8s %4zu points, %4zu plans\n", layer.name.c_str(),
                  arch, points, plans);
      if (points == 0 || plans < points) {
        std::printf("FAIL %s: too few plans for %s\n", layer.name.c_str(),
                    arch);
        ok = false;
      }
    }
  }
  for (const Decoder& decoder : AllDecoders()) {
    if (decoder.digest_bytes == 0 ||
        DigestOf(decoder.want, decoder.digest_bytes) == decoder.digest) {
      continue;
    }
    std::printf("FAIL %s: its table has another digest\n",
                decoder.name.c_str());
    ok = false;
  }
  return ok;
}

// ---- command line ----------------------------------------------------------

struct Settings {
  std::string nvrtc, filter, compile_only;
  bool quick = false, self_check = false;
  int threads = 0;
};

Settings ParseSettings(int argc, char** argv) {
  Settings s;
  const auto value = [&](int* i) -> std::string {
    if (*i + 1 >= argc) Die(std::string(argv[*i]) + " needs a value");
    return argv[++*i];
  };
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    if (a == "--vectors") {
      setenv("KILN_VECTORS_DIR", value(&i).c_str(), 1);
    } else if (a == "--nvrtc") {
      s.nvrtc = value(&i);
    } else if (a == "--filter") {
      s.filter = value(&i);
    } else if (a == "--threads") {
      s.threads = std::atoi(value(&i).c_str());
    } else if (a == "--compile-only") {
      s.compile_only = value(&i);
    } else if (a == "--quick") {
      s.quick = true;
    } else if (a == "--self-check") {
      s.self_check = true;
    } else {
      Die("unknown option " + a);
    }
  }
  if (!s.compile_only.empty() && !s.compile_only.starts_with("sm_")) {
    Die("--compile-only needs an architecture such as sm_90a");
  }
  if (s.threads <= 0) {
    s.threads = static_cast<int>(
        std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
  }
  return s;
}

int Main(int argc, char** argv) {
  const Settings s = ParseSettings(argc, argv);
  const bool on_host = s.self_check || !s.compile_only.empty();
  // No driver: nothing to build.
  if (!on_host) driver = OpenDriver();
  std::vector<Layer> layers = AllLayers();
  std::erase_if(layers, [&](const Layer& layer) {
    return layer.name.find(s.filter) == std::string::npos;
  });
  const bool parts =
      std::string_view("parts").find(s.filter) != std::string_view::npos;
  if (layers.empty() && !parts) {
    Die("neither \"parts\" nor a layer's name has \"" + s.filter + "\"");
  }
  if (s.self_check) return SelfCheck(layers, s.quick) ? 0 : 1;
  const Nvrtc nvrtc = OpenNvrtc(s.nvrtc);
  const std::string arch = on_host ? s.compile_only : OpenDevice(nvrtc).arch;
  Programs programs(nvrtc, arch);
  LayerSuite suite(arch, s.quick, &programs);
  suite.Compile(layers, s.threads);
  if (on_host) return 0;
  bool ok = parts ? PartSuite(&programs).Run() : true;
  for (const Layer& layer : layers) ok = suite.Run(layer) && ok;
  std::printf("%s\n", ok ? "passed" : "FAILED");
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace kiln::gpu

int main(int argc, char** argv) {
  try {
    return kiln::gpu::Main(argc, argv);
  } catch (const std::exception& error) {
    kiln::gpu::Die(error.what());
  }
}
