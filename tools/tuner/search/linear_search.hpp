// The last step of a search: whole linears. The kernel of a GEMM that is fastest alone and hot is
// not always fastest between casts and other GEMMs, where clock, power and L2 are others. So the
// few best kernels of each GEMM form a few linears, which are timed interleaved, and the fastest
// linear decides which kernels its GEMMs take.
//
// There are two rungs: all linears, then the best of them and one more, which joins the changes
// that each by itself made the linear faster.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tools/tuner/measure/interleaved_group.hpp"

namespace f8::tuner {

struct LinearSearchOptions {
  int most = 8;          // linears of the first rung; 1: the fastest kernels, no search
  double within = 1.04;  // a GEMM's kernels up to this much slower than its fastest take part
  double ms = 25;        // a linear's share of the first rung; of the second twice that
};

struct TimedKernel {
  runtime::GemmChoice choice;
  double ns = 0;  // by itself
};

// The kernels of one GEMM that may be part of the linear.
struct KernelShortlist {
  std::vector<TimedKernel> timed;  // at least one, fastest first
  // The choices of a plan without a search: the cost model's and the table's.
  std::vector<runtime::GemmChoice> prior;
};
using KernelShortlists = std::array<KernelShortlist, 3>;  // indexed by Gemm

// The linears to time, each combination once, in this order: all fastest; all prior choices, the
// last of which are those of a plan without a search; both gradients by one configuration, so that
// one launch computes them; and for each GEMM its next kernels within reach, with the fastest of
// the others.
[[nodiscard]] std::vector<LinearChoices> linear_variants(const KernelShortlists& shortlists,
                                                         const LinearSearchOptions& options);

struct LinearSearch {
  LinearChoices choices;
  int timed = 0;          // how many linears were timed; 0: there was no choice
  double over_first = 1;  // the time of the linear of the fastest kernels over the best one's
  // The time of the linear of a plan without a search over the best one's; none where it was not
  // timed. A GEMM without prior choices has its fastest kernel there.
  std::optional<double> over_untuned{};
};
using MeasureGroup =
    std::function<Result<std::vector<tuning_db::TrialResult>>(const InterleavedGroup&)>;
// `group` has the problem, the seed and the length of batches; `impl` is kFloat8 or kFloat8Reused.
// A linear that cannot be measured is left out; where none can be, the choices are the fastest
// kernels.
[[nodiscard]] Result<LinearSearch> search_linear(InterleavedGroup group,
                                                 const KernelShortlists& shortlists,
                                                 const LinearSearchOptions& options,
                                                 const MeasureGroup& measure,
                                                 Impl impl = Impl::kFloat8);

}  // namespace f8::tuner
