// The command line as data, read from CLI11's tree: what completions and the man page are made of.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace f8::cli {

struct OptionWords {
  std::vector<std::string> names;   // "-o", "--output"; none of a positional argument
  std::string value;                // "FILE"; empty where there is none
  std::string description;          // with its default
  std::vector<std::string> values;  // those that it may have, as far as they are known
  bool is_list = false;             // of values, with commas
  bool is_file = false;
};

struct CommandWords {
  std::string path;  // "db export"; empty: the program
  std::string name;
  std::string description;
  std::string footer;
  std::vector<OptionWords> options;
  std::vector<OptionWords> arguments;
  std::vector<CommandWords> commands;
};

[[nodiscard]] std::string joined(const std::vector<std::string>& words, const char* between);
[[nodiscard]] CommandWords command_words(const CLI::App& app, const std::string& path = "");
// A command and all below it, in the order of --help.
[[nodiscard]] std::vector<const CommandWords*> all_commands(const CommandWords& root);

}  // namespace f8::cli
