// The casts of activations, of gated ones, of what a norm makes of x, and all of these over ranks, on an emulated
// device: the bits of casts of these, which are close to fp64.
#include "runtime/lists/quantizer_list.hpp"
#include "tests/unit/runtime/quantize/computed_cast_fixture.hpp"

namespace f8::runtime {
namespace {

constexpr CastCaseSource kOfInputs[] = {{CastSource::kGlu},
                                        {CastSource::kGlu, Activation::kGeluTanh},
                                        {CastSource::kRmsNorm},
                                        {CastSource::kLayerNorm},
                                        {CastSource::kLayerNorm, Activation::kSilu, true},
                                        {CastSource::kActivation, Activation::kGelu},
                                        {CastSource::kActivation, Activation::kGeluTanh},
                                        {CastSource::kActivation, Activation::kRelu2}};
INSTANTIATE_TEST_SUITE_P(Shapes, ComputedCastTest, ::testing::ValuesIn(kComputedCases));

// For each type, with both copies and q alone, in a first step and later; what delayed scaling records is
// the product's amax.
TEST_P(ComputedCastTest, IsTheCastOfTheProduct) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const CastCaseSource& source : kOfInputs) {
    cuda_.launches.clear();
    for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      const Matrix x = random(rows, cols, 5, type), by = other(source, rows, cols, type);
      Buffer of_x(x, type, gap), of_by(by, type, gap), of_h(computed(source, x, by, type), type, 0);
      for (const int kind : {0, 1, 2, 3}) {
        SCOPED_TRACE(f8::format("{} {} {}", to_string(type), source.name(), kind));
        // In one of two steps there may be more rows than the call has.
        const int64_t rows_max = (kind & 2) != 0 ? rows : rows + 150;
        QuantizerDesc desc{.rows = rows_max, .cols = cols, .recipe = recipe_of(recipe)};
        desc.dtype = type;
        desc.qt = (kind & 1) != 0;
        const float8_step& step = (kind & 2) != 0 ? kFirstOfSteps : kOrdinaryStep;
        const auto plain = Quantizer::plan(context_, desc).value();
        source.set(desc);
        const auto fused = Quantizer::plan(context_, desc).value();
        ASSERT_EQ(fused->tensor_bytes(), plain->tensor_bytes());
        EXPECT_EQ(fused->workspace_bytes() > 0, recipe != "blockwise");

        Buffer expected(plain->tensor_bytes()), got(plain->tensor_bytes());
        Slots plain_slots, fused_slots;
        const int64_t ld = gap == 0 ? 0 : cols + gap;
        run(*plain, {.rows = rows,
                     .x = {of_h.data()},
                     .tensor = {expected.data()},
                     .step = &step,
                     .scales = plain_slots});
        const size_t before = cuda_.launches.size();
        QuantizeCall call{.rows = rows,
                          .x = {of_x.data(), ld},
                          .tensor = {got.data()},
                          .step = &step,
                          .scales = fused_slots};
        set_other(source, of_by, ld, call);
        run(*fused, call);
        EXPECT_EQ(cuda_.launches.size() - before, launches(*fused, step));
        EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.bytes()), 0);
        EXPECT_EQ(plain_slots.most(), fused_slots.most());
        EXPECT_EQ(fused_slots.most() > 0, recipe == "delayed");
        EXPECT_TRUE(got.guard_is_whole());
      }
    }
  }
}

// Infinities, NaN and zeros of either sign, which a LayerNorm without a bias keeps.
TEST_P(ComputedCastTest, IsTheCastOfALayerNormOfSpecialValues) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  constexpr float kSpecial[] = {INFINITY, -INFINITY, NAN, -0.0F, 0.0F};
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const int kind : {0, 1, 2, 3}) {
      SCOPED_TRACE(f8::format("{} {}", to_string(type), kind));
      const CastCaseSource source{CastSource::kLayerNorm, Activation::kSilu, (kind & 1) != 0};
      QuantizerDesc desc{.rows = rows, .cols = cols, .recipe = recipe_of(recipe)};
      desc.dtype = type;
      desc.non_finite = (kind & 2) != 0 ? NonFinite::kSaturate : NonFinite::kPropagate;
      const auto plain = Quantizer::plan(context_, desc).value();
      source.set(desc);
      const auto fused = Quantizer::plan(context_, desc).value();
      Matrix x = random(rows, cols, 5, type), by = other(source, rows, cols, type);
      for (size_t i = 0; i < 5; ++i) {
        x.values[i] = by.values[5 + i] = kSpecial[i];
        by.values[static_cast<size_t>(cols) + 10 + i] = kSpecial[i];
      }
      Buffer of_x(x, type), of_by(by, type), of_h(computed(source, x, by, type), type);
      Buffer expected(plain->tensor_bytes()), got(plain->tensor_bytes());
      Slots plain_slots, fused_slots;
      run(*plain,
          {.rows = rows, .x = {of_h.data()}, .tensor = {expected.data()}, .scales = plain_slots});
      QuantizeCall call{
          .rows = rows, .x = {of_x.data()}, .tensor = {got.data()}, .scales = fused_slots};
      set_other(source, of_by, 0, call);
      run(*fused, call);
      EXPECT_EQ(bytes(got), bytes(expected));
      EXPECT_EQ(plain_slots.most(), fused_slots.most());
    }
  }
}

// q in one call and qt, made again by the scale or the maxima of columns that it left, in another.
TEST_P(ComputedCastTest, IsCastAgain) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const CastCaseSource& of : kOfInputs) {
    const Matrix x = random(rows, cols, 5, Dtype::kBf16), by = other(of, rows, cols, Dtype::kBf16);
    Buffer of_x(x), of_by(by), of_h(computed(of, x, by, Dtype::kBf16));
    std::vector<std::vector<uint8_t>> made;
    for (const CastCaseSource& source : {CastCaseSource{CastSource::kPlain}, of}) {
      QuantizerDesc desc{.rows = rows, .cols = cols, .recipe = recipe_of(recipe)};
      source.set(desc);
      desc.qt = false;
      desc.scale_apart = true;
      const auto first = Quantizer::plan(context_, desc).value();
      std::swap(desc.q, desc.qt);
      desc.scale_apart = false;
      desc.recast = true;
      const auto again = Quantizer::plan(context_, desc).value();
      const bool plain = source.source == CastSource::kPlain;
      const size_t apart = first->transposed_bytes();
      Buffer q(first->tensor_bytes() - apart), kept(apart + 16);
      Buffer qt(again->tensor_bytes());
      Slots slots;
      QuantizeCall call{.rows = rows,
                        .x = {plain ? of_h.data() : of_x.data()},
                        .tensor = {q.data()},
                        .transposed = {kept.data()},
                        .step = &kFirstOfSteps,
                        .scales = slots};
      if (!plain) set_other(of, of_by, 0, call);
      run(*first, call);
      const float8_tensor view = first->view(q.data(), kept.data(), rows).value();
      call.x.fp8 = &view;
      call.tensor = {qt.data()};
      call.transposed = {};
      const size_t before = cuda_.launches.size();
      run(*again, call);
      const bool keeps_columns = recipe == "rowwise" && !plain && !of.is_norm();
      if (keeps_columns) {
        EXPECT_GE(apart, static_cast<size_t>(cols) * sizeof(float));
        EXPECT_EQ(view.qt, nullptr);
      }
      if (keeps_columns || recipe == "tensorwise") {  // it finds no maxima
        EXPECT_EQ(cuda_.launches.size() - before, 1U);
      }
      for (Buffer* buffer : {&q, &qt}) made.push_back(bytes(*buffer));
    }
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(made[i], made[i + 2]) << of.name() << i;
  }
}

// The words and the copies are those of a quantizer over ranks of what is computed, whose words others may
// raise: where ranks have other columns, each computes its own.
TEST_P(ComputedCastTest, IsTheCastOverRanks) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  constexpr std::pair<CastSource, Activation> kSources[] = {
      {CastSource::kGlu, Activation::kSilu},
      {CastSource::kActivation, Activation::kGelu},
      {CastSource::kActivationBackward, Activation::kRelu2},
      {CastSource::kGluBackward, Activation::kSilu}};
  for (const auto& [source, activation] : kSources) {
    SCOPED_TRACE(name_of(source));
    const bool both = source == CastSource::kGluBackward;
    const bool backward = both || source == CastSource::kActivationBackward;
    QuantizerDesc desc{.operand = backward ? Tensor::kGradOutput : Tensor::kInput,
                       .rows = rows + 3,
                       .cols = cols,
                       .recipe = recipe_of(recipe)};
    desc.over_ranks = true;
    const auto planned = Quantizer::plan(context_, desc);
    CastCaseSource{source, activation}.set(desc);
    if (!planned) {  // delayed scaling, and blocks of rows that shards cut
      EXPECT_EQ(Quantizer::plan(context_, desc).error().code, planned.error().code);
      continue;
    }
    const auto& plain = planned.value();
    const auto fused = Quantizer::plan(context_, desc).value();
    ASSERT_EQ(fused->amax_words(), plain->amax_words());
    ASSERT_EQ(fused->row_amax_words(), plain->row_amax_words());
    const Matrix x = random(rows, cols, 5, desc.dtype), up = random(rows, cols, 6, desc.dtype);
    const Matrix grad = random(rows, cols, 7, desc.dtype);
    Matrix of[2] = {x, x};
    for (size_t i = 0; i < x.values.size(); ++i) {
      const float a = x.values[i], b = up.values[i], g = grad.values[i];
      const auto gradients = emulation::glu_backward(activation, a, b, g, desc.dtype);
      of[0].values[i] = both       ? gradients.gate
                        : backward ? emulation::activation_backward(activation, a, g, desc.dtype)
                        : source == CastSource::kGlu
                            ? emulation::glu(activation, a, b, desc.dtype)
                            : emulation::activated(activation, a, desc.dtype).value;
      of[1].values[i] = gradients.up;
    }
    Buffer of_x(x, desc.dtype, gap), of_up(up, desc.dtype, gap), of_grad(grad, desc.dtype, gap);
    Buffer workspace(std::max<size_t>(fused->workspace_bytes(), 16));
    const int64_t ld = gap == 0 ? 0 : cols + gap;
    std::vector<uint32_t> amax[2], row_amax[2];
    Buffer got[2] = {Buffer(plain->tensor_bytes()), Buffer(plain->tensor_bytes())};
    const auto words_of = [](std::vector<uint32_t>& words) {
      return words.empty() ? nullptr : words.data();
    };
    for (int i = 0; i < 2; ++i) {
      amax[i].assign(static_cast<size_t>(plain->amax_words()), 7);
      row_amax[i].assign(static_cast<size_t>(plain->row_amax_words()), 7);
    }
    QuantizeCall call{.rows = rows,
                      .x = {of_x.data(), ld},
                      .tensor = {got[0].data()},
                      .amax = words_of(amax[0]),
                      .row_amax = words_of(row_amax[0])};
    if (both || source == CastSource::kGlu) call.up = {of_up.data(), ld};
    if (backward) call.grad = {of_grad.data(), ld};
    if (both) {
      call.up_tensor.data = got[1].data();
      call.up_amax = words_of(amax[1]);
      call.up_row_amax = words_of(row_amax[1]);
    }
    call = with_workspace(call, workspace.data());
    ASSERT_TRUE(fused->find_amax(call, nullptr));
    for (int i = 0; i < (both ? 2 : 1); ++i) {
      Buffer h(reference::rounded_to(of[i], desc.dtype), desc.dtype), want(plain->tensor_bytes());
      auto own = amax[i], own_rows = row_amax[i];
      QuantizeCall of_h{.rows = rows,
                        .x = {h.data()},
                        .tensor = {want.data()},
                        .amax = words_of(own),
                        .row_amax = words_of(own_rows)};
      ASSERT_TRUE(plain->find_amax(of_h, nullptr));
      EXPECT_EQ(own, amax[i]);
      EXPECT_EQ(own_rows, row_amax[i]);
      // Another rank has larger values.
      for (auto* words : {&amax[i], &row_amax[i], &own, &own_rows}) {
        for (size_t w = 0; w < words->size(); w += 2) (*words)[w] += 3U << 23;
      }
      run(*plain, of_h);
      ASSERT_TRUE(fused->run(call, nullptr));
      EXPECT_EQ(bytes(got[i]), bytes(want)) << i;
    }
    EXPECT_TRUE(cuda_.faults.empty());
    EXPECT_TRUE(workspace.guard_is_whole());
  }
}

}  // namespace
}  // namespace f8::runtime
