// Written by `float8-tune cost-model fit`; see docs/method.md.
#include "runtime/cost_model.hpp"

namespace f8::runtime {

const CostModel& CostModel::fitted() {
  static const CostModel kModel = {.l2_bytes_per_clock = 67.64,
                                   .store_bytes_per_clock = 8.304,
                                   .tile_overhead = 426.8,
                                   .latency = 970,
                                   .launch = 1515,
                                   .cluster_skew = 2762,
                                   .pingpong_epilogue = 0.341,
                                   .exchange = 5296,
                                   .exchange_bytes_per_clock = 6.553,
                                   .tiles = {{128, 256, 2, false, 0.911, 0.845, 0.625},
                                             {256, 128, 2, false, 0.781, 0.781, 0.702},
                                             {128, 128, 2, true, 0.777, 0.431, 0.389},
                                             {128, 192, 2, false, 0.817, 0.757, 0.621},
                                             {128, 128, 2, false, 0.737, 0.737, 0.612},
                                             {64, 128, 2, true, 0.556, 0.450, 0.394},
                                             {64, 256, 2, true, 0.687, 0.422, 0.374},
                                             {64, 256, 1, false, 0.856, 0.477, 0.431},
                                             {64, 128, 1, false, 0.727, 0.604, 0.489},
                                             {64, 64, 1, false, 0.377, 0.371, 0.301}}};
  return kModel;
}

}  // namespace f8::runtime
