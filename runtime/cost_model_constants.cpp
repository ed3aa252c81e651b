// Written by `float8-tune cost-model fit`; see docs/method.md.
#include "runtime/cost_model.hpp"

namespace f8::runtime {

const CostModel& CostModel::fitted() {
  static const CostModel kModel = {.l2_bytes_per_clock = 48,
                                   .store_bytes_per_clock = 33,
                                   .tile_overhead = 710,
                                   .latency = 970,
                                   .launch = 1330,
                                   .cluster_skew = 190,
                                   .pingpong_epilogue = 0.4,
                                   .exchange = 1200,
                                   .exchange_bytes_per_clock = 40,
                                   .tiles = {{128, 256, 2, false, 0.798, 0.793, 0.793},
                                             {256, 128, 2, false, 0.782, 0.781, 0.781},
                                             {128, 128, 2, true, 0.789, 0.515, 0.515},
                                             {128, 192, 2, false, 0.817, 0.755, 0.755},
                                             {128, 128, 2, false, 0.771, 0.657, 0.657},
                                             {64, 128, 2, true, 0.688, 0.492, 0.492},
                                             {64, 256, 2, true, 0.707, 0.554, 0.554},
                                             {64, 256, 1, false, 0.703, 0.522, 0.522},
                                             {64, 128, 1, false, 0.599, 0.476, 0.476},
                                             {64, 64, 1, false, 0.360, 0.348, 0.348}}};
  return kModel;
}

}  // namespace f8::runtime
