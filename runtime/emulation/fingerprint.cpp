// The fingerprints of weights, one after the other.
#include "recipes/reference/fingerprint.hpp"

#include <span>

#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {

void emulate(const codegen::FingerprintSpec&, const Call& call) {
  const auto& args = call.args<kernels::FingerprintArgs>();
  const unsigned grid = call.launch.grid;
  int next = 0;
  for (int i = 0; i < args.count; ++i) {
    const kernels::FingerprintWeight& w = args.tensors[i];
    if (w.first_block != next || w.blocks < 1) {
      call.fault("weight {}: {} blocks from {} on", i, w.blocks, w.first_block);
    }
    if (!is_aligned(w.w, 2) || !is_aligned(w.state, 8) || !is_aligned(w.valid, 4) ||
        w.pitch % 2 != 0 || w.row_bytes % 2 != 0 || w.rows < 1) {
      call.fault("weight {}: misaligned, null or empty", i);
    }
    next += w.blocks;
  }
  if (static_cast<int>(grid) != next) call.fault("grid {} for {} blocks", grid, next);
  if (!call.faults.empty()) return;
  for (const kernels::FingerprintWeight& w :
       std::span(args.tensors, static_cast<size_t>(args.count))) {
    kernels::FingerprintState& state = *w.state;
    if (state.sum[0] != 0 || state.sum[1] != 0 || state.blocks_done != 0) {
      return call.fault("a fingerprint's memory was not zeros before its first comparison");
    }
    const auto [low, high] = reference::fingerprint(w.w, w.rows, static_cast<size_t>(w.row_bytes),
                                                    static_cast<size_t>(w.pitch), w.seed);
    if (state.value[0] == low && state.value[1] == high) continue;
    state.value[0] = low;
    state.value[1] = high;
    *w.valid = 0;
  }
}

}  // namespace f8::runtime::emulation
