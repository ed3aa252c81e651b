// profile: the rates that devices sustain in linears, and fitting them to measurements. It needs no
// GPU.
#include "base/file.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/refuse_db.hpp"
#include "tools/tuner/search/device_profile.hpp"

namespace f8::cli {
namespace {

using tuner::DeviceProfile;

struct Constant {
  const char* name;
  const char* unit;
  double DeviceProfile::*value;
  const char* meaning;
};
constexpr Constant kConstants[] = {
    {"settled", "share", &DeviceProfile::settled,
     "the SM clock under long fp8 linears, of the maximum"},
    {"fp8_tflops", "TFLOP/s", &DeviceProfile::fp8_tflops, "of the GEMMs of an fp8 linear"},
    {"bf16_tflops", "TFLOP/s", &DeviceProfile::bf16_tflops, "of the GEMMs of a bf16 linear"},
    {"cast_gb_per_s", "GB/s", &DeviceProfile::cast_gb_per_s,
     "of the casts of an fp8 linear, at 6 bytes an element of x, w and dy"},
    {"memory_gb_per_s", "GB/s", &DeviceProfile::memory_gb_per_s,
     "of the GEMMs of a bf16 linear, at 6 bytes an element"},
    {"launch_us", "us", &DeviceProfile::launch_us, "of each of an fp8 linear's 9 launches"},
    {"bf16_launch_us", "us", &DeviceProfile::bf16_launch_us,
     "of each of a bf16 linear's 3 launches"},
    {"error_median", "share", &DeviceProfile::error_median,
     "of the predicted times of the linears"},
    {"error_p95", "share", &DeviceProfile::error_p95, "likewise, the 95th percentile"},
};

std::string rate_text(double value) {
  return value >= tuner::kNotSeen ? "not seen" : f8::format("{:.4g}", value);
}

Json to_json(const DeviceProfile& profile) {
  Json json = {{"device", profile.name}, {"rows", profile.rows}, {"measured", profile.measured}};
  for (const Constant& constant : kConstants) {
    const double value = profile.*constant.value;
    json[constant.name] = value >= tuner::kNotSeen ? Json() : Json(rounded(value, 4));
  }
  return json;
}

void show(std::span<const DeviceProfile> profiles, const Global& global) {
  if (global.json) {
    Json all = Json::array();
    for (const DeviceProfile& profile : profiles) all.push_back(to_json(profile));
    print_json({{"profiles", all}});
    return;
  }
  for (const DeviceProfile& profile : profiles) {
    Table table({{"constant", Table::Align::kLeft},
                 {"value"},
                 {"unit", Table::Align::kLeft},
                 {"meaning", Table::Align::kLeft}});
    for (const Constant& constant : kConstants) {
      table.add(
          {constant.name, rate_text(profile.*constant.value), constant.unit, constant.meaning});
    }
    print_styled(f8::format("{}{}: fitted to {} linears measured until {}\n{}",
                            &profile == &profiles.front() ? "" : "\n", profile.name, profile.rows,
                            profile.measured, table.text(stdout_color(global))));
  }
}

Result<int> fit(const std::filesystem::path& output, const Global& global) {
  F8_TRY(check_output(global, "-o", output));
  const bool own = !global.db.empty();
  const tuning_db::Database database =
      own ? F8_TRY(open_user_database(global, tuning_db::OpenMode::kReadOnly))
          : F8_TRY(tuning_db::Database::builtin());
  const auto profiles =
      F8_TRY(of_option(own ? global.db_option : "built-in", tuner::fit_profiles(database)));
  if (!is_standard_stream(output)) show(profiles, global);
  if (output.empty()) return kExitOk;
  F8_TRY(write_output(global, "-o", output, tuner::profiles_source(profiles)));
  return kExitOk;
}

}  // namespace

void add_profile(CLI::App& app, Program& program) {
  CLI::App* group =
      add_group(app, "profile", "the rates that devices sustain, by which times are predicted");
  refuse_db(*add_command(*group, program, "show", "the built-in profiles", Needs::kNothing,
                         [&program]() -> Result<int> {
                           show(tuner::device_profiles(), program.global);
                           return kExitOk;
                         }),
            "profile show has the built-in profiles; profile fit reads a database");
  auto output = std::make_shared<std::filesystem::path>();
  CLI::App* command = add_command(
      *group, program, "fit", "fit a profile to the linears of each device of a database",
      Needs::kNothing, [output, &program] { return fit(*output, program.global); });
  add_output(*command, "-o,--output", *output,
             "write the source here (tools/tuner/search/device_profiles.cpp)");
}

}  // namespace f8::cli
