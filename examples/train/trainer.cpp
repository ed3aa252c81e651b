#include "trainer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "model.hpp"

namespace f8::train {
namespace {

class Trainer {
 public:
  Trainer(Backend& backend, const TrainConfig& config, const Text& text, const RunOptions& options)
      : backend_(backend),
        config_(config),
        text_(text),
        options_(options),
        run_name_(identity(config, text.hash)) {}

  Result<RunResult> run() {
    model_ = F8_TRY(Model::create(backend_, config_, text_.bytes));
    curve_.name = config_.recipe;
    curve_.tokens_per_step = config_.tokens;
    if (!options_.resume.empty()) F8_TRY(resume());
    const int64_t last =
        options_.stop_after > 0 ? std::min(options_.stop_after, config_.steps) : config_.steps;
    // Delayed scaling has no scales yet in the first step, so its launches are others.
    if (done() == 0 && last > 0) F8_TRY(first_step());
    if (done() < last) F8_TRY(backend_.record([this] { return model_->step(false); }));
    while (done() < last) F8_TRY(some_steps(last));
    return RunResult{.curve = std::move(curve_), .tokens_per_second = tokens_per_second()};
  }

 private:
  [[nodiscard]] int64_t done() const { return static_cast<int64_t>(curve_.loss.size()); }

  Status resume() {
    const Checkpoint checkpoint = F8_TRY(load(options_.resume, run_name_));
    F8_TRY(model_->set_state(checkpoint));
    curve_.loss = checkpoint.loss;
    curve_.ms = checkpoint.ms;
    add_learning_rates();
    return {};
  }

  Status first_step() {
    const auto start = std::chrono::steady_clock::now();
    F8_TRY(model_->step(true));
    F8_TRY(collect(1, [&] {
      return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
          .count();
    }));
    return save_when_due();
  }

  Status some_steps(int64_t last) {
    int64_t steps = std::min(options_.report_every - done() % options_.report_every, last - done());
    if (options_.save_every > 0) {
      steps = std::min(steps, options_.save_every - done() % options_.save_every);
    }
    const double ms = F8_TRY(backend_.repeat(steps));
    timed_.push_back(ms / static_cast<double>(steps));
    F8_TRY(collect(steps, [&] { return timed_.back(); }));
    return save_when_due();
  }

  // Waits for `steps` more steps, and asks for the time of each after that.
  Status collect(int64_t steps, const std::function<double()>& ms) {
    const std::vector<float> losses = F8_TRY(model_->losses(done(), done() + steps));
    for (const float loss : losses) {
      curve_.loss.push_back(loss);
      if (!std::isfinite(loss)) {
        return fail(ErrorCode::kInvalidArgument,
                    "{}: the loss of step {} is not finite; try a smaller --lr", config_.recipe,
                    done());
      }
    }
    curve_.ms.resize(curve_.loss.size(), static_cast<float>(ms()));
    add_learning_rates();
    if (options_.progress) options_.progress(curve_);
    return {};
  }

  void add_learning_rates() {
    while (curve_.lr.size() < curve_.loss.size()) {
      curve_.lr.push_back(schedule_[curve_.lr.size()].lr);
    }
  }

  Status save_when_due() const {
    if (options_.save_every == 0 || done() % options_.save_every != 0) return {};
    Checkpoint checkpoint = F8_TRY(model_->state());
    checkpoint.run = run_name_;
    checkpoint.loss = curve_.loss;
    checkpoint.ms = curve_.ms;
    return save(options_.checkpoint, checkpoint);
  }

  [[nodiscard]] double tokens_per_second() {
    if (timed_.empty()) return 0;
    const auto middle = timed_.begin() + static_cast<std::ptrdiff_t>(timed_.size() / 2);
    std::ranges::nth_element(timed_, middle);
    return 1000 * static_cast<double>(config_.tokens) / *middle;
  }

  Backend& backend_;
  const TrainConfig& config_;
  const Text& text_;
  const RunOptions& options_;
  std::string run_name_;
  std::vector<StepScalars> schedule_ = make_schedule(config_, AdamConfig{});
  std::unique_ptr<Model> model_;
  Curve curve_;
  std::vector<double> timed_;  // milliseconds of a step, one a look
};

}  // namespace

Result<RunResult> train(Backend& backend, const TrainConfig& config, const Text& text,
                        const RunOptions& options) {
  F8_TRY(validate(config));
  return Trainer(backend, config, text, options).run();
}

}  // namespace f8::train
