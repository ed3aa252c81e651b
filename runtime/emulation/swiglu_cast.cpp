// The cast of silu(gate) up: it is computed as a device computes it, and cast as any tensor.
#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"
#include "runtime/emulation/swiglu.hpp"

namespace f8::runtime::emulation {

void emulate(const codegen::SwigluCastSpec& spec, const Call& call) {
  if (spec.backward) return call.fault("swiglu: the gradients have no emulation yet");
  const auto& args = call.args<kernels::SwigluCastArgs>();
  const kernels::CastTensor& t = args.cast.tensors[0];
  const Dtype type = spec.cast.in;
  if (args.cast.count != 1) call.fault("swiglu: {} tensors", args.cast.count);
  for (const auto& [name, from, ld] :
       {std::tuple{"gate", t.x, t.ld}, {"up", args.up, args.ld_up}}) {
    if (from == nullptr || !is_aligned(from)) call.fault("swiglu: {} misaligned or null", name);
    if (ld < t.cols || !is_row_stride(ld, t.cols, type)) {
      call.fault("swiglu: {} has rows of {}, {} apart", name, t.cols, ld);
    }
  }
  if (!call.faults.empty()) return;
  // operator new aligns it to 16 bytes, as the cast needs.
  static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16);
  std::vector<uint8_t> h(static_cast<size_t>(t.rows) * static_cast<size_t>(t.cols) *
                         size_bytes(type));
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols; ++c) {
      const float value = swiglu(load_element(t.x, r * t.ld + c, type),
                                 load_element(args.up, r * args.ld_up + c, type), type);
      store_element(h.data(), r * t.cols + c, value, type);
    }
  }
  kernels::CastArgs cast = args.cast;
  cast.tensors[0].x = h.data();
  cast.tensors[0].ld = t.cols;
  void* const parameters[] = {&cast};
  emulate(spec.cast, Call{call.module, call.launch, parameters, call.sm_count, call.faults});
}

}  // namespace f8::runtime::emulation
