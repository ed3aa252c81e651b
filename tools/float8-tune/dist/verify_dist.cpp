// verify-dist: runs linears sharded over ranks and on one device, and compares them: equal bits where
// sums have one order, an SQNR elsewhere; and whether all ranks have one tuning table and run the same
// kernels. The ranks are GPUs of this machine, or emulated devices.
#include <algorithm>
#include <cmath>
#include <memory>

#include "base/number.hpp"
#include "base/text.hpp"
#include "tools/float8-tune/dist/sharded_linear.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/refuse_db.hpp"

namespace f8::cli {
namespace {

constexpr int kMostRanks = 8;

struct VerifyDistOptions {
  std::string gpus;
  bool emulate = false;
  int64_t ranks = 2;
  std::string recipes = "tensorwise,rowwise,rowwise_with_gw_hp,delayed,blockwise";
  std::vector<std::string> shapes = {"512x256", "384x512"};
  int64_t tokens = 256;
  int64_t timeout_s = 60;
  std::vector<std::string> tables;
};

struct WeightShape {
  int64_t n = 0;
  int64_t k = 0;
};

Result<int64_t> parse_integer(std::string_view text, int64_t most) {
  const auto value = number_of<int64_t>(text);
  if (value && *value >= 0 && *value <= most) return *value;
  return fail(ErrorCode::kInvalidArgument, "{} is not an integer from 0 to {}", quote(text), most);
}

Result<WeightShape> parse_shape(const std::string& text) {
  const size_t x = text.find('x');
  if (x != std::string::npos) {
    const auto n = parse_integer(std::string_view(text).substr(0, x), kMaxDim);
    const auto k = parse_integer(std::string_view(text).substr(x + 1), kMaxDim);
    if (n && k && *n > 0 && *k > 0 && *n % 16 == 0 && *k % 16 == 0) return WeightShape{*n, *k};
  }
  return fail(ErrorCode::kInvalidArgument,
              "--shape: {} is no weight's shape NxK of two multiples of 16, such as 4096x1024",
              quote(text));
}

Result<std::vector<int>> devices_of(const VerifyDistOptions& options) {
  std::vector<int> devices;
  if (options.emulate) {
    if (!options.gpus.empty()) {
      return fail(ErrorCode::kInvalidArgument,
                  "--emulate and --gpus are both given; ranks are emulated, or GPUs");
    }
    for (int rank = 0; rank < options.ranks; ++rank) devices.push_back(rank);
    return devices;
  }
  if (options.gpus.empty()) {
    return fail(ErrorCode::kInvalidArgument, "which ranks? give --gpus 0,1 or --emulate --ranks 2");
  }
  for (const std::string& item : split(options.gpus, ',')) {
    const int64_t device = F8_TRY(of_option("--gpus", parse_integer(item, 1023)));
    if (std::ranges::find(devices, device) != devices.end()) {
      return fail(ErrorCode::kInvalidArgument, "--gpus: {} is there twice; name each once", device);
    }
    devices.push_back(static_cast<int>(device));
  }
  if (devices.size() > kMostRanks) {
    return fail(ErrorCode::kInvalidArgument, "--gpus: {} devices; name {} at most", devices.size(),
                kMostRanks);
  }
  return devices;
}

struct Case {
  std::string recipe;
  WeightShape shape;
  std::vector<Finding> findings;
};

struct VerifyDistReport {
  bool one_table = true;
  std::vector<std::string> tables;  // the hash of each rank's
  std::vector<Case> cases;

  // A line for each difference.
  [[nodiscard]] std::vector<std::string> differences() const {
    std::vector<std::string> lines;
    for (size_t rank = 1; rank < tables.size(); ++rank) {
      if (tables[rank] == tables.front()) continue;
      lines.push_back(
          f8::format("rank {} differs in table: it has {}, and rank 0 has {}; give all ranks one "
                     "tuning table with --table",
                     rank, tables[rank], tables.front()));
    }
    for (const Case& c : cases) {
      for (const Finding& f : c.findings) {
        for (const std::string& note : f.notes) {
          lines.push_back(f8::format("{} {}x{}: {}", c.recipe, c.shape.n, c.shape.k, note));
        }
      }
    }
    return lines;
  }

  [[nodiscard]] bool is_good() const {
    return one_table && std::ranges::all_of(cases, [](const Case& c) {
             return std::ranges::all_of(c.findings, &Finding::is_good);
           });
  }
};

// JSON has no infinity: equal results have no SQNR.
Json number(double value) {
  return std::isfinite(value) ? Json(rounded(value, 4)) : Json();
}

Json to_json(const VerifyDistReport& report, const VerifyDistOptions& options,
             const std::vector<int>& devices) {
  Json json = {{"emulated", options.emulate},   {"devices", devices},
               {"tokens", options.tokens},      {"tables", report.tables},
               {"one_table", report.one_table}, {"checks", Json::array()}};
  for (const Case& c : report.cases) {
    for (const Finding& f : c.findings) {
      json["checks"].push_back({{"recipe", c.recipe},
                                {"n", c.shape.n},
                                {"k", c.shape.k},
                                {"check", f.check},
                                {"rule", f.bits ? "bits" : "sqnr"},
                                {"different", f.bits ? Json(f.different) : Json()},
                                {"sqnr_db", f.bits ? Json() : number(f.sqnr_db)},
                                {"needed_db", f.bits ? Json() : number(f.needed_db)},
                                {"ok", f.is_good()}});
    }
  }
  json["differences"] = report.differences();
  json["ok"] = report.is_good();
  return json;
}

void print_text(const VerifyDistReport& report, bool color) {
  Table table({{"recipe", Table::Align::kLeft},
               {"weight"},
               {"check", Table::Align::kLeft},
               {"rule", Table::Align::kLeft},
               {"found", Table::Align::kLeft},
               {"", Table::Align::kLeft}});
  for (const Case& c : report.cases) {
    for (const Finding& f : c.findings) {
      const bool equal = f.bits ? f.different == 0 : f.sqnr_db > 0 && std::isinf(f.sqnr_db);
      table.add({c.recipe, f8::format("{}x{}", c.shape.n, c.shape.k), f.check,
                 f.bits ? "equal" : f8::format("SQNR >= {:.0f} dB", f.needed_db),
                 equal    ? "equal"
                 : f.bits ? f8::format("{} differ", f.different)
                          : f8::format("{:.1f} dB", f.sqnr_db),
                 f.is_good() ? "ok" : "DIFFERENT"});
    }
  }
  print_styled(table.text(color));
  if (report.one_table) {
    print(f8::format("all ranks have the tuning table {}\n", report.tables.front()));
  }
  for (const std::string& line : report.differences()) print(line + "\n");
}

Result<DeviceRanks> make_ranks(const VerifyDistOptions& options, const std::vector<int>& devices) {
  if (options.tables.size() > 1 && options.tables.size() != devices.size()) {
    return fail(ErrorCode::kInvalidArgument,
                "--table is given {} times; once for all ranks, or once for each of {}",
                options.tables.size(), devices.size());
  }
  DeviceRanks ranks;
  for (size_t i = 0; i < devices.size(); ++i) {
    const std::string table = options.tables.empty()       ? ""
                              : options.tables.size() == 1 ? options.tables.front()
                                                           : options.tables[i];
    ranks.push_back(
        F8_TRY(DeviceRank::create(static_cast<int>(i), devices[i], options.emulate, table)));
  }
  F8_TRY(join_all(ranks, static_cast<int>(options.timeout_s * 1000)));
  return ranks;
}

Result<int> verify_dist(const VerifyDistOptions& options, const Global& global) {
  const std::vector<int> devices = F8_TRY(devices_of(options));
  const std::vector<std::string> recipes = F8_TRY(recipes_of(options.recipes));
  std::vector<WeightShape> shapes;
  for (const std::string& shape : options.shapes) shapes.push_back(F8_TRY(parse_shape(shape)));
  const auto count = static_cast<int64_t>(devices.size());
  if (options.tokens % count != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "--tokens is {}, which {} ranks do not share equally; give a multiple of {}",
                options.tokens, count, count);
  }
  const DeviceRanks ranks = F8_TRY(make_ranks(options, devices));
  VerifyDistReport report;
  for (const auto& rank : ranks) report.tables.push_back(rank->table_hash());
  report.one_table = std::ranges::count(report.tables, report.tables.front()) == count;
  Progress progress(global);
  for (const WeightShape& shape : shapes) {
    for (const std::string& recipe : recipes) {
      progress.update(f8::format("{} {}x{} on {} ranks", recipe, shape.n, shape.k, count));
      const ShardedProblem problem{.recipe = recipe,
                                   .shape = {options.tokens, shape.n, shape.k},
                                   // Emulated ranks add in their order, and two ranks have one.
                                   .one_order = options.emulate || count <= 2,
                                   // An emulated GEMM adds up K in order.
                                   .one_kernel = options.emulate};
      report.cases.push_back({recipe, shape, F8_TRY(verify_sharded(ranks, problem))});
    }
  }
  progress.clear();
  if (global.json) {
    print_json(to_json(report, options, devices));
  } else {
    print_text(report, stdout_color(global));
  }
  return report.is_good() ? kExitOk : kExitRegression;
}

}  // namespace

void add_verify_dist(CLI::App& app, Program& program) {
  auto options = std::make_shared<VerifyDistOptions>();
  CLI::App* command = add_command(
      app, program, "verify-dist",
      "whether linears sharded over ranks compute what one device does; 3: they do not",
      Needs::kGpu, [options, &program] { return verify_dist(*options, program.global); });
  refuse_db(*command,
            "verify-dist takes --table FILE, which `float8-tune db export --format table` writes");
  command->add_option("--gpus", options->gpus, "the ranks' CUDA ordinals")->type_name("INT,...");
  command->add_flag("--emulate", options->emulate, "ranks are emulated devices, without a GPU");
  add_integer(*command, "--ranks", options->ranks, "how many emulated ranks there are", 1,
              kMostRanks);
  command->add_option("--recipe", options->recipes, "one or several, separated by commas")
      ->type_name("RECIPE,...");
  command->add_option("--shape", options->shapes, "weights: out_features x in_features")
      ->type_name("NxK");
  add_integer(*command, "--tokens", options->tokens, "M: tokens of all ranks together");
  add_integer(*command, "--timeout", options->timeout_s,
              "seconds after which an emulated rank that does not come is an error", 1, 3600);
  command
      ->add_option("--table", options->tables,
                   "a tuning table for all ranks, or one for each; without, the built-in one")
      ->type_name("FILE");
}

}  // namespace f8::cli
