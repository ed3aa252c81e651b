// Runs the built program as a user does: in a folder of its own, with its own cache, its output
// taken through pipes.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/unit/tools/model_files/model_files.hpp"

namespace f8::testing {

struct Outcome {
  int code = 0;
  std::string out;
  std::string err;

  [[nodiscard]] nlohmann::json json() const;  // of `out`; a test failure where it is none
};

class Tool {
 public:
  // The working directory: relative names in arguments are files here.
  [[nodiscard]] const std::filesystem::path& path() const { return folder_.path(); }
  std::string write(std::string_view name, std::string_view bytes) const {
    return folder_.write(name, bytes);
  }
  void set(const std::string& variable, const std::string& value) { variables_[variable] = value; }
  // The file that standard input comes from; empty: this process's own.
  void set_input(const std::string& name) { input_ = name; }
  // Standard output is a pipe whose reader has gone.
  void lose_reader() { reader_is_gone_ = true; }

  [[nodiscard]] Outcome operator()(const std::vector<std::string>& arguments) const;
  // Expects exit code 0 and JSON on standard output.
  [[nodiscard]] nlohmann::json json(std::vector<std::string> arguments) const;
  // Expects one line on standard error that holds all `parts`, nothing on standard output and the
  // folder as it was.
  void expect_refused(int code, const std::vector<std::string>& arguments,
                      const std::vector<std::string>& parts) const;

 private:
  [[nodiscard]] std::map<std::string, std::string> contents() const;
  TempFolder folder_;
  std::map<std::string, std::string> variables_;
  std::string input_;
  bool reader_is_gone_ = false;
};

// An export of some 1,400 trials, where any will do; the built-in database has a hundred times as many.
inline const std::string kSomeTrials = FLOAT8_DATA_DIR "/held_out.jsonl";

// One with a database of these, some.db.
struct ToolWithTrials : Tool {
  ToolWithTrials();
};

[[nodiscard]] bool contains(std::string_view text, std::string_view part);
// The arguments with the path for each "{}".
[[nodiscard]] std::vector<std::string> to(std::vector<std::string> words, const std::string& path);
[[nodiscard]] std::vector<std::string> operator+(std::vector<std::string> a,
                                                 const std::vector<std::string>& b);

}  // namespace f8::testing
