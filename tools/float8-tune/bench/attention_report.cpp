#include "tools/float8-tune/bench/attention_report.hpp"

#include "tools/float8-tune/trial_json.hpp"

namespace f8::cli {
namespace {

// What bf16 keeps for a backward: q, k, v, o and lse.
double bf16_saved_bytes(const Problem& problem) {
  const AttentionShape s = attention_shape(problem);
  return problem.bytes() + 4.0 * static_cast<double>(s.batch * s.heads_q * s.tokens);
}

double tflops(const Problem& problem, int products, double ns) {
  return products * attention_product_flops(problem) / ns / 1e3;
}

double tflops(const Problem& problem, const tuner::KernelShare& kernel) {
  return tflops(problem, kernel.products, kernel.ns);
}

// The products of an operation, as its flops count them.
int products_of(Op op) {
  return op == Op::kAttentionForward    ? kAttentionForwardProducts
         : op == Op::kAttentionBackward ? kAttentionBackwardProducts
                                        : kAttentionForwardProducts + kAttentionBackwardProducts;
}

void add_times(Json& row, const Problem& problem, Op op, const tuner::AttentionTimes& times) {
  const tuning_db::TrialResult& result = times.float8;
  add_us(row, result);
  row["tflops"] = rounded(tflops(problem, products_of(op), result.timing->median_ns));
  if (times.bf16) {
    const double bf16_ns = times.bf16->timing->median_ns;
    row["bf16_us"] = rounded(bf16_ns / 1e3);
    row["bf16_tflops"] = rounded(tflops(problem, products_of(op), bf16_ns));
  }
  if (const auto& ratio = result.ratio) {
    add_interval(row, "speedup", ratio->ratio, ratio->lo, ratio->hi, 5);
  }
  row["state"] = tuning_db::to_string(result.state);
  if (!result.reason.empty()) row["reason"] = result.reason;
  if (result.sm_mhz_mean) row["sm_mhz"] = rounded(*result.sm_mhz_mean, 4);
  if (result.power_w) row["power_w"] = rounded(*result.power_w, 4);
}

std::string line_of(const Problem& problem, Op op, const tuner::AttentionTimes& times) {
  const bool fp8 = attention_recipe(problem) == AttentionRecipe::kFp8;
  const char* const name = op == Op::kAttentionForward    ? "fp8 forward"
                           : op == Op::kAttentionBackward ? "fp8 backward"
                           : fp8                          ? "fp8 forward and backward"
                                                          : "fp8 forward and bf16 backward";
  const tuning_db::Timing& t = *times.float8.timing;
  const auto& ratio = times.float8.ratio;
  return f8::format("{} with casts {} {} · {:.0f} TFLOP/s{}{}\n", name, microseconds(t.median_ns),
                    interval_text(t.ci_lo_ns / 1e3, t.ci_hi_ns / 1e3, 1),
                    tflops(problem, products_of(op), t.median_ns),
                    ratio ? f8::format(" · over cuDNN's bf16: {:.3f} {}", ratio->ratio,
                                       interval_text(ratio->lo, ratio->hi, 3))
                          : "",
                    times.float8.state == tuning_db::TrialState::kNoisy ? " (noisy)" : "");
}

}  // namespace

Json to_json(const tuner::AttentionBench& bench, const Accuracies& accuracy) {
  Json row = problem_json(bench.problem);
  add_times(row, bench.problem, Op::kAttentionForward, bench.forward);
  if (bench.backward) {
    add_times(row["backward"], bench.problem, Op::kAttentionBackward, *bench.backward);
  }
  if (bench.both) add_times(row["both"], bench.problem, Op::kAttention, *bench.both);
  if (!bench.no_bf16.empty()) row["bf16_reason"] = bench.no_bf16;
  row["saved_bytes"] = bench.saved_bytes;
  row["bf16_saved_bytes"] = static_cast<int64_t>(bf16_saved_bytes(bench.problem));
  row["kernels"] = Json::array();
  for (const tuner::KernelShare& kernel : bench.kernels) {
    Json json = {{"name", kernel.name}, {"us", rounded(kernel.ns / 1e3)}};
    if (kernel.bytes > 0) json["gb_per_s"] = rounded(kernel.bytes / kernel.ns, 4);
    if (kernel.products > 0) json["tflops"] = rounded(tflops(bench.problem, kernel));
    row["kernels"].push_back(json);
  }
  row["accuracy"] = accuracy_json(accuracy);
  return row;
}

std::string text_of(const tuner::AttentionBench& bench, bool color) {
  Table table({{"kernel", Table::Align::kLeft}, {"us"}, {"TFLOP/s"}, {"GB/s"}});
  for (const tuner::KernelShare& kernel : bench.kernels) {
    table.add({kernel.name, f8::format("{:.1f}", kernel.ns / 1e3),
               kernel.products > 0 ? f8::format("{:.0f}", tflops(bench.problem, kernel)) : "",
               kernel.bytes > 0 ? f8::format("{:.0f}", kernel.bytes / kernel.ns) : ""});
  }
  const Problem& problem = bench.problem;
  std::string text = problem.key() + "\n" + line_of(problem, Op::kAttentionForward, bench.forward);
  if (bench.backward) text += line_of(problem, Op::kAttentionBackward, *bench.backward);
  if (bench.both) text += line_of(problem, Op::kAttention, *bench.both);
  if (!bench.no_bf16.empty()) text += f8::format("bf16 not measured: {}\n", bench.no_bf16);
  return text + f8::format("kept for a backward: {:.1f} MB, in bf16 {:.1f} MB\n{}",
                           static_cast<double>(bench.saved_bytes) / 1e6,
                           bf16_saved_bytes(problem) / 1e6, table.text(color));
}

std::string text_of(const AttentionShape& shape, const Accuracies& accuracy, bool color) {
  using enum Table::Align;
  Table table({{"data", kLeft}, {"tensor", kLeft}, {"SQNR dB"}, {"cosine"}, {"RMSE"}});
  for (const tuning_db::Accuracy& a : accuracy) {
    table.add({a.data, a.tensor, f8::format("{:.1f}", a.sqnr_db), f8::format("{:.6f}", a.cosine),
               f8::format("{:.3g}", a.rmse)});
  }
  return f8::format("against fp64: {} tokens, {} heads of {}, {}\n{}", shape.tokens, shape.heads_q,
                    shape.head_dim, mask_name(shape.causal), table.text(color));
}

}  // namespace f8::cli
