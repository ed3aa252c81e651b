#include "ranks/column_wise_grads.hpp"

#include <algorithm>

#include "error.hpp"

namespace train {
namespace {

float8::Gemm plan_gemm(const float8::Context& context, const float8::LinearDesc& linear,
                       const std::string& recipe, float8_gemm_kind kind, float8_dtype d) {
  float8::GemmDesc desc;
  desc.gemm = kind;
  desc.m_max = linear.m_max;
  desc.n = linear.n;
  desc.k = linear.k;
  desc.recipe = float8::Recipe::named(recipe);
  desc.d_dtype = d;
  return float8::Gemm::plan(context, desc).value();
}

}  // namespace

ColumnWiseGrads::ColumnWiseGrads(Backend& backend, const Rank& tp, const float8::LinearDesc& desc,
                                 const std::string& recipe)
    : backend_(backend),
      dy_(backend, tp, recipe, FLOAT8_GRAD_OUTPUT, desc.m_max, desc.n),
      grad_input_(plan_gemm(backend.context(), desc, recipe, FLOAT8_GRAD_INPUT, FLOAT8_BF16)) {
  size_t bytes = grad_input_.workspace_bytes();
  const auto settings = float8::Recipe::named(recipe).settings().value();
  if (settings.grad_weight.a.scaling != FLOAT8_HIGH_PRECISION) {
    grad_weight_ = plan_gemm(backend.context(), desc, recipe, FLOAT8_GRAD_WEIGHT, FLOAT8_F32);
    bytes = std::max(bytes, grad_weight_->workspace_bytes());
  }
  workspace_ = backend.allocate(bytes);
}

void ColumnWiseGrads::run(const float8::Linear& linear, const float8::BackwardArgs& args,
                          void* workspace) {
  dy_tensor_ = dy_.cast(args.dy);
  multiply(grad_input_, *args.w_tensor, args.dx);
  if (!grad_weight_) {
    float8::BackwardArgs weight_alone = args;
    weight_alone.dx = nullptr;
    check(linear.backward(weight_alone, workspace, backend_.stream()));
    return;
  }
  float8::Tensor x;
  check(float8::Status(
      float8_linear_saved_tensors(linear.get(), args.saved, linear.m_max(), 1, &x, nullptr)));
  multiply(*grad_weight_, x, args.dw);
}

void ColumnWiseGrads::multiply(const float8::Gemm& gemm, const float8::Tensor& b, void* d) {
  float8::GemmArgs args;
  args.a = dy_tensor_;
  args.b = &b;
  args.d = d;
  check(gemm.run(args, workspace_, backend_.stream()));
}

}  // namespace train
