#include "ranks/column_activation.hpp"

#include "error.hpp"

namespace train {
namespace {

float8::Quantizer quantizer(const float8::Context& context, const std::string& recipe,
                            float8_operand operand, int64_t rows, int64_t cols) {
  float8::QuantizerDesc desc;
  desc.operand = operand;
  desc.rows_max = rows;
  desc.cols = cols;
  desc.recipe = float8::Recipe::named(recipe);
  desc.over_ranks = true;
  return float8::Quantizer::plan(context, desc).value();
}

bool has_one_scale(const void* copy, const float8_cast_setting& setting) {
  return copy != nullptr && setting.granularity == FLOAT8_TENSOR;
}

}  // namespace

ColumnActivation::ColumnActivation(Backend& backend, const Rank& tp, const std::string& recipe,
                                   float8_operand operand, int64_t rows, int64_t cols)
    : backend_(backend),
      tp_(tp),
      quantizer_(quantizer(backend.context(), recipe, operand, rows, cols)) {
  args_.tensor = backend.allocate(quantizer_.tensor_bytes());
  args_.rows = rows;
  view_ = quantizer_.view(args_.tensor, rows).value();
  // The words of columns are this rank's. The tensor's follows them, and then those of rows.
  const size_t words = quantizer_.amax_words(), row_words = quantizer_.row_amax_words();
  auto* const all = static_cast<u32*>(backend.allocate((words + row_words) * sizeof(u32)));
  if (words > 0) args_.amax = all;
  if (row_words > 0) args_.row_amax = all + words;
  const bool one =
      has_one_scale(view_.q, view_.q_setting) || has_one_scale(view_.qt, view_.qt_setting);
  words_ = all + words - (one ? 1 : 0);
  count_ = row_words + (one ? 1 : 0);
}

const float8::Tensor* ColumnActivation::cast(const void* x) {
  float8::QuantizeArgs args = args_;
  args.x = x;
  check(quantizer_.find_amax(args, backend_.stream()));
  if (count_ > 0) check(tp_.communicator->sync_amax(words_, count_, backend_.stream()));
  check(quantizer_.run(args, nullptr, backend_.stream()));
  return &view_;
}

}  // namespace train
