// Reading checks in this order: the seal, each line, and at last that writing it again gives the
// same bytes.
#include "recipes/tuning_table.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "base/hash.hpp"
#include "base/text.hpp"
#include "recipes/sealed_text.hpp"

namespace f8 {
namespace {

constexpr SealedKind kKind = {.magic = "float8-table",
                              .version = 1,
                              .name = "tuning table",
                              .remedy = "export it again with this one"};
constexpr double kMaxDistance = 3.0;
constexpr double kMaxSpeedupDistance = 1.0;

std::string linear_key(const LinearSpeedup& s) {
  return fmt::format("{} {}", s.recipe, to_string(s.shape));
}

std::string record(const KernelChoice& c) {
  return fmt::format("kernel {} {} {} {}\n", c.problem.key(), to_string(c.provider), c.config,
                     c.median_ns);
}

std::string record(const LinearSpeedup& s) {
  return fmt::format("linear {} {} {} {}\n", linear_key(s), s.speedup, s.lo, s.hi);
}

// All that the hash covers.
std::string body(const TuningTable& table) {
  std::string text = fmt::format("{}device {}\n", first_line(kKind), table.device);
  for (const KernelChoice& choice : table.choices()) text += record(choice);
  for (const LinearSpeedup& speedup : table.speedups()) text += record(speedup);
  return text;
}

Result<double> parse_positive(const char* field, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) ||
      value <= 0) {
    return fail(ErrorCode::kCorrupt, "{} {} is not a positive number", field, quote(text));
  }
  return value;
}

bool is_config(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
  });
}

bool is_heuristic(std::string_view text) {
  if (!text.starts_with('h') || text.size() < 2 || text.size() > 6) return false;
  text.remove_prefix(1);
  return std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; }) &&
         (text[0] != '0' || text.size() == 1);
}

Status expect_fields(std::string_view line, int64_t fields) {
  const int64_t found = std::ranges::count(line, ' ') + 1;
  if (found == fields) return {};
  return fail(ErrorCode::kCorrupt, "it has {} fields, not {}", found, fields);
}

Result<KernelChoice> parse_choice(std::string_view line) {
  F8_TRY(expect_fields(line, 5));
  std::string_view rest = line;
  take_until(rest, ' ');
  KernelChoice c;
  c.problem = F8_TRY(Problem::parse(take_until(rest, ' ')));
  if (c.problem.op == Op::kLinear) {
    return fail(ErrorCode::kCorrupt, "a linear as a whole has no kernel");
  }
  const std::string_view provider = take_until(rest, ' ');
  if (provider == to_string(Provider::kCublasLt)) {
    c.provider = Provider::kCublasLt;
  } else if (provider != to_string(Provider::kGenerated)) {
    return fail(ErrorCode::kCorrupt, "unknown provider {}; one of generated, cublaslt",
                quote(provider));
  }
  c.config = take_until(rest, ' ');
  const bool known =
      c.provider == Provider::kCublasLt ? is_heuristic(c.config) : is_config(c.config);
  if (!known)
    return fail(ErrorCode::kCorrupt, "config {} is none of {}", quote(c.config), provider);
  c.median_ns = F8_TRY(parse_positive("median_ns", rest));
  return c;
}

Result<LinearSpeedup> parse_speedup(std::string_view line) {
  F8_TRY(expect_fields(line, 6));
  std::string_view rest = line;
  take_until(rest, ' ');
  LinearSpeedup s;
  s.recipe = take_until(rest, ' ');
  if (!is_recipe_name(s.recipe)) {
    return fail(ErrorCode::kCorrupt, "recipe {} is not of lower-case letters, digits and '_'",
                quote(s.recipe));
  }
  s.shape = F8_TRY(parse_dims(take_until(rest, ' ')));
  s.speedup = F8_TRY(parse_positive("speedup", take_until(rest, ' ')));
  s.lo = F8_TRY(parse_positive("lo", take_until(rest, ' ')));
  s.hi = F8_TRY(parse_positive("hi", rest));
  if (s.lo > s.hi) return fail(ErrorCode::kCorrupt, "lo {} is above hi {}", s.lo, s.hi);
  return s;
}

Status parse_record(std::string_view line, TuningTable& table) {
  if (line.starts_with("kernel ")) {
    table.add(F8_TRY(parse_choice(line)));
    return {};
  }
  if (line.starts_with("linear ")) {
    table.add(F8_TRY(parse_speedup(line)));
    return {};
  }
  return fail(ErrorCode::kCorrupt, "it starts with neither 'kernel' nor 'linear'");
}

double distance(Shape a, Shape b) {
  const auto log_ratio = [](int64_t x, int64_t y) {
    return std::abs(std::log2(static_cast<double>(x) / static_cast<double>(y)));
  };
  return log_ratio(a.m, b.m) + log_ratio(a.n, b.n) + log_ratio(a.k, b.k);
}

bool same_but_shape(const Problem& a, const Problem& b) {
  return a.op == b.op && a.recipe == b.recipe && a.a == b.a && a.b == b.b && a.d == b.d &&
         a.fast == b.fast;
}

// Keeps `items` sorted by key; an item with a known key takes the old one's place.
template <class T, class Key>
void insert_sorted(std::vector<T>& items, T item, const Key& key_of) {
  const std::string key = key_of(item);
  const auto at = std::ranges::lower_bound(items, key, {}, key_of);
  if (at != items.end() && key_of(*at) == key) {
    *at = std::move(item);
  } else {
    items.insert(at, std::move(item));
  }
}

}  // namespace

std::string_view to_string(Provider p) {
  return p == Provider::kGenerated ? "generated" : "cublaslt";
}

void TuningTable::add(KernelChoice choice) {
  insert_sorted(choices_, std::move(choice), [](const KernelChoice& c) { return c.problem.key(); });
}

void TuningTable::add(LinearSpeedup speedup) {
  insert_sorted(speedups_, std::move(speedup), linear_key);
}

const KernelChoice* TuningTable::find(const Problem& problem) const {
  const KernelChoice* nearest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const KernelChoice& choice : choices_) {
    if (choice.problem == problem) return &choice;
    if (!same_but_shape(choice.problem, problem)) continue;
    const double d = distance(choice.problem.shape, problem.shape);
    if (d > kMaxDistance || d >= least) continue;
    least = d;
    nearest = &choice;
  }
  return nearest;
}

const LinearSpeedup* TuningTable::find_speedup(std::string_view recipe, Shape shape) const {
  const LinearSpeedup* nearest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const LinearSpeedup& row : speedups_) {
    if (row.recipe != recipe) continue;
    const double d = distance(row.shape, shape);
    if (d > kMaxSpeedupDistance || d >= least) continue;
    least = d;
    nearest = &row;
  }
  return nearest;
}

std::string TuningTable::serialize() const {
  return seal(body(*this));
}

std::string TuningTable::hash() const {
  return hash_hex(body(*this));
}

Result<TuningTable> TuningTable::parse(std::string_view text) {
  std::string_view rest = F8_TRY(unseal(kKind, text));
  TuningTable table;
  const std::string_view device = take_until(rest, '\n');
  if (!device.starts_with("device ")) {
    return fail(ErrorCode::kCorrupt, "tuning table, line 2: 'device NAME' expected, not {}",
                quote(device));
  }
  table.device = device.substr(device.find(' ') + 1);
  std::string_view previous;
  for (int line_number = 3; !rest.empty(); ++line_number) {
    const std::string_view line = take_until(rest, '\n');
    if (const Status parsed = parse_record(line, table); !parsed) {
      return fail(ErrorCode::kCorrupt, "tuning table, line {}: {}", line_number,
                  parsed.error().message);
    }
    if (line <= previous) {
      return fail(ErrorCode::kCorrupt, "tuning table, line {}: not in sorted order", line_number);
    }
    previous = line;
  }
  if (table.serialize() != text) {
    return fail(
        ErrorCode::kCorrupt,
        "tuning table repeats a problem or writes a number in another way than float8 does");
  }
  return table;
}

}  // namespace f8
