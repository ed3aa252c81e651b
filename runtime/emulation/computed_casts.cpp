// The maxima and the casts of activations, of gated ones, of their gradients and of what a norm makes of
// x: these are computed as a device computes them, and are then the elements of any tensor.
#include <cstring>

#include "runtime/device/memory.hpp"
#include "runtime/emulation/activations.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

struct Rows {
  const char* name;
  const void* data;
  int64_t ld;
  int64_t cols = 0;  // 0: the tensor's
};

template <class Tensor>
void check(const Call& call, const Tensor& t, Dtype type, std::span<const Rows> all) {
  for (const auto& [name, from, ld, own_cols] : all) {
    const int64_t cols = own_cols == 0 ? t.cols : own_cols;
    if (from == nullptr || !is_aligned(from)) call.fault("cast: {} misaligned or null", name);
    if (ld < cols || !is_row_stride(ld, cols, type)) {
      call.fault("cast: {} has rows of {}, {} apart", name, cols, ld);
    }
  }
}

// Does what `spec` says to one of the tensors of a launch, whose elements are value(row, column) and go to
// `result` where it is not null. Each block has so many tiles of it.
template <class Spec, class Args, class Value>
void run_one(const Spec& spec, const Call& call, const Args& args, size_t index, void* result,
             int32_t tiles_of_block, Value&& value) {
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
  one.tensors[0].blocks *= tiles_of_block;
  if (result != nullptr) std::memcpy(result, x.data(), x.size());
  if constexpr (requires { one.counters; }) {
    one.counters[0] = args.counters[index];
    const int64_t tile_rows = (t.rows + kernels::kCastTile - 1) / kernels::kCastTile;
    if (one.sums != nullptr) one.sums += static_cast<int64_t>(index) * tile_rows * t.cols;
  }
  void* const parameters[] = {&one};
  Launch launch = call.launch;
  launch.grid *= static_cast<unsigned>(tiles_of_block);
  emulate(spec, Call{call.module, launch, parameters, call.sm_count, call.faults});
}

// Finds what is wrong with a launch of `name`, which has as many tensors of one shape, and with what it reads.
template <class Args>
void check_all(const Call& call, const Args& args, const char* name, int32_t tensors, Dtype type,
               std::span<const Rows> read) {
  const auto& first = args.tensors[0];
  const auto& last = args.tensors[tensors - 1];
  if (args.count != tensors || first.rows != last.rows || first.cols != last.cols ||
      last.first_block != 0 || first.blocks != last.blocks) {
    call.fault("{}: {} tensors, of {} x {} and {} x {}", name, args.count, first.rows, first.cols,
               last.rows, last.cols);
  }
  check(call, first, type, read);
}

template <class Of, class Computed>
void run_computed(const codegen::ComputedSpec<Of>& spec, const Call& call, const Computed& args) {
  using codegen::Activation;
  const Of& of = spec.of;
  const Activation activation = spec.activation;
  const auto& x = args.of.tensors[0];
  const auto& up = args.of.tensors[1];
  const auto at = [&](const void* from, int64_t ld, int64_t r, int64_t c) {
    return load_element(from, r * ld + c, of.in);
  };
  const auto x_at = [&](int64_t r, int64_t c) { return at(x.x, x.ld, r, c); };
  const auto factor_at = [&](int64_t r, int64_t c) {
    return at(args.factor, args.ld_factor, r, c);
  };
  bool writes = false;
  if constexpr (std::is_same_v<Of, codegen::AmaxSpec>) {
    writes = codegen::writes_results(spec.source, of);
  }
  const Rows of_x = {"x", x.x, x.ld};
  const Rows of_factor = {"factor", args.factor, args.ld_factor};
  // Checks what is read, and does the work on one of the tensors.
  const auto run_one_of = [&](std::initializer_list<Rows> read, size_t index, auto&& value) {
    if (index == 0) {
      check_all(call, args.of, spec.key().c_str(),
                static_cast<int32_t>(codegen::tensors_of(spec.source)), of.in, read);
    }
    void* const result = args.results[index];
    if (writes != (result != nullptr) || !is_aligned(result)) {
      call.fault("{}: the results of tensor {} misaligned, null, or not asked for", spec.key(),
                 index);
    }
    const int32_t tiles = is_merged(spec.source) ? 2 : 1;
    if (call.faults.empty()) run_one(of, call, args.of, index, result, tiles, value);
  };
  switch (spec.source) {
    case codegen::Computed::kGlu:
      return run_one_of({of_x, of_factor}, 0, [&](int64_t r, int64_t c) {
        return glu(activation, x_at(r, c), factor_at(r, c), of.in);
      });
    case codegen::Computed::kGluBackward: {
      const auto both = [&](int64_t r, int64_t c) {
        return glu_backward(activation, x_at(r, c), at(up.x, up.ld, r, c), factor_at(r, c), of.in);
      };
      run_one_of({of_x, {"up", up.x, up.ld}, of_factor}, 0,
                 [&](int64_t r, int64_t c) { return both(r, c).gate; });
      return run_one_of({}, 1, [&](int64_t r, int64_t c) { return both(r, c).up; });
    }
    case codegen::Computed::kMergedGluBackward:
    case codegen::Computed::kMergedGluBackwardUpFirst: {
      const int64_t half = x.cols / 2;
      const int64_t gate = spec.source == codegen::Computed::kMergedGluBackward ? 0 : half;
      return run_one_of(
          {of_x, {"grad", args.factor, args.ld_factor, half}}, 0, [&](int64_t r, int64_t c) {
            const int64_t at_grad = c % half;
            const auto both =
                glu_backward(activation, x_at(r, gate + at_grad), x_at(r, half - gate + at_grad),
                             factor_at(r, at_grad), of.in);
            return c - at_grad == gate ? both.gate : both.up;
          });
    }
    case codegen::Computed::kRmsNorm:
      if (args.rstd == nullptr) call.fault("rms_norm: no rstd");
      return run_one_of({of_x, {"weight", args.factor, x.cols}}, 0, [&](int64_t r, int64_t c) {
        return x_at(r, c) * args.rstd[r] * load_element(args.factor, c, of.in);
      });
    case codegen::Computed::kLayerNorm: {
      if (args.rstd == nullptr || args.mean == nullptr) call.fault("layer_norm: no rstd or mean");
      if (!is_aligned(args.bias)) call.fault("layer_norm: bias misaligned");
      return run_one_of({of_x, {"weight", args.factor, x.cols}}, 0, [&](int64_t r, int64_t c) {
        const float bias = args.bias == nullptr ? -0.0F : load_element(args.bias, c, of.in);
        return std::fma((x_at(r, c) - args.mean[r]) * args.rstd[r],
                        load_element(args.factor, c, of.in), bias);
      });
    }
    case codegen::Computed::kActivation:
      return run_one_of({of_x}, 0, [&](int64_t r, int64_t c) {
        return activated(activation, x_at(r, c), of.in).value;
      });
    case codegen::Computed::kActivationBackward:
      return run_one_of({of_x, of_factor}, 0, [&](int64_t r, int64_t c) {
        return activation_backward(activation, x_at(r, c), factor_at(r, c), of.in);
      });
  }
}

}  // namespace

void emulate(const codegen::ComputedAmaxSpec& spec, const Call& call) {
  run_computed(spec, call, call.args<kernels::ComputedAmaxArgs>());
}

void emulate(const codegen::ComputedCastSpec& spec, const Call& call) {
  run_computed(spec, call, call.args<kernels::ComputedCastArgs>());
}

}  // namespace f8::runtime::emulation
