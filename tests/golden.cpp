#include "tests/golden.hpp"

#include <errno.h>
#include <sys/file.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

#include "base/descriptor.hpp"
#include "base/file.hpp"

namespace f8::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::UnitTest;
using Messages = std::map<std::string, std::vector<std::string>>;  // "program Suite.Test": its own

constexpr std::string_view kRemedy = "; where it is meant, UPDATE_GOLDEN=1 writes it";
const fs::path kFolder = fs::path(FLOAT8_SOURCE_DIR) / "tests/golden";
const fs::path kMessages = kFolder / "messages.txt";

bool updates() {
  return std::getenv("UPDATE_GOLDEN") != nullptr;
}

std::string key_of(const ::testing::TestInfo& test) {
  return f8::format("{} {}.{}", program_invocation_short_name, test.test_suite_name(), test.name());
}

Messages read_messages() {
  Messages all;
  const std::string text = read_file(kMessages).value_or("");
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size()), colon = text.find(": ", at);
    if (colon < end) {
      all[text.substr(at, colon - at)].push_back(text.substr(colon + 2, end - colon - 2));
    }
    at = end + 1;
  }
  return all;
}

// Changes the file as it is now: programs, and the shards of one, run side by side.
template <class Change>
void update_messages(const Change& change) {
  const Descriptor folder(::open(kFolder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(::flock(folder.get(), LOCK_EX), 0) << kFolder;
  const Messages before = read_messages();
  Messages after = before;
  change(after);
  if (after == before) return;
  std::string text;
  for (const auto& [key, lines] : after) {
    for (const std::string& line : lines) text += key + ": " + line + '\n';
  }
  ASSERT_TRUE(write_file_atomic(kMessages, text));
}

void replace(std::string& text, const std::string& what, std::string_view with) {
  for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += with.size()) {
    text.replace(at, what.size(), with);
  }
}

// One line, the same on every machine.
std::string normal(std::string_view message) {
  static const std::regex kTemporary("TMP/[^/ '\":,;)\n]+"), kAddress("0x[0-9a-f]{9,}"),
      kProcess("\\b(pid|process) [0-9]+");
  std::string text(message);
  replace(text, FLOAT8_BUILD_DIR, "BUILD");
  replace(text, FLOAT8_SOURCE_DIR, "SOURCE");
  replace(text, fs::temp_directory_path() / "", "TMP/");
  text = std::regex_replace(text, kTemporary, "TMP");
  text = std::regex_replace(text, kAddress, "ADDRESS");
  text = std::regex_replace(text, kProcess, "$1 N");
  replace(text, "\n", "\\n");
  return text;
}

class Listener : public ::testing::EmptyTestEventListener {
 public:
  ::testing::AssertionResult add(std::string_view message) {
    const ::testing::TestInfo* test = UnitTest::GetInstance()->current_test_info();
    if (test == nullptr) return ::testing::AssertionFailure() << "no test runs: " << message;
    said_.push_back(normal(message));
    const auto& lines = golden_[key_of(*test)];
    const size_t at = said_.size() - 1;
    if (updates() || (at < lines.size() && lines[at] == said_[at])) {
      return ::testing::AssertionSuccess();
    }
    return ::testing::AssertionFailure()
           << "message " << at + 1 << " of the test is\n  " << said_[at] << "\nand not the line\n  "
           << (at < lines.size() ? lines[at] : "(none)") << "\nof " << kMessages.native()
           << kRemedy;
  }

 private:
  void OnTestStart(const ::testing::TestInfo&) override { said_.clear(); }
  void OnTestEnd(const ::testing::TestInfo& test) override {
    if (!test.result()->Passed()) return;
    const std::string key = key_of(test);
    if (updates()) {
      update_messages([&](Messages& all) { all[key] = said_; });
    } else {
      EXPECT_EQ(golden_[key].size(), said_.size())
          << kMessages.native() << " has more lines of the test than it has messages" << kRemedy;
    }
  }
  void OnEnvironmentsTearDownStart(const UnitTest& program) override {
    std::set<std::string> tests;
    for (int i = 0; i < program.total_test_suite_count(); ++i) {
      const ::testing::TestSuite& suite = *program.GetTestSuite(i);
      for (int j = 0; j < suite.total_test_count(); ++j)
        tests.insert(key_of(*suite.GetTestInfo(j)));
    }
    const auto is_gone = [&](const Messages::value_type& line) {
      const std::string own = std::string(program_invocation_short_name) + ' ';
      return line.first.starts_with(own) && !tests.contains(line.first);
    };
    if (updates()) return update_messages([&](Messages& all) { std::erase_if(all, is_gone); });
    for (const auto& line : golden_) {
      if (!is_gone(line)) continue;
      ADD_FAILURE() << kMessages.native() << " has lines of " << line.first
                    << ", which is no test any more" << kRemedy;
    }
  }

  std::vector<std::string> said_;  // the running test's messages
  Messages golden_ = read_messages();
};

// Google Test owns it; made before main, so that it hears of every test.
Listener* const kListener = [] {
  auto* listener = new Listener;
  UnitTest::GetInstance()->listeners().Append(listener);
  return listener;
}();

}  // namespace

::testing::AssertionResult is_golden(std::string_view name, std::string_view text) {
  const fs::path path = kFolder / name;
  if (updates() && !write_file_atomic(path, text)) {
    return ::testing::AssertionFailure() << path << " cannot be written";
  }
  const auto golden = read_file(path);
  if (golden && *golden == text) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << text << "\nis not " << path.native() << kRemedy << "\n"
                                       << golden.value_or("");
}

::testing::AssertionResult is_message(std::string_view message,
                                      const std::vector<std::string_view>& tokens) {
  const ::testing::AssertionResult is_line = kListener->add(message);
  for (const std::string_view token : tokens) {
    if (message.find(token) == std::string_view::npos) {
      return ::testing::AssertionFailure() << "\"" << token << "\" is not in: " << message;
    }
  }
  return is_line;
}

}  // namespace f8::testing
