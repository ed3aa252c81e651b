// Training on a Hopper GPU: the kernels through the generator's compiler and cache, a step as a
// CUDA graph.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "backend.hpp"
#include "base/environment.hpp"
#include "codegen/cubin_cache.hpp"
#include "kernel_source.hpp"
#include "runtime/device/driver.hpp"

namespace f8::train {
namespace {

using runtime::Driver;

static_assert(std::variant_size_v<KernelCall> == kKernelNames.size());

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Blocks of a launch. Kernels that walk through their data take as many as fill the device well.
struct Blocks {
  int64_t most;  // for those

  int64_t walk(int64_t threads) const {
    return std::clamp<int64_t>(ceil_div(threads, kThreads), 1, most);
  }
  int64_t operator()(const SampleArgs& a) const { return ceil_div(a.tokens, kThreads); }
  int64_t operator()(const EmbedArgs& a) const { return walk(int64_t{a.tokens} * a.width / 8); }
  int64_t operator()(const EmbedGradArgs& a) const { return int64_t{a.context} * kBytes; }
  int64_t operator()(const NormArgs& a) const { return std::clamp<int64_t>(a.tokens / 4, 1, most); }
  int64_t operator()(const NormGradArgs& a) const { return a.blocks; }
  int64_t operator()(const SumRowsArgs& a) const { return ceil_div(a.width, 32); }
  int64_t operator()(const GeluArgs& a) const { return walk(a.count / 8); }
  int64_t operator()(const GeluGradArgs& a) const { return walk(a.count / 8); }
  int64_t operator()(const LossArgs& a) const { return ceil_div(int64_t{a.tokens} * 32, kThreads); }
  int64_t operator()(const SquareSumArgs& a) const { return a.blocks; }
  int64_t operator()(const AdamArgs& a) const { return walk(a.count / 4); }
  int64_t operator()(const FinishArgs&) const { return 1; }
};

class GpuBackend final : public Backend {
 public:
  GpuBackend(const Driver& driver, float8::Context context, int64_t width)
      : driver_(driver), context_(std::move(context)), width_(width) {}

  Status start(int device, const codegen::Cubin& kernels) {
    CUcontext primary = nullptr;
    F8_TRY(check(driver_.device_get(&device_, device), "cuDeviceGet"));
    F8_TRY(check(driver_.device_primary_ctx_retain(&primary, device_), "cuDevicePrimaryCtxRetain"));
    retained_ = true;
    F8_TRY(check(driver_.ctx_set_current(primary), "cuCtxSetCurrent"));
    F8_TRY(check(
        driver_.device_get_attribute(&sm_count_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_),
        "cuDeviceGetAttribute"));
    F8_TRY(check(driver_.module_load_data(&module_, kernels.image.data()), "cuModuleLoadData"));
    for (size_t i = 0; i < kKernelNames.size(); ++i) {
      F8_TRY(check(driver_.module_get_function(&functions_[i], module_, kKernelNames[i]),
                   kKernelNames[i]));
    }
    F8_TRY(check(driver_.stream_create(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
    for (CUevent& event : events_) {
      F8_TRY(check(driver_.event_create(&event, CU_EVENT_DEFAULT), "cuEventCreate"));
    }
    return {};
  }

  // After a lost context nothing is left to free and every call fails, so no result is looked at.
  ~GpuBackend() override {
    if (stream_ != nullptr) driver_.stream_synchronize(stream_);
    if (graph_ != nullptr) driver_.graph_exec_destroy(graph_);
    for (CUevent event : events_) {
      if (event != nullptr) driver_.event_destroy(event);
    }
    for (CUdeviceptr memory : memory_) driver_.mem_free(memory);
    if (stream_ != nullptr) driver_.stream_destroy(stream_);
    if (module_ != nullptr) driver_.module_unload(module_);
    if (retained_) driver_.device_primary_ctx_release(device_);
  }

  Result<void*> allocate(size_t bytes) override {
    CUdeviceptr memory = 0;
    F8_TRY(check(driver_.mem_alloc(&memory, std::max<size_t>(bytes, 1)), "cuMemAlloc"));
    memory_.push_back(memory);
    F8_TRY(check(driver_.memset_d8_async(memory, 0, bytes, stream_), "cuMemsetD8Async"));
    return reinterpret_cast<void*>(memory);
  }
  Status upload(void* to, const void* from, size_t bytes) override {
    F8_TRY(check(driver_.memcpy_htod_async(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream_),
                 "cuMemcpyHtoDAsync"));
    return synchronize();
  }
  Status download(void* to, const void* from, size_t bytes) override {
    F8_TRY(check(driver_.memcpy_dtoh_async(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream_),
                 "cuMemcpyDtoHAsync"));
    return synchronize();
  }

  Status launch(const KernelCall& call) override {
    const bool norm =
        std::holds_alternative<NormArgs>(call) || std::holds_alternative<NormGradArgs>(call);
    CUlaunchConfig config{};
    config.gridDimX = static_cast<unsigned>(std::visit(Blocks{int64_t{8} * sm_count_}, call));
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = static_cast<unsigned>(norm ? norm_threads(width_) : kThreads);
    config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream_;
    void* parameters[] = {std::visit(
        [](const auto& args) { return const_cast<void*>(static_cast<const void*>(&args)); }, call)};
    return check(driver_.launch_kernel_ex(&config, functions_[call.index()], parameters, nullptr),
                 kKernelNames[call.index()]);
  }
  int share_count() const override { return 2 * sm_count_; }
  float8::Context& context() override { return context_; }
  float8_stream stream() override { return stream_; }

  Status record(std::function<Status()> step) override {
    if (graph_ != nullptr) driver_.graph_exec_destroy(std::exchange(graph_, nullptr));
    F8_TRY(check(driver_.stream_begin_capture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                 "cuStreamBeginCapture"));
    const Status recorded = step();
    CUgraph graph = nullptr;
    const Status ended = check(driver_.stream_end_capture(stream_, &graph), "cuStreamEndCapture");
    Status status = recorded ? ended : recorded;
    if (status) {
      status = check(driver_.graph_instantiate(&graph_, graph, 0), "cuGraphInstantiate");
    }
    if (graph != nullptr) driver_.graph_destroy(graph);
    return status;
  }
  Result<double> repeat(int64_t times) override {
    F8_TRY(check(driver_.event_record(events_[0], stream_), "cuEventRecord"));
    for (int64_t i = 0; i < times; ++i) {
      F8_TRY(check(driver_.graph_launch(graph_, stream_), "cuGraphLaunch"));
    }
    F8_TRY(check(driver_.event_record(events_[1], stream_), "cuEventRecord"));
    F8_TRY(synchronize());
    float ms = 0;
    F8_TRY(check(driver_.event_elapsed_time(&ms, events_[0], events_[1]), "cuEventElapsedTime"));
    return ms;
  }

 private:
  Status check(CUresult result, const char* call) const { return driver_.check(result, call); }
  Status synchronize() { return check(driver_.stream_synchronize(stream_), "cuStreamSynchronize"); }

  const Driver& driver_;
  float8::Context context_;
  int64_t width_;
  CUdevice device_ = 0;
  bool retained_ = false;
  int sm_count_ = 0;
  CUmodule module_ = nullptr;
  std::array<CUfunction, kKernelNames.size()> functions_{};
  CUstream stream_ = nullptr;
  std::array<CUevent, 2> events_{};
  CUgraphExec graph_ = nullptr;
  std::vector<CUdeviceptr> memory_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_gpu_backend(int device, int64_t width,
                                                  int64_t context_bytes) {
  auto context = F8_TRY(to_result(float8::Context::create(device)));
  codegen::CubinCache cache = F8_TRY(codegen::CubinCache::open(environment().cache_dir));
  const auto kernels = F8_TRY(cache.get(kernel_source(width, context_bytes)));
  auto backend =
      std::make_unique<GpuBackend>(*F8_TRY(runtime::driver()), std::move(context), width);
  F8_TRY(backend->start(device, *kernels));
  return backend;
}

}  // namespace f8::train
