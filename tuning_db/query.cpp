// Reading: trials with their provenance, the filter's evidence, the table that the runtime takes.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tuning_db/rows.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db {
namespace {

// From a trial t; the columns are what read_row expects.
std::string select_rows() {
  return fmt::format(
      "SELECT t.problem_id, u.class_id, r.toolchain_id, r.method_id, t.uuid, r.uuid, t.state, "
      "t.at, "
      "p.key, c.impl, c.config, c.source_hash, m.key, m.fidelity, {}, {}, {} FROM trial t "
      "JOIN run r ON r.id = t.run_id JOIN problem p ON p.id = t.problem_id "
      "JOIN candidate c ON c.id = t.candidate_id JOIN device_unit u ON u.id = r.unit_id "
      "JOIN device_class d ON d.id = u.class_id JOIN toolchain tc ON tc.id = r.toolchain_id "
      "JOIN method m ON m.id = r.method_id ",
      kDeviceColumns, kToolchainColumns, kResultColumns);
}

std::string describe(const Toolchain& t) {
  return fmt::format("driver {}, CUDA {}, NVRTC {}, cuBLASLt {}, float8 {} ({}{})", t.driver,
                     t.cuda_runtime, t.nvrtc, t.cublaslt, t.tool_version, t.git_sha,
                     t.git_dirty ? ", modified" : "");
}

struct IdentifiedRow {
  int64_t problem = 0, device_class = 0, toolchain = 0, method = 0;  // row ids
  TrialRow row;

  [[nodiscard]] bool is_comparable(const IdentifiedRow& other) const {
    return toolchain == other.toolchain && method == other.method;
  }
};

Result<IdentifiedRow> read_row(const Statement& s, const std::string& layer) {
  constexpr int kDevice = 14;
  constexpr int kToolchain = kDevice + kDeviceColumnCount;
  constexpr int kResult = kToolchain + kToolchainColumnCount;
  IdentifiedRow ids{.problem = s.integer(0),
                    .device_class = s.integer(1),
                    .toolchain = s.integer(2),
                    .method = s.integer(3),
                    .row = {}};
  TrialRow& row = ids.row;
  row.uuid = s.text(4);
  row.run_uuid = s.text(5);
  row.layer = layer;
  const TrialState state = F8_TRY(parse_trial_state(s.text(6)));
  row.at = s.text(7);
  row.problem = F8_TRY(Problem::parse(s.text(8)));
  row.candidate = F8_TRY(read_candidate(s, 9));
  row.method_key = s.text(12);
  row.fidelity = s.text(13);
  row.device = read_device(s, kDevice);
  row.device_name = row.device.name;
  row.toolchain = describe(read_toolchain(s, kToolchain));
  row.result = F8_TRY(read_result(s, kResult, state));
  return ids;
}

// What counts now: for each problem, device class and implementation only rows of the toolchain and
// method measured last. Without this an old row could be best for ever.
using Group = std::tuple<int64_t, int64_t, Impl>;
Group group_of(const IdentifiedRow& r) {
  return {r.problem, r.device_class, r.row.candidate.impl};
}

std::vector<IdentifiedRow> newest(std::vector<IdentifiedRow> rows) {
  const auto is_newer = [](const IdentifiedRow& a, const IdentifiedRow& b) {
    return std::tie(a.row.at, a.row.uuid) > std::tie(b.row.at, b.row.uuid);
  };
  std::map<Group, const IdentifiedRow*> latest;
  for (const IdentifiedRow& r : rows) {
    const IdentifiedRow*& n = latest[group_of(r)];
    if (n == nullptr || is_newer(r, *n)) n = &r;
  }
  std::vector<bool> counts;
  for (const IdentifiedRow& r : rows) counts.push_back(r.is_comparable(*latest.at(group_of(r))));
  std::vector<IdentifiedRow> result;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (counts[i]) result.push_back(std::move(rows[i]));
  }
  return result;
}

std::vector<TrialRow> fastest_of_newest(std::vector<IdentifiedRow> rows) {
  const auto is_faster = [](const IdentifiedRow& a, const IdentifiedRow& b) {
    const double x = a.row.result.timing->median_ns;
    const double y = b.row.result.timing->median_ns;
    return x != y ? x < y : a.row.uuid < b.row.uuid;
  };
  rows = newest(std::move(rows));
  std::map<Group, const IdentifiedRow*> fastest;
  for (const IdentifiedRow& r : rows) {
    const IdentifiedRow*& f = fastest[group_of(r)];
    if (f == nullptr || is_faster(r, *f)) f = &r;
  }
  std::vector<TrialRow> result;
  for (const IdentifiedRow& r : rows) {
    if (fastest.at(group_of(r)) == &r) result.push_back(r.row);
  }
  return result;
}

// From a candidate's JSON: a GEMM configuration, or "h3" for a heuristic.
Result<LinearKernel> table_kernel(const Candidate& c) {
  const auto json = nlohmann::json::parse(c.config, nullptr, false);
  const bool generated = c.impl == Impl::kGenerated;
  if (json.is_object()) {
    const auto found = json.find(generated ? "config" : "heuristic");
    if (found != json.end() && generated && found->is_string()) {
      return LinearKernel{Provider::kGenerated, found->get<std::string>()};
    }
    if (found != json.end() && !generated && found->is_number_integer()) {
      return LinearKernel{Provider::kCublasLt, fmt::format("h{}", found->get<int64_t>())};
    }
  }
  return fail(ErrorCode::kCorrupt, "candidate {} has the configuration {}; expected {}",
              to_string(c.impl), c.config,
              generated ? R"({"config":"..."})" : R"({"heuristic":N})");
}

constexpr std::string_view kTerminal = "t.state NOT IN ('planned', 'running')";
constexpr std::string_view kBestFirst =
    "t.state <> 'ok', m.fidelity <> 'final', t.median_ns IS NULL, t.median_ns, t.uuid";

}  // namespace

Result<std::vector<TrialRow>> Database::trials(const Problem& problem) const {
  auto s = F8_TRY(state_->db->prepare(
      fmt::format("{} WHERE p.key = ? AND {} ORDER BY {}", select_rows(), kTerminal, kBestFirst)));
  s.bind(problem.key());
  std::vector<TrialRow> rows;
  while (F8_TRY(s.step())) rows.push_back(F8_TRY(read_row(s, state_->layer)).row);
  return rows;
}

Result<std::vector<TrialRow>> Database::gemms(Impl impl) const {
  auto s = F8_TRY(state_->db->prepare(
      fmt::format("{} WHERE c.impl = ? AND p.op <> 'linear' AND {} ORDER BY p.key, {}",
                  select_rows(), kTerminal, kBestFirst)));
  s.bind(to_string(impl));
  std::vector<TrialRow> rows;
  while (F8_TRY(s.step())) rows.push_back(F8_TRY(read_row(s, state_->layer)).row);
  return rows;
}

Result<std::vector<TrialRow>> Database::linears(std::string_view recipe, Impl impl) const {
  auto s = F8_TRY(state_->db->prepare(
      select_rows() +
      "WHERE p.op = 'linear' AND p.recipe = ? AND c.impl = ? AND t.state = 'ok' "
      "AND m.fidelity = 'final' ORDER BY p.n, p.k, p.m, p.bias, d.key, t.uuid"));
  s.bind(recipe, to_string(impl));
  std::vector<IdentifiedRow> rows;
  while (F8_TRY(s.step())) rows.push_back(F8_TRY(read_row(s, state_->layer)));
  return fastest_of_newest(std::move(rows));
}

Result<std::vector<DeviceClass>> Database::devices() const {
  auto s = F8_TRY(state_->db->prepare(
      fmt::format("SELECT {} FROM device_class d JOIN device_unit u ON u.class_id = d.id "
                  "JOIN run r ON r.unit_id = u.id "
                  "GROUP BY d.id ORDER BY max(r.started_at) DESC, d.key",
                  kDeviceColumns)));
  std::vector<DeviceClass> devices;
  while (F8_TRY(s.step())) devices.push_back(read_device(s, 0));
  return devices;
}

Result<TuningTable> Database::table() const {
  TuningTable table;
  const std::vector<DeviceClass> known = F8_TRY(devices());
  if (known.empty()) return table;
  table.device = known.front().name;
  // In bf16 cuBLASLt counts where the recipe keeps a GEMM in bf16: there it is the kernel.
  auto s = F8_TRY(state_->db->prepare(
      select_rows() +
      "WHERE d.key = ? AND (c.impl IN ('generated', 'cublaslt', 'float8') OR "
      "(c.impl = 'bf16_cublaslt' AND p.a_dtype = 'bf16')) AND t.state = 'ok' "
      "AND m.fidelity = 'final' ORDER BY p.op = 'linear' DESC, p.key, t.median_ns, t.uuid"));
  s.bind(known.front().key());
  std::vector<IdentifiedRow> rows;
  while (F8_TRY(s.step())) rows.push_back(F8_TRY(read_row(s, state_->layer)));
  rows = newest(std::move(rows));

  struct Linear {
    const IdentifiedRow* row;
    LinearKernels kernels;
  };
  std::map<std::pair<std::string, Shape>, Linear> linears;  // that name their kernels
  for (auto row = rows.begin(); row != rows.end();) {
    const Problem& problem = row->row.problem;
    const auto end = std::find_if(
        row, rows.end(), [&](const IdentifiedRow& other) { return other.problem != row->problem; });
    const auto fastest = row;
    row = end;
    const TrialResult& result = fastest->row.result;
    if (problem.op == Op::kLinear) {
      if (fastest->row.candidate.impl != Impl::kFloat8) continue;
      if (result.ratio) {
        table.add(LinearSpeedup{problem.recipe, problem.shape, result.ratio->ratio,
                                result.ratio->lo, result.ratio->hi});
      }
      if (result.kernels) linears[{problem.recipe, problem.shape}] = {&*fastest, *result.kernels};
      continue;
    }
    // The fastest of all implementations comes first: the library takes part in every sweep.
    KernelChoice choice{
        .problem = problem, .provider = {}, .config = {}, .median_ns = result.timing->median_ns};
    LinearKernel kernel = F8_TRY(table_kernel(fastest->row.candidate));
    const auto linear = linears.find({problem.recipe, problem.shape});
    if (linear != linears.end() && linear->second.row->is_comparable(*fastest)) {
      kernel = linear->second.kernels[static_cast<size_t>(problem.op)];
      for (auto own = fastest; own != end; ++own) {
        if (F8_TRY(table_kernel(own->row.candidate)) != kernel) continue;
        choice.median_ns = own->row.result.timing->median_ns;
        break;
      }
    }
    choice.provider = kernel.provider;
    choice.config = std::move(kernel.config);
    table.add(std::move(choice));
  }
  return table;
}

Status Database::check() const {
  const Connection& db = *state_->db;
  auto integrity = F8_TRY(db.prepare("PRAGMA integrity_check(1)"));
  while (F8_TRY(integrity.step())) {
    if (integrity.text(0) == "ok") continue;
    return fail(ErrorCode::kCorrupt,
                "{}: the database is damaged ({}); restore a copy, or measure into a new file",
                db.label(), integrity.text(0));
  }
  auto foreign = F8_TRY(db.prepare("PRAGMA foreign_key_check"));
  if (F8_TRY(foreign.step())) {
    return fail(ErrorCode::kCorrupt, "{}: row {} of table {} refers to no row of {}", db.label(),
                foreign.integer(1), foreign.text(0), foreign.text(2));
  }
  const auto wrong_key = [&db](std::string_view table, const std::string& key) -> Status {
    return fail(ErrorCode::kCorrupt, "{}: the row of table {} with key {} has another key's fields",
                db.label(), table, key);
  };
  auto device =
      F8_TRY(db.prepare(fmt::format("SELECT d.key, {} FROM device_class d", kDeviceColumns)));
  while (F8_TRY(device.step())) {
    if (device.text(0) != read_device(device, 1).key()) {
      return wrong_key("device_class", device.text(0));
    }
  }
  auto toolchain =
      F8_TRY(db.prepare(fmt::format("SELECT tc.key, {} FROM toolchain tc", kToolchainColumns)));
  while (F8_TRY(toolchain.step())) {
    if (toolchain.text(0) != read_toolchain(toolchain, 1).key()) {
      return wrong_key("toolchain", toolchain.text(0));
    }
  }
  auto method = F8_TRY(db.prepare("SELECT key, fidelity, spec FROM method"));
  while (F8_TRY(method.step())) {
    if (method.text(0) != Method{method.text(1), method.text(2)}.key()) {
      return wrong_key("method", method.text(0));
    }
  }
  auto candidate = F8_TRY(db.prepare("SELECT key, impl, config, source_hash FROM candidate"));
  while (F8_TRY(candidate.step())) {
    if (candidate.text(0) != F8_TRY(read_candidate(candidate, 1)).key()) {
      return wrong_key("candidate", candidate.text(0));
    }
  }
  auto problem = F8_TRY(db.prepare("SELECT key, op, recipe, m, n, k FROM problem"));
  while (F8_TRY(problem.step())) {
    const Problem p = F8_TRY(Problem::parse(problem.text(0)));
    const Shape shape{problem.integer(3), problem.integer(4), problem.integer(5)};
    if (to_string(p.op) != problem.text(1) || p.recipe != problem.text(2) || p.shape != shape) {
      return wrong_key("problem", problem.text(0));
    }
  }
  return {};
}

}  // namespace f8::tuning_db
