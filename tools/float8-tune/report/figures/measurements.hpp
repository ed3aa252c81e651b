// What the report is made of, collected from databases as plain data. Of a problem and a device the
// first database that has measured it answers, as in every command.
//
// Times that are compared with each other come from one toolchain and method, those measured last.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "recipes/attention.hpp"
#include "tools/tuner/fit/regret.hpp"
#include "tuning_db/database.hpp"

namespace f8::report {

struct Kernel {
  std::string name;  // "generated:128x256s4c2x1w2g8" or "cublaslt:h3"
  double ns = 0;
  std::optional<double> predicted_ns{}, sm_mhz{};
};
[[nodiscard]] std::string config_of(const Kernel& kernel);  // "128x256s4c2x1w2g8" or "h3"
// The cells that name a GEMM in a table: its operation, and its linear's N, K and M.
[[nodiscard]] std::vector<std::string> name_cells(const Problem& gemm);

// The fastest kernels of a GEMM, by kind.
struct GemmTimes {
  Problem problem;
  size_t device = 0;  // the index among the table's devices
  std::optional<Kernel> generated, library, bf16;
};

// A linear, forward and backward, and its GEMMs (by Gemm) where their kernels were timed with it.
struct LinearTimes {
  std::string recipe;
  Shape shape;
  size_t device = 0;
  struct Side {
    double ns = 0;
    std::array<std::optional<double>, 3> gemm_ns{};
    // What the GEMMs leave: amax, casts and gaps between kernels. Nothing where a GEMM is not known.
    [[nodiscard]] std::optional<double> rest_ns() const;
  };
  Side fp8, bf16;
};

// A recipe's attention of a shape on a device, by part. The rows have their accuracy.
struct AttentionTimes {
  AttentionShape shape;
  std::string recipe, device;
  std::optional<tuning_db::TrialRow> forward, backward;  // in fp8, with their casts
  std::optional<tuning_db::TrialRow> both;               // forward and backward, against bf16
  std::string decision;                                  // the program's; empty: none was asked for
};

// A database by the name that the page shows: without its folder.
struct NamedDatabase {
  std::string name;
  const tuning_db::Database* database = nullptr;
};
struct Run {
  std::string source;
  tuning_db::RunInfo info;
};
// The rows that one toolchain and method gave on one device.
struct Campaign {
  std::string source, device, toolchain, method, first, last;  // dates
  std::map<std::string, int64_t> states;
};

struct Measurements {
  TuningTable table;
  std::vector<GemmTimes> gemms;                    // by operation, n, k, m, problem key and device
  std::vector<LinearTimes> linears;                // by recipe, n, k, m and device
  std::vector<tuning_db::TrialRow> experts, mlps;  // in float8, by recipe, n, k and m
  std::vector<AttentionTimes> attentions;          // by heads, tokens, mask, device and recipe
  std::vector<tuner::MeasuredGemm> choices;
  std::vector<Run> runs;
  std::vector<tuning_db::Method> methods;
  std::vector<Campaign> campaigns;

  [[nodiscard]] std::vector<std::string> recipes() const;  // of the table's linears
  // "NVIDIA H100 80GB HBM3", with the power limit where two classes share a name.
  [[nodiscard]] std::string device_label(size_t device) const;
};
// `table` is the merged table of the databases.
[[nodiscard]] Result<Measurements> collect(std::span<const NamedDatabase> databases,
                                           TuningTable table);

}  // namespace f8::report
