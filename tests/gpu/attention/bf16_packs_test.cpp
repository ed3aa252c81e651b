// Packed sequences in recipe bf16: each next to fp64 as a sequence of its own, queries without keys, bad offsets, a CUDA graph
// whose offsets change, and what a call refuses.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "runtime/attention/provider.hpp"
#include "tests/gpu/attention/packs.hpp"

namespace f8::runtime::gpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Skips where there is no cuDNN.
class PackTestInBf16 : public AttentionGradients {
 protected:
  void SetUp() override {
    AttentionGradients::SetUp();
    recipe_ = AttentionRecipe::kBf16;
    if (IsSkipped() || kEmulated) return;
    if (const auto version = cudnn_version(); !version) GTEST_SKIP() << version.error().message;
  }
  // A plan of heads of 256 is refused, and so are k and v whose gradients have other strides.
  static bool is_old() { return !kEmulated && cudnn_version().value_or(0) < 91900; }
};

class PacksInBf16 : public PackTestInBf16, public testing::WithParamInterface<PackCase> {
 protected:
  void SetUp() override {
    PackTestInBf16::SetUp();
    if (IsSkipped()) return;
    if (GetParam().d == 256 && is_old()) GTEST_SKIP() << "refused with this cuDNN";
  }
  // The results of sequence i of a pack's.
  static Gradients results_of(const Gradients& all, const Operands& own,
                              const std::vector<int32_t>& cu_q, const std::vector<int32_t>& cu_k,
                              size_t i) {
    Gradients r(own);
    r.dq = part(all.dq, cu_q[i], own.q.tokens);
    r.dk = part(all.dk, cu_k[i], own.k.tokens);
    r.dv = part(all.dv, cu_k[i], own.v.tokens);
    const int64_t row = own.q.heads * own.d();
    r.o.assign(all.o.begin() + cu_q[i] * row, all.o.begin() + cu_q[i + 1] * row);
    for (int64_t head = 0; head < own.q.heads; ++head) {
      const auto at = all.lse.begin() + head * cu_q.back();
      r.lse.insert(r.lse.end(), at + cu_q[i], at + cu_q[i + 1]);
    }
    return r;
  }
  // A query whose window begins behind the last key has none.
  static void expect_zero_behind_keys(const Operands& own, const Gradients& actual) {
    const int64_t window = GetParam().window;
    for (int64_t query = 0; query < own.q.tokens; ++query) {
      const auto token = static_cast<size_t>(query);
      const bool has_key = window == 0 || query - window + 1 < own.k.tokens;
      EXPECT_EQ(std::isfinite(actual.lse[token]), has_key) << query;
      const size_t at = token * static_cast<size_t>(own.q.heads * own.d()) + 5;
      EXPECT_EQ((actual.o[at] & 0x7FFFU) != 0, has_key) << query;
      if (has_key) continue;
      EXPECT_EQ(actual.lse[token], kMinusInfinity) << query;
      EXPECT_EQ(actual.dq.value(0, query, 5), 0) << query;
    }
  }
  static bool is_zero(const Elements& x) {
    for (int64_t row = 0; row < x.heads; ++row) {
      for (int64_t t = 0; t < x.tokens; ++t) {
        for (int64_t c = 0; c < x.d; ++c) {
          if (x.value(row, t, c) != 0) return false;
        }
      }
    }
    return true;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, PacksInBf16,
    testing::Values(PackCase{"causal", 2, 1, {100, 0, 1, 257, 128}, {100, 0, 1, 257, 128}},
                    PackCase{"full", 2, 2, {100, 0, 130, 3, 7}, {30, 5, 129, 257, 0}, false},
                    PackCase{"other_keys", 2, 1, {60, 300, 2}, {200, 140, 0}},
                    PackCase{"more_keys", 2, 1, {40, 130}, {300, 200}},
                    PackCase{"window", 2, 1, {130, 300, 0, 1, 20}, {130, 300, 0, 1, 20}, true, 70},
                    PackCase{"window_behind_keys", 1, 1, {300, 40}, {20, 40}, true, 70},
                    PackCase{"window_of_one", 2, 1, {150, 3}, {150, 3}, true, 1},
                    PackCase{"many", 1, 1, std::vector<int32_t>(70, 3),
                             std::vector<int32_t>(70, 3)},
                    PackCase{"small_heads", 4, 1, {40, 0, 130}, {40, 0, 130}, true, 0, 64},
                    PackCase{"large_heads", 2, 1, {40, 0, 130}, {40, 0, 130}, true, 0, 256},
                    PackCase{"large_heads_window", 1, 1, {150, 3}, {150, 3}, true, 70, 256}),
    [](const auto& test) { return std::string(test.param.name); });

// dout has gaps between its tokens, and k and v have, as those of a fused projection, where cuDNN takes them; q and the
// gradients are dense.
TEST_P(PacksInBf16, EachSequenceIsNearFp64) {
  const PackCase& of = GetParam();
  const std::vector<int32_t> cu_q = pack_offsets(of.queries), cu_k = pack_offsets(of.keys);
  Operands all(1, of.heads_q, of.heads_kv, cu_q.back(), cu_k.back(), of.d);
  all.q = Elements(1, of.heads_q, cu_q.back(), 0, 1, 0, of.d);
  if (is_old()) {
    all.k = all.k.dense();
    all.v = all.v.dense();
  }
  Gradients packed = Gradients::dense(all);
  run(of.desc(), all, cu_q, cu_k, packed);
  if (HasFatalFailure()) return;
  const AttentionDesc desc = of.desc();
  for (size_t i = 0; i < of.queries.size(); ++i) {
    const Operands own = part(all, cu_q, cu_k, i);
    const Gradients actual = results_of(packed, own, cu_q, cu_k, i);
    if (own.q.tokens == 0 || own.k.tokens == 0) {
      EXPECT_TRUE(is_zero(actual.dq) && is_zero(actual.dk) && is_zero(actual.dv)) << i;
      EXPECT_EQ(actual.o, std::vector<uint16_t>(actual.o.size())) << i;
      EXPECT_EQ(actual.lse, std::vector<float>(actual.lse.size(), kMinusInfinity)) << i;
      continue;
    }
    expect_zero_behind_keys(own, actual);
    const ExactGradients exact(desc, own, actual);
    EXPECT_GT(exact.of_o(), 45) << "sequence " << i;
    EXPECT_LT(exact.error_of_lse(), 1e-3) << "sequence " << i;
    EXPECT_GT(exact.of_v(), 45) << "sequence " << i;
    if (of.window == 1 || (of.causal && own.q.tokens == 1)) continue;  // one key has a P of 1
    // dQ has k's mean times the rounding of dS, and a short sequence has little else.
    const bool is_short = own.q.tokens < 16;
    EXPECT_GT(exact.of_q(), is_short ? 15 : 28) << "sequence " << i;
    EXPECT_GT(exact.of_k(), is_short ? 25 : 45) << "sequence " << i;
  }
}

// A call of two heads on one of keys, of 300 queries and keys, and its backward.
class PackCallsInBf16 : public PackTestInBf16 {
 protected:
  static constexpr int64_t kTokens = 300;

  struct Call {
    Elements q, k, v, dout;
    DeviceBuffer on_q, on_k, on_v, on_dout, o, lse, saved, workspace, dq, dk, dv, cu, error;
    float8_attention_forward_args forward;
    float8_attention_backward_args backward;

    Call(const Context& context, const Attention& plan, const std::vector<int32_t>& offsets,
         int64_t longest = 0)
        : q(1, 2, kTokens, 0, 1, 0),
          k(1, 1, kTokens, 0, 2, 0),
          v(1, 1, kTokens, 0, 3, 0),
          dout(1, 2, kTokens, 0, 4, 0),
          on_q(context, q.bits),
          on_k(context, k.bits),
          on_v(context, v.bits),
          on_dout(context, dout.bits),
          o(context, q.bits.size() * 2),
          lse(context, size_t{2 * kTokens * 4}),
          saved(context, plan.saved_bytes(sizes(offsets, longest))),
          workspace(context, std::max(plan.workspace_bytes(sizes(offsets, longest)),
                                      plan.backward_workspace_bytes(sizes(offsets, longest)))),
          dq(context, q.bits.size() * 2),
          dk(context, k.bits.size() * 2),
          dv(context, k.bits.size() * 2),
          cu(context, offsets),
          error(context, std::vector<int32_t>(2)) {
      forward.sizes = backward.sizes = sizes(offsets, longest);
      forward.q = backward.q = q.on(on_q);
      forward.k = backward.k = k.on(on_k);
      forward.v = backward.v = v.on(on_v);
      forward.o = o.as();
      forward.lse = lse.as<float>();
      forward.saved = backward.saved = {saved.as()};
      forward.workspace = backward.workspace = {workspace.as()};
      forward.cu_seqlens_q = forward.cu_seqlens_kv = cu.as<int32_t>();
      forward.sequence_error = error.as<float8_sequence_error>();
      backward.dout = dout.on(on_dout);
      backward.o = o.as();
      backward.lse = lse.as<float>();
      backward.dq = q.on(dq);
      backward.dk = k.on(dk);
      backward.dv = v.on(dv);
    }
    static AttentionSizes sizes(const std::vector<int32_t>& offsets, int64_t longest) {
      return {std::ssize(offsets) - 1, kTokens, kTokens, longest, longest};
    }
    void poison() {
      for (DeviceBuffer* each : {&o, &lse, &saved, &workspace, &dq, &dk, &dv}) each->poison();
    }
    [[nodiscard]] bool guards_are_whole() const {
      return std::ranges::all_of(
          std::initializer_list<const DeviceBuffer*>{&o, &lse, &saved, &workspace, &dq, &dk, &dv,
                                                     &error},
          [](const DeviceBuffer* each) { return each->guards_are_whole(); });
    }
    // O, which has the same bits each time, and then the gradients.
    [[nodiscard]] std::vector<std::vector<double>> results() const {
      return {o.bf16(), lse.f32(), dq.bf16(), dk.bf16(), dv.bf16()};
    }
  };
  static AttentionDesc desc() {
    return {.heads_q = 2,
            .heads_kv = 1,
            .causal = true,
            .packed = true,
            .recipe = AttentionRecipe::kBf16};
  }
  static Status step(const Attention& plan, const Call& call, Stream stream) {
    F8_TRY(plan.forward(call.forward, stream));
    return plan.backward(call.backward, stream);
  }
  static void expect_near(const std::vector<std::vector<double>>& actual,
                          const std::vector<std::vector<double>>& expected) {
    EXPECT_EQ(actual[0], expected[0]);
    EXPECT_EQ(actual[1], expected[1]);
    for (size_t x = 2; x < expected.size(); ++x) {  // cuDNN may add in another order
      double signal = 0, noise = 0;
      for (size_t i = 0; i < expected[x].size(); ++i) {
        signal += expected[x][i] * expected[x][i];
        noise += std::pow(actual[x][i] - expected[x][i], 2);
      }
      EXPECT_GT(db(signal, noise), 45) << x;
    }
  }
};

// The host reads no offsets, in forward or in backward.
TEST_F(PackCallsInBf16, AGraphTakesOtherOffsets) {
  const auto plan = Attention::plan(context_, desc());
  F8_ASSERT_OK(plan);
  Call call(context(), **plan, {0, 3, 130, 300});
  F8_ASSERT_OK(step(**plan, call, nullptr));  // makes cuDNN's graphs
  const DeviceStream stream(context());
  const DeviceGraph graph(context(), stream, [&] { return step(**plan, call, stream.get()); });
  for (const std::vector<int32_t>& offsets :
       {std::vector<int32_t>{0, 0, 170, 300}, {0, 300, 300, 300}, {0, 100, 200, 300}}) {
    call.cu.upload(offsets.data(), offsets.size() * sizeof(int32_t));
    call.poison();
    F8_ASSERT_OK(step(**plan, call, nullptr));
    const auto expected = call.results();
    EXPECT_FALSE(std::isnan(expected[0][0]));
    call.poison();
    graph.replay();
    expect_near(call.results(), expected);
    EXPECT_TRUE(call.guards_are_whole());
  }
}

TEST_F(PackCallsInBf16, BadOffsetsAreReplacedAndKept) {
  const auto plan = Attention::plan(context_, desc());
  F8_ASSERT_OK(plan);
  struct Bad {
    std::vector<int32_t> given, clean;
    int32_t index;
  };
  for (const Bad& bad :
       {Bad{{0, 90, 50, 300}, {0, 90, 90, 300}, 2},
        Bad{{0, 90, 1 << 30, 300}, {0, 90, 300, 300}, 2}, Bad{{0, -5, 50, 300}, {0, 0, 50, 300}, 1},
        Bad{{7, 90, 150, 300}, {0, 90, 150, 300}, 0},
        Bad{{0, 90, 150, 200}, {0, 90, 150, 300}, 3}}) {
    Call call(context(), **plan, bad.given);
    F8_ASSERT_OK(step(**plan, call, nullptr));
    EXPECT_EQ(call.error.download<int32_t>(),
              (std::vector<int32_t>{FLOAT8_BAD_CU_SEQLENS_Q, bad.index}));
    EXPECT_TRUE(call.guards_are_whole());
    const Call clean(context(), **plan, bad.clean);
    F8_ASSERT_OK(step(**plan, clean, nullptr));
    EXPECT_EQ(clean.error.download<int32_t>(), (std::vector<int32_t>{0, 0}));
    expect_near(call.results(), clean.results());
    EXPECT_EQ(call.saved.download<uint8_t>(), clean.saved.download<uint8_t>());
    // The first error stays.
    const std::vector<int32_t> other = {3, 90, 150, 300};
    call.cu.upload(other.data(), other.size() * sizeof(int32_t));
    F8_ASSERT_OK((*plan)->forward(call.forward, nullptr));
    EXPECT_EQ(call.error.download<int32_t>()[1], bad.index);
  }
}

// The longest length is what a graph is of: another sequence is computed, and the error says which one was not.
TEST_F(PackCallsInBf16, ALongSequenceIsKeptAndChangesNoOther) {
  const auto plan = Attention::plan(context_, desc());
  F8_ASSERT_OK(plan);
  const std::vector<int32_t> offsets = {0, 60, 260, 300};
  const Call whole(context(), **plan, offsets), cut(context(), **plan, offsets, 100);
  F8_ASSERT_OK(step(**plan, whole, nullptr));
  F8_ASSERT_OK(step(**plan, cut, nullptr));
  EXPECT_EQ(whole.error.download<int32_t>(), (std::vector<int32_t>{0, 0}));
  EXPECT_EQ(cut.error.download<int32_t>(), (std::vector<int32_t>{FLOAT8_LONG_SEQUENCE_Q, 1}));
  EXPECT_TRUE(cut.guards_are_whole());
  const std::vector<double> expected = whole.o.bf16(), actual = cut.o.bf16();
  constexpr size_t kRow = 2 * 128;
  const auto expect_same = [&](size_t first, size_t last) {
    double signal = 0, noise = 0;
    for (size_t i = first * kRow; i < last * kRow; ++i) {
      signal += expected[i] * expected[i];
      noise += std::pow(actual[i] - expected[i], 2);
    }
    EXPECT_GT(db(signal, noise), 45) << first;
  };
  expect_same(0, 60);
  expect_same(260, 300);
  EXPECT_TRUE(std::ranges::none_of(actual, [](double x) { return std::isnan(x); }));
}

TEST_F(PackCallsInBf16, AreRefused) {
  const auto plan = Attention::plan(context_, desc());
  F8_ASSERT_OK(plan);
  const Call call(context(), **plan, {0, 100, 300});
  EXPECT_EQ((*plan)->saved_bytes(call.forward.sizes), size_t{2 * 3 * 4});
  const auto refuses = [&](const auto& args, const auto& call_of, const auto& change,
                           std::string_view word) {
    auto changed = args;
    change(changed);
    const Status status = call_of(changed);
    ASSERT_FALSE(status.has_value()) << word;
    EXPECT_NE(status.error().message.find(word), std::string::npos) << status.error().message;
  };
  const auto forward = [&](const auto& args) { return (*plan)->forward(args, nullptr); };
  const auto backward = [&](const auto& args) { return (*plan)->backward(args, nullptr); };
  refuses(
      call.forward, forward, [](auto& args) { args.cu_seqlens_q = nullptr; },
      "cu_seqlens_q is NULL");
  refuses(
      call.forward, forward, [](auto& args) { args.cu_seqlens_kv = nullptr; },
      "cu_seqlens_kv is NULL");
  refuses(
      call.forward, forward, [](auto& args) { args.saved = {}; },
      "forward_args.saved.data is NULL");
  refuses(
      call.forward, forward, [](auto& args) { args.workspace = {}; }, "workspace.data is NULL");
  refuses(
      call.forward, forward, [](auto& args) { args.sizes.batch = 0; }, "no sequence");
  refuses(
      call.forward, forward,
      [&](auto& args) { args.sequence_error = call.saved.template as<float8_sequence_error>(); },
      "overlap");
  refuses(
      call.backward, backward, [](auto& args) { args.saved = {}; },
      "backward_args.saved.data is NULL");
  refuses(
      call.backward, backward, [](auto& args) { args.k = {}; }, "k is NULL");
  F8_ASSERT_OK(step(**plan, call, nullptr));
  if (kEmulated) return;
  refuses(
      call.backward, backward,
      [](auto& args) {
        args.sizes.tokens_q = args.sizes.tokens_kv = 200, args.q.token_stride = 264;
      },
      "the strides of q");
  if (!is_old()) return;
  for (const auto of : {&float8_attention_backward_args::k, &float8_attention_backward_args::v}) {
    refuses(
        call.backward, backward,
        [&](auto& args) {
          args.sizes.tokens_q = args.sizes.tokens_kv = 200, (args.*of).token_stride = 136;
        },
        "the same strides");
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
