// Linears that read one x, such as Q, K and V.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "float8/linear.hpp"
#include "float8/linear_group.h"

namespace float8 {

using GroupedLinearArgs = float8_grouped_linear_args;
using LinearGroupArgs = float8_linear_group_args;

// Linears of one x, such as Q, K and V. Copies are the same group.
class LinearGroup {
 public:
  static Result<LinearGroup> plan(const Context& context, const std::vector<Linear>& linears) {
    std::vector<const float8_linear*> handles;
    for (const Linear& linear : linears) handles.push_back(linear.get());
    float8_linear_group* handle = nullptr;
    const float8_status status =
        float8_linear_group_plan(context.get(), handles.data(), handles.size(), &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return LinearGroup(handle, linears.front().m_max());
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_linear_group_workspace_bytes(handle_.get());
  }
  // `weights`: calls are given all weights in fp8.
  [[nodiscard]] std::size_t saved_bytes(bool weights = false) const {
    return float8_linear_group_saved_bytes(handle_.get(), weights ? 1 : 0);
  }
  // Both set args.linears and args.count to those of `linears`.
  Status forward(LinearGroupArgs args, const std::vector<GroupedLinearArgs>& linears,
                 float8_stream stream) const {
    set(args, linears);
    return Status(float8_linear_group_forward(handle_.get(), &args, stream));
  }
  Status backward(LinearGroupArgs args, const std::vector<GroupedLinearArgs>& linears,
                  float8_stream stream) const {
    set(args, linears);
    return Status(float8_linear_group_backward(handle_.get(), &args, stream));
  }
  // Says what was planned, with its launches beside those of the linears one by one, for people.
  [[nodiscard]] Result<std::string> info() const {
    return detail::text([this](char* text, std::size_t bytes, std::size_t* needed) {
      return float8_linear_group_info(handle_.get(), text, bytes, needed);
    });
  }
  [[nodiscard]] const float8_linear_group* get() const { return handle_.get(); }

 private:
  LinearGroup(float8_linear_group* handle, std::int64_t m_max)
      : handle_(handle, float8_linear_group_destroy), m_max_(m_max) {}
  void set(LinearGroupArgs& args, const std::vector<GroupedLinearArgs>& linears) const {
    if (args.m == -1) args.m = m_max_;
    args.linears = linears.data();
    args.count = linears.size();
  }
  std::shared_ptr<const float8_linear_group> handle_;
  std::int64_t m_max_;
};

}  // namespace float8
