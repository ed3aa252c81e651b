// A run, from a configuration to a loss curve, on one rank or several, with checkpoints on the way.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "files.hpp"

namespace train {

inline const std::vector<std::string> kRecipes = {
    "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"};

struct RunOptions {
  bool emulate = false;
  int device = 0;           // rank r has the device of this ordinal plus r
  std::string table;        // a file of kernel choices; empty: the library's
  fs::path checkpoint;      // where it is written
  i64 save_every = 0;       // steps; 0: never
  fs::path resume;          // empty: the run begins at its start
  i64 stop_after = 0;       // steps in all; 0: config.steps. The schedule is config's.
  int timeout_ms = 60'000;  // of a step; a rank that does not come is then an error
  // Called on each rank after each look at the device, which is every 20 steps and before checkpoints.
  std::function<void(int rank, const State& curve)> progress;
};

// A rank of a run.
class Trainer {
 public:
  Trainer(Device& device, const Config& config, const std::string& text, const RunOptions& options)
      : device_(device),
        config_(config),
        options_(options),
        run_(name_of_run(config, text)),
        model_(device, config, text) {}

  // Returns the losses and the milliseconds of each step, and no weights.
  State run() {
    if (!options_.resume.empty()) {
      State state = load(options_.resume, run_);
      model_.set_state(state);
      curve_.loss = std::move(state.loss);
      curve_.ms = std::move(state.ms);
    }
    const i64 stop = options_.stop_after > 0 ? options_.stop_after : config_.steps;
    while (done() < stop) {
      i64 count = std::min(20 - done() % 20, stop - done());
      if (options_.save_every > 0) {
        count = std::min(count, options_.save_every - done() % options_.save_every);
      }
      run_steps(count);
    }
    return std::move(curve_);
  }

 private:
  [[nodiscard]] i64 done() const { return std::ssize(curve_.loss); }

  void run_steps(i64 count) {
    const auto start = std::chrono::steady_clock::now();
    for (i64 i = 0; i < count; ++i) model_.step();
    device_.wait(format("step %lld", done() + count), count * options_.timeout_ms);
    const std::chrono::duration<float, std::milli> ms = std::chrono::steady_clock::now() - start;
    for (const float loss : model_.losses(done(), done() + count)) {
      curve_.loss.push_back(loss);
      curve_.ms.push_back(ms.count() / static_cast<float>(count));
      if (std::isfinite(loss)) continue;
      fail(FLOAT8_INVALID_ARGUMENT,
           format("the loss of step %lld is not finite; try a smaller --lr", done()));
    }
    if (options_.progress) options_.progress(device_.rank, curve_);
    if (options_.save_every > 0 && done() % options_.save_every == 0) save_checkpoint();
  }

  // A step whose gradient was not finite has spoilt the weights, and is not saved.
  void save_checkpoint() {
    State state = model_.state();
    if (!std::ranges::all_of(state.master, [](float value) { return std::isfinite(value); })) {
      fail(FLOAT8_INVALID_ARGUMENT,
           format("the weights behind step %lld are not finite, and are not saved; resume from the "
                  "checkpoint before, with a smaller --lr",
                  done()));
    }
    state.loss = curve_.loss;
    state.ms = curve_.ms;
    if (device_.rank == 0) save(options_.checkpoint, run_, state);
  }

  Device& device_;
  const Config& config_;
  const RunOptions& options_;
  const std::string run_;
  Model model_;
  State curve_;
};

// The ranks of a run: a device, a communicator and a thread each.
class Ranks {
 public:
  Ranks(const Config& config, const RunOptions& options) {
    std::vector<const float8::Context*> contexts;
    for (int rank = 0; rank < config.fsdp; ++rank) {
      // There are eight emulated devices, which ranks may share.
      const int index = options.emulate ? rank % 8 : options.device + rank;
      devices_.push_back(std::make_unique<Device>(index, options.emulate));
      Device& device = *devices_.back();
      device.rank = rank;
      device.ranks = static_cast<int>(config.fsdp);
      if (!options.table.empty()) (void)device.context().load_table(options.table).value();
      contexts.push_back(&device.context());
    }
    if (config.fsdp == 1) return;
    communicators_ = float8::Communicator::create(contexts, options.timeout_ms).value();
    for (size_t r = 0; r < devices_.size(); ++r) devices_[r]->communicator = &communicators_[r];
  }

  // Runs `body` on each rank. Where one throws, it leaves the others, and the first error is thrown, which
  // names the rank.
  void run(const std::function<void(Device&)>& body) {
    float8::Error first_error;
    std::mutex mutex;
    const auto run_rank = [&](size_t r) {
      try {
        devices_[r]->attach();
        body(*devices_[r]);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        const auto* known = dynamic_cast<const float8::Exception*>(&error);
        if (first_error.message.empty()) {
          first_error = {known == nullptr ? FLOAT8_INTERNAL : known->code(), error.what()};
          if (!communicators_.empty()) first_error.message.insert(0, format("rank %zu: ", r));
        }
        if (!communicators_.empty()) communicators_[r].abort();
      }
    };
    {
      std::vector<std::jthread> threads;
      for (size_t r = 0; r < devices_.size(); ++r) threads.emplace_back(run_rank, r);
    }
    if (!first_error.message.empty()) throw float8::Exception(first_error);
  }

 private:
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<float8::Communicator> communicators_;  // of several ranks
};

// Trains on config.fsdp ranks. Where one fails, all of them stop, and the checkpoint is that of the last step
// that was saved.
[[nodiscard]] inline State train(const Config& config, const std::string& text,
                                 const RunOptions& options) {
  config.validate();
  if (text.size() <= static_cast<size_t>(config.context) || text.size() >> 32 != 0) {
    fail(FLOAT8_INVALID_ARGUMENT, format("the text has %zu bytes; it has more than --context "
                                         "(%lld), and less than 4 GiB: name other "
                                         "files with --data",
                                         text.size(), config.context));
  }
  Ranks ranks(config, options);
  std::vector<std::unique_ptr<Trainer>> trainers(static_cast<size_t>(config.fsdp));
  // All memory is taken before any rank waits for another on its device.
  ranks.run([&](Device& device) {
    trainers[static_cast<size_t>(device.rank)] =
        std::make_unique<Trainer>(device, config, text, options);
  });
  State curve;
  ranks.run([&](Device& device) {
    State own = trainers[static_cast<size_t>(device.rank)]->run();
    if (device.rank == 0) curve = std::move(own);
  });
  return curve;
}

// The mean of the last 100 losses.
[[nodiscard]] inline double final_loss(const State& curve) {
  const auto count = std::min<std::ptrdiff_t>(100, std::ssize(curve.loss));
  return std::accumulate(curve.loss.end() - count, curve.loss.end(), 0.0) /
         static_cast<double>(count);
}

}  // namespace train
