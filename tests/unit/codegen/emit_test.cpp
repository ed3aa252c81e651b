// The emitter: golden stubs, determinism, and what it refuses. UPDATE_GOLDEN=1 in the environment rewrites the golden
// files.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "base/file.hpp"
#include "codegen/nvrtc.hpp"
#include "tests/unit/codegen/emit_key.hpp"

namespace f8::codegen {
namespace {

// The header and the stub; the device templates between them are read as files.
std::string without_templates(const std::string& source) {
  const size_t templates = source.find("// ---- ");
  const size_t stub = source.find("// ---- instantiation");
  return source.substr(0, templates) + source.substr(stub);
}

TEST(Emit, GoldenStubs) {
  for (const char* key : {
           "amax/bf16/tensor",
           "amax/f32/rowcol",
           "amax/f16/rowcol/from_f32",
           "cast/bf16.e4m3/tensor/q+qt/from_f32/list",
           "cast/bf16.e4m3/tensor/q+qt",
           "cast/bf16.e5m2/axis/qt/pow2",
           "cast/bf16.e4m3/axis+tensor/q+qt/pow2",
           "cast/bf16.e5m2/delayed/q+qt",
           "cast/f16.e4m3/block128x128/q",
           "amax/bf16/tensor/list",
           "cast/bf16.e4m3/axis/q+qt/pow2/list",
           "amax/f32/block/list",
           "cast/bf16.e4m3/block128x128/q+qt/pow2/shard/list",
           "quantize/bf16.e4m3/tensor/q+qt",
           "cast/bf16.e4m3/axis/q+qt/pow2/hold/count/sums/flag",
           "scale_update",
           "found_inf",
           "fingerprint",
           "column_sums/bf16",
           "bias_grad/f32",
           "glu_cast/silu/bf16.e4m3/delayed/q+qt",
           "glu_backward_cast/silu/bf16.e5m2/delayed/q+qt",
           "merged_glu_backward_cast/silu/bf16.e4m3/axis/q+qt/pow2",
           "merged_glu_backward_up_first_cast/gelu/bf16.e4m3/axis/q+qt/pow2/sums",
           "glu_amax/silu/bf16/rowcol",
           "glu_backward_amax/silu/bf16/tensor",
           "rms_norm_cast/bf16.e4m3/axis/q+qt/pow2",
           "rms_norm_amax/bf16/tensor",
           "layer_norm_cast/bf16.e4m3/axis/q+qt/pow2",
           "layer_norm_amax/bf16/tensor",
           "activation_cast/gelu/bf16.e4m3/axis/q+qt/pow2",
           "activation_backward_cast/relu2/bf16.e5m2/delayed/q+qt/sums",
           "activation_amax/gelu_tanh/bf16/tensor",
           "glu_backward_amax/gelu_tanh/bf16/rowcol",
           "group_layout",
           "route/count/i32",
           "route/place/i64",
           "combine/bf16/bf16",
           "score_gradient/f32/bf16",
           "attention_forward/d128/causal/s4",
           "attention_forward/d128/window/s3",
           "attention_forward/d64/full/s4",
           "attention_forward/d256/causal/s2",
           "attention_forward/d128/causal/packed/s3",
           "attention_cast/d128",
           "attention_cast/d128/packed",
           "attention_cast/d256",
           "attention_layout/d128/packed",
           "attention_spans/d128/packed",
           "attention_finish/d128/packed",
           "attention_backward_cast/d128",
           "attention_backward_dq/d128/causal",
           "attention_backward_dkv/d128/causal",
           "attention_backward_dkv/d128/window/packed",
           "attention_backward_dq/d256/full",
           "attention_backward_dkv/d64/causal",
           "attention_backward_dk/d256/causal",
           "attention_backward_dv/d256/full",
           "rotary/bf16/f32/f32",
           "rotary/bf16/bf16/bf16/inverse",
           "rms_norm/bf16/bf16/bf16/4096/normalized",
           "rms_norm_backward/f16/f32/f16/128",
           "adamw/bf16/tensor/from_f32",
           "adamw_cast/bf16.e4m3/block128x128/q+qt/from_f32/pow2",
           "cast/bf16.e4m3/axis/q+qt/pow2/group",
           "quantize/bf16.e4m3/axis/q+qt/pow2/group",
           "gemm/e4m3.e4m3.bf16/tensor/fast/64x64s8c1x1w1",
           "gemm/e5m2.e4m3.f32/axis/precise/128x128s6c1x2w2p",
           "gemm_m/e4m3.e4m3.bf16/axis/fast/64x64s8c1x2w1",
           "gemm_k/e5m2.e4m3.f32/tensor/precise/128x128s5c1x1w2/+add",
           "gemm_m/bf16.bf16.bf16/tensor/fast/64x64s8c1x1w1/+mn_b",
       }) {
    std::string name = key;
    std::ranges::replace(name, '/', '_');
    const fs::path path = fs::path(FLOAT8_SOURCE_DIR) / "tests/golden" / (name + ".cu");
    const std::string text = without_templates(emit_key(key).source);
    if (std::getenv("UPDATE_GOLDEN") != nullptr) {
      ASSERT_TRUE(write_file_atomic(path, text));
    }
    const auto golden = read_file(path);
    ASSERT_TRUE(golden) << golden.error().message << "; UPDATE_GOLDEN=1 writes it";
    EXPECT_EQ(text, *golden) << path;
  }
}

TEST(Emit, SourceIsCompleteAndNamesItself) {
  const KernelSource source = emit_key("gemm/e4m3.e4m3.bf16/axis/fast/128x128s6c2x1w2p");
  EXPECT_EQ(source.source.find("#include"), std::string::npos);
  EXPECT_TRUE(source.source.starts_with("// gemm/e4m3.e4m3.bf16/axis/fast/128x128s6c2x1w2p\n"));
  EXPECT_NE(source.source.find("float8-tune emit --kernel " + source.key), std::string::npos);
  EXPECT_EQ(source.source, emit_key(source.key).source);
}

TEST(Emit, RasterGroupsShareTheKernel) {
  GemmSpec spec;
  spec.config.raster_group = 8;
  const auto a = emit(spec);
  spec.config.raster_group = 16;
  const auto b = emit(spec);
  ASSERT_TRUE(a && b);
  EXPECT_EQ(a->source, b->source);
}

TEST(Emit, RefusesWhatIsNotLegal) {
  const auto source = emit(GemmSpec{.a = Dtype::kBf16});
  ASSERT_FALSE(source);
  EXPECT_NE(source.error().message.find("operands must be"), std::string::npos);
}

// A stub asserts what the host restates of its kernel: where the template changes alone, or the
// host, NVRTC refuses the source and names the place on the host.
TEST(Emit, HostAndTemplateCannotDisagree) {
  constexpr const char* kGemm = "gemm/e4m3.e4m3.bf16/axis/precise/128x256s4c2x1w2/+bias";
  constexpr const char* kQuantize = "quantize/bf16.e4m3/axis/q+qt";
  const struct {
    const char* key;
    std::string_view text, changed, place;
  } cases[] = {
      {kGemm, "return at_operands() + operands();", "return at_operands() + operands() + 8;",
       "dynamic_smem_bytes()"},
      {kGemm, "kLayout.bytes() == ", "kLayout.bytes() == 1", "dynamic_smem_bytes()"},
      {kGemm, "4 * operand_floats() + 2", "8 * operand_floats() + 2", "dynamic_smem_bytes()"},
      {kGemm, "128 * (Config::kWarpgroups + 1)", "128 * (Config::kWarpgroups + 2)",
       "threads_per_block()"},
      {kGemm, "(kMmaTiles + Config::kPromotionAccumulators)", "(kMmaTiles + 3)",
       "gemm_accumulators()"},
      {kGemm, "kClusterSize = Config::kClusterM *", "kClusterSize = 2 * Config::kClusterM *",
       "the cluster's size"},
      {kGemm, "  u32 raster_group;", "  u32 raster_group, more[2];", "kernel_args.cuh"},
      {kQuantize, "kSharedBytes = kStashBytes", "kSharedBytes = 2 * kStashBytes",
       "dynamic_smem_bytes()"},
      {kQuantize, "  u64* sync;", "  u64 *sync, *more;", "kernel_args.cuh"},
      {"amax/bf16/rowcol/list", "kTileThreads = 256", "kTileThreads = 128", "threads_per_block()"},
      {"cast/bf16.e4m3/axis/q", "  i64 ld_qt;", "  i64 ld_qt, more;", "kernel_args.cuh"},
      {"scale_update", "kUpdateThreads = 256", "kUpdateThreads = 512", "threads_per_block()"},
      {"column_sums/bf16", "  float* sums;  // [ceil", "  float *sums, *more;  // [ceil",
       "kernel_args.cuh"},
      {"bias_grad/bf16", "  i32 add;", "  i32 add, more[2];", "kernel_args.cuh"},
      {"route/place/i32", "kRouteThreads = 256", "kRouteThreads = 128", "threads_per_block()"},
      {"combine/f16/f32", "  void* out;            // [tokens", "  void *out, *more;  // [tokens",
       "kernel_args.cuh"},
      {"attention_forward/d128/full/s4", "kBarriers + 8 *", "kBarriers + 16 *",
       "dynamic_smem_bytes()"},
      {"group_layout", "kGroupThreads = 1024", "kGroupThreads = 512", "threads_per_block()"},
  };
  for (const auto& c : cases) {
    KernelSource source = emit_key(c.key);
    const size_t at = source.source.find(c.text);
    ASSERT_NE(at, std::string::npos) << c.key << ": " << c.text;
    source.source.replace(at, c.text.size(), c.changed);
    const auto ptx = compile_to_ptx(source);
    ASSERT_FALSE(ptx) << c.key << ": " << c.changed;
    EXPECT_NE(ptx.error().message.find(f8::format("{} on the host", c.place)), std::string::npos)
        << ptx.error().message;
  }
}

}  // namespace
}  // namespace f8::codegen
