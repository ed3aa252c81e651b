// Many tensors cast in few launches: what Quantizer::run does for one, to the same bits. Tensors that
// are cast alike share launches (CastList), whatever their shapes and rows.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/linear/tensors/cast_list.hpp"
#include "runtime/linear/tensors/quantizer.hpp"
#include "runtime/lists/call_overlaps.hpp"

namespace f8::runtime {

// Its tensors may be structs of another version, all of one size (call_array.hpp).
using QuantizeListCall = float8_quantize_list_args;

class QuantizerList {
 public:
  // Quantizers of one context.
  [[nodiscard]] static Result<QuantizerList> plan(
      const std::shared_ptr<Context>& context,
      std::span<const std::shared_ptr<const Quantizer>> quantizers);

  [[nodiscard]] size_t workspace_bytes() const { return casts_->workspace_bytes(); }
  [[nodiscard]] Status run(const QuantizeListCall& call, Stream stream,
                           AmaxReducer reduce = nullptr) const;
  // Finds the maxima of the shards; quantizers that are not over ranks are passed over.
  [[nodiscard]] Status find_amax(const QuantizeListCall& call, Stream stream) const;

 private:
  QuantizerList() = default;
  [[nodiscard]] Status check_count(const char* name, const QuantizeListCall& call) const;
  [[nodiscard]] Status check_run(const QuantizeListCall& call, Stream stream,
                                 CallOverlaps& overlaps) const;
  [[nodiscard]] Status check_find(const QuantizeListCall& call, Stream stream,
                                  CallOverlaps& overlaps) const;

  std::vector<std::shared_ptr<const Quantizer>> quantizers_;
  std::optional<CastList> casts_;
  std::unique_ptr<SharedOverlaps> overlaps_;
};

}  // namespace f8::runtime
