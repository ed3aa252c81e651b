// Measured suggestions of cuBLASLt's in CSV, and the fit to what was read.
#include <cmath>

#include "tests/fuzz/fuzz.hpp"
#include "tools/tuner/fit/suggestion_fit.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace f8;
  const auto gemms = tuner::parse_suggestions(fuzz::text_of(data, size));
  if (!gemms) {
    fuzz::check_readable(gemms.error().message);
    return 0;
  }
  fuzz::count_accepted();
  const tuner::SuggestionRegret ranked =
      tuner::regret_of_ranked(*gemms, runtime::CostModel::fitted());
  FUZZ_CHECK(std::isfinite(ranked.p95) && ranked.p95 >= 0);
  const auto fit = tuner::fit_suggestions(*gemms, runtime::CostModel::fitted());
  if (!fit) {
    fuzz::check_readable(fit.error().message);
    return 0;
  }
  for (const double coefficient : fit->suggestions) FUZZ_CHECK(std::isfinite(coefficient));
  return 0;
}
