#include "tools/tuner/backend/candidate.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/gemm/choose.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "tuning_db/json/json_text.hpp"

namespace f8::tuner {
namespace {

struct Part {
  std::string_view name;
  bool Epilogue::*flag;
};
constexpr std::array kParts = {Part{"bias", &Epilogue::bias}, Part{"amax", &Epilogue::amax},
                               Part{"add", &Epilogue::add}};

constexpr std::array<std::string_view, 12> kImpls = {
    "generated",     "cublaslt", "cublaslt_tensorwise", "bf16_cublaslt", "float8",
    "float8_reused", "bf16",     "cast_list",           "cast_each",     "produce",
    "produce_apart", "copy"};
static_assert(kImpls[static_cast<size_t>(Impl::kCopy)] == "copy");

}  // namespace

std::string to_string(const Epilogue& epilogue) {
  std::string text;
  for (const Part& part : kParts) {
    if (epilogue.*part.flag) text += f8::format("{}{}", text.empty() ? "" : "+", part.name);
  }
  return text.empty() ? "plain" : text;
}

Result<Epilogue> parse_epilogue(std::string_view text) {
  Epilogue epilogue;
  for (std::string_view rest = text;;) {
    const size_t plus = rest.find('+');
    const auto part = std::ranges::find(kParts, rest.substr(0, plus), &Part::name);
    if (part == kParts.end() || epilogue.*part->flag) {
      return fail(ErrorCode::kInvalidArgument,
                  "epilogue \"{}\": want bias, amax or add, each at most once, joined by +", text);
    }
    epilogue.*part->flag = true;
    if (plus == std::string_view::npos) return epilogue;
    rest.remove_prefix(plus + 1);
  }
}

std::string_view to_string(Impl impl) {
  return kImpls[static_cast<size_t>(impl)];
}

std::string impl_text(const Candidate& candidate) {
  const std::string_view impl = to_string(candidate.impl);
  if (candidate.epilogue == Epilogue{}) return std::string(impl);
  return f8::format("{}+{}", impl, to_string(candidate.epilogue));
}

Result<Candidate> parse_candidate(std::string_view impl, std::string config) {
  const size_t plus = impl.find('+');
  const auto found = std::ranges::find(kImpls, impl.substr(0, plus));
  Candidate candidate{.impl = static_cast<Impl>(found - kImpls.begin()),
                      .config = std::move(config)};
  const bool extended = plus != std::string_view::npos;
  if (found == kImpls.end() || (extended && candidate.impl != Impl::kGenerated)) {
    return fail(ErrorCode::kInvalidArgument, "\"{}\" is no kind of candidate", impl);
  }
  if (extended) candidate.epilogue = F8_TRY(parse_epilogue(impl.substr(plus + 1)));
  return candidate;
}

std::string choices_text(const LinearChoices& choices) {
  std::string text;
  for (const runtime::GemmChoice& choice : choices) {
    if (!text.empty()) text += ",";
    text += f8::format("{}:{}", to_string(choice.provider), config_text(choice));
  }
  return text;
}

Result<LinearChoices> parse_choices(std::string_view text) {
  LinearChoices choices;
  std::string_view rest = text;
  for (size_t i = 0; i < choices.size(); ++i) {
    const size_t comma = rest.find(',');
    const std::string_view one = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    const size_t colon = one.find(':');
    const std::string_view provider = one.substr(0, colon);
    const bool known =
        provider == to_string(Provider::kGenerated) || provider == to_string(Provider::kCublasLt);
    if (!known || colon == std::string_view::npos) {
      return fail(ErrorCode::kInvalidArgument,
                  "kernel choices \"{}\": want three of generated:CONFIG or cublaslt:hN, separated "
                  "by commas (output, grad_input, grad_weight)",
                  text);
    }
    choices[i] = {F8_TRY(parse_gemm_kernel(
        provider == to_string(Provider::kGenerated) ? Provider::kGenerated : Provider::kCublasLt,
        one.substr(colon + 1)))};
  }
  if (!rest.empty()) {
    return fail(ErrorCode::kInvalidArgument, "kernel choices \"{}\": more than three", text);
  }
  return choices;
}

std::string choices_text(const MlpChoices& choices) {
  return choices_text(choices.up) + "," + choices_text(choices.down);
}

Result<MlpChoices> parse_mlp_choices(std::string_view text) {
  size_t end = 0;  // of those of up
  for (int i = 0; i < 3 && end != std::string_view::npos; ++i) {
    end = text.find(',', i == 0 ? 0 : end + 1);
  }
  MlpChoices choices;
  choices.up = F8_TRY(parse_choices(text.substr(0, end)));
  choices.down = F8_TRY(parse_choices(end == std::string_view::npos ? "" : text.substr(end + 1)));
  return choices;
}

Result<runtime::GemmDesc> gemm_desc(const Problem& problem, bool bf16, const Epilogue& epilogue) {
  if (!is_gemm(problem.op)) {
    return fail(ErrorCode::kUnsupported, "{} is three GEMMs; name one of them with --op",
                problem.key());
  }
  const auto gemm = to_gemm(problem.op);
  if (bf16) {
    return runtime::GemmDesc{.gemm = gemm,
                             .shape = problem.shape(),
                             .a = Dtype::kBf16,
                             .b = Dtype::kBf16,
                             .d = problem.d,
                             .scale = codegen::ScaleMode::kTensor,
                             .fast = false};
  }
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  const bool grouped_16_bits = problem.op == Op::kGroupedGradWeight;
  if (!recipe.at(gemm).is_fp8() && !grouped_16_bits) {
    return fail(ErrorCode::kUnsupported,
                "{}: recipe {} keeps this GEMM in bf16, so there is no fp8 kernel to measure; name "
                "another --op or --recipe",
                problem.key(), recipe.name);
  }
  // The linear's own description of the GEMM.
  const runtime::LinearKernels kernels =
      F8_TRY(runtime::linear_kernels({.shape = problem.shape(), .recipe = recipe, .choices = {}}));
  runtime::GemmDesc desc = *kernels.gemms[static_cast<size_t>(gemm)];
  desc.a = problem.a;
  desc.b = problem.b;
  desc.d = problem.d;
  desc.fast = problem.fast;
  desc.bias |= epilogue.bias;
  desc.amax |= epilogue.amax;
  desc.add |= epilogue.add;
  return desc;
}

Problem with_one_scale(Problem problem) {
  problem.recipe = std::ranges::find_if(builtin_recipes(), [](const Recipe& recipe) {
                     return std::ranges::all_of(recipe.gemms, [](const GemmSetting& gemm) {
                       return gemm.is_fp8() && gemm.a.granularity == Granularity::kTensor &&
                              gemm.b.granularity == Granularity::kTensor;
                     });
                   })->name;
  return problem;
}

Result<runtime::ExpertsDesc> experts_desc(const Problem& problem) {
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  const Problem own = F8_TRY(Problem::make(problem.op, recipe, problem.dims));
  if (own != problem) {
    return fail(ErrorCode::kUnsupported,
                "{}: expert linears are measured as their recipe has them: {}", problem.key(),
                own.key());
  }
  runtime::ExpertsDesc desc;
  desc.shape = problem.shape();
  desc.experts = problem.groups().experts;
  desc.recipe = recipe;
  return desc;
}

static Result<runtime::GroupedDesc> grouped_desc(const Problem& problem, bool bf16) {
  const int64_t experts = problem.groups().experts;
  return runtime::GroupedDesc{
      .gemm = F8_TRY(gemm_desc(problem, bf16)),
      .layout = F8_TRY(runtime::group_layout_of(problem.shape().m, experts))};
}

Result<runtime::GroupedDesc> grouped_desc(const Problem& problem) {
  return grouped_desc(problem, false);
}

Result<runtime::GroupedDesc> grouped_bf16_desc(const Problem& problem) {
  return grouped_desc(problem, true);
}

Result<codegen::GemmSpec> gemm_spec(const Problem& problem, const Epilogue& epilogue) {
  const runtime::GemmDesc desc = F8_TRY(gemm_desc(problem, false, epilogue));
  return is_grouped(problem.op) ? runtime::grouped_spec(desc) : runtime::gemm_spec(desc, {});
}

std::string gemm_identity(const Problem& problem, bool bf16) {
  if (bf16) {  // its operands' layouts differ between the GEMMs of a linear
    return f8::format("bf16/{}/{}", to_string(problem.op),
                      to_string(problem.dims, spec_of(problem.op).dims));
  }
  if (is_grouped(problem.op)) return problem.key();
  const Shape own = gemm_shape(problem.shape(), to_gemm(problem.op));
  const auto desc = gemm_desc(problem, false);
  const std::string scales =
      desc ? f8::format("{}{}{}", to_string(desc->scale), desc->scalar_a ? "-a" : "",
                        desc->scalar_b ? "-b" : "")
           : problem.recipe;
  return f8::format("{}.{}.{}/{}/{}/{}", to_string(problem.a), to_string(problem.b),
                    to_string(problem.d), scales, problem.fast ? "fast" : "precise",
                    to_string(own));
}

tuning_db::Candidate to_row(const Candidate& candidate, std::string source_hash) {
  nlohmann::json config;
  if (candidate.impl == Impl::kGenerated) {
    config["config"] = candidate.config;
  } else if (candidate.impl == Impl::kFloat8 || candidate.impl == Impl::kBf16) {
    // A linear takes what its GEMMs' tuning chooses; the trial's result holds the kernels.
    config["kernels"] = "tuned";
  } else {
    config["heuristic"] = std::stoi(candidate.config.substr(1));
  }
  return {.impl = tuning_db::parse_impl(to_string(candidate.impl)).value(),
          .config = config.dump(),
          .source_hash = std::move(source_hash)};
}

Candidate to_candidate(const runtime::GemmChoice& choice) {
  return {.impl = choice.provider == Provider::kGenerated ? Impl::kGenerated : Impl::kCublasLt,
          .config = config_text(choice)};
}

Result<runtime::GemmChoice> to_choice(const Candidate& candidate) {
  const bool generated = candidate.impl == Impl::kGenerated;
  return runtime::GemmChoice{F8_TRY(
      parse_gemm_kernel(generated ? Provider::kGenerated : Provider::kCublasLt, candidate.config))};
}

Result<Candidate> from_row(const tuning_db::Candidate& row) {
  const std::string_view impl = to_string(row.impl);
  const bool whole = row.impl == tuning_db::Impl::kFloat8 || row.impl == tuning_db::Impl::kBf16;
  if (whole && tuning_db::parse_json(row.config, "it").value_or(nullptr).is_object()) {
    return parse_candidate(impl, "");
  }
  const auto config = row.kernel_config();
  if (config && !whole) return parse_candidate(impl, *config);
  return fail(ErrorCode::kCorrupt,
              "candidate {} {}: not a configuration that this version knows; begin a new sweep",
              impl, quote(row.config));
}

static void add_part_kernels(const LinearChoices& choices, std::string_view before,
                             std::vector<tuning_db::PartKernel>& kernels) {
  for (const Gemm g : kGemms) {
    const GemmKernel& choice = choices[static_cast<size_t>(g)];
    kernels.push_back(
        {f8::format("{}{}", before, to_string(g)), choice.provider, config_text(choice)});
  }
}

std::vector<tuning_db::PartKernel> part_kernels(const LinearChoices& choices) {
  std::vector<tuning_db::PartKernel> kernels;
  add_part_kernels(choices, "", kernels);
  return kernels;
}

std::vector<tuning_db::PartKernel> part_kernels(const MlpChoices& choices) {
  std::vector<tuning_db::PartKernel> kernels;
  add_part_kernels(choices.up, "up_", kernels);
  add_part_kernels(choices.down, "down_", kernels);
  return kernels;
}

runtime::DeviceInfo h100() {
  runtime::DeviceInfo device;
  static_cast<DeviceClass&>(device) = {.name = "NVIDIA H100 80GB HBM3",
                                       .cc = 90,
                                       .sm_count = 132,
                                       .l2_bytes = 50 << 20,
                                       .mem_bytes = int64_t{80} << 30,
                                       .mem_clock_mhz = 2619,
                                       .sm_clock_max_mhz = 1980,
                                       .power_limit_w = 700,
                                       .mig = false};
  device.driver_version = 13000;
  return device;
}

}  // namespace f8::tuner
