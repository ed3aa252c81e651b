// The life of a context, and of its kernels from a spec to a loaded function.
#include "runtime/device/context.hpp"

#include <algorithm>

#include "base/environment.hpp"
#include "codegen/emit.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/emulated_driver.hpp"
#include "runtime/device/launch.hpp"
#include "tuning_db/estimate/builtin_tables.hpp"

namespace f8::runtime {
namespace {

constexpr int kHopper = 90;

Status check_driver_version(int driver_version) {
  const codegen::NvrtcVersion nvrtc = F8_TRY(codegen::nvrtc_version());
  if (driver_version / 1000 >= nvrtc.major) return {};
  return fail(ErrorCode::kEnvironment,
              "the NVIDIA driver supports CUDA {}.{}, but kernels are compiled by NVRTC {}.{} and "
              "need a driver for CUDA {}: install driver branch 580 or newer",
              driver_version / 1000, driver_version % 1000 / 10, nvrtc.major, nvrtc.minor,
              nvrtc.major);
}

// The number of clusters that fit on the device at once. It may be less than SMs / size, since the
// SMs of a cluster belong to one GPC, and GPCs differ in size.
int resident_clusters(const Driver& cuda, const Kernel& kernel, int sm_count) {
  const int upper = sm_count / kernel.cluster_size;
  if (kernel.cluster_size == 1) return upper;
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim = {static_cast<unsigned>(kernel.cluster_size), 1, 1};
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(upper * kernel.cluster_size);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(kernel.threads);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(kernel.smem_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cuda.occupancy_max_active_clusters(&clusters, kernel.function, &config) != CUDA_SUCCESS ||
      clusters < 1) {
    return upper;
  }
  return std::min(clusters, upper);
}

// The caller has made the context current and holds the lock.
Result<std::unique_ptr<const Kernel>> load(Context::State& state, const codegen::KernelSpec& spec,
                                           const codegen::Cubin& cubin) {
  const Driver& cuda = state.driver;
  CUmodule module = nullptr;
  const CUresult loaded = cuda.module_load_data(&module, cubin.image.data());
  if (loaded != CUDA_SUCCESS) {
    Error error = cuda.failure(loaded, "cuModuleLoadData").error();
    error.message += f8::format(", loading kernel {}", cubin.key);
    return std::unexpected(std::move(error));
  }
  state.modules.push_back(module);
  auto kernel = std::make_unique<Kernel>();
  kernel->spec = spec;
  const codegen::LaunchTraits traits = codegen::launch_traits(spec);
  kernel->threads = traits.threads;
  kernel->smem_bytes = traits.dynamic_smem_bytes;
  kernel->cluster_size = traits.cluster_size;
  kernel->cooperative = traits.cooperative;
  kernel->occupancy_limited = traits.occupancy_limited;
  kernel->registers = cubin.registers;
  kernel->spill_bytes = cubin.spill_bytes;
  F8_TRY(cuda.check(cuda.module_get_function(&kernel->function, module, cubin.entry.c_str()),
                    "cuModuleGetFunction"));
  int most_smem_bytes = kernel->smem_bytes;
  if (kernel->occupancy_limited) {
    F8_TRY(
        cuda.check(cuda.func_get_attribute(&kernel->static_smem_bytes,
                                           CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel->function),
                   "cuFuncGetAttribute(SHARED_SIZE_BYTES)"));
    most_smem_bytes = occupancy_limited_smem_bytes(*kernel, 1);
  }
  if (most_smem_bytes > 0) {
    F8_TRY(cuda.check(
        cuda.func_set_attribute(kernel->function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                most_smem_bytes),
        "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)"));
  }
  if (kernel->cluster_size > 8) {
    F8_TRY(cuda.check(cuda.func_set_attribute(
                          kernel->function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
                      "cuFuncSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)"));
  }
  kernel->resident_clusters = resident_clusters(cuda, *kernel, state.info.sm_count);
  if (kernel->cluster_size == 2) {
    kernel->resident_clusters = std::min(kernel->resident_clusters, kernels::kMaxRemappedClusters);
    if (!state.cluster_remap) {
      state.cluster_remap =
          state.cache ? probe_cluster_remap(cuda, state.info.sm_count) : identity_remap();
    }
  }
  return kernel;
}

}  // namespace

Context::Context(std::unique_ptr<State> state) : state_(std::move(state)) {}

Result<std::shared_ptr<Context>> Context::create(int device, const ContextOptions& options) {
  const Driver* cuda = options.emulate ? &emulation::driver() : F8_TRY(driver());
  DeviceInfo info = F8_TRY(device_info(*cuda, device));
  info.emulated = options.emulate;
  if (info.cc != kHopper) {
    return fail(
        ErrorCode::kUnsupported,
        "CUDA device {} is {} (compute capability {}.{}); float8's kernels need a Hopper GPU "
        "(compute capability 9.0: H100, H200, H800, GH200)",
        device, info.name, info.cc / 10, info.cc % 10);
  }
  auto state = std::make_unique<State>(*cuda);
  if (!options.emulate) {
    F8_TRY(check_driver_version(info.driver_version));
    state->cache = F8_TRY(codegen::CubinCache::open(
        options.cache_dir.empty() ? environment().cache_dir : options.cache_dir));
  }
  if (options.builtin_table) state->table = tuning_db::builtin_table(info);
  state->info = std::move(info);
  state->options = options;
  state->records.moves_saved = options.moves_saved;
  F8_TRY(cuda->check(cuda->device_get(&state->device, device), "cuDeviceGet"));
  F8_TRY(cuda->check(cuda->device_primary_ctx_retain(&state->primary, state->device),
                     "cuDevicePrimaryCtxRetain"));
  return std::shared_ptr<Context>(new Context(std::move(state)));
}

// Errors have nowhere to go here. After a lost context every call fails and nothing is left to free.
Context::~Context() {
  const Driver& cuda = state_->driver;
  {
    const ScopedContext current(cuda, state_->primary);
    if (state_->cublaslt != nullptr) {
      // At the end of a process that has kept the context the library may be gone.
      if (const auto library = cublaslt()) (*library)->destroy(state_->cublaslt);
    }
    state_->cudnn.reset();
    for (CUmodule module : state_->modules) cuda.module_unload(module);
  }
  cuda.device_primary_ctx_release(state_->device);
}

const DeviceInfo& Context::device() const {
  return state_->info;
}
const ContextOptions& Context::options() const {
  return state_->options;
}

Status Context::make_current() const {
  return state_->driver.check(state_->driver.ctx_set_current(state_->primary), "cuCtxSetCurrent");
}

Result<const Kernel*> Context::kernel(const codegen::KernelSpec& spec) {
  const std::string key = codegen::key(spec);
  {
    const std::lock_guard lock(state_->kernels_mutex);
    if (const auto found = state_->kernels.find(key); found != state_->kernels.end()) {
      return found->second.get();
    }
  }
  F8_TRY(codegen::validate(spec));
  std::shared_ptr<const codegen::Cubin> cubin;
  if (state_->cache) {
    const codegen::KernelSource source = F8_TRY(codegen::emit(spec));
    cubin = F8_TRY(state_->cache->get(source));
  } else {
    cubin = std::make_shared<const codegen::Cubin>(emulation::cubin(spec));
  }

  const std::lock_guard lock(state_->kernels_mutex);
  if (const auto found = state_->kernels.find(key); found != state_->kernels.end()) {
    return found->second.get();  // another thread loaded it meanwhile
  }
  const ScopedContext current(state_->driver, state_->primary);
  F8_TRY(current.status());
  auto kernel = F8_TRY(load(*state_, spec, *cubin));
  return state_->kernels.emplace(key, std::move(kernel)).first->second.get();
}

Status Context::compile(std::span<const codegen::KernelSpec> specs, int threads) {
  if (!state_->cache) return {};
  std::vector<codegen::KernelSource> sources;
  for (const auto& spec : specs) sources.push_back(F8_TRY(codegen::emit(spec)));
  F8_TRY(state_->cache->get_all(sources, threads));
  return {};
}

void Context::set_table(TuningTable table) {
  auto shared = std::make_shared<const TuningTable>(std::move(table));
  const std::lock_guard lock(state_->table_mutex);
  state_->table = std::move(shared);
}

std::shared_ptr<const TuningTable> Context::table() const {
  const std::lock_guard lock(state_->table_mutex);
  return state_->table;
}

}  // namespace f8::runtime
