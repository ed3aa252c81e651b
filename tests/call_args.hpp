// Parts of calls' arguments that tests name, in the namespace of the structs.
#pragma once

#include <span>

#include "float8/quantizer_list.h"

inline constexpr float8_step kFirstOfSteps{.first_step = 1};
inline constexpr float8_step kEvaluation{.evaluate = 1};
[[nodiscard]] inline const float8_step* first_step_if(bool first) {
  return first ? &kFirstOfSteps : nullptr;
}

template <class Args>
[[nodiscard]] Args with_workspace(Args args, void* workspace) {
  args.workspace.data = workspace;
  return args;
}

// The same as what a call of the C interface takes.
template <class Args>
struct Given {
  Args args;
  operator const Args*() const { return &args; }  // NOLINT: implicit on purpose
};
template <class Args>
[[nodiscard]] Given<Args> given(const Args& args, void* workspace) {
  return {with_workspace(args, workspace)};
}

// The args of a list's call.
[[nodiscard]] inline float8_quantize_list_args listed(std::span<const float8_quantize_args> tensors,
                                                      void* workspace = nullptr,
                                                      const float8_step* step = nullptr,
                                                      uint32_t* noop_flag = nullptr) {
  return {.tensors = tensors.data(),
          .count = tensors.size(),
          .workspace = {workspace},
          .step = step,
          .noop_flag = noop_flag};
}
