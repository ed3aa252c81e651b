// RMSNorms.
#include "float8/norm.h"

#include "runtime/c_abi/common.hpp"
#include "runtime/norm/rms_norm.hpp"

using namespace f8::c_abi;

namespace {

// Checks what both calls have.
template <class Args>
f8::Status check_norm(const char* name, const Args& args) {
  for (const auto& [field, value, last] :
       {std::tuple{"rounding", args.rounding, int32_t{FLOAT8_ROUND_NORMALIZED}},
        {"dtype", args.dtype, int32_t{FLOAT8_F16}},
        {"weight_dtype", args.weight_dtype, int32_t{FLOAT8_F16}},
        {"out_dtype", args.out_dtype, int32_t{FLOAT8_F16}}}) {
    if (value >= 0 && value <= last) continue;
    return f8::fail(f8::ErrorCode::kInvalidArgument, "{}.{} is {}; 0 to {}, see norm.h", name,
                    field, value, last);
  }
  return need_plain(name, "x", args.x);
}

}  // namespace

float8_status float8_rms_norm(float8_context* context, const float8_rms_norm_args* args,
                              float8_stream stream) {
  return guarded([&]() -> f8::Status {
    constexpr const char* kArgs = "float8_rms_norm_args";
    F8_TRY(need(context, "context"));
    float8_rms_norm_args known;
    F8_TRY(read_struct(args, kArgs, known));
    F8_TRY(check_norm(kArgs, known));
    F8_TRY(check_result(kArgs, "y", known.y, false));
    return f8::runtime::rms_norm(*context->context, known, stream);
  });
}

float8_status float8_rms_norm_backward(float8_context* context,
                                       const float8_rms_norm_backward_args* args,
                                       float8_stream stream) {
  return guarded([&]() -> f8::Status {
    constexpr const char* kArgs = "float8_rms_norm_backward_args";
    F8_TRY(need(context, "context"));
    float8_rms_norm_backward_args known;
    F8_TRY(read_struct(args, kArgs, known));
    F8_TRY(need_zero("float8_rms_norm_backward_args.reserved", known.reserved));
    F8_TRY(check_norm(kArgs, known));
    F8_TRY(need_plain(kArgs, "dy", known.dy));
    F8_TRY(check_result(kArgs, "dx", known.dx, false));
    F8_TRY(check_result(kArgs, "dweight", known.dweight, true, true));
    F8_TRY(check_bytes(
        kArgs, "workspace", known.workspace,
        f8::runtime::rms_norm_backward_workspace_bytes(*context->context, known.rows, known.cols)));
    return f8::runtime::rms_norm_backward(*context->context, known, stream);
  });
}

size_t float8_rms_norm_backward_workspace_bytes(const float8_context* context, int64_t rows,
                                                int64_t cols) {
  return context == nullptr
             ? 0
             : f8::runtime::rms_norm_backward_workspace_bytes(*context->context, rows, cols);
}
