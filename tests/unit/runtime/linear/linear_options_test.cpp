// What a linear does beside its GEMMs when it is asked to: the gradient of the bias, holding
// scales where a tensor is not finite, counting, and leaving out casts of a weight that is cast.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/linear/plan/kernels.hpp"
#include "runtime/lists/quantizer_list.hpp"
#include "tests/unit/runtime/count_allocations.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::describe;
using testing::FakeCublasLt;
using testing::FakeCuda;
using testing::Fixture;
using testing::Fp8Weight;
using testing::says;

class LinearOptions : public ::testing::TestWithParam<const char*> {
 protected:
  void run(Fixture& s, CastCounters* counters = nullptr) {
    ForwardCall forward = s.forward();
    forward.counters = counters;
    BackwardCall backward = s.backward();
    backward.counters = counters;
    run(s, forward, backward);
  }
  void run(Fixture& s, const ForwardCall& forward, const BackwardCall& backward) {
    const auto y = s.linear->forward(forward, nullptr);
    ASSERT_TRUE(y) << y.error().message;
    std::memset(s.workspace.data(), testing::kPoison, s.linear->workspace_bytes());
    const auto gradients = s.linear->backward(backward, nullptr);
    ASSERT_TRUE(gradients) << gradients.error().message;
    EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
    EXPECT_TRUE(s.guards_are_whole());
  }
  static std::vector<uint8_t> bits(Buffer& buffer) {
    return {buffer.data(), buffer.data() + buffer.bytes()};
  }
  static std::vector<std::vector<uint8_t>> results(Fixture& s) {
    return {bits(s.y), bits(s.dx), bits(s.dw)};
  }
  FakeCuda cuda_;
  FakeCublasLt library_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearOptions,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise"));

void expect_refused(const Status& status, std::string_view part) {
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
  EXPECT_TRUE(says(status.error(), part)) << status.error().message;
}

// --- the gradient of the bias

std::vector<float> values(Buffer& buffer, Dtype type) {
  std::vector<float> out;
  for (size_t i = 0; i < buffer.bytes() / size_bytes(type); ++i) {
    out.push_back(load_element(buffer.data(), static_cast<int64_t>(i), type));
  }
  return out;
}

// The sums of the reference, to the bit: fused into the casts of dy or not (a dy that is quantized
// in one launch is read again), for each gradient that goes along, and none.
TEST_P(LinearOptions, BiasGradientsAreTheReferencesBits) {
  for (const bool one_launch : {true, false}) {
    cuda_.cooperative = one_launch;
    for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      for (const bool recompute : {false, true}) {
        SCOPED_TRACE(f8::format("{} {} {}", one_launch, to_string(type), recompute));
        LinearDesc desc = describe(GetParam(), {1200, 48, 16});
        desc.tensor_dtype = desc.grad_weight_dtype = desc.bias_grad_dtype = type;
        Fixture plain(cuda_, desc, 1170);
        run(plain);
        desc.bias_grad = true;
        desc.recompute = recompute;
        Fixture s(cuda_, desc, 1170, 1, 8);
        Buffer db(48 * size_bytes(type));
        cuda_.launches.clear();
        auto expected = reference::column_sums(s.dym);
        for (float& value : expected) value = round_element(value, type);
        for (const auto& [dx, dw] :
             {std::pair{true, true}, {true, false}, {false, true}, {false, false}}) {
          BackwardCall call = s.backward();
          call.db.data = db.data();
          if (!dx) call.dx.data = nullptr;
          if (!dw) call.dw.data = nullptr;
          std::memset(db.data(), testing::kPoison, db.bytes());
          run(s, s.forward(), call);
          EXPECT_EQ(values(db, type), expected) << dx << dw;
          EXPECT_TRUE(db.guard_is_whole());
        }
        EXPECT_EQ(s.values_dx(), plain.values_dx());
        EXPECT_EQ(s.values_dw(), plain.values_dw());
        const bool fused = std::any_of(
            cuda_.launches.begin(), cuda_.launches.end(),
            [](const auto& one) { return one.kernel.find("/sums") != std::string_view::npos; });
        // A dy that one launch quantizes is read again; rows alone are scaled by one launch on every
        // device.
        const std::string_view recipe = GetParam();
        const bool at_once = one_launch || recipe == "rowwise_with_gw_hp";
        const bool quantized = at_once && recipe != "blockwise" && type != Dtype::kF32;
        EXPECT_EQ(fused, !quantized);
        if (type != Dtype::kBf16) break;
      }
    }
  }
}

TEST_P(LinearOptions, BiasGradientsAddUp) {
  LinearDesc desc = describe(GetParam(), {300, 48, 144});
  desc.bias_grad = true;
  desc.bias_grad_dtype = Dtype::kF32;
  Fixture s(cuda_, desc, 300);
  Buffer db(48 * 4);
  BackwardCall call = s.backward();
  call.db.data = db.data();
  run(s, s.forward(), call);
  const auto once = values(db, Dtype::kF32);
  call.db.accumulate = true;
  run(s, s.forward(), call);
  const auto twice = values(db, Dtype::kF32);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_EQ(twice[i], once[i] + once[i]);

  // An empty batch adds nothing, or zeroes.
  ASSERT_TRUE(s.linear->backward({.m = 0, .db = {.data = db.data(), .accumulate = true}}, nullptr));
  EXPECT_EQ(values(db, Dtype::kF32), twice);
  ASSERT_TRUE(s.linear->backward({.m = 0, .db = {db.data()}}, nullptr));
  EXPECT_EQ(values(db, Dtype::kF32), std::vector<float>(48));
  EXPECT_TRUE(s.dw.bytes() > 0 && db.guard_is_whole());
}

TEST_P(LinearOptions, ABiasGradientNeedsAPlan) {
  Fixture s(cuda_, describe(GetParam(), {64, 48, 80}), 64);
  Buffer db(48 * 2);
  BackwardCall call = s.backward();
  call.db.data = db.data();
  expect_refused(s.linear->backward(call, nullptr), "float8_linear_desc.bias_grad");
  LinearDesc desc = describe(GetParam(), {64, 48, 80});
  desc.bias_grad = true;
  Fixture with(cuda_, desc, 64);
  call = with.backward();
  call.db.data = db.data() + 2;
  expect_refused(with.linear->backward(with_workspace(call, with.workspace.data()), nullptr),
                 "db is not aligned");
  desc.bias_grad_dtype = Dtype::kE4m3;
  EXPECT_FALSE(Linear::plan(cuda_.context(), desc));
}

// --- what is not finite

void put(Fixture& s, Buffer& buffer, reference::Matrix& matrix, int64_t r, int64_t c, float value) {
  const int64_t at = r * matrix.cols + c;
  store_element(buffer.data(), at, value, s.type);
  matrix.values[static_cast<size_t>(at)] = load_element(buffer.data(), at, s.type);
}

// With `hold` an infinity costs its own precision alone: every result is finite and the
// reference's; with `propagate` it is NaN somewhere.
TEST_P(LinearOptions, HoldingKeepsResultsFinite) {
  LinearDesc desc = describe(GetParam(), {70, 48, 144});
  for (const NonFinite policy : {NonFinite::kSaturate, NonFinite::kPropagate}) {
    for (const bool one_launch : {true, false}) {
      cuda_.cooperative = one_launch;
      desc.non_finite = policy;
      Fixture s(cuda_, desc, 70);
      put(s, s.x, s.xm, 3, 5, std::numeric_limits<float>::infinity());
      put(s, s.w, s.wm, 7, 9, -std::numeric_limits<float>::infinity());
      put(s, s.dy, s.dym, 11, 2, std::numeric_limits<float>::infinity());
      run(s);
      const auto expected = reference::linear(desc.recipe, s.xm, s.wm, s.dym, {}, policy).value();
      const auto check = [&](Gemm gemm, const std::vector<double>& want,
                             const std::vector<double>& got) {
        if (!desc.recipe.at(gemm).is_fp8()) return;
        const bool finite = std::ranges::all_of(got, [](double v) { return std::isfinite(v); });
        EXPECT_EQ(finite, policy == NonFinite::kSaturate) << to_string(gemm);
        if (finite) {
          EXPECT_LT(reference::relative_error(want, got), 2.5e-3) << to_string(gemm);
        }
      };
      check(Gemm::kOutput, expected.y, s.y.bf16());
      check(Gemm::kGradInput, expected.dx, s.dx.bf16());
      check(Gemm::kGradWeight, expected.dw, s.dw.bf16());
    }
  }
}

TEST_P(LinearOptions, HoldingChangesNothingThatIsFinite) {
  LinearDesc desc = describe(GetParam(), {70, 48, 144});
  Fixture propagating(cuda_, desc, 70);
  run(propagating);
  desc.non_finite = NonFinite::kSaturate;
  Fixture holding(cuda_, desc, 70);
  run(holding);
  EXPECT_EQ(results(holding), results(propagating));
}

// --- counters

// Against the reference's copies, with values that saturate (a held scale), are flushed, and are
// not finite; the results are the bits of a plan that does not count.
TEST_P(LinearOptions, CountersAreTheReferences) {
  LinearDesc desc = describe(GetParam(), {150, 48, 144});
  desc.non_finite = NonFinite::kSaturate;
  const auto spoil = [&](Fixture& s) {
    for (int64_t r = 0; r < 40; ++r) {
      for (int64_t c = 0; c < 16; ++c) {
        const float value = c == 0 ? 4096.0F : std::ldexp(1.0F, -static_cast<int>(c) * 2);
        put(s, s.x, s.xm, r, c, value);
        put(s, s.w, s.wm, r, c, -value);
        put(s, s.dy, s.dym, r, c, value * 64);
      }
    }
    put(s, s.x, s.xm, 3, 5, std::numeric_limits<float>::infinity());
    put(s, s.dy, s.dym, 3, 5, std::numeric_limits<float>::quiet_NaN());
    put(s, s.w, s.wm, 41, 5, -std::numeric_limits<float>::infinity());
  };
  Fixture plain(cuda_, desc, 150);
  spoil(plain);
  run(plain);
  desc.count = true;
  Fixture s(cuda_, desc, 150);
  spoil(s);
  std::array<CastCounters, kCountersOfLinear> counters{};
  ASSERT_TRUE(clear_counters(*s.context, counters.data(), counters.size(), nullptr));
  run(s, counters.data());
  EXPECT_EQ(results(s), results(plain));

  std::array<CastCounters, kCountersOfLinear> seen{};
  ASSERT_TRUE(
      snapshot_counters(*s.context, counters.data(), counters.size(), seen.data(), nullptr));
  const auto kernels = linear_kernels(desc).value();
  bool saturated = false;
  bool flushed = false;
  for (size_t i = 0; i < kCountersOfLinear; ++i) {
    SCOPED_TRACE(kCounterNames[i]);
    const Copies& copies = kernels.copies[i / 2];
    const auto& setting = i % 2 == 0 ? copies.q : copies.qt;
    const reference::Matrix& tensor = i / 2 == 0 ? s.xm : i / 2 == 1 ? s.wm : s.dym;
    const CastCounters& c = seen[i];
    if (!setting) {
      EXPECT_EQ(c.elements, 0U);
      continue;
    }
    const auto matrix = i % 2 == 0 ? tensor : reference::transpose(tensor);
    constexpr reference::AmaxOver kOver[] = {
        reference::AmaxOver::kTensor, reference::AmaxOver::kRow, reference::AmaxOver::kBlock1x128,
        reference::AmaxOver::kBlock128x128};
    const auto copy = reference::cast(matrix, kOver[static_cast<size_t>(setting->granularity)],
                                      setting->dtype, setting->pow2, NonFinite::kSaturate);
    const auto expected = reference::count_cast(matrix, copy);
    EXPECT_EQ(c.elements, matrix.values.size());
    EXPECT_EQ(c.saturated, expected.saturated);
    EXPECT_EQ(c.flushed, expected.flushed);
    EXPECT_EQ(c.non_finite, 1U);
    EXPECT_EQ(
        std::bit_cast<uint32_t>(c.amax),
        std::bit_cast<uint32_t>(reference::amax(tensor, reference::AmaxOver::kTensor).front()));
    EXPECT_EQ(c.scale, setting->granularity == Granularity::kTensor ? 1.0F : 0.0F);
    saturated |= c.saturated > 0;
    flushed |= c.flushed > 0;
  }
  EXPECT_TRUE(saturated && flushed) << "the data shows something";

  // They add up, until they are cleared.
  run(s, counters.data());
  for (size_t i = 0; i < kCountersOfLinear; ++i) {
    EXPECT_EQ(counters[i].saturated, 2 * seen[i].saturated);
    EXPECT_EQ(counters[i].elements, 2 * seen[i].elements);
  }
  // Without any, the plan still runs.
  run(s);
  EXPECT_EQ(counters[0].elements, 2 * seen[0].elements);
  ASSERT_TRUE(clear_counters(*s.context, counters.data(), counters.size(), nullptr));
  EXPECT_EQ(counters[0].elements, 0U);
}

TEST_P(LinearOptions, CountersNeedAPlanThatCounts) {
  Fixture s(cuda_, describe(GetParam(), {64, 48, 80}), 64);
  CastCounters counters[kCountersOfLinear] = {};
  ForwardCall call = s.forward();
  call.counters = counters;
  expect_refused(s.linear->forward(call, nullptr), "float8_linear_desc.count");
  LinearDesc desc = describe(GetParam(), {64, 48, 80});
  desc.count = true;
  Fixture counting(cuda_, desc, 64);
  call = counting.forward();
  call.counters =
      reinterpret_cast<CastCounters*>(reinterpret_cast<uint8_t*>(counters) + 4);  // aligned to 4
  expect_refused(counting.linear->forward(with_workspace(call, counting.workspace.data()), nullptr),
                 "8 bytes");
}

TEST(Counters, AreALineEach) {
  CastCounters counters[kCountersOfLinear] = {};
  counters[0] = {
      .amax = 3.5F, .scale = 128, .elements = 1000, .saturated = 0, .flushed = 12, .non_finite = 1};
  counters[5] = {
      .amax = 2.0F, .scale = 0, .elements = 8, .saturated = 8, .flushed = 0, .non_finite = 0};
  EXPECT_EQ(format_counters("layer.0", counters),
            "layer.0 x: amax 3.5 scale 128 saturated 0 flushed 12 (1.2%) non-finite 1 (0.1%) of "
            "1000\n"
            "layer.0 dy^T: amax 2 saturated 8 (1e+02%) flushed 0 non-finite 0 of 8\n");
  FakeCuda cuda;
  const auto context = cuda.context();
  expect_refused(clear_counters(*context, nullptr, 6, nullptr), "counters is NULL");
  expect_refused(snapshot_counters(*context, counters, 6, nullptr, nullptr), "to is NULL");
}

// --- the flag of a weight

TEST_P(LinearOptions, AValidWeightIsNotCastAgain) {
  for (const bool one_launch : {true, false}) {
    cuda_.cooperative = one_launch;
    Fixture s(cuda_, describe(GetParam(), {70, 48, 144}), 70);
    QuantizerDesc desc = weight_of(s.linear->desc());
    Fp8Weight plain(s, desc);
    desc.noop_flag = true;
    Fp8Weight kept(s, desc);
    for (Fp8Weight* of : {&plain, &kept}) std::memset(of->tensor.data(), 0, of->tensor.bytes());
    ASSERT_TRUE(plain.run());

    uint32_t noop_flag = 0xdeadbeef;  // whatever it is: not 1
    QuantizeCall call = kept.call();
    call.noop_flag = &noop_flag;
    ASSERT_TRUE(kept.run(call));
    EXPECT_EQ(noop_flag, 1U);
    EXPECT_EQ(bits(kept.tensor), bits(plain.tensor));

    // Valid: the copies stay as they are though the weight changed.
    put(s, s.w, s.wm, 0, 0, 4096);
    ASSERT_TRUE(kept.run(call));
    EXPECT_EQ(bits(kept.tensor), bits(plain.tensor));
    EXPECT_EQ(noop_flag, 1U);

    // Invalid, or without a flag: cast.
    ASSERT_TRUE(plain.run());
    for (const bool flag : {true, false}) {
      std::memset(kept.tensor.data(), 0, kept.tensor.bytes());
      noop_flag = 0;
      call.noop_flag = flag ? &noop_flag : nullptr;
      ASSERT_TRUE(kept.run(call));
      EXPECT_EQ(noop_flag, flag ? 1U : 0U);
      EXPECT_EQ(bits(kept.tensor), bits(plain.tensor));
    }
    EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }
}

TEST_P(LinearOptions, OneFlagForTheWeightsOfAModel) {
  Fixture s(cuda_, describe(GetParam(), {70, 48, 144}), 70);
  QuantizerDesc desc = weight_of(s.linear->desc());
  desc.noop_flag = true;
  Fp8Weight first(s, desc), second(s, desc);
  Buffer other(s.w.bytes());
  std::memcpy(other.data(), s.w.data(), s.w.bytes());
  for (Fp8Weight* of : {&first, &second}) std::memset(of->tensor.data(), 0, of->tensor.bytes());
  const std::shared_ptr<const Quantizer> quantizers[] = {first.quantizer, second.quantizer};
  const auto casts = QuantizerList::plan(s.context, quantizers);
  ASSERT_TRUE(casts) << casts.error().message;
  Buffer workspace(casts->workspace_bytes());
  std::memset(workspace.data(), 0, workspace.bytes());
  uint32_t noop_flag = 0;
  std::array calls{first.call(), second.call()};
  calls[1].x.data = other.data();
  for (QuantizeCall& call : calls) call.step = nullptr;  // the list's
  uint32_t* flag = &noop_flag;
  const auto run = [&] {
    return casts->run(listed(calls, workspace.data(), first_step_if(s.first_step), flag), nullptr);
  };
  ASSERT_TRUE(run()) << run().error().message;
  EXPECT_EQ(noop_flag, 1U);
  EXPECT_EQ(bits(second.tensor), bits(first.tensor));
  const auto before = bits(second.tensor);
  EXPECT_NE(before, std::vector<uint8_t>(second.tensor.bytes()));
  put(s, other, s.wm, 0, 0, 4096);
  ASSERT_TRUE(run());
  EXPECT_EQ(bits(second.tensor), before);
  noop_flag = 0;
  ASSERT_TRUE(run());
  EXPECT_NE(bits(second.tensor), before);
  EXPECT_EQ(bits(first.tensor), before);
  calls[1].rows = 0;
  expect_refused(run(), "tensors[1]: float8_quantize_args.rows is 0");
  calls[1].rows = calls[0].rows;
  calls[1].noop_flag = flag;
  expect_refused(run(), "tensors[1]: float8_quantize_args.noop_flag is given");
  calls[1].noop_flag = nullptr;
  flag = reinterpret_cast<uint32_t*>(second.tensor.data());
  expect_refused(run(), "overlap");
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

TEST_P(LinearOptions, AFlagIsAWord) {
  Fixture s(cuda_, describe(GetParam(), {64, 48, 80}), 64);
  QuantizerDesc desc = weight_of(s.linear->desc());
  desc.noop_flag = true;
  Fp8Weight weight(s, desc);
  uint32_t noop_flag[2] = {};
  QuantizeCall call = weight.call();
  call.noop_flag = reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(noop_flag) + 2);
  expect_refused(weight.run(call), "4 bytes");
}

// --- all of it

TEST_P(LinearOptions, EverythingAtOnceDoesNotAllocate) {
  LinearDesc desc = describe(GetParam(), {64, 48, 80});
  desc.bias_grad = desc.count = desc.recompute = true;
  desc.non_finite = NonFinite::kSaturate;
  Fixture s(cuda_, desc, 64);
  QuantizerDesc of_weight = weight_of(desc);
  of_weight.noop_flag = true;
  Fp8Weight kept(s, of_weight);
  CastCounters counters[kCountersOfLinear] = {};
  Buffer db(48 * 2);
  uint32_t noop_flag = 0;
  ForwardCall forward = s.forward();
  BackwardCall backward = s.backward();
  QuantizeCall weight = kept.call();
  forward.counters = backward.counters = weight.counters = counters;
  forward.w.fp8 = backward.w.fp8 = &kept.view;
  backward.db.data = db.data();
  weight.noop_flag = &noop_flag;
  cuda_.emulate = false;
  bool good = false;
  int allocations = 0;
  {
    const testing::CountAllocations counting;
    good = kept.run(weight).has_value() && s.linear->forward(forward, nullptr).has_value() &&
           s.linear->backward(backward, nullptr).has_value();
    allocations = counting.count();
  }
  EXPECT_TRUE(good);
  EXPECT_EQ(allocations, 0);
}

}  // namespace
}  // namespace f8::runtime
