// Where the numbers come from: devices, software, methods, dates and counts.
#include <algorithm>

#include "tools/float8-tune/report/figures/page.hpp"

namespace f8::report {
namespace {

constexpr size_t kMaxRuns = 100;

DataTable devices(const Measurements& measurements) {
  DataTable table{
      .caption = "Devices",
      .columns = {"device", "compute capability", "SMs", "L2 MiB", "memory GiB", "memory clock MHz",
                  "SM clock max MHz", "power limit W", "MIG", "linears"},
      .rows = {}};
  for (size_t i = 0; i < measurements.table.devices.size(); ++i) {
    const DeviceClass& d = measurements.table.devices[i];
    const auto linears =
        std::ranges::count(measurements.table.speedups(), i, &LinearSpeedup::device);
    table.rows.push_back({d.name, f8::format("{}.{}", d.cc / 10, d.cc % 10),
                          f8::format("{}", d.sm_count), f8::format("{}", d.l2_bytes >> 20),
                          f8::format("{:.1f}", static_cast<double>(d.mem_bytes) / (1 << 30)),
                          f8::format("{}", d.mem_clock_mhz), f8::format("{}", d.sm_clock_max_mhz),
                          f8::format("{}", d.power_limit_w), d.mig ? "yes" : "no",
                          f8::format("{}", linears)});
  }
  return table;
}

DataTable campaigns(const Measurements& measurements) {
  DataTable table{.caption = "Trials by software and method (of linears, those that count)",
                  .columns = {"database", "device", "software", "method", "from", "to", "trials"},
                  .rows = {}};
  for (const Campaign& c : measurements.campaigns) {
    std::vector<std::string> counts;
    for (const auto& [state, count] : c.states) counts.push_back(f8::format("{} {}", count, state));
    table.rows.push_back({c.source, c.device, c.toolchain, c.method.substr(0, 8), c.first, c.last,
                          f8::format("{}", fmt::join(counts, ", "))});
  }
  return table;
}

DataTable methods(const Measurements& measurements) {
  DataTable table{
      .caption = "Methods", .columns = {"method", "fidelity", "parameters"}, .rows = {}};
  for (const tuning_db::Method& method : measurements.methods) {
    table.rows.push_back({method.key().substr(0, 8), method.fidelity, method.spec});
  }
  return table;
}

DataTable runs(const Measurements& measurements) {
  DataTable table{.caption = "Runs",
                  .columns = {"run", "database", "started", "state", "planned", "done"},
                  .rows = {}};
  for (const Run& run : measurements.runs) {
    if (table.rows.size() == kMaxRuns) {
      table.caption += f8::format(" (the first {} of {})", kMaxRuns, measurements.runs.size());
      break;
    }
    table.rows.push_back({run.info.uuid, run.source, run.info.started_at, run.info.state,
                          f8::format("{}", run.info.planned), f8::format("{}", run.info.done)});
  }
  return table;
}

}  // namespace

std::vector<DataTable> provenance(const Measurements& measurements) {
  return {devices(measurements), campaigns(measurements), methods(measurements),
          runs(measurements)};
}

}  // namespace f8::report
