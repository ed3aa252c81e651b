// Linears of one x, such as Q, K and V: what they compute one by one with a shared x.fp8, to the
// same bits, in fewer launches. x is cast once; with the weights that need it in one list of casts,
// else by itself. All dy are cast in another list. Plan once, run often; a plan is immutable and
// shared between threads.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/linear/linear.hpp"

namespace f8::runtime {

using GroupedLinearCall = float8_grouped_linear_args;
// The members' args are this version's structs.
using LinearGroupCall = float8_linear_group_args;

class LinearGroup {
 public:
  [[nodiscard]] static Result<std::shared_ptr<const LinearGroup>> plan(
      const std::shared_ptr<Context>& context,
      std::span<const std::shared_ptr<const Linear>> linears);
  ~LinearGroup();

  [[nodiscard]] size_t workspace_bytes() const;
  // `weights`: calls are given all weights in fp8.
  [[nodiscard]] size_t saved_bytes(bool weights = false) const;
  [[nodiscard]] const std::vector<std::shared_ptr<const Linear>>& linears() const;

  [[nodiscard]] Status forward(const LinearGroupCall& call, Stream stream,
                               AmaxReducer reduce = nullptr) const;
  // The step's `evaluate` is 0 here.
  [[nodiscard]] Status backward(const LinearGroupCall& call, Stream stream,
                                AmaxReducer reduce = nullptr) const;

  // The kernels that a call at m launches: all gradients are wanted, and nothing is accumulated but
  // dx.
  struct Launches {
    size_t forward = 0;
    size_t forward_with_weights = 0;
    size_t backward = 0;
  };
  [[nodiscard]] Launches launches(int64_t m) const;
  // Those of the linears one by one, each of which casts x.
  [[nodiscard]] Launches launches_one_by_one(int64_t m) const;

 private:
  struct State;
  explicit LinearGroup(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// The group in a few lines for people.
[[nodiscard]] std::string describe(const LinearGroup& group);

}  // namespace f8::runtime
