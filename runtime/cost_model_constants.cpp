// Written by `float8-tune cost-model fit`; see docs/method.md.
#include "runtime/cost_model.hpp"

namespace f8::runtime {

const CostModel& CostModel::fitted() {
  static const CostModel kModel = {.l2_bytes_per_clock = 60.42,
                                   .port_bytes_per_clock = 70,
                                   .store_bytes_per_clock = 8.083,
                                   .tile_overhead = 1163,
                                   .latency = 970,
                                   .launch = 1932,
                                   .cluster_skew = 820.6,
                                   .pingpong_epilogue = 0.523,
                                   .exchange = 1902,
                                   .exchange_bytes_per_clock = 13.44,
                                   .tiles = {{128, 256, 2, false, 0.883, 0.819, 0.634},
                                             {256, 128, 2, false, 0.734, 0.734, 0.671},
                                             {128, 128, 2, true, 0.840, 0.407, 0.379},
                                             {128, 192, 2, false, 0.805, 0.779, 0.649},
                                             {128, 128, 2, false, 0.705, 0.683, 0.543},
                                             {64, 128, 2, true, 0.595, 0.415, 0.402},
                                             {64, 256, 2, true, 0.713, 0.360, 0.349},
                                             {64, 256, 1, false, 0.818, 0.449, 0.395},
                                             {64, 128, 1, false, 0.560, 0.518, 0.394},
                                             {64, 64, 1, false, 0.408, 0.384, 0.295},
                                             {128, 192, 2, true, 0.844, 0.633, 0.562},
                                             {128, 160, 2, true, 0.818, 0.614, 0.546},
                                             {128, 224, 2, false, 0.750, 0.750, 0.667},
                                             {128, 160, 2, false, 0.750, 0.750, 0.667}}};
  return kModel;
}

}  // namespace f8::runtime
