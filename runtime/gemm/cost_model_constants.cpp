// Written by the programs of benchmarks/fit; see docs/method.md.
#include "runtime/gemm/cost_model.hpp"

namespace f8::runtime {

const CostModel& CostModel::fitted() {
  static const CostModel kModel = {
      .l2_bytes_per_clock = 70.16,
      .port_bytes_per_clock = 70,
      .store_bytes_per_clock = 9.59,
      .tile_overhead = 1728,
      .latency = 970,
      .launch = 1218,
      .cluster_skew = 450.4,
      .pingpong_epilogue = 0.876,
      .exchange = 1413,
      .exchange_bytes_per_clock = 21.01,
      .tiles =
          {{128, 256, 2, false, 0.830, 0.806, 0.654}, {256, 128, 2, false, 0.769, 0.723, 0.712},
           {128, 128, 2, true, 0.936, 0.443, 0.422},  {128, 192, 2, false, 0.757, 0.746, 0.671},
           {128, 128, 2, false, 0.727, 0.704, 0.622}, {64, 128, 2, true, 0.727, 0.412, 0.412},
           {64, 256, 2, true, 0.806, 0.308, 0.285},   {64, 256, 1, false, 0.805, 0.450, 0.443},
           {64, 128, 1, false, 0.560, 0.510, 0.510},  {64, 64, 1, false, 0.454, 0.352, 0.254},
           {128, 192, 2, true, 0.940, 0.705, 0.627},  {128, 160, 2, true, 0.885, 0.664, 0.590},
           {128, 224, 2, false, 0.862, 0.717, 0.637}, {128, 160, 2, false, 0.738, 0.738, 0.657},
           {128, 96, 2, true, 0.685, 0.563, 0.500},   {128, 96, 2, false, 0.706, 0.662, 0.588},
           {192, 96, 3, false, 0.923, 0.770, 0.685},  {192, 160, 3, false, 0.783, 0.783, 0.695},
           {192, 128, 3, false, 0.796, 0.796, 0.599}, {64, 192, 1, false, 0.785, 0.554, 0.554}},
      .library = {0.4806, 0.0270, -0.0167, -0.0154, 0.0040, -0.0011, -0.0018, -0.0018, -0.0022,
                  -0.0027, 0.0366, -0.0859, -0.0394, 0.0590, 0.0181, -0.0231, 0.0509, 0.0692,
                  0.0067},
      .suggestions = {0.2025, 0.0505, 0.1236, 0.1746, -0.0188, -0.1742, 0.1490, -0.0268, 0.0296,
                      0.0533, 0.2778, -0.0520}};
  return kModel;
}

}  // namespace f8::runtime
