// The tuning table: what a database knows that a decision needs, as plain data that the runtime
// reads without SQLite. A trainer's rank 0 loads and broadcasts it; all ranks compare one hash.
//
// File grammar (UTF-8, one record a line, sorted, so equal tables are equal bytes):
//   table    := "float8-table 5" LF { device } { source } { row } "end " HASH LF
//   row      := experts | kernel | linear | mlp
//   device   := "device " CC " " SM_COUNT " " L2_BYTES " " MEM_BYTES " " MEM_CLOCK_MHZ " "
//               SM_CLOCK_MAX_MHZ " " POWER_LIMIT_W " " MIG " " NAME LF
//   source   := "source " GENERATOR " " NVRTC " " CUBLASLT " " NAME LF
//   kernel   := "kernel " problem-key " " provider " " config " " MEDIAN_NS LF
//   provider := "generated" | "cublaslt"
//   config   := as in recipes/gemm_kernel.hpp
//   linear   := "linear " recipe " " dims " " DEVICE " " SPEEDUP " " LO " " HI " " BF16_NS " "
//               SOURCE " " DATE " " TRIAL LF
//   experts  := "experts " and the fields of a linear; the dims are those of an expert linear
//   mlp      := "mlp " and the fields of a linear; the dims are those of an MLP
//   problem-key, recipe and dims are those of recipes/problem.hpp; a kernel's problem is a GEMM
//   HASH     := hash_hex of all bytes before the word "end"
// DEVICE and SOURCE count the records of that kind from 0. The versions of a source are "0 - -" where
// they are not known. DATE is year-month-day, TRIAL the trial's uuid. Times and speedups are
// positive, finite and the shortest that read back the same. Version 3 had the keys of version 0.1, and version
// 4 no MLPs; both are read too.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/gemm_kernel.hpp"
#include "recipes/problem.hpp"

namespace f8 {

// A class of GPU. 0 stands for what is not known.
struct DeviceClass {
  std::string name;
  int cc = 0;
  int sm_count = 0;
  int64_t l2_bytes = 0;
  int64_t mem_bytes = 0;
  int mem_clock_mhz = 0;
  int sm_clock_max_mhz = 0;
  int power_limit_w = 0;
  bool mig = false;
  bool operator==(const DeviceClass&) const = default;
  // Two classes are told apart by these fields: among the others, the memory that a driver reports
  // differs by a little from release to release.
  [[nodiscard]] bool is_same_class(const DeviceClass& other) const {
    return name == other.name && power_limit_w == other.power_limit_w && mig == other.mig;
  }
};

// The versions of what makes the kernels of a linear: float8's generator, NVRTC, and cuBLASLt, which
// also multiplies in bf16. The driver is none of them, since it runs binaries as they are.
struct ToolchainVersions {
  int generator = 0;
  std::string nvrtc, cublaslt;  // words: "13.0", "13.1.0"
  auto operator<=>(const ToolchainVersions&) const = default;
  [[nodiscard]] bool is_known() const { return *this != ToolchainVersions{}; }
};
[[nodiscard]] std::string to_string(const ToolchainVersions& versions);  // "NVRTC 13.0, ..."

// A source is "built-in" or a database's file name, and the toolchain that made its kernels.
struct TableSource {
  std::string name;
  ToolchainVersions toolchain = {};
  bool operator==(const TableSource&) const = default;
};

struct KernelChoice {
  Problem problem;  // op is a GEMM
  GemmKernel kernel;
  double median_ns = 0;
  bool operator==(const KernelChoice&) const = default;
};

// A measured linear, forward and backward, and where the measurement comes from. One with groups is an
// expert linear, and one that says whether it has a gate an MLP, whose hidden features are n.
struct LinearSpeedup {
  std::string recipe;
  Shape shape;
  double speedup = 0;  // bf16 time over fp8 time
  double lo = 0;
  double hi = 0;
  double bf16_ns = 0;
  size_t device = 0;  // the index among the table's devices
  size_t source = 0;  // and among its sources
  std::string date = "1970-01-01";
  std::string trial = "-";  // the uuid of the float8 trial
  Groups groups = {};
  std::optional<bool> gate = {};
  bool operator==(const LinearSpeedup&) const = default;
};

// How far apart two shapes are: the root of the sum of squares of log2 of the ratios of m, n and k.
[[nodiscard]] double octaves_between(Shape a, Shape b);

class TuningTable {
 public:
  // The classes that were measured, in the order in which they are asked. Kernels come from the
  // first one.
  std::vector<DeviceClass> devices;
  std::vector<TableSource> sources;

  // The entry of the same problem (or recipe, sizes and device), if there is one, is replaced.
  void add(KernelChoice choice);
  void add(LinearSpeedup speedup);
  // Adds what this table lacks: rows of the same problem, or of the same recipe, sizes and class,
  // stay, and other classes are asked after its own.
  void add_behind(const TuningTable& other);
  // Its devices and sources, and the rows of linears, experts and MLPs that are wanted; no kernels.
  [[nodiscard]] TuningTable linears(
      const std::function<bool(const LinearSpeedup&)>& is_wanted) const;
  // Sorted by problem key; speedups by recipe, dims and device, as text.
  [[nodiscard]] const std::vector<KernelChoice>& choices() const { return choices_; }
  [[nodiscard]] const std::vector<LinearSpeedup>& speedups() const { return speedups_; }
  [[nodiscard]] const std::vector<LinearSpeedup>& experts() const { return experts_; }
  [[nodiscard]] const std::vector<LinearSpeedup>& mlps() const { return mlps_; }
  // The name of the first device; empty where there is none.
  [[nodiscard]] std::string_view device_name() const;

  // The choice for this op, recipe, shape, types and accumulation; null where there is none.
  [[nodiscard]] const KernelChoice* find(const Problem& problem) const;
  // A choice for the same op, recipe, types and accumulation at another shape, so far away. Of grouped
  // GEMMs the shapes are those of groups of average size.
  struct Neighbour {
    const KernelChoice* choice = nullptr;
    double octaves = 0;
  };
  // At most so many, the nearest first; equals are in the table's order.
  [[nodiscard]] std::vector<Neighbour> neighbours(const Problem& problem, size_t most) const;

  [[nodiscard]] std::string serialize() const;
  // Accepts what serialize() writes, and wrote in versions 3 and 4, and nothing else; kUnsupported for
  // another version, kCorrupt for everything else, saying which line.
  [[nodiscard]] static Result<TuningTable> parse(std::string_view text);
  [[nodiscard]] std::string hash() const;  // the file's HASH

 private:
  std::vector<KernelChoice> choices_;
  std::vector<LinearSpeedup> speedups_;
  std::vector<LinearSpeedup> experts_;  // those with groups
  std::vector<LinearSpeedup> mlps_;
};

// Those of this name first, then by how far away they are: the sum of |log2| of the ratios of SMs,
// L2, clocks and power, of what both know. Equals keep their order.
void sort_by_nearness(std::vector<DeviceClass>& devices, const DeviceClass& asked);

// The table whose first device is the nearest one of the same compute capability; null where there
// is none of its compute capability.
[[nodiscard]] const TuningTable* nearest_table(std::span<const TuningTable> tables,
                                               const DeviceClass& device);

}  // namespace f8
