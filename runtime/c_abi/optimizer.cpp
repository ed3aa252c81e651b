// AdamW with the maxima of what it leaves.
#include <deque>
#include <vector>

#include "runtime/c_abi/common.hpp"
#include "runtime/optimizer/adamw.hpp"

using namespace f8::c_abi;

namespace {

f8::Status read_cast(const float8_adamw_tensor& of, f8::runtime::AdamwCast& cast,
                     float8_step& step) {
  F8_TRY(read_struct(of.cast, "float8_adamw_tensor.cast", cast.call));
  F8_TRY(read_step(cast.call.step, step));
  cast.quantizer = of.quantizer->quantizer.get();
  return {};
}

}  // namespace

float8_status float8_adamw(float8_context* context, const float8_adamw_args* args,
                           float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    float8_adamw_args known;
    F8_TRY(read_struct(args, "float8_adamw_args", known));
    F8_TRY(need_zero("float8_adamw_args.reserved", known.reserved));
    if (known.count > 0) F8_TRY(need(known.tensors, "float8_adamw_args.tensors"));
    const f8::runtime::AdamwWeights weights{known.count, known.tensors};
    std::vector<f8::runtime::AdamwCast> casts;  // none where no weight is cast
    std::deque<float8_step> steps;              // to which the casts point
    for (size_t i = 0; i < known.count; ++i) {
      float8_adamw_tensor of;
      f8::Status good = read_element(weights.given(i), weights.first, "float8_adamw_tensor", of);
      if (good) good = check_enum("float8_adamw_tensor.dtype", of.dtype, FLOAT8_F16);
      if (good) good = check_enum("float8_adamw_tensor.cast_dtype", of.cast_dtype, FLOAT8_F16);
      if (good && of.quantizer != nullptr) {
        casts.resize(i + 1);
        good = read_cast(of, casts[i], steps.emplace_back());
      }
      if (!good) [[unlikely]] {
        good.error().message =
            f8::format("float8_adamw_args.tensors[{}]: {}", i, good.error().message);
        return good;
      }
    }
    if (!casts.empty()) casts.resize(known.count);
    return f8::runtime::adamw(*context->context, known, weights, casts, stream);
  });
}
