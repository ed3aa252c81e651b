// bench cast --list compares casting the weights of a model in few launches with casting them one
// by one and with a copy.
#include "tools/float8-tune/bench/bench.hpp"

namespace f8::cli {
namespace {

constexpr std::array<std::string_view, 13> kCastColumns = {
    "recipe",   "weights", "bytes",      "cast",       "us",    "us_lo", "us_hi",
    "gb_per_s", "of_copy", "of_copy_lo", "of_copy_hi", "state", "reason"};

double bytes_of(const tuner::CastBench& bench, const tuner::CastRow& row) {
  return row.impl == tuner::Impl::kCopy ? bench.copy_bytes : bench.bytes;
}

std::string name_of(const tuner::CastRow& row) {
  return row.impl == tuner::Impl::kCastList   ? "list"
         : row.impl == tuner::Impl::kCastEach ? "one by one"
                                              : "copy";
}

Json to_json(const tuner::CastBench& bench, const Recipe& recipe, size_t weights) {
  Json json = {{"recipe", recipe.name}, {"weights", weights}, {"bytes", bench.bytes}};
  json["casts"] = Json::array();
  for (const tuner::CastRow& row : bench.rows) {
    Json one = {{"cast", name_of(row)}};
    add_us(one, row.result);
    if (const auto& timing = row.result.timing) {
      one["gb_per_s"] = rounded(bytes_of(bench, row) / timing->median_ns, 4);
    }
    if (const auto& copy = row.of_copy) {
      add_interval(one, "of_copy", copy->ratio, copy->ci.lo, copy->ci.hi, 5);
    }
    if (const auto& ratio = row.result.ratio; ratio && row.impl == tuner::Impl::kCastList) {
      add_interval(one, "speedup", ratio->ratio, ratio->lo, ratio->hi, 5);
    }
    one["state"] = tuning_db::to_string(row.result.state);
    if (!row.result.reason.empty()) one["reason"] = row.result.reason;
    json["casts"].push_back(one);
  }
  return json;
}

std::string text_of(const tuner::CastBench& bench, const Recipe& recipe, size_t weights,
                    bool color) {
  using enum Table::Align;
  Table table({{"cast", kLeft},
               {"us"},
               {"interval"},
               {"GB/s"},
               {"of a copy"},
               {"interval"},
               {"state", kLeft}});
  std::string text =
      f8::format("{}, {} weights, {:.1f} MB to move\n", recipe.name, weights, bench.bytes / 1e6);
  std::string after;
  for (const tuner::CastRow& row : bench.rows) {
    const auto& timing = row.result.timing;
    const auto& share = row.of_copy;
    table.add({name_of(row), timing ? f8::format("{:.1f}", timing->median_ns / 1e3) : "-",
               timing ? interval_text(timing->ci_lo_ns / 1e3, timing->ci_hi_ns / 1e3, 1) : "-",
               timing ? f8::format("{:.0f}", bytes_of(bench, row) / timing->median_ns) : "-",
               share ? f8::format("{:.3f}", share->ratio) : "",
               share ? interval_text(share->ci.lo, share->ci.hi, 3) : "",
               std::string(tuning_db::to_string(row.result.state))});
    if (!timing) after += f8::format("{} not measured: {}\n", name_of(row), row.result.reason);
    if (row.impl == tuner::Impl::kCastList && row.result.ratio) {
      after +=
          f8::format("the list is {:.3f} times as fast as one by one {}\n", row.result.ratio->ratio,
                     interval_text(row.result.ratio->lo, row.result.ratio->hi, 3));
    }
  }
  return text + table.text(color) + after;
}

Status add_csv(tuner::CsvFile& csv, const tuner::CastBench& bench, const Recipe& recipe,
               size_t weights) {
  for (const tuner::CastRow& row : bench.rows) {
    const auto& timing = row.result.timing;
    const auto& share = row.of_copy;
    const auto us = [&](double tuning_db::Timing::*ns) {
      return timing ? csv_number((*timing).*ns / 1e3) : "";
    };
    F8_TRY(csv.add(std::array<std::string, kCastColumns.size()>{
        recipe.name, std::to_string(weights), csv_number(bytes_of(bench, row)), name_of(row),
        us(&tuning_db::Timing::median_ns), us(&tuning_db::Timing::ci_lo_ns),
        us(&tuning_db::Timing::ci_hi_ns),
        timing ? csv_number(bytes_of(bench, row) / timing->median_ns) : "",
        share ? csv_number(share->ratio) : "", share ? csv_number(share->ci.lo) : "",
        share ? csv_number(share->ci.hi) : "", std::string(tuning_db::to_string(row.result.state)),
        row.result.reason}));
  }
  return {};
}

}  // namespace

Result<int> bench_casts(const BenchOptions& options, const std::string& list,
                        const Global& global) {
  const auto weights = F8_TRY(of_option("--list", tuner::parse_weight_list(list)));
  const std::vector<Recipe> recipes = F8_TRY(recipes_of(options));
  BenchMachine machine = F8_TRY(open_bench(options, global, kCastColumns));
  Json results = Json::array();
  std::string text;
  bool bad = false;
  for (const Recipe& recipe : recipes) {
    const auto bench = machine.bench->casts(recipe, weights);
    machine.progress->clear();
    if (!bench) return std::unexpected(bench.error());
    F8_TRY(of_option("--csv", add_csv(machine.csv, *bench, recipe, weights.size())));
    results.push_back(to_json(*bench, recipe, weights.size()));
    text += text.empty() ? "" : "\n";
    text += text_of(*bench, recipe, weights.size(), stdout_color(global));
    for (const tuner::CastRow& row : bench->rows) bad |= !row.result.timing;
  }
  print_results(options, global, {{"device", machine.backend->device().name}, {"results", results}},
                text);
  return bad ? kExitRegression : kExitOk;
}

}  // namespace f8::cli
