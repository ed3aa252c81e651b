// This plans one of a linear's three GEMMs for a provider: a generated kernel, or cuBLASLt, which is
// opened at first use. fp8 operands are contiguous along K ("tn"), as the cast kernels write them:
//
//   gemm          a                  b                  d
//   output        x   [M][ldK]       w   [N][ldK]       y  [M][N]
//   grad_input    dy  [M][ldN]       w^T [K][ldN]       dx [M][K]
//   grad_weight   dy^T[N][ldM]       x^T [K][ldM]       dw [N][K]
// Here ldX is X rounded up to 16, and M is the m of the call; the bytes between X and ldX are zero. Operands
// in high precision (a disabled cast, cuBLASLt only) are the tensors themselves, x [M][K], w
// [N][K], dy [M][N], without a transposed copy; f32 ones are multiplied as fp32, not as TF32. Their
// rows, and those of d, may be further apart than they are long.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recipes/fp8_layout.hpp"
#include "runtime/device/context.hpp"
#include "runtime/gemm/suggestions.hpp"

namespace f8::runtime {

struct GemmDesc {
  Gemm gemm = Gemm::kOutput;
  Shape shape;  // the linear's; m is the largest M that run() may be given
  Dtype a = Dtype::kE4m3;
  Dtype b = Dtype::kE4m3;
  Dtype d = Dtype::kBf16;
  codegen::ScaleMode scale = codegen::ScaleMode::kTensor;
  bool fast = false;
  bool scalar_a = false;  // with scale axis: a has one scale for all of its rows
  bool scalar_b = false;
  bool bias = false;    // d += bias[n], of d's type
  bool add = false;     // d += what d held
  bool amax = false;    // leaves max |d|
  bool pow2 = false;    // all scales are powers of two
  bool shards = false;  // a call's b may lie in shards: [shards][n][K / shards], generated alone
  int sm_limit = 0;     // the most SMs that it takes; 0: all
};

struct GemmChoice : GemmKernel {
  // cublaslt by the cost model: the generated kernel where the library has none or cannot be opened.
  std::optional<GemmConfig> otherwise = {};
  // Where choose_gemm chose it: why, in words, and how many rows near this shape had a vote.
  std::string why = {};
  int neighbours = 0;
  bool operator==(const GemmChoice&) const = default;
};
// The generated kernel for a GEMM of fp8 operands.
[[nodiscard]] codegen::GemmSpec gemm_spec(const GemmDesc& desc, const GemmConfig& config);

struct GemmCall {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  // Device, as codegen's ScaleMode lays them out: 1 value, one for each row of a or of b, or one
  // for each block. cuBLASLt wants both aligned to 16 bytes, and so do block scales.
  const float* inv_scale_a = nullptr;
  const float* inv_scale_b = nullptr;
  int64_t m = 0;               // the linear's M of this call, at most the planned one
  const void* bias = nullptr;  // [n], of d's type
  uint32_t* amax = nullptr;    // bits of max |d| as fp32; zeroed by the caller, raised
  // Row strides in elements, multiples of 16 bytes; 0 is dense. Those of fp8 operands are fixed.
  int64_t ld_a = 0;
  int64_t ld_b = 0;
  int64_t ld_d = 0;
  int64_t shards = 1;  // of b, each of whole 128s of K
};

class GemmPlan {
 public:
  // Takes the choice of the context's table, else the cost model's.
  [[nodiscard]] static Result<GemmChoice> choose(Context& context, const GemmDesc& desc);
  // Fails with kUnsupported where the provider cannot do it: a generated kernel has no operands in
  // high precision, cuBLASLt no e5m2 by e5m2. A choice with `otherwise` gets that kernel then.
  [[nodiscard]] static Result<std::shared_ptr<const GemmPlan>> create(
      const std::shared_ptr<Context>& context, const GemmDesc& desc, const GemmChoice& choice);
  virtual ~GemmPlan() = default;

  [[nodiscard]] virtual size_t workspace_bytes() const = 0;
  // Enqueues on `stream`; no allocation, lock or synchronisation. Thread-safe.
  [[nodiscard]] virtual Status run(const GemmCall& call, void* workspace, Stream stream) const = 0;
  [[nodiscard]] const GemmDesc& desc() const { return desc_; }
  [[nodiscard]] const GemmChoice& choice() const { return choice_; }

 protected:
  GemmPlan(GemmDesc desc, GemmChoice choice) : desc_(desc), choice_(std::move(choice)) {}
  GemmDesc desc_;
  GemmChoice choice_;
};

using GemmPlanPtr = std::shared_ptr<const GemmPlan>;

// Two GEMMs of the same types in one launch, such as the gradients of a backward that one
// configuration computes. Their tiles share one persistent grid, so that the last wave of the one is
// filled by the other.
class GroupedGemm {
 public:
  // Tells whether one launch can compute both: generated, the same types, scales and configuration.
  [[nodiscard]] static bool fits(const GemmDesc& first, const GemmChoice& first_choice,
                                 const GemmDesc& second, const GemmChoice& second_choice);
  [[nodiscard]] static codegen::GemmSpec spec(const GemmDesc& desc, const GemmChoice& choice);
  [[nodiscard]] static Result<std::shared_ptr<const GroupedGemm>> create(
      const std::shared_ptr<Context>& context, const GemmDesc& first, const GemmDesc& second,
      const GemmChoice& choice);
  virtual ~GroupedGemm() = default;
  // This is like GemmPlan::run; neither call may be empty (m = 0).
  [[nodiscard]] virtual Status run(const GemmCall& first, const GemmCall& second,
                                   Stream stream) const = 0;
};

// The suggestions that cuBLASLt has for this GEMM, in its order, and the one that a plan takes where
// none was measured: the one ranked first where it ranks them, else the library's first. Empty: it has
// no kernel.
struct Suggestions {
  std::vector<Suggestion> all;
  int unmeasured = 0;
};
[[nodiscard]] Result<Suggestions> cublaslt_suggestions(Context& context, const GemmDesc& desc);
[[nodiscard]] Result<std::string> cublaslt_version();
// Opens NVRTC and cuBLASLt for their versions; "none" stands for one that cannot be opened.
[[nodiscard]] ToolchainVersions toolchain_versions();

}  // namespace f8::runtime
