// The tuning table: what the database decided, as plain data that the runtime reads without SQLite.
// A trainer's rank 0 loads it and broadcasts the text; all ranks compare one hash.
//
// File grammar (UTF-8, one record a line, sorted, so equal tables are equal bytes):
//   table    := "float8-table 1" LF "device " NAME LF { choice } { decision } "end " HASH LF
//   choice   := "kernel " problem-key " " provider " " config " " MEDIAN_NS LF
//   provider := "generated" | "cublaslt"
//   config   := GEMM config text, or "h" INT for a cuBLASLt heuristic
//   decision := "linear " recipe " m" INT "n" INT "k" INT " " SPEEDUP " " LO " " HI LF
//   HASH     := hash_hex of all bytes before the word "end"
// Numbers are positive, finite and the shortest that read back the same.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"

namespace f8 {

enum class Provider : uint8_t { kGenerated, kCublasLt };
[[nodiscard]] std::string_view to_string(Provider p);

struct KernelChoice {
  Problem problem;  // op is a GEMM
  Provider provider = Provider::kGenerated;
  std::string config;
  double median_ns = 0;
  bool operator==(const KernelChoice&) const = default;
};

struct LinearSpeedup {
  std::string recipe;
  Shape shape;
  double speedup = 0;  // bf16 time over fp8 time, forward + backward
  double lo = 0;
  double hi = 0;
  bool operator==(const LinearSpeedup&) const = default;
};

class TuningTable {
 public:
  std::string device;  // the device name that the rows were measured on

  // The entry of the same problem (or recipe and shape), if there is one, is replaced.
  void add(KernelChoice choice);
  void add(LinearSpeedup speedup);
  // Sorted by problem key; speedups by recipe and dims, as text.
  [[nodiscard]] const std::vector<KernelChoice>& choices() const { return choices_; }
  [[nodiscard]] const std::vector<LinearSpeedup>& speedups() const { return speedups_; }

  // The choice for exactly this problem, else for the same op, recipe, types and accumulation at
  // the nearest shape (by the sum of |log2| of the ratios of m, n and k; at most 3; the first of
  // equals), else nothing: the cost model decides.
  [[nodiscard]] const KernelChoice* find(const Problem& problem) const;

  // The speedup of this recipe at exactly this shape, else at the nearest one (by the same measure,
  // at most 1), else nothing.
  [[nodiscard]] const LinearSpeedup* find_speedup(std::string_view recipe, Shape shape) const;

  [[nodiscard]] std::string serialize() const;
  // Accepts what serialize() writes and nothing else; kUnsupported for another version, kCorrupt
  // for everything else, saying which line.
  [[nodiscard]] static Result<TuningTable> parse(std::string_view text);
  [[nodiscard]] std::string hash() const;  // the file's HASH

 private:
  std::vector<KernelChoice> choices_;
  std::vector<LinearSpeedup> speedups_;
};

}  // namespace f8
