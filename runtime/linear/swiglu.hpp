// The cast of silu(gate) up for a linear that reads it: one launch.
#pragma once

#include "runtime/linear/kernels.hpp"
#include "runtime/linear/launches.hpp"

namespace f8::runtime {

// A cast's kernel, and where its copies go; the operand's x is gate.
struct SwigluCast {
  const Kernel* kernel;
  CastOperand operand;
};

// kUnsupported where scales come from the tensor's maxima.
[[nodiscard]] Result<SwigluCast> plan_swiglu_cast(Context& context, const FusedCast& cast,
                                                  const CastOperand& operand,
                                                  std::string_view recipe);
[[nodiscard]] Status launch_swiglu_cast(const Context::State& context, const SwigluCast& cast,
                                        const CallArguments& call, const void* up, int64_t ld_up,
                                        Stream stream);

}  // namespace f8::runtime
