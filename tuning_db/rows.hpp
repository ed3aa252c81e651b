// Values to rows and back: find-or-insert by natural key, and the columns of a result. Internal to
// tuning_db.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tuning_db/database.hpp"
#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {

// The columns of a TrialResult but for its state and its kernels, in the order that bind_result and
// read_result use.
inline constexpr std::string_view kResultColumns =
    "reason, predicted_ns, rel_err, sqnr_db, compile_ms, registers, smem_bytes, spill_bytes, "
    "cubin_hash, samples, samples_dropped, median_ns, mad_ns, p05_ns, p95_ns, ci_lo_ns, ci_hi_ns, "
    "pair_uuid, pair_ratio, pair_lo, pair_hi, sm_mhz_mean, sm_mhz_min, power_w, temp_c, "
    "clock_event_mask, screened_ns";
inline constexpr int kResultColumnCount = 27;
// Behind them where a trial `t` is read: its rows of trial_kernel, each "part provider:config".
inline constexpr std::string_view kKernelsColumn =
    "(SELECT group_concat(part || ' ' || provider || ':' || config, ',') FROM trial_kernel k "
    "WHERE k.trial_id = t.id)";

void bind_result(Statement& statement, const TrialResult& result);  // appends kResultColumnCount
// The rows of trial_kernel and of accuracy.
[[nodiscard]] Status insert_parts(Connection& db, int64_t trial_id, const TrialResult& result);
[[nodiscard]] Status read_accuracy(const Connection& db, std::string_view trial, Op op,
                                   TrialResult& result);
[[nodiscard]] Result<TrialResult> read_result(const Statement& statement, int first,
                                              TrialState state, Op op);
// The error of a row whose values cannot be: it names the file, the row and the remedy.
[[nodiscard]] std::unexpected<Error> bad_row(std::string_view label, std::string_view kind,
                                             std::string_view name, const Error& why);

[[nodiscard]] Result<TrialState> parse_trial_state(std::string_view text);
// The columns impl, config and source_hash from `first` on.
[[nodiscard]] Result<Candidate> read_candidate(const Statement& statement, int first);

// {"m":8192,"n":4096,"k":4096}: dims as the column of a problem has them.
[[nodiscard]] std::string dims_json(const Problem& problem);

// Version 1 kept a screening's time and a linear's kernels as words of `reason`. Takes them out of
// the words and into their fields; a result without such words stays as it is.
void take_data_from_reason(TrialResult& result);

// JSON with sorted names and without spaces, so that equal values are equal bytes.
[[nodiscard]] Result<std::string> canonical_json(std::string_view text);
// Serialises without throwing: bytes that are not UTF-8 are replaced.
[[nodiscard]] std::string dump(const nlohmann::json& json);

// Ids by natural key; a row is inserted where the key is new.
class KeyedRows {
 public:
  explicit KeyedRows(Connection& db) : db_(db) {}
  [[nodiscard]] Result<int64_t> device_class(const DeviceClass& device);
  [[nodiscard]] Result<int64_t> device_unit(int64_t class_id, std::string_view uuid_hash);
  [[nodiscard]] Result<int64_t> toolchain(const Toolchain& toolchain);
  [[nodiscard]] Result<int64_t> method(const Method& method);
  [[nodiscard]] Result<int64_t> problem(const Problem& problem);
  [[nodiscard]] Result<int64_t> candidate(const Candidate& candidate);

 private:
  // insert: INSERT ... ON CONFLICT DO NOTHING; find: its id by the key alone.
  template <class... Args>
  Result<int64_t> find_or_insert(std::string_view find, std::string_view key,
                                 std::string_view insert, const Args&... args);
  Connection& db_;
};

// An integer column as an int, which it must fit.
[[nodiscard]] Status read_int(const Statement& statement, int column, int& value);
[[nodiscard]] std::string hash_unit(std::string_view unit_uuid);
[[nodiscard]] Result<DeviceClass> read_device(const Statement& statement, int first);
inline constexpr std::string_view kDeviceColumns =
    "d.name, d.cc, d.sm_count, d.l2_bytes, d.mem_bytes, d.mem_clock_mhz, d.sm_clock_max_mhz, "
    "d.power_limit_w, d.mig";
inline constexpr int kDeviceColumnCount = 9;
[[nodiscard]] Result<Toolchain> read_toolchain(const Statement& statement, int first);
inline constexpr std::string_view kToolchainColumns =
    "tc.driver, tc.cuda_runtime, tc.nvrtc, tc.cublaslt, tc.nccl, tc.tool_version, tc.git_sha, "
    "tc.git_dirty, tc.codegen_abi";
inline constexpr int kToolchainColumnCount = 9;

[[nodiscard]] std::string new_uuid();   // random, RFC 4122 version 4
[[nodiscard]] std::string timestamp();  // UTC, 2026-01-31T23:59:59.000Z

}  // namespace f8::tuning_db
