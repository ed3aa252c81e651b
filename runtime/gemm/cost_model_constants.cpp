// Written by `float8-tune cost-model fit`; see docs/method.md.
#include "runtime/gemm/cost_model.hpp"

namespace f8::runtime {

const CostModel& CostModel::fitted() {
  static const CostModel kModel = {.l2_bytes_per_clock = 70.16,
                                   .port_bytes_per_clock = 70,
                                   .store_bytes_per_clock = 7.358,
                                   .tile_overhead = 1260,
                                   .latency = 970,
                                   .launch = 1738,
                                   .cluster_skew = 436.8,
                                   .pingpong_epilogue = 0.863,
                                   .exchange = 1612,
                                   .exchange_bytes_per_clock = 19.54,
                                   .tiles = {{128, 256, 2, false, 0.869, 0.819, 0.654},
                                             {256, 128, 2, false, 0.769, 0.723, 0.712},
                                             {128, 128, 2, true, 0.936, 0.392, 0.392},
                                             {128, 192, 2, false, 0.781, 0.781, 0.671},
                                             {128, 128, 2, false, 0.705, 0.683, 0.641},
                                             {64, 128, 2, true, 0.727, 0.412, 0.412},
                                             {64, 256, 2, true, 0.782, 0.308, 0.304},
                                             {64, 256, 1, false, 0.793, 0.443, 0.429},
                                             {64, 128, 1, false, 0.543, 0.502, 0.502},
                                             {64, 64, 1, false, 0.363, 0.341, 0.254},
                                             {128, 192, 2, true, 0.940, 0.705, 0.627},
                                             {128, 160, 2, true, 0.871, 0.654, 0.581},
                                             {128, 224, 2, false, 0.762, 0.739, 0.657},
                                             {128, 160, 2, false, 0.738, 0.738, 0.657}}};
  return kModel;
}

}  // namespace f8::runtime
