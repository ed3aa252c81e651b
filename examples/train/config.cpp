#include "config.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>

#include "error.hpp"

namespace train {
namespace {

constexpr int64_t kWarmUpSteps = 100;
constexpr int64_t kMostRanks = 64;

void in_range(const char* option, int64_t value, int64_t least, int64_t most, int64_t multiple) {
  if (value >= least && value <= most && value % multiple == 0) return;
  const std::string of = multiple == 1 ? "" : format(", a multiple of %ld", multiple);
  fail(FLOAT8_INVALID_ARGUMENT, "--%s is %ld; it is %ld to %ld%s", option, value, least, most,
       of.c_str());
}

}  // namespace

const std::vector<std::string>& recipe_names() {
  static const std::vector<std::string> names = {
      "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"};
  return names;
}

std::string recipe_list() {
  std::string list;
  for (const std::string& name : recipe_names()) list += (list.empty() ? "" : ", ") + name;
  return list;
}

void validate(const TrainConfig& config) {
  if (std::ranges::find(recipe_names(), config.recipe) == recipe_names().end()) {
    fail(FLOAT8_INVALID_ARGUMENT, "there is no recipe '%s'; there are %s", config.recipe.c_str(),
         recipe_list().c_str());
  }
  in_range("hidden", config.hidden, 64, 8192, 64);
  in_range("ffn", config.ffn, 16, 65536, 16);
  in_range("layers", config.layers, 1, 256, 1);
  in_range("context", config.context, 1, 256, 1);
  in_range("tokens", config.tokens, 16, 1 << 20, 16);
  in_range("micro-batches", config.micro_batches, 1, 1024, 1);
  in_range("fsdp", config.fsdp, 1, kMostRanks, 1);
  in_range("tp", config.tp, 1, kMostRanks / config.fsdp, 1);
  // Blocks that have a scale are not cut.
  const int64_t unit = config.recipe == "blockwise" && config.tp > 1 ? 128 : 16;
  if (config.ffn % (unit * config.tp) != 0) {
    fail(FLOAT8_INVALID_ARGUMENT, "--tp is %ld; it divides --ffn (%ld) into multiples of %ld%s",
         config.tp, config.ffn, unit, unit == 16 ? "" : " under blockwise");
  }
  if (config.tokens % (16 * config.fsdp * config.micro_batches) != 0) {
    fail(FLOAT8_INVALID_ARGUMENT,
         "--fsdp is %ld and --micro-batches %ld; together they divide --tokens (%ld) into "
         "multiples of 16",
         config.fsdp, config.micro_batches, config.tokens);
  }
  in_range("steps", config.steps, 1, 10'000'000, 1);
  if (config.hidden % config.context != 0 || config.hidden / config.context % 8 != 0 ||
      config.hidden / config.context > 2048) {
    fail(FLOAT8_INVALID_ARGUMENT,
         "--context is %ld; it divides --hidden (%ld) into embeddings of a multiple of 8 and "
         "at most 2048",
         config.context, config.hidden);
  }
  if (!(config.lr > 0 && config.lr <= 1)) {
    fail(FLOAT8_INVALID_ARGUMENT, "--lr is %g; it is more than 0, 1 at most", config.lr);
  }
}

std::string identity(const TrainConfig& config, const std::string& text_hash) {
  char lr[32];  // the shortest text that reads back as the same number
  const auto end = std::to_chars(lr, std::end(lr), config.lr, std::chars_format::general).ptr;
  return format(
      "recipe=%s hidden=%ld ffn=%ld layers=%ld context=%ld tokens=%ld steps=%ld seed=%u lr=%s "
      "text=%s",
      config.recipe.c_str(), config.hidden, config.ffn, config.layers, config.context,
      config.tokens, config.steps, config.seed, std::string(lr, end).c_str(), text_hash.c_str());
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

}  // namespace train
