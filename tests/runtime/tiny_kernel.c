/* A CPU program small enough to check by hand, in the shape of the ones that
 * Kiln generates: NAME(args, bx, by, bz) and NAME_args_bytes. Freestanding. */

typedef unsigned int u32;

#define EXPORT __attribute__((visibility("default")))

/* scratch[i] = x[i] * x[i] for row bx of `width` elements. */
typedef struct square_args {
  const float* x;
  float* scratch;
  u32 m;
  u32 width;
} square_args;

EXPORT const u32 square_args_bytes = sizeof(square_args);

EXPORT void square(const void* block, u32 bx, u32 by, u32 bz) {
  const square_args* args = block;
  (void)by;
  (void)bz;
  if (bx >= args->m) return;
  for (u32 i = 0; i < args->width; ++i) {
    const float v = args->x[bx * args->width + i];
    args->scratch[bx * args->width + i] = v * v;
  }
}

/* out[t] = sum of row t of scratch; row t of the step before must be done. */
typedef struct sum_args {
  const float* scratch;
  float* out;
  u32 m;
  u32 width;
} sum_args;

EXPORT const u32 sum_args_bytes = sizeof(sum_args);

EXPORT void sum(const void* block, u32 bx, u32 by, u32 bz) {
  const sum_args* args = block;
  (void)by;
  (void)bz;
  if (bx >= args->m) return;
  /* Read another thread's row too, so that a missing barrier shows. */
  const u32 row = args->m - 1 - bx;
  float total = 0;
  for (u32 i = 0; i < args->width; ++i) {
    total += args->scratch[row * args->width + i];
  }
  args->out[row] = total;
}

/* ++counts[bz][by][bx] in a grid of nx * ny * nz blocks. */
typedef struct count_args {
  u32* counts;
  u32 nx;
  u32 ny;
} count_args;

EXPORT const u32 count_args_bytes = sizeof(count_args);

EXPORT void count(const void* block, u32 bx, u32 by, u32 bz) {
  const count_args* args = block;
  __atomic_fetch_add(&args->counts[(bz * args->ny + by) * args->nx + bx], 1,
                     __ATOMIC_RELAXED);
}

/* The floating-point control register as the block sees it. */
typedef struct control_args {
  u32* control;
} control_args;

EXPORT const u32 control_args_bytes = sizeof(control_args);

EXPORT void control(const void* block, u32 bx, u32 by, u32 bz) {
  const control_args* args = block;
  (void)by;
  (void)bz;
  args->control[bx] = __builtin_ia32_stmxcsr();
}
