// Files: the text that a model is trained on, and checkpoints.
//
//   checkpoint := "float8-train checkpoint 3" LF  run LF  steps SP weights SP scale_bytes SP hash LF
//                 f32 loss[steps] ms[steps] master[weights] m[weights] v[weights]  u8 scales[scale_bytes]
//
// `run` names all that decides the bits of a run. The hash is that of the little-endian numbers behind it.
#pragma once

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "model.hpp"

namespace train {

namespace fs = std::filesystem;

inline std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file) fail(FLOAT8_IO, format("cannot read %s: %s", path.c_str(), std::strerror(errno)));
  return bytes;
}

// Replaces the file whole or not at all.
inline void write_file(const fs::path& path, std::string_view bytes) {
  const fs::path part = path.string() + ".part";
  std::ofstream file(part, std::ios::binary);
  file << bytes;
  file.close();
  if (!file) fail(FLOAT8_IO, format("cannot write %s: %s", part.c_str(), std::strerror(errno)));
  fs::rename(part, path);
}

// The bytes of files, end to end. Of a folder it takes sources and documents, sorted by path, without hidden
// folders and folders called build.
inline std::string load_text(const std::vector<fs::path>& paths) {
  static const std::set<std::string> kEndings = {".c",   ".cmake", ".cpp", ".cu", ".cuh", ".h",
                                                 ".hpp", ".md",    ".py",  ".sh", ".txt"};
  std::string text;
  for (const fs::path& path : paths) {
    std::set<fs::path> files;
    std::error_code is_file;
    for (fs::recursive_directory_iterator it(path, is_file), end; it != end; ++it) {
      const std::string name = it->path().filename().string();
      if (it->is_directory() && (name.starts_with('.') || name == "build"))
        it.disable_recursion_pending();
      if (it->is_regular_file() && kEndings.contains(it->path().extension()))
        files.insert(it->path());
    }
    if (is_file) files = {path};
    for (const fs::path& file : files) text += read_file(file);
  }
  return text;
}

inline u64 hash_of(std::string_view bytes) {
  u64 hash = bytes.size();
  for (size_t at = 0; at < bytes.size(); at += sizeof hash) {
    u64 word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(bytes.size() - at, sizeof word));
    hash = (hash ^ word) * 0xbf58476d1ce4e5b9;  // one to one for a word, so that no change is lost
    hash ^= hash >> 32;
  }
  return hash;
}

// Ranks and micro-batches change nothing but the order of sums.
inline std::string name_of_run(const Config& c, const std::string& text) {
  return format(
      "%s hidden %lld ffn %lld layers %lld context %lld tokens %lld steps %lld seed %u lr %.17g "
      "text %016llx",
      c.recipe.c_str(), c.hidden, c.ffn, c.layers, c.context, c.tokens, c.steps, c.seed, c.lr,
      hash_of(text));
}

inline constexpr const char* kCheckpointTitle = "float8-train checkpoint 3";

inline void save(const fs::path& path, const std::string& run, State& state) {
  std::string payload;
  state.for_each_array([&](const auto& values) {
    payload.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof values[0]);
  });
  write_file(path,
             format("%s\n%s\n%zu %zu %zu %016llx\n", kCheckpointTitle, run.c_str(),
                    state.loss.size(), state.master.size(), state.scales.size(), hash_of(payload)) +
                 payload);
}

// Throws where the file is damaged, or of another run.
[[nodiscard]] inline State load(const fs::path& path, const std::string& run) {
  const std::string bytes = read_file(path);
  std::istringstream in(bytes);
  std::string title, of_run;
  u32 steps = 0, weights = 0, scale_bytes = 0;  // no sum of their sizes overflows
  u64 hash = 0;
  std::getline(in, title);
  std::getline(in, of_run);
  in >> steps >> weights >> scale_bytes >> std::hex >> hash;
  const size_t payload = size_t{8} * steps + size_t{12} * weights + scale_bytes;
  const bool fits = in.get() == '\n' && bytes.size() - static_cast<size_t>(in.tellg()) == payload;
  if (title != kCheckpointTitle || !fits || hash_of({bytes.end() - payload, bytes.end()}) != hash) {
    fail(FLOAT8_CORRUPT, path.string() + " is no checkpoint of this program, or is damaged");
  }
  if (of_run != run) {
    fail(
        FLOAT8_INVALID_ARGUMENT,
        format("%s is of another run: \"%s\", and this one is \"%s\"; resume with the same options",
               path.c_str(), of_run.c_str(), run.c_str()));
  }
  State state;
  for (auto* array : {&state.loss, &state.ms}) array->resize(steps);
  for (auto* array : {&state.master, &state.m, &state.v}) array->resize(weights);
  state.scales.resize(scale_bytes);
  const char* at = bytes.data() + bytes.size() - payload;
  state.for_each_array([&](auto& values) {
    const size_t size = values.size() * sizeof values[0];
    if (size > 0) std::memcpy(values.data(), at, size);
    at += size;
  });
  return state;
}

}  // namespace train
