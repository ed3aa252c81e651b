// float8-tune man: the manual page, in roff. The build writes it into float8-tune.1.
#include <algorithm>

#include "base/text.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/shell/tree.hpp"

namespace f8::cli {
namespace {

// Text that roff takes as it is: a dot or an apostrophe at the front of a line would be a request.
std::string text_of(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool first = out.empty() || out.back() == '\n';
    if (first && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return out;
}

std::string option_text(const OptionWords& option, bool argument) {
  std::vector<std::string> names;
  for (const std::string& name : option.names) {
    names.push_back(f8::format("\\fB{}\\fR", text_of(name)));
  }
  std::string out = ".TP\n" + joined(names, ", ");
  if (!argument && !option.value.empty()) out += f8::format(" \\fI{}\\fR", text_of(option.value));
  out += "\n" + text_of(option.description) + "\n";
  if (!option.values.empty()) {
    out += text_of(f8::format("One of {}.\n", joined(option.values, ", ")));
  }
  return out;
}

std::string options_text(const CommandWords& command) {
  std::string out;
  for (const OptionWords& argument : command.arguments) out += option_text(argument, true);
  for (const OptionWords& option : command.options) {
    const bool is_help = std::ranges::find(option.names, "--help") != option.names.end();
    if (!is_help || command.path.empty()) out += option_text(option, false);
  }
  return out;
}

std::string page(const CommandWords& root) {
  std::string out = f8::format(
      ".TH FLOAT8\\-TUNE 1 \"\" \"float8 {}\" \"User Commands\"\n"
      ".SH NAME\nfloat8\\-tune \\- measure fp8 linear layers, keep the results, and decide by "
      "them\n"
      ".SH SYNOPSIS\n.B float8\\-tune\n\\fICOMMAND\\fR [\\fIOPTION\\fR]...\n"
      ".SH DESCRIPTION\n{}\n.PP\n{}\n.SH OPTIONS\n{}.SH COMMANDS\n",
      text_of(FLOAT8_VERSION), text_of(root.description), text_of(root.footer), options_text(root));
  for (const CommandWords* command : all_commands(root)) {
    if (command->path.empty()) continue;
    out += f8::format(".SS float8\\-tune {}\n{}.\n", text_of(command->path),
                      text_of(command->description));
    out += options_text(*command);
    if (!command->footer.empty())
      out += f8::format(".PP\n.nf\n{}\n.fi\n", text_of(command->footer));
  }
  out +=
      ".SH EXIT STATUS\n"
      ".TP\n.B 0\nSuccess.\n"
      ".TP\n.B 1\nThe command line or an input is wrong, or an output cannot be written: also "
      "where the "
      "reader of a pipe has gone, as head does.\n"
      ".TP\n.B 2\nThe machine lacks a GPU, a driver or a library.\n"
      ".TP\n.B 3\nSomething that was measured or verified is worse than it should be.\n"
      ".TP\n.B 4\nA budget was spent; what was measured is kept.\n"
      ".TP\n.B 130\nA signal stopped the command; \\fBfloat8\\-tune resume\\fR goes on.\n"
      ".SH ENVIRONMENT\n"
      ".TP\n.B FLOAT8_DB\nThe user's tuning database, for commands without \\-\\-db.\n"
      ".TP\n.B FLOAT8_CACHE_DIR\nThe folder of compiled kernels (default: ~/.cache/float8).\n"
      ".TP\n.B FLOAT8_LOG\nerror, warning or info (default: warning).\n"
      ".TP\n.B FLOAT8_TUNE\nThe program that the library starts to tune a linear at its first use "
      "(default: "
      "float8\\-tune in ../bin beside the library, else in PATH).\n";
  return out;
}

}  // namespace

void add_man(CLI::App& app, Program& program) {
  CLI::App* command = app.add_subcommand("man", "print the manual page");
  command->footer("Examples:\n  float8-tune man | man -l -");
  command->callback([&app, &program] {
    program.action = [&app]() -> Result<int> {
      print(page(command_words(app)));
      return kExitOk;
    };
  });
}

}  // namespace f8::cli
