// Databases for tests: a temporary folder, one device, toolchain and method, and sweeps with
// made-up results.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/file.hpp"
#include "recipes/mlp.hpp"
#include "tests/unit/tuning_db/measured_shapes.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuning_db {

// The value of a result that must be one. By value, so that a range-for may iterate over it.
template <class T>
T take(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message);
  return *std::move(result);
}

// Forks; the child ends with the exit status that `body` returns, and 99 for an exception, so that
// it never goes on with the parent's tests.
template <class Body>
pid_t in_child(const Body& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  try {
    ::_exit(body());
  } catch (...) {
    ::_exit(99);
  }
}

class TempFolder {
 public:
  TempFolder() : path_(make_temp_directory(fs::temp_directory_path(), "f8db").value()) {}
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  [[nodiscard]] fs::path operator/(const char* name) const { return path_ / name; }
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline DeviceClass h100(int power_limit_w = 700) {
  return {.name = "NVIDIA H100 80GB HBM3",
          .cc = 90,
          .sm_count = 132,
          .l2_bytes = 50 << 20,
          .mem_bytes = int64_t{80} << 30,
          .mem_clock_mhz = 2619,
          .sm_clock_max_mhz = 1980,
          .power_limit_w = power_limit_w,
          .mig = false};
}

inline Toolchain toolchain(std::string git_sha = "abc1234") {
  return {.driver = "580.65.06",
          .cuda_runtime = "13.0",
          .nvrtc = "13.0.48",
          .cublaslt = "13.0.2",
          .nccl = "2.27.7",
          .tool_version = "0.1.0",
          .git_sha = std::move(git_sha),
          .git_dirty = false,
          .codegen_abi = 1};
}

inline Method final_method() {
  return {"final", R"({"name": "final-v1", "blocks": 12})"};
}

inline Problem gemm(int64_t m, int64_t n, int64_t k, const char* recipe = "tensorwise") {
  return Problem::make(Op::kOutput, find_recipe(recipe).value(), {m, n, k}).value();
}

inline Problem linear(Shape shape, const char* recipe = "tensorwise") {
  return Problem::make(Op::kLinear, find_recipe(recipe).value(), shape).value();
}

inline Problem experts(Op op, Shape shape, const Groups& groups, const char* recipe = "rowwise") {
  return Problem::make(op, find_recipe(recipe).value(), shape, groups).value();
}

inline Candidate generated(const char* config) {
  return {Impl::kGenerated, std::string(R"({"config":")") + config + "\"}", "0123456789abcdef"};
}

inline Candidate heuristic(int h) {
  return {Impl::kCublasLt, R"({"heuristic":)" + std::to_string(h) + "}", ""};
}

inline TrialResult timed(double median_ns) {
  return {.state = TrialState::kOk,
          .reason = {},
          .rel_err = 0.0007,
          .registers = 168,
          .smem_bytes = 200'000,
          .cubin_hash = "feedbeef",
          .timing = Timing{.n = 48,
                           .n_dropped = 1,
                           .median_ns = median_ns,
                           .mad_ns = median_ns * 0.002,
                           .p05_ns = median_ns * 0.99,
                           .p95_ns = median_ns * 1.02,
                           .ci_lo_ns = median_ns * 0.997,
                           .ci_hi_ns = median_ns * 1.004},
          .ratio = {},
          .sm_mhz_mean = 1611.5,
          .power_w = 698.25};
}

inline TrialResult timed(double median_ns, double ratio, double half = 0.005) {
  TrialResult result = timed(median_ns);
  result.ratio = Ratio{"", ratio, ratio - half, ratio + half};
  return result;
}

// A sweep that measures every trial; `measure` gives the results. Returns the run's uuid.
inline std::string sweep(Database& db, const std::vector<TrialKey>& cells,
                         const std::function<TrialResult(const TrialKey&)>& measure,
                         const DeviceClass& device = h100(), const Toolchain& tools = toolchain(),
                         const Method& method = final_method()) {
  const RunInfo run =
      db.begin_run({"float8-tune", "sweep"}, 7, device, "GPU-1", tools, method, cells).value();
  for (const PendingTrial& trial : take(db.resume_run(run.uuid))) {
    EXPECT_TRUE(db.start_trial(trial));
    const Status finished = db.finish_trial(trial, measure(trial.key));
    EXPECT_TRUE(finished) << (finished ? "" : finished.error().message);
  }
  EXPECT_TRUE(db.end_run(run.uuid, "done"));
  // Milliseconds tell which result is the latest.
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return run.uuid;
}

using SpeedupOf = std::function<double(Shape)>;

// Linears of a recipe and their bf16 baselines, with these times.
inline void sweep_linears(Database& db, const char* recipe, const std::vector<Shape>& shapes,
                          const std::function<double(Shape)>& bf16_ns, const SpeedupOf& speedup,
                          const DeviceClass& device = h100(), double half = 0.005) {
  std::vector<TrialKey> cells;
  for (const Shape& shape : shapes) {
    cells.push_back({linear(shape, recipe), {Impl::kFloat8, "{}", "ff"}});
    cells.push_back({linear(shape, recipe), {Impl::kBf16, "{}", ""}});
  }
  sweep(
      db, cells,
      [&](const TrialKey& cell) {
        const Shape s = cell.problem.shape();
        if (cell.candidate.impl == Impl::kBf16) return timed(bf16_ns(s));
        return timed(bf16_ns(s) / speedup(s), speedup(s), half);
      },
      device);
}

// Expert linears with their kernels, and their baselines.
inline void sweep_experts(Database& db, const std::vector<Problem>& problems, double speedup) {
  std::vector<TrialKey> cells;
  for (const Problem& problem : problems) {
    cells.push_back({problem, {Impl::kFloat8, "{}", "ff"}});
    cells.push_back({problem, {Impl::kBf16, "{}", ""}});
    Problem gemm = problem;
    for (const Op op : {Op::kOutput, Op::kGradInput, Op::kGradWeight}) {
      gemm = experts(op, problem.shape(), problem.groups(), problem.recipe.c_str());
      cells.push_back({gemm, generated("64x128s6c1x1w1g8")});
      cells.push_back({gemm, generated("64x256s4c1x1w1g8")});
    }
  }
  sweep(db, cells, [&](const TrialKey& cell) {
    // By itself the kernel that the whole did not take is faster.
    const bool faster = cell.candidate.config.contains("64x128");
    if (cell.candidate.impl != Impl::kFloat8) return timed(faster ? 0.9e6 : 1e6);
    TrialResult result = timed(1e6 / speedup, speedup);
    for (const std::string_view part : spec_of(Op::kExperts).parts) {
      result.kernels.push_back({std::string(part), Provider::kGenerated, "64x256s4c1x1w1g8"});
    }
    return result;
  });
}

// MLPs and their baselines.
inline void sweep_mlps(Database& db, const std::vector<MlpShape>& mlps, double speedup,
                       const char* recipe = "rowwise") {
  std::vector<TrialKey> cells;
  for (const MlpShape& mlp : mlps) {
    const Problem problem = *Problem::make(Op::kMlp, *find_recipe(recipe), to_dims(mlp));
    cells.push_back({problem, {Impl::kFloat8, "{}", "ff"}});
    cells.push_back({problem, {Impl::kBf16, "{}", ""}});
  }
  sweep(db, cells, [&](const TrialKey& cell) {
    return cell.candidate.impl == Impl::kFloat8 ? timed(3e6 / speedup, speedup) : timed(3e6);
  });
}

inline std::string bytes_of(const fs::path& path) {
  return read_file(path).value();
}

}  // namespace f8::tuning_db
