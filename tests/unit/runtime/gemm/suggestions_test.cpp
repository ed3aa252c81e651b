// The ranking of cuBLASLt's suggestions, by what they say of themselves.
#include "runtime/gemm/suggestions.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <span>

namespace f8::runtime {
namespace {

constexpr int kH100Sms = 132;

Suggestion tiled(int tile_m, int tile_n, int cluster_m = 1, int cluster_n = 2, int split_k = 1) {
  return {.algorithm = kTiledAlgorithm,
          .tile_m = tile_m,
          .tile_n = tile_n,
          .cluster_m = cluster_m,
          .cluster_n = cluster_n,
          .split_k = split_k};
}

size_t first(std::initializer_list<Suggestion> suggestions, Shape shape) {
  return rank_first(std::span(suggestions.begin(), suggestions.size()), shape, kH100Sms);
}

// 132 tiles fill one wave; 144 of them leave most of a second one idle.
TEST(Suggestions, AWaveThatIsNearlyEmptyCosts) {
  const Shape shape = {11 * 128, 12 * 256, 4096};
  EXPECT_EQ(first({tiled(128, 256), tiled(256, 128)}, shape), 0);
  EXPECT_EQ(first({tiled(256, 128), tiled(128, 256)}, shape), 1);
}

TEST(Suggestions, OneWaveOfASmallResultIsSplitAlongALongKAlone) {
  const Shape small = {512, 512, 32768};
  EXPECT_EQ(first({tiled(128, 128), tiled(128, 128, 1, 2, 8)}, small), 1);
  EXPECT_EQ(first({tiled(128, 128), tiled(128, 128, 1, 2, 2)}, {4096, 4096, 64}), 0);
}

TEST(Suggestions, TheProductOfVectorsIsTaken) {
  const Suggestion vector{.algorithm = kVectorAlgorithm};
  EXPECT_EQ(first({Suggestion{.algorithm = 24, .tile_m = 64, .tile_n = 64}, vector,
                   Suggestion{.algorithm = 16}, vector},
                  {1024, 1024, 1}),
            1);
}

TEST(Suggestions, WhatIsUnknownIsLast) {
  const Suggestion other{.algorithm = 99, .tile_m = 128, .tile_n = 128};
  const Suggestion odd{.algorithm = kTiledAlgorithm, .tile_m = 128, .tile_n = 128};  // its cluster
  EXPECT_EQ(first({other, odd, tiled(128, 128)}, {1024, 1024, 1024}), 2);
  EXPECT_EQ(first({other, odd}, {1024, 1024, 1024}), 0) << "cuBLASLt's own order";
  EXPECT_EQ(first({tiled(128, 128), tiled(128, 128)}, {1024, 1024, 1024}), 0);
}

TEST(Suggestions, TermsAreFiniteForEveryShape) {
  for (const int64_t m : {1, 7, 4096, 1 << 20}) {
    for (const int64_t k : {1, 64, 1 << 20}) {
      for (const Suggestion& s : {tiled(32, 64), tiled(64, 512, 4, 2), tiled(128, 128, 8, 1, 13)}) {
        for (const double term : suggestion_terms(s, {m, 16, k}, 1)) {
          EXPECT_TRUE(std::isfinite(term)) << m << " " << k;
        }
      }
    }
  }
}

}  // namespace
}  // namespace f8::runtime
