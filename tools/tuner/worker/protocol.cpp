#include "tools/tuner/worker/protocol.hpp"

#include <array>

namespace f8::tuner {
namespace {

using tuning_db::TrialState;

constexpr std::array kErrorNames = {
    std::pair{ErrorCode::kInvalidArgument, "invalid_argument"},
    std::pair{ErrorCode::kNotFound, "not_found"},
    std::pair{ErrorCode::kUnsupported, "unsupported"},
    std::pair{ErrorCode::kEnvironment, "environment"},
    std::pair{ErrorCode::kIo, "io"},
    std::pair{ErrorCode::kCorrupt, "corrupt"},
    std::pair{ErrorCode::kCompile, "compile"},
    std::pair{ErrorCode::kCuda, "cuda"},
    std::pair{ErrorCode::kOutOfMemory, "out_of_memory"},
    std::pair{ErrorCode::kInterrupted, "interrupted"},
    std::pair{ErrorCode::kInternal, "internal"},
};

constexpr std::array kStates = {
    TrialState::kPlanned, TrialState::kRunning,      TrialState::kOk,          TrialState::kNoisy,
    TrialState::kPruned,  TrialState::kCompileError, TrialState::kLaunchError, TrialState::kWrong,
    TrialState::kTimeout, TrialState::kQuarantined};

template <class T>
void put(Json& json, const char* name, const std::optional<T>& value) {
  if (value) json[name] = *value;
}
template <class T>
void take(const Json& json, const char* name, std::optional<T>& value) {
  if (json.contains(name)) value = json.at(name).get<T>();
}

// nlohmann throws; our functions do not.
template <class Function>
auto guarded(const char* what, Function&& parse) -> decltype(parse()) {
  try {
    return parse();
  } catch (const nlohmann::json::exception& error) {
    return fail(ErrorCode::kCorrupt, "{} between sweep and worker: {}", what, error.what());
  }
}

}  // namespace

std::string_view to_string(ErrorCode code) {
  for (const auto& [known, name] : kErrorNames) {
    if (known == code) return name;
  }
  return "internal";
}

ErrorCode parse_error_code(std::string_view text) {
  for (const auto& [known, name] : kErrorNames) {
    if (text == name) return known;
  }
  return ErrorCode::kInternal;
}

Json to_json(const GroupRequest& request) {
  Json subjects = Json::array();
  for (const Subject& s : request.subjects) {
    subjects.push_back({{"impl", s.impl}, {"config", s.config}});
  }
  return {{"do", "group"},
          {"problem", request.problem.key()},
          {"subjects", subjects},
          {"reference", request.reference},
          {"batch_us", request.batch_us},
          {"target", request.stop.target},
          {"min_s", request.stop.min_s},
          {"max_s", request.stop.max_s},
          {"min_blocks", request.stop.min_blocks},
          {"drop_above", request.drop_above},
          {"warm_s", request.warm_s},
          {"seed", request.seed}};
}

Result<GroupRequest> parse_group(const Json& json) {
  return guarded("request", [&]() -> Result<GroupRequest> {
    GroupRequest request;
    request.problem = F8_TRY(Problem::parse(json.at("problem").get<std::string>()));
    for (const Json& s : json.at("subjects")) {
      request.subjects.push_back(
          {.impl = s.at("impl").get<std::string>(), .config = s.at("config").get<std::string>()});
    }
    request.reference = json.at("reference").get<int>();
    request.batch_us = json.at("batch_us").get<double>();
    request.stop.target = json.at("target").get<double>();
    request.stop.min_s = json.at("min_s").get<double>();
    request.stop.max_s = json.at("max_s").get<double>();
    request.stop.min_blocks = json.at("min_blocks").get<int>();
    request.drop_above = json.at("drop_above").get<double>();
    request.warm_s = json.at("warm_s").get<double>();
    request.seed = json.at("seed").get<uint64_t>();
    return request;
  });
}

Json to_json(const tuning_db::TrialResult& result) {
  Json json = {{"state", tuning_db::to_string(result.state)}, {"reason", result.reason}};
  put(json, "predicted_ns", result.predicted_ns);
  put(json, "rel_err", result.rel_err);
  put(json, "sqnr_db", result.sqnr_db);
  put(json, "compile_ms", result.compile_ms);
  put(json, "registers", result.registers);
  put(json, "smem_bytes", result.smem_bytes);
  put(json, "spill_bytes", result.spill_bytes);
  put(json, "sm_mhz_mean", result.sm_mhz_mean);
  put(json, "sm_mhz_min", result.sm_mhz_min);
  put(json, "power_w", result.power_w);
  put(json, "temp_c", result.temp_c);
  put(json, "clock_event_mask", result.clock_event_mask);
  if (result.timing) {
    const auto& t = *result.timing;
    json["timing"] = {t.n,      t.n_dropped, t.median_ns, t.mad_ns,
                      t.p05_ns, t.p95_ns,    t.ci_lo_ns,  t.ci_hi_ns};
  }
  if (result.ratio) json["ratio"] = {result.ratio->ratio, result.ratio->lo, result.ratio->hi};
  return json;
}

Result<tuning_db::TrialResult> parse_result(const Json& json) {
  return guarded("result", [&]() -> Result<tuning_db::TrialResult> {
    tuning_db::TrialResult result;
    const auto state = json.at("state").get<std::string>();
    bool known = false;
    for (const TrialState s : kStates) {
      if (state != tuning_db::to_string(s)) continue;
      result.state = s;
      known = true;
    }
    if (!known) {
      return fail(ErrorCode::kCorrupt, "result between sweep and worker: state \"{}\"", state);
    }
    result.reason = json.at("reason").get<std::string>();
    take(json, "predicted_ns", result.predicted_ns);
    take(json, "rel_err", result.rel_err);
    take(json, "sqnr_db", result.sqnr_db);
    take(json, "compile_ms", result.compile_ms);
    take(json, "registers", result.registers);
    take(json, "smem_bytes", result.smem_bytes);
    take(json, "spill_bytes", result.spill_bytes);
    take(json, "sm_mhz_mean", result.sm_mhz_mean);
    take(json, "sm_mhz_min", result.sm_mhz_min);
    take(json, "power_w", result.power_w);
    take(json, "temp_c", result.temp_c);
    take(json, "clock_event_mask", result.clock_event_mask);
    if (json.contains("timing")) {
      const Json& t = json.at("timing");
      result.timing = tuning_db::Timing{.n = t.at(0).get<int64_t>(),
                                        .n_dropped = t.at(1).get<int64_t>(),
                                        .median_ns = t.at(2).get<double>(),
                                        .mad_ns = t.at(3).get<double>(),
                                        .p05_ns = t.at(4).get<double>(),
                                        .p95_ns = t.at(5).get<double>(),
                                        .ci_lo_ns = t.at(6).get<double>(),
                                        .ci_hi_ns = t.at(7).get<double>()};
    }
    if (json.contains("ratio")) {
      const Json& r = json.at("ratio");
      result.ratio = tuning_db::Ratio{.pair_uuid = "",
                                      .ratio = r.at(0).get<double>(),
                                      .lo = r.at(1).get<double>(),
                                      .hi = r.at(2).get<double>()};
    }
    return result;
  });
}

Json to_json(const runtime::DeviceInfo& d) {
  return {{"ordinal", d.ordinal},
          {"name", d.name},
          {"uuid", d.uuid},
          {"cc", d.cc},
          {"sm_count", d.sm_count},
          {"l2_bytes", d.l2_bytes},
          {"mem_bytes", d.mem_bytes},
          {"mem_clock_mhz", d.mem_clock_mhz},
          {"sm_clock_max_mhz", d.sm_clock_max_mhz},
          {"power_limit_w", d.power_limit_w},
          {"mig", d.mig},
          {"driver_version", d.driver_version}};
}

Result<runtime::DeviceInfo> parse_device(const Json& json) {
  return guarded("device", [&]() -> Result<runtime::DeviceInfo> {
    return runtime::DeviceInfo{.ordinal = json.at("ordinal").get<int>(),
                               .name = json.at("name").get<std::string>(),
                               .uuid = json.at("uuid").get<std::string>(),
                               .cc = json.at("cc").get<int>(),
                               .sm_count = json.at("sm_count").get<int>(),
                               .l2_bytes = json.at("l2_bytes").get<size_t>(),
                               .mem_bytes = json.at("mem_bytes").get<size_t>(),
                               .mem_clock_mhz = json.at("mem_clock_mhz").get<int>(),
                               .sm_clock_max_mhz = json.at("sm_clock_max_mhz").get<int>(),
                               .power_limit_w = json.at("power_limit_w").get<int>(),
                               .mig = json.at("mig").get<bool>(),
                               .driver_version = json.at("driver_version").get<int>()};
  });
}

Result<Json> parse_message(std::string_view line, std::string_view what) {
  Json json = Json::parse(line, nullptr, false);
  if (json.is_discarded() || !json.is_object()) {
    return fail(ErrorCode::kCorrupt, "{}: \"{}\" is no JSON object", what, line.substr(0, 120));
  }
  return json;
}

}  // namespace f8::tuner
