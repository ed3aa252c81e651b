#include "tools/tuner/fit/wire_fit.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <set>

#include "base/file.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "tools/tuner/search/bench/shape_sweep.hpp"
#include "tuning_db/estimate/least_squares.hpp"
#include "tuning_db/estimate/wire_cost.hpp"

namespace f8::tuner {
namespace {

using tuning_db::Collective;
using tuning_db::RankGroup;
using tuning_db::Terms;
using tuning_db::TimedTerms;
using tuning_db::WireModel;
using tuning_db::WireTerms;

constexpr size_t kMinRows = 6;         // of one host: two for each constant
constexpr size_t kMinNetworkRows = 4;  // of several
constexpr size_t kMaxRows = 4096;      // every one of which is left out of a fit
constexpr double kBytes = 1e5;  // the unit of bytes, which keeps the normal equations well scaled

class Columns {
 public:
  static Result<Columns> of(std::string_view header) {
    const std::vector<std::string_view> names = csv_fields(header);
    Columns columns;
    for (size_t i = 0; i < kNames.size(); ++i) {
      const auto found = std::ranges::find(names, kNames[i]);
      if (found != names.end()) columns.at_[i] = static_cast<size_t>(found - names.begin());
      if (found == names.end() && i < kRequired) {
        return fail(ErrorCode::kInvalidArgument,
                    "no column {}; the first line names the columns, of which ranks, bytes and us "
                    "are needed",
                    kNames[i]);
      }
    }
    return columns;
  }
  [[nodiscard]] Result<WireRow> row(std::string_view line) const {
    const std::vector<std::string_view> fields = csv_fields(line);
    const auto field = [&](size_t i) {
      return at_[i] && *at_[i] < fields.size() ? fields[*at_[i]] : std::string_view();
    };
    WireRow row;
    row.group.ranks = static_cast<int64_t>(
        F8_TRY(number(0, field(0), 2, static_cast<double>(tuning_db::kMaxRanks), true)));
    row.bytes = F8_TRY(number(1, field(1), 1, 1e15, true));
    row.us = F8_TRY(number(2, field(2), 1e-3, 1e12, false));
    if (at_[3]) {
      const auto* found = std::ranges::find(tuning_db::kCollectives, field(3),
                                            [](Collective c) { return to_string(c); });
      if (found == tuning_db::kCollectives.end()) {
        return fail(ErrorCode::kInvalidArgument,
                    "column collective is {}; it is all_gather, reduce_scatter or all_reduce",
                    quote(field(3)));
      }
      row.collective = *found;
    }
    if (at_[4]) {
      row.group.hosts = static_cast<int64_t>(
          F8_TRY(number(4, field(4), 1, static_cast<double>(row.group.ranks), true)));
    }
    if (row.group.ranks % row.group.hosts != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} hosts do not divide {} ranks; correct one of them", row.group.hosts,
                  row.group.ranks);
    }
    return row;
  }

 private:
  static constexpr std::array<std::string_view, 5> kNames = {"ranks", "bytes", "us", "collective",
                                                             "hosts"};
  static constexpr size_t kRequired = 3;
  static Result<double> number(size_t column, std::string_view text, double min, double max,
                               bool is_whole) {
    const auto value = number_of<double>(text);
    if (!value || !(*value >= min && *value <= max) || (is_whole && *value != std::floor(*value))) {
      return fail(ErrorCode::kInvalidArgument, "column {} is {}, no {}number from {:g} to {:g}",
                  kNames.at(column), quote(text), is_whole ? "whole " : "", min, max);
    }
    return *value;
  }
  std::array<std::optional<size_t>, 5> at_{};
};

std::optional<Terms> fit_terms(const std::vector<TimedTerms>& rows) {
  return tuning_db::fit_non_negative(rows);
}

// Launch, step and bandwidth of one host.
Status fit_nvlink(const std::vector<WireRow>& rows, WireModel& model, bool keeps_step) {
  std::vector<TimedTerms> timed;
  for (const WireRow& row : rows) {
    if (row.group.hosts > 1) continue;
    const WireTerms terms = model.terms(row.collective, row.group, row.bytes);
    TimedTerms one{.terms = {1, terms.nvlink_steps, terms.bytes / kBytes}, .time = row.us};
    if (keeps_step) {
      one.known = terms.nvlink_steps * model.nvlink.step_us;
      one.terms[1] = 0;
    }
    timed.push_back(one);
  }
  if (timed.size() < kMinRows) {
    return fail(ErrorCode::kInvalidArgument,
                "{} rows of one host; a fit takes {} and more, small ones and large ones",
                timed.size(), kMinRows);
  }
  const auto found = fit_terms(timed);
  if (!found || !((*found)[2] > 0)) {
    return fail(ErrorCode::kInvalidArgument,
                "the rows of one host do not tell bandwidth from latency; measure from a few KB "
                "to hundreds of MB");
  }
  model.launch_us = (*found)[0];
  if (!keeps_step) model.nvlink.step_us = (*found)[1];
  model.nvlink.gb_per_s = kBytes / 1e3 / (*found)[2];
  return {};
}

// What several hosts take beyond that; the network's cards bound their bandwidth.
Status fit_network(const std::vector<WireRow>& rows, WireModel& model) {
  std::vector<TimedTerms> timed;
  for (const WireRow& row : rows) {
    if (row.group.hosts == 1) continue;
    const WireTerms terms = model.terms(row.collective, row.group, row.bytes);
    timed.push_back({.terms = {0, terms.network_steps, terms.bytes / terms.cards / kBytes},
                     .time = row.us,
                     .known = model.launch_us + terms.nvlink_steps * model.nvlink.step_us});
  }
  if (timed.empty()) return {};
  const auto found = timed.size() < kMinNetworkRows ? std::nullopt : fit_terms(timed);
  if (!found || !((*found)[2] > 0)) {
    return fail(ErrorCode::kInvalidArgument,
                "the {} rows of several hosts do not tell the network's bandwidth from its "
                "latency; measure {} and more, from a few KB to hundreds of MB",
                timed.size(), kMinNetworkRows);
  }
  model.network = {(*found)[1], kBytes / 1e3 / (*found)[2]};
  return {};
}

bool has_one_group_size(const std::vector<WireRow>& rows) {
  std::set<int64_t> sizes;
  for (const WireRow& row : rows) {
    if (row.group.hosts == 1) sizes.insert(row.group.ranks);
  }
  return sizes.size() < 2;
}

Result<WireModel> fit_once(const std::vector<WireRow>& rows, const WireModel& start,
                           bool keeps_step) {
  WireModel model = start;
  F8_TRY(fit_nvlink(rows, model, keeps_step));
  F8_TRY(fit_network(rows, model));
  return model;
}

double relative_error(const WireModel& model, const WireRow& row) {
  return model.us(row.collective, row.group, row.bytes) / row.us - 1;
}

WireErrors errors_of(const std::vector<double>& relative) {
  WireErrors errors;
  for (size_t i = 0; i < relative.size(); ++i) {
    errors.rms += relative[i] * relative[i] / static_cast<double>(relative.size());
    if (std::abs(relative[i]) <= errors.worst) continue;
    errors.worst = std::abs(relative[i]);
    errors.worst_row = i;
  }
  errors.rms = std::sqrt(errors.rms);
  return errors;
}

}  // namespace

Result<std::vector<WireRow>> parse_wire_rows(std::string_view csv) {
  std::optional<Columns> columns;
  std::vector<WireRow> rows;
  for (int64_t number = 1; !csv.empty(); ++number) {
    const std::string_view line = take_until(csv, '\n');
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto failed = [number](const Error& error) {
      return fail(error.code, "line {}: {}", number, error.message);
    };
    if (!columns) {
      auto header = Columns::of(line);
      if (!header) return failed(header.error());
      columns = *header;
      continue;
    }
    const auto row = columns->row(line);
    if (!row) return failed(row.error());
    rows.push_back(*row);
    if (rows.size() > kMaxRows) {
      return fail(ErrorCode::kInvalidArgument, "more than {} rows; leave some out", kMaxRows);
    }
  }
  return rows;
}

Result<std::vector<WireRow>> read_wire_rows(const std::filesystem::path& path) {
  const std::string text = F8_TRY(read_input(path));
  auto rows = parse_wire_rows(text);
  if (!rows) return fail(rows.error().code, "{}: {}", input_name(path), rows.error().message);
  return rows;
}

Result<WireFit> fit_wire(const std::vector<WireRow>& rows, const WireModel& start) {
  const bool keeps_step = has_one_group_size(rows);
  WireFit fit{
      .model = F8_TRY(fit_once(rows, start, keeps_step)), .kept = {}, .fitted = {}, .left_out = {}};
  fit.model.measured.clear();
  bool has_network = false;
  for (const WireRow& row : rows) {
    if (!fit.model.is_measured(row.group)) fit.model.measured.push_back(row.group);
    has_network |= row.group.hosts > 1;
  }
  if (keeps_step) fit.kept.emplace_back("NVLink's step: the rows have one number of ranks");
  if (!has_network) fit.kept.emplace_back("the network: the rows have one host");
  std::vector<double> fitted;
  std::vector<double> left_out;
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<WireRow> others = rows;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    const auto model = fit_once(others, start, keeps_step);
    if (!model) {
      return fail(ErrorCode::kInvalidArgument, "with one row left out: {}", model.error().message);
    }
    fitted.push_back(relative_error(fit.model, rows[i]));
    left_out.push_back(relative_error(*model, rows[i]));
  }
  fit.fitted = errors_of(fitted);
  fit.left_out = errors_of(left_out);
  fit.model.error = fit.left_out.rms;
  return fit;
}

std::string wire_constants_source(const WireModel& model) {
  std::string measured;
  for (const RankGroup& group : model.measured) {
    measured += f8::format("{}{{{}, {}}}", measured.empty() ? "" : ", ", group.ranks, group.hosts);
  }
  return f8::format(
      R"(// `float8-tune wire fit` writes this file; docs/communication-model.md says what these come from.
#include "tuning_db/estimate/wire_model.hpp"

namespace f8::tuning_db {{

const WireModel& WireModel::fitted() {{
  static const WireModel kModel = {{
      .launch_us = {:.4g},
      .nvlink = {{.step_us = {:.4g}, .gb_per_s = {:.4g}}},
      .network = {{.step_us = {:.4g}, .gb_per_s = {:.4g}}},
      .cast_gb_per_s = {:.4g},
      .error = {:.3g},
      .measured = {{{}}},
      .source = {},
      .date = "{}"}};
  return kModel;
}}

}}  // namespace f8::tuning_db
)",
      model.launch_us, model.nvlink.step_us, model.nvlink.gb_per_s, model.network.step_us,
      model.network.gb_per_s, model.cast_gb_per_s, model.error, measured,
      "\"" + model.source + "\"", model.date);
}

}  // namespace f8::tuner
