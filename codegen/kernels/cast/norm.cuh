// The cast of h, which a norm makes of x, and the maxima that its scales need: (x rstd) weight of an RMSNorm,
// ((x - mean) rstd) weight + bias of a LayerNorm. h is computed in fp32, each operation rounded to nearest and
// the bias added in one fma with the product before, and rounded once to x's type. It is never in memory, and
// amax, scales and copies are those of cast.cuh and amax.cuh.
#pragma once

#include "codegen/kernels/cast/amax.cuh"
#include "codegen/kernels/cast/cast.cuh"

namespace f8::kernels {

// The factors of eight columns. An RMSNorm has no bias.
template <Input kInput, bool kLayer>
struct NormColumns {
  Vec8<kInput> weight;

  F8_DEVICE void load(const void* weights, const void*, i64 column) {
    weight.load(weights, column);
  }
  F8_DEVICE void clear() { weight.clear(); }
  F8_DEVICE float scaled(float x, int e) const { return __fmul_rn(x, weight.value(e)); }
};
template <Input kInput>
struct NormColumns<kInput, true> {
  Vec8<kInput> weight;
  Vec8<kInput> bias;

  // Without a bias it is -0, to which an fma adds a product without a change, that of -0 too.
  F8_DEVICE void load(const void* weights, const void* biases, i64 column) {
    constexpr u32 kNegativeZero = kInput == Input::kF32 ? 0x80000000U : 0x80008000U;
    weight.load(weights, column);
    if (biases != nullptr) {
      bias.load(biases, column);
    } else {
#pragma unroll
      for (u32& word : bias.word) word = kNegativeZero;
    }
  }
  F8_DEVICE void clear() {
    weight.clear(), bias.clear();
  }
  F8_DEVICE float scaled(float x, int e) const {
    return __fmaf_rn(x, weight.value(e), bias.value(e));
  }
};

// Loads and computes what a norm makes of x.
template <Input kInput, bool kLayer>
struct LoadNorm {
  using Values = Vec8<kInput>;
  using Columns = NormColumns<kInput, kLayer>;
  const void* weight;
  const void* bias;
  const float* rstd;
  const float* mean;

  // Eight elements of a row of x become those of h.
  static F8_DEVICE void normalize(Values& x, float by, float middle, const Columns& columns) {
    const auto h = [&](int e) {
      const float centered = kLayer ? __fsub_rn(x.value(e), middle) : x.value(e);
      return columns.scaled(__fmul_rn(centered, by), e);
    };
#pragma unroll
    for (int w = 0; w < Values::kWords; ++w) {
      if constexpr (kInput == Input::kF32) {
        x.word[w] = __float_as_uint(h(w));
      } else {
        x.word[w] = pack_pair<kInput>(h(2 * w), h(2 * w + 1));
      }
    }
  }
  F8_DEVICE float mean_of(i32 row) const {
    return kLayer ? __ldg(mean + row) : 0.0F;
  }

  template <class Tensor>
  F8_DEVICE void prefetch(const Tensor& t, i32 row0, i32 column0) const {
    prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
  }
  // Elements beyond the matrix are 0: a bias is not added there.
  template <class Tensor>
  F8_DEVICE void load(const Tensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    Columns columns;
    if (fragment.column < t.cols) {
      columns.load(weight, bias, fragment.column);
    } else {
      columns.clear();
    }
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      const i32 row = fragment.row + i;
      const bool inside = row < t.rows;
      normalize(fragment.rows[i], inside ? __ldg(rstd + row) : 0.0F, inside ? mean_of(row) : 0.0F,
                columns);
      if (kLayer && !inside) fragment.rows[i].clear();
    }
  }
};

template <Input kInput, bool kLayer>
struct AmaxOfNorm : LoadNorm<kInput, kLayer> {
  using Load = LoadNorm<kInput, kLayer>;
  using Values = Vec8<kInput>;
  // The factors are found and read behind x: they are few, and in a cache.
  struct Read {
    Values x;
    i32 row;
    u32 eight;  // from the begin of that row on
  };
  u32 eights_of_row;
  static constexpr int kInFlight = kInput == Input::kF32 ? 2 : kLayer ? 3 : 4;  // more spill
  static constexpr int kStrided = 1;
  static constexpr int kResults = 1;

  // Numbers of eights fit in 32 bits, whose division is cheap.
  F8_DEVICE bool is_dense(const AmaxTensor& t) const {
    return t.ld == t.cols && i64{t.rows} * t.cols < i64{1} << 34;
  }
  F8_DEVICE void read(const AmaxTensor& t, i64 row, i64 element, Read& to) const {
    to.x.load(t.x, row * t.ld + element);
    to.row = static_cast<i32>(row);
    to.eight = static_cast<u32>(element / 8);
  }
  F8_DEVICE void raise(Read& from, i64, Values (&most)[kResults]) const {
    const u32 rows_on = from.eight / eights_of_row;
    const i32 row = from.row + static_cast<i32>(rows_on);
    typename Load::Columns columns;
    columns.load(this->weight, this->bias, i64{from.eight - rows_on * eights_of_row} * 8);
    Load::normalize(from.x, __ldg(this->rstd + row), this->mean_of(row), columns);
    from.x.raise(most[0]);
  }
};

// Returns the norm that the arguments of a cast, or of maxima, describe.
template <class Norm, class Args>
F8_DEVICE Norm norm_of(const Args& args) {
  Norm norm;
  norm.weight = args.factor;
  norm.bias = args.bias;
  norm.rstd = args.rstd;
  norm.mean = args.mean;
  return norm;
}

template <class Config, bool kLayer>
F8_DEVICE void amax_of_norm(const ComputedAmaxArgs& args) {
  auto norm = norm_of<AmaxOfNorm<Config::kInput, kLayer>>(args);
  norm.eights_of_row = static_cast<u32>(args.of.tensors[0].cols) / 8;
  Amax<Config>::run(args.of, norm);
}

template <class Config>
F8_DEVICE void rms_norm_cast(const ComputedCastArgs& args) {
  Cast<Config>::run(args.of, norm_of<LoadNorm<Config::kInput, false>>(args));
}
template <class Config>
F8_DEVICE void rms_norm_amax(const ComputedAmaxArgs& args) {
  amax_of_norm<Config, false>(args);
}
template <class Config>
F8_DEVICE void layer_norm_cast(const ComputedCastArgs& args) {
  Cast<Config>::run(args.of, norm_of<LoadNorm<Config::kInput, true>>(args));
}
template <class Config>
F8_DEVICE void layer_norm_amax(const ComputedAmaxArgs& args) {
  amax_of_norm<Config, true>(args);
}

}  // namespace f8::kernels
