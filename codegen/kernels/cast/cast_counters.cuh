// Counts what a cast does to the elements of a tile: CastCounters. The sums are integers, so the
// order of blocks does not matter.
#pragma once

#include "codegen/kernels/cast/matrix_tile.cuh"
#include "codegen/kernels/cast/scale.cuh"

namespace f8::kernels {

// True where rounding |x * scale| would give more than the format's largest number (saturates) or 0
// (flushes). A tie at the top of e4m3 rounds down to 448, at that of e5m2 it rounds up.
template <Fp8 kFormat>
F8_DEVICE bool saturates(float magnitude) {
  return kFormat == Fp8::kE4m3 ? magnitude > 464.0F : magnitude >= 61440.0F;
}
template <Fp8 kFormat>
F8_DEVICE bool flushes(float magnitude) {
  return magnitude <= (kFormat == Fp8::kE4m3 ? 0x1p-10F : 0x1p-17F);
}

// All threads of the block take part; scale(row, column) is that of an element of the thread's
// fragment.
template <Fp8 kFormat, Input kInput, class ScaleAt>
F8_DEVICE void count_elements(const ThreadFragment<kInput>& fragment, ScaleAt&& scale,
                              CastCounters* counters) {
  u32 saturated = 0;
  u32 flushed = 0;
  u32 non_finite = 0;
#pragma unroll
  for (int i = 0; i < kFragment; ++i) {
#pragma unroll
    for (int c = 0; c < kFragment; ++c) {
      // Elements beyond the matrix are zeros, which count as nothing.
      const float x = fragment.rows[i].value(c);
      const bool finite = (__float_as_uint(x) & 0x7FFFFFFFU) < 0x7F800000U;
      const float magnitude = fabsf(x * scale(i, c));
      non_finite += finite ? 0 : 1;
      saturated += finite && saturates<kFormat>(magnitude) ? 1 : 0;
      flushed += x != 0.0F && finite && flushes<kFormat>(magnitude) ? 1 : 0;
    }
  }
  __shared__ u32 of_block[3];
  __syncthreads();  // the counts of the other copy have been read
  if (threadIdx.x < 3) of_block[threadIdx.x] = 0;
  __syncthreads();
  const u32 counts[3] = {saturated, flushed, non_finite};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const u32 of_warp = __reduce_add_sync(0xFFFFFFFFU, counts[i]);
    if (threadIdx.x % 32 == 0 && of_warp > 0) atomicAdd(&of_block[i], of_warp);
  }
  __syncthreads();
  if (threadIdx.x < 3 && of_block[threadIdx.x] > 0) {
    atomicAdd(&counters->saturated + threadIdx.x, u64{of_block[threadIdx.x]});
  }
}

}  // namespace f8::kernels
