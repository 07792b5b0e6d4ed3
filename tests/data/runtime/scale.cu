// Two small kernels for tests/runtime/runtime_gpu_test.cc. The cubin beside this
// file was made with:  nvcc -cubin -arch=sm_90a -O3 scale.cu -o scale_sm_90a.cubin

typedef unsigned int u32;
typedef unsigned long long u64;

// scratch[t][i] = 2 * x[t][i] + tag, through 64 KiB of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(128)
    scale(const float* x, float* scratch, u32 m, u32 n, u64 tag) {
  extern __shared__ float row[];
  const u32 t = blockIdx.x;
  if (t >= m) return;
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
    row[16384 - n + i] = 2.0f * x[t * n + i];
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
    scratch[t * n + i] = row[16384 - n + i] + static_cast<float>(tag);
  }
}

// out[t][i] = scratch[t][i] + 1.
extern "C" __global__ void add(u32 m, const float* scratch, float* out, u32 n) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < m * n) out[i] = scratch[i] + 1.0f;
}
