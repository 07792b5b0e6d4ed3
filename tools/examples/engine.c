/* An engine's use of the Kiln runtime, in C, on the CPU target.
 *
 *   engine_c BUNDLE ENTRY TOKENS [--allow-unqualified]
 *
 * Serves a model of hidden 128, intermediate 128, 4 experts, top 2, 4 bits, on
 * invented weights, and prints the sum of the output. Exit code 1 and the
 * runtime's own message on any refusal. */

#include <kiln/kiln.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct engine_t {
  kiln_modules_t* modules;
  uint32_t load_flags; /* consent, see kiln_load_options_t */
} engine_t;

static int Refused(const char* what, const kiln_error_t* error) {
  fprintf(stderr, "%s: %s: %s\n", what, kiln_status_name(error->code),
          error->message);
  return 1;
}

/* Once, before serving. On a GPU: target NULL, and `context` the CUcontext that
 * will launch (or NULL for the current one). */
static int Start(engine_t* engine, const char* path) {
  kiln_error_t error;
  kiln_bundle_t* bundle = NULL;
  kiln_load_options_t options = {.struct_size = sizeof(options),
                                 .flags = engine->load_flags,
                                 .target = "cpu"};
  if (kiln_bundle_open_file(path, NULL, &bundle, &error) != KILN_STATUS_OK) {
    return Refused("cannot open the bundle", &error);
  }
  if (kiln_modules_load(bundle, &options, &engine->modules, &error) !=
      KILN_STATUS_OK) {
    kiln_bundle_close(bundle, NULL);
    return Refused("cannot serve this bundle here", &error);
  }
  kiln_bundle_close(bundle, NULL); /* the modules keep what they need */
  return 0;
}

/* In the serving loop: allocates nothing itself, safe while a CUDA stream is
 * being captured. `arena` belongs to the caller and has no lasting contents. */
static int Step(const engine_t* engine, const char* name, uint64_t m,
                void* const* params, size_t params_bytes, void* arena,
                uint64_t arena_bytes) {
  kiln_error_t error;
  const kiln_entry_t* entry = NULL;
  if (kiln_entry_find(engine->modules, name, m, &entry, &error) !=
      KILN_STATUS_OK) {
    return Refused("cannot run this batch", &error);
  }
  if (kiln_launch(engine->modules, entry, m, params, params_bytes, arena,
                  arena_bytes, NULL, &error) != KILN_STATUS_OK) {
    return Refused("launch failed", &error);
  }
  return 0;
}

/* The rest stands in for an engine's own tensors. */

enum { kHidden = 128, kInter = 128, kExperts = 4, kTopK = 2, kBits = 4 };

enum { kParams = 11, kTokensMax = 64 };

static void* Allocate(size_t bytes) {
  void* data = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (data == NULL) abort();
  return data;
}

/* 16-bit words (random & mask) | bits: floats of one exponent, or any word. */
static void* Words(uint32_t seed, size_t count, uint32_t mask, uint32_t bits) {
  uint16_t* words = Allocate(2 * count);
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    words[i] = (uint16_t)((seed >> 16 & mask) | bits);
  }
  return words;
}

int main(int argc, char** argv) {
  if (argc < 4) {
    fprintf(stderr,
            "usage: engine_c BUNDLE ENTRY TOKENS "
            "[--allow-unqualified]\n");
    return 2;
  }
  const uint64_t m = strtoull(argv[3], NULL, 10);
  engine_t engine = {0};
  if (argc > 4 && strcmp(argv[4], "--allow-unqualified") == 0) {
    engine.load_flags = KILN_LOAD_ALLOW_UNQUALIFIED;
  }
  if (m > kTokensMax) {
    fprintf(stderr, "engine_c: it has buffers for %d tokens\n", kTokensMax);
    return 2;
  }
  if (Start(&engine, argv[1]) != 0) return 1;

  /* One arena for every batch: as large as the largest plan wants. */
  uint64_t arena_bytes = 256;
  for (uint64_t tokens = 1; tokens <= kTokensMax; ++tokens) {
    const kiln_entry_t* entry = NULL;
    uint64_t bytes = 0;
    if (kiln_entry_find(engine.modules, argv[2], tokens, &entry, NULL) == 0 &&
        kiln_entry_arena_size(entry, &bytes, NULL, NULL) == 0 &&
        bytes > arena_bytes) {
      arena_bytes = bytes;
    }
  }
  void* arena = Allocate(arena_bytes);

  const size_t weights = (size_t)kExperts * kHidden * kInter / 256 * 16 * kBits;
  int32_t* ids = Allocate(kTokensMax * kTopK * sizeof(*ids));
  float* route_weights = Allocate(kTokensMax * kTopK * sizeof(*route_weights));
  for (int i = 0; i < kTokensMax * kTopK; ++i) {
    ids[i] = (i * 7 + i / kTopK) % kExperts;
    route_weights[i] = 0.5f;
  }
  float* out = Allocate(kTokensMax * kHidden * sizeof(*out));
  void* params[kParams] = {
      Words(1, kTokensMax * kHidden, 0x807f, 0x3e00), /* x, bf16 */
      ids,
      route_weights,
      Words(2, weights, 0xffff, 0), /* gate, up, down */
      Words(3, weights, 0xffff, 0),
      Words(4, weights, 0xffff, 0),
      Words(5, kExperts * kHidden, 0x83ff, 0x3000), /* scales, f16 */
      Words(6, kExperts * kHidden, 0x83ff, 0x3000),
      Words(7, kExperts * 3 * kInter, 0x83ff, 0x3000),
      Words(8, kExperts * kHidden, 0x83ff, 0x3000),
      out};

  int failed =
      Step(&engine, argv[2], m, params, sizeof(params), arena, arena_bytes);
  if (!failed) {
    double sum = 0;
    for (uint64_t i = 0; i < m * kHidden; ++i) sum += out[i];
    printf("%.17g\n", sum);
  }
  for (int i = 0; i < kParams; ++i) free(params[i]);
  free(arena);
  kiln_modules_unload(engine.modules, NULL);
  return failed;
}
