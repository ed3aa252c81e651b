#include "tools/float8-tune/kernels/kernel_list.hpp"

#include <array>
#include <optional>
#include <vector>

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/linear/plan/kernels.hpp"
#include "runtime/linear/tensors/computed_casts.hpp"
#include "runtime/quantize/quantize_list.hpp"

namespace f8::cli {
namespace {

constexpr Shape kAnyShape = {4096, 4096, 4096};  // kernels do not depend on the shape
constexpr std::array kBools = {false, true};

using Keys = std::set<std::string>;

void add_casts(const runtime::LinearKernels& kernels, Keys& keys) {
  for (const runtime::NamedSpec& named : runtime::quantize_kernels(kernels)) {
    keys.insert(codegen::key(named.spec));
    const auto* cast = std::get_if<codegen::CastSpec>(&named.spec);
    if (cast == nullptr || cast->sums) continue;
    const auto add_lists = [&](const codegen::CastSpec& of, std::initializer_list<size_t> counts) {
      for (const size_t count : counts) {
        for (const auto& spec : runtime::QuantizeList::kernel_specs(of, count)) {
          keys.insert(codegen::key(spec));
        }
      }
    };
    constexpr size_t kOfList = kernels::kMaxTensors + 1;
    add_lists(*cast, {kOfList});
    // Shards that cut blocks.
    codegen::CastSpec shard = *cast;
    shard.shard = true;
    const bool cuts = codegen::has_scale(shard, codegen::ScaleMode::kBlock128x128);
    if (cuts && !shard.noop_flag && codegen::takes_shards(shard)) add_lists(shard, {1, kOfList});
  }
}

void add_candidates(codegen::GemmSpec spec, Keys& keys) {
  for (const GemmConfig& config : codegen::gemm_candidates(spec)) {
    spec.config = config;
    keys.insert(codegen::key(codegen::KernelSpec(spec)));
  }
}

// One GEMM alone, and grouped with the linear's other GEMM of the same types, where there is one.
void add_gemms(const runtime::LinearKernels& kernels, Keys& keys) {
  std::vector<runtime::GemmDesc> gemms;
  for (const auto* gemm :
       {&kernels.gemms[0], &kernels.gemms[1], &kernels.gemms[2], &kernels.adding[2]}) {
    if (*gemm && is_fp8((*gemm)->a)) gemms.push_back(**gemm);
  }
  for (const runtime::GemmDesc& gemm : gemms) {
    add_candidates(runtime::gemm_spec(gemm, {}), keys);
    const runtime::GemmChoice choice;
    for (const runtime::GemmDesc& other : gemms) {
      if (gemm.gemm != Gemm::kGradInput || other.gemm != Gemm::kGradWeight) continue;
      if (!(runtime::gemm_spec(gemm, {}) == runtime::gemm_spec(other, {}))) continue;
      add_candidates(runtime::GroupedGemm::spec(gemm, choice), keys);
    }
    // No linear asks for the amax of a result; a GEMM's plan may, and `bench` does for bf16.
    if (gemm.d != Dtype::kBf16 || gemm.add) continue;
    runtime::GemmDesc with_amax = gemm;
    with_amax.amax = true;
    add_candidates(runtime::gemm_spec(with_amax, {}), keys);
  }
}

// GEMMs of bf16, f16 or f32 tensors, with a weight gradient of their type or in fp32.
Status add_gemms_of(runtime::LinearDesc desc, Keys& keys) {
  desc.accumulate_grad_weight = true;
  for (const Dtype grad_weight : {desc.tensor_dtype, Dtype::kF32}) {
    for (const bool bias : kBools) {
      desc.grad_weight_dtype = grad_weight;
      desc.bias = bias;
      add_gemms(F8_TRY(runtime::linear_kernels(desc)), keys);
    }
  }
  return {};
}

// A weight's casts may be under a flag.
void add_flagged_casts(runtime::LinearKernels kernels, Keys& keys) {
  kernels.noop_flag = true;
  kernels.copies[static_cast<size_t>(runtime::Tensor::kInput)] = {};
  kernels.copies[static_cast<size_t>(runtime::Tensor::kGradOutput)] = {};
  add_casts(kernels, keys);
}

// Those of a source that is computed, for copies that a call makes of it.
void add_computed(const runtime::LinearKernels& kernels, runtime::CopySet copies,
                  const runtime::ComputedSource& source, Keys& keys) {
  for (const bool first_step : kBools) {
    for (const auto& [amax, cast, fused] :
         runtime::computed_passes(kernels, copies, source, first_step)) {
      if (amax) keys.insert(codegen::key(*amax));
      keys.insert(codegen::key(cast));
    }
  }
}

void add_activations(const runtime::LinearKernels& kernels, Keys& keys) {
  using enum codegen::Computed;
  using enum codegen::Activation;
  for (const codegen::Activation activation : {kSilu, kGelu, kGeluTanh, kRelu2}) {
    // Of what is gated there are SwiGLU and GeGLU.
    for (const codegen::Computed source : {kGlu, kActivation}) {
      if (source == kGlu ? activation == kRelu2 : activation == kSilu) continue;
      add_computed(kernels, runtime::kXq, {source, activation}, keys);
      add_computed(kernels, runtime::kXq | runtime::kXqt, {source, activation}, keys);
      const auto add_gradients = [&](codegen::Computed gradients, bool sums) {
        add_computed(kernels, runtime::kDyq | runtime::kDyqt, {gradients, activation, sums}, keys);
      };
      const bool gated = source == kGlu;
      for (const bool sums : kBools) {
        add_gradients(gated ? kGluBackward : kActivationBackward, sums);
        if (!gated) continue;
        add_gradients(kMergedGluBackward, sums);
        add_gradients(kMergedGluBackwardUpFirst, sums);
      }
    }
  }
}

// In backward qt alone is made of an x that forward keeps no copy of.
void add_norms(const runtime::LinearKernels& kernels, Keys& keys) {
  for (const runtime::CopySet copies :
       {runtime::CopySet{runtime::kXq}, runtime::CopySet{runtime::kXqt},
        runtime::CopySet{runtime::kXq | runtime::kXqt}}) {
    for (const codegen::Computed norm :
         {codegen::Computed::kRmsNorm, codegen::Computed::kLayerNorm}) {
      add_computed(kernels, copies, {norm}, keys);
    }
  }
}

// A linear's casts depend on independent switches, so that each combination of them is a case.
Status add_casts_of(runtime::LinearDesc desc, Keys& keys) {
  desc.bias_grad = true;
  desc.bias_grad_dtype = desc.tensor_dtype;
  constexpr unsigned kSwitches = 4;
  for (unsigned bits = 0; bits < 1U << kSwitches; ++bits) {
    const auto is_on = [&](unsigned index) { return (bits >> index & 1U) != 0; };
    desc.recompute = is_on(0);
    desc.needs_grad_input = is_on(1);
    desc.count = is_on(2);
    desc.non_finite = is_on(3) ? NonFinite::kSaturate : NonFinite::kPropagate;
    const runtime::LinearKernels kernels = F8_TRY(runtime::linear_kernels(desc));
    add_casts(kernels, keys);
    add_norms(kernels, keys);
    if (desc.recompute) continue;
    add_flagged_casts(kernels, keys);
    if (desc.needs_grad_input) add_activations(kernels, keys);
  }
  return {};
}

}  // namespace

Result<Keys> tunable_kernels() {
  Keys keys;
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Dtype tensors : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      runtime::LinearDesc desc;
      desc.shape = kAnyShape;
      desc.recipe = recipe;
      desc.tensor_dtype = tensors;
      desc.grad_weight_dtype = tensors;
      F8_TRY(add_gemms_of(desc, keys));
      F8_TRY(add_casts_of(desc, keys));
    }
  }
  return keys;
}

}  // namespace f8::cli
