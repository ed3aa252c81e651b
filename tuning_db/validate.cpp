// The values of rows: see validate.hpp.
#include "tuning_db/validate.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"

namespace f8::tuning_db {
namespace {

constexpr size_t kMaxNameBytes = 256;
constexpr double kMaxNs = 1e15;  // eleven days
constexpr double kMaxRatio = 1e6;
constexpr int kMaxAttempts = 1000;
constexpr double kMaxDecibels = 1e4;

Status bad(std::string_view field, std::string_view value, std::string_view what) {
  return fail(ErrorCode::kInvalidArgument, "{} {} {}", field, quote(value, 80), what);
}

Status one_line(std::string_view field, std::string_view text) {
  if (text.size() > kMaxNameBytes) return bad(field, text, "is too long");
  const bool printable = std::ranges::none_of(
      text, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
  return printable ? Status() : bad(field, text, "has control bytes");
}

template <class T>
Status in_range(std::string_view field, T value, T low, T high) {
  if (value >= low && value <= high) return {};
  if (value != value) return fail(ErrorCode::kInvalidArgument, "{} is not finite", field);
  return fail(ErrorCode::kInvalidArgument, "{} is {}, which is not from {} to {}", field, value,
              low, high);
}

Status validate(const Timing& t, bool timed) {
  constexpr int64_t kMaxSamples = int64_t{1} << 40;
  F8_TRY(in_range("samples", t.n, int64_t{timed}, kMaxSamples));
  F8_TRY(in_range("samples_dropped", t.n_dropped, int64_t{0}, kMaxSamples));
  for (const double v : {t.median_ns, t.mad_ns, t.p05_ns, t.p95_ns, t.ci_lo_ns, t.ci_hi_ns}) {
    F8_TRY(in_range("a time in ns", v, 0.0, kMaxNs));
  }
  if (!timed) return {};
  if (!(t.ci_lo_ns > 0 && t.ci_lo_ns <= t.median_ns && t.median_ns <= t.ci_hi_ns)) {
    return fail(ErrorCode::kInvalidArgument,
                "median_ns lies outside ci_lo_ns..ci_hi_ns, or one of them is not positive");
  }
  return {};
}

}  // namespace

Status validate_uuid(std::string_view uuid) {
  const bool good = !uuid.empty() && uuid.size() <= 64 && std::ranges::all_of(uuid, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  });
  return good ? Status() : bad("uuid", uuid, "is not of lower-case letters, digits and '-'");
}

Status validate_timestamp(std::string_view at) {
  constexpr std::string_view kForm = "0000-00-00T00:00:00.000Z";
  const bool good = std::ranges::equal(
      at, kForm, [](char c, char form) { return form == '0' ? c >= '0' && c <= '9' : c == form; });
  return good ? Status() : bad("date", at, "is not of the form 2026-01-31T23:59:59.000Z");
}

Status validate(const DeviceClass& d) {
  constexpr int64_t kMaxBytes = int64_t{1} << 50;
  constexpr int kMaxCount = 10'000'000;
  if (d.name.empty()) return bad("device name", d.name, "is empty");
  F8_TRY(one_line("device name", d.name));
  F8_TRY(in_range("cc", d.cc, 0, kMaxCount));
  F8_TRY(in_range("sm_count", d.sm_count, 0, kMaxCount));
  F8_TRY(in_range("l2_bytes", d.l2_bytes, int64_t{0}, kMaxBytes));
  F8_TRY(in_range("mem_bytes", d.mem_bytes, int64_t{0}, kMaxBytes));
  F8_TRY(in_range("mem_clock_mhz", d.mem_clock_mhz, 0, kMaxCount));
  F8_TRY(in_range("sm_clock_max_mhz", d.sm_clock_max_mhz, 0, kMaxCount));
  return in_range("power_limit_w", d.power_limit_w, 0, kMaxCount);
}

Status validate(const Toolchain& t) {
  for (const auto& [field, text] :
       {std::pair("driver", &t.driver), std::pair("cuda_runtime", &t.cuda_runtime),
        std::pair("nvrtc", &t.nvrtc), std::pair("cublaslt", &t.cublaslt),
        std::pair("nccl", &t.nccl), std::pair("tool_version", &t.tool_version),
        std::pair("git_sha", &t.git_sha)}) {
    F8_TRY(one_line(field, *text));
  }
  return in_range("codegen_abi", t.codegen_abi, 0, 1 << 30);
}

Status validate(const Method& m) {
  if (m.fidelity == "screen" || m.fidelity == "final") return {};
  return bad("fidelity", m.fidelity, "is neither screen nor final");
}

Status validate(const Candidate& c) {
  return one_line("source_hash", c.source_hash);
}

Status validate(const TrialResult& r) {
  const auto of_state = [&r](Status status) -> Status {
    if (status) return status;
    return fail(ErrorCode::kInvalidArgument, "trial result ({}): {}", to_string(r.state),
                status.error().message);
  };
  if (!is_terminal(r.state)) {
    return of_state(fail(ErrorCode::kInvalidArgument, "not a terminal state"));
  }
  const bool timed = r.state == TrialState::kOk || r.state == TrialState::kNoisy;
  if (timed && !r.timing) return of_state(fail(ErrorCode::kInvalidArgument, "it needs a timing"));
  if (r.timing) F8_TRY(of_state(validate(*r.timing, timed)));
  if (r.ratio) {
    const Ratio& p = *r.ratio;
    F8_TRY(of_state(in_range("the ratio to bf16", p.lo, 1 / kMaxRatio, p.ratio)));
    F8_TRY(of_state(in_range("the ratio to bf16", p.ratio, p.lo, p.hi)));
    F8_TRY(of_state(in_range("the ratio to bf16", p.hi, p.ratio, kMaxRatio)));
    if (!p.pair_uuid.empty()) F8_TRY(of_state(validate_uuid(p.pair_uuid)));
  }
  if (r.screened_ns && *r.screened_ns <= 0) {
    return of_state(fail(ErrorCode::kInvalidArgument, "screened_ns is not positive"));
  }
  // What is not finite is stored as NULL.
  for (const auto& [field, value] :
       {std::pair("predicted_ns", r.predicted_ns), std::pair("rel_err", r.rel_err),
        std::pair("compile_ms", r.compile_ms), std::pair("sm_mhz_mean", r.sm_mhz_mean),
        std::pair("sm_mhz_min", r.sm_mhz_min), std::pair("power_w", r.power_w),
        std::pair("screened_ns", r.screened_ns)}) {
    if (value && std::isfinite(*value)) F8_TRY(of_state(in_range(field, *value, 0.0, 1e18)));
  }
  for (const auto& [field, value] :
       {std::pair("registers", r.registers), std::pair("smem_bytes", r.smem_bytes),
        std::pair("spill_bytes", r.spill_bytes)}) {
    if (value) F8_TRY(of_state(in_range(field, *value, int64_t{0}, int64_t{1} << 40)));
  }
  return of_state(one_line("cubin_hash", r.cubin_hash));
}

Status validate_kernels(Op op, const std::vector<PartKernel>& kernels) {
  if (kernels.empty() || std::ranges::equal(kernels, spec_of(op).parts, {}, &PartKernel::part)) {
    return {};
  }
  std::string named;
  for (const PartKernel& kernel : kernels) named += (named.empty() ? "" : ", ") + kernel.part;
  return fail(ErrorCode::kInvalidArgument, "the kernels of {} are those of {}, not of {}",
              to_string(op), fmt::join(spec_of(op).parts, ", "), quote(named));
}

Status validate_accuracy(Op op, const std::vector<Accuracy>& accuracy) {
  if (!is_attention(op) && !accuracy.empty()) {
    return fail(ErrorCode::kInvalidArgument, "{} has no accuracy, which trials of attention have",
                to_string(op));
  }
  for (size_t i = 0; i < accuracy.size(); ++i) {
    const Accuracy& a = accuracy[i];
    if (a.data.empty() || a.tensor.empty()) {
      return fail(ErrorCode::kInvalidArgument, "an accuracy names no data, or no tensor");
    }
    F8_TRY(one_line("data", a.data));
    F8_TRY(one_line("tensor", a.tensor));
    F8_TRY(in_range("sqnr_db", a.sqnr_db, -kMaxDecibels, kMaxDecibels));
    F8_TRY(in_range("cosine", a.cosine, -1.001, 1.001));  // as fp64 rounds it
    F8_TRY(in_range("rmse", a.rmse, 0.0, 1e300));
    for (size_t j = 0; j < i; ++j) {
      if (accuracy[j].data != a.data || accuracy[j].tensor != a.tensor) continue;
      return fail(ErrorCode::kInvalidArgument, "the accuracy of {} on {} data is given twice",
                  quote(a.tensor), quote(a.data));
    }
  }
  return {};
}

Status validate(const RunRecord& r) {
  F8_TRY(validate_uuid(r.uuid));
  F8_TRY(one_line("unit", r.unit_hash));
  return validate_timestamp(r.started_at);
}

Status validate(const TrialRecord& t) {
  F8_TRY(validate_uuid(t.uuid));
  F8_TRY(validate_timestamp(t.at));
  F8_TRY(in_range("attempt", t.attempt, 0, kMaxAttempts));
  F8_TRY(validate(t.candidate));
  F8_TRY(validate_kernels(t.problem.op, t.result.kernels));
  F8_TRY(validate_accuracy(t.problem.op, t.result.accuracy));
  return validate(t.result);
}

}  // namespace f8::tuning_db
