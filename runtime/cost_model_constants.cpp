// Written by `float8-tune cost-model fit`; see docs/method.md.
#include "runtime/cost_model.hpp"

namespace f8::runtime {

const CostModel& CostModel::fitted() {
  static const CostModel kModel = {.l2_bytes_per_clock = 43.86,
                                   .store_bytes_per_clock = 14.09,
                                   .tile_overhead = 358.8,
                                   .latency = 970,
                                   .launch = 1347,
                                   .cluster_skew = 4948,
                                   .pingpong_epilogue = 0.427,
                                   .exchange = 3806,
                                   .exchange_bytes_per_clock = 8.182,
                                   .tiles = {{128, 256, 2, false, 0.729, 0.718, 0.616},
                                             {256, 128, 2, false, 0.746, 0.746, 0.670},
                                             {128, 128, 2, true, 0.765, 0.477, 0.431},
                                             {128, 192, 2, false, 0.817, 0.804, 0.711},
                                             {128, 128, 2, false, 0.749, 0.749, 0.612},
                                             {64, 128, 2, true, 0.798, 0.571, 0.456},
                                             {64, 256, 2, true, 0.656, 0.468, 0.408},
                                             {64, 256, 1, false, 0.653, 0.456, 0.456},
                                             {64, 128, 1, false, 0.784, 0.515, 0.435},
                                             {64, 64, 1, false, 0.344, 0.344, 0.306}}};
  return kModel;
}

}  // namespace f8::runtime
