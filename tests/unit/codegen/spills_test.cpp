// Every kernel that the tuner may choose compiles by NVRTC without spills or serialised MMAs. UPDATE_GOLDEN=1 in the
// environment rewrites the record of those that did.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <set>
#include <thread>

#include "base/file.hpp"
#include "codegen/cubin_cache.hpp"
#include "codegen/kernels/norm/norm_args.cuh"
#include "codegen/nvrtc.hpp"
#include "recipes/recipe.hpp"
#include "tests/unit/codegen/emit_key.hpp"

namespace f8::codegen {
namespace {

// The kernels that the recipes' plans can ask for: all candidates of all GEMMs, and the casts.
std::set<std::string> tunable_kernels() {
  std::set<std::string> keys = {
      "amax/bf16/tensor",
      "amax/bf16/rowcol",
      "amax/bf16/row",
      "amax/bf16/col",
      "amax/bf16/row+tensor",
      "amax/f32/rowcol+tensor",
      "cast/bf16.e4m3/axis+tensor/q+qt/pow2",
      "cast/f32.e4m3/block1x128/q+qt",
      "cast/f16.e5m2/delayed+axis/q+qt",
      "amax/bf16/tensor/list",
      "amax/bf16/rowcol/list",
      "cast/bf16.e4m3/tensor/q+qt/list",
      "cast/bf16.e4m3/axis/q+qt/pow2/list",
      "cast/bf16.e4m3/block128x128/q+qt/pow2/list",
      "amax/bf16/block",
      "amax/f16/block",
      "amax/f32/block/list",
      "cast/bf16.e4m3/block128x128/q+qt/pow2/shard",
      "cast/f16.e5m2/block128x128/qt/hold/shard",
      "cast/f32.e4m3/block128x128/q+qt/pow2/hold/count/shard/list",
      "amax/bf16/rowcol/flag",
      "amax/f32/tensor/flag/list",
      "cast/bf16.e4m3/tensor/q+qt/hold/count/sums/flag",
      "cast/bf16.e4m3/axis/q+qt/pow2/hold/count/sums/flag",
      "cast/bf16.e5m2/delayed/q+qt/count/sums",
      "cast/f32.e4m3/axis+tensor/q+qt/count/sums/flag",
      "cast/f16.e4m3/block128x128/q+qt/hold/count/flag/list",
      "cast/bf16.e4m3/block1x128/q+qt/pow2/sums",
      "quantize/bf16.e4m3/axis/q+qt/pow2/hold",
      "column_sums/bf16",
      "column_sums/f16",
      "column_sums/f32",
      "bias_grad/bf16",
      "bias_grad/f16",
      "bias_grad/f32",
      "glu_cast/silu/bf16.e4m3/delayed/q+qt",
      "glu_cast/silu/f16.e5m2/delayed/qt/hold/count",
      "glu_cast/silu/f32.e4m3/block1x128/q+qt/pow2",
      "glu_cast/silu/bf16.e4m3/block128x128+block1x128/q+qt/count",
      "glu_cast/silu/bf16.e4m3/tensor/q+qt",
      "merged_glu_backward_cast/silu/bf16.e5m2/delayed/q+qt",
      "merged_glu_backward_cast/silu/bf16.e5m2/tensor/q+qt",
      "merged_glu_backward_cast/silu/bf16.e4m3/axis/q+qt/pow2",
      "merged_glu_backward_cast/gelu/bf16.e4m3/block1x128/q+qt",
      "merged_glu_backward_amax/silu/bf16/row+tensor",
      "merged_glu_backward_amax/gelu/bf16/rowcol",
      "merged_glu_backward_cast/gelu/bf16.e5m2/tensor/q+qt/sums",
      "merged_glu_backward_cast/gelu/bf16.e4m3/block1x128/q+qt/sums",
      "merged_glu_backward_up_first_cast/silu/bf16.e4m3/axis/q+qt/pow2",
      "merged_glu_backward_up_first_cast/gelu/bf16.e5m2/delayed/q+qt/sums",
      "merged_glu_backward_up_first_cast/gelu/bf16.e5m2/tensor/q+qt/sums",
      "merged_glu_backward_up_first_cast/gelu/bf16.e4m3/axis/q+qt/pow2/sums",
      "merged_glu_backward_up_first_cast/gelu/bf16.e4m3/block1x128/q+qt/sums",
      "merged_glu_backward_up_first_amax/gelu/bf16/row+tensor",
      "merged_glu_backward_up_first_amax/gelu/bf16/rowcol",
      "glu_backward_cast/silu/bf16.e5m2/delayed/q+qt",
      "glu_backward_cast/silu/bf16.e5m2/tensor/q+qt",
      "glu_backward_cast/silu/bf16.e5m2/tensor/q+qt/sums",
      "glu_backward_cast/gelu/bf16.e5m2/delayed/q+qt/sums",
      "glu_backward_cast/silu/bf16.e4m3/axis/q+qt/pow2/sums",
      "glu_backward_cast/silu/bf16.e4m3/block1x128/q+qt/sums",
      "glu_backward_cast/silu/f16.e4m3/block1x128/q+qt/hold/count",
      "glu_backward_cast/silu/f32.e4m3/block128x128+block1x128/q+qt/pow2",
      "glu_cast/silu/bf16.e4m3/axis/q+qt/pow2",
      "glu_backward_cast/silu/f32.e5m2/axis+tensor/q+qt/hold/count",
      "rms_norm_cast/bf16.e4m3/tensor/q/pow2",
      "rms_norm_cast/f16.e4m3/block128x128+block1x128/q+qt",
      "rms_norm_cast/f32.e4m3/axis/q+qt/hold/count",
      "rms_norm_amax/bf16/tensor",
      "rms_norm_amax/f16/rowcol+tensor",
      "rms_norm_amax/f32/tensor",
      "layer_norm_cast/bf16.e4m3/tensor/q/pow2",
      "layer_norm_cast/f16.e4m3/block128x128+block1x128/q+qt",
      "layer_norm_cast/f32.e4m3/axis/q+qt/hold/count",
      "layer_norm_amax/bf16/tensor",
      "layer_norm_amax/f16/rowcol+tensor",
      "layer_norm_amax/f32/tensor",
      "glu_amax/silu/bf16/tensor",
      "glu_amax/silu/f32/tensor",
      "glu_amax/silu/bf16/rowcol",
      "glu_amax/silu/f16/row+tensor",
      "glu_amax/silu/bf16/row+tensor",
      "glu_backward_amax/silu/bf16/tensor",
      "glu_backward_amax/silu/bf16/rowcol",
      "glu_backward_amax/silu/f32/tensor",
      "glu_backward_amax/silu/f32/rowcol+tensor",
      "glu_backward_amax/silu/f16/col",
      "glu_backward_amax/silu/bf16/row+tensor",
      "activation_cast/gelu/bf16.e4m3/delayed/q+qt",
      "activation_cast/gelu/f16.e4m3/axis/q+qt/pow2/count",
      "activation_cast/gelu/f32.e4m3/block1x128/q+qt/pow2",
      "activation_backward_cast/gelu/bf16.e5m2/tensor/q+qt/sums",
      "activation_backward_cast/gelu/f16.e4m3/block128x128+block1x128/q+qt/hold/count/sums",
      "activation_amax/gelu/bf16/tensor",
      "activation_amax/gelu/f16/rowcol",
      "activation_amax/gelu/f32/tensor",
      "activation_backward_amax/gelu/bf16/tensor",
      "activation_backward_amax/gelu/f32/rowcol+tensor",
      "activation_cast/gelu_tanh/bf16.e4m3/delayed/q+qt",
      "activation_cast/gelu_tanh/f16.e4m3/axis/q+qt/pow2/count",
      "activation_cast/gelu_tanh/f32.e4m3/block1x128/q+qt/pow2",
      "activation_backward_cast/gelu_tanh/bf16.e5m2/tensor/q+qt/sums",
      "activation_backward_cast/gelu_tanh/f16.e4m3/block128x128+block1x128/q+qt/hold/count/sums",
      "activation_amax/gelu_tanh/bf16/tensor",
      "activation_amax/gelu_tanh/f16/rowcol",
      "activation_amax/gelu_tanh/f32/tensor",
      "activation_backward_amax/gelu_tanh/bf16/tensor",
      "activation_backward_amax/gelu_tanh/f32/rowcol+tensor",
      "activation_cast/relu2/bf16.e4m3/delayed/q+qt",
      "activation_cast/relu2/f16.e4m3/axis/q+qt/pow2/count",
      "activation_cast/relu2/f32.e4m3/block1x128/q+qt/pow2",
      "activation_backward_cast/relu2/bf16.e5m2/tensor/q+qt/sums",
      "activation_backward_cast/relu2/f16.e4m3/block128x128+block1x128/q+qt/hold/count/sums",
      "activation_amax/relu2/bf16/tensor",
      "activation_amax/relu2/f16/rowcol",
      "activation_amax/relu2/f32/tensor",
      "activation_backward_amax/relu2/bf16/tensor",
      "activation_backward_amax/relu2/f32/rowcol+tensor",
      "glu_cast/gelu/bf16.e4m3/axis/q+qt/pow2",
      "glu_cast/gelu/f32.e4m3/block1x128/q+qt/pow2",
      "glu_amax/gelu/bf16/tensor",
      "glu_backward_cast/gelu/bf16.e5m2/delayed/q+qt",
      "glu_backward_cast/gelu/f16.e4m3/block1x128/q+qt/hold/count",
      "glu_backward_amax/gelu/bf16/tensor",
      "glu_backward_amax/gelu/f32/rowcol+tensor",
      "glu_backward_amax/gelu/bf16/rowcol",
      "glu_cast/gelu_tanh/bf16.e4m3/axis/q+qt/pow2",
      "glu_cast/gelu_tanh/f32.e4m3/block1x128/q+qt/pow2",
      "glu_amax/gelu_tanh/bf16/tensor",
      "glu_backward_cast/gelu_tanh/bf16.e5m2/delayed/q+qt",
      "glu_backward_cast/gelu_tanh/f16.e4m3/block1x128/q+qt/hold/count",
      "glu_backward_amax/gelu_tanh/bf16/tensor",
      "glu_backward_amax/gelu_tanh/f32/rowcol+tensor",
      "glu_backward_amax/gelu_tanh/bf16/rowcol",
      "scale_update",
      "found_inf",
      "fingerprint",
      "rotary/bf16/bf16/bf16",
      "rotary/bf16/f32/f32",
      "rotary/f32/f32/bf16/inverse",
      "rotary/f32/f32/f32/inverse",
      "rotary/f16/f16/f16/inverse",
      "adamw/f32/tensor",
      "adamw/bf16/rowcol+tensor/from_f32",
      "adamw/f16/tensor/from_f32",
      "adamw/f32/rowcol+tensor",
      "adamw/bf16/col+tensor",
      "adamw/f16/row+tensor",
      "adamw_cast/bf16.e4m3/block128x128/q+qt/from_f32/pow2",
      "adamw_cast/f32.e4m3/block128x128/q+qt",
      "adamw_cast/bf16.e4m3/delayed/q+qt/from_f32",
      "adamw_cast/f16.e4m3/delayed/q+qt/hold",
      "group_layout",
      "route/count/i32",
      "route/count/i64",
      "route/place/i32",
      "route/place/i64",
      "amax/bf16/tensor/group",
      "amax/bf16/rowcol/group",
      "amax/f32/rowcol+tensor/group",
      "amax/bf16/rowcol/from_f32/group",
      "amax/bf16/tensor/from_f32/flag/group",
      "amax/bf16/rowcol+tensor/flag/group",
      "cast/bf16.e4m3/axis/q+qt/from_f32/pow2/group",
      "cast/bf16.e4m3/tensor/q+qt/from_f32/flag/group",
      "cast/bf16.e4m3/axis/q+qt/pow2/flag/group",
      "cast/f16.e4m3/block128x128/q+qt/from_f32/pow2/flag/group",
      "cast/bf16.e4m3/tensor/q/group",
      "cast/bf16.e4m3/tensor/q+qt/group",
      "cast/bf16.e4m3/axis/q+qt/pow2/group",
      "cast/f32.e4m3/axis+tensor/q+qt/hold/group",
      "cast/f16.e5m2/axis/qt/group",
      "cast/bf16.e4m3/block1x128/q+qt/pow2/group",
      "cast/f32.e4m3/block1x128/q/hold/group",
      "cast/bf16.e4m3/block128x128/q+qt/pow2/group",
      "quantize/bf16.e4m3/axis/q/pow2/group",
      "quantize/bf16.e4m3/tensor/q+qt/group",
      "quantize/f16.e5m2/tensor/q/hold/group",
      "quantize/bf16.e4m3/axis/q+qt/pow2/group",
      "quantize/bf16.e4m3/axis+tensor/q+qt/pow2/group"};
  for (const char* source : {"gather", "gather_score", "swiglu", "swiglu_backward"}) {
    for (const char* cast :
         {"amax/bf16/tensor", "amax/bf16/col", "amax/bf16/rowcol", "cast/bf16.e4m3/tensor/q+qt",
          "cast/bf16.e4m3/axis/qt/pow2", "cast/bf16.e4m3/axis/q+qt/pow2", "cast/f32.e5m2/axis/q+qt",
          "cast/bf16.e4m3/block1x128/q/pow2", "cast/bf16.e4m3/block1x128/qt/pow2",
          "cast/bf16.e4m3/block1x128/q+qt/pow2", "quantize/bf16.e4m3/axis/q/pow2",
          "quantize/bf16.e4m3/axis/qt/pow2", "quantize/f16.e4m3/axis/q+qt/hold",
          "quantize/bf16.e4m3/axis/q+qt/pow2", "quantize/bf16.e4m3/tensor/q",
          "quantize/bf16.e4m3/tensor/qt", "quantize/bf16.e5m2/tensor/q+qt"}) {
      keys.insert(f8::format("{}/group/{}", cast, source));
    }
  }
  for (const char* cast :
       {"amax/bf16/col/group", "amax/bf16/rowcol/from_f32/flag/group",
        "cast/bf16.e4m3/axis/q+qt/pow2/group", "cast/bf16.e4m3/delayed/q+qt/group",
        "cast/bf16.e4m3/axis/q+qt/from_f32/pow2/flag/group",
        "cast/bf16.e4m3/block128x128/q+qt/pow2/group",
        "cast/f16.e4m3/block128x128/q+qt/from_f32/pow2/flag/group",
        "quantize/bf16.e4m3/axis/q/pow2/group", "quantize/bf16.e4m3/axis/qt/pow2/group",
        "quantize/bf16.e4m3/axis/q+qt/pow2/group", "quantize/bf16.e4m3/tensor/q+qt/group"}) {
    keys.insert(f8::format("{}/pair", cast));  // of weights
  }
  for (const char* source : {"gather", "swiglu", "swiglu_backward"}) {
    keys.insert(f8::format("cast/bf16.e4m3/delayed/q+qt/group/{}", source));
  }
  for (const char* y : {"bf16", "f16", "f32"}) {
    for (const char* out : {"bf16", "f16", "f32"}) {
      keys.insert(f8::format("combine/{}/{}", y, out));
      keys.insert(f8::format("score_gradient/{}/{}", y, out));
    }
  }
  for (int cols = kernels::kMinNormCols; cols <= kernels::kMaxNormCols; cols *= 2) {
    for (const char* kind : {"rms_norm", "rms_norm_backward"}) {
      for (const char* types :
           {"bf16/bf16/bf16", "bf16/f32/f32", "bf16/f32/bf16", "f16/f16/f16", "f32/f32/f32"}) {
        for (const char* rounding : {"", "/normalized"}) {
          keys.insert(f8::format("{}/{}/{}{}", kind, types, cols, rounding));
        }
      }
    }
  }
  for (const int head_dim : kAttentionHeadDims) {
    for (const bool packed : {false, true}) {
      for (const AttentionMask mask :
           {AttentionMask::kFull, AttentionMask::kCausal, AttentionMask::kWindow}) {
        keys.insert(AttentionForwardSpec::of(head_dim, mask, packed).key());
        for (const AttentionGradients gradients :
             {AttentionGradients::kDq, AttentionGradients::kDkv, AttentionGradients::kDk,
              AttentionGradients::kDv}) {
          const AttentionBackwardSpec spec{head_dim, mask, packed, gradients};
          if (spec.validate()) keys.insert(spec.key());
        }
      }
      for (const AttentionStep step :
           {AttentionStep::kSumKeys, AttentionStep::kCast, AttentionStep::kDequantize,
            AttentionStep::kLayout, AttentionStep::kBackwardCast, AttentionStep::kSpans,
            AttentionStep::kFinish}) {
        const AttentionCastSpec spec{head_dim, step, packed};
        if (spec.validate()) keys.insert(spec.key());
      }
    }
  }
  for (const char* copies : {"q", "qt", "q+qt"}) {
    for (const char* kind : {"e4m3/tensor", "e5m2/tensor", "e4m3/delayed", "e5m2/delayed"}) {
      keys.insert(f8::format("cast/bf16.{}/{}", kind, copies));
    }
    for (const char* kind : {"e4m3/axis", "e4m3/block1x128", "e4m3/block128x128"}) {
      keys.insert(f8::format("cast/bf16.{}/{}/pow2", kind, copies));
    }
  }
  for (const char* recipe_name : {"tensorwise", "rowwise"}) {
    const Recipe recipe = *find_recipe(recipe_name);
    for (const GemmSetting& gemm : recipe.gemms) {
      const bool of_weight = &gemm == &recipe.at(Gemm::kGradWeight);
      const bool axis = gemm.a.granularity == Granularity::kAxis;
      GemmSpec spec{.a = gemm.a.dtype,
                    .b = gemm.b.dtype,
                    .scale = axis ? ScaleMode::kAxis : ScaleMode::kTensor,
                    .fast = gemm.fast};
      for (const GemmConfig& config : gemm_candidates(spec)) {
        spec.config = config;
        spec.pow2 = false;
        keys.insert(key(KernelSpec(spec)));
        spec.pow2 = gemm.a.pow2 && gemm.b.pow2 && takes_pow2(spec);
        keys.insert(key(KernelSpec(spec)));
        GemmSpec grouped = spec;
        grouped.groups = of_weight ? GemmGroups::kK : GemmGroups::kM;
        if (validate(KernelSpec(grouped))) keys.insert(key(KernelSpec(grouped)));
      }
    }
  }
  for (const char* tile : {"128x256s4c2x1w2", "256x128s4c2x1w2"}) {
    for (const char* options : {"+pow2", "+pow2+shards"}) {
      keys.insert(f8::format("gemm2/e4m3.e4m3.bf16/axis/precise/{}/{}", tile, options));
    }
    keys.insert(f8::format("gemm/e4m3.e4m3.bf16/tensor/fast/{}/+shards", tile));
  }
  // One of each remaining mix of types and results.
  for (const char* types :
       {"e4m3.e5m2.bf16", "e5m2.e5m2.bf16", "e5m2.e4m3.f32", "e4m3.e5m2.f32", "e4m3.e4m3.f16"}) {
    for (const char* rest : {"tensor/fast/128x256s4c2x1w2", "axis/precise/256x128s4c1x2w2",
                             "axis/fast/128x128s5c1x1w2p/+bias+add"}) {
      keys.insert(std::string("gemm/") + types + "/" + rest);
    }
    for (const char* rest :
         {"tensor/fast/128x128s5c1x2w2p", "axis/precise/256x128s3c1x1w2",
          "block128x128/precise/128x128s5c1x1w2", "block128x128/precise/128x256s3c1x2w2"}) {
      keys.insert(std::string("gemm_m/") + types + "/" + rest);
    }
    for (const char* rest :
         {"tensor/precise/128x128s5c1x2w2/+add", "axis/fast/128x128s5c1x1w2p",
          "block1x128/precise/128x128s5c1x1w2", "block1x128/precise/128x256s3c2x1w2/+add"}) {
      keys.insert(std::string("gemm_k/") + types + "/" + rest);
    }
  }
  // Operands of 16 bits, of groups alone.
  for (const Dtype d : {Dtype::kBf16, Dtype::kF32}) {
    for (const bool mn_b : {false, true}) {
      GemmSpec spec{
          .a = Dtype::kBf16, .b = Dtype::kBf16, .d = d, .mn_b = mn_b, .groups = GemmGroups::kM};
      for (const GemmConfig& config : gemm_candidates(spec)) {
        spec.config = config;
        keys.insert(key(KernelSpec(spec)));
      }
    }
  }
  return keys;
}

// The kernels that compiled without spills: a line `HASH KEY` for each, where the hash is of the complete source,
// the options and the version of NVRTC (cache_key), so that a line holds for nothing else.
const fs::path kWithoutSpills = fs::path(FLOAT8_SOURCE_DIR) / "tests/golden/without_spills.txt";

// The bytes that a kernel may spill: none, but for the gradients of attention, whose operands take 200 or 208 of 240
// registers for heads of 128 and 256 (dQ of smaller heads than 256 has fewer), and casts of groups in one launch: a
// thread has 64 registers, half of them a tile's elements, and spills words of where the tile is.
int most_spilled(std::string_view key) {
  if (key.starts_with("quantize/") && key.contains("/group")) return 80;
  if (!key.starts_with("attention_backward_d")) return 0;
  return key.starts_with("attention_backward_dq/") && !key.contains("/d256/") ? 0 : 200;
}

// Returns what is wrong with each source, or "". Threads compile side by side.
std::vector<std::string> compile_failures(const std::vector<KernelSource>& sources) {
  std::vector<std::string> failures(sources.size());
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < sources.size(); i = next++) {
      const auto cubin = compile(sources[i]);
      if (!cubin) {
        failures[i] = cubin.error().message;
      } else if (cubin->spill_bytes > most_spilled(sources[i].key)) {
        failures[i] = f8::format("spills {} bytes", cubin->spill_bytes);
      }
    }
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < std::max(2U, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back(work);
  }
  threads.clear();
  return failures;
}

// A kernel is compiled where its source, its options or NVRTC changed since it was recorded.
TEST(Emit, EveryTunableKernelCompilesWithoutSpills) {
  const std::set<std::string> keys = tunable_kernels();
  ASSERT_GT(keys.size(), 60U);
  const bool update = std::getenv("UPDATE_GOLDEN") != nullptr;
  const std::string recorded = read_file(kWithoutSpills).value_or("");
  std::string record;
  std::vector<KernelSource> changed;
  for (const std::string& key : keys) {
    KernelSource source = emit_key(key);
    const auto hash = cache_key(source);
    ASSERT_TRUE(hash) << hash.error().message;
    const std::string line = f8::format("{} {}\n", *hash, key);
    record += line;
    if (!recorded.contains(line)) changed.push_back(std::move(source));
  }
  const std::vector<std::string> failures = compile_failures(changed);
  for (size_t i = 0; i < changed.size(); ++i) {
    EXPECT_EQ(failures[i], "") << changed[i].key;
  }
  if (update && !HasFailure()) {
    ASSERT_TRUE(write_file_atomic(kWithoutSpills, record));
  } else if (!changed.empty()) {
    std::cout << changed.size() << " of " << keys.size() << " kernels are not in " << kWithoutSpills
              << ", so they were compiled; UPDATE_GOLDEN=1 writes it\n";
  }
}

}  // namespace
}  // namespace f8::codegen
