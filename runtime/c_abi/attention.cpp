// Attention.
#include "runtime/attention/provider.hpp"
#include "runtime/c_abi/common.hpp"

using namespace f8::c_abi;

namespace {

using Bytes = size_t (f8::runtime::Attention::*)(const float8_attention_sizes&) const;

size_t bytes_of(const float8_attention* attention, const float8_attention_sizes* sizes,
                Bytes bytes) {
  if (attention == nullptr || sizes == nullptr || !attention->attention->check(*sizes)) return 0;
  return (attention->attention.get()->*bytes)(*sizes);
}

// What a forward left has the bytes of its sizes, which tell them from most others.
f8::Status check_kept(const char* args, const float8_buffer& saved, size_t kept) {
  if (saved.data == nullptr || saved.bytes == 0 || kept == 0 || saved.bytes == kept) return {};
  return f8::fail(f8::ErrorCode::kInvalidArgument,
                  "{}.saved.bytes is {}, and a forward of these sizes leaves {}; give the sizes of "
                  "the forward, and the bytes that it had",
                  args, saved.bytes, kept);
}

f8::Result<f8::AttentionRecipe> recipe_of(int32_t recipe) {
  switch (recipe) {
    case FLOAT8_ATTENTION_FP8_FORWARD:
      return f8::AttentionRecipe::kFp8Forward;
    case FLOAT8_ATTENTION_FP8:
      return f8::AttentionRecipe::kFp8;
    case FLOAT8_ATTENTION_BF16:
      return f8::AttentionRecipe::kBf16;
    default:
      return f8::fail(f8::ErrorCode::kInvalidArgument,
                      "float8_attention_desc.recipe is {}; it is a float8_attention_recipe",
                      recipe);
  }
}

}  // namespace

float8_status float8_attention_plan(float8_context* context, const float8_attention_desc* desc,
                                    float8_attention** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_attention_desc known;
    F8_TRY(read_struct(desc, "float8_attention_desc", known));
    F8_TRY(need_zero("float8_attention_desc.reserved", known.reserved));
    const f8::Dtype dtype = F8_TRY(dtype_of("float8_attention_desc.dtype", known.dtype));
    if (dtype != f8::Dtype::kBf16) {
      return f8::fail(f8::ErrorCode::kUnsupported,
                      "float8_attention_desc.dtype is {}; attention takes FLOAT8_BF16",
                      to_string(dtype));
    }
    const f8::AttentionRecipe recipe = F8_TRY(recipe_of(known.recipe));
    auto plan = F8_TRY(f8::runtime::Attention::plan(context->context, {.heads_q = known.heads_q,
                                                                       .heads_kv = known.heads_kv,
                                                                       .head_dim = known.head_dim,
                                                                       .causal = known.causal != 0,
                                                                       .window = known.window,
                                                                       .scale = known.scale,
                                                                       .packed = known.packed != 0,
                                                                       .recipe = recipe}));
    *out = new float8_attention{std::move(plan)};
    return {};
  });
}

float8_status float8_cudnn_version(int32_t* out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = 0;
    *out = F8_TRY(f8::runtime::cudnn_version());
    return {};
  });
}

void float8_attention_destroy(float8_attention* attention) {
  destroy(attention);
}

size_t float8_attention_saved_bytes(const float8_attention* attention,
                                    const float8_attention_sizes* sizes) {
  return bytes_of(attention, sizes, &f8::runtime::Attention::saved_bytes);
}

size_t float8_attention_workspace_bytes(const float8_attention* attention,
                                        const float8_attention_sizes* sizes) {
  return bytes_of(attention, sizes, &f8::runtime::Attention::workspace_bytes);
}

size_t float8_attention_backward_workspace_bytes(const float8_attention* attention,
                                                 const float8_attention_sizes* sizes) {
  return bytes_of(attention, sizes, &f8::runtime::Attention::backward_workspace_bytes);
}

float8_status float8_attention_forward(const float8_attention* attention,
                                       const float8_attention_forward_args* args,
                                       float8_stream stream) {
  return guarded([&]() -> f8::Status {
    constexpr const char* kType = "float8_attention_forward_args";
    F8_TRY(need(attention, "attention"));
    float8_attention_forward_args known;
    F8_TRY(read_struct(args, kType, known));
    const f8::runtime::Attention& plan = *attention->attention;
    F8_TRY(plan.check(known.sizes));
    F8_TRY(check_bytes(kType, "saved", known.saved, plan.saved_bytes(known.sizes)));
    F8_TRY(check_bytes(kType, "workspace", known.workspace, plan.workspace_bytes(known.sizes)));
    return plan.forward(known, stream);
  });
}

float8_status float8_attention_dequantize(const float8_attention* attention,
                                          const float8_attention_dequantize_args* args,
                                          float8_stream stream) {
  return guarded([&]() -> f8::Status {
    constexpr const char* kType = "float8_attention_dequantize_args";
    F8_TRY(need(attention, "attention"));
    float8_attention_dequantize_args known;
    F8_TRY(read_struct(args, kType, known));
    const f8::runtime::Attention& plan = *attention->attention;
    F8_TRY(plan.check(known.sizes));
    F8_TRY(check_kept(kType, known.saved, plan.saved_bytes(known.sizes)));
    return plan.dequantize(known, stream);
  });
}

float8_status float8_attention_backward(const float8_attention* attention,
                                        const float8_attention_backward_args* args,
                                        float8_stream stream) {
  return guarded([&]() -> f8::Status {
    constexpr const char* kType = "float8_attention_backward_args";
    F8_TRY(need(attention, "attention"));
    float8_attention_backward_args known;
    F8_TRY(read_struct(args, kType, known));
    const f8::runtime::Attention& plan = *attention->attention;
    F8_TRY(plan.check(known.sizes));
    F8_TRY(check_kept(kType, known.saved, plan.saved_bytes(known.sizes)));
    F8_TRY(check_bytes(kType, "workspace", known.workspace,
                       plan.backward_workspace_bytes(known.sizes)));
    return plan.backward(known, stream);
  });
}
