// `float8-tune wire fit` writes this file; docs/communication-model.md says what these come from.
#include "tuning_db/estimate/wire_model.hpp"

namespace f8::tuning_db {

const WireModel& WireModel::fitted() {
  static const WireModel kModel = {.launch_us = 21.1,
                                   .nvlink = {.step_us = 3.4, .gb_per_s = 226},
                                   .network = {.step_us = 14, .gb_per_s = 50},
                                   .cast_gb_per_s = 2780,
                                   .error = 0.112,
                                   .measured = {{2, 1}},
                                   .source =
                                       "2 NVIDIA H200 of one host, 7 figures of "
                                       "docs/lab/distributed.md; steps and network assumed",
                                   .date = "2026-11-23"};
  return kModel;
}

}  // namespace f8::tuning_db
