#include "tools/float8-tune/device_option.hpp"

#include <algorithm>

#include "base/format.hpp"
#include "base/text.hpp"
#include "tools/float8-tune/options.hpp"

namespace f8::cli {

CLI::Option* add_device(CLI::App& command, std::string& device) {
  return command
      .add_option(
          "--device", device,
          "only measurements of the device of this name (default: of this machine's GPU first)")
      ->type_name("NAME");
}

Status check_device(const TuningTable& table, std::string_view name) {
  if (name.empty() ||
      std::ranges::find(table.devices, name, &DeviceClass::name) != table.devices.end()) {
    return {};
  }
  std::vector<std::string> known;
  for (const DeviceClass& device : table.devices) known.push_back(quote(device.name));
  return fail(ErrorCode::kNotFound, "no measurements on {}; there are some on {}", quote(name),
              fmt::join(known, ", "));
}

Result<tuning_db::Estimator> estimator_of(const TuningTable& table, std::string_view recipe,
                                          const std::string& name) {
  F8_TRY(of_option("--device", check_device(table, name)));
  return tuning_db::Estimator(table, recipe, name, name.empty() ? this_machine() : nullptr);
}

std::string asked_device(const std::string& name, std::string_view first) {
  if (!name.empty()) return name;
  return this_gpu() != nullptr ? this_gpu()->name : std::string(first);
}

std::string elsewhere_text(const std::vector<std::string>& others, std::string_view asked) {
  std::vector<std::string> quoted;
  for (const std::string& other : others) quoted.push_back(quote(other));
  return f8::format("measured on {} and not on {}", fmt::join(quoted, ", "), quote(asked));
}

std::string elsewhere_hint(const std::vector<std::string>& others, std::string_view asked) {
  return f8::format("{}; --device {} shows that", elsewhere_text(others, asked),
                    quote(others.front()));
}

}  // namespace f8::cli
