#include "config.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/text.hpp"

namespace f8::train {
namespace {

constexpr int64_t kWarmUpSteps = 100;

Status in_range(const char* option, int64_t value, int64_t least, int64_t most, int64_t multiple) {
  if (value >= least && value <= most && value % multiple == 0) return {};
  const std::string of = multiple == 1 ? "" : fmt::format(", a multiple of {}", multiple);
  return fail(ErrorCode::kInvalidArgument, "--{} is {}; it is {} to {}{}", option, value, least,
              most, of);
}

}  // namespace

const std::vector<std::string>& recipe_names() {
  static const std::vector<std::string> names = {
      "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"};
  return names;
}

Status validate(const TrainConfig& config) {
  if (std::ranges::find(recipe_names(), config.recipe) == recipe_names().end()) {
    return fail(ErrorCode::kInvalidArgument, "there is no recipe {}; there are {}",
                quote(config.recipe), fmt::join(recipe_names(), ", "));
  }
  F8_TRY(in_range("hidden", config.hidden, 64, 8192, 64));
  F8_TRY(in_range("ffn", config.ffn, 16, 65536, 16));
  F8_TRY(in_range("layers", config.layers, 1, 256, 1));
  F8_TRY(in_range("context", config.context, 1, 256, 1));
  F8_TRY(in_range("tokens", config.tokens, 16, 1 << 20, 16));
  F8_TRY(in_range("steps", config.steps, 1, 10'000'000, 1));
  if (config.hidden % config.context != 0 || config.hidden / config.context % 8 != 0 ||
      config.hidden / config.context > 2048) {
    return fail(ErrorCode::kInvalidArgument,
                "--context is {}; it divides --hidden ({}) into embeddings of a multiple of 8 and "
                "at most 2048",
                config.context, config.hidden);
  }
  if (!(config.lr > 0 && config.lr <= 1)) {
    return fail(ErrorCode::kInvalidArgument, "--lr is {}; it is more than 0, 1 at most", config.lr);
  }
  return {};
}

std::string identity(const TrainConfig& config, const std::string& text_hash) {
  return fmt::format(
      "recipe={} hidden={} ffn={} layers={} context={} tokens={} steps={} seed={} lr={} text={}",
      config.recipe, config.hidden, config.ffn, config.layers, config.context, config.tokens,
      config.steps, config.seed, config.lr, text_hash);
}

std::vector<StepScalars> make_schedule(const TrainConfig& config, const AdamConfig& adam) {
  const int64_t warm_up = std::min(kWarmUpSteps, config.steps / 10);
  std::vector<StepScalars> schedule(static_cast<size_t>(config.steps));
  for (int64_t i = 0; i < config.steps; ++i) {
    double factor = static_cast<double>(i + 1) / static_cast<double>(warm_up + 1);
    if (i >= warm_up) {
      const double done = static_cast<double>(i - warm_up) /
                          static_cast<double>(std::max<int64_t>(config.steps - warm_up, 1));
      factor = 0.1 + 0.9 * 0.5 * (1 + std::cos(std::numbers::pi * done));
    }
    const double t = static_cast<double>(i + 1);
    schedule[static_cast<size_t>(i)] = {
        .lr = static_cast<float>(config.lr * factor),
        .m_correction = static_cast<float>(1 / (1 - std::pow(double{adam.beta1}, t))),
        .v_correction = static_cast<float>(1 / (1 - std::pow(double{adam.beta2}, t))),
        .unused = 0};
  }
  return schedule;
}

}  // namespace f8::train
