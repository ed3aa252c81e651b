// The last step of a search: whole linears. A product's kernel that is fastest alone and hot is not
// always fastest between casts and other products, where clock, power and L2 are others. So the few
// best kernels of each product form a few linears, which are timed interleaved, and the fastest
// linear decides which kernels its products take.
//
// Two rungs: all linears, then the best of them and one more, which joins the changes that each by
// itself made the linear faster.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "tools/tuner/measure/measurer.hpp"

namespace f8::tuner {

struct LinearKnobs {
  int most = 8;          // linears of the first rung; 1: the fastest kernels, no search
  double within = 1.04;  // a product's kernels this much slower than its fastest take part
  double ms = 25;        // a linear's share of the first rung; of the second twice that
};

struct TimedKernel {
  runtime::GemmChoice choice;
  double ns = 0;  // alone
};

// The kernels of one product that may be part of the linear.
struct KernelField {
  std::vector<TimedKernel> timed;  // at least one, fastest first
  // What a plan takes without a search: the cost model's choice, the table's.
  std::vector<runtime::GemmChoice> prior;
};
using KernelFields = std::array<KernelField, 3>;  // indexed by Gemm

// In this order, no combination twice: all fastest; for each prior, all prior; both gradients by
// one configuration, so that one launch computes them; for each product its next kernels within
// reach, the others' fastest.
[[nodiscard]] std::vector<LinearChoices> linear_variants(const KernelFields& fields,
                                                         const LinearKnobs& knobs);

struct LinearSearch {
  LinearChoices choices;
  int timed = 0;          // linears; 0: there was no choice
  double over_first = 1;  // the time of the linear of the fastest kernels over the best one's
};
using MeasureGroup =
    std::function<Result<std::vector<tuning_db::TrialResult>>(const GroupRequest&)>;
// `group` has the problem, the seed and the length of batches; `impl` is float8 or float8_reused. A
// linear that cannot be measured is left out; where none can, the choices are the fastest kernels'.
[[nodiscard]] Result<LinearSearch> search_linear(GroupRequest group, const KernelFields& fields,
                                                 const LinearKnobs& knobs,
                                                 const MeasureGroup& measure,
                                                 const std::string& impl = "float8");

}  // namespace f8::tuner
