// cuBLASLt as a provider. It speaks of column-major matrices, so it computes d^T = b a^T: its A is
// our b, its B our a, its scales likewise. Descriptors live on the stack of each call (initialising
// one allocates nothing), so a plan is immutable and serves any m up to its own.
//
//   fp8 (tn)                A = b, transposed        B = a
//   output                  A = w, transposed        B = x            of bf16, f16 or f32
//   grad_input              A = w                    B = dy
//   grad_weight             A = x                    B = dy, transposed
// Sums are fp32; f32 operands stay fp32 (CUBLAS_COMPUTE_32F), which uses no tensor core.
// The K of an fp8 grad_weight is M rounded up to 16: the cast kernels fill it up with zeros.
#include "runtime/gemm/cublaslt.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

namespace f8::runtime {
namespace {

constexpr uint64_t kMaxWorkspaceBytes = 32 << 20;
constexpr uint32_t kAlignment = 16;  // gemm.hpp asks this of pointers

cudaDataType cuda_type(Dtype t) {
  switch (t) {
    case Dtype::kE4m3:
      return CUDA_R_8F_E4M3;
    case Dtype::kE5m2:
      return CUDA_R_8F_E5M2;
    case Dtype::kBf16:
      return CUDA_R_16BF;
    case Dtype::kF16:
      return CUDA_R_16F;
    case Dtype::kF32:
      return CUDA_R_32F;
  }
  return CUDA_R_32F;
}

// A GEMM in cuBLASLt's terms.
struct Matmul {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t d;
};

template <class T>
Status set(const CublasLt& lib, Matmul& matmul, cublasLtMatmulDescAttributes_t which, T value) {
  return lib.check(lib.desc_set(&matmul.desc, which, &value, sizeof value),
                   "cublasLtMatmulDescSetAttribute");
}

// A row-major [rows][cols] matrix is a column-major one of cols x rows.
Status set_layout(const CublasLt& lib, cublasLtMatrixLayoutOpaque_t& layout, Dtype type,
                  Extent extent, int64_t ld = 0) {
  return lib.check(
      lib.layout_init(&layout, sizeof layout, cuda_type(type), static_cast<uint64_t>(extent.cols),
                      static_cast<uint64_t>(extent.rows), ld == 0 ? extent.cols : ld),
      "cublasLtMatrixLayoutInit");
}

// The scale modes of our operands, which are the library's in reverse order.
struct ScaleModes {
  int32_t a, b;
};
ScaleModes scale_modes(codegen::ScaleMode mode) {
  switch (mode) {
    case codegen::ScaleMode::kTensor:
      return {CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F};
    case codegen::ScaleMode::kAxis:
      return {CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
              CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F};
    case codegen::ScaleMode::kBlock1x128:
      return {CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F};
    case codegen::ScaleMode::kBlock128x128:
      return {CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F};
  }
  return {};
}

// `call` gives m, scales and bias.
Status describe(const CublasLt& lib, const GemmDesc& desc, const GemmCall& call, Matmul& out) {
  F8_TRY(lib.check(lib.desc_init(&out.desc, sizeof out.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                   "cublasLtMatmulDescInit"));
  const Shape linear = call_shape(desc, call);
  const Shape own = gemm_shape(linear, desc.gemm);
  cublasOperation_t op_a = CUBLAS_OP_T;
  cublasOperation_t op_b = CUBLAS_OP_N;
  if (is_fp8(desc.a)) {
    F8_TRY(set_layout(lib, out.a, desc.b, {own.n, padded(own.k)}, row_pitch(own.k)));
    F8_TRY(set_layout(lib, out.b, desc.a, {own.m, padded(own.k)}, row_pitch(own.k)));
    F8_TRY(set<int8_t>(lib, out, CUBLASLT_MATMUL_DESC_FAST_ACCUM, desc.fast ? 1 : 0));
    F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, call.inv_scale_b));
    F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, call.inv_scale_a));
    if (desc.scale != codegen::ScaleMode::kTensor) {
      const ScaleModes modes = scale_modes(desc.scale);
      F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, modes.b));
      F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, modes.a));
    }
  } else {
    const OperandExtents extents = high_precision_extents(desc.gemm, linear);
    if (desc.gemm != Gemm::kOutput) op_a = CUBLAS_OP_N;
    if (desc.gemm == Gemm::kGradWeight) op_b = CUBLAS_OP_T;
    F8_TRY(set_layout(lib, out.a, desc.b, extents.b, call.ld_b));
    F8_TRY(set_layout(lib, out.b, desc.a, extents.a, call.ld_a));
  }
  if (desc.sm_limit > 0) {
    F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, int32_t{desc.sm_limit}));
  }
  if (desc.bias) {
    F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS));
    F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(desc.d)));
    F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_BIAS_POINTER, call.bias));
  }
  F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_TRANSA, op_a));
  F8_TRY(set(lib, out, CUBLASLT_MATMUL_DESC_TRANSB, op_b));
  return set_layout(lib, out.d, desc.d, {own.m, own.n}, call.ld_d);
}

Result<cublasLtHandle_t> handle(Context::State& state, const CublasLt& lib) {
  const std::lock_guard lock(state.cublaslt_mutex);
  if (state.cublaslt == nullptr) {
    F8_TRY(lib.check(lib.create(&state.cublaslt), "cublasLtCreate"));
  }
  return state.cublaslt;
}

// Gives the algorithms that cuBLASLt offers, the best by its own judgement first, or none. Those whose
// reductions are not in `reductions` (a mask of cublasLtReductionScheme_t) are left out.
Result<std::vector<cublasLtMatmulHeuristicResult_t>> heuristics(
    Context& context, const GemmDesc& desc, int most,
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK) {
  const CublasLt& lib = *F8_TRY(cublaslt());
  Context::State& state = context.state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const cublasLtHandle_t library = F8_TRY(handle(state, lib));

  // The search looks at whether scales are set, not at what they point to.
  const float* placeholder = reinterpret_cast<const float*>(uintptr_t{kAlignment});
  Matmul matmul;
  const GemmCall call{.inv_scale_a = placeholder,
                      .inv_scale_b = placeholder,
                      .m = desc.shape.m,
                      .bias = placeholder};
  F8_TRY(describe(lib, desc, call, matmul));
  cublasLtMatmulPreferenceOpaque_t preference;
  F8_TRY(lib.check(lib.preference_init(&preference, sizeof preference),
                   "cublasLtMatmulPreferenceInit"));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
    return lib.check(lib.preference_set(&preference, which, &value, sizeof value),
                     "cublasLtMatmulPreferenceSetAttribute");
  };
  F8_TRY(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMaxWorkspaceBytes));
  F8_TRY(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions));
  for (const auto which :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    F8_TRY(prefer(which, kAlignment));
  }
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(std::max(most, 1)));
  int count = 0;
  const cublasStatus_t status =
      lib.algo_heuristic(library, &matmul.desc, &matmul.a, &matmul.b, &matmul.d, &matmul.d,
                         &preference, static_cast<int>(found.size()), found.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE)
    count = 0;
  else
    F8_TRY(lib.check(status, "cublasLtMatmulAlgoGetHeuristic"));
  found.resize(static_cast<size_t>(count));
  std::erase_if(found, [](const auto& h) { return h.state != CUBLAS_STATUS_SUCCESS; });
  return found;
}

// The sizes behind the library's numbers, of d^T: the tiles that suggestions for 16-bit operands have,
// and the clusters of CTAs.
struct Rectangle {
  int id = 0, rows = 0, cols = 0;
};
#define F8_SIZE(name, m, n) \
  Rectangle {               \
    CUBLASLT_##name, m, n   \
  }
#define F8_TILE(m, n) F8_SIZE(MATMUL_TILE_##m##x##n, m, n)
#define F8_CLUSTER(m, n) F8_SIZE(CLUSTER_SHAPE_##m##x##n##x1, m, n)
constexpr std::array kTiles = {
    F8_TILE(32, 64),   F8_TILE(32, 128),  F8_TILE(32, 192),  F8_TILE(32, 256),  F8_TILE(32, 384),
    F8_TILE(32, 512),  F8_TILE(64, 32),   F8_TILE(64, 64),   F8_TILE(64, 96),   F8_TILE(64, 128),
    F8_TILE(64, 160),  F8_TILE(64, 192),  F8_TILE(64, 224),  F8_TILE(64, 256),  F8_TILE(64, 288),
    F8_TILE(64, 352),  F8_TILE(64, 384),  F8_TILE(64, 416),  F8_TILE(64, 480),  F8_TILE(64, 512),
    F8_TILE(96, 64),   F8_TILE(96, 128),  F8_TILE(96, 192),  F8_TILE(96, 256),  F8_TILE(96, 384),
    F8_TILE(128, 32),  F8_TILE(128, 64),  F8_TILE(128, 96),  F8_TILE(128, 128), F8_TILE(128, 160),
    F8_TILE(128, 192), F8_TILE(128, 224), F8_TILE(128, 256), F8_TILE(128, 288), F8_TILE(160, 64),
    F8_TILE(160, 128), F8_TILE(160, 192), F8_TILE(160, 256), F8_TILE(192, 32),  F8_TILE(192, 64),
    F8_TILE(192, 96),  F8_TILE(192, 128), F8_TILE(192, 160), F8_TILE(192, 192), F8_TILE(224, 64),
    F8_TILE(224, 128), F8_TILE(256, 32),  F8_TILE(256, 64),  F8_TILE(256, 96),  F8_TILE(256, 128),
    F8_TILE(256, 160), F8_TILE(288, 64),  F8_TILE(288, 128), F8_TILE(320, 64),  F8_TILE(320, 128),
    F8_TILE(352, 64),  F8_TILE(384, 32),  F8_TILE(384, 64),  F8_TILE(384, 96),  F8_TILE(416, 64),
    F8_TILE(448, 64),  F8_TILE(480, 64),  F8_TILE(512, 32),  F8_TILE(512, 64)};
constexpr std::array kClusters = {F8_CLUSTER(1, 1), F8_CLUSTER(2, 1), F8_CLUSTER(4, 1),
                                  F8_CLUSTER(1, 2), F8_CLUSTER(2, 2), F8_CLUSTER(4, 2),
                                  F8_CLUSTER(1, 4), F8_CLUSTER(2, 4), F8_CLUSTER(4, 4),
                                  F8_CLUSTER(8, 1), F8_CLUSTER(1, 8)};
#undef F8_TILE
#undef F8_CLUSTER
#undef F8_SIZE

// A number that is not listed is of no size.
Rectangle find(std::span<const Rectangle> all, int id) {
  const auto found = std::ranges::find(all, id, &Rectangle::id);
  return found == all.end() ? Rectangle{} : *found;
}

// An attribute of an algorithm; 0 where the library has none of this kind.
template <class T>
T attribute(const CublasLt& lib, const cublasLtMatmulAlgo_t& algo,
            cublasLtMatmulAlgoConfigAttributes_t which) {
  T value = 0;
  size_t written = 0;
  const cublasStatus_t status = lib.algo_get(&algo, which, &value, sizeof value, &written);
  return status == CUBLAS_STATUS_SUCCESS ? value : T{0};
}

Suggestion describe(const CublasLt& lib, const cublasLtMatmulAlgo_t& algo) {
  const auto tile_id = attribute<uint32_t>(lib, algo, CUBLASLT_ALGO_CONFIG_TILE_ID);
  const auto cluster_id = attribute<uint16_t>(lib, algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);
  const Rectangle tile = find(kTiles, static_cast<int>(tile_id));
  const Rectangle cluster = find(kClusters, cluster_id);
  return {.algorithm = attribute<int32_t>(lib, algo, CUBLASLT_ALGO_CONFIG_ID),
          .tile_m = tile.cols,
          .tile_n = tile.rows,
          .cluster_m = cluster.cols,
          .cluster_n = cluster.rows,
          .split_k = std::max(1, attribute<int32_t>(lib, algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM))};
}

Suggestions describe(const Context& context, const CublasLt& lib, const GemmDesc& desc,
                     std::span<const cublasLtMatmulHeuristicResult_t> found) {
  Suggestions suggestions;
  for (const auto& one : found) suggestions.all.push_back(describe(lib, one.algo));
  suggestions.unmeasured = unmeasured_suggestion(desc);
  if (suggestions.unmeasured == kRankedFirst) {
    suggestions.unmeasured =
        static_cast<int>(rank_first(suggestions.all, gemm_shape(desc.shape, desc.gemm),
                                    usable_sms(desc, context.device().sm_count)));
  }
  return suggestions;
}

// cuBLASLt of CUDA 13.0 loses the end of K where it splits K and one or two rows are alone in a block of
// 64: the sums of 16-bit operands over 513, 1025, 1026, 3073 and other rows lack the last ones on an
// H100, in each algorithm that splits.
constexpr int64_t kWholeBlock = 64;
bool splits_are_whole(const GemmDesc& desc, int64_t m) {
  return desc.gemm != Gemm::kGradWeight || is_fp8(desc.a) || m % kWholeBlock == 0;
}

class CublasLtGemm final : public GemmPlan {
 public:
  // `unsplit` serves where `heuristic` splits K and splits_are_whole() does not hold.
  CublasLtGemm(std::shared_ptr<Context> context, const GemmDesc& desc, const GemmChoice& choice,
               const CublasLt& lib, const cublasLtMatmulHeuristicResult_t& heuristic,
               const cublasLtMatmulHeuristicResult_t& unsplit)
      : GemmPlan(desc, choice),
        context_(std::move(context)),
        driver_(context_->state().driver),
        primary_(context_->state().primary),
        library_(context_->state().cublaslt),
        lib_(lib),
        algo_(heuristic.algo),
        unsplit_(unsplit.algo),
        workspace_bytes_(std::max(heuristic.workspaceSize, unsplit.workspaceSize)) {}

  size_t workspace_bytes() const override { return workspace_bytes_; }

  Status run(const GemmCall& call, void* workspace, Stream stream) const override {
    F8_TRY(validate(desc_, call, workspace, workspace_bytes_));
    if (call.m == 0) return run_empty(*context_, desc_, call, stream);
    if (!is_aligned(call.inv_scale_a) || !is_aligned(call.inv_scale_b)) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm {}: cuBLASLt takes inverse scales at 16-byte boundaries alone",
                  to_string(desc_.gemm));
    }
    const ScopedContext current(driver_, primary_);
    F8_TRY(current.status());
    Matmul matmul;
    F8_TRY(describe(lib_, desc_, call, matmul));
    const float alpha = 1;
    const float beta = desc_.add ? 1 : 0;
    const auto* const algo = splits_are_whole(desc_, call.m) ? &algo_ : &unsplit_;
    const cublasStatus_t status = lib_.matmul(library_, &matmul.desc, &alpha, call.b, &matmul.a,
                                              call.a, &matmul.b, &beta, call.d, &matmul.d, call.d,
                                              &matmul.d, algo, workspace, workspace_bytes_, stream);
    if (status == CUBLAS_STATUS_SUCCESS) [[likely]] {
      return {};
    }
    Error error = lib_.check(status, "cublasLtMatmul").error();
    error.message += f8::format(", gemm {} by heuristic {} planned for m={}, called with m={}{}",
                                to_string(desc_.gemm), choice_.heuristic, desc_.shape.m, call.m,
                                call.m == desc_.shape.m ? "" : "; plan for this m separately");
    return std::unexpected(std::move(error));
  }

 private:
  std::shared_ptr<Context> context_;
  const Driver& driver_;
  CUcontext primary_;
  cublasLtHandle_t library_;
  const CublasLt& lib_;
  cublasLtMatmulAlgo_t algo_, unsplit_;
  size_t workspace_bytes_;
};

}  // namespace

Status check_cublaslt(const GemmDesc& desc) {
  if (desc.shards) {
    return fail(
        ErrorCode::kUnsupported,
        "gemm {}: cuBLASLt, which is the choice for {}, reads no operand in shards; give it "
        "the whole of it in one piece",
        to_string(desc.gemm), to_string(desc.shape));
  }
  if (desc.amax || desc.scalar_a != desc.scalar_b) {
    return fail(ErrorCode::kUnsupported, "gemm {}: cuBLASLt has no {}; choose a generated kernel",
                to_string(desc.gemm),
                desc.amax ? "amax of a bf16 or f32 result" : "mix of a tensor's and rows' scales");
  }
  return {};
}

Result<GemmPlanPtr> create_cublaslt(const std::shared_ptr<Context>& context, const GemmDesc& desc,
                                    const GemmChoice& choice) {
  // cuBLASLt may order a short list otherwise than the head of a long one, so the list asked for
  // here is as long as the tuner's.
  const auto found =
      F8_TRY(heuristics(*context, desc, std::max(choice.heuristic + 1, kHeuristics)));
  const CublasLt& lib = *F8_TRY(cublaslt());
  if (found.empty()) {
    return fail(ErrorCode::kUnsupported,
                "gemm {}: cuBLASLt cannot multiply {} by {} into {} with {} scales at {}",
                to_string(desc.gemm), to_string(desc.a), to_string(desc.b), to_string(desc.d),
                to_string(desc.scale), to_string(desc.shape));
  }
  GemmChoice one = choice;
  if (choice.heuristic == kRankedFirst) {
    one.heuristic = describe(*context, lib, desc, found).unmeasured;
  }
  const auto index = static_cast<size_t>(one.heuristic);
  if (one.heuristic < 0 || index >= found.size()) {
    return fail(ErrorCode::kUnsupported,
                "gemm {}: heuristic {} was asked for; cuBLASLt offers h0 to h{} at {}",
                to_string(desc.gemm), config_text(choice), found.size() - 1, to_string(desc.shape));
  }
  cublasLtMatmulHeuristicResult_t unsplit = found[index];
  if (!splits_are_whole(desc, 1) && describe(lib, unsplit.algo).split_k > 1) {
    const auto others =
        F8_TRY(heuristics(*context, desc, kHeuristics, CUBLASLT_REDUCTION_SCHEME_NONE));
    const auto whole = std::ranges::find_if(
        others, [&](const auto& other) { return describe(lib, other.algo).split_k == 1; });
    if (whole == others.end()) {
      return fail(ErrorCode::kUnsupported,
                  "gemm {}: cuBLASLt has no kernel that leaves K of {} whole", to_string(desc.gemm),
                  to_string(desc.shape));
    }
    unsplit = *whole;
  }
  return std::make_shared<const CublasLtGemm>(context, desc, one, lib, found[index], unsplit);
}

Result<Suggestions> cublaslt_suggestions(Context& context, const GemmDesc& desc) {
  F8_TRY(validate(desc));
  if (context.device().emulated) {
    return fail(ErrorCode::kUnsupported, "an emulated device has no cuBLASLt to ask");
  }
  const auto found = F8_TRY(heuristics(context, desc, kHeuristics));
  return describe(context, *F8_TRY(cublaslt()), desc, found);
}

Result<std::string> cublaslt_version() {
  const CublasLt* lib = F8_TRY(cublaslt());
  const size_t version = lib->get_version();  // 130100: 13.1.0
  return f8::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace f8::runtime
