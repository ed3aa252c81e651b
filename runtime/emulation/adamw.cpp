// AdamW on the CPU, weight after weight.
#include "recipes/adamw.hpp"

#include <algorithm>
#include <bit>
#include <span>

#include "recipes/fingerprint.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

void check_adamw(const codegen::AmaxSpec& spec, const kernels::AdamwArgs& args, const Call& call) {
  int next = 0;
  for (int i = 0; i < args.count; ++i) {
    const kernels::AdamwTensor& t = args.tensors[i];
    if (t.first_block != next || t.blocks < 1) {
      call.fault("weight {}: {} blocks from {} on", i, t.blocks, t.first_block);
    }
    if ((spec.row || spec.col) && static_cast<unsigned>(t.blocks) != cast_tiles(t.rows, t.cols)) {
      call.fault("weight {}: {} blocks for its tiles", i, t.blocks);
    }
    for (const void* memory : {t.param, t.grad, t.exp_avg, t.exp_avg_sq}) {
      if (memory == nullptr || !is_aligned(memory)) call.fault("weight {}: misaligned or null", i);
    }
    if (t.max_exp_avg_sq != nullptr && !is_aligned(t.max_exp_avg_sq)) {
      call.fault("weight {}: max_exp_avg_sq is misaligned", i);
    }
    if (t.step == nullptr || t.rows < 1 || t.cols < 1 || t.cols % 8 != 0) {
      call.fault("weight {}: no step, or {} x {}", i, t.rows, t.cols);
    }
    if ((spec.row && t.row_amax == nullptr) || (spec.col && t.col_amax == nullptr)) {
      call.fault("weight {}: no words for its rows or columns", i);
    }
    next += t.blocks;
  }
  if (static_cast<int>(call.launch.grid) != next) {
    call.fault("grid {} for {} blocks", call.launch.grid, next);
  }
}

void update_weight(const reference::Adamw& adamw, const kernels::AdamwArgs& args,
                   const kernels::AdamwTensor& t, Dtype type) {
  const bool amsgrad = t.max_exp_avg_sq != nullptr;
  const int64_t count = int64_t{t.rows} * t.cols;
  for (int64_t i = 0; i < count; ++i) {
    reference::AdamwElement e{load_element(t.param, i, type), load_element(t.grad, i, type),
                              load_element(t.exp_avg, i, type), load_element(t.exp_avg_sq, i, type),
                              amsgrad ? load_element(t.max_exp_avg_sq, i, type) : 0.0F};
    adamw.update(e, amsgrad);
    store_element(t.param, i, e.param, type);
    store_element(t.exp_avg, i, e.exp_avg, type);
    store_element(t.exp_avg_sq, i, e.exp_avg_sq, type);
    if (amsgrad) store_element(t.max_exp_avg_sq, i, e.max_exp_avg_sq, type);
    if (args.grad_scale != nullptr) store_element(t.grad, i, e.grad, type);
  }
}

void raise_adamw_maxima(const codegen::AmaxSpec& spec, const kernels::AdamwTensor& t, Dtype type) {
  const auto raise = [](uint32_t& word, uint32_t bits) { word = std::max(word, bits); };
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols; ++c) {
      float value = load_element(t.param, r * t.cols + c, type);
      if (spec.from_f32) {
        uint16_t half = 0;
        store_element(&half, 0, value, spec.in);
        value = load_element(&half, 0, spec.in);
      }
      const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffffU;
      if (spec.tensor && t.amax != nullptr) raise(*t.amax, bits);
      if (spec.row) raise(t.row_amax[r], bits);
      if (spec.col) raise(t.col_amax[c], bits);
    }
  }
}

}  // namespace

void emulate(const codegen::AdamwSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::AdamwArgs>();
  check_adamw(spec.amax, args, call);
  if (!call.faults.empty()) return;
  const Dtype type = codegen::memory_type(spec.amax);
  const bool left_out = args.found_inf != nullptr && *args.found_inf == 1.0F;
  for (const kernels::AdamwTensor& t : std::span(args.tensors, static_cast<size_t>(args.count))) {
    const reference::Adamw adamw({.lr = args.lr_tensor == nullptr ? args.lr : *args.lr_tensor,
                                  .beta1 = args.beta1,
                                  .beta2 = args.beta2,
                                  .eps = args.eps,
                                  .weight_decay = args.weight_decay,
                                  .maximize = args.maximize != 0,
                                  .grad_scale = args.grad_scale},
                                 *t.step);
    if (!left_out) update_weight(adamw, args, t, type);
    raise_adamw_maxima(spec.amax, t, type);
    if (t.fingerprint == nullptr) continue;
    kernels::FingerprintState& state = *t.fingerprint;
    if (state.sum[0] != 0 || state.sum[1] != 0 || state.blocks_done != 0) {
      return call.fault("a fingerprint's memory was not zeros before its first step");
    }
    const size_t bytes =
        static_cast<size_t>(t.rows) * static_cast<size_t>(t.cols) * size_bytes(type);
    const auto [low, high] = reference::fingerprint(t.param, 1, bytes, bytes, t.seed);
    state.value[0] = low;
    state.value[1] = high;
  }
}

}  // namespace f8::runtime::emulation
