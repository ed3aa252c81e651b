// Calls the loop that does a launch's work.
#include <cstring>

#include "base/format.hpp"
#include "runtime/device/tensor_map.hpp"
#include "runtime/emulation/kernels.hpp"
#include "runtime/emulation/reserved_bytes.hpp"

namespace f8::runtime::emulation {
namespace {

template <class Args>
const Args& as(const void* parameter) {
  return *static_cast<const Args*>(parameter);
}

struct Run {
  const Module& module;
  const Launch& launch;
  void* const* parameters;
  int sm_count;
  Faults& faults;

  void operator()(const codegen::AmaxSpec& spec) const {
    if (spec.list) {
      run_amax(spec, as<kernels::AmaxListArgs>(parameters[0]), launch.grid, faults);
    } else {
      run_amax(spec, as<kernels::AmaxArgs>(parameters[0]), launch.grid, faults);
    }
  }
  void operator()(const codegen::CastSpec& spec) const {
    if (codegen::is_cooperative(spec) != launch.cooperative) {
      faults.push_back("a one-launch cast of tiles is cooperative, others are not");
    }
    if (spec.one_launch) {
      quantize(spec, as<kernels::QuantizeArgs>(parameters[0]));
    } else if (spec.list) {
      run_cast(spec, as<kernels::CastListArgs>(parameters[0]), launch.grid, faults);
    } else {
      run_cast(spec, as<kernels::CastArgs>(parameters[0]), launch.grid, faults);
    }
  }
  void quantize(const codegen::CastSpec& spec, const kernels::QuantizeArgs& args) const {
    if (args.sync == nullptr) return faults.push_back("sync is null");
    const ReservedBytes reserved = reserved_bytes(args, sm_count);
    if (!are_untouched(reserved)) {
      return faults.push_back(f8::format(
          "somebody wrote to the first {} bytes of the workspace since its last call; they belong "
          "to float8 (float8_workspace_reserved_bytes): write behind them, or set all of them to 0 "
          "before the next call",
          reserved.count));
    }
    run_quantize(spec, args, launch.grid, sm_count, faults);
    remember(reserved, &module);
  }
  void operator()(const codegen::ScaleUpdateSpec&) const {
    run_scale_update(as<kernels::ScaleUpdateArgs>(parameters[0]), launch.grid, faults);
  }
  void operator()(const codegen::FoundInfSpec&) const {
    run_found_inf(as<kernels::FoundInfArgs>(parameters[0]), launch.grid, faults);
  }
  void operator()(const codegen::FingerprintSpec&) const {
    run_fingerprint(as<kernels::FingerprintArgs>(parameters[0]), launch.grid, faults);
  }
  void operator()(const codegen::ColumnSumsSpec& spec) const {
    run_column_sums(spec, as<kernels::ColumnSumsArgs>(parameters[0]), launch.grid, faults);
  }
  void operator()(const codegen::BiasGradSpec& spec) const {
    run_bias_grad(spec, as<kernels::BiasGradArgs>(parameters[0]), launch.grid, faults);
  }
  void operator()(const codegen::GemmSpec& spec) const {
    if (reinterpret_cast<uintptr_t>(parameters[0]) % alignof(CUtensorMap) != 0) {
      faults.push_back(
          f8::format("the tensor maps are not aligned to {} bytes", alignof(CUtensorMap)));
    }
    const auto* encoded = static_cast<const CUtensorMap*>(parameters[0]);
    const auto& args = as<kernels::GemmArgs>(parameters[1]);
    for (int i = 0; i < spec.problems; ++i) {
      TensorMap maps[3];
      for (int j = 0; j < 3; ++j) std::memcpy(&maps[j], &encoded[3 * i + j], sizeof maps[j]);
      run_gemm(spec, maps[0], maps[1], maps[2], args.problems[i], faults);
    }
  }
};

}  // namespace

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

ParameterSizes parameter_sizes(const codegen::KernelSpec& spec) {
  if (const auto* amax = std::get_if<codegen::AmaxSpec>(&spec)) {
    return {.first = amax->list ? sizeof(kernels::AmaxListArgs) : sizeof(kernels::AmaxArgs)};
  }
  if (const auto* cast = std::get_if<codegen::CastSpec>(&spec)) {
    return {.first = cast->one_launch ? sizeof(kernels::QuantizeArgs)
                     : cast->list     ? sizeof(kernels::CastListArgs)
                                      : sizeof(kernels::CastArgs)};
  }
  if (const auto* gemm = std::get_if<codegen::GemmSpec>(&spec)) {
    return {.first = sizeof(GemmMaps) * static_cast<size_t>(gemm->problems),
            .second = sizeof(kernels::GemmArgs)};
  }
  if (std::holds_alternative<codegen::ColumnSumsSpec>(spec)) {
    return {.first = sizeof(kernels::ColumnSumsArgs)};
  }
  if (std::holds_alternative<codegen::BiasGradSpec>(spec)) {
    return {.first = sizeof(kernels::BiasGradArgs)};
  }
  if (std::holds_alternative<codegen::FingerprintSpec>(spec)) {
    return {.first = sizeof(kernels::FingerprintArgs)};
  }
  if (std::holds_alternative<codegen::FoundInfSpec>(spec)) {
    return {.first = sizeof(kernels::FoundInfArgs)};
  }
  return {.first = sizeof(kernels::ScaleUpdateArgs)};
}

void run(const Module& module, const Launch& launch, void* const* parameters, int sm_count,
         Faults& faults) {
  if (launch.grid == 0 || launch.grid % launch.cluster != 0) {
    faults.push_back("grid is no multiple of the cluster");
  }
  if (static_cast<int>(launch.smem_bytes) > module.max_dynamic_smem) {
    faults.push_back("more dynamic shared memory than the function allows");
  }
  if (launch.threads != static_cast<unsigned>(codegen::threads_per_block(module.spec))) {
    faults.push_back("blocks have a size that the kernel was not made for");
  }
  std::visit(Run{module, launch, parameters, sm_count, faults}, module.spec);
}

}  // namespace f8::runtime::emulation
