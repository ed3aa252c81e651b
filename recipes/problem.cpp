// The problem key's writer and parser, and the grammar of shape lists.
#include "recipes/problem.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <set>

#include "base/text.hpp"
#include "recipes/attention.hpp"
#include "recipes/mlp.hpp"

namespace f8 {
namespace {

constexpr DimSpec kLinearDims[] = {{.name = "m", .meaning = "tokens"},
                                   {.name = "n", .meaning = "out_features", .multiple = 16},
                                   {.name = "k", .meaning = "in_features", .multiple = 16}};
constexpr DimSpec kExpertsDims[] = {
    {.name = "e", .meaning = "experts", .most = kMaxExperts},
    kLinearDims[0],
    kLinearDims[1],
    kLinearDims[2],
    {.name = "skew", .meaning = "of the routing", .least = kEven, .most = kOneExpert}};
constexpr std::string_view kLinearParts[] = {"output", "grad_input", "grad_weight"};

// The operations. Another one is an entry here and its enumerator.
constexpr std::array kOps = {
    OpSpec{Op::kOutput, "output", "fprop", kLinearDims, {}},
    OpSpec{Op::kGradInput, "grad_input", "dgrad", kLinearDims, {}},
    OpSpec{Op::kGradWeight, "grad_weight", "wgrad", kLinearDims, {}},
    OpSpec{Op::kLinear, "linear", "", kLinearDims, kLinearParts, 3},
    OpSpec{Op::kGroupedOutput, "grouped_output", "", kExpertsDims, {}},
    OpSpec{Op::kGroupedGradInput, "grouped_grad_input", "", kExpertsDims, {}},
    OpSpec{Op::kGroupedGradWeight, "grouped_grad_weight", "", kExpertsDims, {}},
    OpSpec{Op::kExperts, "experts", "", kExpertsDims, kLinearParts, 3},
    OpSpec{Op::kAttention,
           "attention",
           "",
           kAttentionDims,
           {},
           kAttentionForwardProducts + kAttentionBackwardProducts,
           check_attention,
           attention_product_flops,
           attention_bytes},
    OpSpec{Op::kAttentionForward,
           "attention_forward",
           "",
           kAttentionDims,
           {},
           kAttentionForwardProducts,
           check_attention,
           attention_product_flops,
           attention_bytes},
    OpSpec{Op::kAttentionBackward,
           "attention_backward",
           "",
           kAttentionDims,
           {},
           kAttentionBackwardProducts,
           check_attention,
           attention_product_flops,
           attention_bytes},
    OpSpec{Op::kMlp, "mlp", "", kMlpDims, kMlpParts, 3, check_mlp, mlp_product_flops, mlp_bytes},
};
static_assert(std::ranges::all_of(kOps, [](const OpSpec& spec) {
  return &spec == &kOps[static_cast<size_t>(spec.op)] && spec.dims.size() <= kMaxDims;
}));

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

Status validate_dim(const DimSpec& dim, int64_t value) {
  if (value >= dim.least && value % dim.multiple == 0 && value <= dim.most) return {};
  if (dim.multiple == 1) {
    return fail(ErrorCode::kInvalidArgument, "{} ({}) is {}; it must be from {} to {}", dim.name,
                dim.meaning, value, dim.least, dim.most);
  }
  if (value > dim.most) {
    return fail(ErrorCode::kInvalidArgument, "{} ({}) is {}; it must be at most {}", dim.name,
                dim.meaning, value, dim.most);
  }
  return fail(ErrorCode::kInvalidArgument, "{} ({}) is {}; it must be a positive multiple of {}",
              dim.name, dim.meaning, value, dim.multiple);
}

Status validate_dims(const Dims& dims, std::span<const DimSpec> specs) {
  for (size_t i = 0; i < specs.size(); ++i) F8_TRY(validate_dim(specs[i], dims.sizes[i]));
  return {};
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

Result<Op> parse_key_op(std::string_view text) {
  const auto found = std::ranges::find(kOps, text, &OpSpec::name);
  if (found != kOps.end()) return found->op;
  if (const Result<Op> alias = parse_op(text)) {
    return fail(ErrorCode::kInvalidArgument, "op {} is written '{}' in a key", quote(text),
                to_string(*alias));
  }
  std::string known;
  for (const OpSpec& spec : kOps) known += f8::format("{}{}", known.empty() ? "" : ", ", spec.name);
  return fail(ErrorCode::kInvalidArgument,
              "unknown op {}; this float8 knows {}, so use the newer float8 that wrote it",
              quote(text), known);
}

Status parse_recipe(std::string_view text, Problem& p) {
  p.recipe = text;
  if (is_recipe_name(text)) return {};
  return fail(ErrorCode::kInvalidArgument, "recipe {} is not of lower-case letters, digits and '_'",
              quote(text));
}

Status parse_settings(std::string_view text, Problem& p) {
  std::string_view recipe = text;
  p.fast = take_off_end(recipe, "+fast");
  p.bias = take_off_end(recipe, "+bias");
  if (recipe.contains('+')) {
    return fail(ErrorCode::kInvalidArgument,
                "settings {}; a recipe, behind it +bias, +fast or +bias+fast", quote(text));
  }
  return parse_recipe(recipe, p);
}

Status parse_types(std::string_view text, Problem& p) {
  if (std::ranges::count(text, '.') != 2) {
    return fail(ErrorCode::kInvalidArgument, "types {} are not a.b.d, such as e4m3.e4m3.bf16",
                quote(text));
  }
  p.a = F8_TRY(parse_dtype(take_until(text, '.')));
  p.b = F8_TRY(parse_dtype(take_until(text, '.')));
  p.d = F8_TRY(parse_dtype(text));
  return validate_types(p);
}

Status parse_flags(std::string_view text, Problem& p) {
  for (const bool bias : {false, true}) {
    for (const bool fast : {false, true}) {
      if (text != f8::format("b{:d}f{:d}", bias, fast)) continue;
      p.bias = bias;
      p.fast = fast;
      return {};
    }
  }
  return fail(ErrorCode::kInvalidArgument, "flags {}; one of b0f0, b0f1, b1f0, b1f1", quote(text));
}

Result<Problem> parse_fields(std::string_view rest) {
  const auto fields = std::ranges::count(rest, '/') + 1;
  const bool of_0_1 = fields == 6;
  Problem p;
  // A newer float8 may give its operations other fields, though no fewer.
  if (fields >= 4) p.op = F8_TRY(parse_key_op(take_until(rest, '/')));
  if (!of_0_1 && fields != 4) {
    return fail(ErrorCode::kInvalidArgument,
                "it has {} fields; expected op/settings/a.b.d/dims, as "
                "output/tensorwise+fast/e4m3.e4m3.bf16/m8192n4096k4096",
                fields);
  }
  const std::string_view settings = take_until(rest, '/');
  F8_TRY(of_0_1 ? parse_recipe(settings, p) : parse_settings(settings, p));
  F8_TRY(parse_types(take_until(rest, '/'), p));
  if (of_0_1) {
    if (const std::string_view layout = take_until(rest, '/'); layout != "tn") {
      return fail(ErrorCode::kInvalidArgument, "layout {}; the only one is tn", quote(layout));
    }
  }
  p.dims = F8_TRY(parse_dims(take_until(rest, '/'), spec_of(p.op).dims));
  if (of_0_1) F8_TRY(parse_flags(rest, p));
  if (const auto check = spec_of(p.op).check) F8_TRY(check(p));
  return p;
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

std::string to_string(const Dims& dims, std::span<const DimSpec> specs) {
  std::string text;
  for (size_t i = 0; i < specs.size(); ++i) {
    text += specs[i].name;
    text += std::to_string(dims.sizes[i]);
  }
  return text;
}

Result<Dims> parse_dims(std::string_view text, std::span<const DimSpec> specs) {
  Dims dims;
  std::string_view rest = text;
  for (size_t i = 0; i < specs.size(); ++i) {
    const std::string_view name = specs[i].name;
    if (!take(rest, name)) {
      std::string form;
      for (const DimSpec& spec : specs) form += f8::format("{}INT", spec.name);
      return fail(ErrorCode::kInvalidArgument, "dims {} are not {}: no '{}' where due", quote(text),
                  form, name);
    }
    const std::optional<int64_t> value = take_int(rest);
    if (!value) {
      return fail(ErrorCode::kInvalidArgument, "dims {}: {} is not a plain number of at most {}",
                  quote(text), name, kMaxDim);
    }
    dims.sizes[i] = *value;
  }
  if (!rest.empty()) {
    return fail(ErrorCode::kInvalidArgument, "dims {}: unexpected {} at the end", quote(text),
                quote(rest));
  }
  F8_TRY(validate_dims(dims, specs));
  return dims;
}

std::string to_string(Shape shape) {
  return to_string(Dims(shape), kLinearDims);
}

Result<Shape> parse_dims(std::string_view text) {
  const auto sizes = F8_TRY(parse_dims(text, kLinearDims)).sizes;
  return Shape{sizes[0], sizes[1], sizes[2]};
}

std::span<const OpSpec> registered_ops() {
  return kOps;
}

const OpSpec& spec_of(Op op) {
  return kOps[static_cast<size_t>(op)];
}

std::string_view to_string(Op op) {
  return spec_of(op).name;
}

static Result<Op> parse_op_of(std::span<const OpSpec> specs, std::string_view text) {
  std::string known;
  for (const OpSpec& spec : specs) {
    if (text == spec.name || (text == spec.alias && !text.empty())) return spec.op;
    known += f8::format("{}{}{}", known.empty() ? "" : ", ", spec.name,
                        spec.alias.empty() ? "" : f8::format(" ({})", spec.alias));
  }
  return fail(ErrorCode::kInvalidArgument, "unknown op {}; one of {}", quote(text), known);
}

Result<Op> parse_op(std::string_view text) {
  return parse_op_of(std::span(kOps).first(kOpsOfLinears), text);
}

Result<Op> parse_any_op(std::string_view text) {
  return parse_op_of(kOps, text);
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

Result<Problem> Problem::make(Op op, const Recipe& recipe, const Dims& dims) {
  F8_TRY(recipe.validate());
  F8_TRY(validate_dims(dims, spec_of(op).dims));
  const GemmSetting& setting = recipe.at(to_gemm(op));
  Problem p;
  p.op = op;
  p.recipe = settings_label(recipe);
  p.a = setting.a.dtype;
  p.b = setting.b.dtype;
  p.dims = dims;
  p.fast = setting.fast;
  if (const auto check = spec_of(op).check) F8_TRY(check(p));
  return p;
}

Result<Problem> Problem::make(Op op, const Recipe& recipe, Shape shape, const Groups& groups) {
  if (groups.experts == 0) return make(op, recipe, shape);
  return make(grouped(op), recipe, {groups.experts, shape.m, shape.n, shape.k, groups.skew});
}

std::string Problem::key() const {
  return f8::format("{}/{}{}{}/{}.{}.{}/{}", to_string(op), recipe, bias ? "+bias" : "",
                    fast ? "+fast" : "", to_string(a), to_string(b), to_string(d),
                    to_string(dims, spec_of(op).dims));
}

Result<Problem> Problem::parse(std::string_view key) {
  Result<Problem> parsed = parse_fields(key);
  if (!parsed) {
    return fail(parsed.error().code, "problem {}: {}", quote(key), parsed.error().message);
  }
  return parsed;
}

Shape Problem::shape() const {
  Shape shape;
  const std::span<const DimSpec> specs = spec_of(op).dims;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == "m") shape.m = dims.sizes[i];
    if (specs[i].name == "n") shape.n = dims.sizes[i];
    if (specs[i].name == "k") shape.k = dims.sizes[i];
  }
  return shape;
}

Groups Problem::groups() const {
  if (op == Op::kMlp) return mlp_shape(dims).groups;
  if (!is_grouped(op)) return {};
  return {.experts = dims.sizes.front(), .skew = dims.sizes[std::size(kExpertsDims) - 1]};
}

Shape Problem::group_shape() const {
  const Shape s = shape();
  return {std::max<int64_t>(s.m / std::max<int64_t>(groups().experts, 1), 1), s.n, s.k};
}

double Problem::flops() const {
  const OpSpec& spec = spec_of(op);
  if (spec.product_flops != nullptr) return spec.products * spec.product_flops(*this);
  const Shape s = shape();
  return spec.products * 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) *
         static_cast<double>(s.k);
}

double Problem::bytes() const {
  if (const auto own = spec_of(op).bytes) return own(*this);
  const Shape s = is_gemm(op) ? gemm_shape(shape(), to_gemm(op)) : shape();
  const auto m = static_cast<double>(s.m);
  const auto n = static_cast<double>(s.n);
  const auto k = static_cast<double>(s.k);
  const auto size = [](Dtype t) { return static_cast<double>(size_bytes(t)); };
  const auto weights = static_cast<double>(std::max<int64_t>(groups().experts, 1));
  if (!is_gemm(op)) return 2.0 * (m * k + weights * n * k + m * n) * size(d);
  const bool d_is_weight = to_gemm(op) == Gemm::kGradWeight;
  return m * k * size(a) + (d_is_weight ? 1 : weights) * n * k * size(b) +
         (d_is_weight ? weights : 1) * m * n * size(d);
}

std::vector<int64_t> rows_of_experts(int64_t m, const Groups& groups) {
  const auto count = static_cast<size_t>(groups.experts);
  std::vector<double> share(count);
  double sum = 0;
  for (size_t e = 0; e < count; ++e) {
    share[e] = std::pow(static_cast<double>(e + 1), -static_cast<double>(groups.skew));
    sum += share[e];
  }
  std::vector<int64_t> rows(count);
  std::vector<size_t> order(count);
  int64_t left = m;
  for (size_t e = 0; e < count; ++e) {
    share[e] *= static_cast<double>(m) / sum;
    rows[e] = std::min(static_cast<int64_t>(share[e]), left);
    left -= rows[e];
    order[e] = e;
  }
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](size_t e) { return share[e] - static_cast<double>(rows[e]); });
  for (size_t i = 0; left > 0; i = (i + 1) % count, --left) ++rows[order[i]];
  return rows;
}

Status validate_shape(Shape shape) {
  return validate_dims(shape, kLinearDims);
}

Result<std::vector<Shape>> parse_shapes(std::string_view text) {
  std::vector<Shape> shapes;
  for (const std::string& item : split(text, ';')) F8_TRY(append_shapes(item, shapes));
  drop_repeated(shapes);
  return shapes;
}

std::array<ExpertLinear, 2> expert_linears(const NamedLinear& experts, int64_t rows) {
  const int64_t width = experts.in_features;
  const int64_t own_width = experts.out_features;
  return {{{"w13", {rows, 2 * own_width, width}}, {"w2", {rows, width, own_width}}}};
}

int64_t tokens_of(const NamedLinear& layer, int64_t tokens) {
  if (layer.tokens_share == 1) return tokens;
  return std::max(int64_t{1}, static_cast<int64_t>(
                                  std::llround(layer.tokens_share * static_cast<double>(tokens))));
}

}  // namespace f8
