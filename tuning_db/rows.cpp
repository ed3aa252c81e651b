// Values to rows and back: see rows.hpp.
#include "tuning_db/rows.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "base/text.hpp"
#include "tuning_db/validate.hpp"

namespace f8::tuning_db {
namespace {

// Diagnostics may be infinite or NaN (the error of a wrong kernel); a row then says nothing.
void add_finite(Statement& statement, const std::optional<double>& value) {
  value&& std::isfinite(*value) ? statement.add(*value) : statement.add_null();
}

Result<std::optional<double>> finite_or_null(const Statement& s, int column) {
  const std::optional<double> value = s.maybe_real(column);
  if (!value || std::isfinite(*value)) return value;
  return fail(ErrorCode::kCorrupt, "{} is not finite", s.name(column));
}

// True if `count` columns from `first` on have values; an error if only some have.
Result<bool> all_or_none(const Statement& s, int first, int count) {
  for (int c = first + 1; c < first + count; ++c) {
    if (s.is_null(c) == s.is_null(first)) continue;
    return fail(ErrorCode::kCorrupt, "only one of {} and {} has a value", s.name(first), s.name(c));
  }
  return !s.is_null(first);
}

// Returns the kernels in the order of the operation's parts: rows have none.
Result<std::vector<PartKernel>> read_kernels(std::string_view text, Op op) {
  std::vector<PartKernel> kernels;
  while (!text.empty()) {
    std::string_view kernel = take_until(text, ',');
    const std::string_view part = take_until(kernel, ' ');
    kernels.push_back(F8_TRY(parse_part_kernel(part, kernel)));
  }
  const auto place = [parts = spec_of(op).parts](const PartKernel& kernel) {
    return std::ranges::find(parts, kernel.part) - parts.begin();
  };
  std::ranges::sort(kernels, {}, place);
  F8_TRY(validate_kernels(op, kernels));
  return kernels;
}

void add_text_or_null(Statement& statement, const std::string& value) {
  value.empty() ? statement.add_null() : statement.add(value);
}

Status insert_kernels(Connection& db, int64_t trial_id, const TrialResult& result) {
  if (result.kernels.empty()) return {};
  auto insert = F8_TRY(db.prepare(
      "INSERT INTO trial_kernel (trial_id, part, provider, config) VALUES (?, ?, ?, ?)"));
  for (const PartKernel& kernel : result.kernels) {
    F8_TRY(insert.bind(trial_id, kernel.part, to_string(kernel.provider), kernel.config).run());
  }
  return {};
}

}  // namespace

Status read_int(const Statement& s, int column, int& value) {
  const int64_t wide = s.integer(column);
  if (!std::in_range<int>(wide)) {
    return fail(ErrorCode::kCorrupt, "{} is out of range: {}", s.name(column), wide);
  }
  value = static_cast<int>(wide);
  return {};
}

void bind_result(Statement& s, const TrialResult& r) {
  add_text_or_null(s, r.reason);
  for (const auto& value : {r.predicted_ns, r.rel_err, r.sqnr_db, r.compile_ms}) {
    add_finite(s, value);
  }
  s.add(r.registers);
  s.add(r.smem_bytes);
  s.add(r.spill_bytes);
  add_text_or_null(s, r.cubin_hash);
  if (r.timing) {
    const Timing& t = *r.timing;
    s.add(t.n);
    s.add(t.n_dropped);
    for (const double v : {t.median_ns, t.mad_ns, t.p05_ns, t.p95_ns, t.ci_lo_ns, t.ci_hi_ns}) {
      s.add(v);
    }
  } else {
    for (int i = 0; i < 8; ++i) s.add_null();
  }
  if (r.ratio) {
    add_text_or_null(s, r.ratio->pair_uuid);
    s.add(r.ratio->ratio);
    s.add(r.ratio->lo);
    s.add(r.ratio->hi);
  } else {
    for (int i = 0; i < 4; ++i) s.add_null();
  }
  for (const auto& value : {r.sm_mhz_mean, r.sm_mhz_min, r.power_w, r.temp_c}) {
    add_finite(s, value);
  }
  s.add(r.clock_event_mask);
  add_finite(s, r.screened_ns);
}

Status insert_parts(Connection& db, int64_t trial_id, const TrialResult& result) {
  F8_TRY(insert_kernels(db, trial_id, result));
  if (result.accuracy.empty()) return {};
  auto insert =
      F8_TRY(db.prepare("INSERT INTO accuracy (trial_id, data, tensor, sqnr_db, cosine, rmse) "
                        "VALUES (?, ?, ?, ?, ?, ?)"));
  for (const Accuracy& a : result.accuracy) {
    F8_TRY(insert.bind(trial_id, a.data, a.tensor, a.sqnr_db, a.cosine, a.rmse).run());
  }
  return {};
}

// Of attention alone, which other trials need no second statement for.
Status read_accuracy(const Connection& db, std::string_view trial, Op op, TrialResult& result) {
  if (!is_attention(op)) return {};
  auto select =
      F8_TRY(db.prepare("SELECT a.data, a.tensor, a.sqnr_db, a.cosine, a.rmse FROM accuracy a "
                        "JOIN trial t ON t.id = a.trial_id WHERE t.uuid = ? ORDER BY a.id"));
  select.bind(trial);
  while (F8_TRY(select.step())) {
    result.accuracy.push_back(
        {select.text(0), select.text(1), select.real(2), select.real(3), select.real(4)});
  }
  return validate_accuracy(op, result.accuracy);
}

Result<TrialResult> read_result(const Statement& s, int first, TrialState state, Op op) {
  int c = first;
  TrialResult r;
  r.state = state;
  r.reason = s.text(c++);
  for (auto* value : {&r.predicted_ns, &r.rel_err, &r.sqnr_db, &r.compile_ms}) {
    *value = F8_TRY(finite_or_null(s, c++));
  }
  for (auto* value : {&r.registers, &r.smem_bytes, &r.spill_bytes}) *value = s.maybe_integer(c++);
  r.cubin_hash = s.text(c++);
  if (F8_TRY(all_or_none(s, c, 8))) {
    Timing t;
    t.n = s.integer(c);
    t.n_dropped = s.integer(c + 1);
    int at = c + 2;
    for (double* v : {&t.median_ns, &t.mad_ns, &t.p05_ns, &t.p95_ns, &t.ci_lo_ns, &t.ci_hi_ns}) {
      *v = s.real(at++);
    }
    r.timing = t;
  }
  c += 8;
  if (F8_TRY(all_or_none(s, c + 1, 3))) {
    r.ratio = Ratio{s.text(c), s.real(c + 1), s.real(c + 2), s.real(c + 3)};
  }
  c += 4;
  for (auto* value : {&r.sm_mhz_mean, &r.sm_mhz_min, &r.power_w, &r.temp_c}) {
    *value = F8_TRY(finite_or_null(s, c++));
  }
  r.clock_event_mask = s.maybe_integer(c++);
  r.screened_ns = F8_TRY(finite_or_null(s, c++));
  r.kernels = F8_TRY(read_kernels(s.view(c), op));
  F8_TRY(validate(r));
  return r;
}

std::unexpected<Error> bad_row(std::string_view label, std::string_view kind, std::string_view name,
                               const Error& why) {
  return fail(ErrorCode::kCorrupt,
              "{}: {} {} cannot be: {}; restore a copy, or measure into a new file", label, kind,
              quote(name, 80), why.message);
}

template <class... Args>
Result<int64_t> KeyedRows::find_or_insert(std::string_view find, std::string_view key,
                                          std::string_view insert, const Args&... args) {
  auto found = F8_TRY(db_.prepare(find));
  if (F8_TRY(found.bind(key).step())) return found.integer(0);
  auto inserted = F8_TRY(db_.prepare(insert));
  F8_TRY(inserted.bind(key, args...).run());
  return db_.last_id();
}

Result<int64_t> KeyedRows::device_class(const DeviceClass& d) {
  F8_TRY(validate(d));
  return find_or_insert("SELECT id FROM device_class WHERE key = ?", key(d),
                        "INSERT INTO device_class (key, name, cc, sm_count, l2_bytes, mem_bytes, "
                        "mem_clock_mhz, sm_clock_max_mhz, power_limit_w, mig) "
                        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        d.name, d.cc, d.sm_count, d.l2_bytes, d.mem_bytes, d.mem_clock_mhz,
                        d.sm_clock_max_mhz, d.power_limit_w, d.mig);
}

Result<int64_t> KeyedRows::device_unit(int64_t class_id, std::string_view uuid_hash) {
  auto found =
      F8_TRY(db_.prepare("SELECT id FROM device_unit WHERE uuid_hash = ? AND class_id = ?"));
  if (F8_TRY(found.bind(uuid_hash, class_id).step())) return found.integer(0);
  auto inserted =
      F8_TRY(db_.prepare("INSERT INTO device_unit (uuid_hash, class_id) VALUES (?, ?)"));
  F8_TRY(inserted.bind(uuid_hash, class_id).run());
  return db_.last_id();
}

Result<int64_t> KeyedRows::toolchain(const Toolchain& t) {
  F8_TRY(validate(t));
  return find_or_insert("SELECT id FROM toolchain WHERE key = ?", t.key(),
                        "INSERT INTO toolchain (key, driver, cuda_runtime, nvrtc, cublaslt, nccl, "
                        "tool_version, git_sha, git_dirty, codegen_abi) "
                        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        t.driver, t.cuda_runtime, t.nvrtc, t.cublaslt, t.nccl, t.tool_version,
                        t.git_sha, t.git_dirty, t.codegen_abi);
}

Result<int64_t> KeyedRows::method(const Method& m) {
  F8_TRY(validate(m));
  auto spec = canonical_json(m.spec);
  if (!spec) return fail(ErrorCode::kInvalidArgument, "method.spec: {}", spec.error().message);
  return find_or_insert("SELECT id FROM method WHERE key = ?", m.key(),
                        "INSERT INTO method (key, fidelity, spec) VALUES (?, ?, ?)", m.fidelity,
                        *spec);
}

std::string dims_json(const Problem& problem) {
  nlohmann::ordered_json json;
  const std::span<const DimSpec> dims = spec_of(problem.op).dims;
  for (size_t i = 0; i < dims.size(); ++i) json[std::string(dims[i].name)] = problem.dims.sizes[i];
  return json.dump();
}

Result<int64_t> KeyedRows::problem(const Problem& p) {
  return find_or_insert("SELECT id FROM problem WHERE key = ?", p.key(),
                        "INSERT INTO problem (key, op, recipe, dims) VALUES (?, ?, ?, ?)",
                        to_string(p.op), p.recipe, dims_json(p));
}

Result<int64_t> KeyedRows::candidate(const Candidate& c) {
  F8_TRY(validate(c));
  auto config = canonical_json(c.config);
  if (!config) {
    return fail(ErrorCode::kInvalidArgument, "candidate.config: {}", config.error().message);
  }
  return find_or_insert(
      "SELECT id FROM candidate WHERE key = ?", c.key(),
      "INSERT INTO candidate (key, impl, config, source_hash) VALUES (?, ?, ?, ?)",
      to_string(c.impl), *config, c.source_hash);
}

Result<Candidate> read_candidate(const Statement& s, int c) {
  const Impl impl = F8_TRY(parse_impl(s.text(c)));
  Candidate candidate{.impl = impl, .config = s.text(c + 1), .source_hash = s.text(c + 2)};
  F8_TRY(validate(candidate));
  return candidate;
}

Result<DeviceClass> read_device(const Statement& s, int c) {
  DeviceClass d{.name = s.text(c), .l2_bytes = s.integer(c + 3), .mem_bytes = s.integer(c + 4)};
  F8_TRY(read_int(s, c + 1, d.cc));
  F8_TRY(read_int(s, c + 2, d.sm_count));
  F8_TRY(read_int(s, c + 5, d.mem_clock_mhz));
  F8_TRY(read_int(s, c + 6, d.sm_clock_max_mhz));
  F8_TRY(read_int(s, c + 7, d.power_limit_w));
  d.mig = s.integer(c + 8) != 0;
  F8_TRY(validate(d));
  return d;
}

Result<Toolchain> read_toolchain(const Statement& s, int c) {
  Toolchain t{.driver = s.text(c),
              .cuda_runtime = s.text(c + 1),
              .nvrtc = s.text(c + 2),
              .cublaslt = s.text(c + 3),
              .nccl = s.text(c + 4),
              .tool_version = s.text(c + 5),
              .git_sha = s.text(c + 6),
              .git_dirty = s.integer(c + 7) != 0};
  F8_TRY(read_int(s, c + 8, t.codegen_abi));
  F8_TRY(validate(t));
  return t;
}

}  // namespace f8::tuning_db
