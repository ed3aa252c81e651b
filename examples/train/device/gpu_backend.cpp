// Training on a Hopper GPU: kernels that NVRTC compiles, and a step that is a CUDA graph.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "device/backend.hpp"
#include "device/cuda_driver.hpp"
#include "device/kernels.hpp"
#include "error.hpp"

namespace train {
namespace {

static_assert(std::variant_size_v<KernelCall> == kKernelNames.size());

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Gives the blocks of a launch. Kernels that walk through their data take as many as fill the
// device well.
struct Blocks {
  int64_t most;  // of a kernel that walks

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
  int64_t operator()(const AddArgs& a) const { return walk(a.count / 4); }
};

class GpuBackend final : public Backend {
 public:
  GpuBackend(int device, int64_t width, int64_t context)
      : context_(float8::Context::create(device).value()), width_(width) {
    const Cubin& kernels = compiled_kernels(width, context);
    check(cuda_.cuDeviceGet(&device_, device), "cuDeviceGet");
    check(cuda_.cuDevicePrimaryCtxRetain(&primary_, device_), "cuDevicePrimaryCtxRetain");
    attach();
    check(cuda_.cuDeviceGetAttribute(&sm_count_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device_),
          "cuDeviceGetAttribute");
    check(cuda_.cuModuleLoadData(&module_, kernels.image.data()), "cuModuleLoadData");
    for (size_t i = 0; i < kKernelNames.size(); ++i) {
      check(cuda_.cuModuleGetFunction(&functions_[i], module_, kKernelNames[i]), kKernelNames[i]);
    }
    check(cuda_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    for (CUevent& event : events_) {
      check(cuda_.cuEventCreate(&event, CU_EVENT_DEFAULT), "cuEventCreate");
    }
  }

  // After a lost CUDA context every call fails and nothing is left to free: no result matters.
  ~GpuBackend() override {
    cuda_.cuStreamSynchronize(stream_);
    drop_graph();
    for (CUevent event : events_) cuda_.cuEventDestroy(event);
    for (CUdeviceptr memory : memory_) cuda_.cuMemFree(memory);
    cuda_.cuStreamDestroy(stream_);
    cuda_.cuModuleUnload(module_);
    cuda_.cuDevicePrimaryCtxRelease(device_);
  }

  void* allocate(size_t bytes) override {
    CUdeviceptr memory = 0;
    check(cuda_.cuMemAlloc(&memory, std::max<size_t>(bytes, 1)), "cuMemAlloc");
    memory_.push_back(memory);
    check(cuda_.cuMemsetD8Async(memory, 0, bytes, stream_), "cuMemsetD8Async");
    return reinterpret_cast<void*>(memory);
  }
  void upload(void* to, const void* from, size_t bytes) override {
    check(cuda_.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream_),
          "cuMemcpyHtoDAsync");
    synchronize();
  }
  void download(void* to, const void* from, size_t bytes) override {
    check(cuda_.cuMemcpyDtoHAsync(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream_),
          "cuMemcpyDtoHAsync");
    synchronize();
  }

  void launch(const KernelCall& call) override {
    const bool norm =
        std::holds_alternative<NormArgs>(call) || std::holds_alternative<NormGradArgs>(call);
    const int64_t blocks = std::visit(Blocks{int64_t{8} * sm_count_}, call);
    const int threads = norm ? norm_threads(width_) : kThreads;
    void* parameters[] = {std::visit(
        [](const auto& args) { return const_cast<void*>(static_cast<const void*>(&args)); }, call)};
    check(
        cuda_.cuLaunchKernel(functions_[call.index()], static_cast<unsigned>(blocks), 1, 1,
                             static_cast<unsigned>(threads), 1, 1, 0, stream_, parameters, nullptr),
        kKernelNames[call.index()]);
  }
  int share_count() const override { return 2 * sm_count_; }
  float8::Context& context() override { return context_; }
  float8_stream stream() override { return stream_; }

  void attach() final { check(cuda_.cuCtxSetCurrent(primary_), "cuCtxSetCurrent"); }
  // NCCL destroys no communicator while there is a graph that captured its collectives.
  void set_communicator(const float8::Communicator* communicator, int timeout_ms) override {
    cuda_.cuCtxSetCurrent(primary_);
    drop_graph();
    communicator_ = communicator;
    step_timeout_ms_ = timeout_ms > 0 ? timeout_ms : kStepTimeoutMs;
  }
  void record(const std::function<void()>& step) override {
    drop_graph();
    check(cuda_.cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
          "cuStreamBeginCapture");
    CUgraph graph = nullptr;
    try {
      step();
    } catch (...) {
      cuda_.cuStreamEndCapture(stream_, &graph);
      if (graph != nullptr) cuda_.cuGraphDestroy(graph);
      throw;
    }
    check(cuda_.cuStreamEndCapture(stream_, &graph), "cuStreamEndCapture");
    const CUresult result = cuda_.cuGraphInstantiateWithFlags(&graph_, graph, 0);
    cuda_.cuGraphDestroy(graph);
    check(result, "cuGraphInstantiateWithFlags");
  }
  double repeat(int64_t times) override {
    check(cuda_.cuEventRecord(events_[0], stream_), "cuEventRecord");
    for (int64_t i = 0; i < times; ++i) {
      check(cuda_.cuGraphLaunch(graph_, stream_), "cuGraphLaunch");
    }
    check(cuda_.cuEventRecord(events_[1], stream_), "cuEventRecord");
    synchronize(times);
    float ms = 0;
    check(cuda_.cuEventElapsedTime(&ms, events_[0], events_[1]), "cuEventElapsedTime");
    return double{ms};
  }

 private:
  void drop_graph() {
    if (graph_ != nullptr) cuda_.cuGraphExecDestroy(std::exchange(graph_, nullptr));
  }
  void check(CUresult result, const char* call) const { cuda_.check(result, call); }
  void synchronize(int64_t steps = 1) {
    if (communicator_ != nullptr) {
      const auto most = static_cast<int>(std::min<int64_t>(steps * step_timeout_ms_, 1 << 30));
      train::check(communicator_->wait(context_, "a step of training", stream_, most));
    }
    check(cuda_.cuStreamSynchronize(stream_), "cuStreamSynchronize");
  }

  static constexpr int64_t kStepTimeoutMs = 60'000;  // after which a rank counts as gone
  float8::Context context_;  // comes first, for it says clearly that there is no GPU
  Driver cuda_;
  int64_t width_;
  CUdevice device_ = 0;
  CUcontext primary_ = nullptr;
  int sm_count_ = 0;
  CUmodule module_ = nullptr;
  std::array<CUfunction, kKernelNames.size()> functions_{};
  CUstream stream_ = nullptr;
  std::array<CUevent, 2> events_{};
  CUgraphExec graph_ = nullptr;
  const float8::Communicator* communicator_ = nullptr;
  int64_t step_timeout_ms_ = kStepTimeoutMs;
  std::vector<CUdeviceptr> memory_;
};

}  // namespace

std::unique_ptr<Backend> make_gpu_backend(int device, int64_t width, int64_t context) {
  return std::make_unique<GpuBackend>(device, width, context);
}

}  // namespace train
