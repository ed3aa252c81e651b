// Linears and the casts of their weights.
#include "runtime/c_abi/linear.hpp"

#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/ranks.hpp"
#include "runtime/c_abi/recipe.hpp"
#include "runtime/model/first_use.hpp"
#include "runtime/model/info.hpp"

using namespace f8::c_abi;
using f8::ErrorCode;

namespace {

// The caller's args as this version knows them, checked for what no plan has to say.
f8::Status read_args(const float8_weight_args* args, const float8_weight_args* as,
                     size_t cache_bytes, float8_weight_args& known) {
  F8_TRY(read_element(args, as, "float8_weight_args", known));
  F8_TRY(need_zero("float8_weight_args.reserved", known.reserved));
  return check_bytes("float8_weight_args", "cache_bytes", known.cache_bytes, cache_bytes);
}

// The caller's tensors in fp8 as this version knows them.
struct HeldTensors {
  float8_tensor x, w, dy;
};

// The reduction of a call: a first step takes the scales of delayed operands from all ranks.
template <class Args>
f8::Result<f8::runtime::AmaxReducer> reducer_of(const char* field, const f8::runtime::Linear& plan,
                                                const Args& known) {
  bool reduces = known.first_step != 0 && !plan.scale_slots().empty();
  if constexpr (requires { known.evaluate; }) reduces = reduces && known.evaluate == 0;
  return amax_reducer(*plan.context(), field, known.ranks, reduces);
}

// Begins a forward or a backward.
template <class Args>
f8::Status open_call(const char* type, const float8_linear* linear, const Args* args, Args& known,
                     HeldTensors& held) {
  F8_TRY(need(linear, "linear"));
  F8_TRY(read_struct(args, type, known));
  F8_TRY(read_tensor("x_tensor", known.x_tensor, held.x));
  F8_TRY(read_tensor("w_tensor", known.w_tensor, held.w));
  if constexpr (requires { known.dy_tensor; }) {
    F8_TRY(read_tensor("dy_tensor", known.dy_tensor, held.dy));
  }
  if (known.reserved != 0) [[unlikely]] {
    return f8::fail(ErrorCode::kInvalidArgument, "{}.reserved is {}; it must be 0", type,
                    known.reserved);
  }
  const f8::runtime::Linear& plan = *linear->linear;
  F8_TRY(check_bytes(type, "workspace_bytes", known.workspace_bytes, plan.workspace_bytes()));
  if (known.reserved_2 != 0) [[unlikely]] {
    return f8::fail(ErrorCode::kInvalidArgument, "{}.reserved_2 is {}; it must be 0", type,
                    known.reserved_2);
  }
  if (known.saved != nullptr) {
    const bool has_weight = known.weight_cache != nullptr || known.w_tensor != nullptr;
    F8_TRY(check_bytes(type, "saved_bytes", known.saved_bytes,
                       plan.saved_bytes(has_weight, known.x_tensor != nullptr)));
  }
  return check_bytes(type, "weight_cache_bytes", known.weight_cache_bytes,
                     plan.weight_cache_bytes());
}

}  // namespace

namespace f8::c_abi {

Result<runtime::LinearDesc> linear_options(const float8_linear_desc& known) {
  runtime::LinearDesc converted;
  converted.grad_weight_dtype =
      F8_TRY(dtype_of("float8_linear_desc.grad_weight_dtype", known.grad_weight_dtype));
  converted.tensor_dtype = F8_TRY(dtype_of("float8_linear_desc.tensor_dtype", known.tensor_dtype));
  converted.bias_grad_dtype =
      F8_TRY(dtype_of("float8_linear_desc.bias_grad_dtype", known.bias_grad_dtype));
  F8_TRY(check_enum("float8_linear_desc.non_finite", known.non_finite, FLOAT8_HOLD));
  converted.non_finite = non_finite_of(known.non_finite);
  converted.bias_grad = known.bias_grad != 0;
  converted.count = known.count != 0;
  converted.weight_flag = known.weight_flag != 0;
  converted.bias = known.bias != 0;
  converted.accumulate_grad_weight = known.accumulate_grad_weight != 0;
  converted.needs_grad_input = known.no_grad_input == 0;
  converted.recompute = known.recompute != 0;
  if (known.f32_master_weight != 0) converted.master_dtype = Dtype::kF32;
  converted.accumulate_grad_input = known.accumulate_grad_input != 0;
  converted.weight_shards = known.weight_shards != 0;
  F8_TRY(need_zero("float8_linear_desc.reserved", known.reserved));
  converted.sm_limit = F8_TRY(sm_limit_of("float8_linear_desc.sm_limit", known.sm_limit));
  return converted;
}

}  // namespace f8::c_abi

float8_status float8_linear_plan(float8_context* context, const float8_linear_desc* desc,
                                 float8_linear** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_linear_desc known;
    F8_TRY(read_struct(desc, "float8_linear_desc", known));
    f8::runtime::LinearDesc converted = F8_TRY(linear_options(known));
    converted.shape = {known.m_max, known.n, known.k};
    converted.recipe = F8_TRY(one_recipe("float8_linear_desc", known.recipe, known.custom_recipe));
    f8::runtime::tune_first_use(*context->context, converted.recipe, converted.shape);
    auto linear = F8_TRY(f8::runtime::Linear::plan(context->context, converted));
    *out = new float8_linear{std::move(linear)};
    return {};
  });
}

void float8_linear_destroy(float8_linear* linear) {
  destroy(linear);
}

float8_status float8_linear_info(const float8_linear* linear, char* text, size_t bytes,
                                 size_t* needed) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(linear, "linear"));
    return copy_text(f8::runtime::describe(*linear->linear), text, bytes, needed);
  });
}

size_t float8_linear_workspace_bytes(const float8_linear* linear) {
  return linear == nullptr ? 0 : linear->linear->workspace_bytes();
}

size_t float8_linear_saved_bytes(const float8_linear* linear) {
  return linear == nullptr ? 0 : linear->linear->saved_bytes();
}

size_t float8_linear_saved_bytes_with_cache(const float8_linear* linear) {
  return linear == nullptr ? 0 : linear->linear->saved_bytes(true);
}

size_t float8_linear_saved_bytes_with_tensors(const float8_linear* linear, int32_t x_tensor,
                                              int32_t w_tensor) {
  return linear == nullptr ? 0 : linear->linear->saved_bytes(w_tensor != 0, x_tensor != 0);
}

size_t float8_linear_weight_cache_bytes(const float8_linear* linear) {
  return linear == nullptr ? 0 : linear->linear->weight_cache_bytes();
}

float8_status float8_linear_forward(const float8_linear* linear, const float8_forward_args* args,
                                    void* workspace, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_forward_args known;
    HeldTensors held;
    F8_TRY(open_call("float8_forward_args", linear, args, known, held));
    const auto reduce = F8_TRY(reducer_of("float8_forward_args.ranks", *linear->linear, known));
    return linear->linear->forward(known, workspace, stream, reduce);
  });
}

float8_status float8_linear_backward(const float8_linear* linear, const float8_backward_args* args,
                                     void* workspace, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_backward_args known;
    HeldTensors held;
    F8_TRY(open_call("float8_backward_args", linear, args, known, held));
    const auto reduce = F8_TRY(reducer_of("float8_backward_args.ranks", *linear->linear, known));
    return linear->linear->backward(known, workspace, stream, reduce);
  });
}

float8_status float8_linear_saved_tensors(const float8_linear* linear, const void* saved, int64_t m,
                                          int32_t w_tensor, float8_tensor* x, float8_tensor* w) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(linear, "linear"));
    F8_TRY(need(saved, "saved"));
    const f8::runtime::Linear& plan = *linear->linear;
    if (plan.saved_bytes() == 0 || plan.desc().recompute) {
      return f8::fail(ErrorCode::kInvalidArgument,
                      "float8_linear_saved_tensors: the linear saves no copies");
    }
    if (m < 0 || m > plan.desc().shape.m) {
      return f8::fail(ErrorCode::kInvalidArgument, "m is {}, the plan was made for 0 to {}", m,
                      plan.desc().shape.m);
    }
    if (x != nullptr) F8_TRY(write_struct("x", plan.saved_x(saved, m), x));
    if (w == nullptr) return {};
    return write_struct("w", plan.saved_w(w_tensor != 0 ? nullptr : saved), w);
  });
}

float8_status float8_linear_cached_weight(const float8_linear* linear, const void* cache,
                                          float8_tensor* w) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(linear, "linear"));
    F8_TRY(need(cache, "cache"));
    if (linear->linear->weight_cache_bytes() == 0) {
      return f8::fail(ErrorCode::kInvalidArgument,
                      "float8_linear_cached_weight: the recipe never casts the weight");
    }
    return write_struct("w", linear->linear->cached_w(cache), w);
  });
}

float8_status float8_linear_cast_weight(const float8_linear* linear, const float8_weight_args* args,
                                        void* workspace, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(linear, "linear"));
    const f8::runtime::Linear& plan = *linear->linear;
    float8_weight_args known;
    F8_TRY(read_args(args, args, plan.weight_cache_bytes(), known));
    F8_TRY(check_bytes("float8_weight_args", "workspace_bytes", known.workspace_bytes,
                       plan.workspace_bytes()));
    const auto reduce = F8_TRY(reducer_of("float8_weight_args.ranks", plan, known));
    return plan.cast_weight(known, workspace, stream, reduce);
  });
}

float8_status float8_weight_casts_plan(float8_context* context, const float8_linear* const* linears,
                                       size_t count, float8_weight_casts** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    if (count > 0) F8_TRY(need(linears, "linears"));
    std::vector<std::shared_ptr<const f8::runtime::Linear>> list;
    for (size_t i = 0; i < count; ++i) {
      list.push_back(linears[i] == nullptr ? nullptr : linears[i]->linear);
    }
    auto casts = F8_TRY(f8::runtime::WeightCasts::plan(context->context, list));
    *out = new float8_weight_casts{std::move(casts), std::move(list)};
    return {};
  });
}

void float8_weight_casts_destroy(float8_weight_casts* casts) {
  destroy(casts);
}

size_t float8_weight_casts_workspace_bytes(const float8_weight_casts* casts) {
  return casts == nullptr ? 0 : casts->casts.workspace_bytes();
}

float8_status float8_weight_casts_run(const float8_weight_casts* casts,
                                      const float8_weight_args* args, size_t count, void* workspace,
                                      float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(casts, "casts"));
    if (count > 0) F8_TRY(need(args, "args"));
    const f8::runtime::WeightCalls calls{count, args};
    f8::runtime::AmaxReducer reduce = nullptr;
    for (size_t i = 0; i < std::min(count, casts->linears.size()); ++i) {
      float8_weight_args known;
      f8::Status good =
          read_args(calls.given(i), args, casts->linears[i]->weight_cache_bytes(), known);
      if (good) {
        good = check_bytes("float8_weight_args", "workspace_bytes", known.workspace_bytes,
                           casts->casts.workspace_bytes());
      }
      if (good) {
        auto found = reducer_of("float8_weight_args.ranks", *casts->linears[i], known);
        if (found) reduce = *found;
        if (!found) good = std::unexpected(std::move(found).error());
      }
      if (!good) [[unlikely]] {
        good.error().message = f8::format("args[{}]: {}", i, good.error().message);
        return good;
      }
    }
    return casts->casts.run(calls, workspace, stream, reduce);
  });
}

float8_status float8_weights_invalidate(float8_context* context, uint32_t* valid, size_t count,
                                        float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    if (count == 0) return {};
    F8_TRY(need(valid, "valid"));
    return f8::runtime::invalidate_weights(*context->context, valid, count, stream);
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
