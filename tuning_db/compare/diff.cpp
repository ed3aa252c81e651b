// The difference of two databases: see diff.hpp.
#include "tuning_db/compare/diff.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/text.hpp"
#include "tuning_db/json/json_text.hpp"

namespace f8::tuning_db {
namespace {

using Json = nlohmann::json;

struct Record {
  std::string text;
  std::string value;  // equal values are equal texts
};
using Records = std::map<std::string, Record>;  // by key

// A trial names its run, and a run its device, toolchain and method: the first that fits is it.
constexpr std::string_view kKindsOfLine[] = {"trial", "run", "method", "toolchain", "device"};
constexpr std::string_view kKinds[] = {"device",  "toolchain", "method",  "run",
                                       "problem", "trial",     "decision"};

std::string text_of(const Json& record, const char* name) {
  const auto at = record.find(name);
  if (at == record.end()) return "";
  return at->is_string() ? at->get<std::string>()
                         : at->dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string describe(std::string_view kind, const Json& record) {
  const auto text = [&record](const char* name) { return text_of(record, name); };
  if (kind == "trial") {
    return f8::format("{} {} {} {}", text("problem"), text("impl"), text("config"), text("state"));
  }
  if (kind == "run") return f8::format("started at {}", text("started_at"));
  if (kind == "method") return text("fidelity");
  if (kind == "toolchain") {
    return f8::format("driver {}, CUDA {}, cuBLASLt {}, float8 {} ({})", text("driver"),
                      text("cuda_runtime"), text("cublaslt"), text("tool_version"),
                      text("git_sha"));
  }
  return f8::format("{}, {} W", text("name"), text("power_limit_w"));
}

Result<std::map<std::string_view, Records>> records_of(const Database& database) {
  const std::string lines = F8_TRY(database.to_jsonl());
  std::map<std::string_view, Records> records;
  std::string_view rest = lines;
  (void)take_until(rest, '\n');  // the header
  while (!rest.empty()) {
    const std::string_view line = take_until(rest, '\n');
    const Json record = F8_TRY(parse_json(line, "a record"));
    for (const std::string_view kind : kKindsOfLine) {
      const std::string name(kind);
      if (!record.contains(name)) continue;
      records[kind][text_of(record, name.c_str())] = {describe(kind, record), std::string(line)};
      if (kind == "trial") records["problem"][text_of(record, "problem")] = {};
      break;
    }
  }
  const TuningTable table = F8_TRY(database.table());
  for (const KernelChoice& choice : table.choices()) {
    const std::string kernel =
        f8::format("{} {}", to_string(choice.kernel.provider), config_text(choice.kernel));
    records["decision"][choice.problem.key()] = {kernel, kernel};
  }
  return records;
}

KindDiff diff_of(std::string_view kind, const Records& a, const Records& b) {
  KindDiff result;
  result.kind = kind;
  result.in_a = a.size();
  result.in_b = b.size();
  for (const auto& [key, record] : a) {
    const auto other = b.find(key);
    if (other == b.end()) {
      result.only_a.push_back({key, record.text});
    } else if (record.value != other->second.value) {
      result.changed.push_back({key, f8::format("{} -> {}", record.text, other->second.text)});
    }
  }
  for (const auto& [key, record] : b) {
    if (!a.contains(key)) result.only_b.push_back({key, record.text});
  }
  return result;
}

}  // namespace

Result<std::vector<KindDiff>> diff(const Database& a, const Database& b) {
  auto in_a = F8_TRY(records_of(a));
  auto in_b = F8_TRY(records_of(b));
  std::vector<KindDiff> kinds;
  for (const std::string_view kind : kKinds) kinds.push_back(diff_of(kind, in_a[kind], in_b[kind]));
  return kinds;
}

}  // namespace f8::tuning_db
