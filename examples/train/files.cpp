#include "files.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

#include "error.hpp"

namespace train {
namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    fail(errno == ENOENT ? FLOAT8_NOT_FOUND : FLOAT8_IO, "cannot open %s: %s", path.c_str(),
         std::strerror(errno));
  }
  std::string bytes;
  char buffer[1 << 16];
  while (file.read(buffer, sizeof buffer), file.gcount() > 0) {
    bytes.append(buffer, static_cast<size_t>(file.gcount()));
  }
  if (file.bad()) fail(FLOAT8_IO, "cannot read %s: %s", path.c_str(), std::strerror(errno));
  return bytes;
}

void write_file(const fs::path& path, std::string_view bytes) {
  const fs::path part = path.string() + ".part";
  std::ofstream file(part, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  const int reason = errno;
  std::error_code error;
  if (!file) {
    fs::remove(part, error);
    fail(FLOAT8_IO, "cannot write %s: %s", part.c_str(), std::strerror(reason));
  }
  fs::rename(part, path, error);
  if (error) {
    fail(FLOAT8_IO, "cannot rename %s to %s: %s", part.c_str(), path.c_str(),
         error.message().c_str());
  }
}

std::string hash_hex(std::string_view bytes) {
  uint64_t low = bytes.size();
  uint64_t high = ~low;
  while (!bytes.empty()) {
    uint64_t word = 0;
    const size_t count = std::min(bytes.size(), sizeof word);
    std::memcpy(&word, bytes.data(), count);
    bytes.remove_prefix(count);
    // Each line maps its half one to one for a given word, so that no single change is lost.
    low = (low ^ word) * 0xbf58476d1ce4e5b9, low ^= low >> 32;
    high = (high + word) * 0x94d049bb133111eb, high ^= high >> 29;
  }
  return format("%016llx%016llx", static_cast<unsigned long long>(high),
                static_cast<unsigned long long>(low));
}

}  // namespace train
