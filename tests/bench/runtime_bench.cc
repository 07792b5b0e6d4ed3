// What the runtime itself costs: finding, launching, opening and loading, with
// a driver whose calls do nothing. Times beside a real driver's are printed by
// tests/runtime/runtime_gpu_test.cc.

#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "runtime/bundle_format.h"
#include "runtime/driver.h"
#include "runtime/kiln.h"
#include "tests/support/idle_driver.h"
#include "tests/support/tiny_bundle.h"

// Generated: the digest of the sources, tools/runtime_receipt.py.
extern const char* const kRuntimeSources;

namespace kiln {
namespace {

constexpr int kEntries = 256;
constexpr size_t kBinaryBytes = 6144;
constexpr uint32_t kIntervals = 8;

void Require(kiln_status_t status, const kiln_error_t& error) {
  if (status == KILN_STATUS_OK) return;
  std::fprintf(stderr, "%s: %s\n", kiln_status_name(status), error.message);
  std::abort();
}

// One plan for each of the intervals 1..8, 9..16, ..., two steps each.
BundleSection Section() {
  BundleSection section = testing::TinyCudaSection();
  const BundleEntry moe = [&section] {
    for (const BundleEntry& entry : section.entries) {
      if (entry.name == "moe") return entry;
    }
    std::abort();
  }();
  std::vector<Kernel> kernels;  // "fc1" and "fc2", in every program
  for (const auto& program : section.programs) {
    kernels.insert(kernels.end(), program->kernels.begin(),
                   program->kernels.end());
  }
  section.entries.clear();
  section.programs.clear();
  for (int i = 0; i < kEntries; ++i) {
    std::string image = "image " + std::to_string(i) + "\n";
    image.resize(kBinaryBytes, '.');
    section.programs.push_back(testing::FakeProgram(
        "program " + std::to_string(i), section.target, image, kernels));
    BundleEntry entry = moe;
    char name[32];
    std::snprintf(name, sizeof(name), "layer%03d.moe", i);
    entry.name = name;
    Plan plan = moe.plans[0];
    plan.programs = {section.programs.back()->key.digest};
    for (Step& step : plan.body.steps) step.program = 0;
    entry.plans.clear();
    for (uint32_t n = 0; n < kIntervals; ++n) {
      plan.interval = {8 * n + 1, 8 * n + 8};
      entry.plans.push_back(plan);
    }
    section.entries.push_back(std::move(entry));
  }
  return section;
}

class Fixture {
 public:
  static Fixture& Get() {
    static Fixture fixture;
    return fixture;
  }

  const std::string& bytes() const { return bytes_; }

  kiln_bundle_t* Open() const {
    kiln_bundle_t* bundle = nullptr;
    kiln_error_t error = {};
    Require(kiln_bundle_open_memory(bytes_.data(), bytes_.size(), nullptr,
                                    &bundle, &error),
            error);
    return bundle;
  }

  kiln_modules_t* Load(kiln_bundle_t* bundle) const {
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.driver = &driver_;
    kiln_modules_t* modules = nullptr;
    kiln_error_t error = {};
    Require(kiln_modules_load(bundle, &options, &modules, &error), error);
    return modules;
  }

 private:
  Fixture() : bytes_(WriteBundle({Section()}).value()) {}

  kiln_driver_t driver_ = testing::IdleDriver();
  std::string bytes_;
};

void OpenAndVerify(benchmark::State& state) {
  const Fixture& fixture = Fixture::Get();
  for (auto _ : state) {
    kiln_bundle_t* bundle = fixture.Open();
    kiln_bundle_close(bundle, nullptr);
  }
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>(fixture.bytes().size()));
}

BENCHMARK(OpenAndVerify)->Unit(benchmark::kMicrosecond);

void Root(benchmark::State& state) {
  const std::string& bytes = Fixture::Get().bytes();
  uint8_t root[KILN_ROOT_BYTES];
  for (auto _ : state) {
    kiln_bundle_root(bytes.data(), bytes.size(), root);
    benchmark::DoNotOptimize(root);
  }
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>(bytes.size()));
}

BENCHMARK(Root)->Unit(benchmark::kMicrosecond);

void LoadWithoutDriver(benchmark::State& state) {
  const Fixture& fixture = Fixture::Get();
  kiln_bundle_t* bundle = fixture.Open();
  for (auto _ : state) kiln_modules_unload(fixture.Load(bundle), nullptr);
  kiln_bundle_close(bundle, nullptr);
}

BENCHMARK(LoadWithoutDriver)->Unit(benchmark::kMicrosecond);

void Find(benchmark::State& state) {
  const Fixture& fixture = Fixture::Get();
  kiln_bundle_t* bundle = fixture.Open();
  kiln_modules_t* modules = fixture.Load(bundle);
  uint64_t m = 0;
  for (auto _ : state) {
    const kiln_entry_t* entry = nullptr;
    kiln_entry_find(modules, "layer200.moe", m % 64 + 1, &entry, nullptr);
    benchmark::DoNotOptimize(entry);
    ++m;
  }
  kiln_modules_unload(modules, nullptr);
  kiln_bundle_close(bundle, nullptr);
}

BENCHMARK(Find);

// Two steps; the driver's part is two empty calls and cuCtxGetCurrent.
void LaunchWithoutDriver(benchmark::State& state) {
  const Fixture& fixture = Fixture::Get();
  kiln_bundle_t* bundle = fixture.Open();
  kiln_modules_t* modules = fixture.Load(bundle);
  const kiln_entry_t* entry = nullptr;
  kiln_error_t error = {};
  Require(kiln_entry_find(modules, "layer200.moe", 5, &entry, &error), error);
  std::vector<uint64_t> params(64, 0x1000);
  uint64_t arena_bytes = 0;
  kiln_entry_arena_size(entry, &arena_bytes, nullptr, nullptr);
  for (auto _ : state) {
    Require(kiln_launch(modules, entry, 5, params.data(), 8 * params.size(),
                        reinterpret_cast<void*>(0x100000), arena_bytes, nullptr,
                        &error),
            error);
  }
  kiln_modules_unload(modules, nullptr);
  kiln_bundle_close(bundle, nullptr);
}

BENCHMARK(LaunchWithoutDriver);

}  // namespace
}  // namespace kiln

// BENCHMARK_MAIN, with what a receipt needs to know of this build.
int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::AddCustomContext("kiln_sources", kRuntimeSources);
#ifdef __clang__
  std::string compiler = __VERSION__;  // with its name
#else
  std::string compiler = "g++ " __VERSION__;
#endif
#ifndef NDEBUG
  compiler += ", debug";
#endif
  benchmark::AddCustomContext("kiln_compiler", compiler);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
