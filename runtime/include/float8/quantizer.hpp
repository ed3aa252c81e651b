// Casts of tensors apart from a linear, one by one and in lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "float8/context.hpp"
#include "float8/quantizer.h"
#include "float8/quantizer_list.h"
#include "float8/recipe.hpp"

namespace float8 {

using QuantizeArgs = float8_quantize_args;
using QuantizeListArgs = float8_quantize_list_args;

// A view of a tensor in fp8.
using Tensor = float8_tensor;

struct QuantizerDesc {
  float8_operand operand = FLOAT8_INPUT;
  std::int64_t rows_max = 0;
  std::int64_t cols = 0;
  Recipe recipe = Recipe::tensorwise();
  float8_dtype dtype = FLOAT8_BF16;
  float8_non_finite non_finite = FLOAT8_PROPAGATE;
  bool count = false;
  float8_copies copies = FLOAT8_BOTH_COPIES;
  bool over_ranks = false;      // ranks hold the tensor by rows; run() follows find_amax()
  std::int64_t whole_rows = 0;  // with over_ranks: those of the whole, whose blocks shards may cut
  bool noop_flag = false;       // casts of the weight look at QuantizeArgs::noop_flag
  bool f32_source = false;      // x is in fp32, and is rounded to dtype as it is read
  float8_source source = FLOAT8_PLAIN;         // or what is computed of x, or its gradient
  float8_activation activation = FLOAT8_SILU;  // of such a source
  bool column_sums = false;  // of FLOAT8_ACTIVATION_BACKWARD: QuantizeArgs::column_sums is written
  bool less_workspace = false;  // of FLOAT8_GLU_BACKWARD: the gradients are never in the workspace
};

// The casts of an operand apart from a linear. Copies are the same quantizer.
class Quantizer {
 public:
  static Result<Quantizer> plan(const Context& context, const QuantizerDesc& desc) {
    const auto recipe = desc.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    float8_quantizer_desc c{};
    c.struct_size = sizeof c;
    c.rows_max = desc.rows_max;
    c.cols = desc.cols;
    c.operand = desc.operand;
    c.dtype = desc.dtype;
    c.custom_recipe = &settings;
    c.non_finite = desc.non_finite;
    c.count = desc.count ? 1 : 0;
    c.copies = desc.copies;
    c.over_ranks = desc.over_ranks ? 1 : 0;
    c.whole_rows = desc.whole_rows;
    c.noop_flag = desc.noop_flag ? 1 : 0;
    c.f32_source = desc.f32_source ? 1 : 0;
    c.source = desc.source;
    c.activation = desc.activation;
    c.column_sums = desc.column_sums ? 1 : 0;
    c.less_workspace = desc.less_workspace ? 1 : 0;
    float8_quantizer* handle = nullptr;
    const float8_status status = float8_quantizer_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Quantizer(handle, desc.rows_max);
  }
  [[nodiscard]] std::size_t tensor_bytes() const {
    return float8_quantizer_tensor_bytes(handle_.get());
  }
  // The part of them that may lie apart.
  [[nodiscard]] std::size_t transposed_bytes() const {
    return float8_quantizer_transposed_bytes(handle_.get());
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_quantizer_workspace_bytes(handle_.get());
  }
  [[nodiscard]] std::size_t workspace_bytes(bool first_step) const {
    return float8_quantizer_step_workspace_bytes(handle_.get(), first_step ? 1 : 0);
  }
  Status run(QuantizeArgs args, float8_stream stream) const {
    if (args.rows == -1) args.rows = rows_max_;
    return Status(float8_quantize(handle_.get(), &args, stream));
  }
  // The words of QuantizeArgs::amax, whose maxima over ranks run() casts with, and of row_amax.
  [[nodiscard]] std::size_t amax_words() const {
    return float8_quantizer_amax_words(handle_.get());
  }
  [[nodiscard]] std::size_t row_amax_words() const {
    return float8_quantizer_row_amax_words(handle_.get());
  }
  Status find_amax(QuantizeArgs args, float8_stream stream) const {
    if (args.rows == -1) args.rows = rows_max_;
    return Status(float8_quantize_amax(handle_.get(), &args, stream));
  }
  // The view of what a run with these rows leaves in `tensor`, and in `transposed` if it has one.
  [[nodiscard]] Result<Tensor> view(const void* tensor, std::int64_t rows,
                                    const void* transposed = nullptr) const {
    Tensor out;
    const float8_status status =
        float8_quantizer_view(handle_.get(), tensor, transposed, rows, &out);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return out;
  }
  [[nodiscard]] std::int64_t rows_max() const { return rows_max_; }
  [[nodiscard]] const float8_quantizer* get() const { return handle_.get(); }

 private:
  Quantizer(float8_quantizer* handle, std::int64_t rows_max)
      : handle_(handle, float8_quantizer_destroy), rows_max_(rows_max) {}
  std::shared_ptr<const float8_quantizer> handle_;
  std::int64_t rows_max_;
};

// The casts of many tensors in few launches.
class QuantizerList {
 public:
  static Result<QuantizerList> plan(const Context& context,
                                    const std::vector<Quantizer>& quantizers) {
    std::vector<const float8_quantizer*> handles;
    for (const Quantizer& quantizer : quantizers) handles.push_back(quantizer.get());
    float8_quantizer_list* handle = nullptr;
    const float8_status status =
        float8_quantizer_list_plan(context.get(), handles.data(), handles.size(), &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return QuantizerList(handle, quantizers);
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_quantizer_list_workspace_bytes(handle_.get());
  }
  // Both set args.tensors and args.count to those of `tensors`.
  Status run(QuantizeListArgs args, std::vector<QuantizeArgs> tensors, float8_stream stream) const {
    set(args, tensors);
    return Status(float8_quantize_list(handle_.get(), &args, stream));
  }
  Status find_amax(QuantizeListArgs args, std::vector<QuantizeArgs> tensors,
                   float8_stream stream) const {
    set(args, tensors);
    return Status(float8_quantize_list_amax(handle_.get(), &args, stream));
  }
  [[nodiscard]] const float8_quantizer_list* get() const { return handle_.get(); }

 private:
  QuantizerList(float8_quantizer_list* handle, const std::vector<Quantizer>& quantizers)
      : handle_(handle) {
    for (const Quantizer& quantizer : quantizers) rows_max_.push_back(quantizer.rows_max());
  }
  void set(QuantizeListArgs& args, std::vector<QuantizeArgs>& tensors) const {
    for (std::size_t i = 0; i < tensors.size() && i < rows_max_.size(); ++i) {
      if (tensors[i].rows == -1) tensors[i].rows = rows_max_[i];
    }
    args.tensors = tensors.data();
    args.count = tensors.size();
  }
  detail::Handle<float8_quantizer_list, float8_quantizer_list_destroy> handle_;
  std::vector<std::int64_t> rows_max_;
};

}  // namespace float8
