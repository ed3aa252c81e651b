#include "tools/tuner/backend/toolchain.hpp"

#include "base/dynlib.hpp"
#include "runtime/attention/provider.hpp"
#include "runtime/gemm/gemm.hpp"

namespace f8::tuner {

// NCCL's and cuDNN's: 91900 is "9.19.0".
static std::string version_text(int version) {
  return f8::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::string cuda_version_text(int version) {
  return f8::format("{}.{}", version / 1000, version % 1000 / 10);
}

Result<std::string> nccl_version() {
  const DynamicLibrary library = F8_TRY(
      DynamicLibrary::open("libnccl.so.2", "NCCL 2.4", "install NCCL for distributed training"));
  int (*get_version)(int*) = nullptr;
  F8_TRY(library.resolve("ncclGetVersion", get_version));
  int version = 0;
  if (const int status = get_version(&version); status != 0) {
    return fail(ErrorCode::kEnvironment, "ncclGetVersion: error {}; install NCCL again", status);
  }
  return version_text(version);
}

Result<std::string> cudnn_version() {
  return version_text(F8_TRY(runtime::cudnn_version()));
}

tuning_db::Toolchain current_toolchain(std::string driver, int driver_cuda_version,
                                       std::string tool_version) {
  const ToolchainVersions versions = runtime::toolchain_versions();
  return {.driver =
              driver.empty() ? "CUDA " + cuda_version_text(driver_cuda_version) : std::move(driver),
          .cuda_runtime = cuda_version_text(driver_cuda_version),
          .nvrtc = versions.nvrtc,
          .cublaslt = versions.cublaslt,
          .nccl = nccl_version().value_or("none"),
          .tool_version = std::move(tool_version),
          .git_sha = kGitSha,
          .git_dirty = kGitDirty,
          .codegen_abi = versions.generator};
}

}  // namespace f8::tuner
