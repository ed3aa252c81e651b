#include "runtime/lists/call_overlaps.hpp"

#include <algorithm>
#include <numeric>

namespace f8::runtime {

void CallOverlaps::reserve(size_t regions) {
  regions_.reserve(regions);
  order_.reserve(regions);
}

bool CallOverlaps::is_repeated(size_t i, size_t j) const {
  const OfCall& a = regions_[i];
  const OfCall& b = regions_[j];
  return a.repeats && b.repeats && a.region.name == b.region.name &&
         a.region.begin == b.region.begin && a.region.bytes() == b.region.bytes();
}

// In the order of their addresses a region overlaps an earlier one if it begins before the farthest
// end so far; of a region that is only read, the farthest end of what is written counts.
Status CallOverlaps::check(const char* name) {
  const auto begin = [this](uint32_t i) { return regions_[i].region.begin; };
  if (order_.size() != regions_.size()) {
    order_.resize(regions_.size());
    std::iota(order_.begin(), order_.end(), 0U);
  }
  if (!std::ranges::is_sorted(order_, {}, begin)) std::ranges::sort(order_, {}, begin);
  constexpr size_t kNone = SIZE_MAX;
  size_t farthest = kNone;
  size_t farthest_written = kNone;
  for (const uint32_t i : order_) {
    const bool written = regions_[i].region.access == Access::kWrite;
    const size_t before = written ? farthest : farthest_written;
    if (before != kNone && end(before) > begin(i)) [[unlikely]] {
      if (is_repeated(i, before)) continue;
      return written ? refuse(name, i, before) : refuse(name, before, i);
    }
    if (farthest == kNone || end(i) > end(farthest)) farthest = i;
    if (written && (farthest_written == kNone || end(i) > end(farthest_written))) {
      farthest_written = i;
    }
  }
  return {};
}

std::unexpected<Error> CallOverlaps::refuse(const char* name, size_t written, size_t other) const {
  const auto& [a, a_call, a_repeats] = regions_[written];
  const auto& [b, b_call, b_repeats] = regions_[other];
  return fail(ErrorCode::kInvalidArgument,
              "{}: {} of args[{}] ({} bytes) and {} of args[{}] ({} bytes) overlap; the first is "
              "written, give it memory of its own",
              name, name_of(a), a_call, a.bytes(), name_of(b), b_call, b.bytes());
}

}  // namespace f8::runtime
