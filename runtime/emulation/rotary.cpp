// Rotary positions on the CPU, head after head.
#include "codegen/kernels/attention/rotary_args.cuh"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

// Turns a head of a token; `position` is the place of its cosines.
void turn_head(const codegen::RotarySpec& spec, const kernels::RotaryArgs& args,
               const kernels::RotaryHeads& of, int64_t in, int64_t out, int64_t position) {
  const int64_t half = args.head_dim / 2;
  for (int64_t i = 0; i < args.head_dim; ++i) {
    const bool first = i < half;
    const int64_t other = first ? i + half : i - half;
    const float cos = load_element(args.cos, position + i, spec.cos);
    const float sin = load_element(args.sin, position + (spec.inverse ? other : i), spec.cos);
    const float across = load_element(of.in, in + other, spec.in);
    const float a = round_element(load_element(of.in, in + i, spec.in) * cos, spec.out);
    const float b = round_element((first == spec.inverse ? across : -across) * sin, spec.out);
    store_element(of.out, out + i, spec.inverse ? a + b + 0.0F : a + b, spec.out);
  }
}

void turn_heads(const codegen::RotarySpec& spec, const kernels::RotaryArgs& args,
                const kernels::RotaryHeads& of, int64_t heads, int64_t batches) {
  for (int64_t b = 0; b < batches; ++b) {
    for (int64_t t = 0; t < args.tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        turn_head(spec, args, of, of.in_strides.at(b, h, t), of.out_strides.at(b, h, t),
                  b * args.cos_batch + t * args.cos_token);
      }
    }
  }
}

}  // namespace

void emulate(const codegen::RotarySpec& spec, const Call& call) {
  const auto& args = call.args<kernels::RotaryArgs>();
  if (args.tokens < 1 || args.heads_q < 1 || args.heads_k < 0 || args.head_dim < 16 ||
      args.head_dim % 16 != 0 || args.head_dim / 16 > kernels::kRotaryThreads) {
    call.fault("rotary: {} tokens, {} and {} heads of {}", args.tokens, args.heads_q, args.heads_k,
               args.head_dim);
  } else if (call.launch.grid % static_cast<unsigned>(args.tokens) != 0) {
    call.fault("rotary: grid {} for {} tokens", call.launch.grid, args.tokens);
  }
  for (const void* memory : {args.q.in, static_cast<const void*>(args.q.out), args.cos, args.sin}) {
    if (memory == nullptr || !is_aligned(memory)) call.fault("rotary: a tensor is misaligned");
  }
  if (args.heads_k > 0 && (args.k.in == nullptr || args.k.out == nullptr)) {
    call.fault("rotary: k is null");
  }
  if (!call.faults.empty()) return;
  const int64_t batches = call.launch.grid / static_cast<unsigned>(args.tokens);
  turn_heads(spec, args, args.q, args.heads_q, batches);
  turn_heads(spec, args, args.k, args.heads_k, batches);
}

}  // namespace f8::runtime::emulation
