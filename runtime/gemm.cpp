// What the providers of a matrix product share: the text of a choice, choosing, checking.
#include "runtime/gemm.hpp"

#include <array>
#include <charconv>
#include <span>

#include "runtime/cost_model.hpp"
#include "runtime/emulation/emulation.hpp"
#include "runtime/gemm_providers.hpp"

namespace f8::runtime {
namespace {

// The table keeps choices by recipe. Recipes whose operands have these scales have the same
// products, so that a row of any of them will do; the first is asked first.
std::span<const char* const> table_recipes(const GemmDesc& desc) {
  static constexpr std::array kTensor = {"tensorwise", "delayed"};
  static constexpr std::array kAxis = {"rowwise", "rowwise_with_gw_hp"};
  static constexpr std::array kMixed = {"rowwise_with_gw_hp", "rowwise"};
  static constexpr std::array kBlock = {"blockwise"};
  static constexpr std::array kKept = {"rowwise_with_gw_hp"};
  if (!is_fp8(desc.a)) return kKept;
  if (codegen::is_block(desc.scale)) return kBlock;
  if (desc.scale == codegen::ScaleMode::kTensor) return kTensor;
  if (desc.scalar_a || desc.scalar_b) return kMixed;
  return kAxis;
}

// Of fp8 operands: the library has no mix of a tensor's and rows' scales, and biases of 16 bits.
bool library_can(const GemmDesc& desc) {
  return !is_fp8(desc.a) ||
         (!desc.scalar_a && !desc.scalar_b && (!desc.bias || desc.d != Dtype::kF32));
}

Problem table_problem(const GemmDesc& desc) {
  Problem problem;
  problem.op = to_op(desc.gemm);
  problem.a = desc.a;
  problem.b = desc.b;
  problem.d = desc.d;
  problem.shape = desc.shape;
  problem.fast = desc.fast;
  return problem;
}

// For exactly this product under any of its recipes, else for one near it; null: the table has none
// that the provider can do.
const KernelChoice* find_choice(const TuningTable& table, const GemmDesc& desc, Dtype result) {
  Problem problem = table_problem(desc);
  problem.d = result;
  const KernelChoice* near = nullptr;
  for (const char* recipe : table_recipes(desc)) {
    problem.recipe = recipe;
    const KernelChoice* found = table.find(problem);
    const bool library = found != nullptr && found->provider == Provider::kCublasLt;
    if (found == nullptr || (library && !library_can(desc))) continue;
    if (!is_fp8(desc.a) && !library) continue;
    if (found->problem.shape == problem.shape) return found;
    if (near == nullptr) near = found;
  }
  return near;
}

}  // namespace

codegen::GemmSpec gemm_spec(const GemmDesc& desc, const codegen::GemmConfig& config) {
  codegen::GemmSpec spec{.a = desc.a,
                         .b = desc.b,
                         .d = desc.d,
                         .scale = desc.scale,
                         .fast = desc.fast,
                         .bias = desc.bias,
                         .add = desc.add,
                         .amax = desc.amax,
                         .config = config};
  spec.pow2 = desc.pow2 && takes_pow2(spec);
  return spec;
}

std::string config_text(const GemmChoice& choice) {
  return choice.provider == Provider::kGenerated ? codegen::key(choice.config)
                                                 : fmt::format("h{}", choice.heuristic);
}

Result<GemmChoice> parse_choice(Provider provider, std::string_view config) {
  GemmChoice choice;
  choice.provider = provider;
  if (provider == Provider::kGenerated) {
    choice.config = F8_TRY(codegen::parse_gemm_config(config));
    return choice;
  }
  const char* end = config.data() + config.size();
  if (config.size() < 2 || config.front() != 'h') {
    return fail(ErrorCode::kInvalidArgument,
                "cublaslt config \"{}\": expected h and a number, as h0", config);
  }
  const auto [stop, error] = std::from_chars(config.data() + 1, end, choice.heuristic);
  if (error != std::errc() || stop != end || choice.heuristic < 0) {
    return fail(ErrorCode::kInvalidArgument,
                "cublaslt config \"{}\": expected h and a number, as h0", config);
  }
  return choice;
}

Status validate(const GemmDesc& desc) {
  F8_TRY(validate_shape(desc.shape));
  const bool fp8 = is_fp8(desc.a) && is_fp8(desc.b);
  if (!fp8 && desc.a != desc.b) {
    return fail(ErrorCode::kUnsupported,
                "gemm {}: operands {} and {}; both must be fp8 (e4m3, e5m2) or of one type",
                to_string(desc.gemm), to_string(desc.a), to_string(desc.b));
  }
  if (is_fp8(desc.d)) {
    return fail(ErrorCode::kUnsupported, "gemm {}: output type {}; bf16, f16 or f32",
                to_string(desc.gemm), to_string(desc.d));
  }
  if (!fp8 && desc.d != desc.a && desc.d != Dtype::kF32) {
    return fail(ErrorCode::kUnsupported,
                "gemm {}: operands in {} give a result in {} or f32, not {}; change the result's "
                "type, or let the recipe cast both operands to fp8",
                to_string(desc.gemm), to_string(desc.a), to_string(desc.a), to_string(desc.d));
  }
  return {};
}

OperandExtents high_precision_extents(Gemm gemm, Shape linear) {
  switch (gemm) {
    case Gemm::kOutput:
      return {{linear.m, linear.k}, {linear.n, linear.k}};
    case Gemm::kGradInput:
      return {{linear.m, linear.n}, {linear.n, linear.k}};
    case Gemm::kGradWeight:
      return {{linear.m, linear.n}, {linear.m, linear.k}};
  }
  return {};
}

bool is_row_stride(int64_t ld, int64_t cols, Dtype type) {
  return ld == 0 ||
         (ld >= cols && ld <= kMaxDim && ld * static_cast<int64_t>(size_bytes(type)) % 16 == 0);
}

namespace {

Status validate_strides(const GemmDesc& desc, const GemmCall& call) {
  const OperandExtents extents = high_precision_extents(desc.gemm, call_shape(desc, call));
  struct {
    const char* name;
    int64_t ld, cols;
    Dtype type;
  } const all[] = {{"a", call.ld_a, extents.a.cols, desc.a},
                   {"b", call.ld_b, extents.b.cols, desc.b},
                   {"d", call.ld_d, gemm_shape(desc.shape, desc.gemm).n, desc.d}};
  for (const auto& [name, ld, cols, type] : all) {
    if (is_fp8(type) ? ld == 0 : is_row_stride(ld, cols, type)) [[likely]] {
      continue;
    }
    return fail(ErrorCode::kInvalidArgument,
                "gemm {}: ld_{} is {}; rows of {} {} elements: at least as many apart, in whole 16 "
                "bytes{}",
                to_string(desc.gemm), name, ld, cols, to_string(type),
                is_fp8(type) ? "; of fp8 operands it is fixed, give 0" : "");
  }
  return {};
}

}  // namespace

Status validate(const GemmDesc& desc, const GemmCall& call, const void* workspace,
                size_t workspace_bytes) {
  const auto invalid = [&](const char* what) {
    return fail(ErrorCode::kInvalidArgument, "gemm {}: {}", to_string(desc.gemm), what);
  };
  if (call.m < 0 || call.m > desc.shape.m) {
    return fail(ErrorCode::kInvalidArgument, "gemm {}: m is {}, the plan was made for 0 to {}",
                to_string(desc.gemm), call.m, desc.shape.m);
  }
  if (call.m == 0 && desc.gemm != Gemm::kGradWeight) return {};
  F8_TRY(validate_strides(desc, call));
  if (call.d == nullptr) return invalid("d is null");
  if (!is_aligned(call.d)) return invalid("d is not aligned to 16 bytes");
  if (call.m == 0) return {};
  if (call.a == nullptr) return invalid("a is null");
  if (call.b == nullptr) return invalid("b is null");
  if (!is_aligned(call.a)) return invalid("a is not aligned to 16 bytes");
  if (!is_aligned(call.b)) return invalid("b is not aligned to 16 bytes");
  if (is_fp8(desc.a) && (call.inv_scale_a == nullptr || call.inv_scale_b == nullptr)) {
    return invalid("inv_scale_a or inv_scale_b is null; fp8 operands need both");
  }
  if (is_fp8(desc.a) && codegen::is_block(desc.scale) &&
      (!is_aligned(call.inv_scale_a) || !is_aligned(call.inv_scale_b))) {
    return invalid(
        "inv_scale_a or inv_scale_b is not aligned to 16 bytes, as block scales must be");
  }
  if (desc.bias) {
    if (call.bias == nullptr) return invalid("bias is null; the plan adds one");
    if (!is_aligned(call.bias)) return invalid("bias is not aligned to 16 bytes");
  }
  if (desc.amax && call.amax == nullptr) return invalid("amax is null; the plan leaves one");
  if (workspace_bytes > 0) {
    if (workspace == nullptr) return invalid("workspace is null; see workspace_bytes()");
    if (!is_aligned(workspace)) return invalid("workspace is not aligned to 16 bytes");
  }
  return {};
}

Status zero(const Driver& driver, CUcontext primary, void* d, int64_t rows, size_t row_bytes,
            size_t pitch_bytes, Stream stream) {
  const ScopedContext current(driver, primary);
  F8_TRY(current.status());
  const auto at = reinterpret_cast<CUdeviceptr>(d);
  const auto height = static_cast<size_t>(rows);
  if (pitch_bytes == row_bytes) {
    return driver.check(driver.memset_d8_async(at, 0, height * row_bytes, stream),
                        "cuMemsetD8Async");
  }
  return driver.check(driver.memset_d2d8_async(at, pitch_bytes, 0, row_bytes, height, stream),
                      "cuMemsetD2D8Async");
}

Status run_empty(Context& context, const GemmDesc& desc, const GemmCall& call, Stream stream) {
  if (desc.gemm != Gemm::kGradWeight || desc.add) return {};
  const size_t element = size_bytes(desc.d);
  const auto row = static_cast<size_t>(desc.shape.k);
  const size_t pitch = call.ld_d == 0 ? row : static_cast<size_t>(call.ld_d);
  return zero(context.state().driver, context.state().primary, call.d, desc.shape.n, row * element,
              pitch * element, stream);
}

Result<GemmChoice> choose_gemm(const TuningTable* table, const GemmDesc& desc, int sm_count) {
  F8_TRY(validate(desc));
  const char* without =
      table == nullptr ? "there is no tuning table" : "the tuning table has no row near this shape";
  if (table != nullptr) {
    const KernelChoice* found = find_choice(*table, desc, desc.d);
    // Results of as many bytes take as long.
    if (found == nullptr && desc.d == Dtype::kF16) found = find_choice(*table, desc, Dtype::kBf16);
    if (found != nullptr) {
      GemmChoice choice = F8_TRY(parse_choice(found->provider, found->config));
      // cuBLASLt numbers its suggestions afresh for every shape and type.
      if (found->problem.shape != desc.shape || found->problem.d != desc.d) choice.heuristic = 0;
      choice.why = found->problem.shape == desc.shape
                       ? "the tuning table's row of this shape"
                       : fmt::format("the tuning table's nearest row, {}", found->problem.key());
      if (choice.provider != Provider::kGenerated) return choice;
      // The row's kernel had no bias and no amax, which take room.
      const auto fitting = codegen::with_fitting_stages(gemm_spec(desc, choice.config));
      if (fitting) {
        choice.config = *fitting;
        return choice;
      }
      without = "the tuning table's configuration has no room for this epilogue";
    }
  }
  GemmChoice choice;
  if (!is_fp8(desc.a)) {
    choice.provider = Provider::kCublasLt;
    choice.why = fmt::format("{}, and high precision is left to cuBLASLt", without);
    return choice;
  }
  choice.why = fmt::format("by the cost model: {}", without);
  choice.config =
      F8_TRY(cheapest_config(gemm_spec(desc, {}), gemm_shape(desc.shape, desc.gemm), sm_count));
  return choice;
}

Result<GemmChoice> GemmPlan::choose(Context& context, const GemmDesc& desc) {
  return choose_gemm(context.table().get(), desc, context.device().sm_count);
}

Result<std::shared_ptr<const GemmPlan>> GemmPlan::create(const std::shared_ptr<Context>& context,
                                                         const GemmDesc& desc,
                                                         const GemmChoice& choice) {
  F8_TRY(validate(desc));
  if (choice.provider == Provider::kGenerated) return create_generated(context, desc, choice);
  return context->device().emulated ? emulation::create_gemm(context, desc, choice)
                                    : create_cublaslt(context, desc, choice);
}

}  // namespace f8::runtime
