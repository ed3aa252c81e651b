// Patching a call's arguments into its planned launches. Nothing here allocates, locks or formats.
#include "runtime/linear/plan/launches.hpp"

namespace f8::runtime {
QuantizeOperand CastOperand::at(const CallArguments& call) const {
  return {.x = call.at<void>(x),
          .rows = rows == 0 ? call.m : rows,
          .cols = cols,
          .ld = call.stride(x),
          .partials = call.at<uint32_t>(partials),
          .tile_amax = call.at<uint16_t>(tile_amax),
          .row_amax = call.at<uint32_t>(row_amax),
          .col_amax = call.at<uint32_t>(col_amax),
          .q = call.at<uint8_t>(q),
          .qt = call.at<uint8_t>(qt),
          .scale = call.at<float>(scale),
          .inv_row = call.at<float>(inv_row),
          .inv_col = call.at<float>(inv_col),
          .delayed = call.at<float>(delayed),
          .recorded_amax = call.at<uint32_t>(recorded_amax),
          .counters = call.at<kernels::CastCounters>(counters),
          .block_amax = call.at<uint32_t>(block_amax),
          .first_row = call.first_row,
          .whole_rows = whole_rows};
}

const LaunchRange& range_at(const LaunchList& list, int64_t m) {
  auto range = list.begin();
  while (range->up_to_m < m) ++range;
  return *range;
}

Status run(const LaunchList& list, const Context::State& context, const CallArguments& call,
           Stream stream) {
  const LaunchTarget target{context, call, stream};
  for (const Launch& launch : range_at(list, call.m).launches) F8_TRY(launch(target));
  return {};
}

}  // namespace f8::runtime
