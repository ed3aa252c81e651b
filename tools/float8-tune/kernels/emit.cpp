// emit: the generated CUDA source of a linear's kernels, and on request its PTX or cubin; or the
// list of all kernels. It needs no GPU.
#include "codegen/emit.hpp"

#include <algorithm>
#include <memory>

#include "base/file.hpp"
#include "codegen/nvrtc.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/kernels/kernel_list.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/problem_option.hpp"
#include "tools/tuner/search/kernel_set.hpp"

namespace f8::cli {
namespace {

struct EmitOptions {
  std::string mnk;
  std::string recipe;
  std::string op = "output";
  std::string config;
  std::string kernel;
  std::filesystem::path directory;
  bool ptx = false;
  bool cubin = false;
  bool list = false;
};

struct Item {
  std::string role;
  codegen::KernelSpec spec;
  std::string problem;    // empty for a kernel that serves every shape
  std::string chosen_by;  // of a configuration
  std::string command;
  codegen::KernelSource source;
};

Result<Item> gemm_item(const EmitOptions& options, const Recipe& recipe, Gemm gemm, Shape shape,
                       const TuningTable& table) {
  Item item;
  item.role = f8::format("gemm {}", to_string(gemm));
  tuner::ChosenGemm chosen = F8_TRY(tuner::choose_gemm(recipe, gemm, shape, &table));
  // cuBLASLt's kernels cannot be emitted; the best generated one is.
  if (chosen.choice.provider == Provider::kCublasLt && !chosen.choice.otherwise) {
    chosen = F8_TRY(tuner::choose_gemm(recipe, gemm, shape, nullptr));
  }
  if (chosen.choice.otherwise) chosen.choice.config = *chosen.choice.otherwise;
  item.chosen_by = to_string(chosen.by);
  codegen::GemmSpec spec = chosen.spec();
  if (!options.config.empty()) {
    spec.config = F8_TRY(of_option("--config", parse_config(options.config)));
    F8_TRY(of_option("--config", codegen::validate(spec)));
    item.chosen_by = "option";
  }
  item.spec = spec;
  item.problem = F8_TRY(Problem::make(to_op(gemm), recipe, shape)).key();
  item.command =
      f8::format("float8-tune emit --mnk {},{},{} --recipe {} --op {} --config {}", shape.m,
                 shape.n, shape.k, recipe.name, to_string(gemm), key(spec.config));
  return item;
}

bool known_spec(const std::vector<Item>& items, const codegen::KernelSpec& spec) {
  return std::ranges::any_of(items, [&](const Item& item) { return item.spec == spec; });
}

Result<std::vector<Item>> cast_items(const Recipe& recipe, std::string_view op) {
  std::vector<Item> items;
  const std::vector<tuner::NamedKernel> kernels = F8_TRY(tuner::cast_kernels(recipe));
  for (const tuner::NamedKernel& kernel : kernels) {
    if (op != "linear" && !kernel.role.starts_with(op)) continue;
    if (known_spec(items, kernel.spec)) continue;  // x and w often share one
    Item item;
    item.role = kernel.role;
    item.spec = kernel.spec;
    item.command = f8::format("float8-tune emit --kernel {}", codegen::key(kernel.spec));
    items.push_back(std::move(item));
  }
  return items;
}

// The kernels that --mnk, --recipe and --op ask for.
Result<std::vector<Item>> items_of_shape(const EmitOptions& options, const Global& global) {
  const bool casts = options.op == "amax" || options.op == "cast";
  if (options.recipe.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--recipe is required; with it --mnk, or give --kernel");
  }
  const Recipe recipe = F8_TRY(recipe_of(options.recipe));
  if (casts) {
    if (!options.config.empty()) {
      return fail(ErrorCode::kInvalidArgument,
                  "--config is of a GEMM; --op {} takes none, leave it out", options.op);
    }
    if (!global.db.empty() && global.db_option == "--db") {
      return fail(ErrorCode::kInvalidArgument,
                  "--db chooses the kernel of a GEMM; --op {} has none to choose, leave it out",
                  options.op);
    }
    return cast_items(recipe, options.op);
  }
  const Result<Op> parsed = parse_op(options.op);
  if (!parsed) return fail(parsed.error().code, "--op: {}, amax, cast", parsed.error().message);
  const Op op = *parsed;
  if (options.mnk.empty()) {
    return fail(ErrorCode::kInvalidArgument, "--mnk M,N,K is required for a GEMM");
  }
  const std::vector<Shape> shapes = F8_TRY(shapes_of(options.mnk));
  if (shapes.size() != 1) {
    return fail(ErrorCode::kInvalidArgument, "--mnk names {} shapes; emit takes one",
                shapes.size());
  }
  const Databases databases = F8_TRY(open_databases(global));
  const TuningTable table = F8_TRY(merged_table(databases));
  std::vector<Item> items;
  if (op == Op::kLinear) items = F8_TRY(cast_items(recipe, options.op));
  for (const Gemm gemm : kGemms) {
    if (op != Op::kLinear && op != to_op(gemm)) continue;
    items.push_back(F8_TRY(gemm_item(options, recipe, gemm, shapes.front(), table)));
  }
  return items;
}

Result<std::vector<Item>> items_of(const EmitOptions& options, const Global& global) {
  if (options.kernel.empty()) return items_of_shape(options, global);
  Item item;
  item.spec = F8_TRY(of_option("--kernel", codegen::parse_kernel_spec(options.kernel)));
  F8_TRY(of_option("--kernel", codegen::validate(item.spec)));
  item.role = "kernel";
  item.command = f8::format("float8-tune emit --kernel {}", codegen::key(item.spec));
  return std::vector{std::move(item)};
}

// The comment above the generator's own: where the kernel belongs and how to get it again.
std::string header_of(const Item& item) {
  std::string header;
  if (!item.problem.empty()) {
    header += f8::format("// problem:   {}\n", item.problem);
    header += f8::format("// chosen by: {}\n", item.chosen_by);
  }
  header += f8::format("// kernel:    {}\n// re-create: {}\n", item.source.key, item.command);
  return header;
}

// Two GEMMs may share a kernel; each has its own problem in its file.
std::string file_stem(const Item& item) {
  std::string stem = item.role + "-" + item.source.key;
  if (!item.role.starts_with("gemm ")) stem = item.source.key;
  std::ranges::replace(stem, '/', '-');
  std::ranges::replace(stem, ' ', '-');
  return stem;
}

// The files of one kernel; what NVRTC says goes into `json`.
Result<std::vector<NamedBytes>> outputs_of(const Item& item, const EmitOptions& options,
                                           Json& json) {
  const std::string stem = (options.directory / file_stem(item)).string();
  std::vector<NamedBytes> outputs;
  if (!options.directory.empty() || !options.ptx) {
    outputs.push_back({stem + ".cu", header_of(item) + item.source.source});
  }
  if (options.ptx) {
    std::string ptx = F8_TRY(codegen::compile_to_ptx(item.source));
    if (options.directory.empty()) json["ptx"] = ptx;
    outputs.push_back({stem + ".ptx", std::move(ptx)});
  }
  if (options.cubin) {
    const codegen::Cubin cubin = F8_TRY(codegen::compile(item.source));
    outputs.push_back(
        {stem + ".cubin",
         std::string(reinterpret_cast<const char*>(cubin.image.data()), cubin.image.size())});
    json["registers"] = cubin.registers;
    json["spill_bytes"] = cubin.spill_bytes;
    json["compile_ms"] = rounded(cubin.compile_ms, 4);
  }
  return outputs;
}

Json to_json(const Item& item) {
  Json json = {{"kernel", item.source.key},
               {"role", item.role},
               {"entry", item.source.entry},
               {"options", item.source.options},
               {"command", item.command}};
  if (!item.problem.empty()) {
    json["problem"] = item.problem;
    json["chosen_by"] = item.chosen_by;
  }
  if (const auto* gemm = std::get_if<codegen::GemmSpec>(&item.spec)) {
    json["config"] = key(gemm->config);
  }
  json["source"] = header_of(item) + item.source.source;
  return json;
}

Result<int> list_kernels(const Global& global) {
  const std::set<std::string> keys = F8_TRY(tunable_kernels());
  if (global.json) {
    print_json({{"kernels", keys}});
    return kExitOk;
  }
  for (const std::string& key : keys) print(key + "\n");
  return kExitOk;
}

Result<int> emit(const EmitOptions& options, const Global& global) {
  if (options.list) return list_kernels(global);
  if (options.cubin && options.directory.empty()) {  // also of -o -
    return fail(ErrorCode::kInvalidArgument, "--cubin writes binary files; name a folder with -o");
  }
  const std::filesystem::path& directory = options.directory;
  std::vector<Item> items = F8_TRY(items_of(options, global));
  std::vector<NamedBytes> all;
  Json kernels = Json::array();
  for (Item& item : items) {  // everything is made before anything is written
    item.source = F8_TRY(codegen::emit(item.spec));
    Json json = to_json(item);
    std::vector<NamedBytes> outputs = F8_TRY(outputs_of(item, options, json));
    if (!directory.empty()) {
      json["files"] = Json::array();
      for (const NamedBytes& output : outputs) {
        json["files"].push_back(output.path.string());
      }
    }
    kernels.push_back(std::move(json));
    std::ranges::move(outputs, std::back_inserter(all));
  }
  if (!directory.empty()) {
    F8_TRY(of_option("-o", make_folders(directory)));
    F8_TRY(of_option("-o", write_files_atomic(all)));
  }
  if (global.json) {
    print_json({{"kernels", kernels}});
    return kExitOk;
  }
  for (const NamedBytes& output : all) {
    print(directory.empty() ? output.bytes : output.path.string() + "\n");
  }
  return kExitOk;
}

}  // namespace

void add_emit(CLI::App& app, Program& program) {
  auto options = std::make_shared<EmitOptions>();
  CLI::App* command = add_command(app, program, "emit", "the generated CUDA source; needs no GPU",
                                  Needs::kNothing, [options, &program] {
                                    if (options->directory == "-") options->directory.clear();
                                    return emit(*options, program.global);
                                  });
  CLI::Option* mnk = add_mnk(*command, options->mnk);
  add_recipe(*command, options->recipe);
  command->add_option("--op", options->op,
                      "output, grad_input, grad_weight, amax, cast, or linear: all of them");
  command->add_option("--config", options->config, "of the GEMM, as 128x256s4c2x1w2g8")
      ->type_name("CONFIG");
  CLI::Option* problem =
      add_problem(*command, {.mnk = &options->mnk, .recipe = &options->recipe, .op = &options->op});
  CLI::Option* kernel =
      command->add_option("--kernel", options->kernel, "a kernel by its key, instead of a shape")
          ->type_name("KEY")
          ->excludes(mnk)
          ->excludes(problem)
          ->excludes(command->get_option("--db"));
  CLI::Option* output =
      command
          ->add_option("-o,--output", options->directory,
                       "write files to this folder; - is standard output, as without it")
          ->type_name("DIR");
  command
      ->add_flag("--list", options->list,
                 "only the keys of all kernels that the recipes' plans may load")
      ->excludes(mnk)
      ->excludes(problem)
      ->excludes(kernel)
      ->excludes(output)
      ->excludes(command->get_option("--db"));
  command->add_flag("--ptx", options->ptx, "PTX, by NVRTC");
  command->add_flag("--cubin", options->cubin, "the compiled kernel, by NVRTC; with -o");
}

}  // namespace f8::cli
