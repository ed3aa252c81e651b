#include "runtime/linear/tensors/tensor_gemm.hpp"

#include "runtime/linear/tensors/fp8_tensor.hpp"

namespace f8::runtime {

Result<TensorGemm> TensorGemm::plan(const std::shared_ptr<Context>& context,
                                    const TensorGemmDesc& desc) {
  if (!desc.recipe.at(desc.gemm).is_fp8()) {
    return fail(ErrorCode::kUnsupported, "recipe {} has {} in high precision; nothing is in fp8",
                desc.recipe.name, to_string(desc.gemm));
  }
  LinearDesc linear;
  linear.shape = desc.shape;
  linear.recipe = desc.recipe;
  linear.sm_limit = desc.sm_limit;
  const LinearKernels kernels = F8_TRY(linear_kernels(linear));
  GemmDesc gemm = *kernels.gemms[static_cast<size_t>(desc.gemm)];
  if (desc.bias && desc.gemm != Gemm::kOutput) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_gemm_desc.bias is set; FLOAT8_OUTPUT alone adds a bias");
  }
  gemm.d = desc.d;
  gemm.bias = desc.bias;
  gemm.add = desc.add;
  TensorGemm out;
  out.context_ = context;
  const GemmChoice choice = F8_TRY(GemmPlan::choose(*context, gemm));
  out.plan_ = F8_TRY(GemmPlan::create(context, gemm, choice));
  const bool of_dy = desc.gemm != Gemm::kOutput;
  out.copies_ = {kernels.of(of_dy ? Tensor::kGradOutput : Tensor::kInput),
                 kernels.of(desc.gemm == Gemm::kGradWeight ? Tensor::kInput : Tensor::kWeight)};
  out.reads_q_ = {desc.gemm != Gemm::kGradWeight, desc.gemm == Gemm::kOutput};
  return out;
}

Status TensorGemm::run(const TensorGemmCall& call, Stream stream) const {
  constexpr const char* kGemmArgs = "float8_gemm_args";
  const GemmDesc& desc = plan_->desc();
  if (call.a == nullptr || call.b == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.{} is NULL", kGemmArgs,
                call.a == nullptr ? "a" : "b");
  }
  const float8_tensor& a = *call.a;
  const float8_tensor& b = *call.b;
  const auto [m_max, n, k] = desc.shape;
  const int64_t m = a.rows;
  if (m < 0 || m > m_max) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.a has {} rows, the plan was made for 0 to {}",
                kGemmArgs, m, m_max);
  }
  const bool weight = desc.gemm == Gemm::kGradWeight;
  F8_TRY(check_tensor(kGemmArgs, "a", a, m, desc.gemm == Gemm::kOutput ? k : n, copies_[0],
                      reads_q_[0]));
  F8_TRY(check_tensor(kGemmArgs, "b", b, weight ? m : n, k, copies_[1], reads_q_[1]));
  if (!desc.bias && call.bias != nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.bias is given, the plan has none; set float8_gemm_desc.bias", kGemmArgs);
  }
  if ((call.d.accumulate != 0) != desc.add) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.d.accumulate is {}, float8_gemm_desc.accumulate was {} in the plan", kGemmArgs,
                call.d.accumulate, desc.add ? 1 : 0);
  }
  CallMemory memory(kGemmArgs);
  add_tensor(memory, "a", a, copies_[0], reads_q_[0]);
  add_tensor(memory, "b", b, copies_[1], reads_q_[1]);
  memory.add_rows("d", call.d.data, weight ? n : m, desc.gemm == Gemm::kOutput ? n : k, call.d.ld,
                  desc.d, Access::kWrite);
  memory.add_rows("bias", call.bias, 1, n, 0, desc.d, Access::kRead);
  memory.add("workspace", call.workspace.data, workspace_bytes(), Access::kWrite);
  F8_TRY(memory.check("float8_gemm", *context_, stream));
  return plan_->run({.a = reads_q_[0] ? a.q : a.qt,
                     .b = reads_q_[1] ? b.q : b.qt,
                     .d = call.d.data,
                     .inv_scale_a = reads_q_[0] ? a.q_inverse_scale : a.qt_inverse_scale,
                     .inv_scale_b = reads_q_[1] ? b.q_inverse_scale : b.qt_inverse_scale,
                     .m = m,
                     .bias = call.bias,
                     .ld_d = call.d.ld},
                    call.workspace.data, stream);
}

}  // namespace f8::runtime
