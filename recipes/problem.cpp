// The problem key's writer and parser, and the grammar of shape lists.
#include "recipes/problem.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <set>

#include "base/text.hpp"

namespace f8 {
namespace {

constexpr std::array kOps = {Op::kOutput, Op::kGradInput, Op::kGradWeight, Op::kLinear};

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Takes an INT of the grammar, at most kMaxDim, from the front of `rest`.
std::optional<int64_t> take_int(std::string_view& rest) {
  if (rest.empty() || !is_digit(rest[0])) return std::nullopt;
  if (rest[0] == '0' && rest.size() > 1 && is_digit(rest[1])) return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (error != std::errc() || value > kMaxDim) return std::nullopt;
  rest.remove_prefix(static_cast<size_t>(end - rest.data()));
  return value;
}

std::optional<int64_t> parse_int(std::string_view text) {
  const std::optional<int64_t> value = take_int(text);
  return text.empty() ? value : std::nullopt;
}

Status validate_multiple_of_16(const char* name, const char* meaning, int64_t value) {
  if (value >= 16 && value % 16 == 0 && value <= kMaxDim) return {};
  if (value > kMaxDim) {
    return fail(ErrorCode::kInvalidArgument, "{} ({}) is {}; it must be at most {}", name, meaning,
                value, kMaxDim);
  }
  return fail(ErrorCode::kInvalidArgument, "{} ({}) is {}; it must be a positive multiple of 16",
              name, meaning, value);
}

Status validate_types(const Problem& p) {
  if (is_fp8(p.a) != is_fp8(p.b)) {
    return fail(ErrorCode::kInvalidArgument, "types {}.{}: both operands are fp8 or neither is",
                to_string(p.a), to_string(p.b));
  }
  if (p.a == Dtype::kE5m2 && p.b == Dtype::kE5m2) {
    return fail(ErrorCode::kInvalidArgument, "types e5m2.e5m2: one operand must be e4m3");
  }
  if (is_fp8(p.d)) {
    return fail(ErrorCode::kInvalidArgument, "result type {}; use bf16, f16 or f32",
                to_string(p.d));
  }
  return {};
}

Result<Problem> parse_fields(std::string_view rest) {
  if (std::ranges::count(rest, '/') != 5) {
    return fail(ErrorCode::kInvalidArgument,
                "it has {} fields; expected op/recipe/a.b.d/tn/mINTnINTkINT/bBITfBIT",
                std::ranges::count(rest, '/') + 1);
  }
  Problem p;
  const std::string_view op = take_until(rest, '/');
  p.op = F8_TRY(parse_op(op));
  if (op != to_string(p.op)) {
    return fail(ErrorCode::kInvalidArgument, "op {} is written '{}' in a key", quote(op),
                to_string(p.op));
  }
  p.recipe = take_until(rest, '/');
  if (!is_recipe_name(p.recipe)) {
    return fail(ErrorCode::kInvalidArgument,
                "recipe {} is not of lower-case letters, digits and '_'", quote(p.recipe));
  }
  std::string_view types = take_until(rest, '/');
  if (std::ranges::count(types, '.') != 2) {
    return fail(ErrorCode::kInvalidArgument, "types {} are not a.b.d, such as e4m3.e4m3.bf16",
                quote(types));
  }
  p.a = F8_TRY(parse_dtype(take_until(types, '.')));
  p.b = F8_TRY(parse_dtype(take_until(types, '.')));
  p.d = F8_TRY(parse_dtype(types));
  F8_TRY(validate_types(p));
  if (const std::string_view layout = take_until(rest, '/'); layout != "tn") {
    return fail(ErrorCode::kInvalidArgument, "layout {}; the only one is tn", quote(layout));
  }
  p.shape = F8_TRY(parse_dims(take_until(rest, '/')));
  for (const bool bias : {false, true}) {
    for (const bool fast : {false, true}) {
      if (rest != f8::format("b{:d}f{:d}", bias, fast)) continue;
      p.bias = bias;
      p.fast = fast;
      return p;
    }
  }
  return fail(ErrorCode::kInvalidArgument, "flags {}; one of b0f0, b0f1, b1f0, b1f1", quote(rest));
}

// Parses "8", "1024:4096:1024" or "1024:16384:x2".
Result<std::vector<int64_t>> parse_range(const char* name, std::string_view text) {
  const auto malformed = [&](const char* why) {
    return fail(ErrorCode::kInvalidArgument,
                "{} is {}: {}; use a number, FIRST:LAST:STEP or FIRST:LAST:xFACTOR", name,
                quote(text), why);
  };
  const auto parts = std::ranges::count(text, ':') + 1;
  std::string_view rest = text;
  const std::optional<int64_t> first = parse_int(take_until(rest, ':'));
  if (parts == 1) {
    if (!first) return malformed("not a number of at most 2^30");
    return std::vector<int64_t>{*first};
  }
  if (parts != 3) return malformed("a range has three parts");
  const std::optional<int64_t> last = parse_int(take_until(rest, ':'));
  const bool geometric = rest.starts_with('x');
  if (geometric) rest.remove_prefix(1);
  const std::optional<int64_t> step = parse_int(rest);
  if (!first || !last || !step) return malformed("not numbers of at most 2^30");
  if (*first < 1) return malformed("it starts below 1");
  if (*first > *last) return malformed("it starts above its end");
  if (*step < (geometric ? 2 : 1)) return malformed("it never reaches its end");
  std::vector<int64_t> values;
  for (int64_t v = *first; v <= *last; v = geometric ? v * *step : v + *step) {
    if (values.size() == kMaxShapes) return malformed("it has too many values");
    values.push_back(v);
  }
  return values;
}

// Parses one "m,n,k" with ranges; its shapes go to the end of `shapes`.
Status append_shapes(std::string_view text, std::vector<Shape>& shapes) {
  if (std::ranges::count(text, ',') != 2) {
    return fail(ErrorCode::kInvalidArgument, "shape {} is not M,N,K, such as 8192,4096,4096",
                quote(text));
  }
  const auto named = [text](Error e) {
    e.message = f8::format("shape {}: {}", quote(text), e.message);
    return std::unexpected(std::move(e));
  };
  std::string_view rest = text;
  const auto m_values = parse_range("m", take_until(rest, ','));
  if (!m_values) return named(m_values.error());
  const auto n_values = parse_range("n", take_until(rest, ','));
  if (!n_values) return named(n_values.error());
  const auto k_values = parse_range("k", rest);
  if (!k_values) return named(k_values.error());
  // Each factor is at most kMaxShapes, so the product of two of them fits; the third is compared.
  const size_t planes = m_values->size() * n_values->size();
  if (planes > kMaxShapes || planes * k_values->size() > kMaxShapes - shapes.size()) {
    return fail(ErrorCode::kInvalidArgument, "shape {} makes more than {} shapes; narrow a range",
                quote(text), kMaxShapes);
  }
  for (const int64_t m : *m_values) {
    for (const int64_t n : *n_values) {
      for (const int64_t k : *k_values) {
        if (const Status valid = validate_shape({m, n, k}); !valid) return named(valid.error());
        shapes.push_back({m, n, k});
      }
    }
  }
  return {};
}

void drop_repeated(std::vector<Shape>& shapes) {
  std::set<Shape> seen;
  std::erase_if(shapes, [&seen](Shape shape) { return !seen.insert(shape).second; });
}

}  // namespace

std::string to_string(Shape shape) {
  return f8::format("m{}n{}k{}", shape.m, shape.n, shape.k);
}

Result<Shape> parse_dims(std::string_view text) {
  std::array<int64_t, 3> values{};
  std::string_view rest = text;
  for (size_t i = 0; i < values.size(); ++i) {
    const char name = "mnk"[i];
    if (!rest.starts_with(name)) {
      return fail(ErrorCode::kInvalidArgument, "dims {} are not mINTnINTkINT: no '{}' where due",
                  quote(text), name);
    }
    rest.remove_prefix(1);
    const std::optional<int64_t> value = take_int(rest);
    if (!value) {
      return fail(ErrorCode::kInvalidArgument, "dims {}: {} is not a plain number of at most {}",
                  quote(text), name, kMaxDim);
    }
    values[i] = *value;
  }
  if (!rest.empty()) {
    return fail(ErrorCode::kInvalidArgument, "dims {}: unexpected {} at the end", quote(text),
                quote(rest));
  }
  const Shape shape = {values[0], values[1], values[2]};
  F8_TRY(validate_shape(shape));
  return shape;
}

std::string_view to_string(Op op) {
  return op == Op::kLinear ? "linear" : to_string(static_cast<Gemm>(op));
}

Result<Op> parse_op(std::string_view text) {
  for (const Op op : kOps) {
    if (text == to_string(op)) return op;
  }
  if (text == "fprop") return Op::kOutput;
  if (text == "dgrad") return Op::kGradInput;
  if (text == "wgrad") return Op::kGradWeight;
  return fail(ErrorCode::kInvalidArgument,
              "unknown op {}; one of output (fprop), grad_input (dgrad), grad_weight (wgrad), "
              "linear",
              quote(text));
}

Shape gemm_shape(Shape linear, Gemm g) {
  switch (g) {
    case Gemm::kOutput:
      return linear;
    case Gemm::kGradInput:
      return {linear.m, linear.k, linear.n};
    case Gemm::kGradWeight:
      return {linear.n, linear.k, linear.m};
  }
  return linear;
}

Result<Problem> Problem::make(Op op, const Recipe& recipe, Shape shape) {
  F8_TRY(recipe.validate());
  F8_TRY(validate_shape(shape));
  const GemmSetting& setting = recipe.at(op == Op::kLinear ? Gemm::kOutput : static_cast<Gemm>(op));
  Problem p;
  p.op = op;
  p.recipe = settings_label(recipe);
  p.a = setting.a.dtype;
  p.b = setting.b.dtype;
  p.shape = shape;
  p.fast = setting.fast;
  return p;
}

std::string Problem::key() const {
  return f8::format("{}/{}/{}.{}.{}/tn/{}/b{:d}f{:d}", to_string(op), recipe, to_string(a),
                    to_string(b), to_string(d), to_string(shape), bias, fast);
}

Result<Problem> Problem::parse(std::string_view key) {
  Result<Problem> parsed = parse_fields(key);
  if (!parsed) {
    return fail(parsed.error().code, "problem {}: {}", quote(key), parsed.error().message);
  }
  return parsed;
}

double Problem::flops() const {
  const double one = 2.0 * static_cast<double>(shape.m) * static_cast<double>(shape.n) *
                     static_cast<double>(shape.k);
  return op == Op::kLinear ? 3.0 * one : one;
}

double Problem::bytes() const {
  const Shape s = op == Op::kLinear ? shape : gemm_shape(shape, static_cast<Gemm>(op));
  const auto m = static_cast<double>(s.m);
  const auto n = static_cast<double>(s.n);
  const auto k = static_cast<double>(s.k);
  const auto size = [](Dtype t) { return static_cast<double>(size_bytes(t)); };
  if (op == Op::kLinear) return 2.0 * (m * k + n * k + m * n) * size(d);
  return m * k * size(a) + n * k * size(b) + m * n * size(d);
}

Status validate_shape(Shape shape) {
  if (shape.m < 1 || shape.m > kMaxDim) {
    return fail(ErrorCode::kInvalidArgument, "m (tokens) is {}; it must be from 1 to {}", shape.m,
                kMaxDim);
  }
  F8_TRY(validate_multiple_of_16("n", "out_features", shape.n));
  return validate_multiple_of_16("k", "in_features", shape.k);
}

Result<std::vector<Shape>> parse_shapes(std::string_view text) {
  std::vector<Shape> shapes;
  std::string_view rest = text;
  while (true) {
    const bool last = rest.find(';') == std::string_view::npos;
    F8_TRY(append_shapes(take_until(rest, ';'), shapes));
    if (last) break;
  }
  drop_repeated(shapes);
  return shapes;
}

int64_t tokens_of(const NamedLinear& layer, int64_t tokens) {
  if (layer.tokens_share == 1) return tokens;
  return std::max(int64_t{1}, static_cast<int64_t>(
                                  std::llround(layer.tokens_share * static_cast<double>(tokens))));
}

}  // namespace f8
