// Written by `float8-tune cost-model fit`; see docs/method.md.
#include "runtime/cost_model.hpp"

namespace f8::runtime {

const CostModel& CostModel::fitted() {
  static const CostModel kModel = {
      .l2_bytes_per_clock = 42.11,
      .store_bytes_per_clock = 20.64,
      .tile_overhead = 397,
      .latency = 970,
      .launch = 1288,
      .cluster_skew = 1350,
      .pingpong_epilogue = 0.637,
      .exchange = 3581,
      .exchange_bytes_per_clock = 8.477,
      .tiles = {{128, 256, 2, false, 0.718, 0.699, 0.609},
                {256, 128, 2, false, 0.758, 0.758, 0.680},
                {128, 128, 2, true, 0.789, 0.472, 0.431},
                {128, 192, 2, false, 0.817, 0.817, 0.722},
                {128, 128, 2, false, 0.726, 0.726, 0.622},
                {64, 128, 2, true, 0.766, 0.548, 0.438},
                {64, 256, 2, true, 0.647, 0.462, 0.421},
                {64, 256, 1, false, 0.654, 0.457, 0.443},
                {64, 128, 1, false, 0.753, 0.494, 0.437},
                {64, 64, 1, false, 0.344, 0.332, 0.314}}};
  return kModel;
}

}  // namespace f8::runtime
