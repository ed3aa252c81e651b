// What attention does in bf16 by cuDNN: recipe bf16, and the backward of fp8_forward, next to fp64 by heads, tokens, mask
// and strides; in a CUDA graph; and what cuDNN cannot do.
#include <string>

#include "runtime/attention/provider.hpp"
#include "tests/gpu/attention/gradients.hpp"

namespace f8::runtime::gpu {
namespace {

struct Bf16Case {
  const char* name;
  AttentionRecipe recipe;
  int64_t heads_q, heads_kv, queries, keys;
  bool causal = true;
  int64_t window = 0;
  int64_t d = 128;
};

class AttentionInBf16Test : public AttentionGradients {
 protected:
  void SetUp() override {
    AttentionGradients::SetUp();
    if (IsSkipped() || kEmulated) return;
    if (const auto version = cudnn_version(); !version) GTEST_SKIP() << version.error().message;
  }
};

class AttentionByCudnnTest : public AttentionInBf16Test,
                             public testing::WithParamInterface<Bf16Case> {};

using enum AttentionRecipe;
INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionByCudnnTest,
    testing::Values(Bf16Case{"bf16", kBf16, 4, 2, 300, 300},
                    Bf16Case{"bf16_full", kBf16, 3, 1, 130, 257, false},
                    Bf16Case{"bf16_more_queries", kBf16, 2, 2, 257, 100},
                    Bf16Case{"bf16_window", kBf16, 4, 4, 333, 333, true, 100},
                    Bf16Case{"bf16_window_of_one", kBf16, 2, 1, 140, 140, true, 1},
                    Bf16Case{"bf16_heads_of_64", kBf16, 4, 1, 200, 200, true, 0, 64},
                    Bf16Case{"bf16_heads_of_256", kBf16, 2, 1, 200, 200, true, 70, 256},
                    Bf16Case{"fp8_forward", kFp8Forward, 4, 2, 300, 300},
                    Bf16Case{"fp8_forward_full", kFp8Forward, 3, 3, 129, 257, false},
                    Bf16Case{"fp8_forward_window", kFp8Forward, 4, 2, 333, 333, true, 100},
                    Bf16Case{"fp8_forward_heads_of_64", kFp8Forward, 2, 1, 200, 200, true, 0, 64},
                    Bf16Case{"fp8_forward_heads_of_256", kFp8Forward, 2, 1, 200, 200, true, 0,
                             256}),
    [](const auto& of) { return of.param.name; });

// The operands have gaps between their tokens, and outputs leave what lies there.
TEST_P(AttentionByCudnnTest, IsNearFp64) {
  const Bf16Case& of = GetParam();
  recipe_ = of.recipe;
  const AttentionDesc desc{.heads_q = of.heads_q,
                           .heads_kv = of.heads_kv,
                           .head_dim = of.d,
                           .causal = of.causal,
                           .window = of.window};
  const Operands operands(2, of.heads_q, of.heads_kv, of.queries, of.keys, of.d);
  Gradients actual(operands);
  run(desc, operands, actual);
  if (HasFatalFailure()) return;
  const ExactGradients exact(desc, operands, actual);
  const double least = of.recipe == kBf16 ? 45 : 22;
  // A window of one key has P of 1, and no gradient of a score. The keys have a mean, which dQ has the rounding of dS times.
  if (of.window != 1) {
    EXPECT_GT(exact.of_q(), of.recipe == kBf16 ? 28 : least);
    EXPECT_GT(exact.of_k(), least);
  }
  EXPECT_GT(exact.of_v(), least);
  for (const Elements* each : {&actual.dq, &actual.dk, &actual.dv}) {
    const Elements& before = each == &actual.dq   ? operands.q
                             : each == &actual.dk ? operands.k
                                                  : operands.v;
    for (int64_t b = 0; b < each->batch; ++b) {
      const size_t gap = each->at(b * each->heads + each->heads - 1, 0, each->d - 1) + 1;
      for (size_t i = gap; i < gap + static_cast<size_t>(each->gap); ++i) {
        ASSERT_EQ(each->bits[i], before.bits[i]);
      }
    }
  }
}

TEST_F(AttentionInBf16Test, AGraphReplaysWithOtherValues) {
  const auto plan =
      Attention::plan(context_, {.heads_q = 2, .heads_kv = 1, .causal = true, .recipe = kBf16});
  F8_ASSERT_OK(plan);
  const AttentionSizes sizes{1, 256, 256};
  const Elements q(1, 2, 256, 0, 1, 0), k(1, 1, 256, 0, 2, 0), v(1, 1, 256, 0, 3, 0);
  const Elements other(1, 1, 256, 0, 4, 0);
  const DeviceBuffer on_q(context(), q.bits), on_k(context(), k.bits);
  DeviceBuffer on_v(context(), v.bits);
  const DeviceBuffer o(context(), q.bits.size() * 2), lse(context(), size_t{2 * 256 * 4});
  const DeviceBuffer workspace(context(), (*plan)->workspace_bytes(sizes) + 16);
  const auto forward = [&](Stream stream) {
    return (*plan)->forward({.sizes = sizes,
                             .q = q.on(on_q),
                             .k = k.on(on_k),
                             .v = v.on(on_v),
                             .o = o.as(),
                             .lse = lse.as<float>(),
                             .workspace = {workspace.as()}},
                            stream);
  };
  F8_ASSERT_OK(forward(nullptr));
  const auto first = o.download<uint16_t>();
  const DeviceStream stream(context());
  const DeviceGraph graph(context(), stream, [&] { return forward(stream.get()); });
  on_v.upload(other.bits.data(), other.bits.size() * 2);
  graph.replay();
  const auto replayed = o.download<uint16_t>();
  EXPECT_NE(replayed, first);
  F8_ASSERT_OK(forward(nullptr));
  EXPECT_EQ(o.download<uint16_t>(), replayed);
}

TEST_F(AttentionInBf16Test, ABackwardOfOneQueryIsRefused) {
  if (kEmulated) GTEST_SKIP() << "the stand-in has it";
  const auto plan = Attention::plan(context_, {.recipe = kBf16});
  F8_ASSERT_OK(plan);
  const AttentionSizes sizes{1, 1, 64};
  EXPECT_EQ((*plan)->backward_workspace_bytes(sizes), 0U);
  const Elements q(1, 1, 1, 0, 1, 0), k(1, 1, 64, 0, 2, 0);
  const DeviceBuffer buffers[] = {DeviceBuffer(context(), q.bits), DeviceBuffer(context(), k.bits),
                                  DeviceBuffer(context(), k.bits), DeviceBuffer(context(), q.bits),
                                  DeviceBuffer(context(), q.bits), DeviceBuffer(context(), q.bits),
                                  DeviceBuffer(context(), k.bits), DeviceBuffer(context(), k.bits)};
  const DeviceBuffer lse(context(), size_t{4});
  const Status status = (*plan)->backward({.sizes = sizes,
                                           .dout = q.on(buffers[4]),
                                           .o = buffers[3].as(),
                                           .lse = lse.as<float>(),
                                           .dq = q.on(buffers[5]),
                                           .dk = k.on(buffers[6]),
                                           .dv = k.on(buffers[7]),
                                           .q = q.on(buffers[0]),
                                           .k = k.on(buffers[1]),
                                           .v = k.on(buffers[2])},
                                          nullptr);
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(status.error().message.find("one query"), std::string::npos) << status.error().message;
}

}  // namespace
}  // namespace f8::runtime::gpu
