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

// Calls field(name, optional) for each optional number of a result.
template <class Result, class Field>
void each_number(Result& result, Field&& field) {
  field("predicted_ns", result.predicted_ns);
  field("rel_err", result.rel_err);
  field("sqnr_db", result.sqnr_db);
  field("compile_ms", result.compile_ms);
  field("registers", result.registers);
  field("smem_bytes", result.smem_bytes);
  field("spill_bytes", result.spill_bytes);
  field("sm_mhz_mean", result.sm_mhz_mean);
  field("sm_mhz_min", result.sm_mhz_min);
  field("power_w", result.power_w);
  field("temp_c", result.temp_c);
  field("clock_event_mask", result.clock_event_mask);
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

Json to_json(const InterleavedGroup& group) {
  Json candidates = Json::array();
  for (const Candidate& c : group.candidates) {
    candidates.push_back({{"impl", impl_text(c)}, {"config", c.config}});
  }
  Json json = {{"do", "group"},
               {"problem", group.problem.key()},
               {"candidates", candidates},
               {"batch_us", group.batch_us},
               {"target", group.stop.target},
               {"min_s", group.stop.min_s},
               {"max_s", group.stop.max_s},
               {"min_blocks", group.stop.min_blocks},
               {"warm_s", group.warm_s},
               {"seed", group.seed},
               {"hot", group.conditions.l2 == L2State::kHot},
               {"locked", group.conditions.clock == ClockPolicy::kLocked}};
  if (const auto* ratios = std::get_if<Ratios>(&group.purpose)) {
    json["reference"] = ratios->reference;
  } else if (const auto* screening = std::get_if<Screening>(&group.purpose)) {
    json["drop_above"] = screening->drop_above;
  }
  return json;
}

namespace {

Result<Purpose> parse_purpose(const Json& json, size_t candidates) {
  const bool ratios = json.contains("reference");
  const bool screening = json.contains("drop_above");
  if (ratios && screening) {
    return fail(ErrorCode::kCorrupt,
                "request between sweep and worker: a screening has no ratios to a reference");
  }
  if (screening) return Screening{.drop_above = json.at("drop_above").get<double>()};
  if (!ratios) return Times{};
  const auto reference = json.at("reference").get<int>();
  if (reference < 0 || static_cast<size_t>(reference) >= candidates) {
    return fail(ErrorCode::kCorrupt,
                "request between sweep and worker: reference {} of {} candidates", reference,
                candidates);
  }
  return Ratios{.reference = reference};
}

}  // namespace

Result<InterleavedGroup> parse_group(const Json& json) {
  return guarded("request", [&]() -> Result<InterleavedGroup> {
    InterleavedGroup group;
    group.problem = F8_TRY(Problem::parse(json.at("problem").get<std::string>()));
    for (const Json& c : json.at("candidates")) {
      group.candidates.push_back(F8_TRY(
          parse_candidate(c.at("impl").get<std::string>(), c.at("config").get<std::string>())));
    }
    group.purpose = F8_TRY(parse_purpose(json, group.candidates.size()));
    group.batch_us = json.at("batch_us").get<double>();
    group.stop.target = json.at("target").get<double>();
    group.stop.min_s = json.at("min_s").get<double>();
    group.stop.max_s = json.at("max_s").get<double>();
    group.stop.min_blocks = json.at("min_blocks").get<int>();
    group.warm_s = json.at("warm_s").get<double>();
    group.seed = json.at("seed").get<uint64_t>();
    if (json.at("hot").get<bool>()) group.conditions.l2 = L2State::kHot;
    if (json.at("locked").get<bool>()) group.conditions.clock = ClockPolicy::kLocked;
    return group;
  });
}

Json to_json(const tuning_db::TrialResult& result) {
  Json json = {{"state", tuning_db::to_string(result.state)}, {"reason", result.reason}};
  each_number(result, [&](const char* name, const auto& value) {
    if (value) json[name] = *value;
  });
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
    each_number(result, [&](const char* name, auto& value) {
      if (json.contains(name)) json.at(name).get_to(value.emplace());
    });
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
    runtime::DeviceInfo device;
    static_cast<DeviceClass&>(device) = {.name = json.at("name").get<std::string>(),
                                         .cc = json.at("cc").get<int>(),
                                         .sm_count = json.at("sm_count").get<int>(),
                                         .l2_bytes = json.at("l2_bytes").get<int64_t>(),
                                         .mem_bytes = json.at("mem_bytes").get<int64_t>(),
                                         .mem_clock_mhz = json.at("mem_clock_mhz").get<int>(),
                                         .sm_clock_max_mhz = json.at("sm_clock_max_mhz").get<int>(),
                                         .power_limit_w = json.at("power_limit_w").get<int>(),
                                         .mig = json.at("mig").get<bool>()};
    device.ordinal = json.at("ordinal").get<int>();
    device.uuid = json.at("uuid").get<std::string>();
    device.driver_version = json.at("driver_version").get<int>();
    return device;
  });
}

Json to_json(const tuning_db::Accuracy& a) {
  return {a.data, a.tensor, a.sqnr_db, a.cosine, a.rmse};
}

Result<std::vector<tuning_db::Accuracy>> parse_accuracy(const Json& json) {
  return guarded("accuracy", [&]() -> Result<std::vector<tuning_db::Accuracy>> {
    std::vector<tuning_db::Accuracy> accuracy;
    for (const Json& a : json.at("of")) {
      accuracy.push_back({.data = a.at(0).get<std::string>(),
                          .tensor = a.at(1).get<std::string>(),
                          .sqnr_db = a.at(2).get<double>(),
                          .cosine = a.at(3).get<double>(),
                          .rmse = a.at(4).get<double>()});
    }
    return accuracy;
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
