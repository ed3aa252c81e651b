// Values to rows and back: see rows.hpp.
#include "tuning_db/rows.hpp"

#include <cmath>

namespace f8::tuning_db {
namespace {

// Diagnostics may be infinite or NaN (the error of a wrong kernel); a row then says nothing.
void add_finite(Statement& statement, const std::optional<double>& value) {
  value&& std::isfinite(*value) ? statement.add(*value) : statement.add_null();
}

void add_text_or_null(Statement& statement, const std::string& value) {
  value.empty() ? statement.add_null() : statement.add(value);
}

}  // namespace

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
  for (const Gemm g : kGemms) {
    r.kernels ? s.add(to_string(r.kernels->at(static_cast<size_t>(g)))) : s.add_null();
  }
}

Result<TrialResult> read_result(const Statement& s, int first, TrialState state) {
  int c = first;
  TrialResult r;
  r.state = state;
  r.reason = s.text(c++);
  for (auto* value : {&r.predicted_ns, &r.rel_err, &r.sqnr_db, &r.compile_ms}) {
    *value = s.maybe_real(c++);
  }
  for (auto* value : {&r.registers, &r.smem_bytes, &r.spill_bytes}) *value = s.maybe_integer(c++);
  r.cubin_hash = s.text(c++);
  if (!s.is_null(c)) {
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
  if (!s.is_null(c + 1)) r.ratio = Ratio{s.text(c), s.real(c + 1), s.real(c + 2), s.real(c + 3)};
  c += 4;
  for (auto* value : {&r.sm_mhz_mean, &r.sm_mhz_min, &r.power_w, &r.temp_c}) {
    *value = s.maybe_real(c++);
  }
  r.clock_event_mask = s.maybe_integer(c++);
  r.screened_ns = s.maybe_real(c++);
  if (!s.is_null(c)) {
    r.kernels.emplace();
    for (LinearKernel& kernel : *r.kernels) kernel = F8_TRY(parse_linear_kernel(s.text(c++)));
  }
  return r;
}

Status validate(const TrialResult& r) {
  const auto bad = [&r](std::string_view what) -> Status {
    return fail(ErrorCode::kInvalidArgument, "trial result ({}): {}", to_string(r.state), what);
  };
  if (!is_terminal(r.state)) return bad("not a terminal state");
  const bool timed = r.state == TrialState::kOk || r.state == TrialState::kNoisy;
  if (timed && !r.timing) return bad("it needs a timing");
  if (r.timing) {
    const Timing& t = *r.timing;
    for (const double v : {t.median_ns, t.mad_ns, t.p05_ns, t.p95_ns, t.ci_lo_ns, t.ci_hi_ns}) {
      if (!std::isfinite(v) || v < 0) return bad("a time is negative or not finite");
    }
    if (timed && (t.n <= 0 || t.median_ns <= 0)) return bad("n and median_ns must be positive");
    if (timed && (t.ci_lo_ns > t.median_ns || t.median_ns > t.ci_hi_ns)) {
      return bad("median_ns lies outside ci_lo_ns..ci_hi_ns");
    }
  }
  if (r.ratio) {
    const Ratio& p = *r.ratio;
    if (!(std::isfinite(p.hi) && p.lo > 0 && p.lo <= p.ratio && p.ratio <= p.hi)) {
      return bad("the ratio lies outside its interval lo..hi");
    }
  }
  if (r.screened_ns && !(std::isfinite(*r.screened_ns) && *r.screened_ns > 0)) {
    return bad("screened_ns is not a positive number");
  }
  return {};
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
  return find_or_insert("SELECT id FROM device_class WHERE key = ?", d.key(),
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
  return find_or_insert("SELECT id FROM toolchain WHERE key = ?", t.key(),
                        "INSERT INTO toolchain (key, driver, cuda_runtime, nvrtc, cublaslt, nccl, "
                        "tool_version, git_sha, git_dirty, codegen_abi) "
                        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        t.driver, t.cuda_runtime, t.nvrtc, t.cublaslt, t.nccl, t.tool_version,
                        t.git_sha, t.git_dirty, t.codegen_abi);
}

Result<int64_t> KeyedRows::method(const Method& m) {
  auto spec = canonical_json(m.spec);
  if (!spec) return fail(ErrorCode::kInvalidArgument, "method.spec: {}", spec.error().message);
  return find_or_insert("SELECT id FROM method WHERE key = ?", m.key(),
                        "INSERT INTO method (key, fidelity, spec) VALUES (?, ?, ?)", m.fidelity,
                        *spec);
}

Result<int64_t> KeyedRows::problem(const Problem& p) {
  return find_or_insert("SELECT id FROM problem WHERE key = ?", p.key(),
                        "INSERT INTO problem (key, op, recipe, a_dtype, b_dtype, d_dtype, m, n, k, "
                        "bias, fast) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        to_string(p.op), p.recipe, to_string(p.a), to_string(p.b), to_string(p.d),
                        p.shape.m, p.shape.n, p.shape.k, p.bias, p.fast);
}

Result<int64_t> KeyedRows::candidate(const Candidate& c) {
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
  return Candidate{.impl = impl, .config = s.text(c + 1), .source_hash = s.text(c + 2)};
}

DeviceClass read_device(const Statement& s, int c) {
  const auto integer = [&s](int column) { return static_cast<int>(s.integer(column)); };
  return {.name = s.text(c),
          .cc = integer(c + 1),
          .sm_count = integer(c + 2),
          .l2_bytes = s.integer(c + 3),
          .mem_bytes = s.integer(c + 4),
          .mem_clock_mhz = integer(c + 5),
          .sm_clock_max_mhz = integer(c + 6),
          .power_limit_w = integer(c + 7),
          .mig = integer(c + 8) != 0};
}

Toolchain read_toolchain(const Statement& s, int c) {
  return {.driver = s.text(c),
          .cuda_runtime = s.text(c + 1),
          .nvrtc = s.text(c + 2),
          .cublaslt = s.text(c + 3),
          .nccl = s.text(c + 4),
          .tool_version = s.text(c + 5),
          .git_sha = s.text(c + 6),
          .git_dirty = s.integer(c + 7) != 0,
          .codegen_abi = static_cast<int>(s.integer(c + 8))};
}

}  // namespace f8::tuning_db
