#include "tools/float8-tune/device_option.hpp"

#include <algorithm>
#include <cctype>

#include "base/format.hpp"
#include "base/text.hpp"

namespace f8::cli {

static std::string quoted(const std::vector<std::string>& names) {
  std::vector<std::string> all;
  for (const std::string& name : names) all.push_back(quote(name));
  return f8::format("{}", fmt::join(all, ", "));
}

// The same letters, all small.
static std::string folded(std::string_view name) {
  std::string small(name);
  std::ranges::transform(small, small.begin(), [](unsigned char c) { return std::tolower(c); });
  return small;
}

CLI::Option* add_device(CLI::App& command, std::string& device) {
  return command
      .add_option(
          "--device", device,
          "only measurements of the device of this name, or part of one, as H200 (default: of "
          "this machine's GPU first; without one the answer says for which device it is)")
      ->type_name("NAME");
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
    return fail(ErrorCode::kNotFound, "--device: no measurements on {}; there are some on {}",
                quote(part), quoted(known));
  }
  return fail(ErrorCode::kInvalidArgument, "--device: {} may be {}; give more of the name",
              quote(part), quoted(matching));
}

tuning_db::Estimator estimator_of(const TuningTable& table, const Recipe& recipe,
                                  const std::string& name) {
  if (!name.empty() || table.devices.empty()) return {table, recipe, name};
  const tuning_db::Machine first = {.device = table.devices.front()};
  return {table, recipe, name, this_machine() != nullptr ? this_machine() : &first};
}

Result<AskedDevice> asked_device(std::span<const DeviceClass> devices, std::string_view part) {
  AskedDevice asked = {.named = F8_TRY(device_named(devices, part)), .name = {}, .others = {}};
  if (!asked.named.empty()) {
    asked.name = asked.named;
  } else if (this_gpu() != nullptr) {
    asked.name = this_gpu()->name;
  } else if (!devices.empty()) {
    asked.name = devices.front().name;
  }
  for (const DeviceClass& device : devices) {
    const bool known = std::ranges::find(asked.others, device.name) != asked.others.end();
    if (!known && device.name != asked.name) asked.others.push_back(device.name);
  }
  return asked;
}

std::string device_text(const AskedDevice& asked) {
  if (!asked.is_assumed() || asked.name.empty()) return asked.name;
  std::string text = asked.name + ", since this machine has no GPU and --device is not given";
  if (asked.others.empty()) return text;
  return f8::format("{}; there are measurements on {} too: --device {}", text, quoted(asked.others),
                    quote(asked.others.front()));
}

void add_asked_device(Json& json, const AskedDevice& asked) {
  json["device"] = asked.name;
  json["other_devices"] = asked.others;
}

std::string elsewhere_text(const std::vector<std::string>& others, std::string_view asked) {
  return f8::format("measured on {} and not on {}", quoted(others), quote(asked));
}

std::string elsewhere_hint(const std::vector<std::string>& others, std::string_view asked) {
  return f8::format("{}; --device {} shows that", elsewhere_text(others, asked),
                    quote(others.front()));
}

}  // namespace f8::cli
