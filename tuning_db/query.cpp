// Reading: trials with their provenance, and which of them count now.
#include <map>
#include <utility>

#include "tuning_db/state.hpp"
#include "tuning_db/trial_rows.hpp"

namespace f8::tuning_db {
namespace {

std::vector<TrialRow> fastest_of_newest(std::vector<IdentifiedRow> rows) {
  const auto is_faster = [](const IdentifiedRow& a, const IdentifiedRow& b) {
    const double x = a.row.result.timing->median_ns;
    const double y = b.row.result.timing->median_ns;
    return x != y ? x < y : a.row.uuid < b.row.uuid;
  };
  rows = newest(std::move(rows));
  std::map<RowGroup, const IdentifiedRow*> fastest;
  for (const IdentifiedRow& r : rows) {
    const IdentifiedRow*& f = fastest[group_of(r)];
    if (f == nullptr || is_faster(r, *f)) f = &r;
  }
  std::vector<TrialRow> result;
  for (IdentifiedRow& r : rows) {
    if (fastest.at(group_of(r)) == &r) result.push_back(std::move(r.row));
  }
  return result;
}

constexpr std::string_view kTerminal = "t.state NOT IN ('planned', 'running')";
constexpr std::string_view kByShape =
    "json_extract(p.dims, '$.n'), json_extract(p.dims, '$.k'), json_extract(p.dims, '$.m')";
constexpr std::string_view kBestFirst =
    "t.state <> 'ok', m.fidelity <> 'final', t.median_ns IS NULL, t.median_ns, t.uuid";

}  // namespace

Result<std::vector<TrialRow>> Database::trials(const Problem& problem) const {
  auto s = F8_TRY(state_->db->prepare(
      f8::format("{} WHERE p.key = ? AND {} ORDER BY {}", select_rows(), kTerminal, kBestFirst)));
  s.bind(problem.key());
  std::vector<TrialRow> rows;
  while (F8_TRY(s.step())) {
    TrialRow row = F8_TRY(read_row(s, state_->layer)).row;
    const Status read = read_accuracy(*state_->db, row.uuid, problem.op, row.result);
    if (!read) return bad_row(state_->layer, "trial", row.uuid, read.error());
    rows.push_back(std::move(row));
  }
  return rows;
}

Result<std::vector<TrialRow>> Database::gemms(Impl impl) const {
  auto s = F8_TRY(state_->db->prepare(f8::format("{} WHERE c.impl = ? AND {} ORDER BY p.key, {}",
                                                 select_rows(), kTerminal, kBestFirst)));
  s.bind(to_string(impl));
  std::vector<TrialRow> rows;
  while (F8_TRY(s.step())) {
    TrialRow row = F8_TRY(read_row(s, state_->layer)).row;
    if (is_gemm(row.problem.op) && !is_grouped(row.problem.op)) rows.push_back(std::move(row));
  }
  return rows;
}

Result<std::vector<TrialRow>> Database::linears(std::string_view recipe, Impl impl, Op op) const {
  auto s = F8_TRY(
      state_->db->prepare(select_rows() +
                          "WHERE p.op = ? AND p.recipe = ? AND c.impl = ? AND t.state = 'ok' "
                          "AND m.fidelity = 'final' ORDER BY " +
                          std::string(kByShape) + ", p.key, d.key, t.uuid"));
  s.bind(to_string(op), recipe, to_string(impl));
  std::vector<IdentifiedRow> rows;
  while (F8_TRY(s.step())) rows.push_back(F8_TRY(read_row(s, state_->layer)));
  return fastest_of_newest(std::move(rows));
}

Result<std::vector<TrialRow>> Database::timed() const {
  auto s = F8_TRY(state_->db->prepare(
      select_rows() +
      "WHERE t.state IN ('ok', 'noisy') AND t.median_ns IS NOT NULL AND m.fidelity = 'final' "
      "ORDER BY p.recipe, p.op, " +
      std::string(kByShape) + ", p.key, t.uuid"));
  std::vector<TrialRow> rows;
  while (F8_TRY(s.step())) rows.push_back(F8_TRY(read_row(s, state_->layer)).row);
  return rows;
}

Result<std::map<std::string, Method>> Database::methods() const {
  auto s = F8_TRY(state_->db->prepare("SELECT key, fidelity, spec FROM method"));
  std::map<std::string, Method> methods;
  while (F8_TRY(s.step())) methods[s.text(0)] = {s.text(1), s.text(2)};
  return methods;
}

Result<std::vector<DeviceClass>> Database::devices(const DeviceClass* asked) const {
  auto s = F8_TRY(state_->db->prepare(
      f8::format("SELECT {} FROM device_class d JOIN device_unit u ON u.class_id = d.id "
                 "JOIN run r ON r.unit_id = u.id "
                 "GROUP BY d.id ORDER BY max(r.started_at) DESC, d.key",
                 kDeviceColumns)));
  std::vector<DeviceClass> devices;
  while (F8_TRY(s.step())) {
    auto device = read_device(s, 0);
    if (!device) return bad_row(state_->layer, "device class", s.view(0), device.error());
    devices.push_back(*std::move(device));
  }
  if (asked != nullptr) sort_by_nearness(devices, *asked);
  return devices;
}

}  // namespace f8::tuning_db
