#include "recipes/model/filter_file.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/number.hpp"
#include "base/text.hpp"
#include "recipes/sealed_text.hpp"

namespace f8 {
namespace {

constexpr SealedKind kKind = {.magic = "float8-filter",
                              .version = 2,
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

Result<FilterFile::Decision> parse_decision(std::string_view line) {
  if (std::ranges::count(line, '\t') != 5) {
    return fail(ErrorCode::kCorrupt,
                "not a verdict, a name, sizes, evidence, speedups and a reason between tabs");
  }
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
  d.evidence = F8_TRY(parse_evidence(take_until(line, '\t')));
  std::string_view speedups = take_until(line, '\t');
  d.speedup.speedup = F8_TRY(parse_positive("speedup", take_until(speedups, ' ')));
  d.speedup.lo = F8_TRY(parse_positive("lo", take_until(speedups, ' ')));
  d.speedup.hi = F8_TRY(parse_positive("hi", speedups));
  d.reason = line;
  return d;
}

Status parse_line(int number, std::string_view line, FilterFile& file) {
  if (number == 2) {
    file.recipe = F8_TRY(field_of(line, "recipe "));
  } else if (number == 3) {
    const std::string_view tokens = F8_TRY(field_of(line, "tokens "));
    file.tokens = F8_TRY(parse_size("tokens", tokens));
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

FilterIndex::FilterIndex(const FilterFile& file) {
  for (const FilterFile::Decision& d : file.decisions) {
    names_.emplace(d.fqn, &d);
    if (d.fqn.find('*') != std::string::npos) patterns_.push_back(&d);
  }
}

const FilterFile::Decision* FilterIndex::find(std::string_view fqn) const {
  const auto exact = names_.find(fqn);
  if (exact != names_.end()) return exact->second;
  if (patterns_.empty()) return nullptr;
  std::vector<std::string_view> parts;
  std::vector<size_t> numbers;  // the parts that a "*" may stand for
  for (std::string_view rest = fqn; !rest.empty();) {
    parts.push_back(take_until(rest, '.'));
    if (is_number(parts.back())) numbers.push_back(parts.size() - 1);
  }
  constexpr size_t kMostNumbers = 6;  // a layer of a list of experts has two
  if (numbers.size() > kMostNumbers) {
    const auto fitting = std::ranges::find_if(
        patterns_, [&](const FilterFile::Decision* d) { return fits_pattern(d->fqn, fqn); });
    return fitting == patterns_.end() ? nullptr : *fitting;
  }
  const FilterFile::Decision* first = nullptr;
  for (size_t chosen = 1; chosen < size_t{1} << numbers.size(); ++chosen) {
    std::vector<std::string_view> pattern = parts;
    for (size_t i = 0; i < numbers.size(); ++i) {
      if ((chosen >> i & 1) != 0) pattern[numbers[i]] = "*";
    }
    const auto found = names_.find(f8::format("{}", fmt::join(pattern, ".")));
    // Decisions lie in the file's order.
    if (found != names_.end() && (first == nullptr || found->second < first)) first = found->second;
  }
  return first;
}

Result<std::string> FilterFile::serialize() const {
  const auto bad = [](std::string what) {
    return fail(ErrorCode::kInvalidArgument, "filter file: {}", what);
  };
  if (!is_recipe_name(recipe)) return bad(f8::format("recipe {} is no name", quote(recipe)));
  if (tokens < 1 || tokens > kMaxDim) return bad(f8::format("tokens is {}", tokens));
  std::string text = f8::format("{}recipe {}\ntokens {}\n", first_line(kKind), recipe, tokens);
  std::set<std::string_view> names;
  for (const Decision& d : decisions) {
    if (!is_text(d.fqn) || !is_text(d.reason)) {
      return bad(
          f8::format("layer {}: name or reason is empty or has control characters", quote(d.fqn)));
    }
    if (!names.insert(d.fqn).second) return bad(f8::format("layer {} twice", quote(d.fqn)));
    const auto in_range = [](int64_t v) { return v >= 1 && v <= kMaxDim; };
    if (!in_range(d.in_features) || !in_range(d.out_features)) {
      return bad(f8::format("layer {}: in_features {}, out_features {}", quote(d.fqn),
                            d.in_features, d.out_features));
    }
    const SpeedupInterval& s = d.speedup;
    if (!(s.lo > 0 && s.lo <= s.hi && s.speedup > 0) || !std::isfinite(s.speedup + s.hi)) {
      return bad(f8::format("layer {}: speedup {} [{}, {}]", quote(d.fqn), s.speedup, s.lo, s.hi));
    }
    text += f8::format("{}\t{}\tn{}k{}\t{}\t{} {} {}\t{}\n", d.convert ? "convert" : "keep", d.fqn,
                       d.out_features, d.in_features, to_string(d.evidence), s.speedup, s.lo, s.hi,
                       d.reason);
  }
  return seal(std::move(text));
}

Result<FilterFile> FilterFile::parse(std::string_view text) {
  std::string_view rest = F8_TRY(unseal(kKind, text)).lines;
  FilterFile file;
  for (int number = 2; !rest.empty(); ++number) {
    if (const Status parsed = parse_line(number, take_until(rest, '\n'), file); !parsed) {
      return fail(ErrorCode::kCorrupt, "filter file, line {}: {}", number, parsed.error().message);
    }
  }
  const Result<std::string> again = file.serialize();
  if (!again) return fail(ErrorCode::kCorrupt, "{}", again.error().message);
  if (*again != text) {
    return fail(ErrorCode::kCorrupt, "filter file writes a number in another way than float8 does");
  }
  return file;
}

}  // namespace f8
