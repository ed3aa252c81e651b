// bench cast --list compares casting the weights of a model in few launches with casting them one
// by one and with a copy. bench produce compares casts that compute what they cast with a copy, which stands for what
// computes it, and a cast behind it.
#include "tools/float8-tune/bench/bench.hpp"
#include "tools/float8-tune/refuse_db.hpp"

namespace f8::cli {
namespace {

using CastRows = tuner::Bench::CastRows;

// The rows are a recipe's casts of weights, or of a producer's results.
struct CastSubject {
  Json json;                         // its fields
  std::vector<std::string> csv;      // before the columns of each row
  std::string text;                  // for people
  std::array<const char*, 2> names;  // of the first two rows
  const char* faster;                // what the second row is so many times as fast as the first
};

constexpr std::array<std::string_view, 11> kCsvOfRow = {
    "bytes",   "cast",       "us",         "us_lo", "us_hi", "gb_per_s",
    "of_copy", "of_copy_lo", "of_copy_hi", "state", "reason"};

std::vector<std::string_view> csv_columns(std::initializer_list<std::string_view> before) {
  std::vector<std::string_view> columns(before);
  columns.insert(columns.end(), kCsvOfRow.begin(), kCsvOfRow.end());
  return columns;
}

const char* name_of(const CastSubject& subject, size_t row) {
  return row < subject.names.size() ? subject.names[row] : "copy";
}

Json to_json(const CastSubject& subject, const CastRows& rows) {
  Json json = subject.json;
  json["casts"] = Json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    const tuner::CastRow& row = rows[i];
    Json one = {{"cast", name_of(subject, i)}, {"bytes", row.bytes}};
    add_us(one, row.result);
    if (const auto& timing = row.result.timing) {
      one["gb_per_s"] = rounded(row.bytes / timing->median_ns, 4);
    }
    if (const auto& copy = row.of_copy) {
      add_interval(one, "of_copy", copy->ratio, copy->ci.lo, copy->ci.hi, 5);
    }
    if (const auto& ratio = row.result.ratio; ratio && i == 1) {
      add_interval(one, "speedup", ratio->ratio, ratio->lo, ratio->hi, 5);
    }
    one["state"] = tuning_db::to_string(row.result.state);
    if (!row.result.reason.empty()) one["reason"] = row.result.reason;
    json["casts"].push_back(one);
  }
  return json;
}

std::string text_of(const CastSubject& subject, const CastRows& rows, bool color) {
  using enum Table::Align;
  Table table({{"cast", kLeft},
               {"MB"},
               {"us"},
               {"interval"},
               {"GB/s"},
               {"of a copy"},
               {"interval"},
               {"state", kLeft}});
  std::string after;
  for (size_t i = 0; i < rows.size(); ++i) {
    const tuner::CastRow& row = rows[i];
    const auto& timing = row.result.timing;
    const auto& share = row.of_copy;
    table.add({name_of(subject, i), f8::format("{:.1f}", row.bytes / 1e6),
               timing ? f8::format("{:.1f}", timing->median_ns / 1e3) : "-",
               timing ? interval_text(timing->ci_lo_ns / 1e3, timing->ci_hi_ns / 1e3, 1) : "-",
               timing ? f8::format("{:.0f}", row.bytes / timing->median_ns) : "-",
               share ? f8::format("{:.3f}", share->ratio) : "",
               share ? interval_text(share->ci.lo, share->ci.hi, 3) : "",
               std::string(tuning_db::to_string(row.result.state))});
    if (!timing) {
      after += f8::format("{} not measured: {}\n", name_of(subject, i), row.result.reason);
    }
    if (const auto& ratio = row.result.ratio; ratio && i == 1) {
      after += f8::format("{} {:.3f} times as fast {}\n", subject.faster, ratio->ratio,
                          interval_text(ratio->lo, ratio->hi, 3));
    }
  }
  return subject.text + "\n" + table.text(color) + after;
}

Status add_csv(tuner::CsvFile& csv, const CastSubject& subject, const CastRows& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const tuner::CastRow& row = rows[i];
    const auto& timing = row.result.timing;
    const auto& share = row.of_copy;
    const auto us = [&](double tuning_db::Timing::*ns) {
      return timing ? csv_number((*timing).*ns / 1e3) : "";
    };
    std::vector<std::string> cells = subject.csv;
    for (std::string cell :
         {csv_number(row.bytes), std::string(name_of(subject, i)),
          us(&tuning_db::Timing::median_ns), us(&tuning_db::Timing::ci_lo_ns),
          us(&tuning_db::Timing::ci_hi_ns), timing ? csv_number(row.bytes / timing->median_ns) : "",
          share ? csv_number(share->ratio) : "", share ? csv_number(share->ci.lo) : "",
          share ? csv_number(share->ci.hi) : "",
          std::string(tuning_db::to_string(row.result.state)), row.result.reason}) {
      cells.push_back(std::move(cell));
    }
    F8_TRY(csv.add(cells));
  }
  return {};
}

// Results of several subjects, as they are measured.
struct CastReport {
  const BenchOptions& options;
  const Global& global;
  BenchMachine machine;
  Json json = Json::array();
  std::string text = {};
  bool bad = false;

  Status add(const CastSubject& subject, const Result<CastRows>& rows) {
    machine.progress->clear();
    if (!rows) return std::unexpected(rows.error());
    F8_TRY(of_option("--csv", add_csv(machine.csv, subject, *rows)));
    json.push_back(to_json(subject, *rows));
    text += text.empty() ? "" : "\n";
    text += text_of(subject, *rows, stdout_color(global));
    for (const tuner::CastRow& row : *rows) bad |= !row.result.timing;
    return {};
  }
  [[nodiscard]] int print() const {
    print_results(options, global, {{"device", machine.backend->device().name}, {"results", json}},
                  text);
    return bad ? kExitRegression : kExitOk;
  }
};

struct ProducerOptions : BenchOptions {
  std::string sources = "glu,glu_backward";
  std::string sizes;
};

Result<int> bench_produce(const ProducerOptions& options, const Global& global) {
  const auto producers = F8_TRY(of_option("--source", tuner::parse_producers(options.sources)));
  const auto sizes = F8_TRY(of_option("--size", tuner::parse_sizes(options.sizes)));
  const std::vector<Recipe> recipes = F8_TRY(recipes_of(options));
  CastReport report{
      options, global,
      F8_TRY(open_bench(options, global, csv_columns({"recipe", "source", "rows", "cols"})))};
  for (const Recipe& recipe : recipes) {
    for (const tuner::Producer& producer : producers) {
      for (const runtime::MatrixSize& size : sizes) {
        const std::string source = to_string(producer);
        F8_TRY(report.add(
            {.json = {{"recipe", recipe.name},
                      {"source", source},
                      {"rows", size.rows},
                      {"cols", size.cols}},
             .csv = {recipe.name, source, std::to_string(size.rows), std::to_string(size.cols)},
             .text = f8::format("{}, {}, {} x {}", recipe.name, source, size.rows, size.cols),
             .names = {"apart", "fused"},
             .faster = "fused is"},
            report.machine.bench->producer(recipe, producer, size)));
      }
    }
  }
  return report.print();
}

}  // namespace

Result<int> bench_casts(const BenchOptions& options, const std::string& list,
                        const Global& global) {
  const auto weights = F8_TRY(of_option("--list", tuner::parse_weight_list(list)));
  const std::vector<Recipe> recipes = F8_TRY(recipes_of(options));
  CastReport report{options, global,
                    F8_TRY(open_bench(options, global, csv_columns({"recipe", "weights"})))};
  for (const Recipe& recipe : recipes) {
    const double bytes = F8_TRY(tuner::cast_bytes(recipe, weights));
    F8_TRY(report.add(
        {.json = {{"recipe", recipe.name}, {"weights", weights.size()}, {"bytes", bytes}},
         .csv = {recipe.name, std::to_string(weights.size())},
         .text = f8::format("{}, {} weights", recipe.name, weights.size()),
         .names = {"one by one", "list"},
         .faster = "the list is"},
        report.machine.bench->casts(recipe, weights)));
  }
  return report.print();
}

void add_bench_produce(CLI::App& group, Program& program) {
  auto options = std::make_shared<ProducerOptions>();
  CLI::App* command = add_command(
      group, program, "produce",
      "casts that compute what they cast, against a copy in its place and a cast, and a copy",
      Needs::kGpu, [options, &program] { return bench_produce(*options, program.global); });
  command
      ->add_option("--source", options->sources,
                   "what is computed: glu, glu_backward, activation and activation_backward, as "
                   "glu/gelu, by default of silu; rms_norm, layer_norm; separated by commas")
      ->type_name("LIST");
  command->add_option("--size", options->sizes, "of what is cast; several with ';', as 8192,14336")
      ->type_name("ROWS,COLS")
      ->required();
  add_recipes(*command, *options);
  add_csv_option(*command, *options);
  declare_machine(*command, *options);
  add_seconds(*command, *options);
  refuse_db(*command,
            "bench produce asks no database: its casts have one kernel each; leave --db out");
}

}  // namespace f8::cli
