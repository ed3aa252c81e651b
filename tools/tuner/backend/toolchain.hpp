// The software that a measurement was made with: every version that can change the machine code or
// a library's choice. No GPU is needed; a missing part reads "none".
#pragma once

#include <string>

#include "base/error.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuner {

// `driver` is NVML's text, "580.82.07"; where it is empty, the row says which CUDA version the
// driver knows.
[[nodiscard]] tuning_db::Toolchain current_toolchain(std::string driver, int driver_cuda_version,
                                                     std::string tool_version);
[[nodiscard]] std::string cuda_version_text(int version);  // 13000: "13.0"
[[nodiscard]] Result<std::string> nccl_version();
[[nodiscard]] Result<std::string> cudnn_version();

// The revision of the sources that this was built from (cmake/git_revision.cmake), 12 digits or
// "unknown", and whether the sources differed from it.
extern const char* const kGitSha;
extern const bool kGitDirty;

}  // namespace f8::tuner
