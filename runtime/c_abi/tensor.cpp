// Tensors in fp8: their casts and GEMMs apart from a linear.
#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/ranks.hpp"
#include "runtime/c_abi/recipe.hpp"
#include "runtime/device/calls/call_array.hpp"

using namespace f8::c_abi;

static_assert(static_cast<int>(f8::runtime::Tensor::kInput) == FLOAT8_INPUT &&
              static_cast<int>(f8::runtime::Tensor::kWeight) == FLOAT8_WEIGHT &&
              static_cast<int>(f8::runtime::Tensor::kGradOutput) == FLOAT8_GRAD_OUTPUT);
static_assert(static_cast<int>(f8::Gemm::kOutput) == FLOAT8_OUTPUT &&
              static_cast<int>(f8::Gemm::kGradInput) == FLOAT8_GRAD_INPUT &&
              static_cast<int>(f8::Gemm::kGradWeight) == FLOAT8_GRAD_WEIGHT);

namespace {

constexpr const char* kQuantizeArgs = "float8_quantize_args";

// Checks what no plan has to say of a cast's args.
f8::Status check_args(const f8::runtime::Quantizer& plan, const float8_quantize_args& known) {
  if (!plan.desc().recast) F8_TRY(need_plain(kQuantizeArgs, "x", known.x));
  F8_TRY(need_plain(kQuantizeArgs, "up", known.up));
  F8_TRY(need_plain(kQuantizeArgs, "grad", known.grad));
  const size_t qt_bytes = plan.transposed_bytes();
  const auto bytes = [&](const float8_buffer& transposed) {
    return plan.tensor_bytes() - (transposed.data != nullptr ? qt_bytes : 0);
  };
  F8_TRY(check_bytes(kQuantizeArgs, "tensor", known.tensor, bytes(known.transposed)));
  F8_TRY(check_bytes(kQuantizeArgs, "transposed", known.transposed, qt_bytes));
  F8_TRY(check_bytes(kQuantizeArgs, "up_tensor", known.up_tensor, bytes(known.up_transposed)));
  return check_bytes(kQuantizeArgs, "up_transposed", known.up_transposed, qt_bytes);
}

// The caller's step and tensor in fp8 as this version knows them.
struct HeldCast {
  float8_step step;
  float8_tensor x;
};

f8::Status read_call(const float8_quantizer* quantizer, const float8_quantize_args* args,
                     float8_quantize_args& known, HeldCast& held) {
  F8_TRY(need(quantizer, "quantizer"));
  F8_TRY(read_struct(args, kQuantizeArgs, known));
  float8_step& step = held.step;
  F8_TRY(read_step(known.step, step));
  F8_TRY(read_tensor("float8_quantize_args.x.fp8", known.x.fp8, held.x));
  const f8::runtime::Quantizer& plan = *quantizer->quantizer;
  F8_TRY(check_launch_counts(step, plan.context()));
  F8_TRY(check_bytes(kQuantizeArgs, "workspace", known.workspace,
                     plan.workspace_bytes(step.first_step != 0)));
  return check_args(plan, known);
}

f8::Status read_call(const float8_quantizer_list* list, const float8_quantize_list_args* args,
                     float8_quantize_list_args& known, float8_step& step) {
  constexpr const char* kArgs = "float8_quantize_list_args";
  F8_TRY(need(list, "list"));
  F8_TRY(read_struct(args, kArgs, known));
  F8_TRY(read_step(known.step, step));
  if (known.count > 0) F8_TRY(need(known.tensors, "float8_quantize_list_args.tensors"));
  F8_TRY(check_bytes(kArgs, "workspace", known.workspace, list->casts.workspace_bytes()));
  const f8::runtime::CallArray<float8_quantize_args> tensors{known.count, known.tensors};
  for (size_t i = 0; i < std::min(known.count, list->quantizers.size()); ++i) {
    const f8::runtime::Quantizer& plan = *list->quantizers[i];
    float8_quantize_args of;
    f8::Status good = read_element(tensors.given(i), tensors.first, kQuantizeArgs, of);
    if (good && i == 0) good = check_launch_counts(step, plan.context());
    if (good) good = check_args(plan, of);
    if (!good) [[unlikely]] {
      good.error().message = f8::format("{}.tensors[{}]: {}", kArgs, i, good.error().message);
      return good;
    }
  }
  return {};
}

// The reduction of a call over ranks.
f8::Result<f8::runtime::AmaxReducer> reducer_of(const f8::runtime::Quantizer& plan,
                                                const float8_step& step) {
  const bool reduces = step.first_step != 0 && step.evaluate == 0 && plan.is_delayed();
  return amax_reducer(plan.context(), "float8_step.ranks", step.ranks, reduces);
}

}  // namespace

namespace {

f8::Result<f8::runtime::QuantizerDesc> described(const float8_quantizer_desc* desc) {
  float8_quantizer_desc known;
  F8_TRY(read_struct(desc, "float8_quantizer_desc", known));
  F8_TRY(check_enum("float8_quantizer_desc.operand", known.operand, FLOAT8_GRAD_OUTPUT));
  F8_TRY(check_enum("float8_quantizer_desc.non_finite", known.non_finite, FLOAT8_SATURATE));
  F8_TRY(check_enum("float8_quantizer_desc.copies", known.copies, FLOAT8_QT_FOR_RECOMPUTE));
  f8::runtime::QuantizerDesc converted;
  converted.operand = static_cast<f8::runtime::Tensor>(known.operand);
  converted.rows = known.rows_max;
  converted.cols = known.cols;
  converted.recipe = F8_TRY(one_recipe("float8_quantizer_desc", known.recipe, known.custom_recipe));
  converted.dtype = F8_TRY(dtype_of("float8_quantizer_desc.dtype", known.dtype));
  converted.f32_source = known.f32_source != 0;
  converted.non_finite = non_finite_of(known.non_finite);
  converted.count = known.count != 0;
  converted.scale_apart = known.copies == FLOAT8_Q_FOR_RECOMPUTE;
  converted.recast = known.copies == FLOAT8_QT_FOR_RECOMPUTE;
  converted.q = known.copies != FLOAT8_QT_ALONE && !converted.recast;
  converted.qt = known.copies != FLOAT8_Q_ALONE && !converted.scale_apart;
  converted.over_ranks = known.over_ranks != 0;
  converted.whole_rows = known.whole_rows;
  converted.noop_flag = known.noop_flag != 0;
  F8_TRY(check_enum("float8_quantizer_desc.source", known.source,
                    FLOAT8_MERGED_GLU_BACKWARD_UP_FIRST));
  F8_TRY(check_enum("float8_quantizer_desc.activation", known.activation, FLOAT8_RELU2));
  converted.source = static_cast<f8::runtime::CastSource>(known.source);
  converted.activation = static_cast<f8::codegen::Activation>(known.activation);
  converted.column_sums = known.column_sums != 0;
  converted.less_workspace = known.less_workspace != 0;
  return converted;
}

}  // namespace

float8_status float8_tensor_layout(const float8_quantizer_desc* desc, int64_t rows,
                                   float8_layout* layout) {
  return guarded([&]() -> f8::Status {
    const f8::runtime::QuantizerDesc converted = F8_TRY(described(desc));
    const auto at = F8_TRY(f8::runtime::Quantizer::layout_of(converted, rows));
    return write_struct("float8_layout", at, layout);
  });
}

float8_status float8_quantizer_plan(float8_context* context, const float8_quantizer_desc* desc,
                                    float8_quantizer** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    const f8::runtime::QuantizerDesc converted = F8_TRY(described(desc));
    auto quantizer = F8_TRY(f8::runtime::Quantizer::plan(context->context, converted));
    *out = new float8_quantizer{std::move(quantizer)};
    return {};
  });
}

void float8_quantizer_destroy(float8_quantizer* quantizer) {
  destroy(quantizer);
}

size_t float8_quantizer_tensor_bytes(const float8_quantizer* quantizer) {
  return quantizer == nullptr ? 0 : quantizer->quantizer->tensor_bytes();
}

size_t float8_quantizer_transposed_bytes(const float8_quantizer* quantizer) {
  return quantizer == nullptr ? 0 : quantizer->quantizer->transposed_bytes();
}

size_t float8_quantizer_workspace_bytes(const float8_quantizer* quantizer) {
  return quantizer == nullptr ? 0 : quantizer->quantizer->workspace_bytes();
}

size_t float8_quantizer_step_workspace_bytes(const float8_quantizer* quantizer,
                                             int32_t first_step) {
  return quantizer == nullptr ? 0 : quantizer->quantizer->workspace_bytes(first_step != 0);
}

size_t float8_quantizer_amax_words(const float8_quantizer* quantizer) {
  return quantizer == nullptr ? 0 : static_cast<size_t>(quantizer->quantizer->amax_words());
}

size_t float8_quantizer_row_amax_words(const float8_quantizer* quantizer) {
  return quantizer == nullptr ? 0 : static_cast<size_t>(quantizer->quantizer->row_amax_words());
}

float8_status float8_quantizer_view(const float8_quantizer* quantizer, const void* tensor,
                                    const void* transposed, int64_t rows, float8_tensor* out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(quantizer, "quantizer"));
    return write_struct("out", F8_TRY(quantizer->quantizer->view(tensor, transposed, rows)), out);
  });
}

float8_status float8_quantize(const float8_quantizer* quantizer, const float8_quantize_args* args,
                              float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_quantize_args known;
    HeldCast held;
    F8_TRY(read_call(quantizer, args, known, held));
    const f8::runtime::Quantizer& plan = *quantizer->quantizer;
    return plan.run(known, stream, F8_TRY(reducer_of(plan, held.step)));
  });
}

float8_status float8_quantize_amax(const float8_quantizer* quantizer,
                                   const float8_quantize_args* args, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_quantize_args known;
    HeldCast held;
    F8_TRY(read_call(quantizer, args, known, held));
    return quantizer->quantizer->find_amax(known, stream);
  });
}

float8_status float8_quantizer_list_plan(float8_context* context,
                                         const float8_quantizer* const* quantizers, size_t count,
                                         float8_quantizer_list** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    if (count > 0) F8_TRY(need(quantizers, "quantizers"));
    std::vector<std::shared_ptr<const f8::runtime::Quantizer>> list;
    for (size_t i = 0; i < count; ++i) {
      list.push_back(quantizers[i] == nullptr ? nullptr : quantizers[i]->quantizer);
    }
    auto casts = F8_TRY(f8::runtime::QuantizerList::plan(context->context, list));
    *out = new float8_quantizer_list{std::move(casts), std::move(list)};
    return {};
  });
}

void float8_quantizer_list_destroy(float8_quantizer_list* list) {
  destroy(list);
}

size_t float8_quantizer_list_workspace_bytes(const float8_quantizer_list* list) {
  return list == nullptr ? 0 : list->casts.workspace_bytes();
}

float8_status float8_quantize_list(const float8_quantizer_list* list,
                                   const float8_quantize_list_args* args, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_quantize_list_args known;
    float8_step step;
    F8_TRY(read_call(list, args, known, step));
    f8::runtime::AmaxReducer reduce = nullptr;
    for (const auto& quantizer : list->quantizers) {
      const auto found = F8_TRY(reducer_of(*quantizer, step));
      if (found != nullptr) reduce = found;
    }
    return list->casts.run(known, stream, reduce);
  });
}

float8_status float8_quantize_list_amax(const float8_quantizer_list* list,
                                        const float8_quantize_list_args* args,
                                        float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_quantize_list_args known;
    float8_step step;
    F8_TRY(read_call(list, args, known, step));
    return list->casts.find_amax(known, stream);
  });
}

float8_status float8_gemm_plan_create(float8_context* context, const float8_gemm_desc* desc,
                                      float8_gemm_plan** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_gemm_desc known;
    F8_TRY(read_struct(desc, "float8_gemm_desc", known));
    F8_TRY(need_zero("float8_gemm_desc.reserved", known.reserved));
    F8_TRY(check_enum("float8_gemm_desc.gemm", known.gemm, FLOAT8_GRAD_WEIGHT));
    f8::runtime::TensorGemmDesc converted;
    converted.gemm = static_cast<f8::Gemm>(known.gemm);
    converted.shape = {known.m_max, known.n, known.k};
    converted.recipe = F8_TRY(one_recipe("float8_gemm_desc", known.recipe, known.custom_recipe));
    converted.d = F8_TRY(dtype_of("float8_gemm_desc.d_dtype", known.d_dtype));
    converted.bias = known.bias != 0;
    converted.add = known.accumulate != 0;
    converted.sm_limit = F8_TRY(sm_limit_of("float8_gemm_desc.sm_limit", known.sm_limit));
    auto gemm = F8_TRY(f8::runtime::TensorGemm::plan(context->context, converted));
    *out = new float8_gemm_plan{std::move(gemm)};
    return {};
  });
}

void float8_gemm_plan_destroy(float8_gemm_plan* plan) {
  destroy(plan);
}

size_t float8_gemm_workspace_bytes(const float8_gemm_plan* plan) {
  return plan == nullptr ? 0 : plan->gemm.workspace_bytes();
}

float8_status float8_gemm(const float8_gemm_plan* plan, const float8_gemm_args* args,
                          float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(plan, "plan"));
    float8_gemm_args known;
    F8_TRY(read_struct(args, "float8_gemm_args", known));
    F8_TRY(check_result("float8_gemm_args", "d", known.d, true));
    F8_TRY(check_bytes("float8_gemm_args", "workspace", known.workspace,
                       plan->gemm.workspace_bytes()));
    float8_tensor a, b;
    F8_TRY(read_tensor("float8_gemm_args.a", known.a, a));
    F8_TRY(read_tensor("float8_gemm_args.b", known.b, b));
    return plan->gemm.run(known, stream);
  });
}

float8_status float8_weights_compare(float8_context* context, const float8_fingerprint_args* args,
                                     size_t count, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    if (count > 0) F8_TRY(need(args, "args"));
    const f8::runtime::FingerprintCalls calls{count, args};
    for (size_t i = 0; i < count; ++i) {
      float8_fingerprint_args known;
      f8::Status good = read_element(calls.given(i), args, "float8_fingerprint_args", known);
      if (good) good = need_plain("float8_fingerprint_args", "w", known.w);
      if (good) good = need_zero("float8_fingerprint_args.reserved", known.reserved);
      if (good) good = check_enum("float8_fingerprint_args.dtype", known.dtype, FLOAT8_F16);
      if (!good) [[unlikely]] {
        good.error().message = f8::format("args[{}]: {}", i, good.error().message);
        return good;
      }
    }
    return f8::runtime::compare_weights(*context->context, calls, stream);
  });
}
