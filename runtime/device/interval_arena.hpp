// Suballocates the scratch of a call whose launches follow each other: a block lives from the launch that
// writes it to the last one that reads it, and blocks that never live at once may share addresses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "runtime/device/memory.hpp"

namespace f8::runtime {

class IntervalArena {
 public:
  // Adds a block that lives from launch `first` to launch `last`, and returns its number.
  size_t add(size_t bytes, int first, int last) {
    blocks_.push_back({(bytes + kAlign - 1) / kAlign * kAlign, first, last, 0});
    return blocks_.size() - 1;
  }
  // Places all blocks one after the other, each at the lowest address that no block which lives at the same time
  // has: the largest ones first. While that takes more than floor(), the block that ends last is placed
  // before all others, and so on; the smallest of these placements stays.
  void place() {
    std::vector<size_t> order(blocks_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, std::greater{}, [&](size_t i) { return blocks_[i].bytes; });
    const size_t least = floor();
    std::vector<Block> best;
    for (size_t tries = 0; tries < kMostTries * order.size() + 1; ++tries) {
      const size_t size = place_in(order);
      if (best.empty() || size < size_) {
        best = blocks_;
        size_ = size;
      }
      if (size_ == least) break;
      const auto last = std::ranges::max_element(
          order, {}, [&](size_t i) { return blocks_[i].at + blocks_[i].bytes; });
      std::rotate(order.begin(), last, last + 1);
    }
    blocks_ = std::move(best);
  }
  // Good after place().
  [[nodiscard]] size_t at(size_t block) const { return blocks_[block].at; }
  [[nodiscard]] size_t size() const { return size_; }
  // The most bytes that live at once: no placement has fewer.
  [[nodiscard]] size_t floor() const {
    size_t most = 0;
    for (const Block& now : blocks_) {
      size_t bytes = 0;
      for (const Block& block : blocks_) {
        if (block.first <= now.first && now.first <= block.last) bytes += block.bytes;
      }
      most = std::max(most, bytes);
    }
    return most;
  }

 private:
  struct Block {
    size_t bytes;
    int first, last;
    size_t at;
  };
  static constexpr size_t kMostTries = 4;  // of each block

  // Returns the bytes of the placement.
  size_t place_in(const std::vector<size_t>& order) {
    size_t size = 0;
    std::vector<const Block*> placed;  // by their addresses
    for (const size_t i : order) {
      Block& block = blocks_[i];
      block.at = 0;
      if (block.bytes == 0) continue;
      for (const Block* other : placed) {
        if (!live_at_once(block, *other)) continue;
        if (block.at + block.bytes <= other->at) break;
        block.at = std::max(block.at, other->at + other->bytes);
      }
      placed.insert(std::ranges::upper_bound(placed, block.at, {}, &Block::at), &block);
      size = std::max(size, block.at + block.bytes);
    }
    return size;
  }
  static bool live_at_once(const Block& a, const Block& b) {
    return a.first <= b.last && b.first <= a.last;
  }

  std::vector<Block> blocks_;
  size_t size_ = 0;
};

}  // namespace f8::runtime
