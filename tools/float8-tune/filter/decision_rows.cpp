#include "tools/float8-tune/filter/decision_rows.hpp"

#include <array>
#include <map>
#include <string_view>
#include <tuple>

#include "tools/float8-tune/output.hpp"

namespace f8::cli {
std::string pattern_of(std::string_view fqn) {
  std::string pattern;
  while (true) {
    const size_t dot = fqn.find('.');
    const std::string_view part = fqn.substr(0, dot);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    pattern += number ? "*" : std::string(part);
    if (dot == std::string_view::npos) return pattern;
    pattern += '.';
    fqn.remove_prefix(dot + 1);
  }
}

std::vector<DecisionRow> decision_rows(const tuning_db::FilterResult& result) {
  std::vector<DecisionRow> rows;
  std::map<std::tuple<std::string, int64_t, int64_t, Groups, bool, std::string_view>, size_t> known;
  for (const tuning_db::FilterDecision& d : result.decisions) {
    const std::string name = pattern_of(d.layer.fqn);
    const auto [at, is_new] = known.try_emplace(
        {name, d.layer.in_features, d.layer.out_features, d.layer.groups, d.convert, d.reason},
        rows.size());
    if (is_new) {
      rows.push_back({name, &d, d.layer.count});
    } else {
      rows[at->second].count += d.layer.count;
    }
  }
  return rows;
}

std::string count_text(const tuning_db::FilterResult& result) {
  struct Count {
    int64_t converted = 0, all = 0;
  };
  std::array<Count, 2> counts;
  for (const tuning_db::FilterDecision& d : result.decisions) {
    Count& count = counts[d.layer.is_experts() ? 1 : 0];
    count.all += d.layer.count;
    if (d.convert) count.converted += d.layer.count;
  }
  const auto& [linears, experts] = counts;
  std::string text;
  if (linears.all > 0 || experts.all == 0) {
    text = f8::format("{} of {} linears", linears.converted, linears.all);
  }
  if (experts.all > 0) {
    text += f8::format("{}{} of {} layers of experts", text.empty() ? "" : " and ",
                       experts.converted, experts.all);
  }
  return text;
}

SpeedupCells speedup_cells(const tuning_db::FilterDecision& d) {
  if (!d.has_estimate()) return {"-", "-"};
  return {f8::format("{:.3f}", d.speedup), interval_text(d.lo, d.hi, 3)};
}

}  // namespace f8::cli
