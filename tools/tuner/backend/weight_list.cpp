#include "tools/tuner/backend/weight_list.hpp"

#include <algorithm>

#include "base/number.hpp"
#include "base/text.hpp"

namespace f8::tuner {
namespace {

// The value of a text of digits; -1 where it is none or too large.
int64_t number(std::string_view text) {
  return text.starts_with('-') ? -1 : number_of<int64_t>(text).value_or(-1);
}

Status append(std::string_view text, std::vector<runtime::MatrixSize>& weights) {
  if (std::ranges::count(text, ',') != 1) {
    return fail(ErrorCode::kInvalidArgument, "weight {} is not N,K or N,K*COUNT, such as 4096,4096",
                quote(text));
  }
  std::string_view rest = text;
  const int64_t n = number(take_until(rest, ','));
  const bool repeated = rest.find('*') != std::string_view::npos;
  const int64_t k = number(take_until(rest, '*'));
  const int64_t count = repeated ? number(rest) : 1;
  if (n < 0 || k < 0) {
    return fail(ErrorCode::kInvalidArgument, "weight {}: {} is not a number", quote(text),
                n < 0 ? "n" : "k");
  }
  if (const Status valid = validate_shape({1, n, k}); !valid) {
    return fail(valid.error().code, "weight {}: {}", quote(text), valid.error().message);
  }
  if (count < 1 || static_cast<uint64_t>(count) > kMaxWeights - weights.size()) {
    return fail(ErrorCode::kInvalidArgument, "weight {}: a count is from 1 on, a list has up to {}",
                quote(text), kMaxWeights);
  }
  weights.insert(weights.end(), static_cast<size_t>(count), {n, k});
  return {};
}

}  // namespace

Result<std::vector<runtime::MatrixSize>> parse_weight_list(std::string_view text) {
  std::vector<runtime::MatrixSize> weights;
  for (const std::string& item : split(text, ';')) F8_TRY(append(item, weights));
  return weights;
}

double cast_bytes(const runtime::LinearKernels& kernels, runtime::CopySet copies) {
  double bytes = 0;
  for (const auto& pass : kernels.passes(copies, false)) {
    const auto read = static_cast<double>(size_bytes(codegen::memory_type(pass.cast)));
    const double once = (pass.amax ? 2 : 1) * read + (pass.cast.q ? 1 : 0) + (pass.cast.qt ? 1 : 0);
    bytes += once * static_cast<double>(pass.casts.size());
  }
  return bytes;
}

Result<double> cast_bytes(const Recipe& recipe, const std::vector<runtime::MatrixSize>& weights) {
  double elements = 0;
  for (const runtime::MatrixSize& weight : weights) {
    elements += static_cast<double>(weight.rows) * static_cast<double>(weight.cols);
  }
  // The kernel passes are the same for every size.
  const auto kernels =
      F8_TRY(runtime::linear_kernels({.shape = {16, 16, 16}, .recipe = recipe, .choices = {}}));
  return elements * cast_bytes(kernels, runtime::kWq | runtime::kWqt);
}

}  // namespace f8::tuner
