// The launches of a call of a linear as data. A plan makes a list of them for every kind of call,
// once (plan_launches.hpp); a call finds the range of its m and walks it, patching in what it was
// given: pointers, row strides and m. So forward(), forward_steps() and the linear's description
// show the same launches.
//
//   list     := range ...         by m; what is launched depends on m by a few limits alone
//   range    := up_to_m, launch ...                                        in stream order
//   launch   := one of the structs below, and what it is called
//   ref      := slot + offset     a slot is an argument of the call: a tensor or a buffer
//
// A slot may as well hold a tensor that is cast already, or one that several linears share.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/device/context_state.hpp"
#include "runtime/gemm/gemm.hpp"
#include "runtime/linear/call_arguments.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {

// A call on its way to the stream.
struct LaunchTarget {
  const Context::State& context;
  const CallArguments& call;
  Stream stream;
};

// A matrix that a launch reads, and where what it makes of it goes: QuantizeOperand's fields.
struct CastOperand {
  Ref x = {};
  int64_t rows = 0;  // 0: the call's m
  int64_t cols = 0;
  Ref partials = {}, tile_amax = {}, row_amax = {}, col_amax = {};
  Ref q = {}, qt = {}, scale = {}, inv_row = {}, inv_col = {};
  Ref delayed = {}, recorded_amax = {}, counters = {};

  [[nodiscard]] QuantizeOperand at(const CallArguments& call) const;
};

// What grows with the m of a call: blocks, or bytes.
template <class T, int64_t kStep>
struct ByRows {
  T fixed = 0, of_step = 0;
  [[nodiscard]] T at(int64_t m) const {
    return fixed + of_step * static_cast<T>(ceil_div(m, kStep));
  }
};

// Sets `count` words to `value`, and with `and_m` as many more as m.
struct SetWords {
  Ref words = {};
  int64_t count = 0;
  uint32_t value = 0;
  bool and_m = false;
  [[nodiscard]] Status run(const LaunchTarget& target) const;
};

// Reduces amaxes over ranks.
struct ReduceAmax {
  Ref amax;
  size_t count;
  [[nodiscard]] Status run(const LaunchTarget& target) const;
};

// Makes the scales of `count` slots from their amaxes.
struct FirstScales {
  const Kernel* kernel;
  Ref amax;
  size_t count;
  bool hold;
  [[nodiscard]] Status run(const LaunchTarget& target) const;
};

// Finds the operands' maxima, casts them, or does both, as the kernel's spec says.
struct CastLaunch {
  const Kernel* kernel;
  std::vector<CastOperand> operands;
  Ref sync = {};
  Ref sums = {};  // of the columns of dy
  // It is overlapped with the launch before by programmatic dependent launch.
  bool overlapped = false;
  ByRows<int32_t, kernels::kCastTile> neighbour = {};  // the blocks of the other of such two
  [[nodiscard]] Status run(const LaunchTarget& target) const;
};

// Sums the columns of dy.
struct ColumnSums {
  const Kernel* kernel;
  Ref sums;
  int64_t cols;
  [[nodiscard]] Status run(const LaunchTarget& target) const;
};

// Makes the gradient of a bias from these sums; of an empty batch it is zero.
struct BiasGrad {
  const Kernel* kernel;
  Ref sums;
  int64_t cols;
  [[nodiscard]] Status run(const LaunchTarget& target) const;
};

struct GemmOperands {
  Ref a = {}, b = {}, d = {}, inv_scale_a = {}, inv_scale_b = {};
  [[nodiscard]] GemmCall at(const CallArguments& call) const;
};

struct GemmLaunch {
  const GemmPlan* plan;
  Ref workspace;
  GemmOperands operands;
  [[nodiscard]] Status run(const LaunchTarget& target) const;
};

struct GroupedGemmLaunch {
  const GroupedGemm* plan;
  GemmOperands first, second;
  [[nodiscard]] Status run(const LaunchTarget& target) const;
};

using Launch = std::variant<CastLaunch, GemmLaunch, GroupedGemmLaunch, SetWords, ColumnSums,
                            BiasGrad, ReduceAmax, FirstScales>;
[[nodiscard]] inline Status run(const Launch& launch, const LaunchTarget& target) {
  return std::visit([&](const auto& of_kind) { return of_kind.run(target); }, launch);
}

// What a call has no use for.
struct LaunchLabel {
  std::string name;              // "amax x,w", "cast x,w", "gemm output", ...
  ByRows<double, 1> bytes = {};  // that it moves; 0 where memory is not its bound
};

// The launches of calls whose m is at most up_to_m, and more than that of the range before.
struct LaunchRange {
  int64_t up_to_m = 0;
  bool has_sums = false;  // a cast of dy leaves column sums
  std::vector<Launch> launches = {};
  std::vector<LaunchLabel> labels = {};  // beside them

  void add(Launch launch, std::string name, ByRows<double, 1> bytes = {}) {
    launches.push_back(std::move(launch));
    labels.push_back({std::move(name), bytes});
  }
};
using LaunchList = std::vector<LaunchRange>;

[[nodiscard]] const LaunchRange& range_at(const LaunchList& list, int64_t m);
// Launches what the list has for the call's m.
[[nodiscard]] Status run(const LaunchList& list, const Context::State& context,
                         const CallArguments& call, Stream stream);

}  // namespace f8::runtime
