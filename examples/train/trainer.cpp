#include "trainer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <mutex>
#include <thread>

#include "error.hpp"
#include "model.hpp"

namespace train {
namespace {

class Trainer {
 public:
  Trainer(Backend& backend, const TrainConfig& config, const Ranks& ranks, const Text& text,
          const RunOptions& options)
      : backend_(backend),
        config_(config),
        options_(options),
        reports_(ranks.world.index == 0),
        run_name_(identity(config, text.hash)),
        model_(backend, config, ranks, text.bytes) {}

  RunResult run() {
    curve_.name = config_.recipe;
    curve_.tokens_per_step = config_.tokens;
    if (!options_.resume.empty()) resume();
    const int64_t last =
        options_.stop_after > 0 ? std::min(options_.stop_after, config_.steps) : config_.steps;
    // Delayed scaling has no scales yet in the first step, so its launches are others.
    if (done() == 0 && last > 0) first_step();
    if (done() < last) backend_.record([this] { model_.step(false); });
    while (done() < last) some_steps(last);
    return RunResult{.curve = std::move(curve_), .tokens_per_second = tokens_per_second()};
  }

 private:
  [[nodiscard]] int64_t done() const { return static_cast<int64_t>(curve_.loss.size()); }

  void resume() {
    const Checkpoint checkpoint = load(options_.resume, run_name_);
    model_.set_state(checkpoint);
    curve_.loss = checkpoint.loss;
    curve_.ms = checkpoint.ms;
    add_learning_rates();
  }

  void first_step() {
    const auto start = std::chrono::steady_clock::now();
    model_.step(true);
    collect(1, [&] {
      return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
          .count();
    });
    save_when_due();
  }

  void some_steps(int64_t last) {
    int64_t steps = std::min(options_.report_every - done() % options_.report_every, last - done());
    if (options_.save_every > 0) {
      steps = std::min(steps, options_.save_every - done() % options_.save_every);
    }
    const double ms = backend_.repeat(steps);
    timed_.push_back(ms / static_cast<double>(steps));
    collect(steps, [&] { return timed_.back(); });
    save_when_due();
  }

  // Waits for `steps` more steps, and only then asks `ms` for the time of each.
  void collect(int64_t steps, const std::function<double()>& ms) {
    const std::vector<float> losses = model_.losses(done(), done() + steps);
    for (const float loss : losses) {
      curve_.loss.push_back(loss);
      if (!std::isfinite(loss)) {
        fail(FLOAT8_INVALID_ARGUMENT, "%s: the loss of step %ld is not finite; try a smaller --lr",
             config_.recipe.c_str(), done());
      }
    }
    curve_.ms.resize(curve_.loss.size(), static_cast<float>(ms()));
    add_learning_rates();
    if (options_.progress && reports_) options_.progress(curve_);
  }

  void add_learning_rates() {
    while (curve_.lr.size() < curve_.loss.size()) {
      curve_.lr.push_back(schedule_[curve_.lr.size()].lr);
    }
  }

  void save_when_due() const {
    if (options_.save_every == 0 || done() % options_.save_every != 0) return;
    Checkpoint checkpoint = model_.state();
    checkpoint.run = run_name_;
    checkpoint.loss = curve_.loss;
    checkpoint.ms = curve_.ms;
    if (reports_) save(options_.checkpoint, checkpoint);
  }

  [[nodiscard]] double tokens_per_second() {
    if (timed_.empty()) return 0;
    const auto middle = timed_.begin() + static_cast<std::ptrdiff_t>(timed_.size() / 2);
    std::ranges::nth_element(timed_, middle);
    return 1000 * static_cast<double>(config_.tokens) / *middle;
  }

  Backend& backend_;
  const TrainConfig& config_;
  const RunOptions& options_;
  bool reports_;  // the first rank does
  std::string run_name_;
  std::vector<StepScalars> schedule_ = make_schedule(config_, AdamConfig{});
  Model model_;
  Curve curve_;
  std::vector<double> timed_;  // milliseconds of a step, at each look
};

using Communicators = std::vector<float8::Communicator>;

// The communicators of a run, by the ranks of the world. A group that is the world, or one rank, has
// none of its own.
class Groups {
 public:
  Groups(const TrainConfig& config, const std::vector<std::unique_ptr<Backend>>& backends)
      : fsdp_(static_cast<int>(config.fsdp)), tp_(static_cast<int>(config.tp)) {
    world_ = create(backends, 0, 1, fsdp_ * tp_);
    if (fsdp_ == 1 || tp_ == 1) return;
    for (int t = 0; t < tp_; ++t) of_fsdp_.push_back(create(backends, t, tp_, fsdp_));
    for (int f = 0; f < fsdp_; ++f) of_tp_.push_back(create(backends, f * tp_, 1, tp_));
  }
  [[nodiscard]] Ranks ranks(size_t index) {
    const int f = static_cast<int>(index) / tp_;
    const int t = static_cast<int>(index) % tp_;
    const auto world = Rank{static_cast<int>(index), fsdp_ * tp_, &world_[index]};
    if (tp_ == 1) return {.world = world, .fsdp = world, .tp = {}};
    if (fsdp_ == 1) return {.world = world, .fsdp = {}, .tp = world};
    return {.world = world,
            .fsdp = {f, fsdp_, &of_fsdp_[static_cast<size_t>(t)][static_cast<size_t>(f)]},
            .tp = {t, tp_, &of_tp_[static_cast<size_t>(f)][static_cast<size_t>(t)]}};
  }
  // After a failure of a rank: the others stop waiting for it.
  void abort(size_t index) {
    world_[index].abort();
    const size_t f = index / static_cast<size_t>(tp_);
    const size_t t = index % static_cast<size_t>(tp_);
    if (!of_fsdp_.empty()) of_fsdp_[t][f].abort();
    if (!of_tp_.empty()) of_tp_[f][t].abort();
  }

 private:
  static Communicators create(const std::vector<std::unique_ptr<Backend>>& backends, int first,
                              int step, int count) {
    std::vector<const float8::Context*> contexts;
    for (int i = 0; i < count; ++i) {
      contexts.push_back(&backends[static_cast<size_t>(first + i * step)]->context());
    }
    return float8::Communicator::create(contexts).value();
  }

  int fsdp_;
  int tp_;
  Communicators world_;
  std::vector<Communicators> of_fsdp_;  // by tensor-parallel rank
  std::vector<Communicators> of_tp_;    // by FSDP rank
};

// Runs a body for each rank, on a thread of its own. Where one throws, it leaves the others, and the
// first error is thrown.
void on_threads(Groups& groups, size_t count, const std::function<void(size_t)>& body) {
  std::exception_ptr first_error;
  std::mutex mutex;
  {
    std::vector<std::jthread> threads;
    for (size_t index = 0; index < count; ++index) {
      threads.emplace_back([&, index] {
        try {
          body(index);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first_error) first_error = std::current_exception();
          groups.abort(index);
        }
      });
    }
  }
  if (first_error) std::rethrow_exception(first_error);
}

// Takes the communicators from the backends before they are destroyed, also where a rank throws.
struct WithoutCommunicators {
  const std::vector<std::unique_ptr<Backend>>& backends;
  ~WithoutCommunicators() {
    for (const auto& backend : backends) backend->set_communicator(nullptr);
  }
};

}  // namespace

RunResult train(Backend& backend, const TrainConfig& config, const Text& text,
                const RunOptions& options) {
  validate(config);
  if (config.ranks() != 1) {
    fail(FLOAT8_INVALID_ARGUMENT, "%ld ranks have a backend each", config.ranks());
  }
  return Trainer(backend, config, Ranks{}, text, options).run();
}

RunResult train_on_ranks(const std::function<std::unique_ptr<Backend>(int rank)>& make_backend,
                         const TrainConfig& config, const Text& text, const RunOptions& options) {
  validate(config);
  if (config.ranks() == 1) return train(*make_backend(0), config, text, options);
  std::vector<std::unique_ptr<Backend>> backends;
  for (int rank = 0; rank < config.ranks(); ++rank) backends.push_back(make_backend(rank));
  Groups groups(config, backends);
  const WithoutCommunicators leaving{backends};
  std::vector<std::unique_ptr<Trainer>> trainers(backends.size());
  // All memory is taken before any rank waits for another on its device.
  on_threads(groups, backends.size(), [&](size_t index) {
    const Ranks ranks = groups.ranks(index);
    backends[index]->attach();
    backends[index]->set_communicator(ranks.world.communicator);
    trainers[index] = std::make_unique<Trainer>(*backends[index], config, ranks, text, options);
  });
  RunResult result;
  on_threads(groups, backends.size(), [&](size_t index) {
    backends[index]->attach();
    RunResult own = trainers[index]->run();
    if (index == 0) result = std::move(own);
  });
  return result;
}

}  // namespace train
