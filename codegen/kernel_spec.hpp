// What a kernel is: enough to emit it, and nothing that varies from call to call. Shapes, pointers
// and scales are run-time arguments, so layers and token counts share kernels.
//
// A spec has a text form, its key, which names it in golden files and in `emit --kernel`:
//   amax  := "amax/" in "/" over ["/flag"] ["/list"]
//            over   := "tensor" | lines ["+tensor"]    lines := "row" | "col" | "rowcol"
//   cast  := "cast/" in "." out "/" scale ["+" scale] "/" copies extra*
//            scale  := "tensor" | "delayed" | "axis" | "block1x128" | "block128x128"
//            copies := "q" | "qt" | "q+qt"; two scales: that of q, that of qt
//            extra  := "/pow2" | "/hold" | "/count" | "/sums" | "/flag" | "/list"     in this order
//            "quantize/" for "cast/": amax and cast in one launch
//   gemm  := ("gemm/" | "gemm2/") a "." b "." d "/" scale "/" accum "/" tile ["/" extras]
//            scale as above             accum  := "fast" | "precise"
//            tile := tile_m "x" tile_n "s" stages "c" cluster_m "x" cluster_n ["k" split_k]
//                    "w" warpgroups ["p"]
//            extras := ["+bias"] ["+add"] ["+amax"] ["+pow2"]
// A GEMM's configuration, as the database and `--config` have it, adds what the launch alone needs:
//   config := tile "g" group
//   update := "scale_update"
//   sums   := "column_sums/" in            bias := "bias_grad/" out
// Examples: gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w2 and 128x256s4c2x1w2g8
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.hpp"
#include "recipes/dtype.hpp"

namespace f8::codegen {

// Which elements share a scale. Of a GEMM with block scales it is b's mode: a's blocks are 1x128.
//   tensor        one value
//   axis          one for each row of an operand (its last dimension is the contraction)
//   block1x128    one for each row and 128 of the contraction: [ceil(k/128)][padded rows], so that
//                 the rows of one block of k are neighbours
//   block128x128  one for each 128 rows and 128 of the contraction: [ceil(rows/128)][padded k
//                 blocks]
// Block scales are padded to a multiple of 4 values a line (16 bytes).
enum class ScaleMode : uint8_t { kTensor, kAxis, kBlock1x128, kBlock128x128 };
[[nodiscard]] constexpr bool is_block(ScaleMode mode) {
  return mode == ScaleMode::kBlock1x128 || mode == ScaleMode::kBlock128x128;
}
[[nodiscard]] std::string_view to_string(ScaleMode mode);

struct AmaxSpec {
  Dtype in = Dtype::kBf16;
  bool tensor = true;
  bool row = false;
  bool col = false;
  bool list = false;     // takes up to kernels::kMaxListed matrices, else kMaxTensors
  bool flagged = false;  // does nothing where a flag says that the results are there already
  bool operator==(const AmaxSpec&) const = default;
};

struct CastSpec {
  Dtype in = Dtype::kBf16;
  Dtype out = Dtype::kE4m3;
  ScaleMode scale_q = ScaleMode::kTensor;   // lines and blocks are those of the copy: of qt along
  ScaleMode scale_qt = ScaleMode::kTensor;  // the columns of x
  bool q = true;                            // write the row-major copy
  bool qt = true;                           // write the transposed copy
  bool pow2 = false;
  bool delayed = false;     // tensor scales lie on the device already, and the amax is recorded
  bool one_launch = false;  // finds the maxima itself: tensor and axis scales
  bool list = false;        // as an amax's
  bool hold = false;        // an amax that is not finite gives scale 1, else NaN or 0
  bool count = false;       // adds to the copies' counters
  bool sums = false;        // leaves the sums of the columns too, as column_sums does
  bool flagged = false;     // as an amax's
  bool operator==(const CastSpec&) const = default;
};

struct GemmConfig {
  int tile_m = 128;
  int tile_n = 256;
  int stages = 4;     // of (tile_m + tile_n) x 128 bytes
  int cluster_m = 2;  // CTAs of a cluster along m share the b tile by multicast, along n the a tile
  int cluster_n = 1;
  int split_k = 1;        // CTAs of a cluster that share a tile's contraction and add up their sums
  int warpgroups = 2;     // math warpgroups; one more warpgroup issues the copies
  bool pingpong = false;  // each math warpgroup works on its own tile, else they share one
  int raster_group = 8;   // tiles of m that rasterisation keeps together; an argument of the launch
  bool operator==(const GemmConfig&) const = default;
};

struct GemmSpec {
  Dtype a = Dtype::kE4m3;
  Dtype b = Dtype::kE4m3;
  Dtype d = Dtype::kBf16;  // bf16, f16 or f32
  ScaleMode scale = ScaleMode::kTensor;
  bool fast = true;
  bool bias = false;  // d += bias[n], of d's type
  bool add = false;   // d += what d held before (beta = 1)
  bool amax = false;  // leaves max |d|, before the rounding to d's type
  bool pow2 = false;  // scales are powers of two, which the generator uses where that is faster
  int problems = 1;   // 2: one launch computes two products of these types ("gemm2/")
  GemmConfig config = {};
  bool operator==(const GemmSpec&) const = default;
};

// Of delayed scaling: rolls histories and computes the scales of the next step ("scale_update").
struct ScaleUpdateSpec {
  bool operator==(const ScaleUpdateSpec&) const = default;
};

// The gradient of a bias in two steps, in a fixed order: the sums of the columns of each 128 rows,
// and those of these sums.
struct ColumnSumsSpec {
  Dtype in = Dtype::kBf16;
  bool operator==(const ColumnSumsSpec&) const = default;
};
struct BiasGradSpec {
  Dtype out = Dtype::kBf16;
  bool operator==(const BiasGradSpec&) const = default;
};

using KernelSpec =
    std::variant<AmaxSpec, CastSpec, GemmSpec, ScaleUpdateSpec, ColumnSumsSpec, BiasGradSpec>;

// Whether a copy that the cast writes has scales of this mode.
[[nodiscard]] bool has_scale(const CastSpec& spec, ScaleMode mode);

[[nodiscard]] std::string key(const KernelSpec& spec);
[[nodiscard]] std::string key(const GemmConfig& config);
[[nodiscard]] Result<KernelSpec> parse_kernel_spec(std::string_view text);
[[nodiscard]] Result<GemmConfig> parse_gemm_config(std::string_view text);

// Whether a GEMM can make use of scales that are powers of two: axis scales with nothing between
// them and the rounding to bf16.
[[nodiscard]] bool takes_pow2(const GemmSpec& spec);

// Legal on Hopper: register and shared-memory budgets, tile multiples. The error says which limit
// and by how much; the tuner records it as the reason of a pruned configuration.
[[nodiscard]] Status validate(const KernelSpec& spec);

[[nodiscard]] int threads_per_block(const KernelSpec& spec);
[[nodiscard]] int dynamic_smem_bytes(const KernelSpec& spec);
// Of 64 rows, of each math warpgroup: what shared memory leaves, up to its share of a tile, so that
// the result drains while the next tile is computed.
[[nodiscard]] int gemm_out_buffers(const GemmSpec& spec);
// Bytes of a row of the result that leave shared memory at once: 128 or 64.
[[nodiscard]] int out_row_bytes(const GemmSpec& spec);

// The amax kernel that a cast needs before it; none where its scales are delayed or its blocks' own.
[[nodiscard]] std::optional<AmaxSpec> amax_before(const CastSpec& spec);
// Blocks of a one-launch cast that fit an SM at once; its registers are bounded accordingly.
inline constexpr int kQuantizeBlocksPerSm = 4;
// Whether a cast can find its maxima itself.
[[nodiscard]] bool can_be_one_launch(const CastSpec& spec);
// Whether its one-launch kernel is rows.cuh's: no block waits for another, so it takes any size.
[[nodiscard]] bool scales_rows_alone(const CastSpec& spec);
// Whether its blocks wait for each other, so that all must be resident: a cooperative launch.
[[nodiscard]] bool is_cooperative(const CastSpec& spec);

// spec.config with as many of its stages as fit beside what else spec needs of shared memory;
// nullopt where two do not fit or the configuration is not legal at all.
[[nodiscard]] std::optional<GemmConfig> with_fitting_stages(GemmSpec spec);
// Every configuration that the tuner may choose for this GEMM (config is ignored in the argument),
// in no particular order of merit; each of them compiles without spills.
[[nodiscard]] std::vector<GemmConfig> gemm_candidates(const GemmSpec& spec);

}  // namespace f8::codegen
