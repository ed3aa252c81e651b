// Options that several commands share, declared once so that they read, parse and fail alike.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "recipes/problem.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/tuner/measure/interleaved_group.hpp"
#include "tools/tuner/model_files/model.hpp"
#include "tuning_db/database.hpp"
#include "tuning_db/estimate/estimator.hpp"
#include "tuning_db/estimate/wire_cost.hpp"

namespace f8::cli {

// A decimal integer in [min, max]; anything else is a usage error that names the option.
CLI::Option* add_integer(CLI::App& command, const std::string& name, int64_t& value,
                         const std::string& description, int64_t min = 1, int64_t max = kMaxDim);

// A share of something: "2%", or as a fraction, "0.02". A bare number is a fraction in every option.
struct ShareLimits {
  double least = 0;
  double most = 1;
};
[[nodiscard]] Result<double> parse_share(std::string_view text, ShareLimits limits = {});
CLI::Option* add_share(CLI::App& command, const std::string& name, double& value,
                       const std::string& description, ShareLimits limits = {});
CLI::Option* add_margin(CLI::App& command, double& margin);  // --margin
CLI::Option* add_fuse(CLI::App& command, bool& fuse);        // --fuse

// Options that name a file: "-" is standard input, or standard output.
CLI::Option* add_input(CLI::App& command, const std::string& name, std::filesystem::path& file,
                       const std::string& description);
CLI::Option* add_output(CLI::App& command, const std::string& name, std::filesystem::path& file,
                        const std::string& description);

CLI::Option* add_recipe(CLI::App& command, std::string& recipe);  // --recipe, not required
CLI::Option* add_mnk(CLI::App& command, std::string& mnk);        // --mnk M,N,K[;...]

// --experts and --skew: the linear is one of each expert. Without experts it is dense.
struct GroupOptions {
  int64_t experts = 0;
  std::string skew = "even";  // "even", "zipf", "one" or an exponent
};
void add_groups(CLI::App& command, GroupOptions& options);
[[nodiscard]] Result<Groups> groups_of(const GroupOptions& options);

// These parse an option's text, with the option's name before any error.
[[nodiscard]] Result<Recipe> recipe_of(const std::string& recipe);
// Names separated by commas, each once.
[[nodiscard]] Result<std::vector<std::string>> recipes_of(const std::string& list);
[[nodiscard]] Result<std::vector<Shape>> shapes_of(const std::string& mnk);
template <class T>
[[nodiscard]] Result<T> of_option(std::string_view option, Result<T> value) {
  if (!value) return fail(value.error().code, "{}: {}", option, value.error().message);
  return value;
}
[[nodiscard]] inline Status of_option(std::string_view option, Status done) {
  if (!done) return fail(done.error().code, "{}: {}", option, done.error().message);
  return done;
}

// --hot and --clock: what a measurement is for.
void add_conditions(CLI::App& command, tuner::Conditions& conditions);

struct ModelOptions {
  std::string model;  // a built-in name, a file or "-"
  int64_t tp = 1;
  int64_t tokens = 0;
  // The options of the experts of its layers.
  tuner::ExpertsAs experts = tuner::ExpertsAs::kLinears;
  int64_t ep = 1;
  std::string skew = "even";  // as of GroupOptions
};
struct ModelFlags {
  CLI::Option* model;
  CLI::Option* tp;
  CLI::Option* tokens;
};
ModelFlags add_model(CLI::App& command, ModelOptions& options);  // --model --tp --tokens
// --ep --expert-linears, of a command that takes the experts of a layer together; and --skew with them.
std::array<CLI::Option*, 2> add_model_ranks(CLI::App& command, ModelOptions& options);
std::array<CLI::Option*, 3> add_model_experts(CLI::App& command, ModelOptions& options);
// The ranks that share a model, together with --tp.
struct RankOptions {
  int64_t fsdp = 1;
  int64_t hosts = 0;
  double network_gbit = 0;
  std::filesystem::path wire_rows;
};
void add_ranks(CLI::App& command, RankOptions& options);  // --fsdp --hosts ...
CLI::Option* add_network(CLI::App& command, double& gbit);
// The constants fitted to the rows of a file, or the built-in ones where none is named.
CLI::Option* add_wire_rows(CLI::App& command, std::filesystem::path& rows);
[[nodiscard]] Result<tuning_db::WireModel> wire_model_of(const std::filesystem::path& rows);
[[nodiscard]] tuning_db::Parallelism parallelism_of(const RankOptions& options, int64_t tp);

// The model, loaded and sharded, with the skew of its experts.
[[nodiscard]] Result<tuner::Model> load(const ModelOptions& options);

// The user's database (--db or FLOAT8_DB), which the command cannot do without.
[[nodiscard]] Result<tuning_db::Database> open_user_database(const Global& global,
                                                             tuning_db::OpenMode mode);

// A database that an argument names, for reading. "built-in" is the one that ships, unless there is
// a file of that name.
[[nodiscard]] Result<tuning_db::Database> open_named_database(const std::filesystem::path& file);

// The databases that answer a question, in the order in which they are asked: the user's, the
// built-in.
struct Databases {
  std::vector<tuning_db::Database> owned;
  [[nodiscard]] std::vector<const tuning_db::Database*> pointers() const;
  // The device whose rows of this one come first; null: those measured last.
  [[nodiscard]] const DeviceClass* asked(const tuning_db::Database& database) const;
};
[[nodiscard]] Result<Databases> open_databases(const Global& global);
// This machine's first GPU; null where there is none.
[[nodiscard]] const DeviceClass* this_gpu();
// This machine's first GPU with its toolchain; null where there is no GPU.
[[nodiscard]] const tuning_db::Machine* this_machine();
// Whose built-in measurements are asked first: this machine's GPU; where there is none, the device
// that the library takes for an emulated one.
[[nodiscard]] const DeviceClass& builtin_device();
// One table of all of them: the user's rows, and behind them the built-in ones. Of each, the rows of
// the device nearest to this one come first, or without it to this machine's GPU; where there is none, those
// measured last.
[[nodiscard]] Result<TuningTable> merged_table(
    const Databases& databases,
    tuning_db::Database::TablePart part = tuning_db::Database::TablePart::kAll,
    const DeviceClass* device = nullptr);

}  // namespace f8::cli
