// The parts that the benchmarks share: shapes from the command line or a file, the device and its
// compilers, the table for other programs. bench_attention.cpp, bench_matmul.cpp, bench_epilogue.cpp, bench_linear.cpp,
// bench_cast.cpp and bench_suggestions.cpp measure.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/trial_json.hpp"
#include "tools/tuner/search/bench/bench.hpp"
#include "tools/tuner/search/bench/shape_sweep.hpp"

namespace f8::cli {

struct BenchOptions {
  std::string mnk;
  std::filesystem::path shapes, csv;
  std::string recipes = "tensorwise";
  int64_t device = 0;
  tuner::BenchOptions measuring;
};
// --device, --hot and --clock.
void declare_machine(CLI::App& command, BenchOptions& options);
void add_csv_option(CLI::App& command, BenchOptions& options);
void add_recipes(CLI::App& command, BenchOptions& options);
void add_seconds(CLI::App& command, BenchOptions& options);
// `screen_ms` is what --screen-ms says.
void declare_shapes(CLI::App& command, BenchOptions& options, const char* screen_ms);
void declare(CLI::App& command, BenchOptions& options);  // with recipes and a search
// The recipes that the options name.
[[nodiscard]] Result<std::vector<Recipe>> recipes_of(const BenchOptions& options);

// The options of a benchmark of one of a linear's GEMMs.
struct MatmulOptions : BenchOptions {
  std::string op = "output";
  bool fast = false, precise = false;  // neither: as the recipe says
};
void declare_matmul(CLI::App& command, MatmulOptions& options);  // and all of declare()
[[nodiscard]] Result<Op> op_of(const MatmulOptions& options);
[[nodiscard]] Result<Problem> problem_of(const MatmulOptions& options, Op op, const Recipe& recipe,
                                         Shape shape);

struct BenchWork {
  std::vector<Shape> shapes;
  std::vector<Recipe> recipes;
  [[nodiscard]] size_t problems() const { return shapes.size() * recipes.size(); }
};
// The work that the options name; fails before a device is looked for.
[[nodiscard]] Result<BenchWork> work_of(const BenchOptions& options);

// The device, and the compilers that work ahead of it.
struct BenchMachine {
  std::unique_ptr<tuner::GpuBackend> backend;
  std::unique_ptr<tuner::CompileAhead> compiler;
  std::unique_ptr<Progress> progress;
  std::unique_ptr<tuner::Bench> bench;
  tuner::CsvFile csv;
};
[[nodiscard]] Result<BenchMachine> open_bench(const BenchOptions& options, const Global& global,
                                              std::span<const std::string_view> csv_columns);

// Prints the results: as JSON, else as text, unless --csv has standard output.
void print_results(const BenchOptions& options, const Global& global, const Json& json,
                   const std::string& text);

// A problem that could not be measured is a line of its sweep over shapes: `json` has the error, and
// `text` says so. The error ends the sweep, and is returned, where the device is lost or the problem is
// the only one of `problems`.
[[nodiscard]] Status not_measured(const Problem& problem, const Error& error, size_t problems,
                                  Json& json, std::string& text);

// The candidates that could not be measured.
[[nodiscard]] std::string failed_text(std::span<const tuner::BenchRow> failed);
[[nodiscard]] Json failed_json(std::span<const tuner::BenchRow> failed);
[[nodiscard]] bool any_wrong(std::span<const tuner::BenchRow> failed);

// Empty where there is nothing to say: fewer than two.
[[nodiscard]] std::string summary_text(const std::string& what,
                                       std::span<const tuner::ShapeRatio> ratios);
[[nodiscard]] Json summary_json(std::span<const tuner::ShapeRatio> ratios);
// The median, 95th percentile and worst of ratios that are above 1 where something is slower.
[[nodiscard]] std::string slowdown_text(const std::string& what,
                                        std::span<const tuner::ShapeRatio> ratios);
[[nodiscard]] Json slowdown_json(std::span<const tuner::ShapeRatio> ratios);

// Runs bench cast on a list of weights (weight_list.hpp).
[[nodiscard]] Result<int> bench_casts(const BenchOptions& options, const std::string& list,
                                      const Global& global);

void add_bench_attention(CLI::App& group, Program& program);
void add_bench_matmul(CLI::App& group, Program& program);
void add_bench_epilogue(CLI::App& group, Program& program);
void add_bench_suggestions(CLI::App& group, Program& program);
void add_bench_linear(CLI::App& group, Program& program);  // and bench cast
void add_bench_produce(CLI::App& group, Program& program);

}  // namespace f8::cli
