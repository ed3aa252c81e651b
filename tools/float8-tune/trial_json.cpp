#include "tools/float8-tune/trial_json.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "tuning_db/json/json_text.hpp"

namespace f8::cli {
namespace {

// The configuration as JSON; where it is none, its beginning as a string.
Json config_json(const tuning_db::Candidate& candidate) {
  const auto parsed = tuning_db::parse_json(candidate.config, "it");
  return parsed ? Json(*parsed) : Json(quote(candidate.config));
}

template <class T>
void add(Json& json, const char* name, const std::optional<T>& value) {
  if (value) json[name] = *value;
}

void add(Json& json, const char* name, const std::optional<double>& value) {
  if (value) json[name] = rounded(*value);
}

}  // namespace

std::string candidate_text(const tuning_db::Candidate& candidate) {
  const std::string impl(to_string(candidate.impl));
  if (const auto config = candidate.kernel_config()) return impl + " " + *config;
  const Json config = config_json(candidate);
  if (!config.is_object() || config.empty()) return impl;
  return impl + " " + quote(config.dump(-1, ' ', true, Json::error_handler_t::replace));
}

void add_verdict(Json& json, const tuning_db::FilterDecision& decision) {
  json["convert"] = decision.convert;
  json["reason"] = decision.reason;
  json["evidence"] = to_string(decision.evidence);
  add_interval(json, "speedup", decision.speedup, decision.lo, decision.hi);
  json["speedup_known"] = decision.has_estimate();
}

void add_experts(Json& json, const tuning_db::FilterDecision& decision) {
  const NamedLinear& layer = decision.layer;
  if (!layer.is_experts()) return;
  json["experts"] = layer.groups.experts;
  json["skew"] = layer.groups.skew;
  json["parts"] = Json::array();
  for (const tuning_db::ExpertPart& part : decision.parts) {
    const Shape s = part.linear.shape;
    Json one = {{"name", part.linear.name}, {"m", s.m}, {"n", s.n}, {"k", s.k}};
    one["evidence"] = to_string(part.evidence);
    add_interval(one, "speedup", part.speedup.speedup, part.speedup.lo, part.speedup.hi);
    one["bf16_us"] = rounded(part.bf16_ns / 1e3);
    json["parts"].push_back(std::move(one));
  }
}

Json wire_json(const tuning_db::WireShare& share) {
  Json json = {{"bf16_us", rounded(share.bf16_us, 4)},
               {"fp8_us", rounded(share.fp8_us, 4)},
               {"bf16_exposed_us", rounded(share.bf16_exposed_us, 4)},
               {"fp8_exposed_us", rounded(share.fp8_exposed_us, 4)},
               {"compute_evidence", to_string(share.compute_evidence)}};
  add_interval(json, "compute_speedup", share.compute.speedup, share.compute.lo, share.compute.hi);
  return json;
}

Json ranks_json(const tuning_db::WireCost& wire) {
  const tuning_db::RankLayout& layout = wire.layout();
  const tuning_db::WireModel& model = wire.model();
  return {{"fsdp", layout.fsdp.ranks},
          {"tp", layout.tp.ranks},
          {"hosts", layout.hosts},
          {"network_gbit_per_s", rounded(8 * model.network.gb_per_s)},
          {"is_prediction", wire.is_prediction()},
          {"half_width", rounded(model.half_width(), 3)},
          {"source", model.source},
          {"date", model.date}};
}

void add_groups(Json& row, const Problem& problem) {
  const auto [experts, skew] = problem.groups();
  if (experts == 0) return;
  row["experts"] = experts;
  row["skew"] = skew;
}

std::string mnk_of(const Problem& problem) {
  if (is_grouped(problem.op) || problem.op == Op::kMlp) {
    return to_string(problem.dims, spec_of(problem.op).dims);
  }
  const Shape s = problem.shape();
  return f8::format("{},{},{}", s.m, s.n, s.k);
}

Json problem_json(const Problem& problem) {
  Json json = {
      {"problem", problem.key()}, {"op", to_string(problem.op)}, {"recipe", problem.recipe}};
  const std::span<const DimSpec> dims = spec_of(problem.op).dims;
  for (size_t i = 0; i < dims.size(); ++i) json[std::string(dims[i].name)] = problem.dims.sizes[i];
  return json;
}

Json accuracy_json(const std::vector<tuning_db::Accuracy>& accuracy) {
  Json json = Json::array();
  for (const tuning_db::Accuracy& a : accuracy) {
    json.push_back({{"data", a.data},
                    {"tensor", a.tensor},
                    {"sqnr_db", rounded(a.sqnr_db, 4)},
                    {"cosine", rounded(a.cosine, 8)},
                    {"rmse", rounded(a.rmse, 4)}});
  }
  return json;
}

std::string accuracy_text(const std::vector<tuning_db::Accuracy>& accuracy, bool color) {
  std::vector<std::string> kinds, tensors;
  const auto keep = [](std::vector<std::string>& names, const std::string& name) {
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  };
  for (const tuning_db::Accuracy& a : accuracy) {
    keep(kinds, a.data);
    keep(tensors, a.tensor);
  }
  std::vector<Table::Column> columns = {{"SQNR in dB", Table::Align::kLeft}};
  for (const std::string& tensor : tensors) columns.push_back({tensor});
  Table table(std::move(columns));
  for (const std::string& kind : kinds) {
    std::vector<std::string> cells = {kind};
    for (const std::string& tensor : tensors) {
      const auto* found = find_accuracy(accuracy, kind, tensor);
      cells.push_back(found == nullptr ? "-" : f8::format("{:.1f}", found->sqnr_db));
    }
    table.add(cells);
  }
  return table.text(color);
}

void add_us(Json& json, const tuning_db::TrialResult& result) {
  if (!result.timing) return;
  const tuning_db::Timing& t = *result.timing;
  add_interval(json, "us", t.median_ns / 1e3, t.ci_lo_ns / 1e3, t.ci_hi_ns / 1e3);
}

Json trial_json(const tuning_db::TrialRow& row) {
  const tuning_db::TrialResult& result = row.result;
  const Json config = config_json(row.candidate);
  Json json = {{"uuid", row.uuid},
               {"impl", to_string(row.candidate.impl)},
               {"config", config},
               {"state", tuning_db::to_string(result.state)}};
  if (result.timing) {
    const tuning_db::Timing& t = *result.timing;
    json["median_us"] = rounded(t.median_ns / 1e3);
    json["ci_lo_us"] = rounded(t.ci_lo_ns / 1e3);
    json["ci_hi_us"] = rounded(t.ci_hi_ns / 1e3);
    json["mad_us"] = rounded(t.mad_ns / 1e3);
    json["p05_us"] = rounded(t.p05_ns / 1e3);
    json["p95_us"] = rounded(t.p95_ns / 1e3);
    json["samples"] = t.n;
    json["tflops"] = rounded(tflops_of(row.problem, t));
  }
  if (const auto& ratio = result.ratio) {
    add_interval(json, "speedup", ratio->ratio, ratio->lo, ratio->hi);
  }
  add(json, "rel_err", result.rel_err);
  add(json, "sqnr_db", result.sqnr_db);
  add(json, "registers", result.registers);
  add(json, "spill_bytes", result.spill_bytes);
  add(json, "sm_mhz_mean", result.sm_mhz_mean);
  add(json, "power_w", result.power_w);
  add(json, "temp_c", result.temp_c);
  add(json, "clock_event_mask", result.clock_event_mask);
  if (result.screened_ns) json["screened_us"] = rounded(*result.screened_ns / 1e3);
  for (const tuning_db::PartKernel& kernel : result.kernels) {
    json["kernels"][kernel.part] = to_string(kernel);
  }
  if (!result.accuracy.empty()) json["accuracy"] = accuracy_json(result.accuracy);
  if (!result.reason.empty()) json["reason"] = result.reason;
  json["provenance"] = {{"database", row.layer},
                        {"device", row.device_name},
                        {"toolchain", row.toolchain},
                        {"method", row.method_key},
                        {"fidelity", row.fidelity},
                        {"run", row.run_uuid},
                        {"at", row.at}};
  return json;
}

}  // namespace f8::cli
