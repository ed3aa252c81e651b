// The cast of tensors to fp8, to one copy or both.
//   cast := ("cast/" | "quantize/") in "." out "/" scale ["+" scale] "/" copies option*
//           scale  := "tensor" | "delayed" | "axis" | "block1x128" | "block128x128"
//           copies := "q" | "qt" | "q+qt"        two scales: that of q, that of qt
//           option := "/from_f32" | "/pow2" | "/hold" | "/count" | "/sums" | "/flag" | "/shard" |
//                     "/list" | "/group" source  in this order; source as in amax.hpp
//           "quantize/" is amax and cast in one launch
#pragma once

#include <optional>

#include "codegen/specs/amax.hpp"

namespace f8::codegen {

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
  bool group = false;     // x has groups of rows, each with scales and copies of its own
  kernels::RowSource source = kernels::RowSource::kMatrix;  // of groups

  static constexpr std::string_view kKinds[] = {"cast", "quantize"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<CastSpec> parse(std::string_view kind, std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const CastSpec&) const = default;
};

// The stub's Config.
[[nodiscard]] std::string cast_config(const CastSpec& spec);

// True where a copy that the cast writes has scales of this mode.
[[nodiscard]] bool has_scale(const CastSpec& spec, ScaleMode mode);

// The amax kernel that a cast needs before it; none where its scales are delayed or those of blocks
// that it has whole.
[[nodiscard]] std::optional<AmaxSpec> amax_before(const CastSpec& spec);
// True where a cast may take some rows of a whole whose blocks it cuts: 128x128 blocks alone have
// scales.
[[nodiscard]] bool takes_shards(const CastSpec& spec);
// Blocks of a one-launch cast that fit an SM at once; its registers are bounded accordingly.
inline constexpr int kQuantizeBlocksPerSm = 4;
[[nodiscard]] int quantize_blocks_per_sm(const CastSpec& spec);  // of groups
// The tiles, or pairs, of groups that these hold.
[[nodiscard]] int quantize_tiles_per_sm(const CastSpec& spec);
// True where a cast can compute its amaxes itself.
[[nodiscard]] bool can_be_one_launch(const CastSpec& spec);
// True where its one-launch kernel is that of quantize_rows.cuh: no block waits for another, so it
// takes any size.
[[nodiscard]] bool scales_rows_alone(const CastSpec& spec);
// True where its one-launch kernel of groups needs the maxima of a group's columns alone.
[[nodiscard]] bool scales_columns_alone(const CastSpec& spec);
// True where its blocks wait for each other, so that all must be resident: a cooperative launch. Of
// groups, none waits for a tile that no block has taken.
[[nodiscard]] bool is_cooperative(const CastSpec& spec);

}  // namespace f8::codegen
