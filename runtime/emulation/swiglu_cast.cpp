// The casts of silu(gate) up and of its gradients: they are computed as a device computes them, and cast
// as any tensor.
#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"
#include "runtime/emulation/swiglu.hpp"

namespace f8::runtime::emulation {
namespace {

struct Rows {
  const char* name;
  const void* data;
  int64_t ld;
};

void check(const Call& call, const kernels::CastTensor& t, Dtype type, std::span<const Rows> all) {
  for (const auto& [name, from, ld] : all) {
    if (from == nullptr || !is_aligned(from)) call.fault("swiglu: {} misaligned or null", name);
    if (ld < t.cols || !is_row_stride(ld, t.cols, type)) {
      call.fault("swiglu: {} has rows of {}, {} apart", name, t.cols, ld);
    }
  }
}

// Casts one of the tensors of a launch, whose elements are value(row, column).
template <class Value>
void cast(const codegen::SwigluCastSpec& spec, const Call& call, const kernels::CastArgs& args,
          size_t index, Value&& value) {
  const kernels::CastTensor& t = args.tensors[index];
  const Dtype type = spec.cast.in;
  // operator new aligns it to 16 bytes, as the cast needs.
  static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16);
  std::vector<uint8_t> x(static_cast<size_t>(t.rows) * static_cast<size_t>(t.cols) *
                         size_bytes(type));
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols; ++c) {
      store_element(x.data(), r * t.cols + c, value(r, c), type);
    }
  }
  kernels::CastArgs one = args;
  one.count = 1;
  one.tensors[0] = t;
  one.tensors[0].x = x.data();
  one.tensors[0].ld = t.cols;
  one.counters[0] = args.counters[index];
  void* const parameters[] = {&one};
  emulate(spec.cast, Call{call.module, call.launch, parameters, call.sm_count, call.faults});
}

void product(const codegen::SwigluCastSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::SwigluCastArgs>();
  const kernels::CastTensor& gate = args.cast.tensors[0];
  const Dtype type = spec.cast.in;
  if (args.cast.count != 1) call.fault("swiglu: {} tensors", args.cast.count);
  const Rows read[] = {{"gate", gate.x, gate.ld}, {"up", args.up, args.ld_up}};
  check(call, gate, type, read);
  if (!call.faults.empty()) return;
  cast(spec, call, args.cast, 0, [&](int64_t r, int64_t c) {
    return swiglu(load_element(gate.x, r * gate.ld + c, type),
                  load_element(args.up, r * args.ld_up + c, type), type);
  });
}

void gradients(const codegen::SwigluCastSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::SwigluBackwardArgs>();
  const kernels::CastTensor& gate = args.cast.tensors[0];
  const kernels::CastTensor& up = args.cast.tensors[1];
  const Dtype type = spec.cast.in;
  if (args.cast.count != 2 || gate.rows != up.rows || gate.cols != up.cols || up.first_block != 0) {
    call.fault("swiglu: {} tensors, of {} x {} and {} x {}", args.cast.count, gate.rows, gate.cols,
               up.rows, up.cols);
  }
  const Rows read[] = {
      {"gate", gate.x, gate.ld}, {"up", up.x, up.ld}, {"grad", args.grad, args.ld_grad}};
  check(call, gate, type, read);
  if (!call.faults.empty()) return;
  const auto both = [&](int64_t r, int64_t c) {
    return swiglu_backward(load_element(gate.x, r * gate.ld + c, type),
                           load_element(up.x, r * up.ld + c, type),
                           load_element(args.grad, r * args.ld_grad + c, type), type);
  };
  cast(spec, call, args.cast, 0, [&](int64_t r, int64_t c) { return both(r, c).gate; });
  cast(spec, call, args.cast, 1, [&](int64_t r, int64_t c) { return both(r, c).up; });
}

}  // namespace

void emulate(const codegen::SwigluCastSpec& spec, const Call& call) {
  return spec.backward ? gradients(spec, call) : product(spec, call);
}

}  // namespace f8::runtime::emulation
