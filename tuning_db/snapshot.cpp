// Reading and inserting snapshots: see snapshot.hpp. Order-free and idempotent because every record
// has a natural key and is never changed once it is finished.
#include "tuning_db/snapshot.hpp"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "tuning_db/rows.hpp"
#include "tuning_db/validate.hpp"

namespace f8::tuning_db {
namespace {

constexpr std::string_view kFinished = "t.state NOT IN ('planned', 'running')";

auto order_of(const TrialRecord& t) {
  const Problem& p = t.problem;
  const Shape s = p.shape();
  return std::make_tuple(p.recipe, static_cast<int>(p.op), s.n, s.k, s.m, p.key(),
                         to_string(t.candidate.impl), t.candidate.config, t.candidate.source_hash,
                         t.uuid);
}

// Records that an insertion may meet, by uuid.
template <class Record>
using Known = std::unordered_map<std::string_view, const Record*>;

template <class Record>
Known<Record> by_uuid(const std::vector<Record>& records) {
  Known<Record> known;
  for (const Record& r : records) known.emplace(r.uuid, &r);
  return known;
}

// True if an equal record is known; a different one under the same uuid is an error.
template <class Record>
Result<bool> is_known(const Known<Record>& known, const Record& record, const Connection& db,
                      std::string_view kind) {
  const auto found = known.find(record.uuid);
  if (found == known.end()) return false;
  if (to_json_line(*found->second) == to_json_line(record)) return true;
  return fail(ErrorCode::kInvalidArgument,
              "{}: {} {} is there with other results (one run was resumed in two copies of a "
              "file); keep one of the copies, nothing was added",
              db.label(), kind, record.uuid);
}

class Inserter {
 public:
  Inserter(Connection& db, const Snapshot& snapshot, const Snapshot& present)
      : db_(db),
        snapshot_(snapshot),
        rows_(db),
        known_runs_(by_uuid(present.runs)),
        known_trials_(by_uuid(present.trials)) {}

  Result<Database::MergeCount> insert() {
    for (const DeviceClass& d : snapshot_.devices) {
      devices_[key(d)] = F8_TRY(rows_.device_class(d));
    }
    for (const Toolchain& t : snapshot_.toolchains) {
      toolchains_[t.key()] = F8_TRY(rows_.toolchain(t));
    }
    for (const Method& m : snapshot_.methods) methods_[m.key()] = F8_TRY(rows_.method(m));
    for (const RunRecord& r : snapshot_.runs) F8_TRY(insert(r));
    F8_TRY(prepare_trials());
    Database::MergeCount count;
    for (const TrialRecord& t : snapshot_.trials) {
      const bool added = F8_TRY(insert(t));
      ++(added ? count.added : count.known);
    }
    return count;
  }

 private:
  using Ids = std::map<std::string, int64_t, std::less<>>;

  static Result<int64_t> refer(const Ids& ids, const std::string& key, std::string_view kind,
                               std::string_view from) {
    const auto found = ids.find(key);
    if (found != ids.end()) return found->second;
    return fail(ErrorCode::kCorrupt,
                "{} refers to {} {}, which has no record; export the database again", from, kind,
                key);
  }

  Status insert(const RunRecord& r) {
    const std::string from = "run " + r.uuid;
    const int64_t device = F8_TRY(refer(devices_, r.device_key, "device", from));
    const int64_t toolchain = F8_TRY(refer(toolchains_, r.toolchain_key, "toolchain", from));
    const int64_t method = F8_TRY(refer(methods_, r.method_key, "method", from));
    F8_TRY(is_known(known_runs_, r, db_, "run"));
    auto find = F8_TRY(db_.prepare("SELECT id FROM run WHERE uuid = ?"));
    if (F8_TRY(find.bind(r.uuid).step())) {
      runs_[r.uuid] = find.integer(0);
      return {};
    }
    const int64_t unit = F8_TRY(rows_.device_unit(device, r.unit_hash));
    auto add =
        F8_TRY(db_.prepare("INSERT INTO run (uuid, argv, seed, unit_id, toolchain_id, method_id, "
                           "started_at, state) VALUES (?, ?, ?, ?, ?, ?, ?, 'imported')"));
    F8_TRY(add.bind(r.uuid, r.argv, static_cast<int64_t>(r.seed), unit, toolchain, method,
                    r.started_at)
               .run());
    runs_[r.uuid] = db_.last_id();
    return {};
  }

  // An INSERT that may turn into an UPDATE, or that returns the row, writes each page that it touches to a
  // journal of the statement, so these are two statements without either.
  Status prepare_trials() {
    std::string places = "?";
    for (int i = 1; i < kResultColumnCount; ++i) places += ", ?";
    add_.emplace(F8_TRY(db_.prepare(f8::format(
        "INSERT INTO trial (uuid, run_id, problem_id, candidate_id, attempt, state, at, {}) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, {})",
        kResultColumns, places))));
    complete_.emplace(F8_TRY(db_.prepare(
        f8::format("UPDATE trial SET attempt = ?, state = ?, at = ?, ({}) = ({}) WHERE id = ?",
                   kResultColumns, places))));
    auto unfinished =
        F8_TRY(db_.prepare(f8::format("SELECT uuid, id FROM trial t WHERE NOT ({})", kFinished)));
    while (F8_TRY(unfinished.step())) unfinished_[unfinished.text(0)] = unfinished.integer(1);
    return {};
  }

  // True if it was added, false if it was there.
  Result<bool> insert(const TrialRecord& t) {
    const int64_t run = F8_TRY(refer(runs_, t.run_uuid, "run", "trial " + t.uuid));
    if (F8_TRY(is_known(known_trials_, t, db_, "trial"))) return false;
    // Two of one snapshot (a file joined from two exports) meet here.
    known_trials_.emplace(t.uuid, &t);
    const auto planned = unfinished_.find(t.uuid);
    int64_t id = 0;
    if (planned != unfinished_.end()) {
      // Planned here and finished in a copy: the copy's result completes the row.
      id = planned->second;
      complete_->bind(t.attempt, to_string(t.result.state), t.at);
      bind_result(*complete_, t.result);
      complete_->add(id);
      F8_TRY(complete_->run());
    } else {
      auto& problem = problems_[t.problem.key()];
      if (problem == 0) problem = F8_TRY(rows_.problem(t.problem));
      const Candidate& c = t.candidate;
      auto& candidate = candidates_[{c.impl, c.config, c.source_hash}];
      if (candidate == 0) candidate = F8_TRY(rows_.candidate(c));
      add_->bind(t.uuid, run, problem, candidate, t.attempt, to_string(t.result.state), t.at);
      bind_result(*add_, t.result);
      F8_TRY(add_->run());
      id = db_.last_id();
    }
    F8_TRY(insert_parts(db_, id, t.result));
    return true;
  }

  Connection& db_;
  const Snapshot& snapshot_;
  KeyedRows rows_;
  Known<RunRecord> known_runs_;
  Known<TrialRecord> known_trials_;
  Ids devices_, toolchains_, methods_, runs_, problems_;
  std::map<std::tuple<Impl, std::string_view, std::string_view>, int64_t> candidates_;
  Ids unfinished_;  // trials, by uuid
  std::optional<Statement> add_, complete_;
};

// What the runs of a snapshot refer to, each once, by key.
struct Provenance {
  std::map<std::string, DeviceClass> devices;
  std::map<std::string, Toolchain> toolchains;
  std::map<std::string, Method> methods;
};

Result<RunRecord> read_run(const Statement& s, Provenance& provenance) {
  const Method method{s.text(5), s.text(6)};
  const DeviceClass device = F8_TRY(read_device(s, 7));
  const Toolchain toolchain = F8_TRY(read_toolchain(s, 7 + kDeviceColumnCount));
  RunRecord run{.uuid = s.text(0),
                .argv = s.text(1),
                .started_at = s.text(2),
                .seed = static_cast<uint64_t>(s.integer(3)),
                .device_key = key(device),
                .unit_hash = s.text(4),
                .toolchain_key = toolchain.key(),
                .method_key = method.key()};
  F8_TRY(validate(method));
  F8_TRY(validate(run));
  provenance.devices.emplace(run.device_key, device);
  provenance.toolchains.emplace(run.toolchain_key, toolchain);
  provenance.methods.emplace(run.method_key, method);
  return run;
}

Result<TrialRecord> read_trial(const Connection& db, const Statement& s) {
  const TrialState state = F8_TRY(parse_trial_state(s.text(8)));
  TrialRecord trial;
  trial.uuid = s.text(0);
  trial.run_uuid = s.text(1);
  trial.at = s.text(2);
  trial.problem = F8_TRY(Problem::parse(s.text(3)));
  trial.candidate = F8_TRY(read_candidate(s, 4));
  F8_TRY(read_int(s, 7, trial.attempt));
  trial.result = F8_TRY(read_result(s, 9, state, trial.problem.op));
  F8_TRY(read_accuracy(db, trial.uuid, trial.problem.op, trial.result));
  F8_TRY(validate(trial));
  return trial;
}

void sort_trials(std::vector<TrialRecord>& trials) {
  std::vector<std::pair<decltype(order_of(trials.front())), size_t>> order;
  for (const TrialRecord& t : trials) order.emplace_back(order_of(t), order.size());
  std::ranges::sort(order);
  std::vector<TrialRecord> sorted;
  sorted.reserve(trials.size());
  for (const auto& [key, index] : order) sorted.push_back(std::move(trials[index]));
  trials = std::move(sorted);
}

}  // namespace

// One that no record has stays, and is found where the run is inserted.
void resolve_labels(Snapshot& snapshot) {
  for (RunRecord& run : snapshot.runs) {
    for (std::string* key : {&run.device_key, &run.toolchain_key, &run.method_key}) {
      const auto found = snapshot.labels.find(*key);
      if (found != snapshot.labels.end()) *key = found->second;
    }
  }
}

Result<Snapshot> read_snapshot(const Connection& db) {
  Snapshot snapshot;
  Provenance provenance;
  auto runs = F8_TRY(db.prepare(f8::format(
      "SELECT r.uuid, r.argv, r.started_at, r.seed, u.uuid_hash, m.fidelity, m.spec, {}, {} "
      "FROM run r JOIN device_unit u ON u.id = r.unit_id "
      "JOIN device_class d ON d.id = u.class_id JOIN toolchain tc ON tc.id = r.toolchain_id "
      "JOIN method m ON m.id = r.method_id "
      "WHERE EXISTS (SELECT 1 FROM trial t WHERE t.run_id = r.id AND {}) "
      "ORDER BY r.started_at, r.uuid",
      kDeviceColumns, kToolchainColumns, kFinished)));
  while (F8_TRY(runs.step())) {
    auto run = read_run(runs, provenance);
    if (!run) return bad_row(db.label(), "run", runs.view(0), run.error());
    snapshot.runs.push_back(*std::move(run));
  }
  for (auto& [key, device] : provenance.devices) snapshot.devices.push_back(std::move(device));
  for (auto& [key, tools] : provenance.toolchains) snapshot.toolchains.push_back(std::move(tools));
  for (auto& [key, method] : provenance.methods) snapshot.methods.push_back(std::move(method));

  auto trials = F8_TRY(db.prepare(
      f8::format("SELECT t.uuid, r.uuid, t.at, p.key, c.impl, c.config, c.source_hash, t.attempt, "
                 "t.state, {}, {} "
                 "FROM trial t JOIN run r ON r.id = t.run_id JOIN problem p ON p.id = t.problem_id "
                 "JOIN candidate c ON c.id = t.candidate_id WHERE {}",
                 kResultColumns, kKernelsColumn, kFinished)));
  while (F8_TRY(trials.step())) {
    auto trial = read_trial(db, trials);
    if (!trial) return bad_row(db.label(), "trial", trials.view(0), trial.error());
    snapshot.trials.push_back(*std::move(trial));
  }
  sort_trials(snapshot.trials);
  return snapshot;
}

Result<Database::MergeCount> insert_snapshot(Connection& db, const Snapshot& snapshot) {
  auto transaction = F8_TRY(Transaction::begin(db));
  const Snapshot present = F8_TRY(read_snapshot(db));
  const auto count = F8_TRY(Inserter(db, snapshot, present).insert());
  F8_TRY(transaction.commit());
  return count;
}

}  // namespace f8::tuning_db
