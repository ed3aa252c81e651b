// Many tensors cast in few launches: what Quantizer::run does for one, to the same bits. Tensors that
// are cast alike share launches (CastList), whatever their shapes and rows.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/device/call_array.hpp"
#include "runtime/linear/cast_list.hpp"
#include "runtime/linear/quantizer.hpp"
#include "runtime/lists/call_overlaps.hpp"

namespace f8::runtime {

using QuantizeCalls = CallArray<QuantizeCall>;

class QuantizerList {
 public:
  // Quantizers of one context.
  [[nodiscard]] static Result<QuantizerList> plan(
      const std::shared_ptr<Context>& context,
      std::span<const std::shared_ptr<const Quantizer>> quantizers);

  [[nodiscard]] size_t workspace_bytes() const { return casts_->workspace_bytes(); }
  // A call for each quantizer, in order. `first_step`, `evaluate`, `ranks` and `noop_flag` are the same
  // in all.
  [[nodiscard]] Status run(const QuantizeCalls& calls, void* workspace, Stream stream,
                           AmaxReducer reduce = nullptr) const;
  // Finds the maxima of the shards; quantizers that are not over ranks are passed over.
  [[nodiscard]] Status find_amax(const QuantizeCalls& calls, Stream stream) const;

 private:
  QuantizerList() = default;
  [[nodiscard]] Status check_count(const char* name, const QuantizeCalls& calls) const;
  [[nodiscard]] Status check_run(const QuantizeCalls& calls, void* workspace, Stream stream,
                                 CallOverlaps& overlaps) const;
  [[nodiscard]] Status check_find(const QuantizeCalls& calls, Stream stream,
                                  CallOverlaps& overlaps) const;

  std::vector<std::shared_ptr<const Quantizer>> quantizers_;
  std::optional<CastList> casts_;
  std::unique_ptr<SharedOverlaps> overlaps_;
};

}  // namespace f8::runtime
