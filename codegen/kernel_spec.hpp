// A kernel spec describes a kernel: it is enough to emit it, and has nothing that varies from call
// to call. Shapes, pointers and scales are run-time arguments, so layers and token counts share
// kernels.
//
// A spec has a text form, its key, which names it in golden files and in `emit --kernel`:
//   amax   := "amax/" in "/" over ["/from_f32"] ["/flag"] ["/list"]
//             over   := "tensor" | "block" | axes ["+tensor"]
//             axes   := "row" | "col" | "rowcol"
//   cast   := ("cast/" | "quantize/") in "." out "/" scale ["+" scale] "/" copies option*
//             scale  := "tensor" | "delayed" | "axis" | "block1x128" | "block128x128"
//             copies := "q" | "qt" | "q+qt"        two scales: that of q, that of qt
//             option := "/from_f32" | "/pow2" | "/hold" | "/count" | "/sums" | "/flag" | "/shard" |
//                       "/list"                    in this order
//             "quantize/" is amax and cast in one launch
//   gemm   := ("gemm/" | "gemm2/") a "." b "." d "/" scale "/" accum "/" tile ["/" epilogue]
//             accum    := "fast" | "precise"
//             tile     := tile_m "x" tile_n "s" stages "c" cluster_m "x" cluster_n ["k" split_k]
//                         "w" warpgroups ["p"]
//             epilogue := ["+bias"] ["+add"] ["+amax"] ["+pow2"] ["+shards"]
//             "gemm2/" is a grouped GEMM of two problems
//   update := "scale_update"
//   found  := "found_inf"
//   weight := "fingerprint"
//   sums   := "column_sums/" in
//   bias   := "bias_grad/" out
// A GEMM's configuration, as the database and `--config` have it, adds what the launch alone needs:
//   config := tile "g" raster_group
// Examples: gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w2 and 128x256s4c2x1w2g8
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.hpp"
#include "recipes/dtype.hpp"
#include "recipes/gemm_kernel.hpp"
#include "recipes/recipe.hpp"

namespace f8::codegen {

// A GEMM with block scales has the mode of b; a's are always 1x128.
using ScaleMode = Granularity;

struct AmaxSpec {
  Dtype in = Dtype::kBf16;
  bool tensor = true;
  bool row = false;
  bool col = false;
  bool block = false;      // alone: over the 128x128 blocks of a whole that x is some rows of
  bool list = false;       // takes up to kernels::kMaxListed matrices, else kMaxTensors
  bool noop_flag = false;  // does nothing where a flag says that its results are there already
  bool from_f32 = false;   // x is in fp32, and each element is rounded to `in` as it is read
  bool operator==(const AmaxSpec&) const = default;
};

struct CastSpec {
  Dtype in = Dtype::kBf16;
  Dtype out = Dtype::kE4m3;
  ScaleMode scale_q = ScaleMode::kTensor;
  ScaleMode scale_qt = ScaleMode::kTensor;  // rows and blocks of qt run along the columns of x
  bool q = true;                            // write the row-major copy
  bool qt = true;                           // write the transposed copy
  bool pow2 = false;
  bool delayed = false;     // tensor scales are on the device already, and the amax is recorded
  bool one_launch = false;  // computes the amaxes itself, for tensor and axis scales
  bool list = false;        // as in AmaxSpec
  // ("/hold") an amax that is not finite gives scale 1, else NaN or 0; with a delayed scale
  // infinities saturate, else they become NaN
  bool saturate = false;
  bool count = false;      // adds to the copies' counters
  bool sums = false;       // leaves the sums of the columns too, as column_sums does
  bool noop_flag = false;  // as in AmaxSpec
  // x is some rows of a whole whose 128x128 blocks it may cut: the amaxes of all blocks are given.
  bool shard = false;
  bool from_f32 = false;  // as in AmaxSpec
  bool operator==(const CastSpec&) const = default;
};

// The type of x in memory.
template <class Spec>
[[nodiscard]] constexpr Dtype memory_type(const Spec& spec) {
  return spec.from_f32 ? Dtype::kF32 : spec.in;
}

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
  int problems = 1;     // 2: a grouped GEMM, one launch for two problems of these types ("gemm2/")
  GemmConfig config = {};
  bool operator==(const GemmSpec&) const = default;
};

// The scale update of delayed scaling: rolls histories and computes the scales of the next step.
struct ScaleUpdateSpec {
  bool operator==(const ScaleUpdateSpec&) const = default;
};

// Delayed scaling: tells whether the amaxes of a step are finite ("found_inf").
struct FoundInfSpec {
  bool operator==(const FoundInfSpec&) const = default;
};

// Whether weights changed since the fingerprints that are in device memory ("fingerprint").
struct FingerprintSpec {
  bool operator==(const FingerprintSpec&) const = default;
};

// The gradient of a bias in two kernels, in a fixed order: the column sums of each 128 rows, and
// the sums of those.
struct ColumnSumsSpec {
  Dtype in = Dtype::kBf16;
  bool operator==(const ColumnSumsSpec&) const = default;
};
struct BiasGradSpec {
  Dtype out = Dtype::kBf16;
  bool operator==(const BiasGradSpec&) const = default;
};

using KernelSpec = std::variant<AmaxSpec, CastSpec, GemmSpec, ScaleUpdateSpec, FoundInfSpec,
                                FingerprintSpec, ColumnSumsSpec, BiasGradSpec>;

// True where a copy that the cast writes has scales of this mode.
[[nodiscard]] bool has_scale(const CastSpec& spec, ScaleMode mode);

[[nodiscard]] std::string key(const KernelSpec& spec);
[[nodiscard]] Result<KernelSpec> parse_kernel_spec(std::string_view text);

// True where a GEMM can make use of scales that are powers of two: axis scales with nothing between
// them and the rounding to bf16.
[[nodiscard]] bool takes_pow2(const GemmSpec& spec);

// Checks that a spec is legal on Hopper: register and shared-memory budgets, tile multiples. The
// error says which limit is exceeded and by how much; the tuner records it as the reason of a
// pruned configuration.
[[nodiscard]] Status validate(const KernelSpec& spec);

[[nodiscard]] int threads_per_block(const KernelSpec& spec);
[[nodiscard]] int dynamic_smem_bytes(const KernelSpec& spec);
// Out buffers of 64 rows for each consumer warpgroup: as many as shared memory leaves room for, up
// to its part of a tile, so that d drains while the next tile is computed.
[[nodiscard]] int gemm_out_buffers(const GemmSpec& spec);
// Bytes of a row of an out buffer: 128 or 64.
[[nodiscard]] int out_row_bytes(const GemmSpec& spec);

// The amax kernel that a cast needs before it; none where its scales are delayed or those of blocks
// that it has whole.
[[nodiscard]] std::optional<AmaxSpec> amax_before(const CastSpec& spec);
// True where a cast may take some rows of a whole whose blocks it cuts: 128x128 blocks alone have
// scales.
[[nodiscard]] bool takes_shards(const CastSpec& spec);
// Blocks of a one-launch cast that fit an SM at once; its registers are bounded accordingly.
inline constexpr int kQuantizeBlocksPerSm = 4;
// True where a cast can compute its amaxes itself.
[[nodiscard]] bool can_be_one_launch(const CastSpec& spec);
// True where its one-launch kernel is that of quantize_rows.cuh: no block waits for another, so it
// takes any size.
[[nodiscard]] bool scales_rows_alone(const CastSpec& spec);
// True where its blocks wait for each other, so that all must be resident: a cooperative launch.
[[nodiscard]] bool is_cooperative(const CastSpec& spec);

// spec.config with as many of its stages as fit into shared memory with what else the spec needs;
// nullopt where two do not fit or the configuration is not legal at all.
[[nodiscard]] std::optional<GemmConfig> with_fitting_stages(GemmSpec spec);
// Every configuration that the tuner may choose for this GEMM (config is ignored in the argument),
// in no particular order of merit; each of them compiles without spills.
[[nodiscard]] std::vector<GemmConfig> gemm_candidates(const GemmSpec& spec);

}  // namespace f8::codegen
