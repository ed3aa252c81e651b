// Hopper's instructions as functions: barriers, TMA, wgmma, shared and global memory, conversions.
// Each function is one instruction and has its name or CUTLASS's; the PTX ISA manual is the
// reference for the semantics.
#pragma once

#include "codegen/kernels/kernel_args.cuh"

#define F8_DEVICE __device__ __forceinline__

namespace f8::kernels {

// A tensor map as the driver encodes it. Kernels take it by value, as a __grid_constant__
// parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

F8_DEVICE u32 smem_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
// True in one lane of the warp, whose lanes all take part. The compiler knows that only one lane
// takes the branch.
F8_DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(elected));
  return elected != 0;
}
F8_DEVICE u32 warp_max(u32 x) {
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x));
  return r;
}

// --- programmatic dependent launch (griddepcontrol)
// Waits until the previous kernel has ended and its writes are visible.
F8_DEVICE void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the next kernel of the stream start. It waits for this one by grid_dependency_wait().
F8_DEVICE void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;");
}
// The beginning of a kernel that may overlap the previous one (`overlap` is 1 where it does). The
// previous kernel launched its dependents after its own wait, so every kernel before it has ended;
// the fence makes their writes visible.
F8_DEVICE void begin_overlapped(i32 overlap) {
  if (overlap == 0) {
    grid_dependency_wait();
  } else {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
  launch_dependents();
}
// The end of such a kernel: it ends after the previous one, since the next kernel waits for this
// one alone. A second wait takes no time, and a condition would cost registers.
F8_DEVICE void end_overlapped() {
  grid_dependency_wait();
}

// Fetches a cache line of 128 bytes into L2. It is a hint, so it may come before
// grid_dependency_wait() even where the previous kernel writes the line.
F8_DEVICE void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// --- register budget of a warpgroup (setmaxnreg)
template <int kRegisters>
F8_DEVICE void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
F8_DEVICE void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- barriers. Addresses are shared-memory addresses of 8-byte mbarriers.
F8_DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
F8_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
F8_DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
F8_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier at the same offset in another CTA of the cluster.
F8_DEVICE void barrier_arrive_remote(u32 barrier, u32 cta) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(cta)
      : "memory");
}
F8_DEVICE bool barrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Does not wait.
F8_DEVICE bool barrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
F8_DEVICE void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_try_wait(barrier, parity)) {
  }
}
// It orders no memory: barrier_init_fence publishes barriers, and the barriers publish data.
// (Release and acquire at cluster scope would compile to a GPU-wide fence and an invalidation of
// L1.)
F8_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
// The named barrier of a warpgroup (id 1..15; 0 is __syncthreads).
F8_DEVICE void warpgroup_sync(u32 id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}
// A named barrier of two warpgroups: one waits until the other has arrived.
F8_DEVICE void warpgroup_pair_sync(u32 id) {
  asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory");
}
F8_DEVICE void warpgroup_pair_arrive(u32 id) {
  asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory");
}

// --- TMA: bulk copies, of tensor tiles and of plain memory
F8_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
F8_DEVICE void tma_load(u32 smem, const TensorMap* map, u32 barrier, i32 x, i32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
// The tile of matrix z of a tensor of three dimensions.
F8_DEVICE void tma_load(u32 smem, const TensorMap* map, u32 barrier, i32 x, i32 y, i32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Fetches a tile into L2.
F8_DEVICE void tma_prefetch(const TensorMap* map, i32 x, i32 y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x),
               "r"(y)
               : "memory");
}
F8_DEVICE void tma_prefetch(const TensorMap* map, i32 x, i32 y, i32 z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}
// The tile lands at the same offset in every CTA of the mask and completes bytes on the barrier of
// each.
F8_DEVICE void tma_load_multicast(u32 smem, const TensorMap* map, u32 barrier, u16 mask, i32 x,
                                  i32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(smem),
      "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y)
      : "memory");
}
F8_DEVICE void tma_load_multicast(u32 smem, const TensorMap* map, u32 barrier, u16 mask, i32 x,
                                  i32 y, i32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(smem),
      "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y), "r"(z)
      : "memory");
}
F8_DEVICE void tma_store(const TensorMap* map, u32 smem, i32 x, i32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(smem), "r"(x), "r"(y)
      : "memory");
}
F8_DEVICE void tma_store(const TensorMap* map, u32 smem, i32 x, i32 y, i32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(smem), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Adds to what global memory holds. Each element gets one addition, so the result does not depend
// on the order.
F8_DEVICE void tma_reduce_add(const TensorMap* map, u32 smem, i32 x, i32 y) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], "
      "[%1];" ::"l"(map),
      "r"(smem), "r"(x), "r"(y)
      : "memory");
}
F8_DEVICE void tma_reduce_add(const TensorMap* map, u32 smem, i32 x, i32 y, i32 z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(map),
      "r"(smem), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Copies `bytes` (a multiple of 16) of contiguous memory.
F8_DEVICE void bulk_load(u32 smem, const void* from, u32 barrier, u32 bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::
          "r"(smem),
      "l"(from), "r"(barrier), "r"(bytes)
      : "memory");
}
F8_DEVICE void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Returns when at most kPending groups of stores have not yet read their shared memory.
template <int kPending>
F8_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
F8_DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Orders ordinary stores to shared memory before later reads by TMA or the tensor core.
F8_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- wgmma: the MMAs of a warpgroup
F8_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
F8_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
F8_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving register copies of an accumulator across asynchronous MMAs.
template <int kCount>
F8_DEVICE void warpgroup_fence_operand(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
// The descriptor of a K-major tile of 128-byte rows with the 128-byte swizzle: atoms of 8 rows are
// 1024 bytes apart. Its low word grows with the address, in units of 16 bytes.
F8_DEVICE u32 wgmma_descriptor_low(u32 smem) {
  return (smem >> 4) + (1U << 16);
}
// That of a K-major tile of 64-byte rows with the 64-byte swizzle: atoms of 8 rows are 512 bytes apart.
F8_DEVICE u64 wgmma_descriptor_64(u32 low) {
  return low | (u64{512 >> 4} << 32) | (u64{2} << 62);
}
// That of an MN-major tile of 16-bit elements in boxes of 64 columns (gemm_layout.cuh), `box_bytes` apart:
// atoms of 8 of k are 1024 bytes apart too. An address has the CTA's rank in its cluster above the 18
// bits of the descriptor, where the box's size comes.
F8_DEVICE u32 wgmma_descriptor_low_mn(u32 smem, u32 box_bytes) {
  return ((smem & 0x3FFFFU) >> 4) + (box_bytes >> 4 << 16);
}
F8_DEVICE u64 wgmma_descriptor(u32 low) {
  return low | (u64{1024 >> 4} << 32) | (u64{1} << 62);
}

// --- shared memory
F8_DEVICE void stmatrix_x4(u32 smem, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
F8_DEVICE void store_shared(u32 smem, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(x) : "memory");
}
F8_DEVICE void store_shared(u32 smem, u32 word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(word) : "memory");
}
F8_DEVICE void store_shared_zeros(u32 smem) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem), "r"(0U) : "memory");
}
F8_DEVICE void store_shared(u32 smem, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem), "f"(x), "f"(y) : "memory");
}

F8_DEVICE float load_shared(u32 smem) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(smem) : "memory");
  return x;
}
F8_DEVICE float2 load_shared_pair(u32 smem) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(smem) : "memory");
  return x;
}
F8_DEVICE float4 load_shared_four(u32 smem) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(smem)
               : "memory");
  return x;
}
F8_DEVICE void load_shared_words(u32 smem, u32* words) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(smem)
               : "memory");
}
// Maps an address of this CTA's shared memory to the same offset in CTA `cta` of the cluster.
F8_DEVICE u32 cluster_address(u32 smem, u32 cta) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem), "r"(cta));
  return r;
}
// Stores to the shared memory of another CTA and completes 16 bytes on a barrier there.
F8_DEVICE void store_async(u32 address, u32 barrier, float x, float y, float z, float w) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, "
      "[%1];" ::"r"(address),
      "r"(barrier), "f"(x), "f"(y), "f"(z), "f"(w)
      : "memory");
}

// --- global memory. Loads are volatile, so that none moves above grid_dependency_wait (__ldg may).
F8_DEVICE u32 load_global(const u32* p) {
  u32 r;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
}
// What the thread has seen before the addition (or by __syncthreads(), its block) is seen after a load
// that has the sum.
F8_DEVICE u32 load_acquire(const u32* p) {
  u32 r;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
F8_DEVICE void add_release(u32* p, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
F8_DEVICE u32 load_global(const u16* p) {
  u16 r;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(r) : "l"(p));
  return r;
}
F8_DEVICE float load_global(const float* p) {
  float r;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(r) : "l"(p));
  return r;
}
F8_DEVICE float2 load_global(const float2* p) {
  float2 r;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "l"(p));
  return r;
}
F8_DEVICE void load_global_words(const void* p, u32* words) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(p));
}
F8_DEVICE void store_global_words(void* p, const u32* words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// --- conversions
F8_DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
F8_DEVICE u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
F8_DEVICE u32 multiply_bf16(u32 pair, u32 by) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(by));
  return r;
}

}  // namespace f8::kernels
