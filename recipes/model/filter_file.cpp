#include "recipes/model/filter_file.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/number.hpp"
#include "base/text.hpp"
#include "recipes/attention.hpp"
#include "recipes/sealed_text.hpp"

namespace f8 {
namespace {

constexpr int kWithAttention = 3;  // the version
constexpr SealedKind kKind = {.magic = "float8-filter",
                              .version = kWithAttention,
                              .oldest = 2,
                              .name = "filter file",
                              .remedy = "write it again with this one",
                              .made_by = "`float8-tune filter --verdicts FILE`"};

bool is_text(std::string_view text) {
  return !text.empty() && !has_control(text);
}

bool is_number(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

Result<int64_t> parse_size(const char* field, std::string_view text) {
  const auto value = number_of<int64_t>(text);
  if (value && *value >= 1 && *value <= kMaxDim) return *value;
  return fail(ErrorCode::kCorrupt, "{} {} is no number from 1 to {}", field, quote(text), kMaxDim);
}

// The rest of a line that begins with `word`.
Result<std::string_view> field_of(std::string_view line, std::string_view word) {
  if (!line.starts_with(word)) {
    return fail(ErrorCode::kCorrupt, "{} expected, not {}", quote(word), quote(line));
  }
  return line.substr(word.size());
}

// A decision on a linear and one on attention end with these fields.
template <class Any>
Status parse_why(std::string_view line, Any& d) {
  d.evidence = F8_TRY(parse_evidence(take_until(line, '\t')));
  std::string_view speedups = take_until(line, '\t');
  d.speedup.speedup = F8_TRY(parse_positive("speedup", take_until(speedups, ' ')));
  d.speedup.lo = F8_TRY(parse_positive("lo", take_until(speedups, ' ')));
  d.speedup.hi = F8_TRY(parse_positive("hi", speedups));
  d.reason = line;
  return {};
}

Status check_fields(std::string_view line) {
  if (std::ranges::count(line, '\t') == 5) return {};
  return fail(ErrorCode::kCorrupt,
              "not a verdict, a name, sizes, evidence, speedups and a reason between tabs");
}

Result<FilterFile::Decision> parse_decision(std::string_view line) {
  F8_TRY(check_fields(line));
  FilterFile::Decision d;
  const std::string_view verdict = take_until(line, '\t');
  d.convert = verdict == "convert";
  if (!d.convert && verdict != "keep") {
    return fail(ErrorCode::kCorrupt, "verdict {}; convert or keep", quote(verdict));
  }
  d.fqn = take_until(line, '\t');
  std::string_view sizes = F8_TRY(field_of(take_until(line, '\t'), "n"));
  d.out_features = F8_TRY(parse_size("n", take_until(sizes, 'k')));
  d.in_features = F8_TRY(parse_size("k", sizes));
  F8_TRY(parse_why(line, d));
  return d;
}

bool is_attention_recipe(std::string_view name) {
  return name == bf16_recipe().name || parse_attention_recipe(name).has_value();
}

Result<FilterFile::Attention> parse_attention(std::string_view line) {
  F8_TRY(check_fields(line));
  FilterFile::Attention a;
  a.recipe = take_until(line, '\t');
  if (!is_attention_recipe(a.recipe)) {
    return fail(ErrorCode::kCorrupt, "recipe {} of attention; bf16, {}", quote(a.recipe),
                fmt::join(kAttentionRecipeNames, " or "));
  }
  a.fqn = take_until(line, '\t');
  std::string_view sizes = F8_TRY(field_of(take_until(line, '\t'), "h"));
  a.heads_q = F8_TRY(parse_size("h", take_until(sizes, 'g')));
  a.heads_kv = F8_TRY(parse_size("g", take_until(sizes, 'd')));
  a.head_dim = F8_TRY(parse_size("d", sizes));
  F8_TRY(parse_why(line, a));
  return a;
}

Status parse_line(int number, std::string_view line, FilterFile& file) {
  if (number == 2) {
    file.recipe = F8_TRY(field_of(line, "recipe "));
  } else if (number == 3) {
    const std::string_view tokens = F8_TRY(field_of(line, "tokens "));
    file.tokens = F8_TRY(parse_size("tokens", tokens));
  } else if (file.sequence > 0) {
    file.attention.push_back(F8_TRY(parse_attention(line)));
  } else if (line.starts_with("sequence ")) {
    const std::string_view sequence = F8_TRY(field_of(line, "sequence "));
    file.sequence = F8_TRY(parse_size("sequence", sequence));
  } else {
    file.decisions.push_back(F8_TRY(parse_decision(line)));
  }
  return {};
}

}  // namespace

bool fits_pattern(std::string_view pattern, std::string_view fqn) {
  while (!pattern.empty() && !fqn.empty()) {
    const std::string_view wanted = take_until(pattern, '.');
    const std::string_view part = take_until(fqn, '.');
    if (wanted != part && !(wanted == "*" && is_number(part))) return false;
  }
  return pattern.empty() && fqn.empty();
}

void NameIndex::add(std::string_view name) {
  names_.emplace(name, names_.size());
  if (name.find('*') != std::string_view::npos) patterns_.push_back(name);
}

std::optional<size_t> NameIndex::find(std::string_view fqn) const {
  const auto exact = names_.find(fqn);
  if (exact != names_.end()) return exact->second;
  if (patterns_.empty()) return std::nullopt;
  std::vector<std::string_view> parts;
  std::vector<size_t> numbers;  // the parts that a "*" may stand for
  for (std::string_view rest = fqn; !rest.empty();) {
    parts.push_back(take_until(rest, '.'));
    if (is_number(parts.back())) numbers.push_back(parts.size() - 1);
  }
  constexpr size_t kMostNumbers = 6;  // a layer of a list of experts has two
  if (numbers.size() > kMostNumbers) {
    const auto fitting = std::ranges::find_if(
        patterns_, [&](std::string_view pattern) { return fits_pattern(pattern, fqn); });
    if (fitting == patterns_.end()) return std::nullopt;
    return names_.at(*fitting);
  }
  std::optional<size_t> first;
  for (size_t chosen = 1; chosen < size_t{1} << numbers.size(); ++chosen) {
    std::vector<std::string_view> pattern = parts;
    for (size_t i = 0; i < numbers.size(); ++i) {
      if ((chosen >> i & 1) != 0) pattern[numbers[i]] = "*";
    }
    const auto found = names_.find(f8::format("{}", fmt::join(pattern, ".")));
    if (found != names_.end() && (!first || found->second < *first)) first = found->second;
  }
  return first;
}

FilterIndex::FilterIndex(const FilterFile& file) : file_(&file) {
  for (const FilterFile::Decision& d : file.decisions) linears_.add(d.fqn);
  for (const FilterFile::Attention& a : file.attention) attention_.add(a.fqn);
}

const FilterFile::Decision* FilterIndex::find(std::string_view fqn) const {
  const auto place = linears_.find(fqn);
  return place ? &file_->decisions[*place] : nullptr;
}

const FilterFile::Attention* FilterIndex::find_attention(std::string_view fqn) const {
  for (;;) {
    if (const auto place = attention_.find(fqn)) return &file_->attention[*place];
    const size_t end = fqn.rfind('.');
    if (end == std::string_view::npos) return nullptr;
    fqn = fqn.substr(0, end);
  }
}

namespace {

// Checks what a decision on a linear and one on attention have both; the error says what is wrong.
template <class Any>
std::string wrong_in(const Any& d, std::set<std::string_view>& names) {
  if (!is_text(d.fqn) || !is_text(d.reason)) {
    return f8::format("layer {}: name or reason is empty or has control characters", quote(d.fqn));
  }
  if (!names.insert(d.fqn).second) return f8::format("layer {} twice", quote(d.fqn));
  const SpeedupInterval& s = d.speedup;
  if (!(s.lo > 0 && s.lo <= s.hi && s.speedup > 0) || !std::isfinite(s.speedup + s.hi)) {
    return f8::format("layer {}: speedup {} [{}, {}]", quote(d.fqn), s.speedup, s.lo, s.hi);
  }
  return {};
}

template <class Any>
std::string why_text(const Any& d) {
  return f8::format("{}\t{} {} {}\t{}\n", to_string(d.evidence), d.speedup.speedup, d.speedup.lo,
                    d.speedup.hi, d.reason);
}

bool in_range(int64_t size) {
  return size >= 1 && size <= kMaxDim;
}

Result<std::string> attention_text(const FilterFile& file) {
  std::string text = f8::format("sequence {}\n", file.sequence);
  std::set<std::string_view> names;
  for (const FilterFile::Attention& a : file.attention) {
    std::string wrong = wrong_in(a, names);
    if (wrong.empty() && !is_attention_recipe(a.recipe)) {
      wrong = f8::format("layer {}: recipe {} of attention", quote(a.fqn), quote(a.recipe));
    }
    if (wrong.empty() && !(in_range(a.heads_q) && in_range(a.heads_kv) && in_range(a.head_dim))) {
      wrong = f8::format("layer {}: {} heads of queries, {} of keys, of {}", quote(a.fqn),
                         a.heads_q, a.heads_kv, a.head_dim);
    }
    if (!wrong.empty()) return fail(ErrorCode::kInvalidArgument, "filter file: {}", wrong);
    text += f8::format("{}\t{}\th{}g{}d{}\t{}", a.recipe, a.fqn, a.heads_q, a.heads_kv, a.head_dim,
                       why_text(a));
  }
  return text;
}

}  // namespace

Result<std::string> FilterFile::serialize() const {
  const auto bad = [](std::string what) {
    return fail(ErrorCode::kInvalidArgument, "filter file: {}", what);
  };
  if (!is_recipe_name(recipe)) return bad(f8::format("recipe {} is no name", quote(recipe)));
  if (!in_range(tokens)) return bad(f8::format("tokens is {}", tokens));
  if (sequence != 0 && !in_range(sequence)) return bad(f8::format("sequence is {}", sequence));
  if (sequence == 0 && !attention.empty()) return bad("attention without a sequence");
  SealedKind kind = kKind;
  if (sequence == 0) kind.version = kKind.oldest;
  std::string text = f8::format("{}recipe {}\ntokens {}\n", first_line(kind), recipe, tokens);
  std::set<std::string_view> names;
  for (const Decision& d : decisions) {
    if (std::string wrong = wrong_in(d, names); !wrong.empty()) return bad(std::move(wrong));
    if (!in_range(d.in_features) || !in_range(d.out_features)) {
      return bad(f8::format("layer {}: in_features {}, out_features {}", quote(d.fqn),
                            d.in_features, d.out_features));
    }
    text += f8::format("{}\t{}\tn{}k{}\t{}", d.convert ? "convert" : "keep", d.fqn, d.out_features,
                       d.in_features, why_text(d));
  }
  if (sequence > 0) text += F8_TRY(attention_text(*this));
  return seal(std::move(text));
}

Result<FilterFile> FilterFile::parse(std::string_view text) {
  auto [version, rest] = F8_TRY(unseal(kKind, text));
  FilterFile file;
  for (int number = 2; !rest.empty(); ++number) {
    if (const Status parsed = parse_line(number, take_until(rest, '\n'), file); !parsed) {
      return fail(ErrorCode::kCorrupt, "filter file, line {}: {}", number, parsed.error().message);
    }
  }
  if ((version == kWithAttention) != (file.sequence > 0)) {
    return fail(ErrorCode::kCorrupt, "filter file has version {}, and {} line of a sequence",
                version, file.sequence > 0 ? "a" : "no");
  }
  const Result<std::string> again = file.serialize();
  if (!again) return fail(ErrorCode::kCorrupt, "{}", again.error().message);
  if (*again != text) {
    return fail(ErrorCode::kCorrupt, "filter file writes a number in another way than float8 does");
  }
  return file;
}

}  // namespace f8
