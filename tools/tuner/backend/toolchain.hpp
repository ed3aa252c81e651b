// What software a measurement was made with: every version that can change the machine code or a
// library's choice. Needs no GPU; what is missing reads "none".
#pragma once

#include <string>

#include "base/error.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuner {

// `driver` as NVML says it, "580.82.07"; where it does not, the CUDA version that the driver knows.
[[nodiscard]] tuning_db::Toolchain current_toolchain(std::string driver, int driver_cuda_version,
                                                     std::string tool_version);
[[nodiscard]] std::string cuda_version_text(int version);  // 13000: "13.0"
[[nodiscard]] Result<std::string> nccl_version();

// Of the sources that this was built from (cmake/git_revision.cmake): 12 digits or "unknown", and
// whether they differed from it.
extern const char* const kGitSha;
extern const bool kGitDirty;

}  // namespace f8::tuner
