// One of a linear's GEMMs, or two of them in one launch.
//   gemm := ("gemm/" | "gemm2/" | "gemm_m/" | "gemm_k/") a "." b "." d "/" scale "/" accum "/" tile ["/" epilogue]
//           accum    := "fast" | "precise"
//           tile     := as in recipes/gemm_kernel.hpp
//           epilogue := ["+bias"] ["+add"] ["+amax"] ["+pow2"] ["+shards"] ["+mn_b"]
//           "gemm2/" is a grouped GEMM of two problems, "gemm_m/" one over groups of rows of a,
//           "gemm_k/" one over groups of K; the a and b of groups may be bf16 or f16 (scale tensor, accum fast)
// Example: gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w2
#pragma once

#include <optional>
#include <vector>

#include "codegen/specs/kind.hpp"
#include "recipes/gemm_kernel.hpp"

namespace f8::codegen {

enum class GemmGroups : uint8_t { kNone, kM, kK };

struct GemmSpec {
  Dtype a = Dtype::kE4m3;
  Dtype b = Dtype::kE4m3;
  Dtype d = Dtype::kBf16;  // bf16, f16 or f32
  ScaleMode scale = ScaleMode::kTensor;
  bool fast = true;
  bool bias = false;    // d += bias[n], of d's type
  bool add = false;     // d += what d held before (beta = 1)
  bool amax = false;    // leaves max |d|, before the rounding to d's type
  bool pow2 = false;    // scales are powers of two, which the generator uses where that is faster
  bool shards = false;  // b may lie in shards of K, [shards][n][K / shards], as ranks gather it
  bool mn_b = false;    // M-grouped, of bf16 or f16: b is MN-major, [k][n] of each group
  int problems = 1;     // 2: a grouped GEMM, one launch for two problems of these types ("gemm2/")
  // M-grouped: the rows of a are groups, each with a matrix of b ("gemm_m/"). K-grouped: K is groups,
  // each with a matrix of d ("gemm_k/").
  GemmGroups groups = GemmGroups::kNone;
  GemmConfig config = {};

  // Operands of bf16 or f16 lie as they are, and have no scales. Over groups of K both are MN-major,
  // [k][m] and [k][n].
  [[nodiscard]] bool mn_major_a() const { return !is_fp8(a) && groups == GemmGroups::kK; }
  [[nodiscard]] bool mn_major_b() const { return mn_b || mn_major_a(); }

  static constexpr std::string_view kKinds[] = {"gemm", "gemm2", "gemm_m", "gemm_k"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<GemmSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const GemmSpec&) const = default;
};

// The size of a tensor map. Each problem has three, which are the launch's first parameter.
inline constexpr size_t kTensorMapBytes = 128;

// True where a GEMM can make use of scales that are powers of two: axis scales with nothing between
// them and the rounding to bf16.
[[nodiscard]] bool takes_pow2(const GemmSpec& spec);

// Out buffers of 64 rows for each consumer warpgroup: as many as shared memory leaves room for, up
// to its part of a tile, so that d drains while the next tile is computed.
[[nodiscard]] int gemm_out_buffers(const GemmSpec& spec);
// Bytes of a row of an out buffer: 128 or 64.
[[nodiscard]] int out_row_bytes(const GemmSpec& spec);

// spec.config with as many of its stages as fit into shared memory with what else the spec needs;
// nullopt where two do not fit or the configuration is not legal at all.
[[nodiscard]] std::optional<GemmConfig> with_fitting_stages(GemmSpec spec);
// Every configuration that the tuner may choose for this GEMM (config is ignored in the argument),
// in no particular order of merit; each of them compiles without spills.
[[nodiscard]] std::vector<GemmConfig> gemm_candidates(const GemmSpec& spec);

}  // namespace f8::codegen
