// sync_amax over the GPUs of this machine, one communicator for each, driven by one process.
#include "runtime/distributed/scale_sync.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "runtime/device/context.hpp"
#include "runtime/device/driver.hpp"
#include "runtime/distributed/nccl_api.hpp"

namespace f8::runtime {
namespace {

uint32_t bits(float v) {
  return std::bit_cast<uint32_t>(v);
}

struct Rank {
  CUcontext context = nullptr;
  CUdevice device = 0;
  CUdeviceptr amaxes = 0;
  CUstream stream = nullptr;
  std::vector<uint32_t> values;
};

TEST(ScaleSync, IsTheMaximumOverRanks) {
  const auto count = device_count();
  if (!count) GTEST_SKIP() << count.error().message;
  if (*count == 0) GTEST_SKIP() << "no GPU";
  const auto library = nccl();
  if (!library) GTEST_SKIP() << library.error().message;
  const Driver& cuda = **driver();
  const auto cuda_ok = [&](CUresult result, const char* call) {
    const Status status = cuda.check(result, call);
    ASSERT_TRUE(status) << status.error().message;
  };
  const auto nccl_ok = [&](ncclResult_t result, const char* call) {
    const Status status = (*library)->check(result, call);
    ASSERT_TRUE(status) << status.error().message;
  };

  const auto ranks_count = static_cast<size_t>(*count);
  std::vector<ncclComm_t> communicators(ranks_count);
  nccl_ok((*library)->comm_init_all(communicators.data(), *count, nullptr), "ncclCommInitAll");

  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<Rank> ranks(ranks_count);
  for (size_t r = 0; r < ranks_count; ++r) {
    Rank& rank = ranks[r];
    const bool last = r + 1 == ranks_count;
    // Element 0: rank's own; 1: NaN on the last rank alone; 2: infinity beside numbers; 3: a NaN
    // beside an infinity; 4: zeros; 5: subnormals.
    rank.values = {bits(1.5F + static_cast<float>(r)),
                   bits(last ? nan : 3.0F),
                   bits(last ? 2.0F : inf),
                   bits(last ? nan : inf),
                   0,
                   static_cast<uint32_t>(r + 1)};
    if (ranks_count == 1) rank.values[2] = bits(inf);
    cuda_ok(cuda.device_get(&rank.device, static_cast<int>(r)), "cuDeviceGet");
    cuda_ok(cuda.device_primary_ctx_retain(&rank.context, rank.device), "cuDevicePrimaryCtxRetain");
    cuda_ok(cuda.ctx_set_current(rank.context), "cuCtxSetCurrent");
    cuda_ok(cuda.stream_create(&rank.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    const size_t bytes = rank.values.size() * sizeof(uint32_t);
    cuda_ok(cuda.mem_alloc(&rank.amaxes, bytes), "cuMemAlloc");
    cuda_ok(cuda.memcpy_htod(rank.amaxes, rank.values.data(), bytes), "cuMemcpyHtoD");
    cuda_ok(cuda.ctx_synchronize(), "cuCtxSynchronize");  // the rank's stream does not wait for it
  }

  nccl_ok((*library)->group_start(), "ncclGroupStart");
  for (size_t r = 0; r < ranks_count; ++r) {
    const Status status = sync_amax(reinterpret_cast<uint32_t*>(ranks[r].amaxes),
                                    ranks[r].values.size(), communicators[r], ranks[r].stream);
    EXPECT_TRUE(status) << status.error().message;
  }
  nccl_ok((*library)->group_end(), "ncclGroupEnd");

  for (size_t r = 0; r < ranks_count; ++r) {
    Rank& rank = ranks[r];
    cuda_ok(cuda.ctx_set_current(rank.context), "cuCtxSetCurrent");
    cuda_ok(cuda.stream_synchronize(rank.stream), "cuStreamSynchronize");
    std::vector<uint32_t> got(rank.values.size());
    cuda_ok(cuda.memcpy_dtoh(got.data(), rank.amaxes, got.size() * sizeof(uint32_t)),
            "cuMemcpyDtoH");
    const std::vector<uint32_t> expected = {bits(0.5F + static_cast<float>(ranks_count)),
                                            bits(nan),
                                            bits(inf),
                                            bits(nan),
                                            0,
                                            static_cast<uint32_t>(ranks_count)};
    EXPECT_EQ(got, expected) << "rank " << r << " of " << ranks_count;
    cuda_ok(cuda.mem_free(rank.amaxes), "cuMemFree");
    cuda_ok(cuda.stream_destroy(rank.stream), "cuStreamDestroy");
  }
  for (ncclComm_t communicator : communicators) {
    nccl_ok((*library)->comm_destroy(communicator), "ncclCommDestroy");
  }
  for (const Rank& rank : ranks) cuda.device_primary_ctx_release(rank.device);
  RecordProperty("gpus", *count);
}

}  // namespace
}  // namespace f8::runtime
