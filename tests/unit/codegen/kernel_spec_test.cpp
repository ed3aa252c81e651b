// Keys of kernel specs: round trips, and one clear error for what is malformed or does not fit
// Hopper.
#include "codegen/kernel_spec.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace f8::codegen {
namespace {

TEST(KernelSpec, KeysRoundTrip) {
  for (const char* text : {
           "amax/bf16/tensor",
           "amax/f16/row",
           "amax/f32/col",
           "amax/bf16/rowcol",
           "cast/bf16.e4m3/tensor/q+qt",
           "cast/f32.e5m2/axis/qt/pow2",
           "cast/f16.e4m3/axis/q",
           "cast/bf16.e4m3/axis+tensor/q+qt/pow2",
           "cast/bf16.e4m3/delayed/q+qt",
           "cast/bf16.e4m3/delayed+axis/q+qt",
           "cast/bf16.e4m3/block1x128/q+qt/pow2",
           "cast/bf16.e4m3/block128x128/qt/pow2",
           "amax/bf16/row+tensor",
           "amax/bf16/rowcol+tensor",
           "amax/bf16/tensor/list",
           "amax/bf16/rowcol+tensor/list",
           "cast/bf16.e4m3/tensor/q+qt/list",
           "cast/bf16.e4m3/axis/q+qt/pow2/list",
           "quantize/bf16.e4m3/axis+tensor/q+qt/pow2",
           "amax/bf16/rowcol+tensor/flag/list",
           "amax/f32/block/list",
           "cast/bf16.e4m3/block128x128/q+qt/pow2/hold/count/shard/list",
           "cast/f16.e5m2/block128x128/qt/shard",
           "cast/bf16.e4m3/axis/q+qt/pow2/hold/count/sums/flag",
           "amax/f16/rowcol+tensor/from_f32/flag/list",
           "cast/bf16.e4m3/block128x128/q+qt/from_f32/pow2/shard/list",
           "cast/bf16.e4m3/delayed/q/hold",
           "cast/f32.e4m3/tensor/q+qt/count/flag/list",
           "quantize/bf16.e4m3/tensor/q/hold",
           "scale_update",
           "found_inf",
           "fingerprint",
           "rotary/bf16/bf16/bf16",
           "rotary/f32/f32/f16/inverse",
           "rms_norm/bf16/f32/f32/64/normalized",
           "rms_norm_backward/f32/f32/f32/32768",
           "adamw/bf16/rowcol+tensor/from_f32",
           "adamw_cast/bf16.e4m3/block128x128/q+qt/from_f32/pow2",
           "column_sums/f16",
           "bias_grad/f32",
           "glu_cast/silu/bf16.e4m3/delayed/q+qt/hold/count",
           "glu_cast/silu/f32.e4m3/block1x128/q/pow2",
           "glu_cast/silu/f32.e4m3/tensor/q",
           "glu_backward_cast/silu/bf16.e5m2/delayed/q+qt/hold/count",
           "glu_backward_cast/silu/bf16.e4m3/axis/q+qt/pow2",
           "rms_norm_cast/bf16.e4m3/axis/q+qt/pow2",
           "activation_cast/gelu/f16.e4m3/delayed/q/hold",
           "activation_backward_cast/relu2/bf16.e5m2/axis+tensor/q+qt/count/sums",
           "activation_amax/silu/bf16/tensor",
           "activation_backward_amax/gelu_tanh/f16/rowcol+tensor",
           "glu_cast/gelu_tanh/bf16.e4m3/block1x128/q",
           "rms_norm_amax/f16/row+tensor",
           "layer_norm_cast/f32.e4m3/block128x128+block1x128/q+qt/count",
           "layer_norm_amax/bf16/col",
           "glu_amax/silu/bf16/tensor",
           "glu_backward_amax/silu/f16/rowcol+tensor",
           "merged_glu_backward_cast/gelu/bf16.e5m2/delayed/q+qt",
           "merged_glu_backward_amax/silu/bf16/row+tensor",
           "merged_glu_backward_up_first_cast/silu/f16.e4m3/axis/q+qt/pow2/sums",
           "merged_glu_backward_up_first_amax/relu2/f32/rowcol",
           "glu_backward_cast/silu/bf16.e4m3/delayed/q+qt/sums",
           "group_layout",
           "route/count/i64",
           "route/place/i32",
           "combine/bf16/f32",
           "score_gradient/f16/f16",
           "attention_forward/d128/causal/s3",
           "attention_forward/d128/full/s2",
           "attention_forward/d64/causal/s4",
           "attention_forward/d256/window/packed/s2",
           "attention_cast/d256",
           "attention_forward/d128/window/s3",
           "attention_forward/d128/causal/packed/s3",
           "attention_forward/d128/window/packed/s2",
           "attention_sum_keys/d128",
           "attention_cast/d128",
           "attention_dequantize/d128",
           "attention_dequantize/d128/packed",
           "attention_layout/d128/packed",
           "attention_spans/d128/packed",
           "attention_finish/d64/packed",
           "attention_backward_cast/d128",
           "attention_backward_cast/d128/packed",
           "attention_backward_dq/d128/full",
           "attention_backward_dq/d128/window/packed",
           "attention_backward_dkv/d128/causal",
           "attention_backward_dkv/d128/causal/packed",
           "attention_backward_dkv/d64/full",
           "attention_backward_dk/d256/causal",
           "attention_backward_dv/d256/window/packed",
           "amax/bf16/rowcol+tensor/group",
           "amax/f16/tensor/from_f32/group",
           "cast/bf16.e4m3/axis+tensor/q+qt/pow2/hold/group",
           "cast/bf16.e4m3/delayed/q+qt/group",
           "amax/bf16/tensor/from_f32/flag/group",
           "cast/bf16.e4m3/axis/q+qt/from_f32/pow2/flag/group",
           "gemm_k/bf16.bf16.f32/tensor/fast/128x128s6c1x1w2p/+add",
           "gemm_k/f16.f16.f16/tensor/fast/192x128s4c1x1w3",
           "gemm_m/bf16.bf16.bf16/tensor/fast/128x160s4c1x2w2p",
           "gemm_m/f16.f16.f32/tensor/fast/128x256s3c1x2w2/+mn_b",
           "amax/bf16/rowcol+tensor/group/swiglu_backward",
           "amax/f32/col/group/gather",
           "cast/f16.e4m3/block1x128/q+qt/pow2/hold/group/gather_score",
           "quantize/bf16.e4m3/axis/q/pow2/group/swiglu",
           "cast/bf16.e4m3/block128x128/q+qt/from_f32/pow2/flag/group/pair",
           "quantize/bf16.e4m3/axis/q/pow2/group",
           "quantize/bf16.e4m3/axis+tensor/q+qt/pow2/group",
           "gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w2",
           "gemm/e4m3.e4m3.f16/tensor/fast/128x256s4c2x1w2/+bias+add",
           "gemm/e5m2.e4m3.f32/axis/precise/128x128s6c1x2w2p",
           "gemm/e4m3.e4m3.bf16/axis/fast/128x192s4c2x1w2/+add+pow2",
           "gemm2/e4m3.e4m3.bf16/axis/precise/256x128s4c2x1w2/+pow2",
           "gemm_m/e4m3.e4m3.bf16/axis/fast/128x128s6c1x2w2p/+pow2",
           "gemm_k/e4m3.e4m3.f32/block1x128/precise/128x128s4c2x1w2/+add",
           "gemm_m/e4m3.e4m3.bf16/block128x128/precise/128x128s4c1x1w2",
           "cast/bf16.e4m3/block1x128/q+qt/pow2/group",
           "gemm_k/e4m3.e4m3.bf16/axis/precise/128x128s4c1x1w2/+pow2",
           "gemm_m/e5m2.e4m3.f32/tensor/precise/256x128s4c1x1w2",
           "gemm2/e4m3.e4m3.bf16/axis/precise/256x128s4c2x1w2/+pow2+shards",
       }) {
    const auto spec = parse_kernel_spec(text);
    ASSERT_TRUE(spec) << text << ": " << spec.error().message;
    EXPECT_EQ(key(*spec), text);
  }
}

TEST(KernelSpec, RasterGroupIsPartOfTheConfigurationNotOfTheKernel) {
  const auto config = parse_gemm_config("128x256s4c2x1w2g16");
  ASSERT_TRUE(config);
  EXPECT_EQ(config->raster_group, 16);
  EXPECT_EQ(key(*config), "128x256s4c2x1w2g16");
  EXPECT_EQ(key(KernelSpec(GemmSpec{.config = *config})),
            "gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w2");
}

TEST(KernelSpec, MalformedKeysNameThemselves) {
  for (const char* text : {
           "",
           "gemm",
           "gemm/",
           "amax/bf16",
           "amax/e4m3/tensor",
           "amax/bf16/diagonal",
           "cast/bf16.bf16/tensor/q",
           "cast/bf16.e4m3/tensor/",
           "cast/bf16.e4m3/row/q",
           "cast/bf16.e4m3/tensor/q/pow3",
           "cast/bf16.e4m3/tensor+tensor/q+qt",
           "cast/bf16.e4m3/axis+tensor/q",
           "cast/bf16.e4m3/delayed+tensor/q+qt",
           "amax/bf16/list",
           "amax/f32/tensor/from_f32",
           "cast/f32.e4m3/tensor/q/from_f32",
           "cast/bf16.e4m3/tensor/q/pow2/from_f32",
           "amax/bf16/tensor/list/list",
           "cast/bf16.e4m3/tensor/q/list/pow2",
           "quantize/bf16.e4m3/tensor/q/list",
           "quantize/f32.e4m3/tensor/q",
           "quantize/f16.e4m3/axis/q/from_f32",
           "amax/bf16/row+row",
           "amax/bf16/tensor+row",
           "scale_update/",
           "amax/bf16/tensor/list/flag",
           "amax/bf16/block+tensor",
           "amax/bf16/rowblock",
           "cast/bf16.e4m3/tensor/q/shard",
           "cast/bf16.e4m3/block1x128/q/shard",
           "cast/bf16.e4m3/axis+block128x128/q+qt/shard",
           "cast/bf16.e4m3/block128x128/q/list/shard",
           "amax/bf16/tensor/hold",
           "cast/bf16.e4m3/tensor/q/hold/pow2",
           "cast/bf16.e4m3/tensor/q/flag/flag",
           "cast/bf16.e4m3/tensor/q/pow2/",
           "cast/bf16.e4m3/tensor/q/sums/list",
           "quantize/bf16.e4m3/tensor/q/count",
           "quantize/bf16.e4m3/tensor/q/sums",
           "quantize/bf16.e4m3/tensor/q/flag",
           "column_sums/e4m3",
           "column_sums/",
           "bias_grad/e5m2",
           "glu_cast/silu/bf16.e4m3/block1x128/q/group",
           "amax/bf16/col/gather",
           "amax/f16/tensor/from_f32/group/swiglu",
           "cast/bf16.e4m3/axis/q/swiglu",
           "cast/bf16.e4m3/axis/q/pair",
           "cast/bf16.e4m3/axis/q/swiglu/group",
           "cast/bf16.e4m3/axis/q/group/gather/gather",
           "cast/bf16.e4m3/axis/q/group/scatter",
           "glu_amax/silu/bf16/block",
           "glu_amax/silu/bf16/tensor/swiglu",
           "glu_amax/silu/bf16/tensor/list",
           "glu_amax/silu/bf16/row/flag",
           "glu_amax/silu/f16/col/from_f32",
           "glu_backward_amax/silu/bf16/rowcol/group",
           "glu_backward_amax/silu/",
           "glu_cast/silu/bf16.e4m3/delayed/q/sums",
           "glu_cast/silu/bf16.e4m3/delayed/q/flag",
           "glu_cast/silu/bf16.e4m3/block128x128/q/shard",
           "glu_cast/silu/",
           "glu_cast/bf16.e4m3/delayed/q",
           "activation_cast/tanh/bf16.e4m3/delayed/q",
           "activation_amax/",
           "activation_cast/gelu/bf16.e4m3/delayed/q/sums",
           "rms_norm_cast/gelu/bf16.e4m3/delayed/q",
           "layer_norm_cast/silu/bf16.e4m3/delayed/q",
           "layer_norm_amax/",
           "bias_grad/bf16/add",
           "scale_update/",
           "found_inf/bf16",
           "gemm/e4m3.e4m3.bf16/tensor/fast/0128x256s4c2x1w2",
           "gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w2/",
           "gemm/e4m3.e4m3.bf16/tensor/fast",
           "gemm/e4m3.e4m3.bf16/tensor/quick/128x256s4c2x1w2",
           "gemm/e4m3.bf16.bf16/tensor/fast/128x256s4c2x1w2",
           "gemm/e4m3.e4m3.e4m3/tensor/fast/128x256s4c2x1w2",
           "gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w2g8",
           "gemm/e4m3.e4m3.bf16/tensor/fast/128x256s4c2x1w99999999999",
           "gemm/e4m3.e4m3.bf16/axis/fast/128x192s4c2x1w2/+pow2+add",
           "gemm/e4m3.e4m3.bf16/axis/fast/128x192s4c2x1w2/+bias+pow2",
           "gemm/e4m3.e4m3.f32/axis/fast/128x192s4c2x1w2/+pow2",
           "gemm/e4m3.e4m3.bf16/tensor/fast/128x192s4c2x1w2/+pow2",
           "gemm/e4m3.e4m3.bf16/tensor/fast/128x192s4c2x1w2/+amax+shards",
           "group_layout/",
           "route/",
           "route/count",
           "route/place/i16",
           "route/count/i32/",
           "attention_forward/d96/causal/s3",
           "attention_forward/d256/causal/s3",
           "attention_forward/d128/causal/s1",
           "attention_forward/d128/full",
           "attention_forward/d128/causal/s3/packed",
           "attention_cast/d96",
           "attention_cast/d128/pack",
           "attention_layout/d128",
           "attention_spans/d128",
           "attention_finish/d128",
           "attention_backward_cast/d96",
           "attention_backward_dq/d96/full",
           "attention_backward_dkv/d256/full",
           "attention_backward_dk/d128/full",
           "attention_backward_dkv/d128/causal/s4",
           "combine/bf16",
           "combine/e4m3/bf16",
           "combine/bf16/bf16/",
           "score_gradient/bf16/e5m2",
           "amax/bf16/tensor/list/group",
           "cast/bf16.e4m3/delayed/q/list/group",
           "cast/bf16.e4m3/tensor/q/count/group",
           "quantize/f32.e4m3/tensor/q/group",
           "gemm_k/e4m3.e4m3.bf16/tensor/fast/128x128s4c1x1k2w2",
           "gemm_k/bf16.bf16.bf16/axis/fast/128x128s4c1x1w2",
           "gemm_k/bf16.bf16.bf16/tensor/precise/128x128s4c1x1w2",
           "gemm_k/bf16.f16.bf16/tensor/fast/128x128s4c1x1w2",
           "gemm_k/bf16.bf16.bf16/tensor/fast/128x160s4c1x1w2",
           "gemm_k/bf16.bf16.bf16/tensor/fast/128x192s4c2x1w2",
           "gemm/bf16.bf16.bf16/tensor/fast/128x128s4c1x1w2",
           "gemm_m/bf16.bf16.bf16/axis/fast/128x128s4c1x1w2",
           "gemm_m/bf16.bf16.bf16/tensor/precise/128x128s4c1x1w2",
           "gemm_m/bf16.f16.bf16/tensor/fast/128x128s4c1x1w2",
           "gemm_m/bf16.bf16.bf16/tensor/fast/128x160s4c1x1w2/+mn_b",
           "gemm_m/e4m3.e4m3.bf16/tensor/fast/128x128s4c1x1w2/+mn_b",
           "gemm_k/bf16.bf16.bf16/tensor/fast/128x128s4c1x1w2/+mn_b",
           "gemm_k/e4m3.e4m3.bf16/block128x128/precise/128x128s4c1x1w2",
           "gemm_k/e4m3.e4m3.bf16/tensor/fast/128x128s4c1x1w2/+amax",
           "gemm_m/e4m3.e4m3.bf16/tensor/fast/128x128s4c1x1w2/+add",
           "gemm_m/e4m3.e4m3.bf16/block1x128/precise/128x128s4c1x1w2",
           "gemm_m/e4m3.e4m3.bf16/tensor/fast/128x128s4c2x1w2",
           "gemm_m/e4m3.e4m3.bf16/tensor/fast/128x128s4c1x1k2w2",
           "gemm_m/e4m3.e4m3.bf16/tensor/fast/128x128s4c1x1w2/+add",
           "gemm_m/e4m3.e4m3.bf16/block1x128/precise/128x128s4c1x1w2",
       }) {
    const auto spec = parse_kernel_spec(text);
    ASSERT_FALSE(spec) << text;
    EXPECT_EQ(spec.error().code, ErrorCode::kInvalidArgument) << text;
    EXPECT_NE(spec.error().message.find(text), std::string::npos) << spec.error().message;
  }
  for (const char* text :
       {"", "128", "128x256", "128x256s4c2x1w2", "128x256s4c2x1w2g8 ", "x", "h3"}) {
    EXPECT_FALSE(parse_gemm_config(text)) << text;
  }
}

std::string why(const GemmSpec& spec) {
  const Status status = validate(spec);
  return status ? "" : status.error().message;
}

TEST(KernelSpec, LimitsSayWhichAndByHowMuch) {
  GemmSpec spec;
  EXPECT_EQ(why(spec), "");
  spec.config.stages = 5;
  EXPECT_NE(why(spec).find("bytes of shared memory"), std::string::npos) << why(spec);
  spec = {};
  spec.config = {.tile_m = 256, .tile_n = 256, .stages = 2};
  EXPECT_NE(why(spec).find("accumulators"), std::string::npos) << why(spec);
  spec = {};
  spec.config.tile_n = 144;
  EXPECT_NE(why(spec).find("tile_n"), std::string::npos) << why(spec);
  spec = {.scale = ScaleMode::kBlock1x128};
  spec.config.tile_n = 160;
  EXPECT_NE(why(spec).find("steps of 64"), std::string::npos) << why(spec);
  spec = {};
  spec.config.cluster_m = 4;
  spec.config.cluster_n = 2;
  EXPECT_NE(why(spec).find("clusters"), std::string::npos) << why(spec);
  spec = {};
  spec.config.pingpong = true;
  spec.config.warpgroups = 1;
  EXPECT_NE(why(spec).find("ping-pong"), std::string::npos) << why(spec);
}

TEST(KernelSpec, SplitKTakesTheClusterAndRoomForItsSums) {
  GemmSpec spec;
  spec.config = parse_gemm_config("128x128s5c1x1k2w2g4").value();
  EXPECT_EQ(why(spec), "");
  spec.config.stages = 6;  // fit without the 32 KB of the other CTA's sums
  EXPECT_NE(why(spec).find("bytes of shared memory"), std::string::npos) << why(spec);
  spec.config.split_k = 1;
  EXPECT_EQ(why(spec), "");
  spec.config = parse_gemm_config("128x160s3c1x1k2w2g4").value();
  EXPECT_NE(why(spec).find("32 columns"), std::string::npos) << why(spec);
  spec.config = parse_gemm_config("128x128s4c2x1k2w2g4").value();
  EXPECT_NE(why(spec).find("the whole cluster"), std::string::npos) << why(spec);
}

template <class... Kinds>
std::vector<std::string> kinds_of(const std::variant<Kinds...>&) {
  std::vector<std::string> all;
  (all.insert(all.end(), std::begin(Kinds::kKinds), std::end(Kinds::kKinds)), ...);
  return all;
}

TEST(KernelSpec, AnUnknownKindIsRefusedWithTheRegisteredOnes) {
  const auto spec = parse_kernel_spec("softmax/bf16");
  ASSERT_FALSE(spec);
  EXPECT_NE(spec.error().message.find("unknown kind 'softmax'"), std::string::npos)
      << spec.error().message;
  std::vector<std::string> kinds = kinds_of(KernelSpec());
  for (const std::string& kind : kinds) {
    EXPECT_NE(spec.error().message.find(kind), std::string::npos) << kind;
  }
  std::ranges::sort(kinds);
  EXPECT_EQ(std::ranges::adjacent_find(kinds), kinds.end()) << "two kinds of one name";
}

TEST(KernelSpec, CandidatesAreLegalAndDistinct) {
  for (const bool fast : {false, true}) {
    GemmSpec spec{.fast = fast};
    std::vector<std::string> keys;
    for (const GemmConfig& config : gemm_candidates(spec)) {
      spec.config = config;
      EXPECT_EQ(why(spec), "");
      EXPECT_LE(spec.launch().dynamic_smem_bytes, 232448);
      keys.push_back(key(config));
    }
    EXPECT_GE(keys.size(), 20U);
    std::ranges::sort(keys);
    EXPECT_EQ(std::ranges::adjacent_find(keys), keys.end());
  }
}

TEST(KernelSpec, AResultIsStoredInWholeRowsOfItsTile) {
  GemmSpec spec;
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    spec.d = type;
    const auto element = static_cast<int>(size_bytes(type));
    for (int n = 64; n <= 256; n += 32) {
      spec.config.tile_n = n;
      EXPECT_EQ(n * element % out_row_bytes(spec), 0) << n;
      EXPECT_EQ(out_row_bytes(spec), element == 2 && n % 64 != 0 ? 64 : 128) << n;
    }
  }
}

// Fewer buffers would make each 64 x 64 of a result wait for the store of the one before.
TEST(KernelSpec, CandidatesKeepAWholeResultOf16BitsInBuffers) {
  for (const char* scale : {"tensor/fast", "axis/fast", "tensor/precise", "block128x128/precise"}) {
    auto spec = std::get<GemmSpec>(
        parse_kernel_spec(f8::format("gemm/e4m3.e4m3.bf16/{}/64x64s4c1x1w1", scale)).value());
    for (const GemmConfig& config : gemm_candidates(spec)) {
      if (config.pingpong || config.split_k > 1) continue;  // hidden, or a part of it
      spec.config = config;
      const int chunks =
          config.tile_m / config.warpgroups / 64 * config.tile_n * 2 / out_row_bytes(spec);
      const bool small = config.tile_m * config.tile_n < 128 * 192;  // whose stages are short
      EXPECT_GE(gemm_out_buffers(spec), small ? 1 : chunks) << key(KernelSpec(spec));
    }
  }
}

}  // namespace
}  // namespace f8::codegen
