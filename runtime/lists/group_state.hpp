// The state of a planned group: it checks a call's arguments and binds them to the launches of its
// linears.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/linear/cast_list.hpp"
#include "runtime/linear/state.hpp"
#include "runtime/lists/group_memory.hpp"
#include "runtime/lists/linear_group.hpp"

namespace f8::runtime {

// The copies of dy that a linear's gradients read: an index of lists of casts.
inline constexpr unsigned kReadsQ = 1, kReadsQt = 2;

struct LinearGroup::State {
  struct Member {
    LaunchList output;  // of a forward that is given x and w
    std::array<LaunchList, kGradientKinds> gradients;
  };
  std::shared_ptr<Context> context;
  std::vector<std::shared_ptr<const Linear>> linears;
  GroupLayout layout;
  std::vector<Member> members;
  // The first linear's forward, which casts x; kinds with kGivenW alone.
  std::array<LaunchList, kForwardKinds> cast_x;
  std::array<std::optional<CastList>, 2> forward_casts;  // of x and the weights; [1] for a backward
  std::array<std::optional<CastList>, 4> dy_casts;       // by kReadsQ and kReadsQt

  [[nodiscard]] const Linear::State& linear(size_t i) const { return *linears[i]->state_; }
  [[nodiscard]] const LinearDesc& desc() const { return linears.front()->desc(); }

  [[nodiscard]] Status check_linears() const;
  void plan_layout(size_t casts);
  [[nodiscard]] Status plan_casts();
  [[nodiscard]] Status plan_members();
  [[nodiscard]] size_t casts_bytes() const;
  [[nodiscard]] bool casts_weights(bool saved, size_t i) const;

  [[nodiscard]] Status check_call(const LinearGroupCall& call) const;
  template <class Call>
  [[nodiscard]] Status check_linear(GroupMemory& memory, Call call, size_t i, Stream stream) const;
  [[nodiscard]] Status check_forward(const LinearGroupCall& call, Stream stream) const;
  [[nodiscard]] Status check_backward(const LinearGroupCall& call, Stream stream) const;
  [[nodiscard]] CallMemory memory(const LinearGroupCall& call, Access x, Access saved) const;
  [[nodiscard]] unsigned reads(const LinearGroupCall& call, size_t i) const;
  void bind(const LinearGroupCall& call, size_t i, bool with_qt, CallArguments& to) const;
};

}  // namespace f8::runtime
