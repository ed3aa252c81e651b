// Routing tokens to experts, and sums over their rows, in the order that route.cuh and combine.cuh fix.
#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <vector>

#include "codegen/kernels/experts/moe_args.cuh"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

int32_t bucket_of(const kernels::RouteArgs& args, bool long_ids, int64_t pair) {
  const int64_t id = long_ids ? static_cast<const int64_t*>(args.ids)[pair]
                              : static_cast<const int32_t*>(args.ids)[pair];
  return id >= 0 && id < args.experts ? static_cast<int32_t>(id) : args.experts;
}

// The counts of each chunk.
std::vector<int32_t> counts_of(const kernels::RouteArgs& args, bool long_ids) {
  const int64_t buckets = args.experts + 1;
  std::vector<int32_t> counts(
      static_cast<size_t>(kernels::RouteArgs::chunks_of(args.pairs) * buckets));
  for (int64_t pair = 0; pair < args.pairs; ++pair) {
    ++counts[static_cast<size_t>(pair / args.chunk * buckets + bucket_of(args, long_ids, pair))];
  }
  return counts;
}

void place(const kernels::RouteArgs& args, bool long_ids, const std::vector<int32_t>& counts) {
  const size_t buckets = static_cast<size_t>(args.experts) + 1;
  std::vector<int32_t> next(buckets + 1);  // row of each bucket
  for (size_t i = 0; i < counts.size(); ++i) next[i % buckets + 1] += counts[i];
  for (size_t b = 1; b < next.size(); ++b) next[b] += next[b - 1];
  std::copy_n(next.begin() + 1, args.experts, args.offsets);
  for (int32_t pair = 0; pair < args.pairs; ++pair) {
    const int32_t bucket = bucket_of(args, long_ids, pair);
    const int32_t row = next[static_cast<size_t>(bucket)]++;
    args.position[pair] = row;
    args.index[row] = pair / args.top_k;
    if (args.scores != nullptr) {
      args.row_scores[row] = bucket < args.experts ? args.scores[pair] : 0.0F;
    }
  }
}

// A combination and the gradient of its scores share these checks.
template <class Args>
void check_rows(const Args& args, const codegen::CombineSpec& spec, const Call& call) {
  if (args.tokens < 1 || args.cols < 1 || args.top_k < 1) {
    call.fault("combine: {} tokens, {} columns, top_k {}", args.tokens, args.cols, args.top_k);
  }
  const bool is_wide = spec.y == Dtype::kF32 && spec.out == Dtype::kF32;
  if (args.cols % 8 != 0 && !is_wide) call.fault("combine: {} columns", args.cols);
  if (args.y == nullptr || !is_aligned(args.y, args.cols % 8 == 0 ? 16 : 4) ||
      args.position == nullptr || args.rows == nullptr) {
    call.fault("combine: y, position or rows misaligned or null");
  }
}

template <class Args>
uint32_t rows_of_experts(const Args& args) {
  return std::min(static_cast<uint32_t>(*args.rows),
                  static_cast<uint32_t>(int64_t{args.tokens} * args.top_k));
}

void combine(const codegen::CombineSpec& spec, const kernels::CombineArgs& args) {
  const uint32_t rows = rows_of_experts(args);
  for (int64_t token = 0; token < args.tokens; ++token) {
    for (int64_t column = 0; column < args.cols; ++column) {
      float sum = 0;
      for (int64_t pair = token * args.top_k; pair < (token + 1) * args.top_k; ++pair) {
        const auto row = static_cast<uint32_t>(args.position[pair]);
        float product = 0;
        if (row < rows) {
          product = load_element(args.y, int64_t{row} * args.cols + column, spec.y) *
                    (args.scores == nullptr ? 1.0F : args.scores[pair]);
        }
        sum = pair == token * args.top_k ? product : sum + product;
      }
      store_element(args.out, token * args.cols + column, sum, spec.out);
    }
  }
}

void score_gradient(const codegen::CombineSpec& spec, const kernels::ScoreGradientArgs& args) {
  constexpr size_t kLanes = 32;
  const uint32_t rows = rows_of_experts(args);
  const int64_t width = args.cols % 8 == 0 ? 8 : 1;  // of a lane's vector
  for (int64_t pair = 0; pair < int64_t{args.tokens} * args.top_k; ++pair) {
    const auto row = static_cast<uint32_t>(args.position[pair]);
    std::array<float, kLanes> sums{};
    for (int64_t column = 0; column < args.cols && row < rows; ++column) {
      float& sum = sums[static_cast<size_t>(column / width) % kLanes];
      sum = std::fma(load_element(args.dout, pair / args.top_k * args.cols + column, spec.out),
                     load_element(args.y, int64_t{row} * args.cols + column, spec.y), sum);
    }
    for (size_t step = kLanes / 2; step > 0; step /= 2) {
      for (size_t lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
    }
    args.dscores[pair] = sums[0];
  }
}

}  // namespace

void emulate(const codegen::RouteSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::RouteArgs>();
  if (args.experts < 1 || args.experts > kernels::kMaxExperts || args.pairs < 0 || args.top_k < 1 ||
      args.pairs % args.top_k != 0) {
    call.fault("route: {} pairs, top_k {}, {} experts", args.pairs, args.top_k, args.experts);
  } else if (args.chunk != kernels::RouteArgs::chunk_of(args.pairs) ||
             static_cast<int>(call.launch.grid) != kernels::RouteArgs::chunks_of(args.pairs)) {
    call.fault("route: grid {} and chunks of {} for {} pairs", call.launch.grid, args.chunk,
               args.pairs);
  }
  const bool has_pairs = args.ids != nullptr && args.index != nullptr && args.position != nullptr;
  if (args.counts == nullptr || args.offsets == nullptr || (args.pairs > 0 && !has_pairs) ||
      (args.scores != nullptr && args.row_scores == nullptr)) {
    call.fault("route: an array is null");
  }
  if (!call.faults.empty()) return;
  const std::vector<int32_t> counts = counts_of(args, spec.long_ids);
  if (!spec.place) {
    std::ranges::copy(counts, args.counts);
  } else if (!std::ranges::equal(counts, std::span(args.counts, counts.size()))) {
    call.fault("route: the counts are not those of the ids");
  } else {
    place(args, spec.long_ids, counts);
  }
}

void emulate(const codegen::CombineSpec& spec, const Call& call) {
  constexpr int64_t kWarps = kernels::kTileThreads / 32;
  const unsigned grid = call.launch.grid;
  if (spec.gradient) {
    const auto& args = call.args<kernels::ScoreGradientArgs>();
    check_rows(args, spec, call);
    if (grid != ceil_div(int64_t{args.tokens} * args.top_k, kWarps)) {
      call.fault("score gradient: grid {} for {} tokens", grid, args.tokens);
    }
    if (args.dout == nullptr || args.dscores == nullptr) {
      call.fault("score gradient: dout or dscores is null");
    }
    if (call.faults.empty()) score_gradient(spec, args);
  } else {
    const auto& args = call.args<kernels::CombineArgs>();
    check_rows(args, spec, call);
    if (static_cast<int>(grid) != args.tokens) {
      call.fault("combine: grid {} for {} tokens", grid, args.tokens);
    }
    if (args.out == nullptr) call.fault("combine: out is null");
    if (call.faults.empty()) combine(spec, args);
  }
}

}  // namespace f8::runtime::emulation
