#include "checkpoint.hpp"

#include <bit>
#include <charconv>
#include <cstring>

#include "error.hpp"
#include "files.hpp"

namespace train {
namespace fs = std::filesystem;
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr const char* kTitle = "float8 train checkpoint 2";

// Calls each(values) with the arrays of the payload, in their order.
template <class OneCheckpoint, class Each>
void for_each_array(OneCheckpoint& checkpoint, const Each& each) {
  each(checkpoint.loss);
  each(checkpoint.ms);
  each(checkpoint.master);
  each(checkpoint.m);
  each(checkpoint.v);
  each(checkpoint.scales);
}

template <class T>
size_t size_bytes(const std::vector<T>& values) {
  return values.size() * sizeof(T);
}

// Takes the text up to `separator` off the front, and the separator; without one, all of it.
std::string_view take_until(std::string_view& rest, char separator) {
  const size_t end = rest.find(separator);
  const std::string_view part = rest.substr(0, end);
  rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
  return part;
}

// Reads the lines of a header one after another.
class Header {
 public:
  Header(const std::string& path, std::string_view bytes) : path_(path), rest_(bytes) {}

  void title() {
    if (take_until(rest_, '\n') == kTitle) return;
    fail(FLOAT8_CORRUPT, "%s is no checkpoint of this program: it does not begin with \"%s\"",
         path_.c_str(), kTitle);
  }
  std::string_view field(const char* name) {
    std::string_view line = take_until(rest_, '\n');
    if (take_until(line, ' ') == name) return line;
    fail(FLOAT8_CORRUPT, "%s: its header has no \"%s\" where one belongs; the file is damaged",
         path_.c_str(), name);
  }
  size_t number(const char* name) {
    const std::string_view digits = field(name);
    size_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    // The limit is there so that no sum of sizes overflows.
    if (error == std::errc() && end == digits.data() + digits.size() && value < size_t{1} << 48) {
      return value;
    }
    fail(FLOAT8_CORRUPT, "%s: its \"%s\" is no size; the file is damaged", path_.c_str(), name);
  }
  [[nodiscard]] std::string_view rest() const { return rest_; }

 private:
  const std::string& path_;
  std::string_view rest_;
};

}  // namespace

void save(const fs::path& path, const Checkpoint& checkpoint) {
  std::string payload;
  for_each_array(checkpoint, [&](const auto& values) {
    payload.append(reinterpret_cast<const char*>(values.data()), size_bytes(values));
  });
  std::string file =
      format("%s\nrun %s\nstep %zu\nweights %zu\nscale_bytes %zu\npayload %s\n", kTitle,
             checkpoint.run.c_str(), checkpoint.loss.size(), checkpoint.master.size(),
             checkpoint.scales.size(), hash_hex(payload).c_str());
  file += payload;
  write_file(path, file);
}

Checkpoint load(const fs::path& path, const std::string& run) {
  const std::string bytes = read_file(path);
  const std::string name = path.string();
  Header header(name, bytes);
  header.title();
  Checkpoint checkpoint;
  checkpoint.run = header.field("run");
  const size_t steps = header.number("step");
  const size_t weights = header.number("weights");
  const size_t scale_bytes = header.number("scale_bytes");
  const std::string_view checksum = header.field("payload");
  std::string_view payload = header.rest();
  const size_t expected = 8 * steps + 12 * weights + scale_bytes;
  if (payload.size() != expected) {
    fail(FLOAT8_CORRUPT, "%s: %zu bytes follow its header, and %zu should; it is damaged",
         name.c_str(), payload.size(), expected);
  }
  if (hash_hex(payload) != checksum) {
    fail(FLOAT8_CORRUPT, "%s: its checksum does not hold; it is damaged", name.c_str());
  }
  if (checkpoint.run != run) {
    fail(FLOAT8_INVALID_ARGUMENT,
         "%s is of another run: \"%s\", and this one is \"%s\"; resume with the same options",
         name.c_str(), checkpoint.run.c_str(), run.c_str());
  }
  checkpoint.loss.resize(steps);
  checkpoint.ms.resize(steps);
  checkpoint.master.resize(weights);
  checkpoint.m.resize(weights);
  checkpoint.v.resize(weights);
  checkpoint.scales.resize(scale_bytes);
  for_each_array(checkpoint, [&](auto& values) {
    std::memcpy(values.data(), payload.data(), size_bytes(values));
    payload.remove_prefix(size_bytes(values));
  });
  return checkpoint;
}

}  // namespace train
