#include "runtime/device/calls/call_records.hpp"

#include <iterator>

namespace f8::runtime {

void CallRecords::set_forward(const void* saved, const Forward& forward) {
  if (moves_saved) return;
  const std::lock_guard lock(mutex_);
  forwards_[saved] = forward;
}

CallRecords::Forward CallRecords::forward(const void* saved) const {
  const std::lock_guard lock(mutex_);
  const auto found = forwards_.find(saved);
  return found == forwards_.end() ? Forward{} : found->second;
}

void CallRecords::set_fresh(const void* state, size_t bytes, bool fresh) {
  const auto begin = reinterpret_cast<uintptr_t>(state);
  const std::lock_guard lock(mutex_);
  // The new record replaces all that it overlaps.
  auto overlapping = fresh_.lower_bound(begin);
  if (overlapping != fresh_.begin() && std::prev(overlapping)->second > begin) --overlapping;
  while (overlapping != fresh_.end() && overlapping->first < begin + bytes) {
    overlapping = fresh_.erase(overlapping);
  }
  if (fresh) fresh_[begin] = begin + bytes;
}

bool CallRecords::is_fresh(const void* slot) const {
  const auto at = reinterpret_cast<uintptr_t>(slot);
  const std::lock_guard lock(mutex_);
  const auto after = fresh_.upper_bound(at);
  return after != fresh_.begin() && at < std::prev(after)->second;
}

}  // namespace f8::runtime
