#include "tests/unit/runtime/fake_cuda.hpp"

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/file.hpp"
#include "runtime/device/emulated_driver.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::testing {
namespace {

FakeCuda* g_fake = nullptr;
const CUcontext kPrimary = reinterpret_cast<CUcontext>(uintptr_t{0x1000});

CUresult init(unsigned) {
  return g_fake->init_result;
}

CUresult driver_get_version(int* out) {
  *out = g_fake->driver_version;
  return CUDA_SUCCESS;
}

CUresult get_error_name(CUresult error, const char** out) {
  switch (error) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      *out = "CUDA_ERROR_OUT_OF_MEMORY";
      return CUDA_SUCCESS;
    case CUDA_ERROR_ILLEGAL_ADDRESS:
      *out = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_VALUE:
      *out = "CUDA_ERROR_INVALID_VALUE";
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult get_error_string(CUresult error, const char** out) {
  if (error != CUDA_ERROR_OUT_OF_MEMORY) return CUDA_ERROR_INVALID_VALUE;
  *out = "out of memory";
  return CUDA_SUCCESS;
}

CUresult device_get_count(int* out) {
  *out = g_fake->device_count;
  return CUDA_SUCCESS;
}

CUresult device_get(CUdevice* out, int ordinal) {
  *out = ordinal;
  return ordinal < g_fake->device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult device_get_name(char* out, int size, CUdevice) {
  const char* name = g_fake->cc_major == 9 ? "Fake H100" : "Fake A100";
  std::snprintf(out, static_cast<size_t>(size), "%s", name);
  return CUDA_SUCCESS;
}

CUresult device_get_uuid(CUuuid* out, CUdevice) {
  for (size_t i = 0; i < sizeof out->bytes; ++i) out->bytes[i] = static_cast<char>(0xf0 + i);
  return CUDA_SUCCESS;
}

CUresult device_get_attribute(int* out, CUdevice_attribute which, CUdevice) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *out = g_fake->cc_major;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *out = g_fake->cc_minor;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *out = g_fake->sm_count;
      break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      *out = 50 << 20;
      break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      *out = 1'980'000;
      break;
    default:
      *out = 2'619'000;
  }
  return CUDA_SUCCESS;
}

CUresult device_get_pci_bus_id(char*, int, CUdevice) {
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult device_total_mem(size_t* out, CUdevice) {
  *out = size_t{80} << 30;
  return CUDA_SUCCESS;
}

CUresult primary_retain(CUcontext* out, CUdevice) {
  if (g_fake->retain_result != CUDA_SUCCESS) return g_fake->retain_result;
  *out = kPrimary;
  ++g_fake->retained;
  return CUDA_SUCCESS;
}

CUresult primary_release(CUdevice) {
  --g_fake->retained;
  return CUDA_SUCCESS;
}

CUresult ctx_get_current(CUcontext* out) {
  *out = g_fake->current;
  return CUDA_SUCCESS;
}

CUresult ctx_set_current(CUcontext context) {
  g_fake->current = context;
  ++g_fake->context_switches;
  return CUDA_SUCCESS;
}

CUresult module_load_data(CUmodule* out, const void* image) {
  if (g_fake->load_result != CUDA_SUCCESS) return g_fake->load_result;
  ++g_fake->modules_loaded;
  const CUresult result = emulation::driver().module_load_data(out, image);
  if (result == CUDA_SUCCESS) {
    g_fake->modules.push_back(reinterpret_cast<const emulation::Module*>(*out));
    g_fake->keys.insert(g_fake->modules.back()->key);
  }
  return result;
}

CUresult func_get_attribute(int* out, CUfunction_attribute, CUfunction) {
  *out = 20 << 10;  // static shared memory
  return CUDA_SUCCESS;
}

CUresult module_unload(CUmodule module) {
  ++g_fake->modules_unloaded;
  std::erase(g_fake->modules, reinterpret_cast<const emulation::Module*>(module));
  return emulation::driver().module_unload(module);
}

CUresult occupancy(int* out, CUfunction, const CUlaunchConfig*) {
  *out = g_fake->active_clusters;
  return CUDA_SUCCESS;
}

CUresult encode(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                CUtensorMapFloatOOBfill fill) {
  if (g_fake->encode_result != CUDA_SUCCESS) return g_fake->encode_result;
  return emulation::driver().tensor_map_encode_tiled(out, type, rank, base, extents, strides, box,
                                                     steps, interleave, swizzle, promotion, fill);
}

CUresult launch_kernel_ex(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void**) {
  if (g_fake->launch_result != CUDA_SUCCESS) return g_fake->launch_result;
  const auto& module = *reinterpret_cast<const emulation::Module*>(function);
  FakeLaunch launch{
      emulation::read_launch(*config), *g_fake->keys.find(module.key), config->hStream, {}};
  if (g_fake->current != kPrimary) g_fake->faults.push_back("the primary context is not current");
  if (std::holds_alternative<codegen::GemmSpec>(module.spec)) {
    launch.gemm = *static_cast<kernels::GemmArgs*>(parameters[1]);
  }
  if (g_fake->launches.size() == g_fake->launches.capacity()) {
    ADD_FAILURE() << "more than " << g_fake->launches.capacity()
                  << " launches: clear FakeCuda::launches, or reserve more";
    return CUDA_ERROR_UNKNOWN;
  }
  g_fake->launches.push_back(launch);
  if (g_fake->emulate) {
    emulation::run(module, launch, parameters, g_fake->sm_count, g_fake->faults);
  }
  return CUDA_SUCCESS;
}

// Memory that the driver does not know gives zeros, as with the real one.
CUresult pointer_get_attributes(unsigned count, CUpointer_attribute* which, void** out,
                                CUdeviceptr pointer) {
  FakeAllocation found{.type = CUmemorytype{}};
  for (const FakeAllocation& a : g_fake->allocations) {
    const auto begin = reinterpret_cast<CUdeviceptr>(a.begin);
    if (pointer >= begin && pointer < begin + a.bytes) found = a;
  }
  for (unsigned i = 0; i < count; ++i) {
    const auto give = [to = out[i]](auto value) { std::memcpy(to, &value, sizeof value); };
    switch (which[i]) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        give(found.type);
        break;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        give(found.managed ? 1U : 0U);
        break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        give(found.device);
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        give(reinterpret_cast<CUdeviceptr>(found.begin));
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        give(found.bytes);
        break;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

CUresult stream_get_ctx(CUstream stream, CUcontext* out) {
  *out = stream == g_fake->foreign_stream ? nullptr : kPrimary;
  return CUDA_SUCCESS;
}

// Streams are labels here.
CUresult stream_synchronize(CUstream) {
  ++g_fake->synchronisations;
  return g_fake->synchronize_result;
}

CUresult memcpy_dtoh_async(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  if (g_fake->copy_result != CUDA_SUCCESS) return g_fake->copy_result;
  return emulation::driver().memcpy_dtoh(to, from, bytes);
}

CUresult memcpy_htod_async(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  if (g_fake->copy_result != CUDA_SUCCESS) return g_fake->copy_result;
  return emulation::driver().memcpy_htod(to, from, bytes);
}

CUresult memset_d8_async(CUdeviceptr to, unsigned char value, size_t count, CUstream) {
  if (g_fake->memset_result != CUDA_SUCCESS) return g_fake->memset_result;
  ++g_fake->memsets;
  if (!g_fake->touch_memory) return CUDA_SUCCESS;
  return emulation::driver().memset_d8(to, value, count);
}

CUresult memset_d2d8_async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width,
                           size_t height, CUstream) {
  if (g_fake->memset_result != CUDA_SUCCESS) return g_fake->memset_result;
  ++g_fake->memsets;
  if (!g_fake->touch_memory) return CUDA_SUCCESS;
  return emulation::driver().memset_d2d8_async(to, pitch, value, width, height, nullptr);
}

// The driver sets no words of two allocations.
CUresult memset_d32_async(CUdeviceptr to, unsigned value, size_t count, CUstream) {
  if (g_fake->memset_result != CUDA_SUCCESS) return g_fake->memset_result;
  for (const FakeAllocation& a : g_fake->allocations) {
    const auto begin = reinterpret_cast<CUdeviceptr>(a.begin);
    if (to >= begin && to < begin + a.bytes && to + count * 4 > begin + a.bytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  ++g_fake->memsets;
  if (!g_fake->touch_memory) return CUDA_SUCCESS;
  return emulation::driver().memset_d32_async(to, value, count, nullptr);
}

}  // namespace

FakeCuda::FakeCuda() {
  EXPECT_EQ(g_fake, nullptr) << "one fake at a time";
  g_fake = this;
  table_ = emulation::driver();
  launches.reserve(256);  // launching must not allocate: a test counts allocations
  table_.init = init;
  table_.driver_get_version = driver_get_version;
  table_.get_error_name = get_error_name;
  table_.get_error_string = get_error_string;
  table_.device_get_count = device_get_count;
  table_.device_get = device_get;
  table_.device_get_name = device_get_name;
  table_.device_get_uuid = device_get_uuid;
  table_.device_get_attribute = device_get_attribute;
  table_.device_get_pci_bus_id = device_get_pci_bus_id;
  table_.device_total_mem = device_total_mem;
  table_.device_primary_ctx_retain = primary_retain;
  table_.device_primary_ctx_release = primary_release;
  table_.ctx_get_current = ctx_get_current;
  table_.ctx_set_current = ctx_set_current;
  table_.module_load_data = module_load_data;
  table_.module_unload = module_unload;
  table_.func_get_attribute = func_get_attribute;
  table_.occupancy_max_active_clusters = occupancy;
  table_.tensor_map_encode_tiled = encode;
  table_.launch_kernel_ex = launch_kernel_ex;
  table_.memcpy_htod_async = memcpy_htod_async;
  table_.stream_synchronize = stream_synchronize;
  table_.stream_get_ctx = stream_get_ctx;
  table_.pointer_get_attributes = pointer_get_attributes;
  table_.memcpy_dtoh_async = memcpy_dtoh_async;
  table_.memset_d8_async = memset_d8_async;
  table_.memset_d32_async = memset_d32_async;
  table_.memset_d2d8_async = memset_d2d8_async;
  set_driver_for_testing(&table_);
}

FakeCuda::~FakeCuda() {
  set_driver_for_testing(nullptr);
  g_fake = nullptr;
  if (!directory_.empty()) {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
}

std::shared_ptr<Context> FakeCuda::context(const ContextOptions& options) {
  if (directory_.empty()) {
    directory_ = make_temp_directory(std::filesystem::temp_directory_path(), "f8-runtime-").value();
  }
  ContextOptions with_cache = options;
  with_cache.cache_dir = directory_;
  with_cache.builtin_table = false;  // tests set the table that they ask
  with_cache.cooperative_launch &= cooperative;
  auto context = Context::create(0, with_cache);
  EXPECT_TRUE(context) << context.error().message;
  (*context)->state().cache = codegen::CubinCache::open(directory_, compiler()).value();
  return *context;
}

codegen::CubinCache::Compiler FakeCuda::compiler() {
  return [](const codegen::KernelSource& source) -> Result<codegen::Cubin> {
    codegen::Cubin cubin = emulation::cubin(F8_TRY(codegen::parse_kernel_spec(source.key)));
    cubin.entry = source.entry;
    cubin.registers = 168;
    return cubin;
  };
}

FakeCuda& fake() {
  return *g_fake;
}

ScratchDirectory::ScratchDirectory()
    : path_(make_temp_directory(std::filesystem::temp_directory_path(), "f8-scratch-").value()) {}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace f8::runtime::testing
