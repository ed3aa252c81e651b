// cost-model: says how much slower the model's choices are than the fastest of those measured, and
// writes what it read, for benchmarks/fit/cost_model.py to fit constants to. It needs no GPU.
#include <array>

#include "base/file.hpp"
#include "tools/float8-tune/bench/measured_gemms.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/refuse_db.hpp"
#include "tools/tuner/backend/candidate.hpp"
#include "tools/tuner/search/bench/shape_sweep.hpp"

namespace f8::cli {
namespace {

using tuner::MeasuredGemm;
using tuner::Regret;

struct CostModelOptions {
  std::string train = "builtin";
  std::string test;
  std::filesystem::path csv;
};

// Leaves out the GEMMs of layers that the fit has seen: they are no test.
std::vector<MeasuredGemm> unseen(const std::vector<MeasuredGemm>& test,
                                 const std::vector<MeasuredGemm>& train) {
  std::vector<MeasuredGemm> kept;
  for (const MeasuredGemm& gemm : test) {
    const bool seen = std::ranges::any_of(train, [&](const MeasuredGemm& known) {
      return known.linear.n == gemm.linear.n && known.linear.k == gemm.linear.k;
    });
    if (!seen) kept.push_back(gemm);
  }
  return kept;
}

class CostModelReport {
 public:
  void add(const std::string& what, const Regret& regret) {
    json_[what] = {{"products", regret.gemms},
                   {"median", rounded(regret.median, 4)},
                   {"p95", rounded(regret.p95, 4)},
                   {"worst", rounded(regret.worst, 4)},
                   {"worst_of", regret.worst_of},
                   {"median_to_any", rounded(regret.median_to_any, 4)},
                   {"p95_to_any", rounded(regret.p95_to_any, 4)}};
    const auto percent = [](double share) { return f8::format("{:.1f} %", 100 * share); };
    table_.add({what, std::to_string(regret.gemms), percent(regret.median), percent(regret.p95),
                percent(regret.worst), percent(regret.median_to_any), percent(regret.p95_to_any),
                regret.worst_of});
  }
  [[nodiscard]] const Json& json() const { return json_; }
  [[nodiscard]] const Table& table() const { return table_; }

 private:
  Json json_ = Json::object();
  Table table_{{{"slower than the fastest", Table::Align::kLeft},
                {"GEMMs"},
                {"median"},
                {"p95"},
                {"worst"},
                {"or cuBLASLt"},
                {"p95"},
                {"worst of", Table::Align::kLeft}}};
};

constexpr std::array<std::string_view, 9> kKernelColumns = {
    "set", "number", "device", "sms", "problem", "gemm", "impl", "config", "ns"};

// A row for each kernel of a GEMM, which has a number in its set. "gemm" has types, scales and own shape.
Status add_kernels(tuner::CsvText& csv, const char* set, const std::vector<MeasuredGemm>& gemms) {
  for (size_t number = 0; const MeasuredGemm& gemm : gemms) {
    const Problem problem = F8_TRY(Problem::parse(gemm.problem));
    const std::string identity = tuner::gemm_identity(problem, false);
    const auto add = [&](const char* impl, const std::string& config, double ns) {
      return csv.add(std::array<std::string, kKernelColumns.size()>{
          set, f8::format("{}", number), gemm.device, f8::format("{}", gemm.sm_count), gemm.problem,
          identity, impl, config, f8::format("{}", ns)});
    };
    for (const tuner::TimedConfig& timed : gemm.timed) {
      F8_TRY(add("generated", key(timed.config), timed.ns));
    }
    for (const tuner::TimedHeuristic& timed : gemm.library) {
      F8_TRY(add("cublaslt", timed.config, timed.ns));
    }
    ++number;
  }
  return {};
}

Result<int> score(const CostModelOptions& options, const Global& global) {
  F8_TRY(check_output(global, "--csv", options.csv));
  const auto train = F8_TRY(gemms_of("--train", options.train));
  std::vector<MeasuredGemm> test;
  if (!options.test.empty()) {
    test = unseen(F8_TRY(gemms_of("--test", options.test)), train);
  }
  if (!options.csv.empty()) {
    tuner::CsvText csv(kKernelColumns);
    F8_TRY(add_kernels(csv, "train", train));
    F8_TRY(add_kernels(csv, "test", test));
    F8_TRY(write_output(global, "--csv", options.csv, csv.text()));
    if (is_standard_stream(options.csv)) return kExitOk;
  }
  CostModelReport report;
  const runtime::CostModel& model = runtime::CostModel::fitted();
  report.add("fitted to", tuner::regret(train, model));
  report.add("and rows of other layers", tuner::regret_with_neighbours(train, train, model));
  if (!options.test.empty()) {
    report.add("held out", tuner::regret(test, model));
    report.add("held out, and rows of the others",
               tuner::regret_with_neighbours(test, train, model));
  }
  if (global.json) {
    print_json({{"regret", report.json()}});
  } else {
    print_styled(report.table().text(stdout_color(global)));
  }
  return kExitOk;
}

}  // namespace

void add_cost_model(CLI::App& app, Program& program) {
  CLI::App* group = add_group(app, "cost-model",
                              "the model that chooses kernels where nothing was measured: score");
  auto options = std::make_shared<CostModelOptions>();
  CLI::App* command =
      add_command(*group, program, "score", "how much slower its choices are", Needs::kNothing,
                  [options, &program] { return score(*options, program.global); });
  refuse_db(*command, "cost-model reads the databases that --train and --test name");
  command
      ->add_option("--train", options->train,
                   "what it is fitted to: builtin, databases, .jsonl exports, separated by commas; "
                   "- is an export on standard input")
      ->type_name("LIST");
  command
      ->add_option("--test", options->test,
                   "likewise; of these the layers (N, K) that are not in --train")
      ->type_name("LIST");
  add_output(*command, "--csv", options->csv,
             "also write each timed kernel of these GEMMs to this file");
}

}  // namespace f8::cli
