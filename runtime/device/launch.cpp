// One launch through cuLaunchKernelEx.
#include "runtime/device/launch.hpp"

#include <algorithm>

namespace f8::runtime {

namespace {

// An SM takes as many blocks as fit it. When a kernel starts while its predecessor ends, the SMs
// that are free first would take all blocks of a small grid and the others none. More blocks an SM
// than this limit read no faster in a large grid and leave a longer tail. Where registers let no
// more fit anyway, the shared memory is better left to L1.
constexpr int64_t kMostBlocksPerSm = 4;  // an SM
constexpr int64_t kRegistersOfSm = 64 * 1024;
constexpr int64_t kSmemOfSm = 228 * 1024;
constexpr int64_t kSmemOfBlock = 1024;  // the system's share of each block
constexpr int64_t kSmemGrain = 128;

int smem_bytes(const Kernel& kernel, int64_t blocks) {
  if (!kernel.occupancy_limited) return kernel.smem_bytes;
  const int64_t an_sm = (blocks + kernel.resident_clusters - 1) / kernel.resident_clusters;
  const int64_t registers = int64_t{kernel.registers} * kernel.threads;
  if (an_sm > kMostBlocksPerSm && registers * (kMostBlocksPerSm + 1) > kRegistersOfSm) {
    return kernel.smem_bytes;
  }
  return std::max(kernel.smem_bytes,
                  occupancy_limited_smem_bytes(kernel, std::min(an_sm, kMostBlocksPerSm)));
}

}  // namespace

int occupancy_limited_smem_bytes(const Kernel& kernel, int64_t blocks_per_sm) {
  const int64_t share = kSmemOfSm / blocks_per_sm - kSmemOfBlock - kernel.static_smem_bytes;
  return static_cast<int>(std::max<int64_t>(share, 0) / kSmemGrain * kSmemGrain);
}

Status launch(const Driver& driver, const Kernel& kernel, int64_t blocks, void** parameters,
              bool programmatic, Stream stream, int64_t blocks_beside) {
  CUlaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (kernel.cluster_size > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count].value.clusterDim = {static_cast<unsigned>(kernel.cluster_size), 1, 1};
    ++count;
  }
  if (kernel.cooperative) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[count].value.cooperative = 1;
    ++count;
  }
  if (programmatic) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count].value.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(blocks);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(kernel.threads);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(smem_bytes(kernel, blocks + blocks_beside));
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const CUresult result = driver.launch_kernel_ex(&config, kernel.function, parameters, nullptr);
  if (result == CUDA_SUCCESS) [[likely]] {
    return {};
  }
  Error error = driver.failure(result, "cuLaunchKernelEx").error();
  error.message += f8::format(", launching {} blocks of {}", blocks, codegen::key(kernel.spec));
  return std::unexpected(std::move(error));
}

}  // namespace f8::runtime
