#include "tuning_db/estimate/device_name.hpp"

#include <algorithm>
#include <cctype>

#include "base/format.hpp"
#include "base/text.hpp"

namespace f8 {

// The same letters, all small.
static std::string folded(std::string_view name) {
  std::string small(name);
  std::ranges::transform(small, small.begin(), [](unsigned char c) { return std::tolower(c); });
  return small;
}

std::string quoted(const std::vector<std::string>& names) {
  std::vector<std::string> all;
  for (const std::string& name : names) all.push_back(quote(name));
  return f8::format("{}", fmt::join(all, ", "));
}

Result<std::string> device_named(std::span<const DeviceClass> devices, std::string_view part) {
  std::vector<std::string> known;
  std::vector<std::string> matching;
  for (const DeviceClass& device : devices) {
    if (folded(device.name) == folded(part)) return device.name;
    if (std::ranges::find(known, device.name) != known.end()) continue;
    known.push_back(device.name);
    if (folded(device.name).contains(folded(part))) matching.push_back(device.name);
  }
  if (part.empty()) return std::string();
  if (matching.size() == 1) return matching.front();
  if (matching.empty()) {
    return fail(ErrorCode::kNotFound, "no measurements on {}; there are {}{}", quote(part),
                known.empty() ? "none" : "some on ", quoted(known));
  }
  return fail(ErrorCode::kInvalidArgument, "{} may be {}; give more of the name", quote(part),
              quoted(matching));
}

}  // namespace f8
