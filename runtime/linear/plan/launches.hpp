// The launches of a call of a linear as data. A plan makes lists of them once (plan_launches.hpp); a
// call finds the range of its m in those of its casts and of its GEMMs, and walks it, patching in what
// it was given: pointers, row strides and m. So forward(), forward_steps() and the linear's description
// show the same launches.
//
//   list     := range ...         by m; what is launched depends on m by a few limits alone
//   range    := up_to_m, launch ...                                        in stream order
//   launch   := a function of the call, and what it is called
//   ref      := slot + offset     a slot is an argument of the call: a tensor or a buffer
//
// A slot may as well hold a tensor that is cast already, or one that several linears share.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "codegen/kernels/kernel_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/linear/plan/call_arguments.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {

// A call on its way to the stream.
struct LaunchTarget {
  const Context::State& context;
  const CallArguments& call;
  Stream stream;
  bool in_order = true;  // false: one launch alone, which overlaps no other
};
using Launch = std::function<Status(const LaunchTarget&)>;

// A matrix that a launch reads, and where what it makes of it goes: QuantizeOperand's fields.
struct CastOperand {
  Ref x = {};
  int64_t rows = 0;  // 0: the call's m
  int64_t cols = 0;
  Ref partials = {}, tile_amax = {}, row_amax = {}, col_amax = {};
  Ref q = {}, qt = {}, scale = {}, inv_row = {}, inv_col = {};
  Ref delayed = {}, recorded_amax = {}, counters = {};
  Ref block_amax = {};
  int64_t whole_rows = 0;

  [[nodiscard]] QuantizeOperand at(const CallArguments& call) const;
};

// A number of blocks or bytes that grows with the m of a call.
template <class T, int64_t kStep>
struct ByRows {
  T fixed = 0, of_step = 0;
  [[nodiscard]] T at(int64_t m) const {
    return fixed + of_step * static_cast<T>(ceil_div(m, kStep));
  }
};

// Sets `count` words to 0, and with `and_m` as many more as m.
struct ClearWords {
  Ref words = {};
  int64_t count = 0;
  bool and_m = false;
  Status operator()(const LaunchTarget& to) const {
    return set_words(to.context.driver, to.call.at<uint32_t>(words), 0,
                     static_cast<size_t>(count + (and_m ? to.call.m : 0)), to.stream);
  }
};

// The parts of a launch that calls have no use for.
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

  void add(std::string name, Launch launch, ByRows<double, 1> bytes = {}) {
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
