#include "kernel_source.hpp"

#include <algorithm>
#include <string_view>

namespace f8::train {
namespace embedded {
extern const std::string_view args_cuh, common_cuh, text_cuh, norm_cuh, gelu_cuh, loss_cuh,
    adamw_cuh;
}
namespace {

// NVRTC sees no file, so the lines that name one are left out; the order of the parts is theirs.
void append(std::string_view text, std::string& out) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1);
    const std::string_view line = text.substr(0, end + 1);
    text.remove_prefix(end + 1);
    if (!line.starts_with("#include \"") && !line.starts_with("#pragma once")) out += line;
  }
}

}  // namespace

codegen::KernelSource kernel_source(int64_t width, int64_t context) {
  codegen::KernelSource kernel;
  kernel.key = fmt::format("train_w{}c{}", width, context);
  kernel.entry = kKernelNames.front();
  kernel.source = fmt::format(
      "namespace f8::train {{\n"
      "inline constexpr int kWidth = {};\n"
      "inline constexpr int kContext = {};\n"
      "inline constexpr int kThreads = {};\n"
      "inline constexpr int kNormThreads = {};\n"
      "}}\n",
      width, context, kThreads, norm_threads(width));
  for (const std::string_view part :
       {embedded::args_cuh, embedded::common_cuh, embedded::text_cuh, embedded::norm_cuh,
        embedded::gelu_cuh, embedded::loss_cuh, embedded::adamw_cuh}) {
    append(part, kernel.source);
  }
  kernel.options = {"--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v", "--no-cache"};
  return kernel;
}

}  // namespace f8::train
