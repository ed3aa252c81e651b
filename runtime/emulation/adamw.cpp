// AdamW on the CPU, weight after weight.
#include "recipes/reference/adamw.hpp"

#include <algorithm>
#include <bit>
#include <span>

#include "recipes/reference/fingerprint.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

void check_adamw_weight(const kernels::AdamwTensor& t, int index, const Call& call) {
  for (const void* memory : {t.param, t.grad, t.exp_avg, t.exp_avg_sq}) {
    if (memory == nullptr || !is_aligned(memory)) {
      call.fault("weight {}: misaligned or null", index);
    }
  }
  if (t.max_exp_avg_sq != nullptr && !is_aligned(t.max_exp_avg_sq)) {
    call.fault("weight {}: max_exp_avg_sq is misaligned", index);
  }
  if (t.step == nullptr || t.rows < 1 || t.cols < 1 || t.cols % 8 != 0) {
    call.fault("weight {}: no step, or {} x {}", index, t.rows, t.cols);
  }
}

void check_adamw(const codegen::AmaxSpec& spec, const kernels::AdamwArgs& args, const Call& call) {
  int next = 0;
  for (int i = 0; i < args.count; ++i) {
    const kernels::AdamwTensor& t = args.tensors[i];
    check_adamw_weight(t, i, call);
    if (t.first_block != next || t.blocks < 1) {
      call.fault("weight {}: {} blocks from {} on", i, t.blocks, t.first_block);
    }
    if ((spec.row || spec.col) && static_cast<unsigned>(t.blocks) != cast_tiles(t.rows, t.cols)) {
      call.fault("weight {}: {} blocks for its tiles", i, t.blocks);
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

// Updates a weight, unless the step is left out, and leaves its fingerprint.
void update_weight(const kernels::AdamwOptions& options, const kernels::AdamwTensor& t, Dtype type,
                   const Call& call) {
  const reference::Adamw adamw(
      {.lr = options.lr_tensor == nullptr ? options.lr : *options.lr_tensor,
       .beta1 = options.beta1,
       .beta2 = options.beta2,
       .eps = options.eps,
       .weight_decay = options.weight_decay,
       .maximize = options.maximize != 0,
       .grad_scale = options.grad_scale},
      *t.step);
  const bool left_out = options.found_inf != nullptr && *options.found_inf == 1.0F;
  const bool amsgrad = t.max_exp_avg_sq != nullptr;
  const int64_t count = int64_t{t.rows} * t.cols;
  for (int64_t i = 0; i < count && !left_out; ++i) {
    reference::AdamwElement e{load_element(t.param, i, type), load_element(t.grad, i, type),
                              load_element(t.exp_avg, i, type), load_element(t.exp_avg_sq, i, type),
                              amsgrad ? load_element(t.max_exp_avg_sq, i, type) : 0.0F};
    adamw.update(e, amsgrad);
    store_element(t.param, i, e.param, type);
    store_element(t.exp_avg, i, e.exp_avg, type);
    store_element(t.exp_avg_sq, i, e.exp_avg_sq, type);
    if (amsgrad) store_element(t.max_exp_avg_sq, i, e.max_exp_avg_sq, type);
    if (options.grad_scale != nullptr) store_element(t.grad, i, e.grad, type);
  }
  if (t.fingerprint == nullptr) return;
  kernels::FingerprintState& state = *t.fingerprint;
  if (state.sum[0] != 0 || state.sum[1] != 0 || state.blocks_done != 0) {
    return call.fault("a fingerprint's memory was not zeros before its first step");
  }
  const size_t bytes = static_cast<size_t>(count) * size_bytes(type);
  const auto [low, high] = reference::fingerprint(t.param, 1, bytes, bytes, t.seed);
  state.value[0] = low;
  state.value[1] = high;
}

void raise_adamw_maxima(const codegen::AmaxSpec& spec, const kernels::AdamwTensor& t, Dtype type) {
  const auto raise = [](uint32_t& word, uint32_t bits) { word = std::max(word, bits); };
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols; ++c) {
      float value = load_element(t.param, r * t.cols + c, type);
      if (spec.from_f32) value = round_element(value, spec.in);
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
  for (const kernels::AdamwTensor& t : std::span(args.tensors, static_cast<size_t>(args.count))) {
    update_weight(args.options, t, type, call);
    raise_adamw_maxima(spec.amax, t, type);
  }
}

// The casts are those of any matrix.
void emulate(const codegen::AdamwCastSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::AdamwCastArgs>();
  for (int i = 0; i < args.cast.count; ++i) {
    const kernels::AdamwTensor& t = args.tensors[i];
    const kernels::CastTensor& cast = args.cast.tensors[i];
    check_adamw_weight(t, i, call);
    if (cast.x != t.param || cast.rows != t.rows || cast.cols != t.cols || cast.ld != t.cols) {
      call.fault("weight {}: another matrix is cast", i);
    }
  }
  if (!call.faults.empty()) return;
  for (int i = 0; i < args.cast.count; ++i) {
    update_weight(args.options, args.tensors[i], codegen::memory_type(spec.cast), call);
  }
  kernels::CastArgs casts = args.cast;
  void* const parameters[] = {&casts};
  emulate(spec.cast, Call{call.module, call.launch, parameters, call.sm_count, call.faults});
}

}  // namespace f8::runtime::emulation
