// The emulated driver's table: one device model, host memory, modules, launches.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "runtime/device/emulated_driver.hpp"
#include "runtime/emulation/kernels.hpp"
#include "runtime/emulation/reserved_bytes.hpp"
#include "runtime/emulation/stream.hpp"

namespace f8::runtime::emulation {
namespace {

// These are an H100 SXM's, for plans look at them. Clocks and power stay 0: nothing here has any.
constexpr int kSmCount = 132;
constexpr int kL2Bytes = 50 << 20;
constexpr size_t kMemoryBytes = size_t{80} << 30;
constexpr size_t kPoisonedBytes = size_t{256} << 20;
constexpr size_t kAlignment = 256;  // of allocations, as cuMemAlloc's

const CUcontext kPrimary = reinterpret_cast<CUcontext>(uintptr_t{0x656d7500});
thread_local CUcontext g_current = nullptr;

struct Memory {
  std::mutex mutex;
  std::map<CUdeviceptr, size_t> blocks;
  size_t used = 0;
};
Memory& memory() {
  static Memory memory;
  return memory;
}

void* host(CUdeviceptr p) {
  return reinterpret_cast<void*>(p);
}

// --- device
CUresult init(unsigned) {
  return CUDA_SUCCESS;
}
CUresult driver_get_version(int* out) {
  *out = 0;
  return CUDA_SUCCESS;
}
CUresult get_error_name(CUresult error, const char** out) {
  switch (error) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      *out = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case CUDA_ERROR_NOT_SUPPORTED:
      *out = "CUDA_ERROR_NOT_SUPPORTED";
      break;
    case CUDA_ERROR_INVALID_HANDLE:
      *out = "CUDA_ERROR_INVALID_HANDLE";
      break;
    case CUDA_ERROR_INVALID_VALUE:
      *out = "CUDA_ERROR_INVALID_VALUE";
      break;
    default:
      *out = "CUDA error of an emulated device";
  }
  return CUDA_SUCCESS;
}
CUresult get_error_string(CUresult, const char** out) {
  *out = last_refusal();
  return CUDA_SUCCESS;
}
CUresult device_get_count(int* out) {
  *out = kDevices;
  return CUDA_SUCCESS;
}
CUresult device_get(CUdevice* out, int ordinal) {
  if (ordinal < 0 || ordinal >= kDevices)
    return refuse(CUDA_ERROR_INVALID_DEVICE, "no such device");
  *out = ordinal;
  return CUDA_SUCCESS;
}
CUresult device_get_name(char* out, int size, CUdevice) {
  std::snprintf(out, static_cast<size_t>(size), "emulated H100 (host memory)");
  return CUDA_SUCCESS;
}
CUresult device_get_uuid(CUuuid* out, CUdevice) {
  std::memset(out, 0, sizeof *out);
  return CUDA_SUCCESS;
}
CUresult device_get_attribute(int* out, CUdevice_attribute which, CUdevice) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *out = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *out = kSmCount;
      break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      *out = kL2Bytes;
      break;
    default:
      *out = 0;
  }
  return CUDA_SUCCESS;
}
CUresult device_get_pci_bus_id(char*, int, CUdevice) {
  return refuse(CUDA_ERROR_NOT_SUPPORTED, "an emulated device is on no bus");
}
CUresult device_total_mem(size_t* out, CUdevice) {
  *out = kMemoryBytes;
  return CUDA_SUCCESS;
}

// --- contexts: one handle, current by thread
CUresult primary_retain(CUcontext* out, CUdevice) {
  *out = kPrimary;
  return CUDA_SUCCESS;
}
CUresult primary_release(CUdevice) {
  return CUDA_SUCCESS;
}
CUresult ctx_get_current(CUcontext* out) {
  *out = g_current;
  return CUDA_SUCCESS;
}
CUresult ctx_set_current(CUcontext context) {
  g_current = context;
  return CUDA_SUCCESS;
}
CUresult ctx_synchronize() {
  return CUDA_SUCCESS;
}

// --- modules
CUresult module_load_data(CUmodule* out, const void* image) {
  auto module = std::make_unique<Module>();
  module->key = static_cast<const char*>(image);
  auto spec = codegen::parse_kernel_spec(module->key);
  if (!spec) return refuse(CUDA_ERROR_INVALID_IMAGE, std::move(spec.error().message));
  module->spec = std::move(*spec);
  *out = reinterpret_cast<CUmodule>(module.release());
  return CUDA_SUCCESS;
}
CUresult module_unload(CUmodule module) {
  forget_owner(reinterpret_cast<const Module*>(module));
  delete reinterpret_cast<Module*>(module);
  return CUDA_SUCCESS;
}
CUresult module_get_function(CUfunction* out, CUmodule module, const char*) {
  *out = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}
CUresult func_get_attribute(int* out, CUfunction_attribute, CUfunction) {
  *out = 0;  // no registers, no memory of its own
  return CUDA_SUCCESS;
}
CUresult func_set_attribute(CUfunction function, CUfunction_attribute which, int value) {
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    reinterpret_cast<Module*>(function)->max_dynamic_smem = value;
  }
  return CUDA_SUCCESS;
}
CUresult occupancy(int* out, CUfunction, const CUlaunchConfig* config) {
  *out = kSmCount / static_cast<int>(read_launch(*config).cluster);
  return CUDA_SUCCESS;
}

CUresult encode(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const cuuint32_t element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                             : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                                       : 2;
  const CUtensorMapSwizzle of_box =
      box[0] * element == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  if ((rank != 2 && (rank != 3 || box[2] != 1)) || swizzle != of_box ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "a tensor map that no kernel of float8 reads");
  }
  const bool deep = rank == 3;
  const TensorMap map{base,
                      extents[0],
                      extents[1],
                      strides[0],
                      box[0],
                      box[1],
                      type,
                      deep ? extents[2] : 0,
                      deep ? strides[1] : 0};
  static_assert(sizeof map <= sizeof *out);
  std::memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

CUresult execute(const Module& module, const Launch& launch, void* const* parameters) {
  Faults faults;
  run(module, launch, parameters, kSmCount, faults);
  if (faults.empty()) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_INVALID_VALUE, std::move(faults.front()));
}

// A launch's parameters, kept for a graph.
struct alignas(CUtensorMap) Chunk {
  std::byte bytes[alignof(CUtensorMap)];
};
std::vector<Chunk> copy_of(const void* from, size_t bytes) {
  std::vector<Chunk> out((bytes + sizeof(Chunk) - 1) / sizeof(Chunk));
  if (bytes > 0) std::memcpy(out.data(), from, bytes);
  return out;
}

CUresult launch_kernel_ex(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void**) {
  const auto* module = reinterpret_cast<const Module*>(function);
  const Launch launch = read_launch(*config);
  if (g_current != kPrimary) {
    return refuse(CUDA_ERROR_INVALID_CONTEXT, "the device's context is not current");
  }
  Graph* graph = nullptr;
  if (const CUresult result = capture_of(config->hStream, graph); result != CUDA_SUCCESS) {
    return result;
  }
  if (graph == nullptr) return execute(*module, launch, parameters);
  const codegen::ParameterBytes sizes = codegen::parameter_bytes(module->spec);
  graph->operations.emplace_back(
      [module, launch, first = copy_of(parameters[0], sizes.first),
       second = copy_of(sizes.second > 0 ? parameters[1] : nullptr, sizes.second)] {
        void* const kept[] = {const_cast<Chunk*>(first.data()), const_cast<Chunk*>(second.data())};
        return execute(*module, launch, kept);
      });
  return CUDA_SUCCESS;
}

CUresult stream_get_ctx(CUstream stream, CUcontext* out) {
  *out = kPrimary;
  Graph* graph = nullptr;
  return capture_of(stream, graph);
}

// --- memory
CUresult mem_alloc(CUdeviceptr* out, size_t bytes) {
  if (bytes == 0) return refuse(CUDA_ERROR_INVALID_VALUE, "an allocation of 0 bytes");
  const size_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  void* block = whole > kMemoryBytes - m.used ? nullptr : std::aligned_alloc(kAlignment, whole);
  if (block == nullptr) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "out of memory");
  // The bytes are NaN in every format, so that a read of unwritten memory shows. Large blocks stay
  // untouched pages.
  if (whole <= kPoisonedBytes) std::memset(block, 0xff, whole);
  *out = reinterpret_cast<CUdeviceptr>(block);
  m.blocks.emplace(*out, whole);
  m.used += whole;
  return CUDA_SUCCESS;
}
CUresult mem_free(CUdeviceptr p) {
  if (p == 0) return CUDA_SUCCESS;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto found = m.blocks.find(p);
  if (found == m.blocks.end()) return refuse(CUDA_ERROR_INVALID_VALUE, "no such allocation");
  m.used -= found->second;
  forget_memory(host(p), found->second);
  m.blocks.erase(found);
  std::free(host(p));
  return CUDA_SUCCESS;
}
CUresult mem_get_info(size_t* free_bytes, size_t* total) {
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  *free_bytes = kMemoryBytes - m.used;
  *total = kMemoryBytes;
  return CUDA_SUCCESS;
}
// The device's own allocations have bounds; any other memory of the host serves too, and nothing is
// known of it. Devices share all of it.
CUresult pointer_get_attributes(unsigned count, CUpointer_attribute* which, void** out,
                                CUdeviceptr pointer) {
  CUdeviceptr begin = pointer;
  size_t bytes = SIZE_MAX - pointer;
  Memory& m = memory();
  const std::lock_guard lock(m.mutex);
  const auto after = m.blocks.upper_bound(pointer);
  if (after != m.blocks.begin()) {
    const auto& block = *std::prev(after);
    if (pointer < block.first + block.second) {
      begin = block.first;
      bytes = block.second;
    }
  }
  for (unsigned i = 0; i < count; ++i) {
    const auto give = [to = out[i]](auto value) { std::memcpy(to, &value, sizeof value); };
    switch (which[i]) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        give(CU_MEMORYTYPE_DEVICE);
        break;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        give(1U);
        break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        give(-1);  // managed: no one's
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        give(begin);
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        give(bytes);
        break;
      default:
        return refuse(CUDA_ERROR_NOT_SUPPORTED, "an emulated device does not tell this");
    }
  }
  return CUDA_SUCCESS;
}
CUresult copy(void* to, const void* from, size_t bytes, CUstream stream) {
  return enqueue(stream, [=] {
    if (bytes > 0) std::memmove(to, from, bytes);
    return CUDA_SUCCESS;
  });
}
CUresult memcpy_htod(CUdeviceptr to, const void* from, size_t bytes) {
  return copy(host(to), from, bytes, nullptr);
}
CUresult memcpy_dtoh(void* to, CUdeviceptr from, size_t bytes) {
  return copy(to, host(from), bytes, nullptr);
}
CUresult memcpy_htod_async(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return copy(host(to), from, bytes, stream);
}
CUresult memcpy_dtoh_async(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(to, host(from), bytes, stream);
}
CUresult memcpy_dtod_async(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(host(to), host(from), bytes, stream);
}
CUresult memcpy_2d_async(const CUDA_MEMCPY2D* copy, CUstream stream) {
  return enqueue(stream, [c = *copy] {
    for (size_t line = 0; line < c.Height; ++line) {
      std::memmove(host(c.dstDevice + line * c.dstPitch), host(c.srcDevice + line * c.srcPitch),
                   c.WidthInBytes);
    }
    return CUDA_SUCCESS;
  });
}
CUresult memset_d8_async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return enqueue(stream, [=] {
    if (count > 0) std::memset(host(to), value, count);
    return CUDA_SUCCESS;
  });
}
CUresult memset_d2d8_async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width,
                           size_t height, CUstream stream) {
  return enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row) std::memset(host(to + row * pitch), value, width);
    return CUDA_SUCCESS;
  });
}
CUresult memset_d8(CUdeviceptr to, unsigned char value, size_t count) {
  return memset_d8_async(to, value, count, nullptr);
}
CUresult memset_d32_async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return enqueue(stream, [=] {
    std::fill_n(static_cast<uint32_t*>(host(to)), count, value);
    return CUDA_SUCCESS;
  });
}

Driver make_table() {
  Driver table;
  table.init = init;
  table.driver_get_version = driver_get_version;
  table.get_error_name = get_error_name;
  table.get_error_string = get_error_string;
  table.device_get_count = device_get_count;
  table.device_get = device_get;
  table.device_get_name = device_get_name;
  table.device_get_uuid = device_get_uuid;
  table.device_get_attribute = device_get_attribute;
  table.device_get_pci_bus_id = device_get_pci_bus_id;
  table.device_total_mem = device_total_mem;
  table.device_primary_ctx_retain = primary_retain;
  table.device_primary_ctx_release = primary_release;
  table.ctx_get_current = ctx_get_current;
  table.ctx_set_current = ctx_set_current;
  table.ctx_synchronize = ctx_synchronize;
  table.module_load_data = module_load_data;
  table.module_unload = module_unload;
  table.module_get_function = module_get_function;
  table.func_get_attribute = func_get_attribute;
  table.func_set_attribute = func_set_attribute;
  table.occupancy_max_active_clusters = occupancy;
  table.tensor_map_encode_tiled = encode;
  table.launch_kernel_ex = launch_kernel_ex;
  table.mem_alloc = mem_alloc;
  table.mem_free = mem_free;
  table.mem_get_info = mem_get_info;
  table.pointer_get_attributes = pointer_get_attributes;
  table.stream_get_ctx = stream_get_ctx;
  table.memcpy_htod = memcpy_htod;
  table.memcpy_dtoh = memcpy_dtoh;
  table.memcpy_htod_async = memcpy_htod_async;
  table.memcpy_dtoh_async = memcpy_dtoh_async;
  table.memcpy_dtod_async = memcpy_dtod_async;
  table.memcpy_2d_async = memcpy_2d_async;
  table.memset_d8 = memset_d8;
  table.memset_d8_async = memset_d8_async;
  table.memset_d32_async = memset_d32_async;
  table.memset_d2d8_async = memset_d2d8_async;
  fill_stream_functions(table);
  return table;
}

}  // namespace

const Driver& driver() {
  static const Driver table = make_table();
  return table;
}

codegen::Cubin cubin(const codegen::KernelSpec& spec) {
  codegen::Cubin cubin;
  cubin.key = codegen::key(spec);
  cubin.entry = "emulated";
  cubin.image.resize(cubin.key.size() + 1);
  std::memcpy(cubin.image.data(), cubin.key.c_str(), cubin.image.size());
  return cubin;
}

}  // namespace f8::runtime::emulation
