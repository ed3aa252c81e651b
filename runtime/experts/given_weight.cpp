// A weight in fp8 that a call of an expert linear is given.
#include "recipes/fp8_layout.hpp"
#include "runtime/experts/experts.hpp"

namespace f8::runtime {
namespace {

// The view of one expert's matrix.
float8_tensor of_one_expert(const float8_tensor& weight, int64_t n) {
  float8_tensor one = weight;
  one.rows = n;
  return one;
}

}  // namespace

Status Experts::check_given(const char* args, const char* name, const float8_tensor& weight,
                            bool forward, bool saves) const {
  const auto [m, n, k] = desc_.shape;
  if (reads_tensors(forward ? Gemm::kOutput : Gemm::kGradInput)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is given, and recipe {} multiplies w as it is; give data", args, name,
                desc_.recipe.name);
  }
  if (weight.rows != desc_.experts * n) {
    return fail(ErrorCode::kInvalidArgument, "{}.{} has {} rows; {} experts have {}", args, name,
                weight.rows, desc_.experts, desc_.experts * n);
  }
  if (forward && saves && this->saves(runtime::Tensor::kWeight)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is given, and the plan saves a copy of w for backward; set "
                "recompute_weight, and give the weight in fp8 to backward too",
                args, name);
  }
  const Copies& copies = at(runtime::Tensor::kWeight).copies;
  F8_TRY(check_tensor(args, name, of_one_expert(weight, n), n, k, copies, forward));
  const bool delayed = (forward ? copies.q : copies.qt)->scaling == Scaling::kDelayed;
  const float8_cast_setting& given = forward ? weight.q_setting : weight.qt_setting;
  if (given.granularity != FLOAT8_TENSOR || delayed == (given.scaling == FLOAT8_DELAYED)) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}.{}.{}_setting has {} scaling; recipe {} has {}: all experts have one scale under "
              "delayed scaling, else one each. Quantize it under the linear's recipe",
              args, name, forward ? "q" : "qt", delayed ? "dynamic" : "delayed", desc_.recipe.name,
              delayed ? "delayed" : "dynamic");
}

void Experts::add_given(CallMemory& memory, const char* name, const float8_tensor& weight,
                        bool forward) const {
  const auto [m, n, k] = desc_.shape;
  const auto add = [&](const void* data, const float* inverse, int64_t lines, int64_t length,
                       int64_t scales, const CastSetting& copy) {
    memory.add(name, data, fp8_copy_bytes(desc_.experts * lines, length), Access::kRead);
    // The last scale of a matrix alone has nothing behind it.
    const int64_t matrices = copy.scaling == Scaling::kDelayed ? 1 : desc_.experts;
    const int64_t count = copy.granularity == Granularity::kTensor
                              ? (matrices - 1) * kernels::kScaleStride + 1
                              : scales;
    memory.add(name, inverse, static_cast<size_t>(count) * sizeof(float), Access::kRead,
               is_block(copy.granularity) ? 16 : sizeof(float));
  };
  const Tensor& w = at(runtime::Tensor::kWeight);
  if (forward) {
    add(weight.q, weight.q_inverse_scale, n, k, row_scales(w), *w.copies.q);
  } else {
    add(weight.qt, weight.qt_inverse_scale, k, n, column_scales(w), *w.copies.qt);
  }
}

}  // namespace f8::runtime
