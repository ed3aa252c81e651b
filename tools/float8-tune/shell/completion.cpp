// float8-tune completion: scripts that complete commands, options and their values in a shell.
#include <algorithm>
#include <memory>

#include "base/text.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/shell/tree.hpp"

namespace f8::cli {
namespace {

// A text in single quotes, for any of the shells.
std::string quoted(std::string_view text, std::string_view apostrophe) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'') {
      out += apostrophe;
    } else {
      out += c;
    }
  }
  return out + "'";
}

std::string names_of(const CommandWords& command) {
  std::string names;
  for (const CommandWords& each : command.commands) names += each.name + " ";
  for (const OptionWords& option : command.options) {
    for (const std::string& name : option.names) names += name + " ";
  }
  for (const OptionWords& argument : command.arguments) names += joined(argument.values, " ") + " ";
  while (names.ends_with(' ')) names.pop_back();
  return names;
}

bool takes_files(const std::vector<OptionWords>& options) {
  return std::ranges::any_of(options, &OptionWords::is_file);
}

// The function that bash calls, and zsh by its bashcompinit.
std::string bash_function(const CommandWords& root) {
  std::string paths, values, words;
  for (const CommandWords* command : all_commands(root)) {
    const std::string at = command->path.empty() ? "" : " " + command->path;
    if (!at.empty()) paths += (paths.empty() ? "" : "|") + quoted(at, "'\\''");
    for (const OptionWords& option : command->options) {
      if (option.value.empty()) continue;
      std::string patterns;
      for (const std::string& name : option.names) {
        patterns += (patterns.empty() ? "" : "|") + quoted(at + " " + name, "'\\''");
      }
      values += f8::format("    {}) known=1 list={} files={} choices={} ;;\n", patterns,
                           option.is_list ? 1 : 0, option.is_file ? 1 : 0,
                           quoted(joined(option.values, " "), "'\\''"));
    }
    words +=
        f8::format("    {}) files={} choices={} ;;\n", quoted(at, "'\\''"),
                   takes_files(command->arguments) ? 1 : 0, quoted(names_of(*command), "'\\''"));
  }
  return f8::format(R"(_float8_tune() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local at= known=0 list=0 files=0 choices= front= i IFS=$' \t\n'
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$at ${{COMP_WORDS[i]}}" in
    {}) at="$at ${{COMP_WORDS[i]}}" ;;
    esac
  done
  # bash makes three words of --option=value.
  if [[ $word == '=' ]]; then
    word=
  elif [[ $before == '=' ]]; then
    before=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  case "$at $before" in
{}  esac
  if [[ $known == 0 ]]; then
    case "$at" in
{}    esac
    [[ $word == -* ]] && files=0
  fi
  if [[ $list == 1 && $word == *,* ]]; then
    front=${{word%,*}},
    word=${{word##*,}}
  fi
  IFS=$'\n'
  COMPREPLY=($(IFS=' ' && compgen -P "$front" -W "$choices" -- "$word"))
  if [[ $files == 1 ]]; then
    compopt -o filenames 2>/dev/null
    COMPREPLY+=($(compgen -f -- "$word"))
  fi
}}
)",
                    paths, values, words);
}

std::string bash(const CommandWords& root) {
  return f8::format(
      "# Completion for bash: source it, or keep it as\n"
      "# ~/.local/share/bash-completion/completions/float8-tune.\n"
      "{}complete -F _float8_tune float8-tune\n",
      bash_function(root));
}

std::string zsh(const CommandWords& root) {
  return f8::format(
      "#compdef float8-tune\n"
      "# Completion for zsh: source it in ~/.zshrc after compinit.\n"
      "autoload -U +X bashcompinit && bashcompinit\n"
      "{}complete -F _float8_tune float8-tune\n",
      bash_function(root));
}

// The condition that a command was typed, and none below it.
std::string fish_condition(const CommandWords& command) {
  std::string condition;
  for (std::string_view rest = command.path; !rest.empty();) {
    condition += f8::format("__fish_seen_subcommand_from {}; and ", take_until(rest, ' '));
  }
  if (!command.commands.empty()) {
    condition += "not __fish_seen_subcommand_from";
    for (const CommandWords& each : command.commands) condition += " " + each.name;
    return condition;
  }
  return condition.substr(0, condition.size() - std::string_view("; and ").size());
}

std::string fish(const CommandWords& root) {
  std::string out =
      "# Completion for fish: keep it as ~/.config/fish/completions/float8-tune.fish.\n"
      "complete -c float8-tune -f\n";
  for (const CommandWords* command : all_commands(root)) {
    const std::string front =
        f8::format("complete -c float8-tune -n {}", quoted(fish_condition(*command), "\\'"));
    for (const CommandWords& each : command->commands) {
      out += f8::format("{} -a {} -d {}\n", front, each.name, quoted(each.description, "\\'"));
    }
    for (const OptionWords& argument : command->arguments) {
      if (argument.is_file) out += front + " -F\n";
      if (!argument.values.empty()) {
        out += f8::format("{} -a {}\n", front, quoted(joined(argument.values, " "), "\\'"));
      }
    }
    for (const OptionWords& option : command->options) {
      out += front;
      for (const std::string& name : option.names) {
        out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (!option.value.empty()) out += option.is_file ? " -r -F" : " -x";
      if (!option.values.empty()) out += " -a " + quoted(joined(option.values, " "), "\\'");
      out += f8::format(" -d {}\n", quoted(option.description, "\\'"));
    }
  }
  return out;
}

}  // namespace

void add_completion(CLI::App& app, Program& program) {
  CLI::App* command =
      app.add_subcommand("completion", "print a script that completes the command line in a shell");
  command->footer("Examples:\n  source <(float8-tune completion bash)");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->type_name("SHELL")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->callback([&app, &program, shell] {
    program.action = [&app, shell]() -> Result<int> {
      const CommandWords root = command_words(app);
      print(*shell == "bash" ? bash(root) : *shell == "zsh" ? zsh(root) : fish(root));
      return kExitOk;
    };
  });
}

}  // namespace f8::cli
