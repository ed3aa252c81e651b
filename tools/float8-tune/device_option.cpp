#include "tools/float8-tune/device_option.hpp"

#include <algorithm>

#include "base/format.hpp"
#include "base/text.hpp"

namespace f8::cli {

CLI::Option* add_device(CLI::App& command, std::string& device) {
  return command
      .add_option(
          "--device", device,
          "only measurements of the device of this name, or part of one, as H200 (default: of "
          "this machine's GPU first; without one the answer says for which device it is)")
      ->type_name("NAME");
}

tuning_db::Estimator estimator_of(const TuningTable& table, const Recipe& recipe,
                                  const std::string& name) {
  if (!name.empty() || table.devices.empty()) return {table, recipe, name};
  const tuning_db::Machine first = {.device = table.devices.front()};
  return {table, recipe, name, this_machine() != nullptr ? this_machine() : &first};
}

Result<AskedDevice> asked_device(std::span<const DeviceClass> devices, std::string_view part) {
  AskedDevice asked = {.named = F8_TRY(of_option("--device", device_named(devices, part))),
                       .name = {},
                       .others = {}};
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

std::vector<std::string> devices_with(const TuningTable& table, std::span<const LinearSpeedup> rows,
                                      const std::function<bool(const LinearSpeedup&)>& is_wanted) {
  std::vector<std::string> devices;
  for (const LinearSpeedup& row : rows) {
    const std::string& name = table.devices[row.device].name;
    const bool known = std::ranges::find(devices, name) != devices.end();
    if (!known && is_wanted(row)) devices.push_back(name);
  }
  return devices;
}

std::string elsewhere_text(const std::vector<std::string>& others, std::string_view asked) {
  return f8::format("measured on {} and not on {}", quoted(others), quote(asked));
}

std::string elsewhere_hint(const std::vector<std::string>& others, std::string_view asked) {
  return f8::format("{}; --device {} shows that", elsewhere_text(others, asked),
                    quote(others.front()));
}

}  // namespace f8::cli
