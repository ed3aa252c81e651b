// Gradients of attention under a recipe on the device, and those in fp64 of the values that its forward multiplied.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/attention/attention.hpp"
#include "tests/gpu/attention/elements.hpp"

namespace f8::runtime::gpu {

// The operands of a call, [batch][tokens][heads][d].
struct Operands {
  Elements q, k, v, dout;

  // `gap` elements lie between tokens.
  Operands(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t queries, int64_t keys,
           int64_t d, int64_t gap = 8)
      : q(batch, heads_q, queries, gap, 1, 0, d),
        k(batch, heads_kv, keys, gap, 2, 5, d),
        v(batch, heads_kv, keys, gap, 3, 0, d),
        dout(batch, heads_q, queries, 2 * gap, 4, 0, d) {}
  [[nodiscard]] int64_t d() const { return q.d; }
};

struct Gradients {
  Elements q, k, v;     // as they were multiplied
  Elements dq, dk, dv;  // with what lay between their heads before
  std::vector<uint16_t> o;
  std::vector<float> lse;

  explicit Gradients(const Operands& of)
      : q(of.q), k(of.k), v(of.v), dq(of.q), dk(of.k), dv(of.v) {}
  // Dense ones, whatever the strides of the operands.
  static Gradients dense(const Operands& of) {
    Gradients r(of);
    for (Elements* each : {&r.dq, &r.dk, &r.dv}) {
      *each = Elements(each->batch, each->heads, each->tokens, 0, 9, 0, each->d);
    }
    return r;
  }
};

class AttentionGradients : public GpuTest {
 protected:
  AttentionRecipe recipe_ = AttentionRecipe::kFp8;

  // Tokens of the operands: all of them, or a sequence's.
  struct Tokens {
    int64_t first_q, queries, first_k, keys;
  };

  void run(AttentionDesc desc, const Operands& of, const std::vector<int32_t>& offsets_q,
           const std::vector<int32_t>& offsets_k, Gradients& out) {
    desc.packed = !offsets_q.empty();
    desc.head_dim = of.d();
    desc.recipe = recipe_;
    const auto plan = Attention::plan(context_, desc);
    F8_ASSERT_OK(plan);
    const int64_t batch = desc.packed ? std::ssize(offsets_q) - 1 : of.q.batch;
    const AttentionSizes sizes{batch, of.q.tokens, of.k.tokens};
    const DeviceBuffer q(context(), of.q.bits), k(context(), of.k.bits), v(context(), of.v.bits);
    const DeviceBuffer dout(context(), of.dout.bits);
    const std::vector<int32_t> none(2);
    const DeviceBuffer cu_q(context(), desc.packed ? offsets_q : none);
    const DeviceBuffer cu_k(context(), desc.packed ? offsets_k : none);
    const auto rows = static_cast<size_t>(of.q.batch * of.q.heads * of.q.tokens);
    const DeviceBuffer o(context(), rows * static_cast<size_t>(of.d()) * 2),
        lse(context(), rows * 4);
    const DeviceBuffer saved(context(), (*plan)->saved_bytes(sizes));
    DeviceBuffer workspace(context(), std::max((*plan)->workspace_bytes(sizes),
                                               (*plan)->backward_workspace_bytes(sizes)));
    F8_ASSERT_OK((*plan)->forward({.sizes = sizes,
                                   .q = of.q.on(q),
                                   .k = of.k.on(k),
                                   .v = of.v.on(v),
                                   .o = o.as(),
                                   .lse = lse.as<float>(),
                                   .saved = {saved.as()},
                                   .workspace = {workspace.as()},
                                   .cu_seqlens_q = desc.packed ? cu_q.as<int32_t>() : nullptr,
                                   .cu_seqlens_kv = desc.packed ? cu_k.as<int32_t>() : nullptr},
                                  nullptr));
    if (recipe_ != AttentionRecipe::kBf16) {
      F8_ASSERT_OK((*plan)->dequantize({.sizes = sizes,
                                        .saved = {saved.as()},
                                        .q = of.q.on(q),
                                        .k = of.k.on(k),
                                        .v = of.v.on(v)},
                                       nullptr));
    }
    workspace.poison();
    const DeviceBuffer dq(context(), out.dq.bits), dk(context(), out.dk.bits),
        dv(context(), out.dv.bits);
    F8_ASSERT_OK((*plan)->backward({.sizes = sizes,
                                    .dout = of.dout.on(dout),
                                    .o = o.as(),
                                    .lse = lse.as<float>(),
                                    .saved = {saved.as()},
                                    .workspace = {workspace.as()},
                                    .dq = out.dq.on(dq),
                                    .dk = out.dk.on(dk),
                                    .dv = out.dv.on(dv),
                                    .q = of.q.on(q),
                                    .k = of.k.on(k),
                                    .v = of.v.on(v)},
                                   nullptr));
    out.q.bits = q.download<uint16_t>();
    out.k.bits = k.download<uint16_t>();
    out.v.bits = v.download<uint16_t>();
    out.dq.bits = dq.download<uint16_t>();
    out.dk.bits = dk.download<uint16_t>();
    out.dv.bits = dv.download<uint16_t>();
    out.o = o.download<uint16_t>();
    out.lse = lse.download<float>();
    EXPECT_TRUE(workspace.guards_are_whole());
    for (const DeviceBuffer* each : {&o, &lse, &saved, &dq, &dk, &dv}) {
      EXPECT_TRUE(each->guards_are_whole());
    }
  }
  void run(const AttentionDesc& desc, const Operands& of, Gradients& out) {
    run(desc, of, {}, {}, out);
  }
};

inline double db(double signal, double noise) {
  return 10 * std::log10(signal / std::max(noise, 1e-300));
}

// Compares O, LSE and gradients with those in fp64 of the values that were multiplied and of dO as it was given.
class ExactGradients {
 public:
  ExactGradients(const AttentionDesc& desc, const Operands& of, const Gradients& actual)
      : desc_(desc),
        of_(of),
        actual_(actual),
        d_(of.d()),
        in_q_(actual.q.values()),
        in_k_(actual.k.values()),
        in_v_(actual.v.values()),
        in_dout_(of.dout.values()),
        dk_(static_cast<size_t>(of.k.batch * of.k.heads * of.k.tokens * d_)),
        dv_(dk_.size()) {
    for (int64_t row = 0; row < of.q.batch * of.q.heads; ++row) {
      for (int64_t query = 0; query < of.q.tokens; ++query) add(row, query);
    }
    const int64_t tokens = of.k.tokens;
    for (int64_t i = 0; i < std::ssize(dk_); ++i) {
      const int64_t row = i / d_ / tokens, token = i / d_ % tokens;
      compare(dk_[static_cast<size_t>(i)], actual.dk.value(row, token, i % d_), k_);
      compare(dv_[static_cast<size_t>(i)], actual.dv.value(row, token, i % d_), v_);
    }
  }
  [[nodiscard]] double of_o() const { return db(o_.signal, o_.noise); }
  [[nodiscard]] double error_of_lse() const { return error_of_lse_; }
  [[nodiscard]] double of_q() const { return db(q_.signal, q_.noise); }
  [[nodiscard]] double of_k() const { return db(k_.signal, k_.noise); }
  [[nodiscard]] double of_v() const { return db(v_.signal, v_.noise); }

 private:
  struct Power {
    double signal = 0, noise = 0;
  };
  static void compare(double exact, double value, Power& to) {
    to.signal += exact * exact;
    to.noise += (exact - value) * (exact - value);
  }
  [[nodiscard]] size_t key_at(int64_t row, int64_t key) const {
    return static_cast<size_t>((row * of_.k.tokens + key) * d_);
  }
  void add(int64_t row, int64_t query) {
    const double scale =
        desc_.scale == 0 ? 1 / std::sqrt(static_cast<double>(d_)) : double{desc_.scale};
    const int64_t kv = row / (desc_.heads_q / desc_.heads_kv);
    const int64_t first = desc_.window > 0 ? std::max<int64_t>(query + 1 - desc_.window, 0) : 0;
    const int64_t end = desc_.causal ? std::min(query + 1, of_.k.tokens) : of_.k.tokens;
    const size_t own = static_cast<size_t>((row * of_.q.tokens + query) * d_);
    const double* q = in_q_.data() + own;
    const double* dout = in_dout_.data() + own;
    std::vector<double> p(static_cast<size_t>(end)), dp(p.size());
    double sum = 0, delta = 0, most = -1e300;
    for (int64_t j = first; j < end; ++j) {
      double s = 0, x = 0;
      const size_t at = key_at(kv, j);
      const double* k = in_k_.data() + at;
      const double* v = in_v_.data() + at;
      for (int64_t c = 0; c < d_; ++c) {
        s += q[c] * k[c];
        x += dout[c] * v[c];
      }
      p[static_cast<size_t>(j)] = s * scale;
      dp[static_cast<size_t>(j)] = x;
      most = std::max(most, s * scale);
    }
    for (int64_t j = first; j < end; ++j) {
      double& each = p[static_cast<size_t>(j)];
      sum += each = std::exp(each - most);
    }
    for (int64_t j = first; j < end; ++j) {
      double& each = p[static_cast<size_t>(j)];
      each /= sum;
      delta += each * dp[static_cast<size_t>(j)];
    }
    const int64_t tokens = of_.q.tokens, heads = of_.q.heads;
    const auto o_at =
        static_cast<size_t>(((row / heads * tokens + query) * heads + row % heads) * d_);
    if (first < end) {
      const double lse = actual_.lse[static_cast<size_t>(row * tokens + query)];
      error_of_lse_ = std::max(error_of_lse_, std::abs(most + std::log(sum) - lse));
    }
    std::vector<double> dq(static_cast<size_t>(d_)), o(dq.size());
    double* to_dq = dq.data();
    double* to_o = o.data();
    for (int64_t j = first; j < end; ++j) {
      const double of_key = p[static_cast<size_t>(j)];
      const double ds = of_key * (dp[static_cast<size_t>(j)] - delta) * scale;
      const size_t at = key_at(kv, j);
      const double* k = in_k_.data() + at;
      const double* v = in_v_.data() + at;
      double* to_dk = dk_.data() + at;
      double* to_dv = dv_.data() + at;
      for (int64_t c = 0; c < d_; ++c) {
        to_dq[c] += ds * k[c];
        to_o[c] += of_key * v[c];
        to_dk[c] += ds * q[c];
        to_dv[c] += of_key * dout[c];
      }
    }
    for (int64_t c = 0; c < d_; ++c) {
      compare(dq[static_cast<size_t>(c)], actual_.dq.value(row, query, c), q_);
      compare(o[static_cast<size_t>(c)], decode_bf16(actual_.o[o_at + static_cast<size_t>(c)]), o_);
    }
  }

  const AttentionDesc& desc_;
  const Operands& of_;
  const Gradients& actual_;
  int64_t d_;
  std::vector<double> in_q_, in_k_, in_v_, in_dout_;
  std::vector<double> dk_, dv_;
  Power o_, q_, k_, v_;
  double error_of_lse_ = 0;
};

}  // namespace f8::runtime::gpu
