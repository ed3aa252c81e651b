#include "tools/tuner/backend/producer.hpp"

#include <cmath>
#include <numbers>

#include "base/number.hpp"
#include "base/text.hpp"
#include "recipes/problem.hpp"
#include "runtime/linear/tensors/computed_casts.hpp"
#include "tools/tuner/backend/weight_list.hpp"

namespace f8::tuner {
namespace {

using codegen::Activation;
using codegen::Computed;

constexpr Computed kSources[] = {Computed::kGlu,        Computed::kGluBackward,
                                 Computed::kActivation, Computed::kActivationBackward,
                                 Computed::kRmsNorm,    Computed::kLayerNorm};

// An activation and its slope.
Produced activated(Activation activation, double x) {
  const double logistic = 1 / (1 + std::exp(-x));
  switch (activation) {
    case Activation::kSilu:
      return {x * logistic, logistic * (1 + x * (1 - logistic))};
    case Activation::kGelu: {
      const double normal = 0.5 * (1 + std::erf(x / std::numbers::sqrt2));
      return {x * normal, normal + x * std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi)};
    }
    case Activation::kGeluTanh: {
      constexpr double kCube = 0.044715;
      const double scale = std::sqrt(2 / std::numbers::pi);
      const double tanh = std::tanh(scale * (x + kCube * x * x * x));
      const double slope = scale * (1 + 3 * kCube * x * x);
      return {0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope};
    }
    case Activation::kRelu2:
      return x > 0 ? Produced{x * x, 2 * x} : Produced{};
  }
  return {};
}

Result<Producer> parse_producer(std::string_view text) {
  std::string_view rest = text;
  const std::string_view name = take_until(rest, '/');
  const bool has_more = name.size() < text.size();
  std::string known;
  for (const Computed source : kSources) {
    if (name != codegen::to_string(source)) {
      known += f8::format("{}{}", known.empty() ? "" : ", ", codegen::to_string(source));
      continue;
    }
    Producer producer{.source = source};
    if (!has_more) return producer;
    if (is_norm(source)) {
      return fail(ErrorCode::kInvalidArgument, "{}: a norm has no activation", quote(text));
    }
    producer.activation = F8_TRY(codegen::parse_activation(rest));
    return producer;
  }
  return fail(ErrorCode::kInvalidArgument, "unknown source {}; one of {}", quote(name), known);
}

}  // namespace

size_t Producer::operands() const {
  switch (source) {
    case Computed::kGluBackward:
      return 3;
    case Computed::kGlu:
    case Computed::kActivationBackward:
      return 2;
    default:
      return 1;
  }
}

runtime::QuantizerDesc Producer::desc(const Recipe& recipe, runtime::MatrixSize size) const {
  return {.operand = operand(),
          .rows = size.rows,
          .cols = size.cols,
          .recipe = recipe,
          .source = runtime::source_of(source),
          .activation = activation};
}

std::string to_string(const Producer& producer) {
  const std::string_view source = codegen::to_string(producer.source);
  if (is_norm(producer.source)) return std::string(source);
  return f8::format("{}/{}", source, codegen::to_string(producer.activation));
}

Result<std::vector<Producer>> parse_producers(std::string_view text) {
  std::vector<Producer> producers;
  for (const std::string& item : split(text, ',')) {
    producers.push_back(F8_TRY(parse_producer(item)));
  }
  return producers;
}

Result<std::vector<runtime::MatrixSize>> parse_sizes(std::string_view text) {
  std::vector<runtime::MatrixSize> sizes;
  for (const std::string& size : split(text, ';')) {
    std::string_view cols = size;
    const auto rows = number_of<int64_t>(take_until(cols, ','));
    const auto width = number_of<int64_t>(cols);
    if (!rows || !width) {
      return fail(ErrorCode::kInvalidArgument, "size {} is not ROWS,COLS, such as 8192,14336",
                  quote(size));
    }
    if (*rows < 1 || *rows > kMaxDim || *width < 16 || *width % 16 != 0 || *width > kMaxDim) {
      return fail(ErrorCode::kInvalidArgument,
                  "size {}: rows are at least 1 and columns a multiple of 16, both at most {}",
                  quote(size), kMaxDim);
    }
    sizes.push_back({*rows, *width});
  }
  return sizes;
}

Produced produced(const Producer& producer, std::array<double, 3> operands) {
  const auto [x, second, third] = operands;
  const Produced at = activated(producer.activation, x);
  switch (producer.source) {
    case Computed::kGlu:
      return {at.first * second};
    case Computed::kGluBackward:
      return {third * second * at.second, third * at.first};
    case Computed::kActivation:
      return {at.first};
    case Computed::kActivationBackward:
      return {second * at.second};
    case Computed::kRmsNorm:
      return {x * kRstd * second};
    case Computed::kLayerNorm:
      return {(x - kMean) * kRstd * second + third};
    default:
      return {};
  }
}

Result<ProducerBytes> bytes_of(const Producer& producer, const Recipe& recipe,
                               runtime::MatrixSize size) {
  const runtime::LinearKernels kernels =
      F8_TRY(runtime::linear_kernels({.shape = {16, 16, 16}, .recipe = recipe, .choices = {}}));
  const runtime::CopySet copies = producer.operand() == runtime::Tensor::kInput
                                      ? runtime::kXq | runtime::kXqt
                                      : runtime::kDyq | runtime::kDyqt;
  constexpr auto kRead = static_cast<double>(size_bytes(Dtype::kBf16));
  const double operands = kRead * static_cast<double>(producer.operands());
  const double results = kRead * static_cast<double>(producer.results());
  double fused = 0;
  const runtime::ComputedSource source{.source = producer.source,
                                       .activation = producer.activation};
  for (const auto& [amax, cast, of] : runtime::computed_passes(kernels, copies, source, false)) {
    const bool leaves = amax && codegen::writes_results(producer.source, amax->of);
    if (amax) fused += operands + (leaves ? results : 0);
    fused += leaves ? results : operands;
    fused += ((of.cast.q ? 1 : 0) + (of.cast.qt ? 1 : 0)) * static_cast<double>(producer.results());
  }
  const double plain = cast_bytes(kernels, copies) * static_cast<double>(producer.results());
  const double elements = static_cast<double>(size.rows) * static_cast<double>(size.cols);
  return ProducerBytes{.fused = elements * fused, .apart = elements * (operands + results + plain)};
}

}  // namespace f8::tuner
