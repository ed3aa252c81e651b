// One launch through cuLaunchKernelEx.
#include "runtime/launch.hpp"

namespace f8::runtime {

Status launch(const Driver& driver, const Kernel& kernel, int64_t blocks, void** parameters,
              bool programmatic, Stream stream) {
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
  config.sharedMemBytes = static_cast<unsigned>(kernel.smem_bytes);
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const CUresult result = driver.launch_kernel_ex(&config, kernel.function, parameters, nullptr);
  if (result == CUDA_SUCCESS) [[likely]] {
    return {};
  }
  Error error = driver.failure(result, "cuLaunchKernelEx").error();
  error.message += fmt::format(", launching {} blocks of {}", blocks, codegen::key(kernel.spec));
  return std::unexpected(std::move(error));
}

}  // namespace f8::runtime
