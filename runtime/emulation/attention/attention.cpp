// The forward of attention in the order that attention_forward.cuh fixes: tiles of 128 keys, the last one
// first. Exponentials are exact to fp32, where the device's are approximations.
#include <algorithm>
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

constexpr int64_t kKeyTile = kernels::kAttentionTile;

// Keys and values of a sequence as numbers, in the order in which a query takes them.
struct KeysAndValues {
  const uint8_t* of = nullptr;  // the keys that were decoded
  std::vector<float> k;         // [tiles][d][key of the tile]
  std::vector<float> v;         // [tiles][key of the tile][d]

  // `keys` is [keys][d] and `vt` [d][keys], in the order of fragments.
  void decode(const uint8_t* keys, const uint8_t* vt, int64_t vt_row, int64_t tiles, int64_t d) {
    const auto size = static_cast<size_t>(tiles * d * kKeyTile);
    if (of == keys && k.size() == size) return;
    of = keys;
    k.resize(size);
    v.resize(size);
    for (int64_t t = 0; t < tiles; ++t) {
      for (int64_t c = 0; c < d; ++c) {
        for (int j = 0; j < kKeyTile; ++j) {
          k[static_cast<size_t>((t * d + c) * kKeyTile + j)] =
              e4m3(keys[(t * kKeyTile + j) * d + c]);
          v[static_cast<size_t>((t * kKeyTile + j) * d + c)] =
              e4m3(vt[c * vt_row + t * kKeyTile + kernels::fragment_place(j)]);
        }
      }
    }
  }
};

// A head of a sequence.
struct Head {
  const uint8_t* q;  // [queries][d]
  const KeysAndValues& of_keys;
  int64_t keys;
  const float* inv_scale_q;
  const float* inv_scale_k;
  const float* inv_scale_v;
};

std::span<const float> row(const std::vector<float>& rows, int64_t index, int64_t size) {
  return std::span(rows).subspan(static_cast<size_t>(index * size), static_cast<size_t>(size));
}

// A query's maximum, sum and O after the tiles so far.
struct Query {
  float most = 0, sum = 0;
  std::vector<float> o;
};

// `window` is 0 where there is none.
void attend(const codegen::AttentionForwardSpec& spec, const kernels::AttentionArgs& args,
            int64_t window, const Head& head, int64_t query, std::span<float> o, float& lse,
            float& largest_p) {
  const int64_t d = spec.head_dim;
  const int64_t blocks = kernels::attention_blocks(static_cast<int32_t>(head.keys));
  const bool causal = spec.mask != codegen::AttentionMask::kFull;
  const int64_t last = causal ? std::min(query / kKeyTile, blocks - 1) : blocks - 1;
  const int64_t keys = causal ? std::min(query + 1, head.keys) : head.keys;
  const int64_t first_key = window > 0 ? query + 1 - window : 0;
  const int64_t first = window > 0
                            ? kernels::attention_first_tile(static_cast<int32_t>(query / kKeyTile),
                                                            static_cast<int32_t>(window))
                            : 0;
  if (last < first) {  // packed sequences may have no key
    std::ranges::fill(o, 0.0F);
    largest_p = 0;
    lse = -std::numeric_limits<float>::infinity();
    return;
  }
  Query state{.o = std::vector<float>(static_cast<size_t>(d))};
  std::vector<float> product(static_cast<size_t>(d));
  float v_scale = head.inv_scale_v[last];
  for (int64_t t = last; t >= first; --t) {
    const float factor = args.scale_log2 * head.inv_scale_q[query / kKeyTile] * head.inv_scale_k[t];
    float scores[kKeyTile] = {};
    for (int64_t c = 0; c < d; ++c) {
      add_multiple(e4m3(head.q[query * d + c]), row(head.of_keys.k, t * d + c, kKeyTile), scores);
    }
    for (int64_t j = 0; j < kKeyTile; ++j) {
      const int64_t key = t * kKeyTile + j;
      if (key < first_key || key >= keys) scores[j] = -std::numeric_limits<float>::infinity();
    }
    const float largest = *std::max_element(scores, scores + kKeyTile) * factor;
    float most = t == last ? largest : std::max(state.most, largest);
    if (spec.packed && window > 0 && most == -std::numeric_limits<float>::infinity()) most = 0;
    const float correction = t == last ? 0.0F : std::exp2(state.most - most);
    state.most = most;
    float sum = 0;
    std::ranges::fill(product, 0.0F);
    for (int64_t j = 0; j < kKeyTile; ++j) {
      const float exact = std::exp2(std::fma(scores[j], factor, 8.0F - most));
      sum += exact;
      add_multiple(e4m3(encode_fp8(exact, Dtype::kE4m3)), row(head.of_keys.v, t * kKeyTile + j, d),
                   product.data());
    }
    state.sum = std::fma(state.sum, correction, sum);
    const float ratio = v_scale / head.inv_scale_v[t];
    v_scale = head.inv_scale_v[t];
    for (size_t c = 0; c < product.size(); ++c) {
      state.o[c] = std::fma(state.o[c], correction * ratio, product[c]);
    }
  }
  const float inverse = spec.packed && state.sum == 0 ? 0 : v_scale / state.sum;
  for (size_t c = 0; c < o.size(); ++c) o[c] = state.o[c] * inverse;
  lse = (state.most - 8.0F + std::log2(state.sum)) * 0.693147181F;
  largest_p = spec.packed && state.sum == 0 ? 0 : 256 / state.sum;
}

// The blocks of a head, and those of a pack; a batch has none of these.
struct Blocks {
  int64_t of_queries, of_keys;
  const kernels::AttentionBlock* packed = nullptr;
};

Blocks blocks_of(const codegen::AttentionForwardSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::AttentionArgs>(1);
  if (!spec.packed) {
    return {kernels::attention_blocks(args.queries), kernels::attention_blocks(args.keys)};
  }
  const auto of = [&](const auto& packed) -> Blocks {
    return {kernels::attention_packed_blocks(args.queries, packed.sequences),
            kernels::attention_packed_blocks(args.keys, packed.sequences), packed.blocks_q};
  };
  using kernels::AttentionArgs, kernels::AttentionWindowArgs, kernels::AttentionPackedArgs;
  return spec.mask == codegen::AttentionMask::kWindow
             ? of(call.args<AttentionPackedArgs<AttentionWindowArgs>>(1))
             : of(call.args<AttentionPackedArgs<AttentionArgs>>(1));
}

void check(const codegen::AttentionForwardSpec& spec, const kernels::AttentionArgs& args,
           const Blocks& blocks, const TensorMap (&maps)[3], const Call& call) {
  if (args.queries < 1 || args.keys < 1 || args.heads_kv < 1 || args.batch < 1 ||
      args.heads_q < 1 || args.heads_q % args.heads_kv != 0) {
    call.fault("attention: {} queries, {} keys, {} heads of queries, {} of keys, batch {}",
               args.queries, args.keys, args.heads_q, args.heads_kv, args.batch);
    return;
  }
  const int64_t of_head = std::min<int64_t>(spec.head_dim, kKeyTile);
  const auto expect = [&](const char* name, const TensorMap& map, int64_t rows, int64_t cols,
                          int64_t box_rows, int64_t box_cols) {
    if (map.base == nullptr || static_cast<int64_t>(map.rows) != rows ||
        static_cast<int64_t>(map.cols) != cols || static_cast<int64_t>(map.ld_bytes) != cols ||
        map.box_rows != box_rows || map.box_cols != box_cols) {
      call.fault("attention: the map of {} has {} x {} in boxes of {} x {}", name, map.rows,
                 map.cols, map.box_rows, map.box_cols);
    }
  };
  const int64_t kv = int64_t{args.batch} * args.heads_kv;
  const int64_t queries = blocks.of_queries * kKeyTile, keys = blocks.of_keys * kKeyTile;
  expect("q", maps[0], int64_t{args.batch} * args.heads_q * queries, spec.head_dim,
         64 * spec.warpgroups(), of_head);
  expect("k", maps[1], kv * keys, spec.head_dim, kKeyTile, of_head);
  expect("v^T", maps[2], kv * spec.head_dim, keys, of_head, kKeyTile);
  if (args.o == nullptr || args.lse == nullptr || args.inv_scale_q == nullptr ||
      args.inv_scale_k == nullptr || args.inv_scale_v == nullptr ||
      (spec.packed && (blocks.packed == nullptr || args.batch != 1))) {
    call.fault("attention: an array is null, or a pack is a batch of {}", args.batch);
  }
}

int64_t window_of(const codegen::AttentionForwardSpec& spec, const Call& call) {
  if (spec.mask != codegen::AttentionMask::kWindow) return 0;
  const auto& args = call.args<kernels::AttentionWindowArgs>(1);
  if (args.window < 1 || (!spec.packed && args.queries - args.keys >= args.window)) {
    call.fault("attention: {} queries and {} keys in a window of {}", args.queries, args.keys,
               args.window);
  }
  return args.window;
}

}  // namespace

void emulate(const codegen::AttentionForwardSpec& spec, const Call& call) {
  TensorMap maps[3];
  const auto* encoded = &call.args<CUtensorMap>();
  for (int i = 0; i < 3; ++i) std::memcpy(&maps[i], &encoded[i], sizeof maps[i]);
  const auto& args = call.args<kernels::AttentionArgs>(1);
  const Blocks blocks = blocks_of(spec, call);
  check(spec, args, blocks, maps, call);
  const int64_t window = window_of(spec, call);
  if (!call.faults.empty()) return;
  const int64_t d = spec.head_dim;
  std::vector<float> o(static_cast<size_t>(d));
  KeysAndValues decoded;
  const auto at = [](const TensorMap& map, int64_t offset) {
    return static_cast<const uint8_t*>(map.base) + offset;
  };
  for (int64_t head = 0; head < int64_t{args.batch} * args.heads_q; ++head) {
    const int64_t kv = head / (args.heads_q / args.heads_kv);
    for (int64_t place = 0; place < blocks.of_queries; ++place) {
      const kernels::AttentionBlock block =
          blocks.packed != nullptr ? blocks.packed[place]
                                   : block_of_batch(place, args.queries, args.queries, args.keys);
      const int64_t q = head * blocks.of_queries + place - block.index;
      const int64_t k = kv * blocks.of_keys + block.first;
      decoded.decode(at(maps[1], k * kKeyTile * d),
                     at(maps[2], (kv * d * blocks.of_keys + block.first) * kKeyTile),
                     blocks.of_keys * kKeyTile, kernels::attention_blocks(block.keys), d);
      const Head operands{.q = at(maps[0], q * kKeyTile * d),
                          .of_keys = decoded,
                          .keys = block.keys,
                          .inv_scale_q = args.inv_scale_q + q,
                          .inv_scale_k = args.inv_scale_k + k,
                          .inv_scale_v = args.inv_scale_v + k};
      for (int64_t i = 0; i < block.tokens; ++i) {
        const int64_t token = head / args.heads_q * args.queries + block.token + i;
        const int64_t of_query = head * args.queries + block.token + i;
        float largest_p = 0;
        attend(spec, args, window, operands, block.index * kKeyTile + i, o, args.lse[of_query],
               largest_p);
        if (args.largest_p != nullptr) args.largest_p[of_query] = largest_p;
        for (int64_t c = 0; c < d; ++c) {
          store_element(args.o, (token * args.heads_q + head % args.heads_q) * d + c,
                        o[static_cast<size_t>(c)], Dtype::kBf16);
        }
      }
    }
  }
}

}  // namespace f8::runtime::emulation
