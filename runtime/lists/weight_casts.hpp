// The weights of many linears cast in few launches: what Linear::cast_weight does for one, to the
// same bits, for a model's between two optimizer steps. Weights that are cast alike share launches
// (CastList), whatever their shapes.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/device/call_array.hpp"
#include "runtime/linear/cast_list.hpp"
#include "runtime/linear/linear.hpp"
#include "runtime/lists/call_overlaps.hpp"

namespace f8::runtime {

using WeightCalls = CallArray<WeightCall>;

class WeightCasts {
 public:
  // Linears of one context; those that never cast their weight are passed over.
  [[nodiscard]] static Result<WeightCasts> plan(
      const std::shared_ptr<Context>& context,
      std::span<const std::shared_ptr<const Linear>> linears);

  [[nodiscard]] size_t workspace_bytes() const { return casts_->workspace_bytes(); }
  // A call for each linear, in order. `first_step` and `ranks` are the same in all of them, and so
  // is `valid`: one flag for all of the weights, where all plans have LinearDesc::weight_flag.
  [[nodiscard]] Status run(const WeightCalls& calls, void* workspace, Stream stream,
                           AmaxReducer reduce = nullptr) const;
  [[nodiscard]] Status run(std::span<const WeightCall> calls, void* workspace, Stream stream,
                           AmaxReducer reduce = nullptr) const {
    return run(WeightCalls{calls.size(), calls.data()}, workspace, stream, reduce);
  }

 private:
  WeightCasts() = default;
  [[nodiscard]] Status check(const WeightCalls& calls, const WeightCall& common, void* workspace,
                             Stream stream, CallOverlaps& overlaps) const;

  std::vector<std::shared_ptr<const Linear>> linears_;
  std::optional<CastList> casts_;
  std::unique_ptr<SharedOverlaps> overlaps_;
};

}  // namespace f8::runtime
