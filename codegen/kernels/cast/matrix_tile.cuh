// The amax and cast kernels share these: 8 neighbouring elements as a value, magnitudes as ordered
// bits, and the 128 x 128 tile in which 256 threads hold a fragment of 8 x 8 elements each.
//
// Thread t of a tile holds rows 8 (t / 16) .. +7 and columns 8 (t % 16) .. +7: the 16 threads of a
// half-warp read 128 neighbouring columns of one row.
#pragma once

#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

// The type of a matrix. Of the last two it is fp32 in memory, and elements are rounded to nearest
// even as they are loaded: all behind the load has the bits of a matrix in that type.
enum class Input { kBf16, kF16, kF32, kF32AsBf16, kF32AsF16 };

inline constexpr int kFragment = 8;  // rows and columns of a thread's fragment

F8_DEVICE u32 max_u16x2(u32 a, u32 b) {
  u32 r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
F8_DEVICE u32 half_to_float_bits(u32 half) {
  u32 r;
  asm("{\n.reg .b16 h;\n.reg .f32 f;\ncvt.u16.u32 h, %1;\ncvt.f32.f16 f, h;\nmov.b32 %0, f;\n}\n"
      : "=r"(r)
      : "r"(half));
  return r;
}

// Which lines L2 gives up first: by age, or those of this access before all others.
enum class Evict { kByAge, kFirst };

// Two elements of a 16-bit type, rounded to nearest even.
template <Input kInput>
F8_DEVICE u32 pack_pair(float low, float high) {
  constexpr bool kIsBf16 = kInput == Input::kBf16 || kInput == Input::kF32AsBf16;
  return kIsBf16 ? pack_bf16(low, high) : pack_f16(low, high);
}

// Vec8 elements as loaded. The magnitude of an element is its bits without the sign, in the
// element's own type: the integer order of magnitudes is the order of absolute values, NaN above
// infinity.
template <Input kInput>
struct Vec8 {
  static constexpr bool kRounds = kInput == Input::kF32AsBf16 || kInput == Input::kF32AsF16;
  static constexpr bool kIsBf16 = kInput == Input::kBf16 || kInput == Input::kF32AsBf16;
  static constexpr int kWords = kInput == Input::kF32 ? 8 : 4;
  static constexpr int kElementBytes = kInput == Input::kF32 || kRounds ? 4 : 2;  // in memory
  static constexpr int kPerWord = 8 / kWords;
  u32 word[kWords];

  F8_DEVICE void load(const void* base, i64 element) {
    const u8* p = static_cast<const u8*>(base) + element * kElementBytes;
    if constexpr (kRounds) {
      u32 x[8];
      load_words(p, x);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const float low = __uint_as_float(x[2 * i]);
        const float high = __uint_as_float(x[2 * i + 1]);
        word[i] = pack_pair<kInput>(low, high);
      }
    } else {
      load_words(p, word);
    }
  }
  template <int kCount>
  static F8_DEVICE void load_words(const u8* p, u32 (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      u32* const four = to + 4 * i;
      asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                   : "l"(p + 16 * i));
    }
  }
  F8_DEVICE void store(void* x, i64 element) const {
    uint4* const p = static_cast<uint4*>(x) + element * kElementBytes / 16;
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      p[i] = make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
    }
  }
  F8_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
  }
  F8_DEVICE float value(int i) const {
    if constexpr (kInput == Input::kF32) {
      return __uint_as_float(word[i]);
    } else if constexpr (kIsBf16) {
      return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xFFFF0000U);
    } else {
      return __uint_as_float(
          half_to_float_bits(i % 2 == 0 ? word[i / 2] & 0xFFFFU : word[i / 2] >> 16));
    }
  }
  F8_DEVICE void infinities_to_nan() {
    constexpr u32 kInfinity = kIsBf16 ? 0x7F80U : 0x7C00U;
    constexpr u32 kQuiet = kIsBf16 ? 0x40U : 0x200U;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kInput == Input::kF32) {
        if ((word[i] & 0x7FFFFFFFU) == 0x7F800000U) word[i] |= 0x400000U;
      } else {
        if ((word[i] & 0x7FFFU) == kInfinity) word[i] |= kQuiet;
        if ((word[i] >> 16 & 0x7FFFU) == kInfinity) word[i] |= kQuiet << 16;
      }
    }
  }
  // The maximum of magnitudes, element by element of a word.
  static F8_DEVICE u32 max_of(u32 a, u32 b) {
    return kInput == Input::kF32 ? max(a, b) : max_u16x2(a, b);
  }
  F8_DEVICE Vec8 magnitudes() const {
    Vec8 r;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      r.word[i] = word[i] & (kInput == Input::kF32 ? 0x7FFFFFFFU : 0x7FFF7FFFU);
    }
    return r;
  }
  // Raises `into` by the magnitudes, element by element.
  F8_DEVICE void raise(Vec8& into) const {
    const Vec8 own = magnitudes();
#pragma unroll
    for (int i = 0; i < kWords; ++i) into.word[i] = max_of(into.word[i], own.word[i]);
  }
  // The largest of eight magnitudes (not of signed elements), for each element of a word.
  F8_DEVICE u32 largest_word() const {
    u32 r = word[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) r = max_of(r, word[i]);
    return r;
  }
  F8_DEVICE u32 largest_magnitude() const {
    const u32 r = largest_word();
    return kInput == Input::kF32 ? r : max(r & 0xFFFFU, r >> 16);
  }
  // A magnitude of this type as the bits of |x| as fp32.
  static F8_DEVICE u32 fp32_bits(u32 magnitude) {
    if constexpr (kInput == Input::kF32) return magnitude;
    if constexpr (kIsBf16) return magnitude << 16;
    return half_to_float_bits(magnitude);
  }
};

// Fetches a tile into L2.
template <Input kInput>
F8_DEVICE void prefetch_tile(const void* x, i64 ld, i32 row_count, i32 column_count, i32 row0,
                             i32 column0) {
  constexpr i32 kBytes = Vec8<kInput>::kElementBytes;
  constexpr i32 kLinesOfRow = kCastTile * kBytes / 128;  // cache lines
#pragma unroll
  for (int i = 0; i < kCastTile * kLinesOfRow / kTileThreads; ++i) {
    const i32 line = static_cast<i32>(threadIdx.x) + i * kTileThreads;
    const i32 row = row0 + line / kLinesOfRow;
    const i32 column = column0 + line % kLinesOfRow * (128 / kBytes);
    if (row < row_count && column < column_count) {
      prefetch_l2(static_cast<const u8*>(x) + (row * ld + column) * kBytes);
    }
  }
}

// A thread's 8 x 8 elements of the tile whose first element is (row0, column0). Elements outside
// the matrix are zero.
template <Input kInput>
struct ThreadFragment {
  Vec8<kInput> rows[kFragment];
  i32 row;  // of the matrix
  i32 column;

  F8_DEVICE void set_origin(i32 row0, i32 column0) {
    row = row0 + static_cast<i32>(threadIdx.x / 16 * kFragment);
    column = column0 + static_cast<i32>(threadIdx.x % 16 * kFragment);
  }
  F8_DEVICE void load(const void* x, i64 ld, i32 row_count, i32 column_count, i32 row0,
                      i32 column0) {
    set_origin(row0, column0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if (row + i < row_count && column < column_count) {
        rows[i].load(x, (row + i) * ld + column);
      } else {
        rows[i].clear();
      }
    }
  }

  F8_DEVICE void store(void* x, i64 ld, i32 row_count, i32 column_count) const {
    if (column >= column_count) return;
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if (row + i < row_count) rows[i].store(x, (row + i) * ld + column);
    }
  }

  F8_DEVICE void infinities_to_nan() {
#pragma unroll
    for (int i = 0; i < kFragment; ++i) rows[i].infinities_to_nan();
  }

  // Each thread saves its elements to dynamic shared memory (kStashBytes a block), and restores them or
  // exchanges them with those of another tile.
  F8_DEVICE void stash() const {
#pragma unroll
    for (int i = 0; i < kFragment; ++i)
      *stash_slot(i) =
          make_uint4(rows[i].word[0], rows[i].word[1], rows[i].word[2], rows[i].word[3]);
  }
  F8_DEVICE void restore(i32 row0, i32 column0) {
    set_origin(row0, column0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      const uint4 four = *stash_slot(i);
      rows[i].word[0] = four.x;
      rows[i].word[1] = four.y;
      rows[i].word[2] = four.z;
      rows[i].word[3] = four.w;
    }
  }
  F8_DEVICE void swap_with_stash(i32 row0, i32 column0) {
    set_origin(row0, column0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      const uint4 saved = *stash_slot(i);
      *stash_slot(i) =
          make_uint4(rows[i].word[0], rows[i].word[1], rows[i].word[2], rows[i].word[3]);
      rows[i].word[0] = saved.x;
      rows[i].word[1] = saved.y;
      rows[i].word[2] = saved.z;
      rows[i].word[3] = saved.w;
    }
  }

 private:
  static F8_DEVICE uint4* stash_slot(int i) {
    extern __shared__ uint4 stash_of_block[];
    return stash_of_block + i * kTileThreads + threadIdx.x;
  }
};

// The amaxes of a tile's rows, its columns and the whole tile, as magnitudes of the input's type,
// as many a word as in Vec8. They are complete after the next __syncthreads().
template <Input kInput>
struct TileAmax {
  using Values = Vec8<kInput>;
  static constexpr int kPerWord = Values::kPerWord;
  static constexpr int kWarps = kTileThreads / 32;
  static constexpr int kWords = kCastTile / kPerWord;
  alignas(16) u32 rows[kWords];
  alignas(16) u32 columns[kWarps][kWords];  // over the 16 rows of each warp
  u32 tile[kWarps];

  F8_DEVICE u32 row(u32 i) const { return element(rows[i / kPerWord], i); }
  F8_DEVICE u32 column(u32 i) const { return element(column_word(i / kPerWord), i); }
  // The quad of rows or columns 4 i .. + 3; there are quads of 16-bit elements alone.
  F8_DEVICE u64 quad_of_rows(u32 i) const {
    return rows[2 * i] | static_cast<u64>(rows[2 * i + 1]) << 32;
  }
  F8_DEVICE u64 quad_of_columns(u32 i) const {
    return column_word(2 * i) | static_cast<u64>(column_word(2 * i + 1)) << 32;
  }
  // The amax of the whole tile, as the bits of |x| as fp32.
  F8_DEVICE u32 amax() const {
    u32 most = tile[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) most = max(most, tile[i]);
    return Values::fp32_bits(most);
  }

 private:
  static F8_DEVICE u32 element(u32 word, u32 i) {
    if constexpr (kPerWord == 1) return word;
    return i % 2 == 0 ? word & 0xFFFFU : word >> 16;
  }
  F8_DEVICE u32 column_word(u32 i) const {
    u32 most = columns[0][i];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) most = Values::max_of(most, columns[w][i]);
    return most;
  }
};

template <bool kRow, bool kColumn, bool kTile, Input kInput>
F8_DEVICE void find_tile_amax(const ThreadFragment<kInput>& fragment, TileAmax<kInput>& tile_amax) {
  using Values = Vec8<kInput>;
  constexpr int kRowWords = kFragment / Values::kPerWord;
  const u32 lane = threadIdx.x % 32;
  u32 rows[kRowWords];
  Values most;
#pragma unroll
  for (int i = 0; i < kFragment; ++i) {
    const Values magnitudes = fragment.rows[i].magnitudes();
    if constexpr (kColumn || kTile) {
      if (i == 0) {
        most = magnitudes;
      } else {
        magnitudes.raise(most);
      }
    }
    if constexpr (kRow) {
      u32& word = rows[i / Values::kPerWord];
      const u32 largest = magnitudes.largest_word();
      if (i % Values::kPerWord == 0) {
        word = largest;
      } else {  // two rows' halves side by side
        word = max_u16x2(__byte_perm(word, largest, 0x5410), __byte_perm(word, largest, 0x7632));
      }
    }
  }
  if constexpr (kRow) {
    // Over the 16 threads of a row: each step halves the words or, where one is left, the threads
    // that know it.
    int words = kRowWords;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
      if (words > 1) {
        words /= 2;
#pragma unroll
        for (int w = 0; w < words; ++w) {
          const bool upper = (lane & step) != 0;
          const u32 sent = upper ? rows[w] : rows[w + words];
          const u32 kept = upper ? rows[w + words] : rows[w];
          rows[w] = Values::max_of(kept, __shfl_xor_sync(0xFFFFFFFFU, sent, step));
        }
      } else {
        rows[0] = Values::max_of(rows[0], __shfl_xor_sync(0xFFFFFFFFU, rows[0], step));
      }
    }
    constexpr u32 kThreadsOfWord = 16 / kRowWords;
    if (threadIdx.x % kThreadsOfWord == 0) tile_amax.rows[threadIdx.x / kThreadsOfWord] = rows[0];
  }
  if constexpr (kTile) {
    const u32 warp_amax = warp_max(most.largest_magnitude());
    if (lane == 0) tile_amax.tile[threadIdx.x / 32] = warp_amax;
  }
  if constexpr (kColumn) {
    // The two halves of a warp hold the same columns of different rows.
#pragma unroll
    for (int i = 0; i < Values::kWords; ++i) {
      most.word[i] = Values::max_of(most.word[i], __shfl_xor_sync(0xFFFFFFFFU, most.word[i], 16));
    }
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < Values::kWords; i += 4) {
        *reinterpret_cast<uint4*>(&tile_amax.columns[threadIdx.x / 32][lane * Values::kWords + i]) =
            make_uint4(most.word[i], most.word[i + 1], most.word[i + 2], most.word[i + 3]);
      }
    }
  }
}

// True where a flag says that the launch's results are there already, so it has nothing to do.
F8_DEVICE bool is_noop(const u32* noop_flag) {
  return noop_flag != nullptr && load_global(noop_flag) == 1;
}

// The matrix of the list that a tile or block of the launch belongs to.
template <class Args>
F8_DEVICE int tensor_of_tile(const Args& args, i32 tile) {
  int first = 0;
  int last = args.count - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (tile >= args.tensors[middle].first_block) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

template <class Args>
F8_DEVICE int tensor_of_block(const Args& args) {
  return tensor_of_tile(args, static_cast<i32>(blockIdx.x));
}

}  // namespace f8::kernels
