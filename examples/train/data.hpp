// The text that a model is trained on: the bytes of files, end to end.
#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace train {

struct Text {
  std::string bytes;
  std::string hash;  // identifies the bytes
  size_t files = 0;
};

// Each path is a file, taken as it is, or a folder: then its sources and documents by their names'
// endings, sorted by path, without hidden folders and folders called build. The model predicts a
// byte from `context` bytes before it, so there must be more than that.
[[nodiscard]] Text load_text(std::span<const std::filesystem::path> paths, int64_t context);

}  // namespace train
