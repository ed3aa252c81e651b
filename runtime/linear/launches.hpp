// The launches of a call of a linear as data. A plan makes a list of them for every kind of call,
// once (plan_launches.hpp); a call walks its list and patches in what it was given: pointers, row
// strides and m. So forward(), forward_steps() and the linear's description show the same launches.
//
//   list     := launch ...       in stream order
//   launch   := kind, kernel, the m that it is for, operands
//   operand  := refs and extents
//   ref      := slot + offset    a slot is an argument of the call: a tensor or a buffer
//
// A slot may as well hold a tensor that is cast already, or one that several linears share.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/device/context_state.hpp"
#include "runtime/gemm/gemm.hpp"
#include "runtime/linear/call_arguments.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {

// A matrix that a launch reads, and where what it makes of it goes: QuantizeOperand's fields.
struct CastOperand {
  Ref x = {};
  int64_t rows = 0;  // 0: the call's m
  int64_t cols = 0;
  int64_t tile_amax_up_to_m = 0;  // up to this m its rows and columns leave per-tile amax partials
  Ref partials = {}, tile_amax = {}, row_amax = {}, col_amax = {};
  Ref q = {}, qt = {}, scale = {}, inv_row = {}, inv_col = {};
  Ref delayed = {}, recorded_amax = {}, counters = {};

  [[nodiscard]] int64_t rows_at(int64_t m) const { return rows == 0 ? m : rows; }
  [[nodiscard]] QuantizeOperand at(const CallArguments& call) const;
};
// The blocks that cast these operands at this m.
[[nodiscard]] int64_t tiles_of(const std::vector<CastOperand>& operands, int64_t m);

struct GemmOperands {
  Ref a = {}, b = {}, d = {}, inv_scale_a = {}, inv_scale_b = {}, bias = {};
};

struct Launch {
  enum class Kind : uint8_t {
    kSetWords,     // sets `count` words at `out` to `value`; `count_m`: and as many more as m
    kZeroRows,     // zeroes `count` rows of `row_bytes` at `out`
    kAmax,         // finds the operands' maxima
    kCast,         // casts the operands
    kQuantize,     // does both in one launch
    kReduceAmax,   // reduces `count` words at `out` over ranks
    kFirstScales,  // makes the scales of `count` slots from the maxima at `out`
    kColumnSums,   // sums the operand's columns into `sums`
    kBiasGrad,     // sums `sums`, of `count` columns, into `out`
    kGemm,         // multiplies gemms[0]
    kGroupedGemm   // multiplies both gemms
  };
  Kind kind;
  std::string name = {};           // "amax x,w", "cast x,w", "gemm output", ...
  const Kernel* kernel = nullptr;  // of kinds that launch one of the linear's own
  double bytes_per_element = 0;    // that a memory-bound launch moves, by elements of its operands
  int64_t above_m = 0;             // it is of calls with above_m < m <= up_to_m
  int64_t up_to_m = std::numeric_limits<int64_t>::max();
  // Up to this m it is overlapped with the launch before it by programmatic dependent launch,
  // unless that one is with its own predecessor.
  int64_t overlaps_up_to_m = 0;
  std::vector<CastOperand> operands = {};
  Ref out = {}, sums = {}, workspace = {};
  int64_t count = 0;
  bool count_m = false;
  uint32_t value = 0;
  size_t row_bytes = 0, element_bytes = 0;
  bool hold = false;
  std::vector<GemmOperands> gemms = {};
  const GemmPlan* gemm = nullptr;
  const GroupedGemm* grouped = nullptr;

  [[nodiscard]] bool applies(int64_t m) const { return above_m < m && m <= up_to_m; }
  [[nodiscard]] double bytes_moved(int64_t m) const;  // 0 where memory is not its bound
  // Launches it alone, or overlapped with a neighbour of so many blocks.
  [[nodiscard]] Status run(const Context::State& context, const CallArguments& call, Stream stream,
                           bool overlapped = false, int64_t overlapped_blocks = 0) const;
};
using LaunchList = std::vector<Launch>;

// Launches what of the list is for the call's m, in order.
[[nodiscard]] Status run(const LaunchList& list, const Context::State& context,
                         const CallArguments& call, Stream stream);

}  // namespace f8::runtime
