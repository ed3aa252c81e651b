// Casts of weights, and casts that compute what they cast, each in two ways and against a copy.
#include "tools/tuner/search/bench/bench.hpp"

namespace f8::tuner {

Result<Bench::CastRows> Bench::casts(const Recipe& recipe,
                                     const std::vector<runtime::MatrixSize>& weights) {
  const double bytes = F8_TRY(cast_bytes(recipe, weights));
  CastRows rows = {CastRow{.impl = Impl::kCastEach, .bytes = bytes},
                   CastRow{.impl = Impl::kCastList, .bytes = bytes}};
  progress_(f8::format("casting {} weights, {}", weights.size(), recipe.name));
  F8_TRY(backend_.open_weights(recipe, weights, options_.conditions.l2));
  F8_TRY(measure(rows));
  return rows;
}

Result<Bench::CastRows> Bench::producer(const Recipe& recipe, const Producer& producer,
                                        runtime::MatrixSize size) {
  const ProducerBytes bytes = F8_TRY(bytes_of(producer, recipe, size));
  CastRows rows = {CastRow{.impl = Impl::kProduceApart, .bytes = bytes.apart},
                   CastRow{.impl = Impl::kProduce, .bytes = bytes.fused}};
  progress_(
      f8::format("{} of {} x {}, {}", to_string(producer), size.rows, size.cols, recipe.name));
  F8_TRY(backend_.open_producer(recipe, producer, size, options_.conditions.l2));
  F8_TRY(measure(rows));
  return rows;
}

Status Bench::measure(CastRows& rows) {
  rows.back() = {.impl = Impl::kCopy, .bytes = backend_.copy_traffic()};
  InterleavedGroup group = final_group({}, 2 * options_.final_s);
  for (const CastRow& row : rows) group.candidates.push_back({.impl = row.impl});
  group.purpose = Ratios{.reference = 0};
  const std::vector<CandidateOutcome> outcomes = F8_TRY(measurer_.run_opened(group));
  for (size_t i = 0; i < rows.size(); ++i) {
    CastRow& row = rows[i];
    row.result = outcomes[i].result;
    if (row.impl == Impl::kCopy) continue;
    row.of_copy = ratio_in_blocks(outcomes[i], outcomes.back(), options_.seed);
    if (!row.of_copy) continue;
    // How many times the copy's rate this one moves its bytes at.
    const double more = row.bytes / rows.back().bytes;
    for (double* x : {&row.of_copy->ratio, &row.of_copy->ci.lo, &row.of_copy->ci.hi}) *x *= more;
  }
  return {};
}

}  // namespace f8::tuner
