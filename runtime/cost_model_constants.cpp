// Written by `float8-tune cost-model fit`; see docs/method.md.
#include "runtime/cost_model.hpp"

namespace f8::runtime {

const CostModel& CostModel::fitted() {
  static const CostModel kModel = {.l2_bytes_per_clock = 55.99,
                                   .port_bytes_per_clock = 70,
                                   .store_bytes_per_clock = 7.597,
                                   .tile_overhead = 1126,
                                   .latency = 970,
                                   .launch = 1736,
                                   .cluster_skew = 550.2,
                                   .pingpong_epilogue = 0.484,
                                   .exchange = 4207,
                                   .exchange_bytes_per_clock = 5.649,
                                   .tiles = {{128, 256, 2, false, 0.883, 0.819, 0.597},
                                             {256, 128, 2, false, 0.734, 0.734, 0.671},
                                             {128, 128, 2, true, 0.814, 0.395, 0.362},
                                             {128, 192, 2, false, 0.818, 0.745, 0.611},
                                             {128, 128, 2, false, 0.726, 0.714, 0.594},
                                             {64, 128, 2, true, 0.534, 0.432, 0.378},
                                             {64, 256, 2, true, 0.701, 0.398, 0.348},
                                             {64, 256, 1, false, 0.843, 0.463, 0.401},
                                             {64, 128, 1, false, 0.648, 0.541, 0.470},
                                             {64, 64, 1, false, 0.407, 0.401, 0.298},
                                             {128, 192, 2, true, 0.844, 0.633, 0.562},
                                             {128, 160, 2, true, 0.831, 0.623, 0.554},
                                             {128, 224, 2, false, 0.750, 0.750, 0.667},
                                             {128, 160, 2, false, 0.750, 0.750, 0.667}}};
  return kModel;
}

}  // namespace f8::runtime
