// What --fuse says of MLPs that no rows of MLPs decide about.
#pragma once

#include "tools/float8-tune/device_option.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::cli {

// Says in a line how many MLPs are judged by their linears, and why; nothing where none is.
void note_mlps(const TuningTable& table, const Recipe& recipe, const AskedDevice& device,
               const tuning_db::MlpCounts& mlps, const Global& global);

}  // namespace f8::cli
