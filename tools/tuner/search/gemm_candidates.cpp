#include "tools/tuner/search/gemm_candidates.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/gemm/choose.hpp"
#include "runtime/gemm/cost_model.hpp"
#include "runtime/linear/kernels.hpp"

namespace f8::tuner {
namespace {

// What the clock settles at under a matmul's load, of its maximum: orders of magnitude for ranking
// do not need better.
constexpr double kSettledClock = 0.75;

}  // namespace

Result<runtime::GemmDesc> gemm_desc(const Problem& problem, bool bf16, const Epilogue& epilogue) {
  if (problem.op == Op::kLinear) {
    return fail(ErrorCode::kUnsupported, "{} is three GEMMs", problem.key());
  }
  const auto gemm = static_cast<Gemm>(problem.op);
  if (bf16) {
    return runtime::GemmDesc{.gemm = gemm,
                             .shape = problem.shape,
                             .a = Dtype::kBf16,
                             .b = Dtype::kBf16,
                             .d = problem.d,
                             .scale = codegen::ScaleMode::kTensor,
                             .fast = false};
  }
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  if (!recipe.at(gemm).is_fp8()) {
    return fail(ErrorCode::kUnsupported, "{}: recipe {} keeps this GEMM in bf16", problem.key(),
                recipe.name);
  }
  // As the linear itself would have it.
  const runtime::LinearKernels kernels =
      F8_TRY(runtime::linear_kernels({.shape = problem.shape, .recipe = recipe, .choices = {}}));
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
  problem.recipe = "tensorwise";
  return problem;
}

Result<codegen::GemmSpec> gemm_spec(const Problem& problem, const Epilogue& epilogue) {
  return runtime::gemm_spec(F8_TRY(gemm_desc(problem, false, epilogue)), {});
}

Result<std::vector<Generated>> generated_candidates(const Problem& problem,
                                                    const runtime::DeviceInfo& device, int keep,
                                                    std::span<const runtime::GemmChoice> also,
                                                    const Epilogue& epilogue) {
  const codegen::GemmSpec family = F8_TRY(gemm_spec(problem, epilogue));
  const Shape own = gemm_shape(problem.shape, static_cast<Gemm>(problem.op));
  const double ghz = kSettledClock * std::max(device.sm_clock_max_mhz, 1) / 1e3;
  std::vector<Generated> candidates;
  for (const codegen::GemmConfig& config : codegen::gemm_candidates(family)) {
    codegen::GemmSpec spec = family;
    spec.config = config;
    const double clocks = runtime::predicted_clocks(spec, own, device.sm_count);
    candidates.push_back({.spec = spec, .predicted_ns = clocks / ghz, .pruned = {}});
  }
  std::ranges::stable_sort(candidates, [&](const Generated& x, const Generated& y) {
    if (x.predicted_ns != y.predicted_ns) return x.predicted_ns < y.predicted_ns;
    return codegen::key(x.spec.config) < codegen::key(y.spec.config);
  });
  int kept = 0;
  for (Generated& candidate : candidates) {
    const bool forced = std::ranges::any_of(also, [&](const runtime::GemmChoice& choice) {
      return choice.provider == Provider::kGenerated && choice.config == candidate.spec.config;
    });
    if (forced || kept < keep) {
      ++kept;
      continue;
    }
    candidate.pruned =
        fmt::format("predicted {:.1f} us, {:.2f}x the best bound; the first {} are measured",
                    candidate.predicted_ns / 1e3,
                    candidate.predicted_ns / candidates.front().predicted_ns, keep);
  }
  std::ranges::stable_partition(candidates, [](const Generated& c) { return c.pruned.empty(); });
  return candidates;
}

Result<std::vector<runtime::GemmChoice>> prior_choices(const Problem& problem,
                                                       const runtime::DeviceInfo& device,
                                                       const TuningTable& table) {
  const runtime::GemmDesc desc = F8_TRY(gemm_desc(problem, false));
  std::vector<runtime::GemmChoice> choices;
  for (const TuningTable* known : {static_cast<const TuningTable*>(nullptr), &table}) {
    const runtime::GemmChoice choice = F8_TRY(runtime::choose_gemm(known, desc, device.sm_count));
    const auto same = [&](const runtime::GemmChoice& other) {
      return to_subject(other) == to_subject(choice);
    };
    if (std::ranges::none_of(choices, same)) choices.push_back(choice);
  }
  return choices;
}

std::string gemm_identity(const Problem& problem, bool bf16) {
  if (bf16) {  // the operands' layouts follow the GEMM's place in the linear
    return fmt::format("bf16/{}/{}", to_string(problem.op), to_string(problem.shape));
  }
  const Shape own = gemm_shape(problem.shape, static_cast<Gemm>(problem.op));
  const auto desc = gemm_desc(problem, false);
  const std::string scales =
      desc ? fmt::format("{}{}{}", codegen::to_string(desc->scale), desc->scalar_a ? "-a" : "",
                         desc->scalar_b ? "-b" : "")
           : problem.recipe;
  return fmt::format("{}.{}.{}/{}/{}/{}", to_string(problem.a), to_string(problem.b),
                     to_string(problem.d), scales, problem.fast ? "fast" : "precise",
                     to_string(own));
}

tuning_db::Candidate to_candidate(const Subject& subject, std::string source_hash) {
  nlohmann::json config;
  if (subject.impl == "generated") {
    config["config"] = subject.config;
  } else if (subject.impl == "float8" || subject.impl == "bf16") {
    // A linear takes what its GEMMs' tuning chooses; the trial's result holds the kernels.
    config["kernels"] = "tuned";
  } else {
    config["heuristic"] = std::stoi(subject.config.substr(1));
  }
  return {.impl = tuning_db::parse_impl(subject.impl).value(),
          .config = config.dump(),
          .source_hash = std::move(source_hash)};
}

Subject to_subject(const runtime::GemmChoice& choice) {
  return {.impl = std::string(to_string(choice.provider)), .config = runtime::config_text(choice)};
}

Result<runtime::GemmChoice> to_choice(const Subject& subject) {
  return runtime::parse_choice(
      epilogue_of(subject.impl) ? Provider::kGenerated : Provider::kCublasLt, subject.config);
}

Result<Subject> to_subject(const tuning_db::Candidate& candidate) {
  const std::string impl(to_string(candidate.impl));
  const auto json = nlohmann::json::parse(candidate.config, nullptr, false);
  if (json.is_object()) {
    if (candidate.impl == tuning_db::Impl::kFloat8 || candidate.impl == tuning_db::Impl::kBf16) {
      return Subject{.impl = impl, .config = ""};
    }
    if (json.contains("config") && json["config"].is_string()) {
      return Subject{.impl = impl, .config = json["config"].get<std::string>()};
    }
    if (json.contains("heuristic") && json["heuristic"].is_number_integer()) {
      return Subject{.impl = impl, .config = fmt::format("h{}", json["heuristic"].get<int>())};
    }
  }
  return fail(ErrorCode::kCorrupt, "candidate {} {}: not a configuration that this version knows",
              impl, candidate.config);
}

tuning_db::LinearKernels linear_kernels(const LinearChoices& choices) {
  tuning_db::LinearKernels kernels;
  for (size_t i = 0; i < choices.size(); ++i) {
    kernels[i] = {choices[i].provider, runtime::config_text(choices[i])};
  }
  return kernels;
}

runtime::DeviceInfo h100() {
  return {.ordinal = 0,
          .name = "NVIDIA H100 80GB HBM3",
          .uuid = "",
          .cc = 90,
          .sm_count = 132,
          .l2_bytes = 50 << 20,
          .mem_bytes = size_t{80} << 30,
          .mem_clock_mhz = 2619,
          .sm_clock_max_mhz = 1980,
          .power_limit_w = 700,
          .mig = false,
          .driver_version = 13000};
}

tuning_db::DeviceClass device_class(const runtime::DeviceInfo& device) {
  return {.name = device.name,
          .cc = device.cc,
          .sm_count = device.sm_count,
          .l2_bytes = static_cast<int64_t>(device.l2_bytes),
          .mem_bytes = static_cast<int64_t>(device.mem_bytes),
          .mem_clock_mhz = device.mem_clock_mhz,
          .sm_clock_max_mhz = device.sm_clock_max_mhz,
          .power_limit_w = device.power_limit_w,
          .mig = device.mig};
}

double rough_linear_ns(Shape shape, bool fp8) {
  const auto m = static_cast<double>(shape.m);
  const auto n = static_cast<double>(shape.n);
  const auto k = static_cast<double>(shape.k);
  const double flops = 6 * m * n * k;
  const double bytes = 2 * (m * k + n * k + m * n) * 2;
  const double launches = fp8 ? 9 : 3;
  return flops / (fp8 ? 1.2e15 : 0.68e15) * 1e9 + (fp8 ? 2 * bytes / 2.5e12 * 1e9 : 0) +
         launches * 3e3;
}

}  // namespace f8::tuner
