// The text form of a database, made to be kept in git.
//
//   file      := header { device } { toolchain } { method } { run } { trial }   one object a line
//   header    := {"float8_tuning_db":3}
//   device    := {"device":KEY, "name":…, "cc":…, …}                  each once, sorted by key
//   toolchain := {"toolchain":KEY, "driver":…, …}                     each once, sorted by key
//   method    := {"method":KEY, "fidelity":…, "spec":{…}}             each once, sorted by key
//   run       := {"run":UUID, "device":KEY, "unit":HASH, "toolchain":KEY, "method":KEY, …}
//                                                                     sorted by started_at, uuid
//   trial     := {"trial":UUID, "run":UUID, "problem":KEY, "impl":…, "config":{…}, "state":…, …}
//                        of attention with "accuracy":[{"data":…, "tensor":…, "sqnr_db":…, …}, …]
//                        sorted by recipe, op, n, k, m, key, impl, config, source_hash, uuid
//
// Another program than float8-tune, which cannot hash, writes a label, "@" and a name, in the place of the KEY of
// a record of its own, and in the runs that refer to it. A label is good for the whole file.
//
// Names within an object are sorted, absent values are left out, numbers are the shortest text that
// reads back to the same double. Equal data gives equal bytes. A reader takes the records in any
// order and ignores blank lines, so that files can be joined line by line. It reads older formats too:
// 1, whose trials have a screening's time and a linear's kernels in the words of "reason", and 2, whose
// problem keys are spelled as in version 0.1.
#include <charconv>
#include <nlohmann/json.hpp>

#include "base/text.hpp"
#include "tuning_db/json/json_text.hpp"
#include "tuning_db/rows.hpp"
#include "tuning_db/snapshot.hpp"
#include "tuning_db/validate.hpp"

namespace f8::tuning_db {
namespace {

using Json = nlohmann::json;

constexpr int kOldestFormat = 1;

struct FileKind {
  std::string_view begin;
  std::string_view is;
};
constexpr FileKind kExport = {
    "{\"float8_tuning_db\"",
    "an export of a database; `float8-tune db import` adds its trials to one"};
constexpr FileKind kOtherKinds[] = {
    {std::string_view("SQLite format 3\0", 16),
     "a database; `float8-tune db merge` adds its trials to another one"},
    {"float8-table ",
     "a tuning table, for a trainer to load; it has no trials, so import the `float8-tune db "
     "export` of the database that it was made from"},
    {"float8-filter ",
     "a filter file, for a trainer to load; it has no trials, so import what `float8-tune db "
     "export` wrote"}};

// Calls visit(name, member) for every field of a record; writing and reading share the list.
template <class D, class Visit>
void fields_of_device(D& d, Visit&& visit) {
  visit("name", d.name);
  visit("cc", d.cc);
  visit("sm_count", d.sm_count);
  visit("l2_bytes", d.l2_bytes);
  visit("mem_bytes", d.mem_bytes);
  visit("mem_clock_mhz", d.mem_clock_mhz);
  visit("sm_clock_max_mhz", d.sm_clock_max_mhz);
  visit("power_limit_w", d.power_limit_w);
  visit("mig", d.mig);
}

template <class T, class Visit>
void fields_of_toolchain(T& t, Visit&& visit) {
  visit("driver", t.driver);
  visit("cuda_runtime", t.cuda_runtime);
  visit("nvrtc", t.nvrtc);
  visit("cublaslt", t.cublaslt);
  visit("nccl", t.nccl);
  visit("tool_version", t.tool_version);
  visit("git_sha", t.git_sha);
  visit("git_dirty", t.git_dirty);
  visit("codegen_abi", t.codegen_abi);
}

template <class R, class Visit>
void fields_of_run(R& r, Visit&& visit) {
  visit("run", r.uuid);
  visit("started_at", r.started_at);
  visit("seed", r.seed);
  visit("device", r.device_key);
  visit("unit", r.unit_hash);
  visit("toolchain", r.toolchain_key);
  visit("method", r.method_key);
}

template <class T, class Visit>
void fields_of_timing(T& t, Visit&& visit) {
  visit("samples", t.n);
  visit("samples_dropped", t.n_dropped);
  visit("median_ns", t.median_ns);
  visit("mad_ns", t.mad_ns);
  visit("p05_ns", t.p05_ns);
  visit("p95_ns", t.p95_ns);
  visit("ci_lo_ns", t.ci_lo_ns);
  visit("ci_hi_ns", t.ci_hi_ns);
}

template <class A, class Visit>
void fields_of_accuracy(A& a, Visit&& visit) {
  visit("data", a.data);
  visit("tensor", a.tensor);
  visit("sqnr_db", a.sqnr_db);
  visit("cosine", a.cosine);
  visit("rmse", a.rmse);
}

template <class R, class Visit>
void optional_fields_of_result(R& r, Visit&& visit) {
  visit("predicted_ns", r.predicted_ns);
  visit("rel_err", r.rel_err);
  visit("sqnr_db", r.sqnr_db);
  visit("compile_ms", r.compile_ms);
  visit("registers", r.registers);
  visit("smem_bytes", r.smem_bytes);
  visit("spill_bytes", r.spill_bytes);
  visit("sm_mhz_mean", r.sm_mhz_mean);
  visit("sm_mhz_min", r.sm_mhz_min);
  visit("power_w", r.power_w);
  visit("temp_c", r.temp_c);
  visit("clock_event_mask", r.clock_event_mask);
  visit("screened_ns", r.screened_ns);
}

// Folders of the machine that measured say nothing to others.
std::string without_folders(const std::string& argument) {
  const size_t value = argument.find('=');
  const size_t start = value == std::string::npos ? 0 : value + 1;
  if (start >= argument.size() || argument[start] != '/') return argument;
  return argument.substr(0, start) + argument.substr(argument.rfind('/') + 1);
}

Json exported_argv(const std::string& argv) {
  Json json = parse_json(argv, "argv").value_or(nullptr);
  if (!json.is_array()) return Json::array();
  for (Json& argument : json) {
    if (argument.is_string()) argument = without_folders(argument.get<std::string>());
  }
  return json;
}

// A row's text; null where it is no JSON, which check_json refuses before anything is written.
Json stored_json(const std::string& text) {
  return parse_json(text, "it").value_or(nullptr);
}

// Reads the members of one object and remembers the first thing that is wrong.
class Reader {
 public:
  explicit Reader(const Json& json) : json_(json) {}

  template <class T>
  void operator()(const char* name, T& out) {
    const auto found = json_.find(name);
    if (found == json_.end()) return complain(name, "is missing");
    take(name, *found, out);
  }
  template <class T>
  void operator()(const char* name, std::optional<T>& out) {
    const auto found = json_.find(name);
    if (found != json_.end()) take(name, *found, out.emplace());
  }
  [[nodiscard]] bool has(const char* name) const { return json_.contains(name); }
  // A value of any kind, as canonical JSON.
  void raw(const char* name, std::string& out) {
    const auto found = json_.find(name);
    if (found == json_.end()) return complain(name, "is missing");
    out = dump(*found);
  }
  void complain(std::string_view name, std::string_view what) {
    if (error_.empty()) error_ = f8::format("\"{}\" {}", name, what);
  }
  [[nodiscard]] const std::string& error() const { return error_; }

 private:
  void take(const char* name, const Json& json, std::string& out) {
    if (!json.is_string()) return complain(name, "is not a string");
    out = json.get<std::string>();
  }
  void take(const char* name, const Json& json, bool& out) {
    if (!json.is_boolean()) return complain(name, "is neither true nor false");
    out = json.get<bool>();
  }
  void take(const char* name, const Json& json, double& out) {
    if (!json.is_number()) return complain(name, "is not a number");
    out = json.get<double>();
  }
  template <std::integral T>
  void take(const char* name, const Json& json, T& out) {
    if (!json.is_number_integer()) return complain(name, "is not an integer");
    // Unsigned in the text may be above the signed range, and the other way round.
    const bool fits = json.is_number_unsigned() ? std::in_range<T>(json.get<uint64_t>())
                                                : std::in_range<T>(json.get<int64_t>());
    if (!fits) return complain(name, "is out of range");
    out = json.get<T>();
  }

  const Json& json_;
  std::string error_;
};

struct Writer {
  Json& json;
  template <class T>
  void operator()(const char* name, const T& value) {
    json[name] = value;
  }
  template <class T>
  void operator()(const char* name, const std::optional<T>& value) {
    if (value) json[name] = *value;
  }
};

// The key that the record carries must be the key of what it says, or a label.
void check_key(Reader& read, const char* name, const std::string& actual, Snapshot& snapshot) {
  std::string said;
  read(name, said);
  if (!read.error().empty()) return;
  if (said.starts_with('@')) {
    const auto& key = snapshot.labels.emplace(said, actual).first->second;
    if (key != actual) read.complain(name, "is the label of another record too");
  } else if (said != actual) {
    read.complain(name, "is not the key of this record's fields; it was changed by hand");
  }
}

template <class Record>
void check_valid(Reader& read, const char* name, const Record& record) {
  const Status valid = validate(record);
  if (!valid) read.complain(name, "is of no use: " + valid.error().message);
}

void parse_device(Reader& read, Snapshot& snapshot) {
  DeviceClass d;
  fields_of_device(d, read);
  if (has_control(d.name)) read.complain("name", "has control characters");
  check_key(read, "device", key(d), snapshot);
  check_valid(read, "device", d);
  snapshot.devices.push_back(std::move(d));
}

void parse_toolchain(Reader& read, Snapshot& snapshot) {
  Toolchain t;
  fields_of_toolchain(t, read);
  check_key(read, "toolchain", t.key(), snapshot);
  check_valid(read, "toolchain", t);
  snapshot.toolchains.push_back(std::move(t));
}

void parse_method(Reader& read, Snapshot& snapshot) {
  Method m;
  read("fidelity", m.fidelity);
  read.raw("spec", m.spec);
  check_key(read, "method", m.key(), snapshot);
  check_valid(read, "method", m);
  snapshot.methods.push_back(std::move(m));
}

void parse_run(Reader& read, Snapshot& snapshot) {
  RunRecord r;
  fields_of_run(r, read);
  read.raw("argv", r.argv);
  check_valid(read, "run", r);
  snapshot.runs.push_back(std::move(r));
}

// {PART:KERNEL, ...}, for each part of the operation.
void parse_kernels(const Json& json, Reader& read, TrialRecord& trial) {
  const std::span<const std::string_view> parts = spec_of(trial.problem.op).parts;
  if (!json.is_object() || json.size() != parts.size()) {
    return read.complain("kernels", f8::format("is not of the {} parts of {}", parts.size(),
                                               to_string(trial.problem.op)));
  }
  for (const std::string_view part : parts) {
    const auto found = json.find(part);
    const auto kernel = found != json.end() && found->is_string()
                            ? parse_part_kernel(part, found->get<std::string>())
                            : fail(ErrorCode::kCorrupt, "{} is missing", part);
    if (!kernel) return read.complain("kernels", "is none: " + kernel.error().message);
    trial.result.kernels.push_back(*kernel);
  }
}

// [{"data":…, "tensor":…, "sqnr_db":…, "cosine":…, "rmse":…}, ...]
void parse_accuracy(const Json& json, Reader& read, TrialRecord& trial) {
  if (!json.is_array()) return read.complain("accuracy", "is not a list");
  for (const Json& one : json) {
    Reader own(one);
    Accuracy& a = trial.result.accuracy.emplace_back();
    if (one.is_object()) fields_of_accuracy(a, own);
    if (!one.is_object()) own.complain("accuracy", "has an entry that is no object");
    if (!own.error().empty()) return read.complain("accuracy", "is of no use: " + own.error());
  }
}

void parse_trial(const Json& json, Reader& read, Snapshot& snapshot) {
  TrialRecord t;
  std::string key, state, impl;
  read("trial", t.uuid);
  read("run", t.run_uuid);
  read("at", t.at);
  read("attempt", t.attempt);
  read("problem", key);
  read("state", state);
  read("impl", impl);
  read.raw("config", t.candidate.config);
  if (read.has("source_hash")) read("source_hash", t.candidate.source_hash);
  if (read.has("reason")) read("reason", t.result.reason);
  if (read.has("cubin_hash")) read("cubin_hash", t.result.cubin_hash);
  optional_fields_of_result(t.result, read);
  if (read.has("samples")) fields_of_timing(t.result.timing.emplace(), read);
  if (read.has("pair_ratio")) {
    Ratio& ratio = t.result.ratio.emplace();
    if (read.has("pair_uuid")) read("pair_uuid", ratio.pair_uuid);
    read("pair_ratio", ratio.ratio);
    read("pair_lo", ratio.lo);
    read("pair_hi", ratio.hi);
  }
  if (!read.error().empty()) return;
  const auto known = parse_impl(impl);
  if (!known) return read.complain("impl", "is of no use: " + known.error().message);
  t.candidate.impl = *known;
  auto problem = Problem::parse(key);
  if (!problem) return read.complain("problem", "is not a problem key: " + problem.error().message);
  t.problem = *std::move(problem);
  if (read.has("kernels")) parse_kernels(json["kernels"], read, t);
  if (read.has("accuracy")) parse_accuracy(json["accuracy"], read, t);
  const auto parsed = parse_trial_state(state);
  if (!parsed) return read.complain("state", "is " + quote(state) + ", which is no state");
  t.result.state = *parsed;
  take_data_from_reason(t.result);
  check_valid(read, "trial", t);
  snapshot.trials.push_back(std::move(t));
}

void parse_record(const Json& json, Reader& read, Snapshot& snapshot) {
  // A run names its device and a trial its run, so the most special name decides.
  if (json.contains("trial")) return parse_trial(json, read, snapshot);
  if (json.contains("run")) return parse_run(read, snapshot);
  if (json.contains("method")) return parse_method(read, snapshot);
  if (json.contains("toolchain")) return parse_toolchain(read, snapshot);
  if (json.contains("device")) return parse_device(read, snapshot);
  read.complain("trial", "or run, method, toolchain, device: none of these names its kind");
}

Status check_header(const Json& json, std::string_view name, size_t line) {
  const auto format = json.find("float8_tuning_db");
  if (format == json.end() || !format->is_number_integer()) {
    return fail(
        ErrorCode::kCorrupt,
        "{}:{}: not a float8 tuning export (its first line is {{\"float8_tuning_db\":{}}}); "
        "`float8-tune db export` writes one",
        name, line, kExportFormat);
  }
  if (*format >= kOldestFormat && *format <= kExportFormat) return {};
  return fail(ErrorCode::kUnsupported,
              "{}:{}: its format is {}, this program knows {}; use the newer float8 that wrote it",
              name, line, dump(*format), kExportFormat);
}

}  // namespace

std::string to_json_line(const DeviceClass& device) {
  Json json{{"device", key(device)}};
  fields_of_device(device, Writer{json});
  return dump(json);
}

std::string to_json_line(const Toolchain& toolchain) {
  Json json{{"toolchain", toolchain.key()}};
  fields_of_toolchain(toolchain, Writer{json});
  return dump(json);
}

std::string to_json_line(const Method& method) {
  return dump(Json{
      {"method", method.key()}, {"fidelity", method.fidelity}, {"spec", stored_json(method.spec)}});
}

std::string to_json_line(const RunRecord& run) {
  Json json{{"argv", exported_argv(run.argv)}};
  fields_of_run(run, Writer{json});
  return dump(json);
}

std::string to_json_line(const TrialRecord& trial) {
  const TrialResult& result = trial.result;
  Json json{{"trial", trial.uuid},
            {"run", trial.run_uuid},
            {"at", trial.at},
            {"attempt", trial.attempt},
            {"problem", trial.problem.key()},
            {"impl", to_string(trial.candidate.impl)},
            {"config", stored_json(trial.candidate.config)},
            {"state", to_string(result.state)}};
  if (!trial.candidate.source_hash.empty()) json["source_hash"] = trial.candidate.source_hash;
  if (!result.reason.empty()) json["reason"] = result.reason;
  if (!result.cubin_hash.empty()) json["cubin_hash"] = result.cubin_hash;
  optional_fields_of_result(result, Writer{json});
  if (result.timing) fields_of_timing(*result.timing, Writer{json});
  if (result.ratio) {
    if (!result.ratio->pair_uuid.empty()) json["pair_uuid"] = result.ratio->pair_uuid;
    json["pair_ratio"] = result.ratio->ratio;
    json["pair_lo"] = result.ratio->lo;
    json["pair_hi"] = result.ratio->hi;
  }
  for (const Accuracy& a : result.accuracy) {
    fields_of_accuracy(a, Writer{json["accuracy"].emplace_back(Json::object())});
  }
  for (const PartKernel& kernel : result.kernels) json["kernels"][kernel.part] = to_string(kernel);
  return dump(json);
}

Status check_json(const Snapshot& snapshot) {
  for (const Method& m : snapshot.methods) F8_TRY(parse_json(m.spec, "the spec of a method"));
  for (const TrialRecord& t : snapshot.trials) {
    F8_TRY(
        parse_json(t.candidate.config, f8::format("the configuration of trial {}", quote(t.uuid))));
  }
  return {};
}

std::string_view known_as(std::string_view begin) {
  if (begin.starts_with(kExport.begin)) return kExport.is;
  for (const FileKind& kind : kOtherKinds) {
    if (begin.starts_with(kind.begin)) return kind.is;
  }
  return {};
}

Result<Snapshot> parse_jsonl(std::string_view text, std::string_view name) {
  const std::string_view is = known_as(text);
  if (!is.empty() && is != kExport.is) {
    return fail(ErrorCode::kInvalidArgument, "{} is {}", name, is);
  }
  Snapshot snapshot;
  bool has_header = false;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = text.find('\n');
    const std::string_view record = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (record.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto parsed = parse_json(record, "it");
    if (!parsed || !parsed->is_object()) {
      return fail(ErrorCode::kCorrupt, "{}:{}: not a JSON object{}; is the file cut off?", name,
                  line, parsed ? "" : ": " + parsed.error().message);
    }
    const Json& json = *parsed;
    if (!has_header || json.contains("float8_tuning_db")) {
      F8_TRY(check_header(json, name, line));
      has_header = true;
      continue;
    }
    Reader read(json);
    parse_record(json, read, snapshot);
    if (!read.error().empty()) {
      return fail(ErrorCode::kCorrupt, "{}:{}: {}; export the database again", name, line,
                  read.error());
    }
  }
  if (!has_header) {
    return fail(ErrorCode::kCorrupt,
                "{}: no records, not even the header of an export; export the database again",
                name);
  }
  resolve_labels(snapshot);
  return snapshot;
}

}  // namespace f8::tuning_db
