#include "tests/unit/runtime/fake_cuda.hpp"

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/file.hpp"
#include "tests/unit/runtime/emulate.hpp"

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
  auto module = std::make_unique<FakeCuda::Module>();
  module->key = static_cast<const char*>(image);
  const auto spec = codegen::parse_kernel_spec(module->key);
  if (!spec) return CUDA_ERROR_INVALID_IMAGE;
  module->spec = *spec;
  *out = reinterpret_cast<CUmodule>(module.get());
  g_fake->modules.push_back(std::move(module));
  ++g_fake->modules_loaded;
  return CUDA_SUCCESS;
}

CUresult module_unload(CUmodule) {
  ++g_fake->modules_unloaded;
  return CUDA_SUCCESS;
}

CUresult module_get_function(CUfunction* out, CUmodule module, const char*) {
  *out = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}

CUresult func_get_attribute(int* out, CUfunction_attribute, CUfunction) {
  *out = 20 << 10;  // static shared memory
  return CUDA_SUCCESS;
}

CUresult func_set_attribute(CUfunction function, CUfunction_attribute which, int value) {
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    reinterpret_cast<FakeCuda::Module*>(function)->max_dynamic_smem = value;
  }
  return CUDA_SUCCESS;
}

CUresult occupancy(int* out, CUfunction, const CUlaunchConfig*) {
  *out = g_fake->active_clusters;
  return CUDA_SUCCESS;
}

CUresult encode(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  if (g_fake->encode_result != CUDA_SUCCESS) return g_fake->encode_result;
  if (rank != 2 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool f16 = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const unsigned bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8             ? 1
                         : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || f16 ? 2
                                                                           : 4;
  const FakeTensorMap map{base, extents[0], extents[1], strides[0], box[0], box[1], bytes, f16};
  static_assert(sizeof map <= sizeof *out);
  std::memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

CUresult launch_kernel_ex(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void**) {
  if (g_fake->launch_result != CUDA_SUCCESS) return g_fake->launch_result;
  auto& module = *reinterpret_cast<FakeCuda::Module*>(function);
  FakeLaunch launch{.kernel = module.key,
                    .grid = config->gridDimX,
                    .threads = config->blockDimX,
                    .smem_bytes = config->sharedMemBytes,
                    .stream = config->hStream};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      launch.cluster = attribute.value.clusterDim.x;
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      launch.cooperative = attribute.value.cooperative != 0;
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      launch.programmatic = attribute.value.programmaticStreamSerializationAllowed != 0;
    }
  }
  auto& faults = g_fake->faults;
  if (config->gridDimX == 0 || config->gridDimX % launch.cluster != 0) {
    faults.push_back("grid is no multiple of the cluster");
  }
  if (static_cast<int>(launch.smem_bytes) > module.max_dynamic_smem) {
    faults.push_back("more dynamic shared memory than the function allows");
  }
  if (g_fake->current != kPrimary) faults.push_back("the primary context is not current");
  if (std::holds_alternative<codegen::GemmSpec>(module.spec)) {
    launch.gemm = *static_cast<kernels::GemmArgs*>(parameters[1]);
  }
  if (g_fake->launches.size() < g_fake->launches.capacity()) g_fake->launches.push_back(launch);
  if (!g_fake->emulate) return CUDA_SUCCESS;
  if (const auto* amax = std::get_if<codegen::AmaxSpec>(&module.spec)) {
    if (amax->list) {
      emulate_amax(*amax, *static_cast<kernels::AmaxListArgs*>(parameters[0]), launch.grid, faults);
    } else {
      emulate_amax(*amax, *static_cast<kernels::AmaxArgs*>(parameters[0]), launch.grid, faults);
    }
  } else if (const auto* cast = std::get_if<codegen::CastSpec>(&module.spec)) {
    if (cast->one_launch != launch.cooperative) faults.push_back("cooperative or not, it must be");
    if (cast->one_launch) {
      emulate_quantize(*cast, *static_cast<kernels::QuantizeArgs*>(parameters[0]), launch.grid,
                       g_fake->sm_count, faults);
    } else if (cast->list) {
      emulate_cast(*cast, *static_cast<kernels::CastListArgs*>(parameters[0]), launch.grid, faults);
    } else {
      emulate_cast(*cast, *static_cast<kernels::CastArgs*>(parameters[0]), launch.grid, faults);
    }
  } else if (std::holds_alternative<codegen::ScaleUpdateSpec>(module.spec)) {
    emulate_scale_update(*static_cast<kernels::ScaleUpdateArgs*>(parameters[0]), launch.grid,
                         faults);
  } else {
    const auto& spec = std::get<codegen::GemmSpec>(module.spec);
    if (reinterpret_cast<uintptr_t>(parameters[0]) % 64 != 0) {
      faults.push_back("the tensor maps are not aligned to 64 bytes");
    }
    const auto* encoded = static_cast<const CUtensorMap*>(parameters[0]);
    const auto& args = *static_cast<kernels::GemmArgs*>(parameters[1]);
    for (int i = 0; i < spec.problems; ++i) {
      FakeTensorMap maps[3];
      for (int j = 0; j < 3; ++j) std::memcpy(&maps[j], &encoded[3 * i + j], sizeof maps[j]);
      emulate_gemm(spec, maps[0], maps[1], maps[2], args.problems[i], faults);
    }
  }
  return CUDA_SUCCESS;
}

CUresult pointer_get_attribute(void* out, CUpointer_attribute which, CUdeviceptr pointer) {
  for (const FakeAllocation& a : g_fake->allocations) {
    const auto begin = reinterpret_cast<CUdeviceptr>(a.begin);
    if (pointer < begin || pointer >= begin + a.bytes) continue;
    const auto give = [&](auto value) { std::memcpy(out, &value, sizeof value); };
    switch (which) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        give(a.type);
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        give(a.managed ? 1U : 0U);
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        give(a.device);
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        give(begin);
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        give(a.bytes);
        return CUDA_SUCCESS;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult stream_get_ctx(CUstream stream, CUcontext* out) {
  *out = stream == g_fake->foreign_stream ? nullptr : kPrimary;
  return CUDA_SUCCESS;
}

CUresult stream_synchronize(CUstream) {
  ++g_fake->synchronisations;
  return g_fake->synchronize_result;
}

CUresult memcpy_dtoh_async(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  if (g_fake->copy_result != CUDA_SUCCESS) return g_fake->copy_result;
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return CUDA_SUCCESS;
}

CUresult memcpy_htod_async(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  if (g_fake->copy_result != CUDA_SUCCESS) return g_fake->copy_result;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return CUDA_SUCCESS;
}

CUresult memset_d8_async(CUdeviceptr to, unsigned char value, size_t count, CUstream) {
  if (g_fake->memset_result != CUDA_SUCCESS) return g_fake->memset_result;
  ++g_fake->memsets;
  if (!g_fake->emulate) return CUDA_SUCCESS;
  std::memset(reinterpret_cast<void*>(to), value, count);
  return CUDA_SUCCESS;
}

CUresult memset_d2d8_async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width,
                           size_t height, CUstream) {
  if (g_fake->memset_result != CUDA_SUCCESS) return g_fake->memset_result;
  ++g_fake->memsets;
  if (!g_fake->emulate) return CUDA_SUCCESS;
  for (size_t row = 0; row < height; ++row) {
    std::memset(reinterpret_cast<uint8_t*>(to) + row * pitch, value, width);
  }
  return CUDA_SUCCESS;
}

CUresult memset_d32_async(CUdeviceptr to, unsigned value, size_t count, CUstream) {
  if (g_fake->memset_result != CUDA_SUCCESS) return g_fake->memset_result;
  ++g_fake->memsets;
  if (!g_fake->emulate) return CUDA_SUCCESS;
  std::fill_n(reinterpret_cast<uint32_t*>(to), count, value);
  return CUDA_SUCCESS;
}

}  // namespace

FakeCuda::FakeCuda() {
  EXPECT_EQ(g_fake, nullptr) << "one fake at a time";
  g_fake = this;
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
  table_.module_get_function = module_get_function;
  table_.func_get_attribute = func_get_attribute;
  table_.func_set_attribute = func_set_attribute;
  table_.occupancy_max_active_clusters = occupancy;
  table_.tensor_map_encode_tiled = encode;
  table_.launch_kernel_ex = launch_kernel_ex;
  table_.memcpy_htod_async = memcpy_htod_async;
  table_.memcpy_dtoh_async = memcpy_dtoh_async;
  table_.stream_synchronize = stream_synchronize;
  table_.stream_get_ctx = stream_get_ctx;
  table_.pointer_get_attribute = pointer_get_attribute;
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
  with_cache.cooperative_launch &= cooperative;
  auto context = Context::create(0, with_cache);
  EXPECT_TRUE(context) << context.error().message;
  (*context)->state().cache = codegen::CubinCache::open(directory_, compiler()).value();
  return *context;
}

codegen::CubinCache::Compiler FakeCuda::compiler() {
  return [](const codegen::KernelSource& source) -> Result<codegen::Cubin> {
    codegen::Cubin cubin;
    cubin.key = source.key;
    cubin.entry = source.entry;
    cubin.image.resize(source.key.size() + 1);
    std::memcpy(cubin.image.data(), source.key.c_str(), cubin.image.size());
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
