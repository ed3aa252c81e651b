// doctor: says which of the parts that float8 needs this machine has, and what works without the
// missing ones. A missing part is a finding, not a failure.
#include <filesystem>
#include <system_error>

#include "base/environment.hpp"
#include "base/folder.hpp"
#include "codegen/cubin_cache.hpp"
#include "codegen/nvrtc.hpp"
#include "runtime/gemm/gemm.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/tuner/backend/candidate.hpp"
#include "tools/tuner/backend/nvml.hpp"
#include "tools/tuner/backend/toolchain.hpp"
#include "tools/tuner/search/device_profile.hpp"
#include "tuning_db/snapshot.hpp"

namespace f8::cli {
namespace {

struct Finding {
  std::string part;
  bool ok = true;
  std::string text;
};

// The findings as they are printed, and the same as JSON fields.
struct DoctorReport {
  std::vector<Finding> findings;
  Json json = Json::object();

  void add(std::string part, bool ok, std::string text) {
    findings.push_back({std::move(part), ok, std::move(text)});
  }
};

void look_at_gpu(DoctorReport& report, int ordinal) {
  Json& gpu = report.json["gpu"];
  const Result<int> count = runtime::device_count();
  if (!count) {
    gpu = {{"found", false}, {"reason", count.error().message}};
    report.add("GPU", false, count.error().message);
    return;
  }
  const auto info = runtime::device_info(ordinal);
  if (!info) {
    gpu = {{"found", false}, {"reason", info.error().message}};
    report.add("GPU", false, info.error().message);
    return;
  }
  const bool hopper = info->cc == 90;
  gpu = {{"found", true},
         {"usable", hopper},
         {"devices", *count},
         {"name", info->name},
         {"compute_capability", f8::format("{}.{}", info->cc / 10, info->cc % 10)},
         {"sm_count", info->sm_count},
         {"l2_bytes", info->l2_bytes},
         {"mem_bytes", info->mem_bytes},
         {"mem_clock_mhz", info->mem_clock_mhz},
         {"sm_clock_max_mhz", info->sm_clock_max_mhz},
         {"power_limit_w", info->power_limit_w},
         {"mig", info->mig},
         {"driver_cuda", tuner::cuda_version_text(info->driver_version)},
         {"class", tuning_db::key(*info)},
         {"profile", tuner::profile_of(*info).name}};
  report.add("GPU", hopper,
             f8::format("{}, compute capability {}.{}, {} SMs, {:.0f} GiB{}{}", info->name,
                        info->cc / 10, info->cc % 10, info->sm_count,
                        static_cast<double>(info->mem_bytes) / 0x1p30, info->mig ? ", MIG" : "",
                        hopper ? "" : "; the kernels need a Hopper GPU (compute capability 9.0)"));
  if (const tuner::DeviceProfile& profile = tuner::profile_of(*info); profile.name != info->name) {
    report.add("profile", true,
               f8::format("none of this device: times are predicted by that of {}", profile.name));
  }
  const auto nvml = tuner::NvmlDevice::open(info->uuid);
  if (!nvml) {
    gpu["nvml"] = nvml.error().message;
    report.add("NVML", false,
               nvml.error().message + "; clocks, power and throttling will not be recorded");
    return;
  }
  const tuner::NvmlReading now = nvml->read();
  const int others = nvml->other_compute_processes();
  gpu["driver"] = nvml->driver_version();
  gpu["sm_clock_mhz"] = now.sm_mhz;
  gpu["power_w"] = rounded(now.power_w, 4);
  gpu["temperature_c"] = now.temp_c;
  gpu["clock_events"] = now.events;
  gpu["other_compute_processes"] = others;
  const bool unfit = (now.events & tuner::kDropEvents) != 0;
  report.add("clocks", !unfit,
             f8::format("SM {:.0f} of {} MHz, {:.0f} W of {} W, {:.0f} C, held back by: {}{}",
                        now.sm_mhz, info->sm_clock_max_mhz, now.power_w, info->power_limit_w,
                        now.temp_c, tuner::describe_events(now.events),
                        unfit ? "; see to its cooling and power before you measure" : ""));
  if (others > 0) {
    report.add(
        "other users", false,
        f8::format("{} other processes compute on this GPU; measure when it is free", others));
  }
}

template <class T>
void look_at_library(DoctorReport& report, const char* name, const char* field,
                     const Result<T>& version, const char* without) {
  if (version) {
    report.json["libraries"][field] = *version;
    report.add(name, true, *version);
  } else {
    report.json["libraries"][field] = nullptr;
    report.add(name, false, f8::format("{}; {}", version.error().message, without));
  }
}

void look_at_cache(DoctorReport& report) {
  const std::filesystem::path directory = environment().cache_dir;
  Json& cache = report.json["cache"];
  cache = {{"directory", directory.string()}};
  std::error_code error;
  if (directory.empty()) {
    cache["state"] = "none";
    report.add("kernel cache", false,
               "none: compiled kernels are not kept; set FLOAT8_CACHE_DIR to a directory of yours");
    return;
  }
  if (!std::filesystem::exists(directory, error)) {
    cache["state"] = "empty";
    report.add("kernel cache", true, f8::format("{}: made at first use", directory.string()));
    return;
  }
  // Opening checks who may write it.
  if (const auto opened = codegen::CubinCache::open(directory); !opened) {
    cache["state"] = "unusable";
    cache["reason"] = opened.error().message;
    report.add("kernel cache", false, opened.error().message);
    return;
  }
  int64_t kernels = 0;
  uintmax_t bytes = 0;
  FolderNames names(directory);
  while (const char* name = names.next()) {
    const auto cubin = directory / name / "kernel.cubin";
    std::error_code missing;
    const uintmax_t size = std::filesystem::file_size(cubin, missing);
    if (missing) continue;
    ++kernels;
    bytes += size;
  }
  cache["state"] = "usable";
  cache["kernels"] = kernels;
  cache["bytes"] = bytes;
  report.add("kernel cache", true,
             f8::format("{}: {} kernels, {:.1f} MiB", directory.string(), kernels,
                        static_cast<double>(bytes) / 0x1p20));
}

void look_at_databases(DoctorReport& report, const Global& global) {
  const auto describe = [&](const char* name, const char* field,
                            const Result<tuning_db::Database>& db, const std::string& where) {
    Json& json = report.json["databases"][field];
    const auto broken = [&](const Error& error) {
      json = {{"path", where}, {"ok", false}, {"reason", error.message}};
      report.add(name, false, error.message);
    };
    if (!db) return broken(db.error());
    if (const Status healthy = db->check(); !healthy) return broken(healthy.error());
    const auto runs = db->runs();
    const auto table = db->table();
    if (!runs) return broken(runs.error());
    if (!table) return broken(table.error());
    int64_t resumable = 0;
    for (const auto& run : *runs) {
      if (run.done < run.planned && run.state != "imported") ++resumable;
    }
    std::vector<std::string> devices;
    for (const DeviceClass& device : table->devices) devices.push_back(device.name);
    json = {{"path", where},
            {"ok", true},
            {"runs", runs->size()},
            {"resumable", resumable},
            {"kernels", table->choices().size()},
            {"linears", table->speedups().size()},
            {"device", table->device_name()},
            {"devices", devices}};
    report.add(
        name, true,
        f8::format("{}: {} runs{}, {} GEMMs and {} linears decided{}", where, runs->size(),
                   resumable > 0 ? f8::format(" ({} to resume)", resumable) : "",
                   table->choices().size(), table->speedups().size(),
                   devices.empty() ? "" : f8::format(", of {}", fmt::join(devices, " and "))));
  };
  describe("built-in database", "builtin", tuning_db::Database::builtin(), "built-in");
  if (global.db.empty()) {
    report.json["databases"]["user"] = nullptr;
    report.add("user database", true, "none; --db FILE or FLOAT8_DB names one");
    return;
  }
  std::error_code error;
  if (!std::filesystem::exists(global.db, error)) {
    report.json["databases"]["user"] = {{"path", global.db.string()}, {"ok", true}, {"runs", 0}};
    report.add(
        "user database", true,
        f8::format("{}: no such database yet; sweep makes it, what reads it stops until then",
                   global.db.string()));
    return;
  }
  describe("user database", "user",
           tuning_db::Database::open(global.db, tuning_db::OpenMode::kReadOnly),
           global.db.string());
}

// The records that an export has of this machine: rows that another program measures here refer to them.
void add_records(DoctorReport& report, int ordinal) {
  const auto info = runtime::device_info(ordinal);
  const auto nvml = info ? tuner::NvmlDevice::open(info->uuid) : fail(ErrorCode::kEnvironment, "");
  const tuning_db::Toolchain toolchain = tuner::current_toolchain(
      nvml ? nvml->driver_version() : "", info ? info->driver_version : 0, FLOAT8_VERSION);
  report.json["records"] = {{"device", info ? Json::parse(tuning_db::to_json_line(*info)) : Json()},
                            {"toolchain", Json::parse(tuning_db::to_json_line(toolchain))}};
}

void look_at_environment(DoctorReport& report) {
  const Environment& e = environment();
  report.json["environment"] = {{"FLOAT8_CACHE_DIR", e.cache_dir.string()},
                                {"FLOAT8_DB", e.db.string()},
                                {"FLOAT8_LOG", e.log_level},
                                {"FLOAT8_TUNE", e.tune}};
  report.add("environment", true,
             f8::format("FLOAT8_CACHE_DIR={} FLOAT8_DB={} FLOAT8_LOG={} FLOAT8_TUNE={}",
                        e.cache_dir.string(), e.db.string(), e.log_level, e.tune));
}

Result<int> run(const Global& global, int ordinal) {
  DoctorReport report;
  report.json["version"] = FLOAT8_VERSION;
  look_at_gpu(report, ordinal);
  const auto nvrtc = [&]() -> Result<std::string> {
    const codegen::NvrtcVersion version = F8_TRY(codegen::nvrtc_version());
    return f8::format("{}.{}", version.major, version.minor);
  }();
  look_at_library(report, "NVRTC", "nvrtc", nvrtc, "kernels can be emitted but not compiled");
  look_at_library(report, "cuBLASLt", "cublaslt", runtime::cublaslt_version(),
                  "generated kernels are the only provider, and nothing can be compared with bf16");
  look_at_library(
      report, "cuDNN", "cudnn", tuner::cudnn_version(),
      "attention in bf16, and a backward of it under fp8_forward, are the caller's own, "
      "and sweep --attention compares with none");
  look_at_library(report, "NCCL", "nccl", tuner::nccl_version(), "training on one GPU alone works");
  look_at_cache(report);
  look_at_databases(report, global);
  look_at_environment(report);
  add_records(report, ordinal);

  const bool gpu = report.json["gpu"].value("usable", false);
  const bool compiles = nvrtc.has_value();
  std::vector<std::string> works = {"query",      "filter", "thresholds", "explain", "estimate",
                                    "compare",    "report", "replay",     "plan",    "emit",
                                    "cost-model", "wire",   "profile",    "db"};
  std::vector<std::string> missing;
  (compiles ? works : missing).push_back("prewarm");
  for (const char* command : {"sweep", "resume", "bench"}) {
    (gpu && compiles ? works : missing).push_back(command);
  }
  report.json["works"] = works;
  report.json["does_not_work"] = missing;

  if (global.json) {
    print_json(report.json);
    return kExitOk;
  }
  Table table(
      {{"part", Table::Align::kLeft}, {"", Table::Align::kLeft}, {"", Table::Align::kLeft}});
  for (const Finding& finding : report.findings) {
    table.add({finding.part, finding.ok ? "ok" : "--", finding.text});
  }
  print_styled(table.text(stdout_color(global)));
  print(f8::format("\nworks here: {}\n", fmt::join(works, ", ")));
  if (!missing.empty()) print(f8::format("does not:   {}\n", fmt::join(missing, ", ")));
  return kExitOk;
}

}  // namespace

void add_doctor(CLI::App& app, Program& program) {
  auto ordinal = std::make_shared<int64_t>(0);
  CLI::App* command = add_command(
      app, program, "doctor", "what this machine has and what works on it", Needs::kNothing,
      [ordinal, &program] { return run(program.global, static_cast<int>(*ordinal)); });
  add_integer(*command, "--device", *ordinal, "CUDA device", 0, 1023);
}

}  // namespace f8::cli
