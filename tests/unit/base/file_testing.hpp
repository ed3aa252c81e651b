// A folder for the tests of files, and what lies in it.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/file.hpp"

namespace f8 {

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto made = make_temp_directory(fs::temp_directory_path(), "float8-file-test-");
    ASSERT_TRUE(made) << made.error().message;
    directory_ = *made;
  }
  void TearDown() override { fs::remove_all(directory_); }

  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      found.push_back(entry.path().filename().string());
    }
    std::ranges::sort(found);
    return found;
  }

  fs::path directory_;
};

inline mode_t mode_of(const fs::path& path) {
  struct stat info {};
  EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
  return info.st_mode;
}

void expect_error(const auto& result, ErrorCode code, const std::string& part) {
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, code) << result.error().message;
  EXPECT_NE(result.error().message.find(part), std::string::npos) << result.error().message;
}

}  // namespace f8
