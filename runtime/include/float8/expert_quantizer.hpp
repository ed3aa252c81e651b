// Casts of the weights of all experts apart from their calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "float8/expert_quantizer.h"
#include "float8/quantizer.hpp"

namespace float8 {

using ExpertQuantizeArgs = float8_expert_quantize_args;

struct ExpertQuantizerDesc {
  std::int64_t n = 0;  // rows of each expert's matrix
  std::int64_t k = 0;
  std::int32_t experts = 0;
  Recipe recipe = Recipe::tensorwise();
  float8_dtype dtype = FLOAT8_BF16;
  float8_non_finite non_finite = FLOAT8_PROPAGATE;
  bool f32_source = false;   // w is in fp32, and is rounded to dtype as it is read
  bool over_ranks = false;   // ranks have n rows each; run() follows find_amax()
  bool noop_flag = false;    // casts look at ExpertQuantizeArgs::noop_flag
  bool two_tensors = false;  // w has the first half of each expert's rows, second_w the others
};

// The casts of experts' weights. Copies are the same quantizer.
class ExpertQuantizer {
 public:
  static Result<ExpertQuantizer> plan(const Context& context, const ExpertQuantizerDesc& desc) {
    const auto recipe = desc.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    float8_expert_quantizer_desc c{};
    c.struct_size = sizeof c;
    c.n = desc.n;
    c.k = desc.k;
    c.experts = desc.experts;
    c.dtype = desc.dtype;
    c.custom_recipe = &settings;
    c.non_finite = desc.non_finite;
    c.f32_source = desc.f32_source ? 1 : 0;
    c.over_ranks = desc.over_ranks ? 1 : 0;
    c.noop_flag = desc.noop_flag ? 1 : 0;
    c.two_tensors = desc.two_tensors ? 1 : 0;
    float8_expert_quantizer* handle = nullptr;
    float8_status status = float8_expert_quantizer_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    ExpertQuantizer out(handle);
    out.layout_.struct_size = sizeof out.layout_;
    status = float8_expert_quantizer_layout(&c, &out.layout_);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    out.tensor_.rows = desc.experts * desc.n;
    out.tensor_.cols = desc.k;
    out.tensor_.ld_q = out.layout_.ld_q;
    out.tensor_.ld_qt = out.layout_.ld_qt;
    out.tensor_.q_setting = settings.output.b;
    out.tensor_.qt_setting = settings.grad_input.b;
    return out;
  }
  // The bytes of ExpertQuantizeArgs::tensor and of transposed.
  [[nodiscard]] std::size_t tensor_bytes() const {
    return layout_.tensor_bytes - layout_.transposed_bytes;
  }
  [[nodiscard]] std::size_t transposed_bytes() const { return layout_.transposed_bytes; }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_expert_quantizer_workspace_bytes(handle_.get());
  }
  // The words of ExpertQuantizeArgs::amax, whose maxima over ranks run() casts with, and of row_amax.
  [[nodiscard]] std::size_t amax_words() const { return layout_.amax_words; }
  [[nodiscard]] std::size_t row_amax_words() const { return layout_.row_amax_words; }
  Status run(const ExpertQuantizeArgs& args, float8_stream stream) const {
    return Status(float8_expert_quantize(handle_.get(), &args, stream));
  }
  Status find_amax(const ExpertQuantizeArgs& args, float8_stream stream) const {
    return Status(float8_expert_quantize_amax(handle_.get(), &args, stream));
  }
  // The view of what a run leaves in both buffers, for w.fp8 of calls.
  [[nodiscard]] Tensor view(const void* tensor, const void* transposed) const {
    Tensor out = tensor_;
    out.q = tensor;
    out.qt = transposed;
    out.q_inverse_scale =
        scales(layout_.q_scale_apart != 0 ? transposed : tensor, layout_.q_inverse_scale);
    out.qt_inverse_scale = scales(transposed, layout_.qt_inverse_scale);
    return out;
  }
  [[nodiscard]] const float8_expert_quantizer* get() const { return handle_.get(); }

 private:
  explicit ExpertQuantizer(float8_expert_quantizer* handle)
      : handle_(handle, float8_expert_quantizer_destroy) {}
  static const float* scales(const void* of, std::size_t offset) {
    return reinterpret_cast<const float*>(static_cast<const unsigned char*>(of) + offset);
  }
  std::shared_ptr<const float8_expert_quantizer> handle_;
  float8_layout layout_{};
  Tensor tensor_;  // all of a view but its memory
};

}  // namespace float8
