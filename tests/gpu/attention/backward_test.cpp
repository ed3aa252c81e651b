// The backward of attention in fp8: its gradients next to those in fp64 of the values that the forward multiplied, by
// heads, tokens, mask and strides; those of packed sequences, which have the bits that they have alone; and bad input.
#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>

#include "runtime/attention/provider.hpp"
#include "tests/gpu/attention/packs.hpp"

namespace f8::runtime::gpu {
namespace {

struct BackwardCase {
  const char* name;
  int64_t batch, heads_q, heads_kv, queries, keys;
  bool causal = true;
  int64_t window = 0;
  int64_t d = 128;
};

class AttentionBackwardTest : public AttentionGradients,
                              public testing::WithParamInterface<BackwardCase> {
 protected:
  static AttentionDesc desc() {
    const BackwardCase& of = GetParam();
    return {
        .heads_q = of.heads_q, .heads_kv = of.heads_kv, .causal = of.causal, .window = of.window};
  }
  static Operands operands() {
    const BackwardCase& of = GetParam();
    return {of.batch, of.heads_q, of.heads_kv, of.queries, of.keys, of.d};
  }
  // The rounding of dO alone leaves 31 dB, that of P and dS as much each.
  void expect_exact(const Operands& of) {
    Gradients actual(of);
    run(desc(), of, actual);
    const AttentionDesc shape = desc();
    const ExactGradients exact(shape, of, actual);
    EXPECT_GT(exact.of_q(), 23);
    EXPECT_GT(exact.of_k(), 23);
    EXPECT_GT(exact.of_v(), 25);
  }
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionBackwardTest,
    testing::Values(BackwardCase{"block", 1, 1, 1, 128, 128},
                    BackwardCase{"full", 1, 1, 1, 128, 128, false},
                    BackwardCase{"batch", 2, 2, 1, 300, 300},
                    BackwardCase{"full_of_other_keys", 1, 3, 3, 129, 257, false},
                    BackwardCase{"more_queries", 1, 2, 2, 257, 130},
                    BackwardCase{"more_keys", 1, 2, 1, 100, 390},
                    BackwardCase{"full_groups", 2, 4, 2, by_device<int64_t>(600, 200), 127, false},
                    BackwardCase{"groups", 1, 8, 1, by_device<int64_t>(641, 140),
                                 by_device<int64_t>(641, 140)},
                    BackwardCase{"window", 1, 2, 1, 300, 300, true, 100},
                    BackwardCase{"window_of_tiles", 2, 2, 1, 270, 270, true, 128},
                    BackwardCase{"wide_window", 1, 8, 1, by_device<int64_t>(641, 140),
                                 by_device<int64_t>(641, 140), true, by_device<int64_t>(300, 70)},
                    BackwardCase{"window_of_more_keys", 1, 1, 1, 130, 300, true, 40},
                    BackwardCase{"small_heads", 1, 2, 1, by_device<int64_t>(641, 140),
                                 by_device<int64_t>(641, 140), true, 0, 64},
                    BackwardCase{"small_heads_full", 2, 1, 1, 70, 130, false, 0, 64},
                    BackwardCase{"small_heads_window", 1, 2, 2, 150, 150, true, 50, 64},
                    BackwardCase{"large_heads", 1, 2, 1, by_device<int64_t>(641, 140),
                                 by_device<int64_t>(641, 140), true, 0, 256},
                    BackwardCase{"large_heads_full", 2, 1, 1, 70, 130, false, 0, 256},
                    BackwardCase{"large_heads_window", 1, 2, 2, 150, 150, true, 50, 256}),
    [](const auto& test) { return std::string(test.param.name); });

TEST_P(AttentionBackwardTest, IsThatOfTheRoundedOperands) {
  expect_exact(operands());
}

// Scales follow the gradient, whatever its size, also where its first queries have none.
TEST_P(AttentionBackwardTest, OfSmallAndLargeGradients) {
  for (const double factor : {1e-9, 1e9}) {
    Operands of = operands();
    for (int64_t row = 0; row < of.dout.batch * of.dout.heads; ++row) {
      for (int64_t t = 0; t < of.dout.tokens; ++t) {
        const double by = t < of.dout.tokens / 3 ? 0 : factor;
        for (int64_t c = 0; c < of.d(); ++c) {
          uint16_t& bits = of.dout.bits[of.dout.at(row, t, c)];
          bits = encode_bf16(static_cast<float>(decode_bf16(bits) * by));
        }
      }
    }
    expect_exact(of);
  }
}

TEST_P(AttentionBackwardTest, OfNoGradientIsZero) {
  Operands of = operands();
  std::ranges::fill(of.dout.bits, uint16_t{0});
  Gradients actual(of);
  run(desc(), of, actual);
  for (const Elements* each : {&actual.dq, &actual.dk, &actual.dv}) {
    for (int64_t row = 0; row < each->batch * each->heads; ++row) {
      for (int64_t t = 0; t < each->tokens; ++t) {
        for (int64_t c = 0; c < of.d(); ++c) ASSERT_EQ(each->value(row, t, c), 0);
      }
    }
  }
}

TEST_P(AttentionBackwardTest, HasTheSameBitsTwiceAndWritesNothingBetweenHeads) {
  const Operands of = operands();
  Gradients first(of), second(of);
  run(desc(), of, first);
  run(desc(), of, second);
  EXPECT_EQ(first.dq.bits, second.dq.bits);
  EXPECT_EQ(first.dk.bits, second.dk.bits);
  EXPECT_EQ(first.dv.bits, second.dv.bits);
  const auto expect_gaps = [](const Elements& before, const Elements& after) {
    const auto stride = static_cast<size_t>(before.token_stride());
    for (size_t i = 0; i < before.bits.size(); ++i) {
      if (i % stride < stride - static_cast<size_t>(before.gap)) continue;
      ASSERT_EQ(before.bits[i], after.bits[i]);
    }
  };
  expect_gaps(of.q, first.dq);
  expect_gaps(of.k, first.dk);
  expect_gaps(of.v, first.dv);
}

TEST_P(AttentionBackwardTest, ANanIsThatHeadsAlone) {
  const BackwardCase& shape = GetParam();
  Operands of = operands();
  Gradients clean(of), dirty(of);
  run(desc(), of, clean);
  of.dout.bits[of.dout.at(0, shape.queries - 1, 5)] = 0x7FC0;
  run(desc(), of, dirty);
  EXPECT_TRUE(std::isnan(dirty.dq.value(0, shape.queries - 1, 5)));
  bool nan = false;
  for (int64_t t = 0; t < shape.keys; ++t) nan = nan || std::isnan(dirty.dv.value(0, t, 5));
  EXPECT_TRUE(nan);
  const auto expect_others = [](const Elements& x, const Elements& y, int64_t from) {
    for (int64_t row = from; row < x.batch * x.heads; ++row) {
      for (int64_t t = 0; t < x.tokens; ++t) {
        for (int64_t c = 0; c < x.d; ++c) {
          ASSERT_EQ(x.bits[x.at(row, t, c)], y.bits[y.at(row, t, c)]);
        }
      }
    }
  };
  expect_others(clean.dq, dirty.dq, 1);
  expect_others(clean.dk, dirty.dk, 1);
  expect_others(clean.dv, dirty.dv, 1);
}

class PackedGradients : public AttentionGradients, public testing::WithParamInterface<PackCase> {
 protected:
  // Those of sequence i as a batch of one.
  Gradients gradients_alone(const Operands& all, const std::vector<int32_t>& cu_q,
                            const std::vector<int32_t>& cu_k, size_t i) {
    const Operands own = part(all, cu_q, cu_k, i);
    Gradients alone(own);
    run(GetParam().desc(), own, alone);
    return alone;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, PackedGradients,
    testing::Values(PackCase{"causal", 2, 1, {100, 0, 1, 257, 128}, {100, 0, 1, 257, 128}},
                    PackCase{"full", 2, 2, {100, 0, 130, 3, 7}, {30, 5, 129, 257, 0}, false},
                    PackCase{"other_keys", 2, 1, {60, 300, 2}, {200, 140, 0}},
                    PackCase{"window", 2, 1, {130, 300, 0, 1, 20}, {130, 300, 0, 1, 20}, true, 70},
                    PackCase{"many", 1, 1, std::vector<int32_t>(70, 3),
                             std::vector<int32_t>(70, 3)},
                    PackCase{"small_heads", 2, 1, {40, 0, 130}, {40, 0, 130}, true, 0, 64},
                    PackCase{"large_heads", 2, 1, {40, 0, 130}, {40, 0, 130}, true, 0, 256},
                    PackCase{"large_heads_window", 1, 1, {150, 3}, {150, 3}, true, 70, 256}),
    [](const auto& test) { return std::string(test.param.name); });

TEST_P(PackedGradients, EachSequenceHasTheBitsThatItHasAlone) {
  const PackCase& of = GetParam();
  const std::vector<int32_t> cu_q = pack_offsets(of.queries), cu_k = pack_offsets(of.keys);
  const Operands all(1, of.heads_q, of.heads_kv, cu_q.back(), cu_k.back(), of.d);
  Gradients packed(all);
  run(of.desc(), all, cu_q, cu_k, packed);
  for (size_t i = 0; i < of.queries.size(); ++i) {
    const int64_t queries = of.queries[i], keys = of.keys[i];
    if (queries == 0 || keys == 0) {
      // Without queries, or without keys, a sequence's gradients are 0.
      const Elements dq = part(packed.dq, cu_q[i], queries);
      const Elements dk = part(packed.dk, cu_k[i], keys);
      const Elements dv = part(packed.dv, cu_k[i], keys);
      for (const Elements* each : {&dq, &dk, &dv}) {
        for (int64_t t = 0; t < each->tokens; ++t) EXPECT_EQ(each->value(0, t, 5), 0);
      }
      continue;
    }
    const Gradients alone = gradients_alone(all, cu_q, cu_k, i);
    EXPECT_EQ(part(packed.dq, cu_q[i], queries).bits, alone.dq.bits) << "sequence " << i;
    EXPECT_EQ(part(packed.dk, cu_k[i], keys).bits, alone.dk.bits) << "sequence " << i;
    EXPECT_EQ(part(packed.dv, cu_k[i], keys).bits, alone.dv.bits) << "sequence " << i;
  }
}

// The backward in bf16 of the values that each was multiplied with, which on a GPU may add in another order.
TEST_P(PackedGradients, InBf16EachSequenceIsWhatItIsAlone) {
  if (!kEmulated) {
    const auto version = cudnn_version();
    if (!version) GTEST_SKIP() << version.error().message;
    if (GetParam().d == 256 && *version < 91900) GTEST_SKIP() << "refused with cuDNN " << *version;
  }
  recipe_ = AttentionRecipe::kFp8Forward;
  const PackCase& of = GetParam();
  const std::vector<int32_t> cu_q = pack_offsets(of.queries), cu_k = pack_offsets(of.keys);
  const Operands all(1, of.heads_q, of.heads_kv, cu_q.back(), cu_k.back(), of.d, 0);
  Gradients packed(all);
  run(of.desc(), all, cu_q, cu_k, packed);
  if (HasFatalFailure()) return;
  for (size_t i = 0; i < of.queries.size(); ++i) {
    const int64_t queries = of.queries[i], keys = of.keys[i];
    const Elements dq = part(packed.dq, cu_q[i], queries);
    const Elements dk = part(packed.dk, cu_k[i], keys), dv = part(packed.dv, cu_k[i], keys);
    if (queries == 0 || keys == 0) {
      for (const Elements* each : {&dq, &dk, &dv}) {
        for (int64_t t = 0; t < each->tokens; ++t) EXPECT_EQ(each->value(0, t, 5), 0);
      }
      continue;
    }
    if (queries == 1) {  // cuDNN has no backward of one alone
      for (const Elements* each : {&dq, &dk, &dv}) {
        for (int64_t t = 0; t < each->tokens; ++t) EXPECT_TRUE(std::isfinite(each->value(0, t, 5)));
      }
      continue;
    }
    const Gradients alone = gradients_alone(all, cu_q, cu_k, i);
    for (const auto& [name, got, expected] :
         {std::tuple{"dq", &dq, &alone.dq}, std::tuple{"dk", &dk, &alone.dk},
          std::tuple{"dv", &dv, &alone.dv}}) {
      double signal = 0, noise = 0;
      for (int64_t row = 0; row < got->heads; ++row) {
        for (int64_t t = 0; t < got->tokens; ++t) {
          for (int64_t c = 0; c < got->d; ++c) {
            const double value = expected->value(row, t, c);
            signal += value * value;
            noise += std::pow(value - got->value(row, t, c), 2);
          }
        }
      }
      EXPECT_GT(db(signal + 1e-12, noise), 40) << name << " of sequence " << i;
    }
  }
}

class AttentionBackwardMisuse : public AttentionGradients {};

TEST_F(AttentionBackwardMisuse, OfACallIsRefused) {
  const auto plan = Attention::plan(context_, {.recipe = AttentionRecipe::kFp8});
  const auto without = Attention::plan(context_, {});
  F8_ASSERT_OK(plan);
  F8_ASSERT_OK(without);
  const AttentionSizes sizes{1, 2, 2};
  EXPECT_EQ((*plan)->saved_bytes(sizes), (*without)->saved_bytes(sizes) + 2 * sizeof(float));
  constexpr int64_t kD = 128;
  const std::vector<uint16_t> elements(2 * kD);
  const DeviceBuffer dout(context(), elements), dq(context(), elements), dk(context(), elements);
  const DeviceBuffer dv(context(), elements), o(context(), elements), lse(context(), size_t{64});
  const DeviceBuffer saved(context(), (*plan)->saved_bytes(sizes));
  const DeviceBuffer workspace(context(), (*plan)->backward_workspace_bytes(sizes));
  const auto heads = [](const DeviceBuffer& buffer) {
    return float8_heads{.data = buffer.as(), .batch_stride = 2 * kD, .token_stride = kD};
  };
  const float8_attention_backward_args good{.sizes = sizes,
                                            .dout = heads(dout),
                                            .o = o.as(),
                                            .lse = lse.as<float>(),
                                            .saved = {saved.as()},
                                            .workspace = {workspace.as()},
                                            .dq = heads(dq),
                                            .dk = heads(dk),
                                            .dv = heads(dv)};
  const auto refuses = [&](const Attention& of, const auto& change, std::string_view word) {
    float8_attention_backward_args args = good;
    change(args);
    const Status status = of.backward(args, nullptr);
    ASSERT_FALSE(status.has_value()) << word;
    EXPECT_NE(status.error().message.find(word), std::string::npos) << status.error().message;
  };
  refuses(
      **plan, [](auto& args) { args.dout.data = nullptr; }, "dout is NULL");
  refuses(
      **plan, [](auto& args) { args.dk.token_stride = 4; }, "dk.token_stride is 4");
  refuses(
      **plan, [](auto& args) { args.dq = args.dout; }, "overlap");
  refuses(
      **plan, [](auto& args) { args.o = nullptr; }, "o is NULL");
  refuses(
      **plan, [](auto& args) { args.lse = nullptr; }, "lse is NULL");
  refuses(
      **plan, [](auto& args) { args.saved = {}; }, "saved.data is NULL");
  refuses(
      **plan, [](auto& args) { args.workspace = {}; }, "workspace.data is NULL");
  refuses(
      **plan, [](auto& args) { args.sizes.tokens_kv = 0; }, "0 keys");
  float8_attention_backward_args nothing{};
  nothing.sizes.tokens_kv = 1;
  F8_ASSERT_OK((*plan)->backward(nothing, nullptr));
}

}  // namespace
}  // namespace f8::runtime::gpu
