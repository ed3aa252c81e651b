// Accuracy and speed of the fp8 forward of attention (forward.cuh), causal and full:
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I. -o build/attention benchmarks/attention/forward.cu
//   build/attention [TOKENS [QUERY_HEADS [KV_HEADS]]]         default 8192 32 8
//
// Operands are normal random numbers. The rows that are checked are compared with attention in fp64 of the
// rounded operands, so what is left is the rounding of P. Times are medians of 12 samples of 10 launches, of
// the kernel alone: the casts are not in them. TFLOP/s count two products, and half of them where causal.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "benchmarks/attention/mma.cuh"
#include "codegen/kernels/attention/attention_forward.cuh"

using namespace f8::kernels;  // NOLINT

namespace {

constexpr int kD = 128;

void check(int status, const char* what) {
  if (status == 0) return;
  std::fprintf(stderr, "%s: error %d\n", what, status);
  std::exit(1);
}

template <class T>
T* allocate(size_t count) {
  void* p = nullptr;
  check(cudaMalloc(&p, count * sizeof(T)), "cudaMalloc");
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

// Casts x [heads][tokens][128] to e4m3, also to the values that it has then; `transposed` in the order of v^T.
__global__ void cast(const float* x, u8* q, float* inv_scale, float* rounded, int tokens,
                     bool transposed) {
  const size_t first = (size_t{blockIdx.y} * tokens + blockIdx.x * 128) * kD;
  __shared__ int most;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < 128 * kD; i += 256) {
    atomicMax(&most, __float_as_int(fabsf(x[first + i])));
  }
  __syncthreads();
  const float scale = exp2f(floorf(log2f(448.0F / __int_as_float(most))));
  if (threadIdx.x == 0) inv_scale[blockIdx.y * (tokens / 128) + blockIdx.x] = 1.0F / scale;
  for (int i = threadIdx.x; i < 128 * kD; i += 256) {
    const __nv_fp8_e4m3 y(x[first + i] * scale);
    rounded[first + i] = static_cast<float>(y) / scale;
    const size_t line = (size_t{blockIdx.y} * kD + i % kD) * tokens;
    q[transposed ? line + blockIdx.x * 128 + fragment_place(i / kD) : first + i] = y.__x;
  }
}

__device__ double sum_of_block(double x, double* shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  for (int i = 128; i > 0; i /= 2) {
    if (threadIdx.x < i) shared[threadIdx.x] += shared[threadIdx.x + i];
    __syncthreads();
  }
  const double r = shared[0];
  __syncthreads();
  return r;
}

// Attention of a row of a head, a block each.
__global__ void reference(const float* q, const float* k, const float* v, const int* rows,
                          double* o, double* lse, int tokens, int group, bool causal) {
  extern __shared__ double scores[];
  __shared__ double shared[256];
  const int row = rows[blockIdx.x], count = causal ? row + 1 : tokens;
  const size_t of_q = (size_t{blockIdx.y} * tokens + row) * kD;
  const size_t of_k = size_t{blockIdx.y / group} * tokens * kD;
  double sum = 0;
  for (int j = threadIdx.x; j < count; j += 256) {
    double dot = 0;
    for (int c = 0; c < kD; ++c) dot += double{q[of_q + c]} * k[of_k + size_t(j) * kD + c];
    scores[j] = exp(dot / sqrt(double{kD}));  // of normal numbers: no overflow
    sum += scores[j];
  }
  sum = sum_of_block(sum, shared);
  if (threadIdx.x < kD) {
    double total = 0;
    for (int j = 0; j < count; ++j) total += scores[j] * v[of_k + size_t(j) * kD + threadIdx.x];
    o[(size_t{blockIdx.x} * gridDim.y + blockIdx.y) * kD + threadIdx.x] = total / sum;
  }
  if (threadIdx.x == 0) lse[blockIdx.x * gridDim.y + blockIdx.y] = log(sum);
}

template <bool kIsCausal>
struct Config {
  static constexpr bool kCausal = kIsCausal;
  static constexpr int kStages = 3;
  static F8_DEVICE void mma(float (&d)[64], u64 a, u64 b, bool accumulate) {
    mma_128(d, a, b, accumulate);
  }
  static F8_DEVICE void mma_registers(float (&d)[64], const u32* a, u64 b, bool accumulate) {
    mma_128(d, a, b, accumulate);
  }
};

template <bool kCausal>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention(const __grid_constant__ AttentionMaps maps, const AttentionArgs args) {
  extern __shared__ __align__(1024) u8 memory[];
  AttentionForward<Config<kCausal>>::run(maps, args, memory);
}

TensorMap map_of(void* data, u64 columns, u64 rows) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                         cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
  const cuuint64_t sizes[] = {columns, rows}, strides[] = {columns};
  const cuuint32_t box[] = {128, 128}, ones[] = {1, 1};
  CUtensorMap map;
  check(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
            &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, data, sizes, strides, box, ones,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  TensorMap r;
  std::memcpy(&r, &map, sizeof r);
  return r;
}

struct Operand {
  float* inv_scale;
  float* rounded;
  u8* data;

  Operand(int tokens, int heads, u32 seed, bool transposed) {
    const size_t count = size_t(heads) * tokens * kD;
    float* x = allocate<float>(count);
    inv_scale = allocate<float>(count / 16384);
    rounded = allocate<float>(count);
    data = allocate<u8>(count);
    fill_normal<<<1024, 256>>>(x, count, seed);
    cast<<<dim3(tokens / 128, heads), 256>>>(x, data, inv_scale, rounded, tokens, transposed);
    check(cudaDeviceSynchronize(), "cast");
    check(cudaFree(x), "cudaFree");
  }
};

struct Problem {
  int tokens, heads_q, heads_kv;
  Operand q, k, v;
  u16* o;
  float* lse;

  Problem(int tokens, int heads_q, int heads_kv)
      : tokens(tokens),
        heads_q(heads_q),
        heads_kv(heads_kv),
        q(tokens, heads_q, 1, false),
        k(tokens, heads_kv, 2, false),
        v(tokens, heads_kv, 3, true),
        o(allocate<u16>(size_t(heads_q) * tokens * kD)),
        lse(allocate<float>(size_t(heads_q) * tokens)) {}
};

template <bool kCausal>
void launch(const Problem& p) {
  using Kernel = AttentionForward<Config<kCausal>>;
  static const AttentionMaps maps{map_of(p.q.data, kD, u64(p.heads_q) * p.tokens),
                                  map_of(p.k.data, kD, u64(p.heads_kv) * p.tokens),
                                  map_of(p.v.data, p.tokens, u64(p.heads_kv) * kD)};
  static const int set = cudaFuncSetAttribute(
      attention<kCausal>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kSharedBytes);
  check(set, "cudaFuncSetAttribute");
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
  const AttentionArgs args{
      p.q.inv_scale, p.k.inv_scale, p.v.inv_scale, p.o, p.lse,
      p.tokens,      p.heads_q,     p.heads_kv,    1,   1.44269504F / std::sqrt(float{kD})};
  attention<kCausal><<<sms, Kernel::kThreads, Kernel::kSharedBytes>>>(maps, args);
}

template <bool kCausal>
void compare(const Problem& p) {
  check(cudaMemset(p.o, 0xFF, size_t(p.heads_q) * p.tokens * kD * 2), "cudaMemset");
  launch<kCausal>(p);
  const int t = p.tokens;
  const std::vector<int> rows = {0, 1, 63, 64, 127, t / 2 + 3, t - 65, t - 1};
  int* on_device = allocate<int>(rows.size());
  check(cudaMemcpy(on_device, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  double* o = allocate<double>(rows.size() * p.heads_q * kD);
  double* lse = allocate<double>(rows.size() * p.heads_q);
  const int bytes = t * 8;
  check(cudaFuncSetAttribute(reference, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "the reference has at most 28,000 tokens");
  reference<<<dim3(rows.size(), p.heads_q), 256, bytes>>>(
      p.q.rounded, p.k.rounded, p.v.rounded, on_device, o, lse, t, p.heads_q / p.heads_kv, kCausal);
  check(cudaDeviceSynchronize(), "attention");
  const auto expected = to_host(o, rows.size() * p.heads_q * kD);
  const auto expected_lse = to_host(lse, rows.size() * p.heads_q);
  const auto actual = to_host(p.o, size_t(p.heads_q) * t * kD);
  const auto actual_lse = to_host(p.lse, size_t(p.heads_q) * t);
  double worst = 0;
  std::printf("SQNR of rows, dB:");
  for (size_t r = 0; r < rows.size(); ++r) {
    double noise = 1e-300, signal = 0;
    for (int h = 0; h < p.heads_q; ++h) {
      worst = std::max(
          worst, std::fabs(expected_lse[r * p.heads_q + h] - actual_lse[size_t(h) * t + rows[r]]));
      for (int c = 0; c < kD; ++c) {
        const u32 bits = u32{actual[(size_t(rows[r]) * p.heads_q + h) * kD + c]} << 16;
        float y;
        std::memcpy(&y, &bits, 4);
        const double x = expected[(r * p.heads_q + h) * kD + c];
        noise += (x - y) * (x - y);
        signal += x * x;
      }
    }
    std::printf(" %d: %.1f", rows[r], 10 * std::log10(signal / noise));
  }
  std::printf("; worst LSE difference %.1e\n", worst);
}

template <bool kCausal>
void time(const Problem& p) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> samples;
  for (int i = 0; i < 12; ++i) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    for (int j = 0; j < 10; ++j) launch<kCausal>(p);
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), "attention");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    samples.push_back(ms / 10);
  }
  std::nth_element(samples.begin(), samples.begin() + 6, samples.end());
  const double flop = 4.0 * p.tokens * p.tokens * kD * p.heads_q / (kCausal ? 2 : 1);
  std::printf("%d tokens, %d and %d heads, %s: %.3f ms, %.0f TFLOP/s\n", p.tokens, p.heads_q,
              p.heads_kv, kCausal ? "causal" : "full", samples[6], flop / samples[6] / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int at, int other) { return argc > at ? std::atoi(argv[at]) : other; };
  const int tokens = number(1, 8192), heads_q = number(2, 32), heads_kv = number(3, 8);
  if (tokens < 128 || tokens % 128 != 0 || heads_kv < 1 || heads_q < 1 || heads_q % heads_kv != 0) {
    std::fprintf(stderr,
                 "tokens are a multiple of 128, and heads of queries one of those of keys\n");
    return 2;
  }
  const Problem problem(tokens, heads_q, heads_kv);
  if (tokens <= 16384) {
    compare<true>(problem);
    compare<false>(problem);
  }
  time<true>(problem);
  time<false>(problem);
  return 0;
}
