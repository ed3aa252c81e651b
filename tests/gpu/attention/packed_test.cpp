// Attention of packed sequences: each has the bits that it has alone, whatever lies beside it, and bad offsets leave
// no memory of the call.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "runtime/attention/attention.hpp"
#include "tests/gpu/attention/elements.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

struct PackedCase {
  const char* name;
  int64_t heads_q, heads_kv;
  std::vector<int64_t> queries, keys;  // of each sequence
  bool causal;
  int64_t window = 0;
  int64_t d = 128;
};

// Where sequences begin, and where the last one ends.
std::vector<int32_t> offsets_of(const std::vector<int64_t>& tokens) {
  std::vector<int32_t> offsets(tokens.size() + 1);
  std::partial_sum(tokens.begin(), tokens.end(), offsets.begin() + 1);
  return offsets;
}

struct Output {
  std::vector<uint16_t> o, q, k, v;  // q, k and v as they were multiplied
  std::vector<float> lse;
  std::vector<uint8_t> saved;
  std::vector<int32_t> error;
  bool guards_are_whole = true;
};

class PackedAttention : public GpuTestWith<PackedCase> {
 protected:
  struct Tokens {
    int64_t first_q, queries, first_k, keys;
  };

  void SetUp() override {
    GpuTestWith<PackedCase>::SetUp();
    const PackedCase& of = GetParam();
    cu_q = offsets_of(of.queries), cu_k = offsets_of(of.keys);
    q.emplace(1, of.heads_q, cu_q.back(), 8, 1, 0.0F, of.d);
    k.emplace(1, of.heads_kv, cu_k.back(), 8, 2, 5.0F, of.d);
    v.emplace(1, of.heads_kv, cu_k.back(), 8, 3, 0.0F, of.d);
  }

  // Attention of some tokens, by offsets of queries and keys, or without them of a batch of one.
  void run(const Tokens& tokens, const std::vector<int32_t>* of_q, const std::vector<int32_t>* of_k,
           Output& out) {
    const PackedCase& of = GetParam();
    const auto plan = Attention::plan(context_, {.heads_q = of.heads_q,
                                                 .heads_kv = of.heads_kv,
                                                 .head_dim = of.d,
                                                 .causal = of.causal,
                                                 .window = of.window,
                                                 .packed = of_q != nullptr});
    F8_ASSERT_OK(plan);
    const int64_t batch = of_q == nullptr ? 1 : static_cast<int64_t>(of_q->size()) - 1;
    const AttentionSizes sizes{batch, tokens.queries, tokens.keys};
    const DeviceBuffer data[] = {{context(), q->bits}, {context(), k->bits}, {context(), v->bits}};
    const auto from = [](const Elements& x, const DeviceBuffer& buffer, int64_t first) {
      float8_heads heads = x.on(buffer);
      heads.data = static_cast<uint16_t*>(heads.data) + first * x.token_stride();
      return heads;
    };
    const std::vector<int32_t> none(2);
    const DeviceBuffer cu[] = {{context(), of_q == nullptr ? none : *of_q},
                               {context(), of_k == nullptr ? none : *of_k}};
    if (out.error.empty()) out.error.resize(2);
    const DeviceBuffer error(context(), out.error);
    const auto rows = static_cast<size_t>(tokens.queries * of.heads_q);
    const auto rows_k = static_cast<size_t>(tokens.keys * of.heads_kv);
    const size_t head_bytes = static_cast<size_t>(of.d) * size_bytes(Dtype::kBf16);
    const DeviceBuffer o(context(), rows * head_bytes), lse(context(), rows * 4);
    const DeviceBuffer saved(context(), (*plan)->saved_bytes(sizes));
    const DeviceBuffer workspace(context(), (*plan)->workspace_bytes(sizes));
    const bool packed = of_q != nullptr;
    F8_ASSERT_OK(
        (*plan)->forward({.sizes = sizes,
                          .q = from(*q, data[0], tokens.first_q),
                          .k = from(*k, data[1], tokens.first_k),
                          .v = from(*v, data[2], tokens.first_k),
                          .o = o.as(),
                          .lse = lse.as<float>(),
                          .saved = {saved.as()},
                          .workspace = {workspace.as()},
                          .cu_seqlens_q = packed ? cu[0].as<int32_t>() : nullptr,
                          .cu_seqlens_kv = packed ? cu[1].as<int32_t>() : nullptr,
                          .sequence_error = packed ? error.as<float8_sequence_error>() : nullptr},
                         nullptr));
    const DeviceBuffer back[] = {{context(), rows * head_bytes},
                                 {context(), rows_k * head_bytes},
                                 {context(), rows_k * head_bytes}};
    const auto dense = [&of](const DeviceBuffer& buffer, int64_t heads) {
      return float8_heads{.data = buffer.as(), .head_stride = of.d, .token_stride = heads * of.d};
    };
    F8_ASSERT_OK((*plan)->dequantize({.sizes = sizes,
                                      .saved = {saved.as()},
                                      .q = dense(back[0], of.heads_q),
                                      .k = dense(back[1], of.heads_kv),
                                      .v = dense(back[2], of.heads_kv)},
                                     nullptr));
    out.o = o.download<uint16_t>();
    out.lse = lse.download<float>();
    out.saved = saved.download<uint8_t>();
    out.error = error.download<int32_t>();
    out.q = back[0].download<uint16_t>();
    out.k = back[1].download<uint16_t>();
    out.v = back[2].download<uint16_t>();
    for (const DeviceBuffer* each :
         {&o, &lse, &saved, &workspace, &error, &back[0], &back[1], &back[2]}) {
      out.guards_are_whole = out.guards_are_whole && each->guards_are_whole();
    }
  }
  void run(Output& out) { run(all(), &cu_q, &cu_k, out); }

  [[nodiscard]] Tokens all() const { return {0, cu_q.back(), 0, cu_k.back()}; }
  [[nodiscard]] Tokens sequence(size_t i) const {
    return {cu_q[i], cu_q[i + 1] - cu_q[i], cu_k[i], cu_k[i + 1] - cu_k[i]};
  }
  [[nodiscard]] size_t sequences() const { return cu_q.size() - 1; }

  // A sequence's part of rows [tokens][heads][d].
  template <class T>
  static std::vector<T> rows_of(const std::vector<T>& x, int64_t first, int64_t count,
                                int64_t row) {
    return {x.begin() + first * row, x.begin() + (first + count) * row};
  }
  [[nodiscard]] static std::vector<uint16_t> o_of(const Output& of, const Tokens& tokens) {
    return rows_of(of.o, tokens.first_q, tokens.queries, GetParam().heads_q * GetParam().d);
  }
  [[nodiscard]] std::vector<float> lse_of(const Output& of, const Tokens& tokens) const {
    std::vector<float> lse;
    for (int64_t head = 0; head < GetParam().heads_q; ++head) {
      const auto at = of.lse.begin() + head * cu_q.back() + tokens.first_q;
      lse.insert(lse.end(), at, at + tokens.queries);
    }
    return lse;
  }

  std::vector<int32_t> cu_q, cu_k;
  std::optional<Elements> q, k, v;
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, PackedAttention,
    testing::Values(
        PackedCase{"causal", 2, 1, {100, 0, 1, 257, 128}, {100, 0, 1, 257, 128}, true},
        PackedCase{"full", 2, 2, {100, 0, 130, 3, 7}, {30, 5, 129, 257, 0}, false},
        PackedCase{"other_keys", 2, 1, {60, 300, 2}, {200, 140, 0}, true},
        PackedCase{"window", 2, 1, {130, 300, 0, 1, 20}, {130, 300, 0, 1, 20}, true, 70},
        PackedCase{"one", 1, 1, {256}, {256}, true},
        PackedCase{"many", 1, 1, std::vector<int64_t>(70, 3), std::vector<int64_t>(70, 3), true},
        PackedCase{"of_64", 2, 1, {100, 0, 257}, {100, 0, 257}, true, 0, 64},
        PackedCase{"of_256", 2, 1, {100, 0, 257}, {100, 0, 257}, true, 0, 256},
        PackedCase{"window_of_256", 1, 1, {130, 300, 1}, {130, 300, 1}, true, 70, 256}),
    [](const auto& test) { return std::string(test.param.name); });

TEST_P(PackedAttention, EachSequenceHasTheBitsThatItHasAlone) {
  const PackedCase& of = GetParam();
  Output packed;
  run(packed);
  EXPECT_TRUE(packed.guards_are_whole);
  EXPECT_EQ(packed.error, (std::vector<int32_t>{0, 0}));
  for (size_t i = 0; i < sequences(); ++i) {
    const Tokens tokens = sequence(i);
    if (tokens.queries == 0 || tokens.keys == 0) continue;
    Output alone;
    run(tokens, nullptr, nullptr, alone);
    EXPECT_EQ(o_of(packed, tokens), alone.o) << "sequence " << i;
    EXPECT_EQ(lse_of(packed, tokens), alone.lse) << "sequence " << i;
    EXPECT_EQ(rows_of(packed.q, tokens.first_q, tokens.queries, of.heads_q * of.d), alone.q);
    EXPECT_EQ(rows_of(packed.k, tokens.first_k, tokens.keys, of.heads_kv * of.d), alone.k);
    EXPECT_EQ(rows_of(packed.v, tokens.first_k, tokens.keys, of.heads_kv * of.d), alone.v);
  }
}

TEST_P(PackedAttention, ASequenceWithoutKeysIsZero) {
  Output packed;
  run(packed);
  for (size_t i = 0; i < sequences(); ++i) {
    const Tokens tokens = sequence(i);
    if (tokens.keys != 0) continue;
    EXPECT_EQ(o_of(packed, tokens), std::vector<uint16_t>(o_of(packed, tokens).size()));
    for (const float lse : lse_of(packed, tokens)) {
      EXPECT_EQ(lse, -std::numeric_limits<float>::infinity());
    }
  }
}

TEST_P(PackedAttention, HasTheSameBitsTwice) {
  Output first, second;
  run(first);
  run(second);
  EXPECT_EQ(first.o, second.o);
  EXPECT_EQ(first.lse, second.lse);
  EXPECT_EQ(first.saved, second.saved);
}

TEST_P(PackedAttention, ANanIsThatSequencesAlone) {
  Output clean;
  run(clean);
  for (Elements* operand : {&*q, &*k, &*v}) {
    const bool of_queries = operand == &*q;
    const std::vector<int32_t>& cu = of_queries ? cu_q : cu_k;
    const size_t poisoned = sequences() > 3 ? 3 : 0;
    const std::vector<uint16_t> kept = operand->bits;
    for (int64_t token = cu[poisoned]; token < cu[poisoned + 1]; ++token) {
      operand->bits[operand->at(0, token, 5)] = 0x7FC0;
    }
    Output dirty;
    run(dirty);
    operand->bits = kept;
    for (size_t i = 0; i < sequences(); ++i) {
      const Tokens tokens = sequence(i);
      if (i == poisoned) {
        const std::vector<uint16_t> o = o_of(dirty, tokens);
        EXPECT_TRUE(
            std::ranges::any_of(o, [](uint16_t bits) { return std::isnan(decode_bf16(bits)); }));
        continue;
      }
      EXPECT_EQ(o_of(clean, tokens), o_of(dirty, tokens)) << "sequence " << i;
      EXPECT_EQ(lse_of(clean, tokens), lse_of(dirty, tokens)) << "sequence " << i;
    }
  }
}

TEST_P(PackedAttention, BadOffsetsLeaveNoMemoryAndAreKept) {
  const auto bad = [&](size_t at, int32_t value, bool of_keys, std::vector<int32_t> expected) {
    std::vector<int32_t> given_q = cu_q, given_k = cu_k;
    (of_keys ? given_k : given_q)[at] = value;
    Output out;
    run(all(), &given_q, &given_k, out);
    EXPECT_TRUE(out.guards_are_whole);
    EXPECT_EQ(out.error, expected);
    for (const uint16_t bits : out.o) EXPECT_FALSE(std::isnan(decode_bf16(bits)));
    // What was found first stays.
    given_q.front() = 3;
    run(all(), &given_q, &given_k, out);
    EXPECT_EQ(out.error, expected);
  };
  const auto last = static_cast<int32_t>(sequences());
  for (const int32_t value : {-5, 1 << 30}) {
    bad(0, value, false, {FLOAT8_BAD_CU_SEQLENS_Q, 0});
    bad(sequences(), value, true, {FLOAT8_BAD_CU_SEQLENS_KV, last});
    if (sequences() > 2) bad(1, value, false, {FLOAT8_BAD_CU_SEQLENS_Q, 1});
  }
  if (sequences() > 3) bad(2, cu_q[1] - 1, false, {FLOAT8_BAD_CU_SEQLENS_Q, 2});
}

// Queries behind the windows of all keys have none.
TEST_P(PackedAttention, QueriesBehindTheirWindowsAreZero) {
  const PackedCase& of = GetParam();
  if (of.window == 0 || sequences() < 2) GTEST_SKIP() << "of windows";
  std::vector<int32_t> fewer = cu_k;  // the second sequence has 20 keys, the third one the others
  fewer[2] = fewer[1] + 20;
  Output out;
  run(all(), &cu_q, &fewer, out);
  const Tokens tokens = sequence(1);
  const std::vector<uint16_t> o = o_of(out, tokens);
  const std::vector<float> lse = lse_of(out, tokens);
  for (int64_t query = 0; query < tokens.queries; ++query) {
    const auto at = static_cast<size_t>(query * of.heads_q * of.d);
    const bool has_key = query - of.window + 1 < 20;
    EXPECT_EQ(std::isfinite(lse[static_cast<size_t>(query)]), has_key) << query;
    EXPECT_EQ(decode_bf16(o[at]) != 0, has_key) << query;
  }
}

class PackedCalls : public GpuTest {
 protected:
  // A call of one head, of 40 queries and keys.
  struct Operands {
    DeviceBuffer q, k, v, o, lse, saved, workspace, cu;
    float8_attention_forward_args args;

    Operands(const Context& context, const Attention& plan, std::vector<int32_t> offsets)
        : q(context, random(1)),
          k(context, random(2)),
          v(context, random(3)),
          o(context, size_t{kTokens * kHead * 2}),
          lse(context, size_t{kTokens * 4}),
          saved(context, plan.saved_bytes(sizes(offsets))),
          workspace(context, plan.workspace_bytes(sizes(offsets))),
          cu(context, offsets) {
      args.sizes = sizes(offsets);
      args.q = heads(q), args.k = heads(k), args.v = heads(v);
      args.o = o.as();
      args.lse = lse.as<float>();
      args.saved = {saved.as()};
      args.workspace = {workspace.as()};
      args.cu_seqlens_q = args.cu_seqlens_kv = cu.as<int32_t>();
    }
    static float8_heads heads(const DeviceBuffer& buffer) {
      return {.data = buffer.as(), .batch_stride = kTokens * kHead, .token_stride = kHead};
    }
    static AttentionSizes sizes(const std::vector<int32_t>& offsets) {
      return {static_cast<int64_t>(offsets.size()) - 1, kTokens, kTokens};
    }
    static std::vector<uint16_t> random(unsigned seed) {
      return Elements(1, 1, kTokens, 0, seed, 0).bits;
    }
    [[nodiscard]] std::vector<uint8_t> results() const {
      std::vector<uint8_t> all = o.download<uint8_t>();
      for (const uint8_t each : lse.download<uint8_t>()) all.push_back(each);
      return all;
    }
  };
  static constexpr int64_t kTokens = 40, kHead = 128;
};

// The host reads no offsets.
TEST_F(PackedCalls, AGraphTakesOtherOffsets) {
  const auto plan = Attention::plan(context_, {.causal = true, .packed = true});
  F8_ASSERT_OK(plan);
  Operands operands(context(), **plan, {0, 3, 30, 40});
  const DeviceStream stream(context());
  const DeviceGraph graph(context(), stream,
                          [&] { return (*plan)->forward(operands.args, stream.get()); });
  for (const std::vector<int32_t>& offsets :
       {std::vector<int32_t>{0, 0, 17, 40}, {0, 40, 40, 40}, {0, 1, 2, 40}}) {
    operands.cu.upload(offsets.data(), offsets.size() * sizeof(int32_t));
    operands.o.poison();
    F8_ASSERT_OK((*plan)->forward(operands.args, nullptr));
    const auto expected = operands.results();
    operands.o.poison();
    operands.lse.poison();
    graph.replay();
    EXPECT_EQ(operands.results(), expected);
  }
}

TEST_F(PackedCalls, LongSequencesAreKept) {
  const auto plan = Attention::plan(context_, {.packed = true});
  F8_ASSERT_OK(plan);
  Operands operands(context(), **plan, {0, 3, 30, 40});
  const auto error_of = [&](int64_t longest_q, int64_t longest_kv) {
    const DeviceBuffer error(context(), std::vector<int32_t>(2));
    operands.args.sizes.longest_q = longest_q;
    operands.args.sizes.longest_kv = longest_kv;
    operands.args.sequence_error = error.as<float8_sequence_error>();
    EXPECT_TRUE((*plan)->forward(operands.args, nullptr));
    return error.download<int32_t>();
  };
  EXPECT_EQ(error_of(0, 0), (std::vector<int32_t>{FLOAT8_NO_SEQUENCE_ERROR, 0}));
  EXPECT_EQ(error_of(27, 27), (std::vector<int32_t>{FLOAT8_NO_SEQUENCE_ERROR, 0}));
  EXPECT_EQ(error_of(9, 40), (std::vector<int32_t>{FLOAT8_LONG_SEQUENCE_Q, 1}));
  EXPECT_EQ(error_of(0, 26), (std::vector<int32_t>{FLOAT8_LONG_SEQUENCE_KV, 1}));
}

TEST_F(PackedCalls, AreRefused) {
  const auto packed = Attention::plan(context_, {.packed = true});
  const auto batch = Attention::plan(context_, {});
  F8_ASSERT_OK(packed);
  F8_ASSERT_OK(batch);
  const Operands operands(context(), **packed, {0, 1, 40});
  const DeviceBuffer& cu = operands.cu;
  const float8_attention_forward_args& good = operands.args;
  F8_ASSERT_OK((*packed)->forward(good, nullptr));
  const auto refuses = [&](const Attention& plan, const auto& change, std::string_view word) {
    float8_attention_forward_args args = good;
    change(args);
    const Status status = plan.forward(args, nullptr);
    ASSERT_FALSE(status.has_value()) << word;
    EXPECT_NE(status.error().message.find(word), std::string::npos) << status.error().message;
  };
  refuses(
      **packed, [](auto& args) { args.cu_seqlens_q = nullptr; }, "cu_seqlens_q is NULL");
  refuses(
      **packed, [](auto& args) { args.cu_seqlens_kv = nullptr; }, "cu_seqlens_kv is NULL");
  refuses(
      **packed, [](auto& args) { args.sizes.batch = 0; }, "no sequence");
  refuses(
      **packed, [](auto& args) { args.sizes.batch = int64_t{1} << 31; }, "2^31");
  refuses(
      **packed, [&](auto& args) { args.sequence_error = cu.as<float8_sequence_error>(); },
      "overlap");
  refuses(
      **batch, [](auto&) {}, "not packed");
}

}  // namespace
}  // namespace f8::runtime::gpu
