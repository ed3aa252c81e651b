// The layout of a routing: from the ends of the experts' rows, which the device alone knows, to what
// the kernels of expert linears read (codegen/kernels/experts/group_args.cuh). One layout serves all expert
// linears of as many experts and the same largest m, forward and backward.
#pragma once

#include "codegen/kernels/experts/group_args.cuh"
#include "float8/experts.h"
#include "runtime/device/context.hpp"

namespace f8::runtime {

using GroupLayoutCall = float8_group_layout_args;

class GroupLayoutPlan {
 public:
  // Loads the kernel. m_max is 1 to kMaxDim, experts 1 to kernels::kMaxExperts.
  [[nodiscard]] static Result<GroupLayoutPlan> create(const std::shared_ptr<Context>& context,
                                                      int64_t m_max, int64_t experts);
  [[nodiscard]] size_t bytes() const { return bytes_of(layout_); }
  [[nodiscard]] static size_t bytes_of(const kernels::GroupLayout& layout) {
    return static_cast<size_t>(layout.words()) * sizeof(int32_t);
  }
  // Enqueues one launch.
  [[nodiscard]] Status run(const GroupLayoutCall& call, Stream stream) const;
  // Waits for the stream, gives the error that the layout has kept, and clears it.
  [[nodiscard]] Result<float8_group_error> take_error(void* layout, Stream stream) const;

 private:
  GroupLayoutPlan(std::shared_ptr<Context> context, const Kernel& kernel,
                  kernels::GroupLayout layout)
      : context_(std::move(context)), kernel_(&kernel), layout_(layout) {}

  std::shared_ptr<Context> context_;
  const Kernel* kernel_;
  kernels::GroupLayout layout_;
};

[[nodiscard]] Status check_experts(int64_t experts);
// Checks the number of experts and m_max of an expert linear or a layout.
[[nodiscard]] Result<kernels::GroupLayout> group_layout_of(int64_t m_max, int64_t experts);

}  // namespace f8::runtime
