// Rotary positions of queries and keys.
#include "runtime/attention/rotary.hpp"

#include "runtime/c_abi/common.hpp"

using namespace f8::c_abi;

float8_status float8_rotary(float8_context* context, const float8_rotary_args* args,
                            float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    float8_rotary_args known;
    F8_TRY(read_struct(args, "float8_rotary_args", known));
    F8_TRY(need_zero("float8_rotary_args.reserved", known.reserved));
    F8_TRY(check_enum("float8_rotary_args.dtype", known.dtype, FLOAT8_F16));
    F8_TRY(check_enum("float8_rotary_args.cos_dtype", known.cos_dtype, FLOAT8_F16));
    F8_TRY(check_enum("float8_rotary_args.out_dtype", known.out_dtype, FLOAT8_F16));
    return f8::runtime::rotary(*context->context, known, stream);
  });
}
