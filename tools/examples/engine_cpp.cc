// An engine's use of the Kiln runtime, in C++17, on the CPU target: errors as
// exceptions, handles as owners.
//
//   engine_cpp BUNDLE ENTRY TOKENS [--allow-unqualified]
//
// The same invented model as engine.c, and the same output.

#include <kiln/kiln.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// What an engine wants to know of a refusal: its code decides, its text is for
// people.
class KilnError : public std::runtime_error {
 public:
  explicit KilnError(const kiln_error_t& error)
      : std::runtime_error(std::string(kiln_status_name(error.code)) + ": " +
                           error.message),
        code_(error.code) {}

  kiln_status_t code() const { return code_; }

 private:
  kiln_status_t code_;
};

// Calls a function of kiln.h with an error to fill.
template <typename Function, typename... Arguments>
void Call(Function function, Arguments... arguments) {
  kiln_error_t error = {};
  if (function(arguments..., &error) != KILN_STATUS_OK) throw KilnError(error);
}

struct CloseBundle {
  void operator()(kiln_bundle_t* bundle) const {
    kiln_bundle_close(bundle, nullptr);
  }
};

struct UnloadModules {
  void operator()(kiln_modules_t* modules) const {
    kiln_modules_unload(modules, nullptr);
  }
};

class Engine {
 public:
  // Before serving. On a GPU: target null, and `context` the CUcontext.
  Engine(const char* path, uint32_t load_flags) {
    kiln_bundle_t* opened = nullptr;
    Call(kiln_bundle_open_file, path, nullptr, &opened);
    const std::unique_ptr<kiln_bundle_t, CloseBundle> bundle(opened);
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.flags = load_flags;
    options.target = "cpu";
    kiln_modules_t* loaded = nullptr;
    Call(kiln_modules_load, bundle.get(), &options, &loaded);
    modules_.reset(loaded);
  }

  // Scratch for a batch of m.
  uint64_t ArenaBytes(const char* name, uint64_t m) const {
    uint64_t bytes = 0;
    Call(kiln_entry_arena_size, Find(name, m), &bytes, nullptr);
    return bytes;
  }

  void Step(const char* name, uint64_t m, const std::vector<void*>& params,
            void* arena, uint64_t arena_bytes) const {
    Call(kiln_launch, modules_.get(), Find(name, m), m, params.data(),
         8 * params.size(), arena, arena_bytes, nullptr);
  }

 private:
  const kiln_entry_t* Find(const char* name, uint64_t m) const {
    const kiln_entry_t* entry = nullptr;
    Call(kiln_entry_find, modules_.get(), name, m, &entry);
    return entry;
  }

  std::unique_ptr<kiln_modules_t, UnloadModules> modules_;
};

// The rest stands in for an engine's own tensors.

constexpr size_t kHidden = 128;
constexpr size_t kInter = 128;
constexpr size_t kExperts = 4;
constexpr size_t kTopK = 2;
constexpr size_t kBits = 4;

// 16-bit words (random & mask) | bits: floats of one exponent, or any word.
std::vector<uint16_t> Words(uint32_t seed, size_t count, uint32_t mask,
                            uint32_t bits) {
  std::vector<uint16_t> words(count);
  for (uint16_t& word : words) {
    seed = seed * 1664525u + 1013904223u;
    word = static_cast<uint16_t>((seed >> 16 & mask) | bits);
  }
  return words;
}

double Serve(const Engine& engine, const char* name, uint64_t m) {
  constexpr size_t kWeights = kExperts * kHidden * kInter / 256 * 16 * kBits;
  const size_t bytes = engine.ArenaBytes(name, m);
  const std::unique_ptr<void, decltype(&std::free)> arena(
      std::aligned_alloc(256, (bytes + 255) / 256 * 256), std::free);
  std::vector<int32_t> ids(m * kTopK);
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>((i * 7 + i / kTopK) % kExperts);
  }
  std::vector<float> route_weights(m * kTopK, 0.5f);
  std::vector<float> out(m * kHidden);
  std::vector<std::vector<uint16_t>> words = {
      Words(1, m * kHidden, 0x807f, 0x3e00),  // x, bf16
      Words(2, kWeights, 0xffff, 0),          // gate, up, down
      Words(3, kWeights, 0xffff, 0),
      Words(4, kWeights, 0xffff, 0),
      Words(5, kExperts * kHidden, 0x83ff, 0x3000),  // scales, f16
      Words(6, kExperts * kHidden, 0x83ff, 0x3000),
      Words(7, kExperts * 3 * kInter, 0x83ff, 0x3000),
      Words(8, kExperts * kHidden, 0x83ff, 0x3000)};
  std::vector<void*> params = {words[0].data(), ids.data(),
                               route_weights.data()};
  for (size_t i = 1; i < words.size(); ++i) params.push_back(words[i].data());
  params.push_back(out.data());
  engine.Step(name, m, params, arena.get(), bytes);
  double sum = 0;
  for (const float value : out) sum += value;
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr,
                 "usage: engine_cpp BUNDLE ENTRY TOKENS "
                 "[--allow-unqualified]\n");
    return 2;
  }
  const bool consent =
      argc > 4 && std::string(argv[4]) == "--allow-unqualified";
  try {
    uint32_t load_flags = 0;
    if (consent) load_flags |= KILN_LOAD_ALLOW_UNQUALIFIED;
    const Engine engine(argv[1], load_flags);
    const double sum =
        Serve(engine, argv[2], std::strtoull(argv[3], nullptr, 10));
    std::printf("%.17g\n", sum);
  } catch (const KilnError& error) {
    std::fprintf(stderr, "engine_cpp: %s\n", error.what());
    // An engine tells apart what it can mend: another batch size, say.
    return error.code() == KILN_STATUS_TOKENS_OUT_OF_RANGE ? 3 : 1;
  }
  return 0;
}
