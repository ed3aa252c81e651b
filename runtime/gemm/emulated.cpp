#include "runtime/gemm/emulated.hpp"

#include "runtime/emulation/matmul.hpp"
#include "runtime/emulation/stream.hpp"
#include "runtime/gemm/cublaslt.hpp"

namespace f8::runtime {
namespace {

// The operands lie as cuBLASLt takes them: fp8 ones are contiguous along K, others are the tensors
// themselves.
emulation::Matmul library_matmul(const GemmDesc& desc, const GemmCall& call) {
  const Shape own = gemm_shape(call_shape(desc, call), desc.gemm);
  emulation::Matmul matmul{.m = own.m,
                           .n = own.n,
                           .k = own.k,
                           .a = {.base = call.a, .type = desc.a},
                           .b = {.base = call.b, .type = desc.b},
                           .d = call.d,
                           .d_type = desc.d,
                           .ld_d = call.ld_d == 0 ? own.n : call.ld_d,
                           .bias = desc.bias ? call.bias : nullptr,
                           .add = desc.add,
                           .round_before_add = false};
  if (is_fp8(desc.a)) {
    const bool block = is_block(desc.scale);
    const ScaleStrides strides = scale_strides(desc, own);
    matmul.a.row_stride = matmul.b.row_stride = row_pitch(own.k);
    matmul.scale_a = {call.inv_scale_a, block ? codegen::ScaleMode::kBlock1x128 : desc.scale,
                      strides.a};
    matmul.scale_b = {call.inv_scale_b, desc.scale, strides.b};
    return matmul;
  }
  // A gradient reads dy, x or w by columns where it sums over their rows.
  const OperandExtents extents = high_precision_extents(desc.gemm, call_shape(desc, call));
  const auto read = [](emulation::Elements& of, int64_t ld, bool by_column) {
    of.row_stride = by_column ? 1 : ld;
    of.column_stride = by_column ? ld : 1;
  };
  read(matmul.a, call.ld_a == 0 ? extents.a.cols : call.ld_a, desc.gemm == Gemm::kGradWeight);
  read(matmul.b, call.ld_b == 0 ? extents.b.cols : call.ld_b, desc.gemm != Gemm::kOutput);
  return matmul;
}

class LibraryGemm final : public GemmPlan {
 public:
  LibraryGemm(std::shared_ptr<Context> context, const GemmDesc& desc, const GemmChoice& choice)
      : GemmPlan(desc, choice), context_(std::move(context)) {}

  size_t workspace_bytes() const override { return 0; }

  Status run(const GemmCall& call, void* workspace, Stream stream) const override {
    F8_TRY(validate(desc_, call, workspace, 0));
    if (call.m == 0) return run_empty(*context_, desc_, call, stream);
    return context_->state().driver.check(
        emulation::enqueue(stream,
                           [matmul = library_matmul(desc_, call)] {
                             emulation::compute(matmul);
                             return CUDA_SUCCESS;
                           }),
        "emulated cublasLtMatmul");
  }

 private:
  std::shared_ptr<Context> context_;
};

}  // namespace

Result<GemmPlanPtr> create_emulated(const std::shared_ptr<Context>& context, const GemmDesc& desc,
                                    const GemmChoice& choice) {
  GemmChoice one = choice;
  if (choice.heuristic == kRankedFirst) one.heuristic = 0;  // all are alike here
  if (one.heuristic < 0 || one.heuristic >= kHeuristics) {
    return fail(ErrorCode::kUnsupported,
                "gemm {}: heuristic {} was asked for; h0 to h{} stand here", to_string(desc.gemm),
                config_text(choice), kHeuristics - 1);
  }
  return std::make_shared<const LibraryGemm>(context, desc, one);
}

}  // namespace f8::runtime
