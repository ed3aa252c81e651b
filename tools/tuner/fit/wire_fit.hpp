// Fits the constants of the wire's model to measured collectives.
//
// The measurements are CSV, as benchmarks/distributed/wire.py writes them. The first line names the
// columns; these are read wherever they stand:
//
//   ranks       in the group
//   bytes       of the whole tensor: after an all-gather, before a reduce-scatter
//   us          the collective's time
//   collective  all_gather, reduce_scatter or all_reduce; all_gather where the column is missing
//   hosts       over which the ranks are spread; 1 where the column is missing
//
// Rows of one host give launch, step and bandwidth of NVLink, those of several the network's. What
// the rows cannot tell is kept from the model that the fit begins with: a step where there is one
// number of ranks, the network where there is one host.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "tuning_db/estimate/wire_model.hpp"

namespace f8::tuner {

struct WireRow {
  tuning_db::Collective collective = tuning_db::Collective::kAllGather;
  tuning_db::RankGroup group;
  double bytes = 0;
  double us = 0;
};

// The error names the line and the column.
[[nodiscard]] Result<std::vector<WireRow>> parse_wire_rows(std::string_view csv);
// "-" is standard input.
[[nodiscard]] Result<std::vector<WireRow>> read_wire_rows(const std::filesystem::path& path);

struct WireErrors {
  double rms = 0;    // of relative errors
  double worst = 0;  // the largest magnitude
  size_t worst_row = 0;
};

struct WireFit {
  tuning_db::WireModel model;     // its error is that of rows left out
  std::vector<std::string> kept;  // what it has from the start: "step_us of NVLink", ...
  WireErrors fitted;              // of the rows that it is fitted to
  WireErrors left_out;            // of each row by a fit to all others
};

// Fails where the rows are too few or too alike, and says which are missing.
[[nodiscard]] Result<WireFit> fit_wire(const std::vector<WireRow>& rows,
                                       const tuning_db::WireModel& start);

// The text of tuning_db/estimate/wire_constants.cpp.
[[nodiscard]] std::string wire_constants_source(const tuning_db::WireModel& model);

}  // namespace f8::tuner
