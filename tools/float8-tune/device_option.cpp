#include "tools/float8-tune/device_option.hpp"

#include <algorithm>

#include "base/format.hpp"
#include "base/text.hpp"
#include "tools/float8-tune/options.hpp"

namespace f8::cli {

static std::string quoted(const std::vector<std::string>& names) {
  std::vector<std::string> all;
  for (const std::string& name : names) all.push_back(quote(name));
  return f8::format("{}", fmt::join(all, ", "));
}

CLI::Option* add_device(CLI::App& command, std::string& device) {
  return command
      .add_option(
          "--device", device,
          "only measurements of the device of this name, or part of one, as H200 (default: of "
          "this machine's GPU first)")
      ->type_name("NAME");
}

Result<std::string> device_named(std::span<const DeviceClass> devices, std::string_view part) {
  std::vector<std::string> known;
  std::vector<std::string> matching;
  for (const DeviceClass& device : devices) {
    if (device.name == part) return device.name;
    if (std::ranges::find(known, device.name) != known.end()) continue;
    known.push_back(device.name);
    if (device.name.contains(part)) matching.push_back(device.name);
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
  return tuning_db::Estimator(table, recipe, name, name.empty() ? this_machine() : nullptr);
}

std::string asked_device(const std::string& name, std::string_view first) {
  if (!name.empty()) return name;
  return this_gpu() != nullptr ? this_gpu()->name : std::string(first);
}

std::string elsewhere_text(const std::vector<std::string>& others, std::string_view asked) {
  return f8::format("measured on {} and not on {}", quoted(others), quote(asked));
}

std::string elsewhere_hint(const std::vector<std::string>& others, std::string_view asked) {
  return f8::format("{}; --device {} shows that", elsewhere_text(others, asked),
                    quote(others.front()));
}

}  // namespace f8::cli
