// wire: what collectives of weights and amaxes take, and the model's constants fitted to measured
// ones. It needs no GPU.
#include <array>
#include <chrono>
#include <memory>

#include "base/file.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/refuse_db.hpp"
#include "tools/tuner/fit/wire_fit.hpp"
#include "tools/tuner/search/bench/shape_sweep.hpp"

namespace f8::cli {
namespace {

using tuning_db::Collective;
using tuning_db::RankGroup;
using tuning_db::WireModel;

std::string percent_text(double share) {
  return f8::format("{:.1f} %", 100 * share);
}

Json constants_json(const WireModel& model) {
  Json measured = Json::array();
  for (const RankGroup& group : model.measured) {
    measured.push_back({{"ranks", group.ranks}, {"hosts", group.hosts}});
  }
  return {{"launch_us", rounded(model.launch_us, 4)},
          {"nvlink_step_us", rounded(model.nvlink.step_us, 4)},
          {"nvlink_gb_per_s", rounded(model.nvlink.gb_per_s, 4)},
          {"network_step_us", rounded(model.network.step_us, 4)},
          {"network_gb_per_s", rounded(model.network.gb_per_s, 4)},
          {"error", rounded(model.error, 3)},
          {"measured", measured},
          {"source", model.source},
          {"date", model.date}};
}

std::string constants_text(const WireModel& model) {
  return f8::format(
      "launch {:.4g} us; NVLink {:.4g} us a step, {:.4g} GB/s; network {:.4g} us a step, {:.4g} "
      "GB/s a card\n{}; times within {:.0f} %\n",
      model.launch_us, model.nvlink.step_us, model.nvlink.gb_per_s, model.network.step_us,
      model.network.gb_per_s, model.origin(), 100 * model.half_width());
}

struct FitCommand {
  std::filesystem::path rows;
  std::filesystem::path output;
  std::string source;
  std::string date;
};

std::string today() {
  const auto day = std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now());
  const std::chrono::year_month_day date(day);
  return f8::format("{:04}-{:02}-{:02}", static_cast<int>(date.year()),
                    static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()));
}

// A text that stands in a string of C++ as it is.
Status check_text(std::string_view option, std::string_view text) {
  if (!has_control(text) && text.find_first_of("\"\\") == std::string_view::npos) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: {} has quotes, backslashes or control characters; leave them out", option,
              quote(text));
}

Result<int> fit(const FitCommand& options, const Global& global) {
  F8_TRY(check_output(global, "-o", options.output));
  F8_TRY(check_text("--source", options.source));
  F8_TRY(check_text("--date", options.date));
  const auto rows = F8_TRY(of_option("--rows", tuner::read_wire_rows(options.rows)));
  tuner::WireFit found = F8_TRY(of_option("--rows", tuner::fit_wire(rows, WireModel::fitted())));
  found.model.source =
      options.source.empty() ? input_name(options.rows.filename()) : options.source;
  found.model.date = options.date.empty() ? today() : options.date;
  F8_TRY(check_text("--rows", found.model.source));
  for (const std::string& kept : found.kept) note(global, "kept as it was: {}", kept);
  const tuner::WireRow& worst = rows[found.left_out.worst_row];
  const std::string worst_of =
      f8::format("{} of {:.0f} bytes, {} ranks on {}", to_string(worst.collective), worst.bytes,
                 worst.group.ranks, worst.group.hosts);
  if (global.json) {
    print_json({{"rows", rows.size()},
                {"constants", constants_json(found.model)},
                {"kept", found.kept},
                {"fitted_rms", rounded(found.fitted.rms, 3)},
                {"left_out_rms", rounded(found.left_out.rms, 3)},
                {"left_out_worst", rounded(found.left_out.worst, 3)},
                {"left_out_worst_of", worst_of}});
  } else if (!is_standard_stream(options.output)) {
    print(constants_text(found.model));
    print(f8::format("{} rows: error {} of those fitted to, {} of each left out, at most {} ({})\n",
                     rows.size(), percent_text(found.fitted.rms), percent_text(found.left_out.rms),
                     percent_text(found.left_out.worst), worst_of));
  }
  if (options.output.empty()) return kExitOk;
  F8_TRY(write_output(global, "-o", options.output, tuner::wire_constants_source(found.model)));
  return kExitOk;
}

struct PredictCommand {
  std::string weight = "14336,4096";
  std::string ranks = "2,8,64,512,4096,16384";
  int64_t of_host = 8;
  int64_t words = 0;
  double network_gbit = 0;
  std::filesystem::path rows;
  std::filesystem::path csv;
};

struct Prediction {
  RankGroup group;
  double bf16_us = 0, fp8_us = 0, amax_us = 0;
  bool is_prediction = true;
};

Result<int64_t> integer_of(std::string_view option, const std::string& text, int64_t max) {
  const auto value = number_of<int64_t>(text);
  if (value && *value >= 1 && *value <= max) return *value;
  return fail(ErrorCode::kInvalidArgument, "{}: {} is not an integer from 1 to {}", option,
              quote(text), max);
}

Result<std::vector<RankGroup>> groups_of(const PredictCommand& options) {
  std::vector<RankGroup> groups;
  for (const std::string& item : split(options.ranks, ',')) {
    const int64_t ranks = F8_TRY(integer_of("--ranks", item, tuning_db::kMaxRanks));
    const int64_t hosts = (ranks + options.of_host - 1) / options.of_host;
    if (ranks % hosts != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "--ranks: {} ranks do not fill hosts of {} evenly; choose a multiple, or another "
                  "--gpus-per-host",
                  ranks, options.of_host);
    }
    groups.push_back({ranks, hosts});
  }
  return groups;
}

Json prediction_json(const Prediction& p, const WireModel& model) {
  Json json = {{"ranks", p.group.ranks}, {"hosts", p.group.hosts}};
  const auto add = [&](const char* name, double us) {
    add_interval(json, name, us, us * std::max(0.0, 1 - model.half_width()),
                 us * (1 + model.half_width()), 4);
  };
  add("bf16_gather_us", p.bf16_us);
  add("fp8_gather_us", p.fp8_us);
  add("amax_all_reduce_us", p.amax_us);
  json["saved_us_a_step"] = rounded(2 * (p.bf16_us - p.fp8_us) - p.amax_us, 4);
  json["is_prediction"] = p.is_prediction;
  return json;
}

Result<std::string> csv_of(const std::vector<Prediction>& all, const WireModel& model) {
  constexpr std::array<std::string_view, 8> kColumns = {
      "ranks",           "hosts",      "bf16_gather_us", "fp8_gather_us", "amax_all_reduce_us",
      "saved_us_a_step", "half_width", "is_prediction"};
  tuner::CsvText csv(kColumns);
  for (const Prediction& p : all) {
    const std::vector<std::string> fields = {
        f8::format("{}", p.group.ranks),
        f8::format("{}", p.group.hosts),
        f8::format("{:.1f}", p.bf16_us),
        f8::format("{:.1f}", p.fp8_us),
        f8::format("{:.1f}", p.amax_us),
        f8::format("{:.1f}", 2 * (p.bf16_us - p.fp8_us) - p.amax_us),
        f8::format("{:.3f}", model.half_width()),
        p.is_prediction ? "1" : "0"};
    F8_TRY(csv.add(fields));
  }
  return csv.take();
}

void print_predictions(const PredictCommand& options, const std::vector<Prediction>& all,
                       const WireModel& model, bool color) {
  Table table({{"ranks"},
               {"hosts"},
               {"bf16 gather us"},
               {"fp8 gather us"},
               {"amaxes us"},
               {"saved a step us"},
               {"", Table::Align::kLeft}});
  for (const Prediction& p : all) {
    table.add({f8::format("{}", p.group.ranks), f8::format("{}", p.group.hosts),
               f8::format("{:.0f}", p.bf16_us), f8::format("{:.0f}", p.fp8_us),
               f8::format("{:.0f}", p.amax_us),
               f8::format("{:.0f}", 2 * (p.bf16_us - p.fp8_us) - p.amax_us),
               p.is_prediction ? "predicted" : "measured"});
  }
  print_styled(table.text(color));
  print(
      f8::format("\nweight {}, gathered twice a step\n{}", options.weight, constants_text(model)));
}

Result<int> predict(const PredictCommand& options, const Global& global) {
  F8_TRY(check_output(global, "--csv", options.csv));
  const std::vector<std::string> sizes = split(options.weight, ',');
  if (sizes.size() != 2) {
    return fail(ErrorCode::kInvalidArgument, "--weight: {} is not N,K, such as 4096,4096",
                quote(options.weight));
  }
  const auto n = static_cast<double>(F8_TRY(integer_of("--weight", sizes[0], kMaxDim)));
  const auto k = static_cast<double>(F8_TRY(integer_of("--weight", sizes[1], kMaxDim)));
  const double words = options.words == 0 ? k : static_cast<double>(options.words);
  WireModel model = F8_TRY(wire_model_of(options.rows));
  if (options.network_gbit != 0) model.network.gb_per_s = options.network_gbit / 8;
  std::vector<Prediction> all;
  for (const RankGroup group : F8_TRY(groups_of(options))) {
    const bool other_network = options.network_gbit != 0 && group.hosts > 1;
    all.push_back({.group = group,
                   .bf16_us = model.us(Collective::kAllGather, group, 2 * n * k),
                   .fp8_us = model.us(Collective::kAllGather, group, n * k),
                   .amax_us = model.us(Collective::kAllReduce, group, 4 * words),
                   .is_prediction = other_network || !model.is_measured(group)});
  }
  if (!options.csv.empty()) {
    const std::string rows = F8_TRY(csv_of(all, model));
    F8_TRY(write_output(global, "--csv", options.csv, rows));
  }
  if (is_standard_stream(options.csv)) return kExitOk;
  if (!global.json) {
    print_predictions(options, all, model, stdout_color(global));
    return kExitOk;
  }
  Json rows = Json::array();
  for (const Prediction& p : all) rows.push_back(prediction_json(p, model));
  print_json({{"n", n},
              {"k", k},
              {"words", words},
              {"constants", constants_json(model)},
              {"predictions", rows}});
  return kExitOk;
}

}  // namespace

void add_wire(CLI::App& app, Program& program) {
  CLI::App* group = add_group(app, "wire", "the model of collectives: predictions and its fit");
  auto asked = std::make_shared<PredictCommand>();
  CLI::App* predicted = add_command(
      *group, program, "predict", "what gathers of a weight and the all-reduce of amaxes take",
      Needs::kNothing, [asked, &program] { return predict(*asked, program.global); });
  refuse_db(*predicted, "no database holds collectives; --wire-rows names a file of them");
  predicted->add_option("--weight", asked->weight, "out_features and in_features")
      ->type_name("N,K");
  predicted->add_option("--ranks", asked->ranks, "how many ranks share it")->type_name("LIST");
  add_integer(*predicted, "--gpus-per-host", asked->of_host, "a host's ranks, where there are more",
              1, tuning_db::kMaxRanks);
  add_integer(*predicted, "--words", asked->words,
              "amaxes that are reduced once a step; K where it is not given, as for rowwise", 1,
              int64_t{1} << 40);
  add_network(*predicted, asked->network_gbit);
  add_wire_rows(*predicted, asked->rows);
  add_output(*predicted, "--csv", asked->csv, "also write the rows as CSV");

  auto fitted = std::make_shared<FitCommand>();
  CLI::App* command =
      add_command(*group, program, "fit", "fit the constants to measured collectives",
                  Needs::kNothing, [fitted, &program] { return fit(*fitted, program.global); });
  refuse_db(*command, "no database holds collectives; --rows names a file of them");
  add_input(*command, "--rows", fitted->rows,
            "CSV of benchmarks/distributed/wire.py: ranks, bytes, us, and collective and hosts")
      ->required();
  add_output(*command, "-o,--output", fitted->output,
             "write the source here (tuning_db/estimate/wire_constants.cpp)");
  command->add_option("--source", fitted->source, "where the rows come from; default: the file")
      ->type_name("TEXT");
  command->add_option("--date", fitted->date, "when they were measured; default: today")
      ->type_name("DATE");
}

}  // namespace f8::cli
