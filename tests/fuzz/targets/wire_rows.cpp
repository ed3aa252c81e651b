// Measured collectives in CSV, and the fit to what was read.
#include <cmath>

#include "tests/fuzz/fuzz.hpp"
#include "tools/tuner/fit/wire_fit.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace f8;
  const auto rows = tuner::parse_wire_rows(fuzz::text_of(data, size));
  if (!rows) {
    fuzz::check_readable(rows.error().message);
    return 0;
  }
  fuzz::count_accepted();
  const auto fit = tuner::fit_wire(*rows, tuning_db::WireModel::fitted());
  if (!fit) {
    fuzz::check_readable(fit.error().message);
    return 0;
  }
  for (const tuner::WireRow& row : *rows) {
    const double us = fit->model.us(row.collective, row.group, row.bytes);
    FUZZ_CHECK(std::isfinite(us) && us >= 0);
  }
  return 0;
}
