// Fingerprints: whether the bytes of weights are still those of the comparison before, found without
// the host. recipes/reference/fingerprint.hpp is the specification.
//
// A launch reads each byte once, in chunks of 16, which its grid takes in turns. Sums modulo 2^64 do
// not depend on the order of blocks, so a weight has the same fingerprint in every launch. The block
// that ends last compares.
#pragma once

#include "codegen/kernels/cast/fingerprint_args.cuh"
#include "codegen/kernels/cast/matrix_tile.cuh"

namespace f8::kernels {

struct Fingerprint {
  u64 low;
  u64 high;

  F8_DEVICE void add(const Fingerprint& other) {
    low += other.low;
    high += other.high;
  }
  F8_DEVICE void add_lane(int offset) {
    low += __shfl_xor_sync(0xFFFFFFFFU, low, offset);
    high += __shfl_xor_sync(0xFFFFFFFFU, high, offset);
  }
};

struct FingerprintChunk {
  u32 word[4];

  F8_DEVICE void load(const u8* p) {
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(p));
  }
  // Up to 16 bytes at an address of an element, with zeros behind them.
  F8_DEVICE void load_elements(const u8* p, i64 bytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (2 * i < bytes) word[i / 2] |= u32{reinterpret_cast<const u16*>(p)[i]} << (16 * (i % 2));
    }
  }
  F8_DEVICE void multiply_and_add() {
    word[0] += word[1] * word[3];
    word[1] += word[2] * word[0];
    word[2] += word[0] * word[1];
    word[3] += word[1] * word[2];
  }
  F8_DEVICE void fold() {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] ^= word[i] >> 16;
  }
  F8_DEVICE Fingerprint mixed(u32 index, u64 seed) const {
    u32 key = index * 0x9E3779B1U + static_cast<u32>(seed);
    key = (key ^ key >> 15) * 0x85EBCA77U;
    key ^= key >> 13;
    FingerprintChunk v = *this;
    v.word[0] ^= key;
    v.word[1] ^= static_cast<u32>(seed >> 32);
    v.word[2] ^= key * 0xC2B2AE3DU;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = v.word[i] * 1664525U + 1013904223U;
    v.multiply_and_add();
    v.fold();
    v.multiply_and_add();
    v.fold();
    v.multiply_and_add();
    return {v.word[0] | u64{v.word[1]} << 32, v.word[2] | u64{v.word[3]} << 32};
  }
};

// The sum over the chunks that fall to this thread.
F8_DEVICE Fingerprint fingerprint_of_thread(const FingerprintWeight& w, u32 block) {
  constexpr int kInFlight = 4;
  const i64 chunks_of_row = (w.row_bytes + 15) / 16;
  const i64 chunks = chunks_of_row * w.rows;
  const i64 step = static_cast<i64>(w.blocks) * kTileThreads;
  const bool aligned = ((reinterpret_cast<u64>(w.w) | static_cast<u64>(w.pitch)) & 15) == 0;
  Fingerprint sum = {0, 0};
  i64 chunk = static_cast<i64>(block) * kTileThreads + threadIdx.x;
  if (aligned && w.rows == 1) {
    // The last chunk may have less than 16 bytes.
    for (; chunk + (kInFlight - 1) * step < w.row_bytes / 16; chunk += kInFlight * step) {
      FingerprintChunk values[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) values[i].load(w.w + (chunk + i * step) * 16);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        sum.add(values[i].mixed(static_cast<u32>(chunk + i * step), w.seed));
      }
    }
  }
  for (; chunk < chunks; chunk += step) {
    const i64 row = w.rows == 1 ? 0 : static_cast<u32>(chunk) / static_cast<u32>(chunks_of_row);
    const i64 offset = (chunk - row * chunks_of_row) * 16;
    const u8* const p = w.w + row * w.pitch + offset;
    FingerprintChunk value;
    if (aligned && offset + 16 <= w.row_bytes) {
      value.load(p);
    } else {
      value.load_elements(p, w.row_bytes - offset);
    }
    sum.add(value.mixed(static_cast<u32>(chunk), w.seed));
  }
  return sum;
}

// Adds the sum of a block's threads to those of a weight's `blocks` blocks. True in one thread of the last
// of them, which has the whole.
F8_DEVICE bool add_of_block(FingerprintState& state, i32 blocks, Fingerprint sum,
                            Fingerprint& whole) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum.add_lane(offset);
  __shared__ Fingerprint warps[kTileThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return false;
#pragma unroll
  for (int i = 1; i < kTileThreads / 32; ++i) sum.add(warps[i]);
  atomicAdd(&state.sum[0], sum.low);
  atomicAdd(&state.sum[1], sum.high);
  __threadfence();
  const u32 last = static_cast<u32>(blocks) - 1;
  if (atomicInc(&state.blocks_done, last) != last) return false;
  __threadfence();
  whole.low = atomicExch(&state.sum[0], u64{0});
  whole.high = atomicExch(&state.sum[1], u64{0});
  return true;
}

F8_DEVICE void fingerprint(const FingerprintArgs& args) {
  grid_dependency_wait();
  launch_dependents();
  const FingerprintWeight& w = args.tensors[tensor_of_block(args)];
  const Fingerprint sum = fingerprint_of_thread(w, blockIdx.x - static_cast<u32>(w.first_block));
  FingerprintState& state = *w.state;
  Fingerprint whole;
  if (!add_of_block(state, w.blocks, sum, whole)) return;
  if (state.value[0] == whole.low && state.value[1] == whole.high) return;
  state.value[0] = whole.low;
  state.value[1] = whole.high;
  *w.valid = 0;
}

}  // namespace f8::kernels
