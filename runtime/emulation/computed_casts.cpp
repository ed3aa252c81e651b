// The maxima and the casts of silu(gate) up, of its gradients and of what an RMSNorm makes of x: these are
// computed as a device computes them, and are then the elements of any tensor.
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

template <class Tensor>
void check(const Call& call, const Tensor& t, Dtype type, std::span<const Rows> all) {
  for (const auto& [name, from, ld] : all) {
    if (from == nullptr || !is_aligned(from)) call.fault("cast: {} misaligned or null", name);
    if (ld < t.cols || !is_row_stride(ld, t.cols, type)) {
      call.fault("cast: {} has rows of {}, {} apart", name, t.cols, ld);
    }
  }
}

// Does what `spec` says to one of the tensors of a launch, whose elements are value(row, column).
template <class Spec, class Args, class Value>
void run_one(const Spec& spec, const Call& call, const Args& args, size_t index, Value&& value) {
  const auto& t = args.tensors[index];
  // operator new aligns it to 16 bytes, as the kernels need.
  static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16);
  std::vector<uint8_t> x(static_cast<size_t>(t.rows) * static_cast<size_t>(t.cols) *
                         size_bytes(spec.in));
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols; ++c) {
      store_element(x.data(), r * t.cols + c, value(r, c), spec.in);
    }
  }
  Args one = args;
  one.count = 1;
  one.tensors[0] = t;
  one.tensors[0].x = x.data();
  one.tensors[0].ld = t.cols;
  if constexpr (requires { one.counters; }) one.counters[0] = args.counters[index];
  void* const parameters[] = {&one};
  emulate(spec, Call{call.module, call.launch, parameters, call.sm_count, call.faults});
}

template <class Spec, class Args>
void product(const Spec& spec, const Call& call, const Args& args, const void* up, int64_t ld_up) {
  const auto& gate = args.tensors[0];
  if (args.count != 1) call.fault("swiglu: {} tensors", args.count);
  const Rows read[] = {{"gate", gate.x, gate.ld}, {"up", up, ld_up}};
  check(call, gate, spec.in, read);
  if (!call.faults.empty()) return;
  run_one(spec, call, args, 0, [&](int64_t r, int64_t c) {
    return swiglu(load_element(gate.x, r * gate.ld + c, spec.in),
                  load_element(up, r * ld_up + c, spec.in), spec.in);
  });
}

template <class Spec, class Args>
void gradients(const Spec& spec, const Call& call, const Args& args, const void* grad,
               int64_t ld_grad) {
  const auto& gate = args.tensors[0];
  const auto& up = args.tensors[1];
  if (args.count != 2 || gate.rows != up.rows || gate.cols != up.cols || up.first_block != 0 ||
      gate.blocks != up.blocks) {
    call.fault("swiglu: {} tensors, of {} x {} and {} x {}", args.count, gate.rows, gate.cols,
               up.rows, up.cols);
  }
  const Rows read[] = {{"gate", gate.x, gate.ld}, {"up", up.x, up.ld}, {"grad", grad, ld_grad}};
  check(call, gate, spec.in, read);
  if (!call.faults.empty()) return;
  const auto both = [&](int64_t r, int64_t c) {
    return swiglu_backward(load_element(gate.x, r * gate.ld + c, spec.in),
                           load_element(up.x, r * up.ld + c, spec.in),
                           load_element(grad, r * ld_grad + c, spec.in), spec.in);
  };
  run_one(spec, call, args, 0, [&](int64_t r, int64_t c) { return both(r, c).gate; });
  run_one(spec, call, args, 1, [&](int64_t r, int64_t c) { return both(r, c).up; });
}

template <class Spec, class Args>
void normalized(const Spec& spec, const Call& call, const Args& args, const void* weight,
                const float* rstd) {
  const auto& t = args.tensors[0];
  if (args.count != 1 || rstd == nullptr) call.fault("rms_norm: {} tensors, rstd", args.count);
  const Rows read[] = {{"x", t.x, t.ld}, {"weight", weight, t.cols}};
  check(call, t, spec.in, read);
  if (!call.faults.empty()) return;
  run_one(spec, call, args, 0, [&](int64_t r, int64_t c) {
    const float x = load_element(t.x, r * t.ld + c, spec.in);
    return x * rstd[r] * load_element(weight, c, spec.in);
  });
}

// Calls what computes a source, with its own arguments.
template <class OfSwiglu, class OfGradients, class OfNorm, class Spec>
void by_source(codegen::Computed source, const Spec& spec, const Call& call) {
  const auto tensors = [](const auto& args) -> const auto& {
    if constexpr (requires { args.amax; }) {
      return args.amax;
    } else {
      return args.cast;
    }
  };
  switch (source) {
    case codegen::Computed::kSwiglu: {
      const auto& args = call.args<OfSwiglu>();
      return product(spec, call, tensors(args), args.up, args.ld_up);
    }
    case codegen::Computed::kSwigluBackward: {
      const auto& args = call.args<OfGradients>();
      return gradients(spec, call, tensors(args), args.grad, args.ld_grad);
    }
    case codegen::Computed::kRmsNorm: {
      const auto& args = call.args<OfNorm>();
      return normalized(spec, call, tensors(args), args.weight, args.rstd);
    }
  }
}

}  // namespace

void emulate(const codegen::ComputedAmaxSpec& spec, const Call& call) {
  by_source<kernels::SwigluAmaxArgs, kernels::SwigluBackwardAmaxArgs, kernels::RmsNormAmaxArgs>(
      spec.source, spec.amax, call);
}

void emulate(const codegen::ComputedCastSpec& spec, const Call& call) {
  by_source<kernels::SwigluCastArgs, kernels::SwigluBackwardArgs, kernels::RmsNormCastArgs>(
      spec.source, spec.cast, call);
}

}  // namespace f8::runtime::emulation
