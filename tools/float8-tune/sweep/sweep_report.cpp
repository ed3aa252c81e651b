#include "tools/float8-tune/sweep/sweep_report.hpp"

#include <algorithm>
#include <cstdio>

#include "tools/float8-tune/attention_option.hpp"
#include "tools/float8-tune/trial_json.hpp"
#include "tools/tuner/clock.hpp"
#include "tuning_db/json/json_text.hpp"

namespace f8::cli {
namespace {

using tuning_db::TrialState;

constexpr double kHeartbeatS = 10;
constexpr double kRewriteS = 0.2;

int64_t count_of(const tuner::SweepProgress& progress, std::initializer_list<TrialState> states) {
  int64_t count = 0;
  for (const TrialState state : states) {
    const auto found = progress.states.find(state);
    if (found != progress.states.end()) count += found->second;
  }
  return count;
}

struct Counts {
  int64_t ok = 0, pruned = 0, noisy = 0, failed = 0;

  explicit Counts(const tuner::SweepProgress& p)
      : ok(count_of(p, {TrialState::kOk})),
        pruned(count_of(p, {TrialState::kPruned})),
        noisy(count_of(p, {TrialState::kNoisy})),
        failed(p.done - ok - pruned - noisy) {}
};

std::string progress_text(const tuner::SweepProgress& p) {
  const Counts n(p);
  std::string text = f8::format("{}/{} · {} ok · {} pruned", p.done, p.trials, n.ok, n.pruned);
  if (n.noisy > 0) text += f8::format(" · {} noisy", n.noisy);
  if (n.failed > 0) text += f8::format(" · {} failed", n.failed);
  if (p.best_speedup > 0) text += f8::format(" · best {:.2f}x", p.best_speedup);
  if (p.kernels_compiled < p.kernels_wanted) {
    text += f8::format(" · {}/{} kernels", p.kernels_compiled, p.kernels_wanted);
  }
  return text + f8::format(" · {} · ETA {}", clock_text(p.elapsed_s), clock_text(p.eta_s));
}

Json progress_json(const tuner::SweepProgress& p) {
  const Counts n(p);
  return {{"event", "progress"},
          {"done", p.done},
          {"cells", p.trials},
          {"ok", n.ok},
          {"pruned", n.pruned},
          {"noisy", n.noisy},
          {"failed", n.failed},
          {"best_speedup", rounded(p.best_speedup, 4)},
          {"kernels", f8::format("{}/{}", p.kernels_compiled, p.kernels_wanted)},
          {"doing", p.doing},
          {"elapsed_s", rounded(p.elapsed_s, 4)},
          {"eta_s", rounded(p.eta_s, 3)}};
}

std::string gpu_text(const tuner::GpuProgress& gpu) {
  if (!gpu.lost.empty()) return f8::format("GPU {} · lost: {}", gpu.index, gpu.lost);
  return f8::format("GPU {} · {} trials · {}", gpu.index, gpu.progress.done, gpu.progress.doing);
}

Json gpu_json(const tuner::GpuProgress& gpu) {
  Json json = {{"gpu", gpu.index}, {"done", gpu.progress.done}, {"doing", gpu.progress.doing}};
  if (!gpu.lost.empty()) json["lost"] = gpu.lost;
  return json;
}

Json gpus_json(std::span<const tuner::GpuProgress> gpus) {
  Json json = Json::array();
  for (const tuner::GpuProgress& gpu : gpus) json.push_back(gpu_json(gpu));
  return json;
}

Json result_json(const tuner::LinearResult& result) {
  const Shape shape = result.problem.shape();
  Json row = {{"m", shape.m}, {"n", shape.n}, {"k", shape.k}, {"recipe", result.problem.recipe}};
  if (is_attention(result.problem.op) || result.problem.op == Op::kMlp) {
    row = problem_json(result.problem);
  }
  add_groups(row, result.problem);
  row["state"] = tuning_db::to_string(result.float8.state);
  if (result.float8.timing) row["fp8_us"] = rounded(result.float8.timing->median_ns / 1e3);
  if (result.bf16.timing) row["bf16_us"] = rounded(result.bf16.timing->median_ns / 1e3);
  if (const auto& ratio = result.float8.ratio) {
    add_interval(row, "speedup", ratio->ratio, ratio->lo, ratio->hi, 5);
  }
  if (!result.float8.accuracy.empty()) row["accuracy"] = accuracy_json(result.float8.accuracy);
  if (!result.float8.reason.empty()) row["reason"] = result.float8.reason;
  return row;
}

bool is_of_attention(const tuner::SweepOutcome& outcome) {
  return !outcome.linears.empty() && is_attention(outcome.linears.front().problem.op);
}

// The least accuracy of an operation's tensors on any data.
std::string least_sqnr(const std::vector<tuning_db::Accuracy>& accuracy) {
  if (accuracy.empty()) return "-";
  const auto& least = *std::ranges::min_element(accuracy, {}, &tuning_db::Accuracy::sqnr_db);
  return f8::format("{:.1f} ({} on {})", least.sqnr_db, least.tensor, least.data);
}

std::string us_of(const tuning_db::TrialResult& result) {
  return result.timing ? f8::format("{:.1f}", result.timing->median_ns / 1e3) : "-";
}

std::string attention_table(const tuner::SweepOutcome& outcome, bool color) {
  using enum Table::Align;
  Table table({{"attention", kLeft},
               {"part", kLeft},
               {"recipe", kLeft},
               {"us"},
               {"interval"},
               {"TFLOP/s"},
               {"bf16 us"},
               {"speedup"},
               {"interval"},
               {"least SQNR dB", kLeft},
               {"state", kLeft}});
  for (const auto& [problem, result, bf16] : outcome.linears) {
    const auto& t = result.timing;
    const auto& ratio = result.ratio;
    table.add({to_string(problem.dims, spec_of(problem.op).dims),
               problem.op == Op::kAttention          ? "both"
               : problem.op == Op::kAttentionForward ? "forward"
                                                     : "backward",
               problem.recipe, us_of(result),
               t ? interval_text(t->ci_lo_ns / 1e3, t->ci_hi_ns / 1e3, 1) : "-",
               t ? f8::format("{:.0f}", tflops_of(problem, *t)) : "-", us_of(bf16),
               ratio ? f8::format("{:.3f}", ratio->ratio) : "-",
               ratio ? interval_text(ratio->lo, ratio->hi, 3) : "-", least_sqnr(result.accuracy),
               std::string(tuning_db::to_string(result.state))});
  }
  return table.text(color);
}

// Says which attention had no bf16 beside it, and what compares it with PyTorch's.
void note_without_bf16(const tuner::SweepOutcome& outcome, const Global& global) {
  std::vector<AttentionShape> shapes;
  std::string reason;
  for (const auto& [problem, float8, bf16] : outcome.linears) {
    const bool refused = bf16.state == TrialState::kPruned;
    if (problem.op != Op::kAttention || !refused) continue;
    reason = bf16.reason;
    const AttentionShape shape = attention_shape(problem);
    if (std::ranges::find(shapes, shape) == shapes.end()) shapes.push_back(shape);
  }
  if (shapes.empty()) return;
  note(global, "{}. The other rows decide nothing. Beside PyTorch's bf16 it is measured {}", reason,
       how_to_measure_in_pytorch(shapes, global.db.string()));
}

std::string result_table(const tuner::SweepOutcome& outcome, bool color) {
  using enum Table::Align;
  Table table({{"m,n,k", kLeft},
               {"recipe", kLeft},
               {"fp8 us"},
               {"bf16 us"},
               {"speedup"},
               {"interval"},
               {"state", kLeft}});
  std::vector<const tuner::LinearResult*> rows;
  for (const auto& linear : outcome.linears) rows.push_back(&linear);
  std::ranges::stable_sort(rows, std::ranges::greater{}, [](const tuner::LinearResult* r) {
    return r->float8.ratio ? r->float8.ratio->ratio : 0;
  });
  for (const tuner::LinearResult* row : rows) {
    const auto& ratio = row->float8.ratio;
    table.add({mnk_of(row->problem), row->problem.recipe, us_of(row->float8), us_of(row->bf16),
               ratio ? f8::format("{:.3f}", ratio->ratio) : "-",
               ratio ? interval_text(ratio->lo, ratio->hi, 3) : "-",
               std::string(tuning_db::to_string(row->float8.state))});
  }
  return table.text(color);
}

std::string_view to_string(tuner::SweepEnd end) {
  switch (end) {
    case tuner::SweepEnd::kDone:
      return "done";
    case tuner::SweepEnd::kBudget:
      return "budget";
    case tuner::SweepEnd::kDeviceLost:
      return "device_lost";
    case tuner::SweepEnd::kInterrupted:
      break;
  }
  return "interrupted";
}

Json outcome_json(const std::string& run_uuid, const runtime::DeviceInfo& device,
                  const tuner::SweepOutcome& outcome) {
  const tuner::SweepProgress& progress = outcome.progress;
  Json states = Json::object();
  for (const auto& [state, count] : progress.states) {
    states[std::string(tuning_db::to_string(state))] = count;
  }
  Json results = Json::array();
  for (const auto& linear : outcome.linears) results.push_back(result_json(linear));
  return {{"run", run_uuid},
          {"end", to_string(outcome.end)},
          {"device", device.name},
          {"cells", progress.trials},
          {"done", progress.done},
          {"states", states},
          {"elapsed_s", rounded(progress.elapsed_s, 4)},
          {"workers", progress.worker_starts},
          {"results", results}};
}

}  // namespace

std::string clock_text(double s) {
  const auto whole = static_cast<int64_t>(s + 0.5);
  return whole >= 60 ? f8::format("{}m{:02}", whole / 60, whole % 60) : f8::format("{}s", whole);
}

ProgressMode progress_mode(std::string_view text, const Global& global) {
  if (global.quiet || text == "none") return ProgressMode::kNone;
  if (text == "json" || (text == "auto" && global.json)) return ProgressMode::kJson;
  return ProgressMode::kLine;
}

void SweepReporter::finished(const tuning_db::TrialKey& trial, const tuning_db::TrialResult& result,
                             const tuner::SweepProgress& progress, std::optional<int> gpu) {
  if (mode_ != ProgressMode::kJson || result.state == TrialState::kPruned) return;
  Json event = {{"event", "cell"},
                {"problem", trial.problem.key()},
                {"candidate", candidate_text(trial.candidate)},
                {"state", tuning_db::to_string(result.state)}};
  if (result.timing) event["us"] = rounded(result.timing->median_ns / 1e3);
  if (result.ratio) event["speedup"] = rounded(result.ratio->ratio, 4);
  if (!result.reason.empty()) event["reason"] = result.reason;
  if (gpu) event["gpu"] = *gpu;
  event["done"] = progress.done;
  event["cells"] = progress.trials;
  line(tuning_db::without_controls(event.dump(-1, ' ', false, Json::error_handler_t::replace)));
}

bool SweepReporter::is_due() {
  if (mode_ == ProgressMode::kNone) return false;
  const double now = tuner::steady_s();
  if (!last_s_ && !rewrites()) last_s_ = now;  // a short sweep needs no heartbeat
  return !last_s_ || now - *last_s_ >= (rewrites() ? kRewriteS : kHeartbeatS);
}

void SweepReporter::tick(const tuner::SweepProgress& progress) {
  if (!is_due()) return;
  if (mode_ == ProgressMode::kJson) return line(progress_json(progress).dump());
  if (!rewrites()) return line(progress_text(progress));
  rewrite({progress_text(progress)});
}

void SweepReporter::tick(const tuner::GpusProgress& progress) {
  if (!is_due()) return;
  if (mode_ == ProgressMode::kJson) {
    Json event = progress_json(progress.total);
    event["gpus"] = gpus_json(progress.gpus);
    return line(event.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  std::vector<std::string> lines;
  for (const tuner::GpuProgress& gpu : progress.gpus) lines.push_back(printable(gpu_text(gpu)));
  lines.push_back(progress_text(progress.total));
  if (rewrites()) return rewrite(lines);
  for (std::string& text : lines) line(std::move(text));
}

void SweepReporter::rewrite(const std::vector<std::string>& lines) {
  std::string text = shown_ > 1 ? f8::format("\x1b[{}A\r", shown_ - 1) : "\r";
  for (size_t i = 0; i < lines.size(); ++i) text += (i > 0 ? "\n" : "") + lines[i] + "\x1b[K";
  std::fwrite(text.data(), 1, text.size(), out_);
  shown_ = lines.size();
  last_s_ = tuner::steady_s();
}

void SweepReporter::clear() {
  if (shown_ > 1) std::fputs(f8::format("\x1b[{}A\r\x1b[J", shown_ - 1).c_str(), out_);
  if (shown_ == 1) std::fputs("\r\x1b[K", out_);
  shown_ = 0;
}

void SweepReporter::line(std::string text) {
  text += '\n';
  std::fwrite(text.data(), 1, text.size(), out_);
  last_s_ = tuner::steady_s();
}

void print_outcome(const Global& global, const std::string& run_uuid,
                   const runtime::DeviceInfo& device, const tuner::SweepOutcome& outcome,
                   std::span<const tuner::GpuProgress> gpus) {
  const tuner::SweepProgress& progress = outcome.progress;
  if (global.json) {
    Json json = outcome_json(run_uuid, device, outcome);
    if (!gpus.empty()) json["gpus"] = gpus_json(gpus);
    print_json(json);
  } else {
    const bool color = stdout_color(global);
    print_styled(is_of_attention(outcome) ? attention_table(outcome, color)
                                          : result_table(outcome, color));
  }
  const int64_t failed =
      count_of(progress, {TrialState::kLaunchError, TrialState::kTimeout, TrialState::kWrong,
                          TrialState::kCompileError, TrialState::kQuarantined});
  if (failed > 0) {
    note(global, "{} trials failed; `float8-tune query {} --db {}` on their shapes says why",
         failed, is_of_attention(outcome) ? "--problem KEY" : "--mnk M,N,K --recipe R",
         global.db.string());
  }
  if (const int64_t noisy = count_of(progress, {TrialState::kNoisy}); noisy > 0) {
    note(global, "{} trials are noisy; sweep them again with a larger --linear-max-ms", noisy);
  }
  note_without_bf16(outcome, global);
  for (const tuner::GpuProgress& gpu : gpus) {
    if (gpu.lost.empty()) continue;
    note(global,
         "GPU {} was lost: {}; what it finished is kept, and the others took over the rest. See "
         "`nvidia-smi -i {}`, or leave it out of --gpus",
         gpu.index, gpu.lost, gpu.index);
  }
  if (outcome.end != tuner::SweepEnd::kDone) {
    note(global, "{} of {} trials are missing; `float8-tune resume {} --db {}` measures them",
         progress.trials - progress.done, progress.trials, run_uuid, global.db.string());
  }
}

}  // namespace f8::cli
