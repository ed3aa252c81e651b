#include "runtime/attention/emulated.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "recipes/dtype.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/emulation/attention/attention_heads.hpp"
#include "runtime/emulation/stream.hpp"

namespace f8::runtime {
namespace {

// A head of a sequence as numbers, [tokens][d].
struct Rows {
  int64_t d;
  std::vector<float> values;

  Rows(int64_t tokens, int64_t dim) : d(dim), values(static_cast<size_t>(tokens * dim)) {}
  [[nodiscard]] std::span<float> operator[](int64_t token) {
    return std::span(values).subspan(static_cast<size_t>(token * d), static_cast<size_t>(d));
  }
};

int64_t first_of(const float8_heads& heads, int64_t batch, int64_t head) {
  return batch * heads.batch_stride + head * heads.head_stride;
}

Rows load(const float8_heads& heads, int64_t batch, int64_t head, int64_t first, int64_t tokens,
          int64_t d) {
  Rows rows(tokens, d);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t at = first_of(heads, batch, head) + (first + t) * heads.token_stride;
    for (int64_t c = 0; c < d; ++c) {
      rows[t][static_cast<size_t>(c)] = load_element(heads.data, at + c, Dtype::kBf16);
    }
  }
  return rows;
}

void store(const float8_heads& heads, int64_t batch, int64_t head, int64_t token,
           std::span<const float> row) {
  const int64_t at = first_of(heads, batch, head) + token * heads.token_stride;
  for (size_t c = 0; c < row.size(); ++c) {
    store_element(heads.data, at + static_cast<int64_t>(c), row[c], Dtype::kBf16);
  }
}

float dot(std::span<const float> a, std::span<const float> b) {
  float sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

struct Emulation {
  AttentionDesc desc;
  ProviderCall call;

  // The tokens of a sequence in the tensors of a batch, or of a pack.
  struct Sequence {
    int64_t batch = 0, first_q = 0, queries = 0, first_k = 0, keys = 0;
  };
  [[nodiscard]] Sequence sequence(int64_t index) const {
    if (call.offsets == nullptr) {
      return {index, 0, call.sizes.tokens_q, 0, call.sizes.tokens_kv};
    }
    const int32_t* of_q = call.offsets + index;
    const int32_t* of_k = of_q + call.sizes.batch + 1;
    return {0, of_q[0], of_q[1] - of_q[0], of_k[0], of_k[1] - of_k[0]};
  }
  [[nodiscard]] bool has_its_sequences() const {
    const AttentionSizes& sizes = call.sizes;
    return call.offsets == nullptr ||
           (emulation::are_offsets(call.offsets, sizes.batch, sizes.tokens_q) &&
            emulation::are_offsets(call.offsets + sizes.batch + 1, sizes.batch, sizes.tokens_kv));
  }
  // The keys that a query has: the first one, and one behind the last.
  [[nodiscard]] std::pair<int64_t, int64_t> keys_of(int64_t query, int64_t keys) const {
    if (!desc.causal) return {0, keys};
    const int64_t first = desc.window > 0 ? std::max<int64_t>(0, query + 1 - desc.window) : 0;
    return {first, std::min(query + 1, keys)};
  }
  [[nodiscard]] float& lse(const Sequence& of, int64_t head, int64_t query) const {
    return call.lse[(of.batch * desc.heads_q + head) * call.sizes.tokens_q + of.first_q + query];
  }
  [[nodiscard]] Rows queries(const float8_heads& x, const Sequence& of, int64_t head) const {
    return load(x, of.batch, head, of.first_q, of.queries, desc.head_dim);
  }
  [[nodiscard]] Rows keys(const float8_heads& x, const Sequence& of, int64_t head) const {
    return load(x, of.batch, head, of.first_k, of.keys, desc.head_dim);
  }

  void forward(const Sequence& of, int64_t head_kv) const {
    Rows k = keys(call.k, of, head_kv), v = keys(call.v, of, head_kv);
    const int64_t group = desc.heads_q / desc.heads_kv;
    std::vector<float> p(static_cast<size_t>(of.keys));
    std::vector<float> o(static_cast<size_t>(desc.head_dim));
    for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      Rows q = queries(call.q, of, head);
      for (int64_t i = 0; i < of.queries; ++i) {
        const auto [first, last] = keys_of(i, of.keys);
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        float most = -kInfinity, sum = 0;
        for (int64_t j = first; j < last; ++j) {
          const float score = dot(q[i], k[j]) * desc.scale;
          p[static_cast<size_t>(j)] = score;
          most = std::max(most, score);
        }
        std::ranges::fill(o, 0.0F);
        for (int64_t j = first; j < last; ++j) {
          const float weight = std::exp(p[static_cast<size_t>(j)] - most);
          sum += weight;
          emulation::add_multiple(weight, v[j], o.data());
        }
        if (first < last) {
          for (float& x : o) x /= sum;
        }
        lse(of, head, i) = first < last ? most + std::log(sum) : -kInfinity;
        store(call.o, of.batch, head, of.first_q + i, o);
      }
    }
  }

  void backward(const Sequence& of, int64_t head_kv) const {
    Rows k = keys(call.k, of, head_kv), v = keys(call.v, of, head_kv);
    Rows dk(of.keys, desc.head_dim), dv(of.keys, desc.head_dim);
    const int64_t group = desc.heads_q / desc.heads_kv;
    std::vector<float> dq(static_cast<size_t>(desc.head_dim));
    for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      Rows q = queries(call.q, of, head), o = queries(call.o, of, head);
      Rows dout = queries(call.dout, of, head);
      for (int64_t i = 0; i < of.queries; ++i) {
        const auto [first, last] = keys_of(i, of.keys);
        const float delta = dot(dout[i], o[i]);
        std::ranges::fill(dq, 0.0F);
        for (int64_t j = first; j < last; ++j) {
          const float p = std::exp(dot(q[i], k[j]) * desc.scale - lse(of, head, i));
          const float ds = p * (dot(dout[i], v[j]) - delta) * desc.scale;
          emulation::add_multiple(ds, k[j], dq.data());
          emulation::add_multiple(ds, q[i], dk[j].data());
          emulation::add_multiple(p, dout[i], dv[j].data());
        }
        store(call.dq, of.batch, head, of.first_q + i, dq);
      }
    }
    for (int64_t j = 0; j < of.keys; ++j) {
      store(call.dk, of.batch, head_kv, of.first_k + j, dk[j]);
      store(call.dv, of.batch, head_kv, of.first_k + j, dv[j]);
    }
  }
};

class EmulatedAttention final : public AttentionProvider {
 public:
  EmulatedAttention(std::shared_ptr<Context> context, const AttentionDesc& desc)
      : context_(std::move(context)), desc_(desc) {}

  Result<size_t> workspace_bytes(AttentionPass, const ProviderCall&) const override { return 0; }

  Status run(AttentionPass pass, const ProviderCall& call, Stream stream) const override {
    return context_->state().driver.check(
        emulation::enqueue(stream,
                           [pass, of = Emulation{desc_, call}] {
                             if (!of.has_its_sequences()) {
                               return emulation::refuse(
                                   CUDA_ERROR_INVALID_VALUE,
                                   "saved does not have the sequences of these sizes, which are "
                                   "those of the forward that filled it");
                             }
                             for (int64_t b = 0; b < of.call.sizes.batch; ++b) {
                               const auto sequence = of.sequence(b);
                               for (int64_t g = 0; g < of.desc.heads_kv; ++g) {
                                 pass == AttentionPass::kForward ? of.forward(sequence, g)
                                                                 : of.backward(sequence, g);
                               }
                             }
                             return CUDA_SUCCESS;
                           }),
        "emulated cuDNN attention");
  }

 private:
  std::shared_ptr<Context> context_;
  AttentionDesc desc_;
};

}  // namespace

Result<AttentionProviderPtr> create_emulated_attention(const std::shared_ptr<Context>& context,
                                                       const AttentionDesc& desc) {
  return std::make_unique<const EmulatedAttention>(context, desc);
}

}  // namespace f8::runtime
