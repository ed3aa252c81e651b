#include "tools/tuner/gpus/dispatcher.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

namespace f8::tuner {

using namespace std::chrono_literals;

Dispatcher::Dispatcher(const SweepPlan& plan, const std::set<std::string>& wanted, size_t gpus)
    : shares_(gpus), losses_(plan.linears.size()) {
  const Dims* last = nullptr;
  for (size_t i = 0; i < plan.linears.size(); ++i) {
    const PlannedLinear& linear = plan.linears[i];
    predicted_s_.push_back(linear.predicted_s);
    if (!wanted.contains(linear.problem.key())) continue;
    const Dims& dims = linear.problem.dims;
    if (last == nullptr || *last != dims) groups_.emplace_back();
    last = &dims;
    groups_.back().push_back(i);
    ++left_.linears;
    left_.predicted_s += linear.predicted_s;
  }
  std::ranges::stable_sort(groups_, std::ranges::greater{},
                           [this](const auto& group) { return predicted_s(group); });
}

double Dispatcher::predicted_s(const std::deque<size_t>& linears) const {
  return std::accumulate(linears.begin(), linears.end(), 0.0,
                         [this](double sum, size_t linear) { return sum + predicted_s_[linear]; });
}

std::vector<size_t> Dispatcher::order() const {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> order;
  for (const auto& group : groups_) order.insert(order.end(), group.begin(), group.end());
  return order;
}

std::optional<size_t> Dispatcher::take(size_t gpu) {
  std::deque<size_t>& own = shares_[gpu].linears;
  if (own.empty() && !groups_.empty()) {
    own = std::move(groups_.front());
    groups_.pop_front();
  }
  if (!own.empty()) {
    const size_t linear = own.front();
    own.pop_front();
    return linear;
  }
  const auto longest = std::ranges::max_element(
      shares_, {}, [this](const Share& share) { return predicted_s(share.linears); });
  if (longest->linears.empty()) return std::nullopt;
  const size_t linear = longest->linears.back();
  longest->linears.pop_back();
  return linear;
}

std::optional<size_t> Dispatcher::next(size_t gpu, const std::function<bool()>& ended) {
  std::unique_lock lock(mutex_);
  while (left_.linears > given_up_) {
    if (const std::optional<size_t> linear = take(gpu)) return shares_[gpu].running = linear;
    changed_.wait_for(lock, 100ms);
    lock.unlock();
    const bool end = ended();
    lock.lock();
    if (end) break;
  }
  return std::nullopt;
}

void Dispatcher::measured(size_t gpu, bool failed) {
  const std::lock_guard lock(mutex_);
  Share& share = shares_[gpu];
  const size_t linear = share.running.value();
  share.running.reset();
  if (!failed) share.failed.clear();
  if (failed) share.failed.push_back(linear);
  --left_.linears;
  left_.predicted_s -= predicted_s_[linear];
  left_.measured_s += predicted_s_[linear];
  changed_.notify_all();
}

std::vector<size_t> Dispatcher::lose(size_t gpu) {
  const std::lock_guard lock(mutex_);
  Share& share = shares_[gpu];
  std::deque<size_t> back = std::move(share.linears);
  share.linears.clear();
  for (const size_t linear : share.failed) {
    ++left_.linears;
    left_.predicted_s += predicted_s_[linear];
    left_.measured_s -= predicted_s_[linear];
    back.push_front(linear);
  }
  if (share.running && ++losses_[*share.running] < kLossesToGiveUp) {
    back.push_front(*share.running);
  } else if (share.running) {
    ++given_up_;
  }
  share.running.reset();
  if (!back.empty()) groups_.push_front(std::move(back));
  changed_.notify_all();
  return std::exchange(share.failed, {});
}

Dispatcher::Left Dispatcher::left() const {
  const std::lock_guard lock(mutex_);
  return left_;
}

}  // namespace f8::tuner
