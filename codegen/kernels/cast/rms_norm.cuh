// The cast of h = (x rstd) weight, which an RMSNorm makes of x, and the maxima that its scales need: h is
// computed in fp32, by two products that round to nearest, and rounded once to x's type. It is never in
// memory, and amax, scales and copies are those of cast.cuh and amax.cuh.
#pragma once

#include "codegen/kernels/cast/amax.cuh"
#include "codegen/kernels/cast/cast.cuh"

namespace f8::kernels {

// Eight elements of x become those of h.
template <Input kInput>
F8_DEVICE void normalize(Vec8<kInput>& x, float rstd, const Vec8<kInput>& weight) {
  const auto h = [&](int e) { return __fmul_rn(__fmul_rn(x.value(e), rstd), weight.value(e)); };
#pragma unroll
  for (int w = 0; w < Vec8<kInput>::kWords; ++w) {
    if constexpr (kInput == Input::kF32) {
      x.word[w] = __float_as_uint(h(w));
    } else {
      x.word[w] = pack_pair<kInput>(h(2 * w), h(2 * w + 1));
    }
  }
}

template <Input kInput>
struct LoadRmsNorm {
  using Values = Vec8<kInput>;
  const void* weight;
  const float* rstd;

  template <class Tensor>
  F8_DEVICE void prefetch(const Tensor& t, i32 row0, i32 column0) const {
    prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
  }
  template <class Tensor>
  F8_DEVICE void load(const Tensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    Values of_columns;
    if (fragment.column < t.cols) {
      of_columns.load(weight, fragment.column);
    } else {
      of_columns.clear();
    }
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      const i32 row = fragment.row + i;
      normalize(fragment.rows[i], row < t.rows ? __ldg(rstd + row) : 0.0F, of_columns);
    }
  }
};

template <Input kInput>
struct AmaxOfRmsNorm : LoadRmsNorm<kInput> {
  using Values = Vec8<kInput>;
  // The factors are read behind x: they are few, and in a cache.
  struct Read {
    Values x;
    i32 row;
    i32 column;
  };
  static constexpr int kInFlight = kInput == Input::kF32 ? 2 : 4;
  static constexpr int kResults = 1;

  // Numbers of eights fit in 32 bits, whose division is cheap.
  F8_DEVICE bool is_dense(const AmaxTensor& t) const {
    return t.ld == t.cols && i64{t.rows} * t.cols < i64{1} << 34;
  }
  F8_DEVICE void read(const AmaxTensor& t, i64 row, i64 element, Read& to) const {
    const u32 eights = static_cast<u32>(t.cols) / 8;
    const u32 eight = static_cast<u32>(element / 8);
    const u32 rows_on = eight / eights;
    to.x.load(t.x, row * t.ld + element);
    to.row = static_cast<i32>(row) + static_cast<i32>(rows_on);
    to.column = static_cast<i32>((eight - rows_on * eights) * 8);
  }
  F8_DEVICE void raise(Read& from, Values (&most)[kResults]) const {
    Values of_columns;
    of_columns.load(this->weight, from.column);
    normalize(from.x, __ldg(this->rstd + from.row), of_columns);
    from.x.raise(most[0]);
  }
};

template <class Config>
F8_DEVICE void rms_norm_cast(const ComputedCastArgs& args) {
  Cast<Config>::run(args.of, LoadRmsNorm<Config::kInput>{args.factor, args.rstd});
}

template <class Config>
F8_DEVICE void rms_norm_amax(const ComputedAmaxArgs& args) {
  Amax<Config>::run(args.of, AmaxOfRmsNorm<Config::kInput>{{args.factor, args.rstd}});
}

}  // namespace f8::kernels
