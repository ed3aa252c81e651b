// Written by `float8-tune cost-model fit`; see docs/method.md.
#include "runtime/gemm/cost_model.hpp"

namespace f8::runtime {

const CostModel& CostModel::fitted() {
  static const CostModel kModel = {.l2_bytes_per_clock = 62.99,
                                   .port_bytes_per_clock = 70,
                                   .store_bytes_per_clock = 7.634,
                                   .tile_overhead = 1104,
                                   .latency = 970,
                                   .launch = 1992,
                                   .cluster_skew = 760.4,
                                   .pingpong_epilogue = 0.531,
                                   .exchange = 1694,
                                   .exchange_bytes_per_clock = 16.2,
                                   .tiles = {{128, 256, 2, false, 0.883, 0.819, 0.644},
                                             {256, 128, 2, false, 0.757, 0.712, 0.712},
                                             {128, 128, 2, true, 0.840, 0.401, 0.391},
                                             {128, 192, 2, false, 0.781, 0.755, 0.649},
                                             {128, 128, 2, false, 0.705, 0.683, 0.631},
                                             {64, 128, 2, true, 0.623, 0.415, 0.415},
                                             {64, 256, 2, true, 0.724, 0.360, 0.360},
                                             {64, 256, 1, false, 0.831, 0.456, 0.429},
                                             {64, 128, 1, false, 0.551, 0.526, 0.501},
                                             {64, 64, 1, false, 0.420, 0.401, 0.318},
                                             {128, 192, 2, true, 0.870, 0.653, 0.580},
                                             {128, 160, 2, true, 0.844, 0.633, 0.563},
                                             {128, 224, 2, false, 0.762, 0.739, 0.657},
                                             {128, 160, 2, false, 0.738, 0.738, 0.657}}};
  return kModel;
}

}  // namespace f8::runtime
