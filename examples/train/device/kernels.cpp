#include "device/kernels.hpp"

#include <cuda.h>
#include <nvrtc.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/dynamic_library.hpp"

namespace train {
namespace {

constexpr const char* kSource =
    "#include \"text.cuh\"\n"
    "#include \"norm.cuh\"\n"
    "#include \"gelu.cuh\"\n"
    "#include \"loss.cuh\"\n"
    "#include \"adamw.cuh\"\n";

// The program holds the kernels' files as text, and NVRTC takes them from here by name.
struct KernelText {
  const char* name;
  const char* text;
};
constexpr KernelText kKernelTexts[] = {
#include "kernel_texts.inc"
};

#define TRAIN_NVRTC_FUNCTIONS(X) \
  X(nvrtcVersion)                \
  X(nvrtcGetErrorString)         \
  X(nvrtcCreateProgram)          \
  X(nvrtcDestroyProgram)         \
  X(nvrtcCompileProgram)         \
  X(nvrtcGetProgramLogSize)      \
  X(nvrtcGetProgramLog)          \
  X(nvrtcGetCUBINSize)           \
  X(nvrtcGetCUBIN)

struct Nvrtc {
#define TRAIN_FIELD(function) decltype(&::function) function = nullptr;
  TRAIN_NVRTC_FUNCTIONS(TRAIN_FIELD)
#undef TRAIN_FIELD

  Nvrtc() {
    const DynamicLibrary library(format("libnvrtc.so.%d", CUDA_VERSION / 1000),
                                 "install NVRTC, or add its folder to LD_LIBRARY_PATH");
#define TRAIN_FIND(function) library.find(#function, function);
    TRAIN_NVRTC_FUNCTIONS(TRAIN_FIND)
#undef TRAIN_FIND
    // NVRTC opens its builtins by name without this program's rpath, and takes them where they are
    // open already. Where they are missing, it is NVRTC that says so.
    int major = 0;
    int minor = 0;
    check(nvrtcVersion(&major, &minor), "nvrtcVersion");
    dlopen(format("libnvrtc-builtins.so.%d.%d", major, minor).c_str(), RTLD_NOW);
  }

  void check(nvrtcResult result, const char* call) const {
    if (result != NVRTC_SUCCESS) fail(FLOAT8_COMPILE, "%s: %s", call, nvrtcGetErrorString(result));
  }
};

Cubin compile(int64_t width, int64_t context) {
  static const Nvrtc nvrtc;
  const char* names[std::size(kKernelTexts)];
  const char* texts[std::size(kKernelTexts)];
  std::ranges::transform(kKernelTexts, names, &KernelText::name);
  std::ranges::transform(kKernelTexts, texts, &KernelText::text);
  nvrtcProgram program = nullptr;
  nvrtc.check(nvrtc.nvrtcCreateProgram(&program, kSource, "train.cu", std::size(kKernelTexts),
                                       texts, names),
              "nvrtcCreateProgram");
  const auto destroy = [](nvrtcProgram* p) { nvrtc.nvrtcDestroyProgram(p); };
  const std::unique_ptr<nvrtcProgram, decltype(destroy)> owner(&program, destroy);

  const std::string defines[] = {
      format("-DTRAIN_WIDTH=%ld", width),
      format("-DTRAIN_CONTEXT=%ld", context),
      format("-DTRAIN_THREADS=%d", kThreads),
      format("-DTRAIN_NORM_THREADS=%d", norm_threads(width)),
  };
  // NVRTC has a cache of its own where there is a driver; its answers come without a log.
  std::vector<const char*> options = {"--gpu-architecture=sm_90a", "--std=c++17", "--no-cache",
                                      "--ptxas-options=-v"};
  for (const std::string& define : defines) options.push_back(define.c_str());
  const nvrtcResult result =
      nvrtc.nvrtcCompileProgram(program, static_cast<int>(options.size()), options.data());

  Cubin cubin;
  size_t bytes = 0;
  nvrtc.check(nvrtc.nvrtcGetProgramLogSize(program, &bytes), "nvrtcGetProgramLogSize");
  cubin.log.resize(bytes);
  nvrtc.check(nvrtc.nvrtcGetProgramLog(program, cubin.log.data()), "nvrtcGetProgramLog");
  if (result != NVRTC_SUCCESS) {
    fail(FLOAT8_COMPILE, "the trainer's kernels do not compile (%s): %s",
         nvrtc.nvrtcGetErrorString(result), cubin.log.substr(0, cubin.log.find('\n')).c_str());
  }
  nvrtc.check(nvrtc.nvrtcGetCUBINSize(program, &bytes), "nvrtcGetCUBINSize");
  cubin.image.resize(bytes);
  nvrtc.check(nvrtc.nvrtcGetCUBIN(program, cubin.image.data()), "nvrtcGetCUBIN");
  return cubin;
}

}  // namespace

const Cubin& compiled_kernels(int64_t width, int64_t context) {
  static std::mutex mutex;  // ranks ask for them at the same time
  const std::lock_guard lock(mutex);
  static std::map<std::pair<int64_t, int64_t>, Cubin> cubins;
  const auto found = cubins.find({width, context});
  if (found != cubins.end()) return found->second;
  return cubins.emplace(std::pair(width, context), compile(width, context)).first->second;
}

}  // namespace train
