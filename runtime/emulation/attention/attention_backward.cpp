// The gradients of attention in fp8, in the units and with the scales of attention_backward_dq.cuh and
// attention_backward_dkv.cuh.
// Exponentials are exact to fp32, where the device's are approximations.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "recipes/dtype.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/attention/attention_heads.hpp"

namespace f8::runtime::emulation {
namespace {

using kernels::AttentionBlock;

constexpr int64_t kTile = kernels::kAttentionTile, kStep = kernels::kAttentionStep;

float rounded(float x) {
  return e4m3(encode_fp8(x, Dtype::kE4m3));
}

// A row of a head.
using Row = std::span<const float>;

// The operands of a call as numbers, and how its blocks lie.
struct Operands {
  const kernels::AttentionBackwardArgs& args;
  int64_t head_dim;
  bool causal;
  int64_t window;                        // 0: all keys
  int64_t blocks_q, blocks_k;            // of a head
  const AttentionBlock* of_q = nullptr;  // of packed sequences
  const AttentionBlock* of_k = nullptr;
  std::array<std::vector<float>, 6> values;  // of the maps, all of them as rows of tokens

  [[nodiscard]] AttentionBlock queries(int64_t place) const {
    return block(of_q, place, args.queries);
  }
  [[nodiscard]] AttentionBlock keys(int64_t place) const { return block(of_k, place, args.keys); }
  [[nodiscard]] AttentionBlock block(const AttentionBlock* packed, int64_t place,
                                     int32_t tokens) const {
    if (packed != nullptr) return packed[place];
    return block_of_batch(place, tokens, args.queries, args.keys);
  }
  [[nodiscard]] Row row(size_t map, int64_t index) const {
    return std::span(values[map])
        .subspan(static_cast<size_t>(index * head_dim), static_cast<size_t>(head_dim));
  }
  [[nodiscard]] bool has(int64_t query, int64_t key) const {
    return (!causal || key <= query) && (window == 0 || query - key < window);
  }
};

float dot(Row x, Row y) {
  float sum = 0;
  for (size_t c = 0; c < x.size(); ++c) sum += x[c] * y[c];
  return sum;
}

void store(const kernels::AttentionGradient& to, int64_t batch, int64_t head, int64_t token, Row x,
           float factor) {
  kernels::u16* const line =
      to.x + batch * to.stride_batch + head * to.stride_head + token * to.stride_token;
  for (size_t c = 0; c < x.size(); ++c) line[c] = encode_bf16(x[c] * factor);
}

// dQ of a query of a block of a head, from all values of its keys: {q, dO, k, v, k^T}.
void differentiate_query(const Operands& of, int64_t head, int64_t place, int64_t row) {
  const kernels::AttentionBackwardArgs& args = of.args;
  const AttentionBlock block = of.queries(place);
  const int64_t kv = head / (args.heads_q / args.heads_kv), at = head * of.blocks_q + place;
  const int64_t first_block = kv * of.blocks_k + block.first;
  const int64_t query = block.index * kTile + row;
  const int64_t all = kernels::attention_blocks(block.keys);
  const int64_t tiles = of.causal ? std::min<int64_t>(block.index + 1, all) : all;
  const int64_t begin =
      of.window > 0 ? kernels::attention_first_tile(block.index, static_cast<int32_t>(of.window))
                    : 0;
  std::vector<float> dq(static_cast<size_t>(of.head_dim));
  float factor = 0;
  if (begin < tiles) {
    const float* record = args.steps + (2 * at + row / kStep) * kernels::kAttentionStepFloats;
    const float lse = record[kernels::kAttentionStepHeader + row % kStep];
    float norm_v = 0, largest_k = 0;
    for (int64_t t = begin; t < tiles; ++t) {
      for (int64_t i = 0; i < kernels::kAttentionNorms; ++i) {
        const float norm = args.norms_v[(first_block + t) * kernels::kAttentionNorms + i];
        if (!(norm <= norm_v)) norm_v = norm;
      }
      const float k = args.inv_scale_k[first_block + t];
      if (!(k <= largest_k)) largest_k = k;
    }
    const float scale =
        std::fmin(256 * args.bounds_q[at * kTile + row] * bound_of(norm_v), 0x1p100F);
    const float delta = record[kernels::kAttentionStepDelta + row % kStep] / record[1];
    for (int64_t t = begin; t < tiles; ++t) {
      const float inv_k = args.inv_scale_k[first_block + t];
      const float inv_v = args.inv_scale_v[first_block + t];
      const float of_ds = scale * (inv_k / largest_k);
      for (int64_t j = 0; j < kTile; ++j) {
        const int64_t key = t * kTile + j;
        float p = 0;
        const int64_t query_at = at * kTile + row, key_at = (first_block + t) * kTile + j;
        if (key < block.keys && of.has(query, key)) {
          const float s = dot(of.row(0, query_at), of.row(2, key_at));
          p = std::exp2(std::fma(s, record[0] * inv_k, -lse));
        }
        const float dp = dot(of.row(1, query_at), of.row(3, key_at));
        const float ds = rounded(p * std::fma(dp, inv_v * of_ds, -delta * of_ds));
        const int64_t column =
            (block.first + t) * kTile + kernels::fragment_place(static_cast<int32_t>(j));
        add_multiple(ds, of.row(4, kv * of.blocks_k * kTile + column), dq.data());
      }
    }
    factor = args.scale * largest_k / scale;
  }
  store(args.dq, head / args.heads_q, head % args.heads_q, block.token + row, dq, factor);
}

// dK and dV of the 16 keys of a warp, which share a scale of P: {k, v, q, dO, q^T, dO^T}. A kernel of one of them has the
// same values of it.
class KeysOfWarp {
 public:
  static constexpr int64_t kKeys = kernels::kAttentionNormKeys;

  KeysOfWarp(const Operands& of, codegen::AttentionGradients gradients, int64_t kv, int64_t place,
             int64_t first)
      : of_(of),
        has_dk_(gradients != codegen::AttentionGradients::kDv),
        has_dv_(gradients != codegen::AttentionGradients::kDk),
        kv_(kv),
        block_(of.keys(place)),
        at_(kv * of.blocks_k + place),
        first_(first),
        dk_(static_cast<size_t>(kKeys), std::vector<float>(static_cast<size_t>(of.head_dim))),
        dv_(dk_) {}

  void run() {
    const kernels::AttentionBackwardArgs& args = of_.args;
    const int64_t pair =
        block_.index / kernels::kAttentionKeyCluster * kernels::kAttentionKeyCluster;
    int64_t end = 2 * kernels::attention_blocks(block_.queries);
    if (of_.window > 0) {
      const int64_t last = (pair + kernels::kAttentionKeyCluster) * kTile + of_.window - 2;
      end = std::min(end, last / kStep + 1);
    }
    const int64_t begin = of_.causal ? std::min(2 * pair, end) : 0;
    const int64_t group = args.heads_q / args.heads_kv;
    for (int64_t head = kv_ * group; head < (kv_ + 1) * group; ++head) {
      for (int64_t step = begin; step < end; ++step) add(head, step);
    }
    const float of_p = std::exp2(exponent_);
    for (int64_t i = 0; i < kKeys; ++i) {
      if (first_ + i >= block_.tokens) break;
      const int64_t batch = kv_ / args.heads_kv, head = kv_ % args.heads_kv;
      const int64_t token = block_.token + first_ + i;
      const auto row = static_cast<size_t>(i);
      if (has_dv_) store(args.dv, batch, head, token, dv_[row], of_p);
      if (has_dk_) store(args.dk, batch, head, token, dk_[row], of_p / scale_ds_ * args.scale);
    }
  }

 private:
  // The products of 64 queries.
  void add(int64_t head, int64_t step) {
    const kernels::AttentionBackwardArgs& args = of_.args;
    const int64_t step_of_all = (head * of_.blocks_q + block_.first_q) * 2 + step;
    const float* record = args.steps + step_of_all * kernels::kAttentionStepFloats;
    const float* lse = record + kernels::kAttentionStepHeader;
    const float* delta = record + kernels::kAttentionStepDelta;
    const float factor = args.inv_scale_k[at_] * record[0];
    for (int64_t i = 0; i < kKeys; ++i) {
      for (int64_t j = 0; j < kStep; ++j) {
        const float s =
            dot(of_.row(0, at_ * kTile + first_ + i), of_.row(2, step_of_all * kStep + j));
        const int64_t key = block_.index * kTile + first_ + i;
        const bool behind = is_first_ && first_ + i >= block_.tokens;
        s_[i][j] = !behind && of_.has(step * kStep + j, key)
                       ? std::fma(s, factor, -lse[j] - exponent_)
                       : -std::numeric_limits<float>::infinity();
      }
    }
    if (is_first_) set_first_exponent(record[4]);
    for (auto& of_key : s_) {
      for (float& each : of_key) each = std::exp2(each);
    }
    if (!is_first_ && may_saturate()) scale_p();
    const float norm = args.norms_v[at_ * kernels::kAttentionNorms + first_ / kKeys];
    const float bound = bound_of(std::fma(norm, record[2], record[3]));
    if (is_first_) {
      scale_ds_ = bound;
    } else if (!(bound >= scale_ds_)) {
      multiply(dk_, bound / scale_ds_);
      scale_ds_ = bound;
    }
    is_first_ = false;
    const float of_dp = args.inv_scale_v[at_] * record[1] * scale_ds_;
    for (int64_t i = 0; i < kKeys; ++i) {
      for (int64_t j = 0; j < kStep; ++j) {
        const int64_t place = step * kStep + j;
        const int64_t column =
            block_.first_q * kTile + kernels::fragment_place(static_cast<int32_t>(place));
        const int64_t token = head * of_.blocks_q * kTile + column;
        const auto row = static_cast<size_t>(i);
        if (has_dv_) add_multiple(rounded(s_[i][j]), of_.row(5, token), dv_[row].data());
        if (!has_dk_) continue;
        const float dp =
            dot(of_.row(1, at_ * kTile + first_ + i), of_.row(3, step_of_all * kStep + j));
        const float ds = rounded(s_[i][j] * std::fma(dp, of_dp, -delta[j] * scale_ds_));
        add_multiple(ds, of_.row(4, token), dk_[row].data());
      }
    }
  }
  void set_first_exponent(float log2_of_dout) {
    float most = log2_of_dout - 40;
    for (const auto& of_key : s_) {
      for (const float each : of_key) most = std::fmax(most, each);
    }
    exponent_ = std::ceil(most) - 7;
    for (auto& of_key : s_) {
      for (float& each : of_key) each -= exponent_;
    }
  }
  // As the device sees it: by the sum of the squares of a thread's elements.
  [[nodiscard]] bool may_saturate() const {
    for (int64_t lane = 0; lane < 32; ++lane) {
      float sum = 0;
      for (const int64_t i : {lane / 4, lane / 4 + 8}) {
        for (int64_t j = lane % 4 * 2; j < kStep; j += 8) {
          sum += s_[i][j] * s_[i][j] + s_[i][j + 1] * s_[i][j + 1];
        }
      }
      if (!(sum <= 448.0F * 448.0F)) return true;
    }
    return false;
  }
  void scale_p() {
    float most = 0;
    for (int64_t i = 0; i < kKeys; ++i) {
      for (float& each : s_[i]) {
        if (first_ + i >= block_.tokens) each = 0;
        if (!(each <= most)) most = each;
      }
    }
    const uint32_t exponent = std::max(std::bit_cast<uint32_t>(most) >> 23, 34U);
    const float by = exponent == 255 ? std::nanf("") : std::bit_cast<float>((260 - exponent) << 23);
    if (by > 1) return;
    exponent_ -= std::log2(by);
    multiply(s_, by);
    multiply(dv_, by);
    multiply(dk_, by);
  }
  static void multiply(auto& x, float by) {
    for (auto& row : x) {
      for (float& each : row) each *= by;
    }
  }

  const Operands& of_;
  bool has_dk_, has_dv_;
  int64_t kv_;
  AttentionBlock block_;
  int64_t at_;     // the block, of those of all heads
  int64_t first_;  // of the keys, in the block
  bool is_first_ = true;
  float exponent_ = 0, scale_ds_ = 1;
  float s_[kKeys][kStep] = {};
  std::vector<std::vector<float>> dk_, dv_;  // [kKeys][d]
};

// Says what the maps of a launch have to be, by the order of its operands.
struct Expected {
  const char* name;
  int64_t rows, cols, box_rows, box_cols;
};

bool read_maps(const codegen::AttentionBackwardSpec& spec, const Call& call, Operands& operands) {
  const kernels::AttentionBackwardArgs& args = operands.args;
  const int64_t heads_q = int64_t{args.batch} * args.heads_q, q = operands.blocks_q * kTile;
  const int64_t heads_k = int64_t{args.batch} * args.heads_kv, k = operands.blocks_k * kTile;
  const int64_t d = spec.head_dim, box = std::min(d, kTile);
  const int64_t keys = codegen::AttentionBackwardSpec::keys_of_stage(spec.head_dim);
  constexpr int64_t kPart = kStep / kernels::kAttentionKeyCluster;
  const int64_t columns = d / kernels::kAttentionKeyCluster;
  const bool is_dq = spec.gradients == codegen::AttentionGradients::kDq;
  const std::vector<Expected> expected =
      is_dq
          ? std::vector<Expected>{{"q", heads_q * q, d, kTile, box},
                                  {"dO", heads_q * q, d, kTile, box},
                                  {"k", heads_k * k, d, keys, box},
                                  {"v", heads_k * k, d, keys, box},
                                  {"k^T", heads_k * d, k, d, keys}}
          : std::vector<Expected>{
                {"k", heads_k * k, d, kTile, box},       {"v", heads_k * k, d, kTile, box},
                {"q", heads_q * q, d, kPart, box},       {"dO", heads_q * q, d, kPart, box},
                {"q^T", heads_q * d, q, columns, kStep}, {"dO^T", heads_q * d, q, columns, kStep}};
  const auto* const encoded = &call.args<CUtensorMap>();
  for (size_t i = 0; i < expected.size(); ++i) {
    TensorMap map;
    std::memcpy(&map, &encoded[i], sizeof map);
    const Expected& of = expected[i];
    if (map.base == nullptr || static_cast<int64_t>(map.rows) != of.rows ||
        static_cast<int64_t>(map.cols) != of.cols ||
        static_cast<int64_t>(map.ld_bytes) != of.cols || map.box_rows != of.box_rows ||
        map.box_cols != of.box_cols) {
      call.fault("{}: the map of {} has {} x {} in boxes of {} x {}", call.module.key, of.name,
                 map.rows, map.cols, map.box_rows, map.box_cols);
      return false;
    }
    const auto* const bytes = static_cast<const uint8_t*>(map.base);
    operands.values[i].resize(static_cast<size_t>(of.rows * of.cols));
    const bool transposed = i >= 4;
    for (int64_t row = 0; row < of.rows; ++row) {
      for (int64_t col = 0; col < of.cols; ++col) {
        const int64_t at =
            transposed ? (row / d * of.cols + col) * d + row % d : row * of.cols + col;
        operands.values[i][static_cast<size_t>(at)] = e4m3(bytes[row * of.cols + col]);
      }
    }
  }
  return true;
}

template <class Args>
void differentiate(const codegen::AttentionBackwardSpec& spec, const Call& call) {
  const auto& args = call.args<Args>(1);
  if (args.queries < 1 || args.keys < 1 || args.heads_kv < 1 || args.batch < 1 ||
      args.heads_q < 1 || args.heads_q % args.heads_kv != 0 || args.inv_scale_k == nullptr ||
      args.inv_scale_v == nullptr || args.norms_v == nullptr || args.steps == nullptr ||
      args.bounds_q == nullptr || args.sums == nullptr || args.dq.x == nullptr ||
      args.dk.x == nullptr || args.dv.x == nullptr) {
    call.fault("{}: {} queries, {} keys, {} and {} heads, batch {}, or a null array",
               call.module.key, args.queries, args.keys, args.heads_q, args.heads_kv, args.batch);
    return;
  }
  Operands operands{.args = args,
                    .head_dim = spec.head_dim,
                    .causal = spec.mask != codegen::AttentionMask::kFull,
                    .window = 0,
                    .blocks_q = kernels::attention_blocks(args.queries),
                    .blocks_k = kernels::attention_blocks(args.keys),
                    .values = {}};
  if constexpr (Args::kWindow) operands.window = args.window;
  if constexpr (Args::kPacked) {
    operands.blocks_q = kernels::attention_packed_blocks(args.queries, args.sequences);
    operands.blocks_k = kernels::attention_packed_blocks(args.keys, args.sequences);
    operands.of_q = args.blocks_q;
    operands.of_k = args.blocks_k;
  }
  if (!read_maps(spec, call, operands)) return;
  if (spec.gradients == codegen::AttentionGradients::kDq) {
    for (int64_t head = 0; head < int64_t{args.batch} * args.heads_q; ++head) {
      for (int64_t place = 0; place < operands.blocks_q; ++place) {
        for (int64_t row = 0; row < operands.queries(place).tokens; ++row) {
          differentiate_query(operands, head, place, row);
        }
      }
    }
    return;
  }
  for (int64_t head = 0; head < int64_t{args.batch} * args.heads_kv; ++head) {
    for (int64_t place = 0; place < operands.blocks_k; ++place) {
      for (int64_t first = 0; first < operands.keys(place).tokens; first += KeysOfWarp::kKeys) {
        KeysOfWarp(operands, spec.gradients, head, place, first).run();
      }
    }
  }
}

}  // namespace

void emulate(const codegen::AttentionBackwardSpec& spec, const Call& call) {
  using kernels::AttentionBackwardArgs, kernels::AttentionPackedArgs, kernels::AttentionWindow;
  const bool window = spec.mask == codegen::AttentionMask::kWindow;
  if (window && spec.packed) {
    differentiate<AttentionPackedArgs<AttentionWindow<AttentionBackwardArgs>>>(spec, call);
  } else if (window) {
    differentiate<AttentionWindow<AttentionBackwardArgs>>(spec, call);
  } else if (spec.packed) {
    differentiate<AttentionPackedArgs<AttentionBackwardArgs>>(spec, call);
  } else {
    differentiate<AttentionBackwardArgs>(spec, call);
  }
}

}  // namespace f8::runtime::emulation
