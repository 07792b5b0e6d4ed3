#include "tests/support/tiny_bundle.h"

#include <gtest/gtest.h>

#include <cstring>

#include "compiler/base/digest.h"
#include "runtime/bundle_format.h"
#include "tests/support/golden.h"

namespace kiln::testing {
namespace {

const Target kCuda{
    .backend = Backend::kCuda, .level = 90, .arch_specific = true};
const Target kCpu{.backend = Backend::kCpu, .level = 2, .arch_specific = false};

Toolchain TinyToolchain() {
  return {.name = "nvrtc", .version = "13.0.88", .content = Sha256("nvrtc")};
}

PlanBody CudaBody(uint32_t capacity, int64_t tile) {
  PlanBody body;
  body.template_name = "fused_moe.cuda";
  body.template_version = 1;
  body.assignment = {{"tile", tile}};
  body.numerics_class = "f16-split1";
  body.tolerance = 0.02;
  body.params = {
      {.name = "x", .dtype = "bf16", .shape = "[m, H]"},
      {.name = "out", .dtype = "f32", .shape = "[m, H]", .output = true}};
  body.arena.Add("scratch", 64 * capacity);
  body.arena.Add("routes", 16 * capacity);
  Step fc1;
  fc1.label = "fc1";
  fc1.program = 0;
  fc1.entry = "fc1";
  fc1.grid = {LaunchDim::Of({.mul = 1, .add = 0, .div = 4}),
              LaunchDim::Constant(8), LaunchDim::Constant(1)};
  fc1.block = {128, 1, 1};
  fc1.dynamic_shared_bytes = 65536;
  fc1.args = {Arg::Param(0), Arg::Arena(1), Arg::Tokens(), Arg::U32(77)};
  Step fc2;
  fc2.label = "fc2";
  fc2.program = 1;
  fc2.entry = "fc2";
  fc2.grid = {LaunchDim{.a = {.mul = 1, .add = 0, .div = 1},
                        .b = {.mul = 0, .add = 32, .div = 1}},
              LaunchDim::Constant(1), LaunchDim::Constant(1)};
  fc2.block = {32, 4, 1};
  fc2.args = {Arg::Arena(0), Arg::Tokens(), Arg::Param(1),
              Arg::U64(0x1122334455667788u)};
  body.steps = {fc1, fc2};
  return body;
}

Plan MakePlan(const Target& target, Interval interval, PlanBody body,
              std::vector<Digest> programs) {
  Plan plan;
  plan.geometry = TinyGeometry();
  plan.target = target;
  plan.interval = interval;
  plan.body = std::move(body);
  plan.programs = std::move(programs);
  plan.evidence = {.state = PlanState::kMeasured,
                   .median_ns = 1250.5,
                   .default_median_ns = 1300,
                   .noise_floor = 0.004,
                   .worst_error = 0.0011,
                   .samples = 96,
                   .candidates = 12};
  return plan;
}

std::vector<BufferFill> CudaBuffers() {
  return {{.kind = BufferFill::Kind::kWords,
           .element_bytes = 2,
           .bytes_per_token = 2 * kTinyHidden,
           .a = 0x807f,
           .b = 0x3f00},
          {.kind = BufferFill::Kind::kNone,
           .element_bytes = 4,
           .bytes_per_token = 4 * kTinyHidden}};
}

PlanBody CpuBody(uint32_t capacity, uint32_t threads) {
  PlanBody body;
  body.template_name = "sumsq.cpu";
  body.template_version = 1;
  body.assignment = {{"threads", threads}};
  body.numerics_class = "f32";
  body.tolerance = 1e-6;
  body.cpu_threads = threads;
  body.params = {
      {.name = "x", .dtype = "f32", .shape = "[m, width]"},
      {.name = "out", .dtype = "f32", .shape = "[m]", .output = true}};
  body.arena.Add("scratch", sizeof(float) * kTinyWidth * capacity);
  Step square;
  square.label = "square";
  square.entry = "square";
  square.grid = {LaunchDim::Of({.mul = 1, .add = 0, .div = 1}),
                 LaunchDim::Constant(1), LaunchDim::Constant(1)};
  square.args = {Arg::Param(0), Arg::Arena(0), Arg::Tokens(),
                 Arg::U32(kTinyWidth)};
  Step sum = square;
  sum.label = "sum";
  sum.entry = "sum";
  sum.args = {Arg::Arena(0), Arg::Param(1), Arg::Tokens(),
              Arg::U32(kTinyWidth)};
  body.steps = {square, sum};
  return body;
}

Kernel CpuKernelRecord(const std::string& name, uint32_t bytes) {
  Kernel kernel;
  kernel.entry = name;
  kernel.params = {{.offset = 0, .bytes = bytes}};
  kernel.param_bytes = bytes;
  return kernel;
}

}  // namespace

RequestGeometry TinyGeometry() {
  RequestGeometry geometry;
  geometry.hidden = kTinyHidden;
  geometry.intermediate = 128;
  geometry.experts = 4;
  geometry.top_k = 2;
  geometry.weights.bits = {.gate = 4, .up = 4, .down = 3};
  return geometry;
}

std::shared_ptr<const Program> FakeProgram(const std::string& name,
                                           const Target& target,
                                           const std::string& image,
                                           std::vector<Kernel> kernels) {
  auto program = std::make_shared<Program>();
  program->key.preimage = name;
  program->key.digest = Sha256(name);
  program->target = target;
  program->toolchain = TinyToolchain();
  program->binary = image;
  program->binary_digest = Sha256(program->binary);
  program->kernels = std::move(kernels);
  return program;
}

BundleSection TinyCudaSection() {
  Kernel fc1;
  fc1.entry = "fc1";
  fc1.params = {{0, 8}, {8, 8}, {16, 4}, {20, 4}};
  fc1.param_bytes = 24;
  fc1.registers = 168;
  fc1.static_shared_bytes = 1024;
  fc1.local_bytes = 16;
  fc1.max_threads = 256;
  Kernel fc2;
  fc2.entry = "fc2";
  fc2.params = {{0, 8}, {8, 4}, {16, 8}, {24, 8}};
  fc2.param_bytes = 32;
  fc2.registers = 40;
  const std::string image1 =
      std::string("fc1 0:8 8:8 16:4 20:4 shared=1024 threads=256\n") + '\0';
  const std::string image2 =
      std::string("fc2 0:8 8:4 16:8 24:8 shared=0 threads=1024\n") + '\0';

  BundleSection section;
  section.target = kCuda;
  section.driver_version_min = 12040;
  section.programs = {FakeProgram("first", kCuda, image1, {fc1}),
                      FakeProgram("second", kCuda, image2, {fc2})};
  const std::vector<Digest> digests = {section.programs[0]->key.digest,
                                       section.programs[1]->key.digest};
  BundleEntry moe;
  moe.name = "moe";
  moe.geometry = TinyGeometry();
  moe.buffers = CudaBuffers();
  moe.plans = {MakePlan(kCuda, {1, 1}, CudaBody(1, 1), digests),
               MakePlan(kCuda, {2, 4}, CudaBody(4, 2), digests),
               MakePlan(kCuda, {5, 64}, CudaBody(64, 4), digests)};
  BundleEntry dense;
  dense.name = "dense";
  dense.geometry = TinyGeometry();
  dense.buffers = CudaBuffers();
  dense.plans = {MakePlan(kCuda, {1, 8}, CudaBody(8, 8), digests)};
  section.entries = {moe, dense};
  return section;
}

BundleSection TinyCpuSection(const std::string& binary) {
  BundleSection section;
  section.target = kCpu;
  section.programs = {
      FakeProgram("tiny", kCpu, binary,
                  {CpuKernelRecord("control", 8), CpuKernelRecord("count", 16),
                   CpuKernelRecord("square", 24), CpuKernelRecord("sum", 24)})};
  const std::vector<Digest> digests = {section.programs[0]->key.digest};
  BundleEntry entry;
  entry.name = "sumsq";
  entry.geometry = TinyGeometry();
  // Positive floats in [1, 2).
  entry.buffers = {{.kind = BufferFill::Kind::kWords,
                    .element_bytes = 4,
                    .bytes_per_token = 4 * kTinyWidth,
                    .a = 0x007fffff,
                    .b = 0x3f800000},
                   {.kind = BufferFill::Kind::kNone,
                    .element_bytes = 4,
                    .bytes_per_token = 4}};
  entry.plans = {MakePlan(kCpu, {1, 2}, CpuBody(2, 1), digests),
                 MakePlan(kCpu, {3, 256}, CpuBody(256, 2), digests)};
  section.entries = {entry};
  return section;
}

BundleSection ExampleSection() {
  const Target target{
      .backend = Backend::kCuda, .level = 80, .arch_specific = false};
  Kernel kernel;
  kernel.entry = "run";
  kernel.params = {{0, 8}, {8, 4}};
  kernel.param_bytes = 12;
  kernel.registers = 32;
  BundleSection section;
  section.target = target;
  section.driver_version_min = 12040;
  section.programs = {FakeProgram(
      "example", target, std::string("run 0:8 8:4\n") + '\0', {kernel})};
  PlanBody body;
  body.template_name = "fused_moe.cuda";
  body.template_version = 1;
  body.assignment = {{"tile", 8}};
  body.numerics_class = "f16";
  body.tolerance = 0.5;
  body.params = {
      {.name = "out", .dtype = "f32", .shape = "[m, H]", .output = true}};
  Step step;
  step.label = "moe";
  step.entry = "run";
  step.grid = {LaunchDim::Of({.mul = 1, .add = 0, .div = 8}),
               LaunchDim::Constant(1), LaunchDim::Constant(1)};
  step.block = {128, 1, 1};
  step.args = {Arg::Param(0), Arg::Tokens()};
  body.steps = {step};
  BundleEntry entry;
  entry.name = "moe";
  entry.geometry = TinyGeometry();
  entry.buffers = {{.kind = BufferFill::Kind::kNone,
                    .element_bytes = 4,
                    .bytes_per_token = 4 * kTinyHidden}};
  entry.golden = {{Interval{1, 4}, Sha256("golden")}};
  entry.plans = {
      MakePlan(target, {1, 4}, body, {section.programs[0]->key.digest})};
  section.entries = {entry};
  return section;
}

kiln_bundle_t* OpenTiny(std::vector<BundleSection> sections) {
  const absl::StatusOr<std::string> bytes =
      WriteBundle(std::move(sections), {.allow_predicted = true});
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  if (!bytes.ok()) return nullptr;
  kiln_bundle_t* bundle = nullptr;
  kiln_error_t error = {};
  EXPECT_EQ(kiln_bundle_open_memory(bytes->data(), bytes->size(), nullptr,
                                    &bundle, &error),
            KILN_STATUS_OK)
      << error.message;
  return bundle;
}

void RepairRoot(std::string* bytes) {
  uint8_t root[KILN_ROOT_BYTES];
  kiln_bundle_root(bytes->data(), bytes->size(), root);
  std::memcpy(bytes->data() + offsetof(kiln_format_header_t, root), root,
              sizeof(root));
}

std::string TinyKernelBinary() { return ReadTestFile(KILN_TINY_KERNEL); }

}  // namespace kiln::testing
