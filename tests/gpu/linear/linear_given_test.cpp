// Tensors in fp8 that a caller holds: casts and GEMMs apart from a linear give a linear's bits, and
// linears take and share what was cast.
#include <algorithm>
#include <bit>
#include <cmath>

#include "runtime/linear/tensors/tensor_gemm.hpp"
#include "tests/gpu/fp8_copies.hpp"
#include "tests/gpu/linear/given_fixture.hpp"

namespace f8::runtime::gpu {
namespace {

INSTANTIATE_TEST_SUITE_P(Recipes, TensorTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(TensorTest, GivenOperandsGiveTheSame) {
  const LinearDesc desc = describe(GetParam(), kShape);
  expect_the_same(desc, true, false);
  expect_the_same(desc, false, true);
  expect_the_same(desc, true, true);
}

TEST_P(TensorTest, GivenOperandsGiveTheSameWhereALinearRecomputes) {
  LinearDesc desc = describe(GetParam(), kShape);
  desc.recompute = true;
  expect_the_same(desc, true, false);
  expect_the_same(desc, true, true);
}

TEST_P(TensorTest, SavedCopiesAreTheQuantizers) {
  const auto linear = plan(describe(GetParam(), kShape));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, kRows, 7);
  F8_ASSERT_OK(linear->forward(t.forward(), nullptr));
  const auto x = quantized(Tensor::kInput);
  const auto w = quantized(Tensor::kWeight);
  ASSERT_TRUE(x && w);
  F8_ASSERT_OK(x->run(t.device_x, kRows, t.slots));
  F8_ASSERT_OK(w->run(t.device_w, kShape.n, t.slots));
  const auto qt = [&](const float8_tensor& view) {
    const auto mode = static_cast<Granularity>(view.qt_setting.granularity);
    const int64_t scales =
        mode == codegen::ScaleMode::kTensor ? 1 : scale_floats(mode, view.cols, view.rows);
    return copy_bytes(context(), view.qt, view.qt_inverse_scale, view.cols, view.rows, view.ld_qt,
                      is_block(mode) ? 1 : scales);
  };
  const float8_tensor saved_x = linear->saved_x(t.saved.as(), kRows);
  EXPECT_EQ(saved_x.q, nullptr);
  EXPECT_EQ(saved_x.rows, kRows);
  const float8_tensor own = x->view(kRows);
  ASSERT_EQ(saved_x.qt == nullptr, own.qt == nullptr);
  if (own.qt != nullptr) {
    EXPECT_EQ(qt(saved_x), qt(own));
  }
  const float8_tensor of_w = w->view(kShape.n);
  const float8_tensor saved_w = linear->saved_w(t.saved.as());
  ASSERT_EQ(saved_w.qt == nullptr, of_w.qt == nullptr);
  if (of_w.qt == nullptr) return;
  EXPECT_EQ(qt(saved_w), qt(of_w));
}

TEST_P(TensorTest, AGemmOfTensorsIsTheLinears) {
  const auto linear = plan(describe(GetParam(), kShape));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, kRows, 9);
  F8_ASSERT_OK(run(*linear, t));
  const Bits plain = results(t);
  const auto x = quantized(Tensor::kInput);
  const auto w = quantized(Tensor::kWeight);
  const auto dy = quantized(Tensor::kGradOutput);
  ASSERT_TRUE(x && w && dy);
  F8_ASSERT_OK(x->run(t.device_x, kRows, t.slots));
  F8_ASSERT_OK(w->run(t.device_w, kShape.n, t.slots));
  F8_ASSERT_OK(dy->run(t.device_dy, kRows, t.slots));
  const float8_tensor tensors[] = {x->view(kRows), w->view(kShape.n), dy->view(kRows)};
  t.poison_results();
  const struct {
    Gemm gemm;
    const float8_tensor *a, *b;
    const DeviceBuffer& d;
    size_t bits;
  } all[] = {{Gemm::kOutput, &tensors[0], &tensors[1], t.y, 0},
             {Gemm::kGradInput, &tensors[2], &tensors[1], t.dx, 1},
             {Gemm::kGradWeight, &tensors[2], &tensors[0], t.dw, 2}};
  for (const auto& [gemm, a, b, d, bits] : all) {
    SCOPED_TRACE(to_string(gemm));
    TensorGemmDesc desc{.gemm = gemm, .shape = kShape, .recipe = find_recipe(GetParam()).value()};
    if (!desc.recipe.at(gemm).is_fp8()) {
      EXPECT_FALSE(TensorGemm::plan(context_, desc));
      continue;
    }
    const auto one = TensorGemm::plan(context_, desc);
    F8_ASSERT_OK(one);
    const DeviceBuffer workspace(context(), one->workspace_bytes());
    F8_ASSERT_OK(one->run({.a = a, .b = b, .d = {d.as()}, .workspace = {workspace.as()}}, nullptr));
    EXPECT_EQ(results(t)[bits], plain[bits]);

    // On few SMs another kernel may add in another order, to nearly the same.
    desc.d = Dtype::kF32;
    desc.sm_limit = 16;
    const auto limited = TensorGemm::plan(context_, desc);
    F8_ASSERT_OK(limited);
    DeviceBuffer wide(context(), plain[bits].size() * 2);
    wide.poison();
    const DeviceBuffer its_workspace(context(), limited->workspace_bytes());
    F8_ASSERT_OK(limited->run({.a = a, .b = b, .d = {wide.as()}, .workspace = {its_workspace.as()}},
                              nullptr));
    const auto values = wide.download<float>();
    const auto rounded = d.download<uint16_t>();
    for (size_t i = 0; i < values.size(); ++i) {
      const auto expected = std::bit_cast<float>(uint32_t{rounded[i]} << 16);
      ASSERT_NEAR(values[i], expected, 0.02F * std::abs(expected) + 0.02F) << i;
    }
    EXPECT_TRUE(wide.guards_are_whole());
  }
}

// Q, K and V: one cast of x, one copy of it saved, and one dx that all add to.
TEST_P(TensorTest, LinearsShareAnInput) {
  const int64_t widths[] = {208, 64, 64};
  const auto x = quantized(Tensor::kInput);
  ASSERT_NE(x, nullptr);
  const DeviceBuffer dx(context(), static_cast<size_t>(kRows * kShape.k) * 2);
  std::vector<float> sum(static_cast<size_t>(kRows * kShape.k));
  for (size_t i = 0; i < std::size(widths); ++i) {
    LinearDesc desc = describe(GetParam(), {kShape.m, widths[i], kShape.k});
    desc.accumulate_grad_input = true;
    const auto linear = plan(desc);
    ASSERT_NE(linear, nullptr);
    Tensors t(context(), *linear, kRows, 11);
    F8_ASSERT_OK(run(*linear, t));
    const auto alone = t.dx.download<uint16_t>();
    for (size_t j = 0; j < sum.size(); ++j) {
      sum[j] += std::bit_cast<float>(uint32_t{alone[j]} << 16);
    }
    if (i == 0) {
      F8_ASSERT_OK(x->run(t.device_x, kRows, t.slots));
    }
    const float8_tensor view = x->view(kRows);
    ForwardCall forward = t.forward();
    forward.x.fp8 = &view;
    F8_ASSERT_OK(linear->forward(forward, nullptr));
    BackwardCall backward = t.backward();
    backward.x.fp8 = &view;
    backward.dx.data = dx.as();
    backward.dx.accumulate = i > 0 ? 1 : 0;
    F8_ASSERT_OK(linear->backward(backward, nullptr));
  }
  const auto together = dx.download<uint16_t>();
  for (size_t j = 0; j < sum.size(); ++j) {
    const auto value = std::bit_cast<float>(uint32_t{together[j]} << 16);
    ASSERT_NEAR(value, sum[j], 0.03F * std::abs(sum[j]) + 0.1F) << j;
  }
}

// Ranks hold the weight by rows; here one device has all of their shards, and the host takes the
// maxima of their words.
TEST_P(TensorTest, ShardsOverRanksHaveTheBitsOfTheWhole) {
  QuantizerDesc desc;
  desc.operand = Tensor::kWeight;
  desc.recipe = find_recipe(GetParam()).value();
  if (desc.recipe.name == "delayed") return;
  desc.cols = kShape.k;
  desc.over_ranks = true;
  desc.whole_rows = kShape.n;
  const auto linear = plan(describe(GetParam(), kShape));
  const auto whole = quantized(Tensor::kWeight);
  ASSERT_TRUE(linear && whole);
  const Tensors t(context(), *linear, kRows, 15);
  F8_ASSERT_OK(whole->run(t.device_w, kShape.n, t.slots));
  const float8_tensor all = whole->view(kShape.n);
  const auto q_of_all =
      copy_bytes(context(), all.q, all.q_inverse_scale, kShape.n, kShape.k, all.ld_q, 1);
  const auto qt_of_all =
      copy_bytes(context(), all.qt, all.qt_inverse_scale, kShape.k, kShape.n, all.ld_qt, 1);

  // The scales of all 128x128 blocks of the whole.
  const auto block_scales = [&](const float8_tensor& view) {
    constexpr auto kBlock = codegen::ScaleMode::kBlock128x128;
    const auto read = [&](const void* data, const float* inverse, int64_t rows, int64_t cols) {
      return copy_bytes(context(), data, inverse, 1, 1, 1, scale_floats(kBlock, rows, cols)).back();
    };
    return std::pair(read(view.q, view.q_inverse_scale, kShape.n, kShape.k),
                     read(view.qt, view.qt_inverse_scale, kShape.k, kShape.n));
  };
  // Whole blocks of 128 rows, or blocks that are cut, also several times.
  const bool blocks = desc.recipe.name == "blockwise";
  for (const int64_t rows : blocks ? std::vector<int64_t>{128, 96, 43} : std::vector<int64_t>{96}) {
    SCOPED_TRACE(rows);
    desc.rows = rows;
    const auto planned = Quantizer::plan(context_, desc);
    F8_ASSERT_OK(planned);
    const Quantizer& shards = **planned;
    const auto words = static_cast<size_t>(shards.amax_words());
    DeviceBuffer amax(context(), std::max<size_t>(words, 1) * sizeof(uint32_t));
    DeviceBuffer row_amax(context(), static_cast<size_t>(desc.rows) * sizeof(uint32_t));
    DeviceBuffer tensor(context(), shards.tensor_bytes());
    const auto call = [&](int64_t first) {
      QuantizeCall args;
      args.x.data = t.device_w.as<uint8_t>() + first * kShape.k * 2;
      args.rows = std::min(desc.rows, kShape.n - first);
      args.first_row = first;
      args.tensor.data = tensor.as();
      if (words > 0) args.amax = amax.as<uint32_t>();
      if (shards.row_amax_words() > 0) args.row_amax = row_amax.as<uint32_t>();
      return args;
    };
    std::vector<uint32_t> most(std::max<size_t>(words, 1));
    for (int64_t first = 0; first < kShape.n; first += desc.rows) {
      amax.poison();
      F8_ASSERT_OK(shards.find_amax(call(first), nullptr));
      const auto own = amax.download<uint32_t>();
      for (size_t i = 0; i < words; ++i) most[i] = std::max(most[i], own[i]);
    }
    for (int64_t first = 0; first < kShape.n; first += desc.rows) {
      SCOPED_TRACE(first);
      tensor.poison();
      const QuantizeCall args = call(first);
      F8_ASSERT_OK(shards.find_amax(args, nullptr));
      amax.upload(most.data(), most.size() * sizeof(uint32_t));
      F8_ASSERT_OK(shards.run(with_workspace(args, nullptr), nullptr));
      const float8_tensor shard = shards.view(tensor.as(), nullptr, args.rows).value();
      const auto q = copy_bytes(context(), shard.q, shard.q_inverse_scale, shard.rows, shard.cols,
                                shard.ld_q, 1);
      const auto qt = copy_bytes(context(), shard.qt, shard.qt_inverse_scale, shard.cols,
                                 shard.rows, shard.ld_qt, 1);
      for (int64_t row = 0; row < args.rows; ++row) {
        ASSERT_EQ(q[static_cast<size_t>(row)], q_of_all[static_cast<size_t>(first + row)]) << row;
      }
      for (int64_t row = 0; row < kShape.k; ++row) {
        const auto& wide = qt_of_all[static_cast<size_t>(row)];
        const std::vector<uint8_t> part(wide.begin() + first, wide.begin() + first + args.rows);
        ASSERT_EQ(qt[static_cast<size_t>(row)], part) << row;
      }
      if (shard.whole_rows != 0) {
        EXPECT_EQ(block_scales(shard), block_scales(all));
      }
      // Both begin with the scale of the first row, column or block.
      if (first == 0) {
        EXPECT_EQ(q.back(), q_of_all.back());
        EXPECT_EQ(qt.back(), qt_of_all.back());
      }
      EXPECT_TRUE(tensor.guards_are_whole());
      EXPECT_TRUE(amax.guards_are_whole());
      EXPECT_TRUE(row_amax.guards_are_whole());
    }
  }
}

// The weight's qt in shards, as ranks gather it, gives the bits of one piece: in a GEMM of its own, in
// a grouped one, and where the last tile of its columns reaches beyond them.
TEST_P(TensorTest, AGatheredWeightIsReadInPlace) {
  constexpr Shape kWide{320, 512, 592};
  LinearDesc desc = describe(GetParam(), kWide);
  const GemmChoice choice = GemmChoice{
      parse_gemm_kernel(Provider::kGenerated, "128x128s4c2x1w2g8").value()};  // of both gradients
  desc.choices = {std::nullopt, choice, choice};
  if (!desc.recipe.at(Gemm::kGradWeight).is_fp8()) desc.choices[2] = std::nullopt;
  const auto plain = plan(desc);
  desc.weight_shards = true;
  const auto linear = plan(desc);
  const auto w = quantized(Tensor::kWeight, true, kWide);
  ASSERT_TRUE(plain && linear && w);
  Tensors t(context(), *plain, kRows, 25);
  F8_ASSERT_OK(w->run(t.device_w, kWide.n, t.slots));
  const float8_tensor whole = w->view(kWide.n);
  const auto rows =
      copy_bytes(context(), whole.qt, whole.qt_inverse_scale, kWide.k, kWide.n, whole.ld_qt, 1);
  const auto results_of = [&](const Linear& of, const float8_tensor& given, bool dx_alone) {
    t.poison_results();
    const DeviceBuffer saved(context(), of.saved_bytes(true));
    ForwardCall forward = t.forward();
    forward.saved.data = saved.as();
    forward.w.fp8 = &whole;
    EXPECT_TRUE(of.forward(forward, nullptr));
    BackwardCall backward = t.backward();
    backward.saved.data = saved.as();
    backward.w.fp8 = &given;
    if (dx_alone) backward.dw.data = nullptr;
    const Status done = of.backward(backward, nullptr);
    EXPECT_TRUE(done) << (done ? "" : done.error().message);
    return results(t);
  };
  for (const int64_t count : {2, 4}) {
    SCOPED_TRACE(count);
    const int64_t own = kWide.n / count;
    std::vector<uint8_t> shards;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t k = 0; k < kWide.k; ++k) {
        const auto from = rows[static_cast<size_t>(k)].begin() + i * own;
        shards.insert(shards.end(), from, from + own);
      }
    }
    DeviceBuffer gathered(context(), shards.size());
    gathered.upload(shards.data(), shards.size());
    float8_tensor given = whole;
    given.q = nullptr;
    given.qt = gathered.as();
    given.qt_shards = count;
    given.ld_qt = own;
    for (const bool dx_alone : {false, true}) {
      EXPECT_EQ(results_of(*linear, given, dx_alone), results_of(*plain, whole, dx_alone));
      EXPECT_EQ(results_of(*linear, whole, dx_alone), results_of(*plain, whole, dx_alone));
    }
    const auto expect_refused = [&](const Linear& by, const char* words) {
      const DeviceBuffer saved(context(), by.saved_bytes(true));
      BackwardCall backward = t.backward();
      backward.saved.data = saved.as();
      backward.w.fp8 = &given;
      const Status status = by.backward(backward, nullptr);
      ASSERT_FALSE(status);
      EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
    };
    expect_refused(*plain, "weight_shards");
    given.ld_qt = kWide.n;
    expect_refused(*linear, "whole 128s");
  }
  desc.choices[1] = GemmChoice{parse_gemm_kernel(Provider::kCublasLt, "h0").value()};
  EXPECT_FALSE(Linear::plan(context_, desc));
}

TEST_P(TensorTest, WhatDoesNotFitIsNamed) {
  const auto linear = plan(describe(GetParam(), kShape));
  ASSERT_NE(linear, nullptr);
  const Tensors t(context(), *linear, kRows, 13);
  const auto x = quantized(Tensor::kInput);
  const auto w = quantized(Tensor::kWeight);
  ASSERT_TRUE(x && w);
  const float8_tensor good = x->view(kRows);
  const auto refused = [&](const float8_tensor& view, std::string_view words) {
    ForwardCall forward = t.forward();
    forward.x.fp8 = &view;
    const Status status = linear->forward(forward, nullptr);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
  };
  refused(x->view(kRows - 1), "x.fp8 is a tensor of 299 x 592");
  const auto with = [&](auto change) {
    float8_tensor view = good;
    change(view);
    return view;
  };
  refused(with([](float8_tensor& v) { v.q = nullptr; }), "x.fp8.q is NULL");
  refused(with([](float8_tensor& v) { v.q_inverse_scale = nullptr; }),
          "x.fp8.q_inverse_scale is NULL");
  refused(with([](float8_tensor& v) { v.q_setting.format = FLOAT8_E5M2; }),
          "x.fp8.q_setting is FLOAT8_E5M2");
  refused(with([](float8_tensor& v) { v.q_setting.granularity ^= 1; }), "x.fp8.q_setting is");
  refused(with([](float8_tensor& v) { v.ld_q += 128; }), "x.fp8.ld_q is");
  refused(with([](float8_tensor& v) { v.q = static_cast<const uint8_t*>(v.q) + 8; }),
          "x.fp8 is not aligned");
  refused(with([&](float8_tensor& v) { v.q = t.y.as(); }), "overlap");

  BackwardCall adds = t.backward();
  adds.dx.accumulate = 1;
  const Status no_gemm = linear->backward(adds, nullptr);
  ASSERT_FALSE(no_gemm);
  EXPECT_NE(no_gemm.error().message.find("float8_linear_desc.accumulate_grad_input"),
            std::string::npos);

  EXPECT_FALSE(x->quantizer->view(x->tensor.as(), nullptr, kShape.m + 1));
  EXPECT_FALSE(w->quantizer->view(w->tensor.as(), nullptr, kShape.n - 16));
  const Status misfit = x->run(t.device_x, kShape.m + 1, t.slots);
  ASSERT_FALSE(misfit);
  EXPECT_NE(misfit.error().message.find("float8_quantize_args.rows is 321"), std::string::npos)
      << misfit.error().message;
  F8_ASSERT_OK(x->run(t.device_x, 0, t.slots));
}

}  // namespace
}  // namespace f8::runtime::gpu
