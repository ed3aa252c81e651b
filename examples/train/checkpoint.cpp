#include "checkpoint.hpp"

#include <bit>
#include <charconv>
#include <cstring>

#include "base/file.hpp"
#include "base/hash.hpp"
#include "base/text.hpp"

namespace f8::train {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kTitle = "float8 train checkpoint 1";

template <class T>
void append(const std::vector<T>& values, std::string& out) {
  out.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Bytes are known to be there.
template <class T>
void take(std::string_view& rest, std::vector<T>& values) {
  std::memcpy(values.data(), rest.data(), values.size() * sizeof(T));
  rest.remove_prefix(values.size() * sizeof(T));
}

class Header {
 public:
  Header(const fs::path& path, std::string_view bytes) : path_(path), rest_(bytes) {}

  Status title() {
    if (take_until(rest_, '\n') == kTitle) return {};
    return fail(ErrorCode::kCorrupt,
                "{} is no checkpoint of this program: it does not begin with \"{}\"",
                path_.string(), kTitle);
  }
  Result<std::string_view> field(std::string_view name) {
    std::string_view line = take_until(rest_, '\n');
    if (take_until(line, ' ') == name) return line;
    return fail(ErrorCode::kCorrupt,
                "{}: its header has no \"{}\" where one belongs; the file is damaged",
                path_.string(), name);
  }
  Result<size_t> number(std::string_view name) {
    const std::string_view digits = F8_TRY(field(name));
    size_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    // So that no sum of sizes overflows.
    if (error == std::errc() && end == digits.data() + digits.size() && value < size_t{1} << 48) {
      return value;
    }
    return fail(ErrorCode::kCorrupt, "{}: \"{}\" is {}, which is no size; the file is damaged",
                path_.string(), name, quote(digits));
  }
  [[nodiscard]] std::string_view rest() const { return rest_; }

 private:
  const fs::path& path_;
  std::string_view rest_;
};

}  // namespace

Status save(const fs::path& path, const Checkpoint& checkpoint) {
  std::string payload;
  payload.reserve(12 * checkpoint.master.size() + 8 * checkpoint.loss.size() +
                  checkpoint.scales.size());
  append(checkpoint.loss, payload);
  append(checkpoint.ms, payload);
  append(checkpoint.master, payload);
  append(checkpoint.m, payload);
  append(checkpoint.v, payload);
  append(checkpoint.scales, payload);
  std::string file =
      fmt::format("{}\nrun {}\nstep {}\nweights {}\nscale_bytes {}\npayload {}\n", kTitle,
                  checkpoint.run, checkpoint.loss.size(), checkpoint.master.size(),
                  checkpoint.scales.size(), hash_hex(payload));
  file += payload;
  return write_file_atomic(path, file);
}

Result<Checkpoint> load(const fs::path& path, const std::string& run) {
  const std::string bytes = F8_TRY(read_file(path));
  Header header(path, bytes);
  F8_TRY(header.title());
  Checkpoint checkpoint;
  checkpoint.run = F8_TRY(header.field("run"));
  const size_t steps = F8_TRY(header.number("step"));
  const size_t weights = F8_TRY(header.number("weights"));
  const size_t scale_bytes = F8_TRY(header.number("scale_bytes"));
  const std::string_view checksum = F8_TRY(header.field("payload"));
  std::string_view payload = header.rest();
  const size_t expected = 8 * steps + 12 * weights + scale_bytes;
  if (payload.size() != expected) {
    return fail(ErrorCode::kCorrupt, "{}: {} bytes follow its header, and {} should; it is damaged",
                path.string(), payload.size(), expected);
  }
  if (hash_hex(payload) != checksum) {
    return fail(ErrorCode::kCorrupt, "{}: its checksum does not hold; it is damaged",
                path.string());
  }
  if (checkpoint.run != run) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{} is of another run: \"{}\", and this one is \"{}\"; resume with the same options",
        path.string(), checkpoint.run, run);
  }
  checkpoint.loss.resize(steps);
  checkpoint.ms.resize(steps);
  checkpoint.master.resize(weights);
  checkpoint.m.resize(weights);
  checkpoint.v.resize(weights);
  checkpoint.scales.resize(scale_bytes);
  take(payload, checkpoint.loss);
  take(payload, checkpoint.ms);
  take(payload, checkpoint.master);
  take(payload, checkpoint.m);
  take(payload, checkpoint.v);
  take(payload, checkpoint.scales);
  return checkpoint;
}

}  // namespace f8::train
