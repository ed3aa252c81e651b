// Writing a sweep: runs, and the life of a trial from planned over running to a terminal state.
// Every public call is one transaction, so kill -9 loses at most the trial that was being measured.
#include <set>

#include "tuning_db/file/owner.hpp"
#include "tuning_db/rows.hpp"
#include "tuning_db/state.hpp"
#include "tuning_db/validate.hpp"

namespace f8::tuning_db {
namespace {

struct Run {
  int64_t id = 0;
  std::string state, owner;
};

Result<Run> find_run(const Connection& db, std::string_view uuid) {
  auto statement = F8_TRY(db.prepare("SELECT id, state, owner FROM run WHERE uuid = ?"));
  if (!F8_TRY(statement.bind(uuid).step())) {
    return fail(ErrorCode::kNotFound,
                "{}: no run {}; `float8-tune resume` without one takes the last", db.label(), uuid);
  }
  return Run{statement.integer(0), statement.text(1), statement.text(2)};
}

constexpr std::string_view kRunInfo =
    "SELECT r.id, r.uuid, r.argv, r.state, r.started_at, r.owner, count(t.id), "
    "count(t.id) FILTER (WHERE t.state NOT IN ('planned', 'running')) "
    "FROM run r LEFT JOIN trial t ON t.run_id = r.id ";

Result<RunInfo> read_run_info(const Connection& db, const Statement& s) {
  RunInfo info{.id = s.integer(0),
               .uuid = s.text(1),
               .argv = s.text(2),
               .state = s.text(3),
               .started_at = s.text(4),
               .planned = s.integer(6),
               .done = s.integer(7)};
  for (const Status& valid : {validate_uuid(info.uuid), validate_timestamp(info.started_at)}) {
    if (!valid) return bad_row(db.label(), "run", info.uuid, valid.error());
  }
  if (info.state == "running" && !is_living(s.text(5))) info.state = "crashed";
  return info;
}

Result<PendingTrial> read_pending(const Statement& s) {
  const Problem problem = F8_TRY(Problem::parse(s.text(3)));
  const Candidate candidate = F8_TRY(read_candidate(s, 4));
  F8_TRY(validate_uuid(s.view(1)));
  return PendingTrial{.id = s.integer(0),
                      .uuid = s.text(1),
                      .key = {problem, candidate},
                      .attempt = static_cast<int>(s.integer(2))};
}

struct RunOrigin {
  DeviceClass device;
  Toolchain toolchain;
  Method method;
  std::string unit_hash;
};

Result<RunOrigin> origin_of(const Connection& db, std::string_view uuid) {
  F8_TRY(find_run(db, uuid));
  auto s = F8_TRY(db.prepare(
      f8::format("SELECT {}, {}, m.fidelity, m.spec, u.uuid_hash FROM run r "
                 "JOIN device_unit u ON u.id = r.unit_id JOIN device_class d ON d.id = u.class_id "
                 "JOIN toolchain tc ON tc.id = r.toolchain_id JOIN method m ON m.id = r.method_id "
                 "WHERE r.uuid = ?",
                 kDeviceColumns, kToolchainColumns)));
  F8_TRY(s.bind(uuid).step());
  const int rest = kDeviceColumnCount + kToolchainColumnCount;
  return RunOrigin{.device = F8_TRY(read_device(s, 0)),
                   .toolchain = F8_TRY(read_toolchain(s, kDeviceColumnCount)),
                   .method = {s.text(rest), s.text(rest + 1)},
                   .unit_hash = s.text(rest + 2)};
}

}  // namespace

Result<RunInfo> Database::begin_run(const std::vector<std::string>& argv, uint64_t seed,
                                    const DeviceClass& device, std::string_view unit_uuid,
                                    const Toolchain& toolchain, const Method& method,
                                    const std::vector<TrialKey>& trials) {
  F8_TRY(state_->require_writable());
  Connection& db = *state_->db;
  auto transaction = F8_TRY(Transaction::begin(db));
  KeyedRows rows(db);
  const int64_t class_id = F8_TRY(rows.device_class(device));
  const int64_t unit_id = F8_TRY(rows.device_unit(class_id, hash_unit(unit_uuid)));
  const int64_t toolchain_id = F8_TRY(rows.toolchain(toolchain));
  const int64_t method_id = F8_TRY(rows.method(method));

  const std::string uuid = new_uuid();
  const std::string now = timestamp();
  auto run = F8_TRY(
      db.prepare("INSERT INTO run (uuid, argv, seed, unit_id, toolchain_id, method_id, started_at, "
                 "state, owner) VALUES (?, ?, ?, ?, ?, ?, ?, 'running', ?)"));
  F8_TRY(run.bind(uuid, dump(argv), static_cast<int64_t>(seed), unit_id, toolchain_id, method_id,
                  now, this_owner())
             .run());
  const int64_t run_id = db.last_id();

  auto trial =
      F8_TRY(db.prepare("INSERT INTO trial (uuid, run_id, problem_id, candidate_id, state, at) "
                        "VALUES (?, ?, ?, ?, 'planned', ?)"));
  // Several strategies may propose one trial; it is measured once.
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const TrialKey& key : trials) {
    const int64_t problem_id = F8_TRY(rows.problem(key.problem));
    const int64_t candidate_id = F8_TRY(rows.candidate(key.candidate));
    if (!seen.emplace(problem_id, candidate_id).second) continue;
    F8_TRY(trial.bind(new_uuid(), run_id, problem_id, candidate_id, now).run());
  }
  F8_TRY(transaction.commit());
  return RunInfo{.id = run_id,
                 .uuid = uuid,
                 .argv = dump(argv),
                 .state = "running",
                 .started_at = now,
                 .planned = static_cast<int64_t>(seen.size())};
}

Result<std::vector<PendingTrial>> Database::resume_run(std::string_view run_uuid) {
  F8_TRY(state_->require_writable());
  Connection& db = *state_->db;
  auto transaction = F8_TRY(Transaction::begin(db));
  const Run run = F8_TRY(find_run(db, run_uuid));
  if (run.state == "imported") {
    return fail(ErrorCode::kInvalidArgument,
                "{}: run {} was imported; resume it in the file where it began", db.label(),
                run_uuid);
  }
  if (run.state == "running" && is_living_other(run.owner)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: run {} is being measured by process {}; wait for it or stop it", db.label(),
                run_uuid, owner_pid(run.owner));
  }
  auto quarantine =
      F8_TRY(db.prepare("UPDATE trial SET state = 'quarantined', attempt = attempt + 1, at = ?, "
                        "reason = 'the measuring process died twice in this trial' "
                        "WHERE run_id = ? AND state = 'running' AND attempt >= 1"));
  F8_TRY(quarantine.bind(timestamp(), run.id).run());
  auto retry =
      F8_TRY(db.prepare("UPDATE trial SET state = 'planned', attempt = attempt + 1, at = ? "
                        "WHERE run_id = ? AND state = 'running'"));
  F8_TRY(retry.bind(timestamp(), run.id).run());
  auto own = F8_TRY(
      db.prepare("UPDATE run SET state = 'running', ended_at = NULL, owner = ? WHERE id = ?"));
  F8_TRY(own.bind(this_owner(), run.id).run());

  std::vector<PendingTrial> pending;
  auto select =
      F8_TRY(db.prepare("SELECT t.id, t.uuid, t.attempt, p.key, c.impl, c.config, c.source_hash "
                        "FROM trial t JOIN problem p ON p.id = t.problem_id "
                        "JOIN candidate c ON c.id = t.candidate_id "
                        "WHERE t.run_id = ? AND t.state = 'planned' ORDER BY t.id"));
  select.bind(run.id);
  while (F8_TRY(select.step())) {
    auto trial = read_pending(select);
    if (!trial) return bad_row(db.label(), "trial", select.view(1), trial.error());
    pending.push_back(*std::move(trial));
  }
  select.reset();
  F8_TRY(transaction.commit());
  return pending;
}

Status Database::verify_run(std::string_view run_uuid, const DeviceClass& device,
                            std::string_view unit_uuid, const Toolchain& toolchain,
                            const Method& method) const {
  const auto [d, t, m, unit] = F8_TRY(origin_of(*state_->db, run_uuid));
  const auto differs = [&](std::string_view field, const auto& was, const auto& is) -> Status {
    if (was == is) return {};
    return fail(ErrorCode::kInvalidArgument,
                "run {} began with {} {}, now it is {}; begin a new sweep", run_uuid, field, was,
                is);
  };
  F8_TRY(differs("device", d.name, device.name));
  F8_TRY(differs("power limit (W)", d.power_limit_w, device.power_limit_w));
  F8_TRY(differs("device class", key(d), key(device)));
  if (!unit_uuid.empty() && unit != hash_unit(unit_uuid)) {
    return fail(ErrorCode::kInvalidArgument,
                "run {} began on another GPU of this class, and a run is of one GPU; `sweep "
                "--missing` with the run's shapes measures here what the database lacks",
                run_uuid);
  }
  F8_TRY(differs("driver", t.driver, toolchain.driver));
  F8_TRY(differs("NVRTC", t.nvrtc, toolchain.nvrtc));
  F8_TRY(differs("cuBLASLt", t.cublaslt, toolchain.cublaslt));
  F8_TRY(differs("float8 revision", t.git_sha, toolchain.git_sha));
  F8_TRY(differs("toolchain", t.key(), toolchain.key()));
  return differs("method", m.key(), method.key());
}

Result<bool> Database::is_comparable(std::string_view run_uuid, const DeviceClass& device,
                                     const Toolchain& toolchain, const Method& method) const {
  const auto [d, t, m, unit] = F8_TRY(origin_of(*state_->db, run_uuid));
  return d.is_same_class(device) && t.versions() == toolchain.versions() && m.key() == method.key();
}

Status Database::start_trial(const PendingTrial& trial) {
  F8_TRY(state_->require_writable());
  Connection& db = *state_->db;
  auto transaction = F8_TRY(Transaction::begin(db));
  auto update = F8_TRY(db.prepare(
      "UPDATE trial SET state = 'running', at = ? WHERE uuid = ? AND state = 'planned'"));
  F8_TRY(update.bind(timestamp(), trial.uuid).run());
  if (db.changes() != 1) {
    return fail(ErrorCode::kInvalidArgument, "{}: trial {} is not planned, so it cannot start",
                db.label(), trial.uuid);
  }
  return transaction.commit();
}

Status Database::finish_trial(const PendingTrial& trial, const TrialResult& result) {
  F8_TRY(state_->require_writable());
  F8_TRY(validate(result));
  F8_TRY(validate_kernels(trial.key.problem.op, result.kernels));
  F8_TRY(validate_accuracy(trial.key.problem.op, result.accuracy));
  Connection& db = *state_->db;
  auto transaction = F8_TRY(Transaction::begin(db));
  std::string places = "?";
  for (int i = 1; i < kResultColumnCount; ++i) places += ", ?";
  auto update =
      F8_TRY(db.prepare(f8::format("UPDATE trial SET state = ?, at = ?, ({}) = ({}) "
                                   "WHERE uuid = ? AND state IN ('planned', 'running') "
                                   "RETURNING id",
                                   kResultColumns, places)));
  update.bind(to_string(result.state), timestamp());
  bind_result(update, result);
  update.add(trial.uuid);
  if (!F8_TRY(update.step())) {
    return fail(ErrorCode::kInvalidArgument, "{}: trial {} is finished already or not known",
                db.label(), trial.uuid);
  }
  const int64_t id = update.integer(0);
  update.reset();
  F8_TRY(insert_parts(db, id, result));
  return transaction.commit();
}

Status Database::end_run(std::string_view run_uuid, std::string_view state) {
  F8_TRY(state_->require_writable());
  if (state != "done" && state != "interrupted" && state != "crashed") {
    return fail(ErrorCode::kInvalidArgument, "run state '{}'; use done, interrupted or crashed",
                state);
  }
  Connection& db = *state_->db;
  auto transaction = F8_TRY(Transaction::begin(db));
  const Run run = F8_TRY(find_run(db, run_uuid));
  auto replan = F8_TRY(
      db.prepare("UPDATE trial SET state = 'planned' WHERE run_id = ? AND state = 'running'"));
  F8_TRY(replan.bind(run.id).run());
  auto update = F8_TRY(db.prepare(
      "UPDATE run SET ended_at = ?1, owner = '', state = CASE WHEN ?2 = 'done' AND EXISTS "
      "(SELECT 1 FROM trial WHERE run_id = ?3 AND state = 'planned') THEN 'interrupted' ELSE ?2 "
      "END WHERE id = ?3"));
  F8_TRY(update.bind(timestamp(), state, run.id).run());
  return transaction.commit();
}

Result<std::vector<RunInfo>> Database::runs() const {
  auto select = F8_TRY(state_->db->prepare(std::string(kRunInfo) +
                                           "GROUP BY r.id ORDER BY r.started_at DESC, r.id DESC"));
  std::vector<RunInfo> infos;
  while (F8_TRY(select.step())) infos.push_back(F8_TRY(read_run_info(*state_->db, select)));
  return infos;
}

}  // namespace f8::tuning_db
