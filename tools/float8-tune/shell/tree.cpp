#include "tools/float8-tune/shell/tree.hpp"

#include "base/format.hpp"
#include "base/text.hpp"
#include "recipes/recipe.hpp"
#include "tools/float8-tune/options.hpp"

namespace f8::cli {
namespace {

// CLI11 writes the values of an enumeration as NAME:{a,b}.
std::vector<std::string> values_of(const CLI::Option& option, const std::string& type) {
  const size_t begin = type.find(":{");
  const size_t end = type.rfind('}');
  if (begin != std::string::npos && end != std::string::npos && begin < end) {
    return split(type.substr(begin + 2, end - begin - 2), ',');
  }
  std::vector<std::string> values;
  if (option.check_lname("recipe") || option.check_lname("recipes")) {
    for (const Recipe& recipe : builtin_recipes()) values.push_back(recipe.name);
  }
  if (option.check_lname("model")) {
    for (const std::string_view name : tuner::builtin_models()) values.emplace_back(name);
  }
  return values;
}

OptionWords words_of(const CLI::Option& option) {
  OptionWords out;
  for (const std::string& name : option.get_snames()) out.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) out.names.push_back("--" + name);
  const std::string type = option.get_type_name();
  const bool positional = out.names.empty();
  if (positional || option.get_items_expected_max() > 0) {
    out.value = type.substr(0, type.find_first_of(": "));
    if (out.value.empty()) out.value = "VALUE";
  }
  out.description = option.get_description();
  if (!out.value.empty() && !option.get_default_str().empty()) {
    out.description += f8::format(" (default: {})", option.get_default_str());
  }
  out.values = values_of(option, type);
  out.is_list = out.value == "LIST";
  for (const char* file : {"FILE", "DIR", "PATH"}) {
    out.is_file = out.is_file || out.value.find(file) != std::string::npos;
  }
  return out;
}

}  // namespace

std::string joined(const std::vector<std::string>& words, const char* between) {
  return f8::format("{}", fmt::join(words, between));
}

CommandWords command_words(const CLI::App& app, const std::string& path) {
  CommandWords out{.path = path,
                   .name = app.get_name(),
                   .description = app.get_description(),
                   .footer = {},
                   .options = {},
                   .arguments = {},
                   .commands = {}};
  // The program's own footer stands below all others.
  const CLI::App* root = &app;
  while (root->get_parent() != nullptr) root = root->get_parent();
  out.footer = app.get_footer();
  if (root != &app && out.footer.ends_with(root->get_footer())) {
    out.footer.resize(out.footer.size() - root->get_footer().size());
  }
  while (out.footer.ends_with('\n')) out.footer.pop_back();
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    OptionWords words = words_of(*option);
    if (words.names.empty()) {
      words.names = {option->get_name(true)};
      out.arguments.push_back(std::move(words));
    } else {
      out.options.push_back(std::move(words));
    }
  }
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_group().empty()) continue;
    const std::string& name = command->get_name();
    out.commands.push_back(command_words(*command, path.empty() ? name : path + " " + name));
  }
  return out;
}

std::vector<const CommandWords*> all_commands(const CommandWords& root) {
  std::vector<const CommandWords*> all = {&root};
  for (const CommandWords& command : root.commands) {
    for (const CommandWords* each : all_commands(command)) all.push_back(each);
  }
  return all;
}

}  // namespace f8::cli
