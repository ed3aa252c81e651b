#include "tools/float8-tune/report/figures/attention.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <tuple>

namespace f8::report {
namespace {

using tuning_db::TrialRow;

std::string time_of(const std::optional<TrialRow>& row) {
  return row ? microseconds(row->result.timing->median_ns) : "";
}

std::string speed_of(const std::optional<TrialRow>& row) {
  return row ? f8::format("{:.0f}", tflops_of(row->problem, *row->result.timing)) : "";
}

// The tensor's accuracy in the row of both parts, or in that of its own part.
const tuning_db::Accuracy* find(const AttentionTimes& times, std::string_view data,
                                std::string_view tensor) {
  for (const auto* row : {&times.both, &times.forward, &times.backward}) {
    if (!*row) continue;
    if (const auto* found = find_accuracy((*row)->result.accuracy, data, tensor)) return found;
  }
  return nullptr;
}

// The kinds of data, in the order in which they were measured.
std::vector<std::string> data_of(const AttentionTimes& times) {
  std::vector<std::string> kinds;
  for (const auto* row : {&times.both, &times.forward, &times.backward}) {
    if (!*row) continue;
    for (const tuning_db::Accuracy& a : (*row)->result.accuracy) {
      if (std::ranges::find(kinds, a.data) == kinds.end()) kinds.push_back(a.data);
    }
  }
  return kinds;
}

}  // namespace

std::optional<Figure> attention_speeds(const Measurements& measurements) {
  if (measurements.attentions.empty()) return std::nullopt;
  DataTable table{
      .caption = "Attention, all casts included",
      .columns = {"heads", "tokens", "batch", "mask", "recipe", "forward us", "TFLOP/s",
                  "backward us", "TFLOP/s", "both us", "speedup", "interval", "decision", "device"},
      .rows = {}};
  for (const AttentionTimes& times : measurements.attentions) {
    const AttentionShape& s = times.shape;
    const auto ratio = times.both ? times.both->result.ratio : std::nullopt;
    table.rows.push_back({f8::format("{}/{} of {}", s.heads_q, s.heads_kv, s.head_dim),
                          f8::format("{}", s.tokens), f8::format("{}", s.batch),
                          std::string(mask_name(s.causal)), times.recipe, time_of(times.forward),
                          speed_of(times.forward), time_of(times.backward),
                          speed_of(times.backward), time_of(times.both),
                          ratio ? f8::format("{:.3f}", ratio->ratio) : "",
                          ratio ? f8::format("{:.3f} to {:.3f}", ratio->lo, ratio->hi) : "",
                          times.decision, times.device});
  }
  return Figure{
      .kind = "attention-speed",
      .title = "Speed of attention in fp8",
      .description =
          "Heads are those of queries and of keys. Forward and backward are float8's by "
          "themselves; both together stand beside the fastest attention in bf16 of the "
          "same run. Under fp8_forward the backward is that of bf16. The decision is that "
          "of float8-tune filter --attention.",
      .table = std::move(table)};
}

// A recipe, a head size and a mask have one accuracy on a device: the first that has one.
std::optional<Figure> attention_accuracy(const Measurements& measurements) {
  constexpr std::array<std::string_view, 4> kTensors = {"O", "dQ", "dK", "dV"};
  DataTable table{
      .caption = "SQNR in dB",
      .columns = {"recipe", "elements of a head", "mask", "data", "O", "dQ", "dK", "dV", "device"},
      .rows = {},
      .heads = 4};
  std::set<std::tuple<std::string, int64_t, bool, std::string>> seen;
  for (const AttentionTimes& times : measurements.attentions) {
    const std::vector<std::string> kinds = data_of(times);
    const AttentionShape& s = times.shape;
    if (kinds.empty() || !seen.insert({times.recipe, s.head_dim, s.causal, times.device}).second) {
      continue;
    }
    for (const std::string& data : kinds) {
      std::vector<std::string> cells = {times.recipe, f8::format("{}", s.head_dim),
                                        std::string(mask_name(s.causal)), data};
      for (const std::string_view tensor : kTensors) {
        const auto* found = find(times, data, tensor);
        cells.push_back(found == nullptr ? "" : f8::format("{:.1f}", found->sqnr_db));
      }
      cells.push_back(times.device);
      table.rows.push_back(std::move(cells));
    }
  }
  if (table.rows.empty()) return std::nullopt;
  return Figure{.kind = "accuracy",
                .title = "Accuracy of attention in fp8",
                .description =
                    "The ratio of signal and noise against fp64 on data of several kinds. The "
                    "decision needs 20 dB of O and dV, and 18 dB of dQ and dK.",
                .table = std::move(table)};
}

}  // namespace f8::report
