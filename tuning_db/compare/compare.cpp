// Verdicts on pairs of rows: see compare.hpp.
#include "tuning_db/compare/compare.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "tuning_db/json/json_text.hpp"

namespace f8::tuning_db {
namespace {

struct Value {
  double value = 0, lo = 0, hi = 0;
};

Value value_of(const TrialRow& row, Quantity quantity) {
  if (quantity == Quantity::kSpeedup) {
    return {row.result.ratio->ratio, row.result.ratio->lo, row.result.ratio->hi};
  }
  const Timing& t = *row.result.timing;
  return {t.median_ns, t.ci_lo_ns, t.ci_hi_ns};
}

bool is_bf16(const TrialRow& row) {
  return row.candidate.impl == Impl::kBf16 || row.candidate.impl == Impl::kBf16CublasLt;
}

bool takes_part(const TrialRow& row, Quantity quantity) {
  if (!row.result.is_timed() || row.candidate.impl == Impl::kBf16) return false;
  return quantity == Quantity::kTime || (row.result.ratio && !is_gemm(row.problem.op));
}

// What is compared: a problem on a device.
using Place = std::tuple<std::string, std::string>;  // problem key, device name
using ByMethod = std::map<std::string, std::vector<const TrialRow*>>;

struct Places {
  std::map<Place, ByMethod> rows;
  std::vector<Place> order;  // as the rows came
};

Places places_of(const std::vector<TrialRow>& rows, const CompareOptions& options,
                 const std::set<std::string>& with_fp8) {
  Places places;
  for (const TrialRow& row : rows) {
    if (!takes_part(row, options.quantity)) continue;
    std::string key = row.problem.key();
    // The bf16 kernels count only for a GEMM that its recipe keeps in bf16.
    if (is_bf16(row) && with_fp8.contains(key)) continue;
    Place place{std::move(key), options.across_devices ? "" : row.device_name};
    ByMethod& methods = places.rows[place];
    if (methods.empty()) places.order.push_back(std::move(place));
    methods[row.method_key].push_back(&row);
  }
  return places;
}

const TrialRow& newest(const std::vector<const TrialRow*>& rows) {
  return **std::ranges::max_element(
      rows, {}, [](const TrialRow* row) { return std::tie(row->at, row->uuid); });
}

const TrialRow& newest(const ByMethod& methods) {
  std::vector<const TrialRow*> rows;
  for (const auto& [key, of_method] : methods) rows.push_back(&newest(of_method));
  return newest(rows);
}

// The fastest of the toolchain and device class measured last; a noisy one where there is no other.
const TrialRow& representative(const std::vector<const TrialRow*>& rows, Quantity quantity) {
  const TrialRow& last = newest(rows);
  const TrialRow* best = nullptr;
  const auto rank = [quantity](const TrialRow& row) {
    const double value = value_of(row, quantity).value;
    return std::tuple(row.result.state != TrialState::kOk,
                      quantity == Quantity::kTime ? value : -value, row.uuid);
  };
  for (const TrialRow* row : rows) {
    if (row->toolchain != last.toolchain || !row->device.is_same_class(last.device)) continue;
    if (best == nullptr || rank(*row) < rank(*best)) best = row;
  }
  return *best;
}

// Why a difference would say nothing of the kernels; empty where it would.
std::string unlike_conditions(const TrialRow& a, const TrialRow& b, Quantity quantity) {
  const char* sides[] = {"A", "B"};
  const TrialRow* rows[] = {&a, &b};
  for (size_t i = 0; i < 2; ++i) {
    if (rows[i]->result.state != TrialState::kOk) return f8::format("{} is noisy", sides[i]);
    const int64_t samples = rows[i]->result.timing->n;
    if (samples < kFewSamples) {
      return f8::format("{} has few samples: {}", sides[i], samples);
    }
  }
  if (a.device.power_limit_w != b.device.power_limit_w) {
    return f8::format("other power limits: {} W and {} W", a.device.power_limit_w,
                      b.device.power_limit_w);
  }
  // Both parts of a speedup had one clock; other devices have other clocks.
  if (quantity == Quantity::kSpeedup || a.device.name != b.device.name) return {};
  const auto& x = a.result.sm_mhz_mean;
  const auto& y = b.result.sm_mhz_mean;
  if (x && y && std::abs(*x - *y) > kOtherClock * std::max(*x, *y)) {
    return f8::format("other clocks: {:.0f} MHz and {:.0f} MHz", *x, *y);
  }
  return {};
}

// The measurements are independent, so their logarithmic half-widths add as squares.
void set_ratio(Comparison& c, const Value& numerator, const Value& denominator) {
  const auto width = [](double x, double y) { return std::hypot(std::log(x), std::log(y)); };
  c.ratio = numerator.value / denominator.value;
  c.lo = c.ratio * std::exp(-width(numerator.value / numerator.lo,  //
                                   denominator.hi / denominator.value));
  c.hi = c.ratio * std::exp(width(numerator.hi / numerator.value,  //
                                  denominator.value / denominator.lo));
}

Comparison judge(const TrialRow& a, const TrialRow& b, const CompareOptions& options) {
  Comparison c{.a = a, .b = b, .reason = unlike_conditions(a, b, options.quantity)};
  const Value x = value_of(a, options.quantity);
  const Value y = value_of(b, options.quantity);
  if (options.quantity == Quantity::kTime) {
    set_ratio(c, x, y);
  } else {
    set_ratio(c, y, x);
  }
  if (!c.reason.empty()) return c;
  const double faster = 1 + options.threshold;
  const double slower = 1 / faster;
  if (c.lo > faster) {
    c.outcome = Outcome::kFaster;
  } else if (c.hi < slower) {
    c.outcome = Outcome::kSlower;
  } else if (c.lo >= slower && c.hi <= faster) {
    c.outcome = Outcome::kSame;
  } else if (x.lo <= y.hi && y.lo <= x.hi) {
    c.reason = "the intervals overlap";
  } else {
    c.reason = f8::format("the interval holds {:.4g}", c.hi > faster ? faster : slower);
  }
  return c;
}

// The method that both have and B used last; null where there is none.
const std::string* common_method(const ByMethod& a, const ByMethod& b) {
  const std::string* best = nullptr;
  std::string at;
  for (const auto& [key, rows] : b) {
    if (!a.contains(key)) continue;
    const std::string& last = newest(rows).at;
    if (best == nullptr || last > at) {
      best = &key;
      at = last;
    }
  }
  return best;
}

double geometric_mean(const std::vector<Comparison>& compared) {
  if (compared.empty()) return 1;
  double sum = 0;
  for (const Comparison& c : compared) sum += std::log(c.ratio);
  return std::exp(sum / static_cast<double>(compared.size()));
}

// The leaves of a JSON value by their dotted names.
void flatten(const nlohmann::json& value, const std::string& name,
             std::map<std::string, std::string>& leaves) {
  if (!value.is_object()) {
    leaves[name] = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    return;
  }
  for (const auto& [key, child] : value.items()) {
    flatten(child, name.empty() ? key : name + "." + key, leaves);
  }
}

}  // namespace

bool Selection::admits(const TrialRow& row) const {
  return row.run_uuid.starts_with(run) && row.toolchain.find(toolchain) != std::string::npos &&
         row.device_name.find(device) != std::string::npos;
}

std::string_view to_string(Outcome outcome) {
  switch (outcome) {
    case Outcome::kFaster:
      return "FASTER";
    case Outcome::kSlower:
      return "SLOWER";
    case Outcome::kSame:
      return "SAME";
    case Outcome::kAmbiguous:
      return "AMBIGUOUS";
  }
  return "?";
}

size_t CompareResult::count(Outcome outcome) const {
  return static_cast<size_t>(std::ranges::count(compared, outcome, &Comparison::outcome));
}

CompareResult compare(const std::vector<TrialRow>& a, const std::vector<TrialRow>& b,
                      const CompareOptions& options) {
  std::set<std::string> with_fp8;
  for (const auto* rows : {&a, &b}) {
    for (const TrialRow& row : *rows) {
      if (!is_bf16(row) && row.result.is_timed()) with_fp8.insert(row.problem.key());
    }
  }
  const Places in_a = places_of(a, options, with_fp8);
  const Places in_b = places_of(b, options, with_fp8);
  CompareResult result;
  for (const Place& place : in_a.order) {
    const ByMethod& of_a = in_a.rows.at(place);
    const auto of_b = in_b.rows.find(place);
    if (of_b == in_b.rows.end()) {
      result.only_a.push_back(newest(of_a));
    } else if (const std::string* method = common_method(of_a, of_b->second)) {
      result.compared.push_back(judge(representative(of_a.at(*method), options.quantity),
                                      representative(of_b->second.at(*method), options.quantity),
                                      options));
    } else {
      result.unlike.push_back({newest(of_a), newest(of_b->second)});
    }
  }
  for (const Place& place : in_b.order) {
    if (!in_a.rows.contains(place)) result.only_b.push_back(newest(in_b.rows.at(place)));
  }
  result.geometric_mean = geometric_mean(result.compared);
  return result;
}

Result<std::vector<std::string>> differing_fields(std::string_view spec_a,
                                                  std::string_view spec_b) {
  std::map<std::string, std::string> a;
  std::map<std::string, std::string> b;
  flatten(F8_TRY(parse_json(spec_a, "the method")), "", a);
  flatten(F8_TRY(parse_json(spec_b, "the method")), "", b);
  std::set<std::string> names;
  for (const auto* leaves : {&a, &b}) {
    for (const auto& [name, value] : *leaves) names.insert(name);
  }
  const auto text = [](const std::map<std::string, std::string>& leaves, const std::string& name) {
    const auto at = leaves.find(name);
    return at == leaves.end() ? std::string("absent") : at->second;
  };
  std::vector<std::string> fields;
  for (const std::string& name : names) {
    const std::string x = text(a, name);
    const std::string y = text(b, name);
    if (x != y) fields.push_back(f8::format("{} is {} and {}", name, x, y));
  }
  return fields;
}

}  // namespace f8::tuning_db
