// Accuracy and speed of an fp8 backward of attention (dq.cuh, dkv.cuh), causal and full, heads of 128:
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I. \
//       -o build/attention_backward benchmarks/attention_backward/main.cu
//   build/attention_backward           speed
//   build/attention_backward check     accuracy
//
// Operands are normal random numbers. Gradients are compared with those in fp64 of the rounded operands, so what is left
// is the rounding of P and dS. Times are medians of 7 samples of 6 launches, of the kernels alone: no casts are in them.
// TFLOP/s are those of what a kernel multiplies, 3 products for dQ and 4 for dK and dV, and of both of the 5 products
// that a backward has by itself; half of them where causal.
#include <cuda.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "benchmarks/attention_backward/dkv.cuh"
#include "benchmarks/attention_backward/dq.cuh"
#include "benchmarks/attention_backward/mma.cuh"

using namespace f8::kernels;  // NOLINT

namespace {

constexpr int kD = 128, kThreadsOfRow = 256;
constexpr int kCtas = 132;

void check(int status, const char* what) {
  if (status == 0) return;
  std::fprintf(stderr, "%s: error %d\n", what, status);
  std::exit(1);
}

template <class T>
T* allocate(size_t count) {
  void* p = nullptr;
  check(cudaMalloc(&p, count * sizeof(T)), "cudaMalloc");
  check(cudaMemset(p, 0xFF, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(p);
}

template <class T>
std::vector<T> to_host(const T* p, size_t count) {
  std::vector<T> r(count);
  check(cudaMemcpy(r.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return r;
}

__device__ u32 hash(u32 x) {
  x = (x ^ x >> 16) * 0x7FEB352DU;
  x = (x ^ x >> 15) * 0x846CA68BU;
  return x ^ x >> 16;
}

__global__ void fill_normal(float* x, size_t count, u32 seed) {
  for (size_t i = blockIdx.x * 256ULL + threadIdx.x; i < count; i += gridDim.x * 256ULL) {
    const u32 at = static_cast<u32>(i) * 2;
    const float u = (hash(at + seed) + 1.0F) / 4294967296.0F;
    x[i] = sqrtf(-2.0F * logf(u)) * cospif(2.0F * hash(at + 1 + seed * 77) / 4294967296.0F);
  }
}

// The largest power of two that is at most 1 / x.
__device__ float bound_of(float x) {
  return exp2f(floorf(log2f(1.0F / x)));
}

__device__ float largest_of_block(float x, int* shared) {
  if (threadIdx.x == 0) *shared = 0;
  __syncthreads();
  atomicMax(shared, __float_as_int(x));
  __syncthreads();
  const float r = __int_as_float(*shared);
  __syncthreads();
  return r;
}

__device__ float norm_of(const float* x) {
  float sum = 0;
  for (int c = 0; c < kD; ++c) sum += x[c] * x[c];
  return sqrtf(sum);
}

// Casts 128 rows of x [heads][tokens][128] to e4m3, as they are and transposed, and leaves the values that they have.
__global__ void cast(const float* x, u8* rows, u8* columns, float* inv_scale, float* bound,
                     float* rounded, int tokens) {
  const size_t first = (size_t{blockIdx.y} * tokens + blockIdx.x * 128) * kD;
  const size_t block = blockIdx.y * (tokens / 128) + blockIdx.x;
  __shared__ int shared;
  float most = 0;
  for (int i = threadIdx.x; i < 128 * kD; i += 128) most = fmaxf(most, fabsf(x[first + i]));
  const float scale = exp2f(floorf(log2f(448.0F / largest_of_block(most, &shared))));
  if (threadIdx.x == 0) inv_scale[block] = 1.0F / scale;
  for (int i = threadIdx.x; i < 128 * kD; i += 128) {
    const __nv_fp8_e4m3 y(x[first + i] * scale);
    rounded[first + i] = static_cast<float>(y) / scale;
    rows[first + i] = y.__x;
    const size_t line = (size_t{blockIdx.y} * kD + i % kD) * tokens;
    columns[line + blockIdx.x * 128 + fragment_place(i / kD)] = y.__x;
  }
  __syncthreads();
  const float norm = largest_of_block(norm_of(rounded + first + threadIdx.x * kD), &shared);
  if (threadIdx.x == 0) bound[block] = bound_of(norm);
}

struct Operand {
  float *inv_scale, *bound, *rounded;
  u8 *rows, *columns;

  Operand(int tokens, int heads, u32 seed) {
    const size_t count = size_t(heads) * tokens * kD;
    float* x = allocate<float>(count);
    inv_scale = allocate<float>(count / (128 * kD));
    bound = allocate<float>(count / (128 * kD));
    rounded = allocate<float>(count);
    rows = allocate<u8>(count);
    columns = allocate<u8>(count);
    fill_normal<<<1024, 256>>>(x, count, seed);
    cast<<<dim3(tokens / 128, heads), 128>>>(x, rows, columns, inv_scale, bound, rounded, tokens);
    check(cudaDeviceSynchronize(), "cast");
    check(cudaFree(x), "cudaFree");
  }
};

struct Sizes {
  int tokens, heads_q, heads_kv;
  bool causal;
  [[nodiscard]] __host__ __device__ int group() const { return heads_q / heads_kv; }
  [[nodiscard]] size_t rows_q() const { return size_t(heads_q) * tokens; }
  [[nodiscard]] size_t rows_k() const { return size_t(heads_kv) * tokens; }
};

struct Rows {  // of queries
  float *lse2, *delta, *largest_p;
};

__device__ double sum_of_block(double x, double* shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  double sum = 0;
  for (int i = 0; i < kThreadsOfRow; ++i) sum += shared[i];
  __syncthreads();
  return sum;
}

// A row of a head a block: its statistics, and dQ.
__global__ void exact_dq(const float* q, const float* k, const float* v, const float* dout,
                         Rows rows, double* dq, Sizes sizes) {
  extern __shared__ float shared[];
  __shared__ double sums[kThreadsOfRow];
  __shared__ int most_of_block;
  float *p = shared, *dp = shared + sizes.tokens;
  const int count = sizes.causal ? blockIdx.x + 1 : sizes.tokens;
  const size_t row = size_t{blockIdx.y} * sizes.tokens + blockIdx.x;
  const size_t of_k = size_t{blockIdx.y / sizes.group()} * sizes.tokens * kD;
  double sum = 0, dot = 0;
  float most = 0;
  for (int j = threadIdx.x; j < count; j += kThreadsOfRow) {
    double s = 0, x = 0;
    for (int c = 0; c < kD; ++c) {
      s += double{q[row * kD + c]} * k[of_k + size_t(j) * kD + c];
      x += double{dout[row * kD + c]} * v[of_k + size_t(j) * kD + c];
    }
    p[j] = exp(s / sqrt(double{kD}));  // of normal numbers: no overflow
    dp[j] = x;
    sum += p[j];
    dot += double{p[j]} * x;
    most = fmaxf(most, p[j]);
  }
  sum = sum_of_block(sum, sums);
  dot = sum_of_block(dot, sums) / sum;
  most = largest_of_block(most, &most_of_block);
  for (int j = threadIdx.x; j < count; j += kThreadsOfRow) p[j] = p[j] / sum * (dp[j] - dot);
  __syncthreads();
  if (threadIdx.x == 0) {
    rows.lse2[row] = log2(sum);
    rows.delta[row] = dot;
    rows.largest_p[row] = most / sum;
  }
  for (int c = threadIdx.x; c < kD; c += kThreadsOfRow) {
    double x = 0;
    for (int j = 0; j < count; ++j) x += double{p[j]} * k[of_k + size_t(j) * kD + c];
    dq[row * kD + c] = x / sqrt(double{kD});
  }
}

// A key of a head a block, of 128 threads.
__global__ void exact_dkv(const float* q, const float* k, const float* v, const float* dout,
                          Rows rows, double* dk, double* dv, Sizes sizes) {
  extern __shared__ float shared[];
  float *p = shared, *ds = shared + sizes.tokens;
  const size_t key = size_t{blockIdx.y} * sizes.tokens + blockIdx.x;
  double of_k = 0, of_v = 0;
  for (int head = blockIdx.y * sizes.group(); head < (blockIdx.y + 1) * sizes.group(); ++head) {
    for (int i = threadIdx.x; i < sizes.tokens; i += kD) {
      const size_t row = size_t(head) * sizes.tokens + i;
      double s = 0, dp = 0;
      for (int c = 0; c < kD; ++c) {
        s += double{q[row * kD + c]} * k[key * kD + c];
        dp += double{dout[row * kD + c]} * v[key * kD + c];
      }
      const bool has = !sizes.causal || i >= static_cast<int>(blockIdx.x);
      p[i] = has ? exp2(s / sqrt(double{kD}) * 1.4426950408889634 - rows.lse2[row]) : 0.0;
      ds[i] = p[i] * (dp - rows.delta[row]);
    }
    __syncthreads();
    for (int i = 0; i < sizes.tokens; ++i) {
      const size_t at = (size_t(head) * sizes.tokens + i) * kD + threadIdx.x;
      of_v += double{p[i]} * dout[at];
      of_k += double{ds[i]} * q[at];
    }
    __syncthreads();
  }
  dk[key * kD + threadIdx.x] = of_k / sqrt(double{kD});
  dv[key * kD + threadIdx.x] = of_v;
}

// Writes the records of queries that the kernels read, and their bounds. A block has the 64 of a step.
__global__ void make_steps(Rows rows, const float* inv_scale_q, const float* inv_scale_do,
                           const float* dout, float* steps, float* bounds_q, Sizes sizes) {
  __shared__ int shared;
  const size_t row = size_t{blockIdx.y} * sizes.tokens + blockIdx.x * 64 + threadIdx.x;
  const float of_q = inv_scale_q[row / 128], of_do = inv_scale_do[row / 128];
  const float norm = norm_of(dout + row * kD);
  const float most = largest_of_block(norm * of_q / of_do, &shared);
  float* record = steps + row / 64 * kAttentionStepFloats;
  if (threadIdx.x == 0) {
    record[0] = of_q * kLog2E / sqrtf(kD);
    record[1] = of_q;
    record[2] = bound_of(2 * most);
  }
  record[kAttentionStepHeader + 2 * threadIdx.x] = rows.lse2[row] - log2f(of_do);
  record[kAttentionStepHeader + 2 * threadIdx.x + 1] = rows.delta[row] * of_q / of_do;
  bounds_q[row] = bound_of(2 * norm * rows.largest_p[row]);
}

__global__ void fill(float* x, float value, size_t count) {
  for (size_t i = blockIdx.x * 256ULL + threadIdx.x; i < count; i += gridDim.x * 256ULL) {
    x[i] = value;
  }
}

template <bool kIsCausal>
struct Config {
  static constexpr bool kCausal = kIsCausal;
  static F8_DEVICE void mma(float (&d)[32], u64 a, u64 b, bool accumulate) {
    f8::kernels::mma(d, a, b, accumulate);
  }
  static F8_DEVICE void mma_registers(float (&d)[64], const u32* a, u64 b, bool accumulate) {
    f8::kernels::mma_registers(d, a, b, accumulate);
  }
};

template <bool kCausal>
__global__ void __launch_bounds__(384, 1)
    attention_dq(const __grid_constant__ AttentionDqMaps maps,
                 const __grid_constant__ AttentionBackwardArgs args) {
  extern __shared__ __align__(1024) u8 memory[];
  AttentionDq<Config<kCausal>>::run(maps, args, memory);
}

template <bool kCausal>
__global__ void __cluster_dims__(2) __launch_bounds__(384, 1)
    attention_dkv(const __grid_constant__ AttentionDkvMaps maps,
                  const __grid_constant__ AttentionBackwardArgs args) {
  extern __shared__ __align__(1024) u8 memory[];
  AttentionDkv<Config<kCausal>>::run(maps, args, memory);
}

TensorMap map_of(void* data, u64 columns, u64 rows, u32 box_rows, u32 box_bytes) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                         cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
  const cuuint64_t sizes[] = {columns, rows}, strides[] = {columns};
  const cuuint32_t box[] = {box_bytes, box_rows}, ones[] = {1, 1};
  CUtensorMap map;
  check(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
            &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, data, sizes, strides, box, ones,
            CU_TENSOR_MAP_INTERLEAVE_NONE,
            box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  TensorMap r;
  std::memcpy(&r, &map, sizeof r);
  return r;
}

// The operands, and what the kernels write.
template <bool kCausal>
struct Problem {
  using Dq = AttentionDq<Config<kCausal>>;
  using Dkv = AttentionDkv<Config<kCausal>>;
  Sizes sizes;
  Operand q, k, v, dout;
  Rows rows;
  float *steps, *bounds_q, *sums;
  u16 *dq, *dk, *dv;

  Problem(int tokens, int heads_q, int heads_kv)
      : sizes{tokens, heads_q, heads_kv, kCausal},
        q(tokens, heads_q, 1),
        k(tokens, heads_kv, 2),
        v(tokens, heads_kv, 3),
        dout(tokens, heads_q, 4),
        rows{allocate<float>(sizes.rows_q()), allocate<float>(sizes.rows_q()),
             allocate<float>(sizes.rows_q())},
        steps(allocate<float>(sizes.rows_q() / 64 * kAttentionStepFloats)),
        bounds_q(allocate<float>(sizes.rows_q())),
        sums(allocate<float>(size_t(kCtas) * kAttentionSumsOfKeys)),
        dq(allocate<u16>(sizes.rows_q() * kD)),
        dk(allocate<u16>(sizes.rows_k() * kD)),
        dv(allocate<u16>(sizes.rows_k() * kD)) {
    check(cudaFuncSetAttribute(attention_dq<kCausal>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Dq::kSharedBytes),
          "shared memory");
    check(cudaFuncSetAttribute(attention_dkv<kCausal>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Dkv::kSharedBytes),
          "shared memory");
  }
  void prepare() const {
    make_steps<<<dim3(sizes.tokens / 64, sizes.heads_q), 64>>>(
        rows, q.inv_scale, dout.inv_scale, dout.rounded, steps, bounds_q, sizes);
    check(cudaDeviceSynchronize(), "steps");
  }
  [[nodiscard]] AttentionBackwardArgs args() const {
    const auto gradient = [&](u16* x) -> AttentionGradient {
      return {x, 0, i64{sizes.tokens} * kD, kD};
    };
    return {k.inv_scale,
            v.inv_scale,
            v.bound,
            steps,
            bounds_q,
            sums,
            gradient(dq),
            gradient(dk),
            gradient(dv),
            sizes.tokens,
            sizes.tokens,
            sizes.heads_q,
            sizes.heads_kv,
            1,
            1 / std::sqrt(float{kD})};
  }
  void launch_dq() const {
    const AttentionDqMaps maps{
        map_of(q.rows, kD, sizes.rows_q(), 128, 128), map_of(dout.rows, kD, sizes.rows_q(), 128, 128),
        map_of(k.rows, kD, sizes.rows_k(), 128, 128), map_of(v.rows, kD, sizes.rows_k(), 128, 128),
        map_of(k.columns, sizes.tokens, u64(sizes.heads_kv) * kD, 128, 128)};
    attention_dq<kCausal><<<kCtas, Dq::kThreads, Dq::kSharedBytes>>>(maps, args());
  }
  void launch_dkv() const {
    const u64 rows_t = u64(sizes.heads_q) * kD;
    const AttentionDkvMaps maps{
        map_of(k.rows, kD, sizes.rows_k(), 128, 128), map_of(v.rows, kD, sizes.rows_k(), 128, 128),
        map_of(q.rows, kD, sizes.rows_q(), 32, 128),  map_of(dout.rows, kD, sizes.rows_q(), 32, 128),
        map_of(q.columns, sizes.tokens, rows_t, 64, 64),
        map_of(dout.columns, sizes.tokens, rows_t, 64, 64)};
    attention_dkv<kCausal><<<kCtas, Dkv::kThreads, Dkv::kSharedBytes>>>(maps, args());
  }
};

void show_noise(const char* what, const double* exact, const u16* gradient, size_t count) {
  const auto expected = to_host(exact, count);
  const auto actual = to_host(gradient, count);
  double noise = 1e-300, signal = 0;
  for (size_t i = 0; i < count; ++i) {
    const u32 bits = u32{actual[i]} << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    noise += (expected[i] - y) * (expected[i] - y);
    signal += expected[i] * expected[i];
  }
  std::printf(" %s %.1f", what, 10 * std::log10(signal / noise));
}

template <bool kCausal>
void compare(int tokens, int heads_q, int heads_kv) {
  const Problem<kCausal> p(tokens, heads_q, heads_kv);
  double* dq = allocate<double>(p.sizes.rows_q() * kD);
  double* dk = allocate<double>(p.sizes.rows_k() * kD);
  double* dv = allocate<double>(p.sizes.rows_k() * kD);
  const int bytes = tokens * 8;
  exact_dq<<<dim3(tokens, heads_q), kThreadsOfRow, bytes>>>(
      p.q.rounded, p.k.rounded, p.v.rounded, p.dout.rounded, p.rows, dq, p.sizes);
  exact_dkv<<<dim3(tokens, heads_kv), kD, bytes>>>(p.q.rounded, p.k.rounded, p.v.rounded,
                                                   p.dout.rounded, p.rows, dk, dv, p.sizes);
  p.prepare();
  p.launch_dq();
  p.launch_dkv();
  check(cudaDeviceSynchronize(), "backward");
  std::printf("%d tokens, %s, SQNR in dB:", tokens, kCausal ? "causal" : "full");
  show_noise("dQ", dq, p.dq, p.sizes.rows_q() * kD);
  show_noise("dK", dk, p.dk, p.sizes.rows_k() * kD);
  show_noise("dV", dv, p.dv, p.sizes.rows_k() * kD);
  std::printf("\n");
}

template <class Launch>
float median_ms(const Launch& launch) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> samples;
  for (int i = 0; i < 7; ++i) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    for (int j = 0; j < 6; ++j) launch();
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), "backward");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    samples.push_back(ms / 6);
  }
  std::nth_element(samples.begin(), samples.begin() + 3, samples.end());
  return samples[3];
}

template <bool kCausal>
void time(int tokens, int heads_q, int heads_kv) {
  const Problem<kCausal> p(tokens, heads_q, heads_kv);
  // Statistics of attention that is even.
  fill<<<256, 256>>>(p.rows.lse2, std::log2(float(tokens)) + 0.72F, p.sizes.rows_q());
  fill<<<256, 256>>>(p.rows.delta, 0.1F, p.sizes.rows_q());
  fill<<<256, 256>>>(p.rows.largest_p, 64.0F / tokens, p.sizes.rows_q());
  p.prepare();
  const float dq = median_ms([&] { p.launch_dq(); });
  const float dkv = median_ms([&] { p.launch_dkv(); });
  const double product = 2.0 * tokens * tokens * kD * heads_q / (kCausal ? 2 : 1) / 1e9;
  std::printf(
      "%d tokens, %d and %d heads, %s: dQ %.3f ms, %.0f TFLOP/s; dK and dV %.3f ms, %.0f; both as "
      "five products %.0f\n",
      tokens, heads_q, heads_kv, kCausal ? "causal" : "full", dq, 3 * product / dq, dkv,
      4 * product / dkv, 5 * product / (dq + dkv));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 || (argc == 2 && std::strcmp(argv[1], "check") != 0)) {
    std::fprintf(stderr, "the only argument is \"check\"\n");
    return 2;
  }
  if (argc == 2) {
    for (const int tokens : {1024, 4096}) {
      compare<true>(tokens, 4, 2);
      compare<false>(tokens, 4, 2);
    }
    return 0;
  }
  time<true>(8192, 32, 8);
  time<false>(8192, 32, 8);
  time<true>(32768, 8, 2);
  time<false>(32768, 8, 2);
  return 0;
}
