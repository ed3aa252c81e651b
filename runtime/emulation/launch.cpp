// Reads a launch, and calls the emulation of its kernel.
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
Launch read_launch(const CUlaunchConfig& config) {
  Launch launch{
      .grid = config.gridDimX, .threads = config.blockDimX, .smem_bytes = config.sharedMemBytes};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      launch.cluster = attribute.value.clusterDim.x;
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      launch.cooperative = attribute.value.cooperative != 0;
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      launch.programmatic = attribute.value.programmaticStreamSerializationAllowed != 0;
    }
  }
  return launch;
}

void run(const Module& module, const Launch& launch, void* const* parameters, int sm_count,
         Faults& faults) {
  if (launch.grid == 0 || launch.grid % launch.cluster != 0) {
    faults.push_back("grid is no multiple of the cluster");
  }
  if (static_cast<int>(launch.smem_bytes) > module.max_dynamic_smem) {
    faults.push_back("more dynamic shared memory than the function allows");
  }
  if (launch.threads != static_cast<unsigned>(codegen::launch_traits(module.spec).threads)) {
    faults.push_back("blocks have a size that the kernel was not made for");
  }
  const Call call{module, launch, parameters, sm_count, faults};
  std::visit([&](const auto& spec) { emulate(spec, call); }, module.spec);
}

}  // namespace f8::runtime::emulation
