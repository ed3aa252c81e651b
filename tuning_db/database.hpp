// The tuning database: measurements with their provenance, in SQLite. schema.sql is the statement
// of truth. One writer process per file; readers may be many. A Database is used from one thread at
// a time.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::tuning_db {

inline constexpr size_t kMaxImportBytes = size_t{1} << 30;  // of an exported file
inline constexpr int kSchemaVersion = 5;

// The hash of all fields of a class.
[[nodiscard]] std::string key(const DeviceClass& device);

struct Toolchain {
  std::string driver, cuda_runtime, nvrtc, cublaslt, nccl, tool_version, git_sha;
  bool git_dirty = false;
  int codegen_abi = 0;
  [[nodiscard]] std::string key() const;
  [[nodiscard]] ToolchainVersions versions() const { return {codegen_abi, nvrtc, cublaslt}; }
};

struct Method {
  std::string fidelity;  // "screen" | "final"
  std::string spec;      // JSON
  [[nodiscard]] std::string key() const;
};

// The implementation of a candidate: a GEMM in fp8 by a generated kernel or by cuBLASLt, a GEMM in
// bf16 by cuBLASLt (a grouped one by a call for each group), a whole operation, such as a linear, in
// fp8 or in bf16.
enum class Impl : uint8_t { kGenerated, kCublasLt, kBf16CublasLt, kFloat8, kBf16 };
[[nodiscard]] std::string_view to_string(Impl impl);  // as the database keeps it: "bf16_cublaslt"
[[nodiscard]] Result<Impl> parse_impl(std::string_view text);

struct Candidate {
  Impl impl = Impl::kGenerated;
  std::string config;       // JSON, e.g. {"config":"128x256s4c2x1w2g8"} or {"heuristic":3}
  std::string source_hash;  // empty for libraries
  [[nodiscard]] std::string key() const;
  // "128x256s4c2x1w2g8" or "h3"; none where the JSON has neither.
  [[nodiscard]] std::optional<std::string> kernel_config() const;
};

enum class TrialState {
  kPlanned,
  kRunning,
  kOk,
  kNoisy,
  kPruned,
  kCompileError,
  kLaunchError,
  kWrong,
  kTimeout,
  kQuarantined
};
[[nodiscard]] std::string_view to_string(TrialState s);
[[nodiscard]] bool is_terminal(TrialState s);

struct Timing {
  int64_t n = 0;
  int64_t n_dropped = 0;
  double median_ns = 0, mad_ns = 0, p05_ns = 0, p95_ns = 0, ci_lo_ns = 0, ci_hi_ns = 0;
};

// Against the bf16 baseline measured interleaved: bf16 time over this time.
struct Ratio {
  std::string pair_uuid;
  double ratio = 0, lo = 0, hi = 0;
};

// The kernel of a part of an operation (OpSpec::parts). Its text, without the part, is "generated:" and
// a configuration, or "cublaslt:h" and the number of a heuristic.
struct PartKernel {
  std::string part;  // "grad_input"
  Provider provider = Provider::kGenerated;
  std::string config;  // with its "h" where the provider is cuBLASLt
  bool operator==(const PartKernel&) const = default;
};
[[nodiscard]] std::string to_string(const PartKernel& kernel);
[[nodiscard]] Result<PartKernel> parse_part_kernel(std::string_view part, std::string_view text);
// Null where there is none.
[[nodiscard]] const PartKernel* find_kernel(const std::vector<PartKernel>& kernels,
                                            std::string_view part);

// How near a tensor of the operation comes to fp64 on data of one kind.
struct Accuracy {
  std::string data;    // "outlier"
  std::string tensor;  // "dQ"
  double sqnr_db = 0, cosine = 0, rmse = 0;
  bool operator==(const Accuracy&) const = default;
};
// Returns the TFLOP/s of a problem that takes so long.
[[nodiscard]] double tflops_of(const Problem& problem, const Timing& timing);
// Null where there is none.
[[nodiscard]] const Accuracy* find_accuracy(const std::vector<Accuracy>& accuracy,
                                            std::string_view data, std::string_view tensor);

// The outcome of a trial; optional parts are NULL in the row.
struct TrialResult {
  TrialState state = TrialState::kOk;
  std::string reason{};  // for people; {}: so that designated initialisers may leave members out
  std::optional<double> predicted_ns{}, rel_err{}, sqnr_db{}, compile_ms{};
  std::optional<int64_t> registers{}, smem_bytes{}, spill_bytes{};
  std::string cubin_hash{};
  std::optional<Timing> timing{};
  std::optional<Ratio> ratio{};
  std::optional<double> sm_mhz_mean{}, sm_mhz_min{}, power_w{}, temp_c{};
  std::optional<int64_t> clock_event_mask{};
  std::optional<double> screened_ns{};  // the time of the screening that the trial lost
  std::vector<PartKernel> kernels{};    // of all parts of the operation, in their order, or none
  std::vector<Accuracy> accuracy{};     // of attention, each data and tensor once; or none

  // True if the trial came to a time, noisy or not.
  [[nodiscard]] bool is_timed() const {
    return timing && (state == TrialState::kOk || state == TrialState::kNoisy);
  }
};

struct TrialKey {
  Problem problem;
  Candidate candidate;
};

struct PendingTrial {
  int64_t id = 0;
  std::string uuid;
  TrialKey key;
  int attempt = 0;
};

struct RunInfo {
  int64_t id = 0;
  std::string uuid;
  std::string argv;  // JSON array
  std::string state;
  std::string started_at;
  int64_t planned = 0, done = 0;
};

// A measured row, with where it comes from.
struct TrialRow {
  std::string uuid, run_uuid, layer;  // layer: "built-in" or the file's path
  Problem problem;
  Candidate candidate;
  TrialResult result;
  std::string device_name, toolchain, method_key, fidelity, at;
  DeviceClass device;
  ToolchainVersions versions;
};

enum class OpenMode { kReadOnly, kReadWrite, kCreate };

class Database {
 public:
  // Refuses a file that is no float8 database, is damaged, or has a newer schema (naming both
  // versions); migrates an older one after a backup beside it. A network file system is refused for
  // writing. The path is the name of a regular file, whatever its form ("file:x", ":memory:").
  [[nodiscard]] static Result<Database> open(const std::filesystem::path& path, OpenMode mode);
  // The measurements that ship with float8, read-only.
  [[nodiscard]] static Result<Database> builtin();
  Database(Database&&) noexcept;
  Database& operator=(Database&&) noexcept;
  ~Database();

  // --- writing: a sweep. Every call is one transaction; what it wrote survives kill -9.
  [[nodiscard]] Result<RunInfo> begin_run(const std::vector<std::string>& argv, uint64_t seed,
                                          const DeviceClass& device, std::string_view unit_uuid,
                                          const Toolchain& toolchain, const Method& method,
                                          const std::vector<TrialKey>& trials);
  // Trials of the run without a terminal row, in planned order. Trials found `running` (the process
  // died in them) get attempt + 1; after a second death they become `quarantined` and are not
  // returned. Refused while another living process of this machine measures the run.
  [[nodiscard]] Result<std::vector<PendingTrial>> resume_run(std::string_view run_uuid);
  // A run is measured on one device with one toolchain and method: call before resume_run. The
  // error names the first field that differs. An empty unit_uuid is any unit of the class.
  [[nodiscard]] Status verify_run(std::string_view run_uuid, const DeviceClass& device,
                                  std::string_view unit_uuid, const Toolchain& toolchain,
                                  const Method& method) const;
  // Says whether a run's times are those of this class of device, method, code generator, NVRTC and
  // cuBLASLt: another unit, driver or revision of float8 measures the same.
  [[nodiscard]] Result<bool> is_comparable(std::string_view run_uuid, const DeviceClass& device,
                                           const Toolchain& toolchain, const Method& method) const;
  [[nodiscard]] Status start_trial(const PendingTrial& trial);  // planned -> running
  [[nodiscard]] Status finish_trial(const PendingTrial& trial, const TrialResult& result);
  // state: done, interrupted or crashed; `done` with trials left is recorded as interrupted. A trial
  // still `running` is planned again: the process lives, so this is no death.
  [[nodiscard]] Status end_run(std::string_view run_uuid, std::string_view state);
  // Newest first. A run whose process died without end_run reads as `crashed`.
  [[nodiscard]] Result<std::vector<RunInfo>> runs() const;

  // --- reading
  // All terminal rows of these, best first (ok before others, then by median).
  [[nodiscard]] Result<std::vector<TrialRow>> trials(const Problem& problem) const;
  // The table's speedups come from these: for each linear of a recipe and each device class the
  // fastest ok, final row of `impl` under the toolchain and method measured last. They are ordered
  // by n, k, m, device and uuid. Op::kExperts and Op::kMlp: likewise
  // those of experts and of MLPs.
  [[nodiscard]] Result<std::vector<TrialRow>> linears(std::string_view recipe,
                                                      Impl impl = Impl::kFloat8,
                                                      Op op = Op::kLinear) const;
  // All terminal rows of one implementation's GEMMs that are not grouped, by problem key, best first.
  [[nodiscard]] Result<std::vector<TrialRow>> gemms(Impl impl) const;
  // All rows of final methods that came to a time, by recipe, op, n, k, m, problem key and uuid.
  [[nodiscard]] Result<std::vector<TrialRow>> timed() const;
  [[nodiscard]] Result<std::map<std::string, Method>> methods() const;  // by key
  // Plain data for the estimator and the runtime: for every GEMM, on the first device that it was
  // measured on, the kernel that the fastest linear of its recipe and shape took where that was
  // measured with it, else the fastest by itself; and the speedup of every linear, also of experts, and of
  // every MLP, on every device.
  // Linears alone are a fraction of the work.
  enum class TablePart { kAll, kLinears };
  [[nodiscard]] Result<TuningTable> table(TablePart part = TablePart::kAll,
                                          const DeviceClass* asked = nullptr) const;
  // The one nearest to `asked` first; of equals, and where it is null, the one of the newest run.
  [[nodiscard]] Result<std::vector<DeviceClass>> devices(const DeviceClass* asked = nullptr) const;

  // --- whole files
  struct MergeCount {
    int64_t added = 0, known = 0;
  };
  [[nodiscard]] Result<MergeCount> merge_from(
      const std::filesystem::path& other);  // idempotent, order-free
  // Finished trials and what they refer to, sorted: equal data, equal bytes.
  [[nodiscard]] Result<std::string> to_jsonl() const;
  [[nodiscard]] Status export_jsonl(const std::filesystem::path& path) const;
  // A file of at most kMaxImportBytes, or a pipe.
  [[nodiscard]] Result<MergeCount> import_jsonl(const std::filesystem::path& path);
  // `name` stands for the text in errors.
  [[nodiscard]] Result<MergeCount> import_jsonl(std::string_view text, std::string_view name);
  // A compact copy in one file, without a -wal beside it: the form to share or to embed.
  [[nodiscard]] Status export_db(const std::filesystem::path& path) const;
  // Schema, pages, checksums, references, natural keys, and every row's values.
  [[nodiscard]] Status check() const;
  [[nodiscard]] static std::string_view schema();

  struct State;

 private:
  explicit Database(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace f8::tuning_db
