// Delayed scaling of experts' weights that are cast apart from their calls, through the public headers on an
// emulated device: steps have the bits of calls that cast w themselves, on one rank and on several.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace delayed_expert_weights_test {
namespace {

using float8::Context;
using float8::ExpertQuantizeArgs;
using float8::ExpertQuantizer;
using float8::ExpertQuantizerDesc;
using float8::Experts;
using float8::ExpertsDesc;
using float8::ExpertsForwardArgs;
using float8::GroupLayout;
using float8::Recipe;
using float8::Scales;
using float8::ScaleSlots;
using float8::Tensor;
using float8::testing::memory;
using float8::testing::Memory;
using float8::testing::random_bf16;
using float8::testing::says;

constexpr int64_t kM = 70, kN = 64, kK = 80;
constexpr int32_t kExperts = 3;
constexpr int64_t kBytesOfExpert = kN * kK * 2;

template <class T = uint8_t>
T* at(const Memory& of, size_t offset = 0) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(of.get()) + offset);
}
std::string text_of(const Memory& of, size_t bytes) {
  return {at<char>(of), bytes};
}

// Rows [first, first + rows) of each of `count` experts from the expert `begin` on.
Memory part_of(const Memory& w, int32_t begin, int32_t count, int64_t first, int64_t rows) {
  const auto bytes = static_cast<size_t>(rows * kK * 2);
  Memory out = memory(static_cast<size_t>(count) * bytes);
  for (int32_t e = 0; e < count; ++e) {
    std::copy_n(at(w, static_cast<size_t>((begin + e) * kBytesOfExpert + first * kK * 2)), bytes,
                at(out, static_cast<size_t>(e) * bytes));
  }
  return out;
}

// The casts of weights, and their copies.
struct Casts {
  ExpertQuantizer quantizer;
  Memory tensor, transposed, scratch;

  Casts(const Context& context, const ExpertQuantizerDesc& desc)
      : quantizer(ExpertQuantizer::plan(context, desc).value()),
        tensor(memory(quantizer.tensor_bytes())),
        transposed(memory(quantizer.transposed_bytes())),
        scratch(memory(quantizer.workspace_bytes())) {}
  [[nodiscard]] ExpertQuantizeArgs args(const Memory& w, const ScaleSlots& slots,
                                        const float8_step* step) const {
    return {.w = {w.get()},
            .tensor = {tensor.get()},
            .transposed = {transposed.get()},
            .workspace = {scratch.get()},
            .step = step,
            .scales = slots};
  }
  [[nodiscard]] Tensor view() const { return quantizer.view(tensor.get(), transposed.get()); }
  [[nodiscard]] std::string copies() const {
    return text_of(tensor, quantizer.tensor_bytes()) +
           text_of(transposed, quantizer.transposed_bytes());
  }
};

class DelayedExpertWeights : public ::testing::Test {
 protected:
  // A scale state of the expert linear alone.
  struct State {
    explicit State(const DelayedExpertWeights& test)
        : scales(Scales::plan(test.context_, {}, {.experts = {test.experts_.get()}}).value()),
          words(memory(scales.bytes())) {
      EXPECT_TRUE(scales.init(words.get(), nullptr));
      slots = scales.slots(words.get(), 0).value();
    }
    [[nodiscard]] std::string bytes() const { return text_of(words, scales.bytes()); }
    [[nodiscard]] uint32_t amax_of_weight() const {
      return static_cast<uint32_t*>(slots.opaque[0])[1];
    }
    void sync() const { EXPECT_TRUE(scales.sync(words.get(), nullptr, nullptr)); }

    Scales scales;
    Memory words;
    ScaleSlots slots = {};
  };

  void SetUp() override {
    const std::vector<int32_t> offsets = {40, 40, 65};
    ASSERT_TRUE(layouts_.run({.offsets = offsets.data(), .layout = {layout_.get()}}, nullptr));
  }
  static ExpertsDesc of_experts(const Recipe& recipe) {
    ExpertsDesc out{.m_max = kM, .n = kN, .k = kK, .experts = kExperts, .recipe = recipe};
    out.recompute_weight = true;
    return out;
  }
  static ExpertQuantizerDesc of_casts(int64_t n = kN, int32_t experts = kExperts) {
    return {.n = n, .k = kK, .experts = experts, .recipe = Recipe::delayed()};
  }
  // Runs a step with w as it is, or in fp8, and returns its results and the state before and behind the sync.
  std::string step(const float8_matrix& w, const State& state, const float8_step* how) {
    const Memory y = memory(kM * kN * 2), dx = memory(kM * kK * 2);
    const Memory dw = memory(kExperts * kBytesOfExpert);
    const Memory saved = memory(experts_.saved_bytes()),
                 workspace = memory(experts_.workspace_bytes());
    EXPECT_TRUE(experts_.forward({.x = {x_.get()},
                                  .w = w,
                                  .y = {y.get()},
                                  .layout = {layout_.get()},
                                  .saved = {saved.get()},
                                  .workspace = {workspace.get()},
                                  .step = how,
                                  .scales = state.slots},
                                 nullptr))
        << float8_last_error();
    EXPECT_TRUE(experts_.backward({.dy = {dy_.get()},
                                   .dx = {dx.get()},
                                   .dw = {dw.get()},
                                   .layout = {layout_.get()},
                                   .saved = {saved.get()},
                                   .workspace = {workspace.get()},
                                   .w = w,
                                   .step = how,
                                   .scales = state.slots},
                                  nullptr))
        << float8_last_error();
    std::string out = text_of(y, kM * kN * 2) + text_of(dx, kM * kK * 2);
    out += text_of(dw, kExperts * kBytesOfExpert) + state.bytes();
    state.sync();
    return out + state.bytes();
  }

  Context context_ = float8::testing::emulated();
  Experts experts_ = Experts::plan(context_, of_experts(Recipe::delayed())).value();
  GroupLayout layouts_ = GroupLayout::plan(context_, {.m_max = kM, .experts = kExperts}).value();
  Memory layout_ = memory(layouts_.bytes());
  Memory x_ = random_bf16(kM * kK, 1), dy_ = random_bf16(kM * kN, 3);
};

// w is one tensor, two that have half of each expert's rows, or that of the only rank. One step's is not finite.
TEST_F(DelayedExpertWeights, StepsHaveTheBitsOfCallsThatCast) {
  std::vector<Memory> weights;
  for (const unsigned seed : {2U, 4U, 5U, 6U})
    weights.push_back(random_bf16(kExperts * kN * kK, seed));
  at<uint16_t>(weights[2])[kN * kK + 7] = 0x7fff;  // a NaN
  ExpertQuantizerDesc two = of_casts(), over = of_casts();
  two.two_tensors = over.over_ranks = true;
  const State own(*this);
  std::vector<std::string> expected;
  for (size_t i = 0; i < weights.size(); ++i) {
    expected.push_back(step({weights[i].get()}, own, first_step_if(i == 0)));
  }
  for (const ExpertQuantizerDesc& desc : {of_casts(), two, over}) {
    SCOPED_TRACE(desc.two_tensors ? "two tensors" : desc.over_ranks ? "over ranks" : "one tensor");
    const State state(*this);
    const Casts casts(context_, desc);
    for (size_t i = 0; i < weights.size(); ++i) {
      const Memory halves[] = {part_of(weights[i], 0, kExperts, 0, kN / 2),
                               part_of(weights[i], 0, kExperts, kN / 2, kN / 2)};
      ExpertQuantizeArgs args =
          casts.args(desc.two_tensors ? halves[0] : weights[i], state.slots, first_step_if(i == 0));
      if (desc.two_tensors) args.second_w = {halves[1].get()};
      uint32_t amax = 0;
      if (desc.over_ranks && i == 0) {
        args.amax = &amax;
        ASSERT_TRUE(casts.quantizer.find_amax(args, nullptr)) << float8_last_error();
      }
      ASSERT_TRUE(casts.quantizer.run(args, nullptr)) << float8_last_error();
      const Tensor view = casts.view();
      EXPECT_EQ(step({.fp8 = &view}, state, first_step_if(i == 0)), expected[i]) << "step " << i;
    }
  }
}

// Ranks have 24 and 40 rows of each expert, or two experts and one of them.
TEST_F(DelayedExpertWeights, RanksCastTheirPartsToTheBitsOfTheWhole) {
  struct Part {
    int32_t begin, count;
    int64_t first, rows;
  };
  const Memory w = random_bf16(kExperts * kN * kK, 2);
  const State state(*this);
  const Casts whole(context_, of_casts());
  ASSERT_TRUE(whole.quantizer.run(whole.args(w, state.slots, &kFirstOfSteps), nullptr));
  for (const std::vector<Part>& parts :
       {std::vector<Part>{{0, kExperts, 0, 24}, {0, kExperts, 24, 40}},
        {{0, 2, 0, kN}, {2, 1, 0, kN}}}) {
    std::vector<Casts> casts;
    std::vector<Memory> shards;
    std::vector<uint32_t> amax;
    for (const Part& p : parts) {
      ExpertQuantizerDesc desc = of_casts(p.rows, p.count);
      desc.over_ranks = true;
      const Casts& own = casts.emplace_back(context_, desc);
      ASSERT_EQ(own.quantizer.amax_words(), 1U);
      shards.push_back(part_of(w, p.begin, p.count, p.first, p.rows));
      ASSERT_TRUE(own.quantizer.find_amax(
          {.w = {shards.back().get()}, .amax = &amax.emplace_back()}, nullptr))
          << float8_last_error();
    }
    uint32_t most = std::max(amax[0], amax[1]), recorded = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& p = parts[i];
      const Casts& own = casts[i];
      const State of_rank(*this);
      ExpertQuantizeArgs args = own.args(shards[i], of_rank.slots, &kFirstOfSteps);
      args.amax = &most;
      ASSERT_TRUE(own.quantizer.run(args, nullptr)) << float8_last_error();
      EXPECT_EQ(of_rank.amax_of_weight(), amax[i]);  // the state's sync reduces it
      recorded = std::max(recorded, of_rank.amax_of_weight());
      const Tensor part = own.view(), all = whole.view();
      EXPECT_EQ(*part.q_inverse_scale, *all.q_inverse_scale);
      for (int32_t e = 0; e < p.count; ++e) {
        const auto* const q =
            static_cast<const uint8_t*>(all.q) + ((p.begin + e) * kN + p.first) * all.ld_q;
        EXPECT_TRUE(std::equal(q, q + p.rows * all.ld_q,
                               static_cast<const uint8_t*>(part.q) + e * p.rows * part.ld_q))
            << e;
        for (int64_t k = 0; k < kK; ++k) {
          const auto* const line =
              static_cast<const uint8_t*>(all.qt) + ((p.begin + e) * kK + k) * all.ld_qt + p.first;
          EXPECT_TRUE(std::equal(line, line + p.rows,
                                 static_cast<const uint8_t*>(part.qt) + (e * kK + k) * part.ld_qt))
              << e << ", " << k;
        }
      }
    }
    EXPECT_EQ(recorded, state.amax_of_weight());
  }
}

// An evaluation records nothing, and so does a cast that its flag leaves out.
TEST_F(DelayedExpertWeights, EvaluationsRecordNothing) {
  const Memory w = random_bf16(kExperts * kN * kK, 2);
  const State state(*this);
  const Casts casts(context_, of_casts());
  float8_step first = kEvaluation;
  first.first_step = 1;
  first.ranks = reinterpret_cast<float8_nccl_comm>(w.get());
  ASSERT_TRUE(casts.quantizer.run(casts.args(w, state.slots, &first), nullptr))
      << float8_last_error();
  EXPECT_EQ(state.amax_of_weight(), 0U);
  const std::string evaluated = casts.copies();
  ASSERT_TRUE(casts.quantizer.run(casts.args(w, state.slots, &kFirstOfSteps), nullptr));
  EXPECT_EQ(casts.copies(), evaluated);
  EXPECT_NE(state.amax_of_weight(), 0U);
  state.sync();
  ExpertQuantizerDesc guarded = of_casts();
  guarded.noop_flag = true;
  const Casts flagged(context_, guarded);
  ExpertQuantizeArgs args = flagged.args(w, state.slots, nullptr);
  uint32_t flag = 1;
  args.noop_flag = &flag;
  ASSERT_TRUE(flagged.quantizer.run(args, nullptr)) << float8_last_error();
  EXPECT_EQ(state.amax_of_weight(), 0U);
  flag = 0;
  ASSERT_TRUE(flagged.quantizer.run(args, nullptr));
  EXPECT_NE(state.amax_of_weight(), 0U);
  EXPECT_EQ(flagged.copies(), evaluated);  // by the scale of the same amax
}

TEST_F(DelayedExpertWeights, RefusesCalls) {
  const Memory w = random_bf16(kExperts * kN * kK, 2);
  const State state(*this);
  ExpertQuantizerDesc over = of_casts();
  over.over_ranks = true;
  const Casts casts(context_, of_casts()), of_ranks(context_, over);
  const auto refuses = [](const Casts& by, const ExpertQuantizeArgs& args, float8_status code,
                          std::string_view words) {
    EXPECT_EQ(by.quantizer.run(args, nullptr).code(), code);
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  refuses(casts, casts.args(w, {}, &kFirstOfSteps), FLOAT8_INVALID_ARGUMENT,
          "float8_expert_quantize_args.scales is empty; recipe delayed has delayed scaling");
  refuses(casts, casts.args(w, state.slots, nullptr), FLOAT8_INVALID_ARGUMENT,
          "first_step is 0, the scale state was initialised");
  float8_step ranks = kFirstOfSteps;
  ranks.ranks = reinterpret_cast<float8_nccl_comm>(w.get());
  refuses(casts, casts.args(w, state.slots, &ranks), FLOAT8_UNSUPPORTED,
          "float8_step.ranks is given in a first step");
  ExpertQuantizeArgs args = casts.args(w, state.slots, &kFirstOfSteps);
  args.workspace = {};
  refuses(casts, args, FLOAT8_INVALID_ARGUMENT, "workspace.data is NULL");
  refuses(of_ranks, of_ranks.args(w, state.slots, &kFirstOfSteps), FLOAT8_INVALID_ARGUMENT,
          "amax is NULL");
}

// The copies of dynamic scaling have a scale for each expert, and those of delayed scaling one for all.
TEST_F(DelayedExpertWeights, CallsRefuseCopiesOfAnotherScaling) {
  const Memory w = random_bf16(kExperts * kN * kK, 2);
  const State state(*this);
  const auto tensorwise = Experts::plan(context_, of_experts(Recipe::tensorwise())).value();
  ExpertQuantizerDesc dynamic = of_casts();
  dynamic.recipe = Recipe::tensorwise();
  const Casts one(context_, of_casts()), each(context_, dynamic);
  const Memory y = memory(kM * kN * 2), workspace = memory(1 << 20);
  for (const bool delayed : {false, true}) {
    const Tensor view = (delayed ? each : one).view();
    const ExpertsForwardArgs args{.x = {x_.get()},
                                  .w = {.fp8 = &view},
                                  .y = {y.get()},
                                  .layout = {layout_.get()},
                                  .workspace = {workspace.get()},
                                  .step = &kFirstOfSteps,
                                  .scales = state.slots};
    EXPECT_EQ((delayed ? experts_ : tensorwise).forward(args, nullptr).code(),
              FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(delayed ? "q_setting has dynamic scaling; recipe delayed has delayed"
                             : "q_setting has delayed scaling; recipe tensorwise has dynamic"))
        << float8_last_error();
  }
}

}  // namespace
}  // namespace delayed_expert_weights_test
