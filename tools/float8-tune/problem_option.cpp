#include "tools/float8-tune/problem_option.hpp"

#include "base/text.hpp"
#include "recipes/recipe.hpp"
#include "tools/float8-tune/options.hpp"

namespace f8::cli {

Result<Problem> parse_problem(std::string_view key, bool any_accumulation) {
  const Problem problem = F8_TRY(Problem::parse(key));
  if (is_attention(problem.op)) return problem;
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  Problem own = F8_TRY(Problem::make(problem.op, recipe, problem.dims));
  if (any_accumulation) own.fast = problem.fast;
  if (own == problem) return problem;
  return fail(ErrorCode::kInvalidArgument, "problem {} is not what recipe {} has there; give {}",
              quote(key), recipe.name, own.key());
}

CLI::Option* add_problem(CLI::App& command, const ProblemOptions& options) {
  const auto parse = [options](const std::string& key) {
    const auto problem = parse_problem(key, options.fast != nullptr);
    if (!problem) throw CLI::ValidationError("--problem", problem.error().message);
    if (is_attention(problem->op) || problem->op == Op::kMlp) {
      if (options.whole == nullptr) {
        throw CLI::ValidationError(
            "--problem", is_attention(problem->op)
                             ? "this command takes no attention; `float8-tune bench attention` "
                               "measures it"
                             : "this command takes no MLP; `float8-tune sweep --mlp` measures it");
      }
      *options.whole = *problem;
      return;
    }
    const Shape s = problem->shape();
    const Groups groups = problem->groups();
    if (options.groups != nullptr) {
      *options.groups = {.experts = groups.experts, .skew = std::to_string(groups.skew)};
    } else if (groups.experts > 0) {
      throw CLI::ValidationError("--problem", "this command takes no expert linears");
    }
    *options.mnk = f8::format("{},{},{}", s.m, s.n, s.k);
    *options.recipe = problem->recipe;
    if (options.op != nullptr) *options.op = to_string(dense(problem->op));
    if (options.fast == nullptr) return;
    *options.fast = problem->fast;
    *options.precise = !problem->fast;
  };
  CLI::Option* option = command
                            .add_option_function<std::string>(
                                "--problem", parse,
                                "a problem as query, compare and bench print it, instead of --mnk")
                            ->type_name("KEY");
  for (const char* other :
       {"--mnk", "--mlp", "--recipe", "--op", "--fast", "--precise", "--experts", "--skew"}) {
    if (CLI::Option* own = command.get_option_no_throw(other)) option->excludes(own);
  }
  return option;
}

Status require_problem(const std::string& mnk, const std::string& recipe) {
  if (!mnk.empty() && !recipe.empty()) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{} is required: give --mnk M,N,K and --recipe, or --problem KEY",
              mnk.empty() ? "--mnk" : "--recipe");
}

std::string database_to_write(const Global& global) {
  return global.db.empty() ? "tuned.f8db" : global.db.string();
}

Result<GemmConfig> parse_config(std::string_view text) {
  for (const std::string_view provider : {"generated ", "generated:"}) {
    if (text.starts_with(provider)) return parse_gemm_config(text.substr(provider.size()));
  }
  if (text.starts_with("cublaslt")) {
    return fail(ErrorCode::kInvalidArgument,
                "{} is a kernel of the library; give a generated one, as 128x256s4c2x1w2g8",
                quote(text));
  }
  return parse_gemm_config(text);
}

}  // namespace f8::cli
