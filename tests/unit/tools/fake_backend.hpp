// A machine without a GPU. Only measuring moves its clock, and a test decides the true time, the
// noise and the misbehaviour of its candidates. In a worker process (fork) it misbehaves for real:
// it aborts, sleeps, breaks its device.
#pragma once

#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <map>
#include <numbers>
#include <set>
#include <string>

#include "tools/tuner/search/gemm_candidates.hpp"
#include "tools/tuner/statistics.hpp"
#include "tools/tuner/worker/worker.hpp"

namespace f8::tuner {

enum class Misbehaviour {
  kNone,
  kWrong,          // results that verification must catch
  kUnsupported,    // refused when it is planned
  kCompile,        // refused by the compiler
  kAbort,          // the process dies in the first launch
  kHang,           // the first launch never ends
  kSticky,         // the first launch breaks the device
  kAbortInTiming,  // the process dies while the group is timed
};

struct FakeMachine {
  // The nanoseconds of a launch at a moment.
  std::function<double(const Problem&, const Candidate&, double now_s)> ns =
      [](const Problem&, const Candidate&, double) { return 100e3; };
  std::function<Misbehaviour(const Problem&, const Candidate&)> misbehaviour =
      [](const Problem&, const Candidate&) { return Misbehaviour::kNone; };
  std::function<uint64_t(double now_s)> events = [](double) { return uint64_t{0}; };
  std::function<double(double now_s)> sm_mhz = [](double) { return 1700.0; };
  double noise = 0.002;    // relative standard deviation of a batch
  double block_noise = 0;  // the same of everything that is timed together
  int samples = 1;         // of the device's state at each call
  int heuristics = 2;
  int unmeasured = 0;          // of them
  double hot_factor = 1;       // a time with hot operands over one with cold
  double estimate_factor = 1;  // how much slower a single launch is than one in a batch
  uint64_t seed = 7;
  double real_sleep_s = 0;  // real time that a timing call takes
  char unit = '0';          // its UUID is of this digit alone
  int power_limit_w = 700;
};

class FakeBackend final : public Backend {
 public:
  explicit FakeBackend(FakeMachine machine) : machine_(std::move(machine)), random_(machine_.seed) {
    device_ = h100();
    device_.uuid = std::string(32, machine_.unit);
    device_.power_limit_w = machine_.power_limit_w;
  }

  const runtime::DeviceInfo& device() const override { return device_; }
  Result<Suggested> suggestions(const Problem&, bool) override {
    return Suggested{machine_.heuristics, machine_.unmeasured};
  }
  Status open(const Problem& problem, L2State l2) override {
    problem_ = problem;
    opened.push_back(l2);
    candidates_.clear();
    launches_.clear();
    return {};
  }
  Result<Built> add(const Candidate& candidate) override {
    const Misbehaviour misbehaviour = machine_.misbehaviour(problem_, candidate);
    if (misbehaviour == Misbehaviour::kUnsupported)
      return fail(ErrorCode::kUnsupported, "not on this device");
    if (misbehaviour == Misbehaviour::kCompile)
      return fail(ErrorCode::kCompile, "C7510 serialised wgmma");
    candidates_.push_back(candidate);
    launches_.push_back(1);
    Built built;
    built.id = static_cast<int>(candidates_.size()) - 1;
    built.registers = 168;
    return built;
  }
  Result<Check> verify(int candidate) override {
    switch (machine_.misbehaviour(problem_, at(candidate))) {
      case Misbehaviour::kAbort:
        std::signal(SIGABRT, SIG_DFL);
        std::abort();
      case Misbehaviour::kHang:
        while (true) ::sleep(1);
      case Misbehaviour::kSticky:
        return fail(ErrorCode::kCuda, "CUDA_ERROR_ILLEGAL_ADDRESS");
      case Misbehaviour::kWrong: {
        Check check;
        check.right = false;
        check.rel_err = 0.5;
        check.what = "d[0][0] is 1, want 2";
        return check;
      }
      default:
        break;
    }
    Check check;
    check.rel_err = 0.002;
    check.sqnr_db = 54;
    return check;
  }
  Result<double> estimate_ns(int candidate) override {
    return machine_.ns(problem_, at(candidate), now_s_) * machine_.estimate_factor;
  }
  Status set_batch(int candidate, int launches) override {
    launches_[static_cast<size_t>(candidate)] = launches;
    return {};
  }
  Result<std::vector<double>> time(std::span<const int> order) override {
    if (order.empty()) return fail(ErrorCode::kInternal, "nothing to time");
    if (machine_.real_sleep_s > 0) ::usleep(static_cast<useconds_t>(machine_.real_sleep_s * 1e6));
    ++time_calls;
    const double block = 1 + machine_.block_noise * normal();
    std::vector<double> times;
    for (const int candidate : order) {
      if (machine_.misbehaviour(problem_, at(candidate)) == Misbehaviour::kAbortInTiming) {
        std::signal(SIGABRT, SIG_DFL);
        std::abort();
      }
      timed.insert(at(candidate).config);
      const double hot = opened.back() == L2State::kHot ? machine_.hot_factor : 1;
      const double ns = machine_.ns(problem_, at(candidate), now_s_) * hot * block *
                        (1 + machine_.noise * normal());
      times.push_back(ns);
      now_s_ += ns * 1e-9 * launches_[static_cast<size_t>(candidate)];
    }
    return times;
  }
  // Results that are 1 % too large have an SQNR of 40 dB. A machine that refuses attention as a whole has no backward in
  // bf16.
  Result<AttentionResults<float>> attention_results(AttentionRecipe recipe,
                                                    const AttentionShape& shape,
                                                    const AttentionData& data) override {
    const auto misbehaviour = machine_.misbehaviour(
        attention_problem(Op::kAttention, recipe, shape).value(), {.impl = Impl::kFloat8});
    if (misbehaviour == Misbehaviour::kSticky) {
      return fail(ErrorCode::kCuda, "CUDA_ERROR_ILLEGAL_ADDRESS");
    }
    const bool has_backward =
        recipe == AttentionRecipe::kFp8 || misbehaviour != Misbehaviour::kUnsupported;
    const auto exact = exact_attention(shape, data, has_backward);
    const auto inexact = [](const std::vector<double>& values) {
      std::vector<float> own;
      for (const double value : values) own.push_back(static_cast<float>(1.01 * value));
      return own;
    };
    return AttentionResults<float>{inexact(exact.o), inexact(exact.dq), inexact(exact.dk),
                                   inexact(exact.dv)};
  }
  DeviceState sample() override {
    DeviceState state;
    state.samples = machine_.samples;
    state.sm_mhz_mean = state.sm_mhz_min = machine_.sm_mhz(now_s_);
    state.power_w = 650;
    state.temp_c = 60;
    state.events = machine_.events(now_s_);
    return state;
  }
  double now_s() const override { return now_s_; }
  void sleep_s(double seconds) override { now_s_ += seconds; }

  [[nodiscard]] int launches(int candidate) const {
    return launches_[static_cast<size_t>(candidate)];
  }

  int time_calls = 0;
  std::set<std::string> timed;  // configs
  std::vector<L2State> opened;  // by call of open()

 private:
  [[nodiscard]] const Candidate& at(int candidate) const {
    return candidates_[static_cast<size_t>(candidate)];
  }
  double normal() {
    const double u = 1 - random_.uniform();
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * random_.uniform());
  }

  FakeMachine machine_;
  Random random_;
  runtime::DeviceInfo device_;
  Problem problem_;
  std::vector<Candidate> candidates_;
  std::vector<int> launches_;
  double now_s_ = 0;
};

// A worker process that ends with what `body` returns.
inline Spawn spawn_that(const std::function<int(int in, int out)>& body) {
  return [body]() -> Result<Child> {
    std::array<int, 2> to_child{};
    std::array<int, 2> from_child{};
    if (::pipe(to_child.data()) != 0 || ::pipe(from_child.data()) != 0) {
      return fail(ErrorCode::kIo, "no pipes");
    }
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(to_child[1]);
      ::close(from_child[0]);
      ::_exit(body(to_child[0], from_child[1]));
    }
    ::close(to_child[0]);
    ::close(from_child[1]);
    return Child{.pid = pid, .in = from_child[0], .out = to_child[1]};
  };
}

// A worker process that serves a fake machine.
inline Spawn spawn_fake(const FakeMachine& machine) {
  return spawn_that([machine](int in, int out) {
    return serve(
        [&]() -> Result<std::unique_ptr<Backend>> {
          return std::make_unique<FakeBackend>(machine);
        },
        in, out);
  });
}

inline Problem test_problem(Op op = Op::kOutput, const char* recipe = "tensorwise",
                            Shape shape = {4096, 4096, 4096}) {
  return Problem::make(op, *find_recipe(recipe), shape).value();
}

}  // namespace f8::tuner
