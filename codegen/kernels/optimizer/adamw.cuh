// AdamW of a list of weights in one pass: the update, and of the new values what casts of them need
// first, while they are in registers: their maxima (those of amax.cuh, to the same bits) and the
// fingerprint of their bytes (that of fingerprint.cuh).
//
// Where rows or columns have maxima, a block updates a tile of 128 x 128; else a tensor's blocks share its
// elements. Where a cast needs no maxima before, as with delayed scales and those of blocks, the tile is cast
// too: the update is the loader of cast.cuh. A step that is left out writes no weight, and has the maxima and the fingerprint of the old ones.
#pragma once

#include "codegen/kernels/cast/amax.cuh"
#include "codegen/kernels/cast/cast.cuh"
#include "codegen/kernels/cast/fingerprint.cuh"
#include "codegen/kernels/optimizer/adamw_math.cuh"

namespace f8::kernels {

// Eight neighbouring elements of a tensor in memory, as fp32.
template <Input kInput>
struct AdamwEight {
  static constexpr bool kIsF32 = Vec8<kInput>::kElementBytes == 4;
  static constexpr int kVectors = kIsF32 ? 2 : 1;
  float value[8];
  uint4 bits[kVectors];  // as they are in memory

  F8_DEVICE void load(const void* base, i64 element) {
    const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const u8*>(base) +
                                                             element * Vec8<kInput>::kElementBytes);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) bits[i] = from[i];
    take_bits();
  }
  // Rounds the values to the type in memory.
  F8_DEVICE void store(void* base, i64 element) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kIsF32) {
        bits[i] = make_uint4(__float_as_uint(value[4 * i]), __float_as_uint(value[4 * i + 1]),
                             __float_as_uint(value[4 * i + 2]), __float_as_uint(value[4 * i + 3]));
      } else {
        bits[i] = make_uint4(
            pack_pair<kInput>(value[0], value[1]), pack_pair<kInput>(value[2], value[3]),
            pack_pair<kInput>(value[4], value[5]), pack_pair<kInput>(value[6], value[7]));
      }
      reinterpret_cast<uint4*>(static_cast<u8*>(base) + element * Vec8<kInput>::kElementBytes)[i] =
          bits[i];
    }
  }
  // As what is cast has them: fp32 is rounded where the casts round it.
  F8_DEVICE Vec8<kInput> to_cast() const {
    Vec8<kInput> cast;
    if constexpr (Vec8<kInput>::kRounds) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        cast.word[i] = pack_pair<kInput>(value[2 * i], value[2 * i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        cast.word[4 * i] = bits[i].x;
        cast.word[4 * i + 1] = bits[i].y;
        cast.word[4 * i + 2] = bits[i].z;
        cast.word[4 * i + 3] = bits[i].w;
      }
    }
    return cast;
  }
  F8_DEVICE void add_to(Fingerprint& sum, i64 element, u64 seed) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const FingerprintChunk chunk = {{bits[i].x, bits[i].y, bits[i].z, bits[i].w}};
      sum.add(chunk.mixed(static_cast<u32>(element / 8 * kVectors + i), seed));
    }
  }

 private:
  F8_DEVICE void take_bits() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const u32 word[4] = {bits[i].x, bits[i].y, bits[i].z, bits[i].w};
      if constexpr (kIsF32) {
#pragma unroll
        for (int j = 0; j < 4; ++j) value[4 * i + j] = __uint_as_float(word[j]);
      } else {
        Vec8<kInput> half;
#pragma unroll
        for (int j = 0; j < 4; ++j) half.word[j] = word[j];
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j] = half.value(j);
      }
    }
  }
};

// A pass of a block over elements of a weight.
template <Input kInput>
struct AdamwPass {
  using Values = Vec8<kInput>;
  using Eight = AdamwEight<kInput>;
  const AdamwTensor& t;
  AdamwFactors factors;
  bool left_out;
  Fingerprint sum;

  F8_DEVICE AdamwPass(const AdamwOptions& options, const AdamwTensor& tensor)
      : t(tensor),
        factors(adamw_factors(options, tensor)),
        left_out(options.found_inf != nullptr && *options.found_inf == 1.0F),
        sum{0, 0} {}

  // Updates eight elements, and returns them as they are cast.
  F8_DEVICE Values at(i64 element) {
    Eight param;
    param.load(t.param, element);
    if (!left_out) {
      if (t.max_exp_avg_sq != nullptr) {
        update<true>(element, param);
      } else {
        update<false>(element, param);
      }
    }
    if (t.fingerprint != nullptr) param.add_to(sum, element, t.seed);
    return param.to_cast();
  }
  // A tile, whose rows move in behind each other, so that the code of an update is there once.
  F8_DEVICE void tile(i32 row0, i32 column0, ThreadFragment<kInput>& fragment) {
    fragment.set_origin(row0, column0);
#pragma unroll 1
    for (int i = 0; i < kFragment; ++i) {
#pragma unroll
      for (int j = 1; j < kFragment; ++j) fragment.rows[j - 1] = fragment.rows[j];
      const i32 row = fragment.row + i;
      Values& last = fragment.rows[kFragment - 1];
      if (row < t.rows && fragment.column < t.cols) {
        last = at(static_cast<i64>(row) * t.cols + fragment.column);
      } else {
        last.clear();
      }
    }
  }
  // All threads of the block call it behind their elements.
  F8_DEVICE void finish(i32 blocks) {
    if (t.fingerprint == nullptr) return;
    Fingerprint whole;
    if (!add_of_block(*t.fingerprint, blocks, sum, whole)) return;
    t.fingerprint->value[0] = whole.low;
    t.fingerprint->value[1] = whole.high;
  }

 private:
  template <bool kAmsgrad>
  F8_DEVICE void update(i64 element, Eight& param) const {
    Eight grad, exp_avg, exp_avg_sq, most;
    grad.load(t.grad, element);
    exp_avg.load(t.exp_avg, element);
    exp_avg_sq.load(t.exp_avg_sq, element);
    if constexpr (kAmsgrad) most.load(t.max_exp_avg_sq, element);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      AdamwElement e = {param.value[i], grad.value[i], exp_avg.value[i], exp_avg_sq.value[i],
                        kAmsgrad ? most.value[i] : 0.0F};
      adamw_update<kAmsgrad>(factors, e);
      param.value[i] = e.param;
      grad.value[i] = e.grad;
      exp_avg.value[i] = e.exp_avg;
      exp_avg_sq.value[i] = e.exp_avg_sq;
      if constexpr (kAmsgrad) most.value[i] = e.max_exp_avg_sq;
    }
    param.store(t.param, element);
    exp_avg.store(t.exp_avg, element);
    exp_avg_sq.store(t.exp_avg_sq, element);
    if constexpr (kAmsgrad) most.store(t.max_exp_avg_sq, element);
    if (factors.scales) grad.store(t.grad, element);
  }
};

// The elements of a weight that fall to this block, of which the weight alone has a maximum.
template <Input kInput>
F8_DEVICE void adamw_elements(AdamwPass<kInput>& pass, u32 block) {
  using Values = Vec8<kInput>;
  const AdamwTensor& t = pass.t;
  const i64 eights = static_cast<i64>(t.rows) * t.cols / 8;
  const i64 step = static_cast<i64>(t.blocks) * kTileThreads;
  Values most;
  most.clear();
#pragma unroll 1
  for (i64 i = static_cast<i64>(block) * kTileThreads + threadIdx.x; i < eights; i += step) {
    pass.at(i * 8).raise(most);
  }
  if (t.amax == nullptr) return;
  __shared__ u32 of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();
  const u32 warp_amax = warp_max(Values::fp32_bits(most.largest_magnitude()));
  if (threadIdx.x % 32 == 0) atomicMax(&of_block, warp_amax);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(t.amax, of_block);
}

// Config is that of an amax kernel.
template <class Config>
F8_DEVICE void adamw(const AdamwArgs& args) {
  constexpr Input kInput = Config::kInput;
  grid_dependency_wait();
  launch_dependents();
  const AdamwTensor& t = args.tensors[tensor_of_block(args)];
  const u32 block = blockIdx.x - static_cast<u32>(t.first_block);
  AdamwPass<kInput> pass(args.options, t);
  if constexpr (Config::kRow || Config::kCol) {
    const i32 tiles_across = (t.cols + kCastTile - 1) / kCastTile;
    const i32 row0 = static_cast<i32>(block) / tiles_across * kCastTile;
    const i32 column0 = static_cast<i32>(block) % tiles_across * kCastTile;
    ThreadFragment<kInput> fragment;
    pass.tile(row0, column0, fragment);
    AmaxTensor words = {};
    words.rows = t.rows;
    words.cols = t.cols;
    words.partials = t.amax;
    words.row_amax = t.row_amax;
    words.col_amax = t.col_amax;
    Amax<Config>::of_tile(words, fragment, row0, column0);
  } else {
    adamw_elements(pass, block);
  }
  pass.finish(t.blocks);
}

// The loader of cast.cuh: a tile is updated as it is read.
template <Input kInput>
struct AdamwLoad {
  AdamwPass<kInput>& pass;

  static F8_DEVICE void prefetch(const CastTensor& t, i32 row0, i32 column0) {
    prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
  }
  F8_DEVICE void load(const CastTensor&, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    pass.tile(row0, column0, fragment);
  }
};

// Config is that of a cast kernel.
template <class Config>
F8_DEVICE void adamw_cast(const AdamwCastArgs& args) {
  grid_dependency_wait();
  const int index = tensor_of_block(args.cast);
  AdamwPass<Config::kInput> pass(args.options, args.tensors[index]);
  Cast<Config>::run(args.cast, AdamwLoad<Config::kInput>{pass});
  pass.finish(args.cast.tensors[index].blocks);
}

}  // namespace f8::kernels
