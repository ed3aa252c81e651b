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
    operation_ = "the comparison of ranks";
    model_.agree(run_name_);
    if (!options_.resume.empty()) resume();
    const int64_t last =
        options_.stop_after > 0 ? std::min(options_.stop_after, config_.steps) : config_.steps;
    // Delayed scaling has no scales yet in the first step, so its launches are others.
    if (done() == 0 && last > 0) first_step();
    if (done() < last) {
      operation_ = "the recording of a step";
      backend_.record([this] { model_.step(false); });
    }
    while (done() < last) some_steps(last);
    return RunResult{.curve = std::move(curve_), .tokens_per_second = tokens_per_second()};
  }

  // What it is doing, in words.
  [[nodiscard]] const std::string& operation() const { return operation_; }

 private:
  [[nodiscard]] int64_t done() const { return static_cast<int64_t>(curve_.loss.size()); }

  void resume() {
    operation_ = "loading the checkpoint";
    const Checkpoint checkpoint = load(options_.resume, run_name_);
    model_.set_state(checkpoint);
    curve_.loss = checkpoint.loss;
    curve_.ms = checkpoint.ms;
    add_learning_rates();
  }

  void first_step() {
    operation_ = "step 1";
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
    operation_ = steps == 1 ? format("step %ld", done() + 1)
                            : format("steps %ld to %ld", done() + 1, done() + steps);
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
        fail_on_all(FLOAT8_INVALID_ARGUMENT,
                    "%s: the loss of step %ld is not finite; try a smaller --lr",
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

  // A step whose gradient was not finite has spoilt the weights, and is not saved.
  void save_when_due() {
    if (options_.save_every == 0 || done() % options_.save_every != 0) return;
    operation_ = format("the checkpoint of step %ld", done());
    Checkpoint checkpoint = model_.state();
    const auto is_finite = [](float value) { return std::isfinite(value); };
    if (!std::ranges::all_of(checkpoint.master, is_finite)) {
      fail_on_all(FLOAT8_INVALID_ARGUMENT,
                  "%s: the weights behind step %ld are not finite, and are not saved; resume from "
                  "the checkpoint before, with a smaller --lr",
                  config_.recipe.c_str(), done());
    }
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
  std::string operation_;
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
  Groups(const TrainConfig& config, int timeout_ms,
         const std::vector<std::unique_ptr<Backend>>& backends)
      : fsdp_(static_cast<int>(config.fsdp)),
        tp_(static_cast<int>(config.tp)),
        timeout_ms_(timeout_ms) {
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
  Communicators create(const std::vector<std::unique_ptr<Backend>>& backends, int first, int step,
                       int count) const {
    std::vector<const float8::Context*> contexts;
    for (int i = 0; i < count; ++i) {
      contexts.push_back(&backends[static_cast<size_t>(first + i * step)]->context());
    }
    return float8::Communicator::create(contexts, timeout_ms_).value();
  }

  int fsdp_;
  int tp_;
  int timeout_ms_;
  Communicators world_;
  std::vector<Communicators> of_fsdp_;  // by tensor-parallel rank
  std::vector<Communicators> of_tp_;    // by FSDP rank
};

// Runs a body for each rank, on a thread of its own. Where one throws, it leaves the others, and the
// first error is thrown. NCCL waits for graphs with its collectives before it aborts, so the graph of a
// rank that leaves goes first.
void on_threads(Groups& groups, const std::vector<std::unique_ptr<Backend>>& backends,
                const std::function<void(size_t)>& body) {
  std::exception_ptr first_error;
  std::mutex mutex;
  {
    std::vector<std::jthread> threads;
    for (size_t index = 0; index < backends.size(); ++index) {
      threads.emplace_back([&, index] {
        try {
          body(index);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first_error) first_error = std::current_exception();
          backends[index]->set_communicator(nullptr, 0);
          groups.abort(index);
        }
      });
    }
  }
  if (first_error) std::rethrow_exception(first_error);
}

// Runs `body` of a rank, whose error then says which rank it is and what it did.
void of_rank(size_t rank, const std::function<void()>& body,
             const std::function<std::string()>& operation) {
  try {
    body();
  } catch (const CommonException&) {
    throw;
  } catch (const float8::Exception& error) {
    throw float8::Exception(
        {error.code(), format("rank %zu: %s failed: %s", rank, operation().c_str(), error.what())});
  }
}

// Takes the communicators from the backends before they are destroyed, also where a rank throws.
struct WithoutCommunicators {
  const std::vector<std::unique_ptr<Backend>>& backends;
  ~WithoutCommunicators() {
    for (const auto& backend : backends) backend->set_communicator(nullptr, 0);
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

RunResult train_on_ranks(const MakeBackend& make_backend, const TrainConfig& config,
                         const Text& text, const RunOptions& options) {
  validate(config);
  return train_on_ranks(make_backend, std::vector(static_cast<size_t>(config.ranks()), config),
                        text, options);
}

RunResult train_on_ranks(const MakeBackend& make_backend, const std::vector<TrainConfig>& configs,
                         const Text& text, const RunOptions& options) {
  for (const TrainConfig& config : configs) validate(config);
  if (configs.empty() || configs.size() != static_cast<size_t>(configs.front().ranks())) {
    fail(FLOAT8_INVALID_ARGUMENT, "%zu configurations; each rank has one", configs.size());
  }
  if (configs.size() == 1) return train(*make_backend(0), configs.front(), text, options);
  std::vector<std::unique_ptr<Backend>> backends;
  for (size_t rank = 0; rank < configs.size(); ++rank) {
    backends.push_back(make_backend(static_cast<int>(rank)));
  }
  Groups groups(configs.front(), options.rank_timeout_ms, backends);
  const WithoutCommunicators leaving{backends};
  std::vector<std::unique_ptr<Trainer>> trainers(backends.size());
  // All memory is taken before any rank waits for another on its device.
  on_threads(groups, backends, [&](size_t index) {
    const auto body = [&] {
      const Ranks ranks = groups.ranks(index);
      backends[index]->attach();
      backends[index]->set_communicator(ranks.world.communicator, options.rank_timeout_ms);
      trainers[index] =
          std::make_unique<Trainer>(*backends[index], configs[index], ranks, text, options);
    };
    of_rank(index, body, [] { return std::string("planning"); });
  });
  RunResult result;
  on_threads(groups, backends, [&](size_t index) {
    Trainer& trainer = *trainers[index];
    const auto body = [&] {
      backends[index]->attach();
      RunResult own = trainer.run();
      if (index == 0) result = std::move(own);
    };
    of_rank(index, body, [&] { return trainer.operation(); });
  });
  return result;
}

}  // namespace train
