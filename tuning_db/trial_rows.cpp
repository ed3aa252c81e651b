// Reading rows of trials: see trial_rows.hpp.
#include "tuning_db/trial_rows.hpp"

#include <map>

#include "tuning_db/validate.hpp"

namespace f8::tuning_db {
namespace {

Result<IdentifiedRow> read_values(const Statement& s) {
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
  const TrialState state = F8_TRY(parse_trial_state(s.text(6)));
  row.at = s.text(7);
  row.problem = F8_TRY(Problem::parse(s.text(8)));
  row.candidate = F8_TRY(read_candidate(s, 9));
  row.method_key = s.text(12);
  row.fidelity = s.text(13);
  row.device = F8_TRY(read_device(s, kDevice));
  row.device_name = row.device.name;
  const Toolchain toolchain = F8_TRY(read_toolchain(s, kToolchain));
  row.toolchain = describe(toolchain);
  row.versions = toolchain.versions();
  row.result = F8_TRY(read_result(s, kResult, state, row.problem.op));
  F8_TRY(validate_uuid(row.uuid));
  F8_TRY(validate_uuid(row.run_uuid));
  F8_TRY(validate_timestamp(row.at));
  return ids;
}

}  // namespace

std::string describe(const Toolchain& t) {
  return f8::format("driver {}, CUDA {}, NVRTC {}, cuBLASLt {}, float8 {} ({}{})", t.driver,
                    t.cuda_runtime, t.nvrtc, t.cublaslt, t.tool_version, t.git_sha,
                    t.git_dirty ? ", modified" : "");
}

std::string select_rows() {
  return f8::format(
      "SELECT t.problem_id, u.class_id, r.toolchain_id, r.method_id, t.uuid, r.uuid, t.state, "
      "t.at, "
      "p.key, c.impl, c.config, c.source_hash, m.key, m.fidelity, {}, {}, {}, {} FROM trial t "
      "JOIN run r ON r.id = t.run_id JOIN problem p ON p.id = t.problem_id "
      "JOIN candidate c ON c.id = t.candidate_id JOIN device_unit u ON u.id = r.unit_id "
      "JOIN device_class d ON d.id = u.class_id JOIN toolchain tc ON tc.id = r.toolchain_id "
      "JOIN method m ON m.id = r.method_id ",
      kDeviceColumns, kToolchainColumns, kResultColumns, kKernelsColumn);
}

Result<IdentifiedRow> read_row(const Statement& s, const std::string& layer) {
  auto row = read_values(s);
  if (!row) return bad_row(layer, "trial", s.view(4), row.error());
  row->row.layer = layer;
  return row;
}

RowGroup group_of(const IdentifiedRow& r) {
  return {r.problem, r.device_class, r.row.candidate.impl};
}

std::vector<IdentifiedRow> newest(std::vector<IdentifiedRow> rows) {
  const auto is_newer = [](const IdentifiedRow& a, const IdentifiedRow& b) {
    return std::tie(a.row.at, a.row.uuid) > std::tie(b.row.at, b.row.uuid);
  };
  std::map<RowGroup, const IdentifiedRow*> latest;
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

}  // namespace f8::tuning_db
