// The trainer's tests share these: the error of a call, and a folder of one's own.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "examples/train/error.hpp"

namespace train {

// Gives the error that `call` throws; where it throws none, the test fails.
template <class Call>
float8::Error error_of(const Call& call) {
  try {
    call();
  } catch (const float8::Exception& error) {
    return {error.code(), error.what()};
  }
  ADD_FAILURE() << "no error is thrown";
  return {};
}

// The folder is new and empty, and is removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "f8-train-XXXXXX").string()) {
    if (mkdtemp(path_.data()) == nullptr) fail(FLOAT8_IO, "cannot create %s", path_.c_str());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::filesystem::path operator/(const std::string& name) const {
    return std::filesystem::path(path_) / name;
  }
  [[nodiscard]] std::filesystem::path path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace train
