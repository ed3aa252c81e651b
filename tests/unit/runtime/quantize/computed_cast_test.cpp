// The casts of activations, of gated ones, of their gradients and of what an RMSNorm makes of x, on an emulated
// device: the bits of casts of these, which are close to fp64.
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/emulation/activations.hpp"
#include "runtime/lists/quantizer_list.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using reference::Matrix;
using testing::Buffer;
using testing::bytes;
using testing::FakeCuda;
using testing::says;

using kernels::Activation;
constexpr Activation kActivations[] = {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                       Activation::kRelu2};

// An activation and its slope in fp64, and the largest term of which the slope is a sum: next to its zero the
// terms cancel.
struct Exact {
  double value, slope, term;
};
Exact exact(Activation activation, float of) {
  const double x = static_cast<double>(of);
  const auto sigmoid_of = [x](double z, double grown) {
    const double sigmoid = 1 / (1 + std::exp(-z));
    const double rest = grown / (1 + std::exp(z));
    return Exact{x * sigmoid, sigmoid * (1 + rest), sigmoid * (1 + std::abs(rest))};
  };
  switch (activation) {
    case Activation::kSilu:
      return sigmoid_of(x, x);
    case Activation::kGelu: {
      const double normal = std::erfc(-x / std::sqrt(2.0)) / 2;
      const double rest = x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
      return {x * normal, normal + rest, normal + std::abs(rest)};
    }
    case Activation::kGeluTanh: {
      const double line = 2 * std::sqrt(2 / M_PI), cube = line * 0.044715;
      return sigmoid_of(x * (line + cube * x * x), x * (line + 3 * cube * x * x));
    }
    case Activation::kRelu2:
      break;
  }
  return x > 0 ? Exact{x * x, 2 * x, 2 * x} : Exact{0, 0, 1};
}

// Where exp(-|z|) is an ordinary number; the rounding of z alone is |z| ulp of it.
TEST(Activations, AreCloseToFp64) {
  for (const Activation activation : kActivations) {
    const bool of_line = activation == Activation::kSilu;
    const int least = of_line ? -87'000 : -10'000;
    for (const auto& [type, ulp] : {std::pair{Dtype::kF32, 0x1p-23}, {Dtype::kBf16, 0x1p-19}}) {
      double worst = 0, worst_slope = 0;
      for (int i = least; i <= 110'000; ++i) {
        const float x = static_cast<float>(i) * 1.00009e-3F;
        if (x == 0) continue;
        const kernels::Activated got = emulation::activated(activation, x, type);
        const Exact want = exact(activation, x);
        const double rounding = activation == Activation::kGeluTanh && type == Dtype::kF32
                                    ? 1 + std::abs(x * x * x) / 14
                                    : 1;
        const double off = std::abs(static_cast<double>(got.value) - want.value);
        if (want.value != 0) worst = std::max(worst, off / std::abs(want.value) / ulp / rounding);
        worst_slope = std::max(worst_slope, std::abs(static_cast<double>(got.slope) - want.slope) /
                                                want.term / ulp / rounding);
      }
      EXPECT_LT(worst, type == Dtype::kF32 || of_line ? 4 : 8)
          << static_cast<int>(activation) << to_string(type);
      EXPECT_LT(worst_slope, 8) << static_cast<int>(activation) << to_string(type);
    }
  }
}

TEST(Activations, KeepWhatIsNotFinite) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const Dtype type : {Dtype::kF32, Dtype::kF16}) {
    for (const Activation activation : kActivations) {
      SCOPED_TRACE(static_cast<int>(activation));
      const auto product = [&](float gate, float up) {
        return emulation::glu(activation, gate, up, type);
      };
      EXPECT_TRUE(std::isnan(product(NAN, 1)));
      EXPECT_TRUE(std::isnan(product(1, NAN)));
      if (activation == Activation::kRelu2) {
        EXPECT_EQ(product(-kInf, 1), 0);
      } else {
        EXPECT_TRUE(std::isnan(product(-kInf, 1)));  // as -inf / (1 + inf)
        EXPECT_FLOAT_EQ(product(1e30F, 2), 2e30F);
      }
      EXPECT_EQ(product(kInf, 2), kInf);
      EXPECT_EQ(product(3, -kInf), -kInf);
      EXPECT_EQ(product(-1e30F, 1), 0);
      EXPECT_EQ(product(0, 5), 0);
      const auto slope = [&](float x) {
        return emulation::activation_backward(activation, x, 1, type);
      };
      EXPECT_TRUE(std::isnan(slope(NAN)));
      EXPECT_EQ(slope(-1e30F), 0);
      EXPECT_FLOAT_EQ(slope(1e30F), activation == Activation::kRelu2 ? 2e30F : 1);
    }
  }
}

struct Case {
  std::string_view recipe;
  int64_t rows, cols, gap;
};

struct Source {
  CastSource source;
  Activation activation = Activation::kSilu;
  void set(QuantizerDesc& desc) const {
    desc.source = source;
    desc.activation = activation;
  }
  [[nodiscard]] std::string name() const {
    return f8::format("{} {}", name_of(source), static_cast<int>(activation));
  }
};

class ComputedCastTest : public ::testing::TestWithParam<Case> {
 protected:
  static Matrix random(int64_t rows, int64_t cols, uint64_t seed, Dtype type) {
    return reference::rounded_to(
        reference::random_matrix(rows, cols, seed, reference::Distribution::kOutliers), type);
  }
  // What is cast of x, by a second operand: up, the norm's weight [1][cols], or none.
  static Matrix computed(const Source& of, const Matrix& x, const Matrix& other, Dtype type) {
    Matrix h = x;
    for (int64_t r = 0; r < x.rows; ++r) {
      for (int64_t c = 0; c < x.cols; ++c) {
        const size_t i = static_cast<size_t>(r * x.cols + c);
        h.values[i] = of.source == CastSource::kRmsNorm
                          ? x.values[i] * rstd_of(r) * other.values[static_cast<size_t>(c)]
                      : of.source == CastSource::kGlu
                          ? emulation::glu(of.activation, x.values[i], other.values[i], type)
                          : emulation::activated(of.activation, x.values[i], type).value;
      }
    }
    return reference::rounded_to(h, type);
  }
  static float rstd_of(int64_t row) { return 1.0F / (0.3F + static_cast<float>(row % 7)); }
  static Matrix other(const Source& of, int64_t rows, int64_t cols, Dtype type) {
    return random(of.source == CastSource::kGlu ? rows : 1, cols, 6, type);
  }
  // Sets the second operand of a call.
  void set_other(const Source& of, Buffer& from, int64_t ld, QuantizeCall& call) {
    if (of.source == CastSource::kGlu) call.up = {from.data(), ld};
    if (of.source != CastSource::kRmsNorm) return;
    rstd_.resize(static_cast<size_t>(call.rows));
    for (size_t r = 0; r < rstd_.size(); ++r) rstd_[r] = rstd_of(static_cast<int64_t>(r));
    call.norm_weight = from.data();
    call.rstd = rstd_.data();
  }
  // A call has a launch for the maxima that its scales come from, and one for the copies.
  [[nodiscard]] size_t launches(const Quantizer& fused, const float8_step& step) const {
    const std::string& recipe = fused.desc().recipe.name;
    const bool known = recipe == "blockwise" || (recipe == "delayed" && step.first_step == 0);
    const bool twice = recipe == "apart" && fused.desc().qt;  // q and qt by kernels of their own
    return (known ? 1 : 2) << (twice ? 1 : 0);
  }
  void run(const Quantizer& quantizer, QuantizeCall call) {
    Buffer workspace(std::max<size_t>(quantizer.workspace_bytes(), 16));
    const Status done = quantizer.run(with_workspace(call, workspace.data()), nullptr);
    ASSERT_TRUE(done) << done.error().message;
    EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
    EXPECT_TRUE(workspace.guard_is_whole());
  }
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
  std::vector<float> rstd_;
};
constexpr Source kOfInputs[] = {{CastSource::kGlu},
                                {CastSource::kGlu, Activation::kGeluTanh},
                                {CastSource::kRmsNorm},
                                {CastSource::kActivation, Activation::kGelu},
                                {CastSource::kActivation, Activation::kGeluTanh},
                                {CastSource::kActivation, Activation::kRelu2}};
INSTANTIATE_TEST_SUITE_P(
    Shapes, ComputedCastTest,
    ::testing::Values(Case{"delayed", 1, 16, 0}, Case{"delayed", 130, 272, 8},
                      Case{"delayed", 256, 128, 0}, Case{"blockwise", 1, 16, 8},
                      Case{"blockwise", 127, 144, 0}, Case{"blockwise", 300, 400, 16},
                      Case{"tensorwise", 1, 16, 8}, Case{"tensorwise", 300, 400, 0},
                      Case{"rowwise", 1, 16, 0}, Case{"rowwise", 130, 272, 8},
                      // More tiles than leave their maxima for the cast, and as many where a call
                      // has all rows alone.
                      Case{"rowwise", 2, 10'384, 0}, Case{"rowwise", 2, 10'112, 0},
                      Case{"mixed", 130, 272, 8}, Case{"apart", 130, 272, 0}));

// The recipe of a case: "mixed" has a tensor's scale for q and those of columns for qt, and "apart" makes
// such copies by kernels of their own.
Recipe recipe_of(std::string_view name) {
  if (name != "mixed" && name != "apart") return find_recipe(name).value();
  Recipe recipe = find_recipe("rowwise").value();
  recipe.name = name;
  for (const Gemm gemm : {Gemm::kOutput, Gemm::kGradInput}) {
    recipe.gemms[static_cast<size_t>(gemm)].a.granularity = Granularity::kTensor;
    recipe.gemms[static_cast<size_t>(gemm)].a.pow2 = name == "mixed";
  }
  return recipe;
}

// The words of delayed scaling of one operand.
struct Slots {
  alignas(16) float scale[24] = {};
  uint32_t amax[4] = {};
  uint32_t format[4] = {};
  Slots() {
    for (float* at = scale; at < scale + 24; at += 8) at[0] = 0.37F, at[4] = 1 / 0.37F;
  }
  operator float8_scale_slots() { return ScaleSlots{amax, scale, format}; }  // NOLINT
  [[nodiscard]] uint32_t most() const { return *std::max_element(amax, amax + 4); }
};

const float8_step kOrdinaryStep = {};

// For each type, with both copies and q alone, in a first step and later; what delayed scaling records is
// the product's amax.
TEST_P(ComputedCastTest, IsTheCastOfTheProduct) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const Source& source : kOfInputs) {
    cuda_.launches.clear();
    for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
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

        const Matrix x = random(rows, cols, 5, type), by = other(source, rows, cols, type);
        Buffer of_x(x, type, gap), of_by(by, type, gap),
            of_h(computed(source, x, by, type), type, 0);
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

// q in one call and qt, made again by the scale that it left, in another.
TEST_P(ComputedCastTest, IsCastAgain) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const Source& of : kOfInputs) {
    const Matrix x = random(rows, cols, 5, Dtype::kBf16), by = other(of, rows, cols, Dtype::kBf16);
    Buffer of_x(x), of_by(by), of_h(computed(of, x, by, Dtype::kBf16));
    std::vector<std::vector<uint8_t>> made;
    for (const Source& source : {Source{CastSource::kPlain}, of}) {
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
      Buffer q(first->tensor_bytes()), kept(first->transposed_bytes() + 16);
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
      run(*again, call);
      for (Buffer* buffer : {&q, &kept, &qt}) made.push_back(bytes(*buffer));
    }
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(made[i], made[i + 3]) << of.name() << i;
  }
}

TEST_P(ComputedCastTest, IsTheCastOfTheGradients) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const auto& [type, activation] : {std::pair{Dtype::kBf16, Activation::kSilu},
                                         {Dtype::kF16, Activation::kSilu},
                                         {Dtype::kF32, Activation::kSilu},
                                         {Dtype::kBf16, Activation::kGeluTanh}}) {
    for (const bool first : {false, true}) {
      SCOPED_TRACE(f8::format("{} {}", to_string(type), first));
      QuantizerDesc desc{.operand = Tensor::kGradOutput,
                         .rows = first ? rows : rows + 150,
                         .cols = cols,
                         .recipe = recipe_of(recipe)};
      desc.dtype = type;
      const float8_step& step = first ? kFirstOfSteps : kOrdinaryStep;
      const auto plain = Quantizer::plan(context_, desc).value();
      Source{CastSource::kGluBackward, activation}.set(desc);
      const auto fused = Quantizer::plan(context_, desc).value();
      EXPECT_EQ(fused->workspace_bytes() > 0, recipe != "blockwise");

      const Matrix gate = random(rows, cols, 5, type), up = random(rows, cols, 6, type);
      const Matrix grad = random(rows, cols, 7, type);
      Matrix of[2] = {gate, up};
      for (size_t i = 0; i < gate.values.size(); ++i) {
        const auto both =
            emulation::glu_backward(activation, gate.values[i], up.values[i], grad.values[i], type);
        of[0].values[i] = both.gate;
        of[1].values[i] = both.up;
      }
      Buffer gate_in(gate, type, gap), up_in(up, type, gap), grad_in(grad, type, gap);
      Buffer got[2] = {Buffer(plain->tensor_bytes()), Buffer(plain->tensor_bytes())};
      Slots slots[2];
      const int64_t ld = gap == 0 ? 0 : cols + gap;
      const size_t before = cuda_.launches.size();
      run(*fused, {.rows = rows,
                   .x = {gate_in.data(), ld},
                   .up = {up_in.data(), ld},
                   .tensor = {got[0].data()},
                   .step = &step,
                   .scales = slots[0],
                   .grad = {grad_in.data(), ld},
                   .up_tensor = {got[1].data()},
                   .up_scales = slots[1]});
      EXPECT_EQ(cuda_.launches.size() - before, launches(*fused, step));
      for (size_t i = 0; i < 2; ++i) {
        Buffer x(reference::rounded_to(of[i], type), type, 0), expected(plain->tensor_bytes());
        Slots own;
        run(*plain, {.rows = rows,
                     .x = {x.data()},
                     .tensor = {expected.data()},
                     .step = &step,
                     .scales = own});
        EXPECT_EQ(std::memcmp(got[i].data(), expected.data(), expected.bytes()), 0) << i;
        EXPECT_EQ(own.most(), slots[i].most());
        EXPECT_TRUE(got[i].guard_is_whole());
      }
    }
  }
}

// With the sums of its columns and without them, which are those of a linear's dy.
TEST_P(ComputedCastTest, IsTheCastOfTheGradientOfAnActivation) {
  const auto& [recipe, rows, cols, gap] = GetParam();
  for (const auto& [type, activation, first] : {std::tuple{Dtype::kBf16, Activation::kGelu, false},
                                                {Dtype::kF16, Activation::kRelu2, true},
                                                {Dtype::kF32, Activation::kGeluTanh, false},
                                                {Dtype::kBf16, Activation::kSilu, true}}) {
    for (const bool sums : {false, true}) {
      SCOPED_TRACE(f8::format("{} {} {}", to_string(type), static_cast<int>(activation), sums));
      QuantizerDesc desc{.operand = Tensor::kGradOutput,
                         .rows = first ? rows : rows + 150,
                         .cols = cols,
                         .recipe = recipe_of(recipe)};
      desc.dtype = type;
      const float8_step& step = first ? kFirstOfSteps : kOrdinaryStep;
      const auto plain = Quantizer::plan(context_, desc).value();
      Source{CastSource::kActivationBackward, activation}.set(desc);
      desc.column_sums = sums;
      const auto fused = Quantizer::plan(context_, desc).value();

      const Matrix x = random(rows, cols, 5, type), grad = random(rows, cols, 7, type);
      Matrix of = x;
      for (size_t i = 0; i < x.values.size(); ++i) {
        of.values[i] =
            emulation::activation_backward(activation, x.values[i], grad.values[i], type);
      }
      of = reference::rounded_to(of, type);
      Buffer x_in(x, type, gap), grad_in(grad, type, gap), of_in(of, type, 0);
      Buffer expected(plain->tensor_bytes()), got(plain->tensor_bytes());
      Buffer of_columns(static_cast<size_t>(cols) * sizeof(float));
      Slots plain_slots, fused_slots;
      run(*plain, {.rows = rows,
                   .x = {of_in.data()},
                   .tensor = {expected.data()},
                   .step = &step,
                   .scales = plain_slots});
      const int64_t ld = gap == 0 ? 0 : cols + gap;
      const size_t before = cuda_.launches.size();
      QuantizeCall call{.rows = rows,
                        .x = {x_in.data(), ld},
                        .tensor = {got.data()},
                        .step = &step,
                        .scales = fused_slots,
                        .grad = {grad_in.data(), ld}};
      if (sums) call.column_sums = reinterpret_cast<float*>(of_columns.data());
      run(*fused, call);
      EXPECT_EQ(cuda_.launches.size() - before, launches(*fused, step) + (sums ? 1U : 0U));
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), expected.bytes()), 0);
      EXPECT_EQ(plain_slots.most(), fused_slots.most());
      EXPECT_TRUE(got.guard_is_whole() && of_columns.guard_is_whole());
      if (!sums) continue;
      const std::vector<float> want = reference::column_sums(of);
      EXPECT_EQ(std::memcmp(of_columns.data(), want.data(), of_columns.bytes()), 0);
    }
  }
}

class ComputedMisuse : public ::testing::Test {
 protected:
  void refused(const QuantizerDesc& desc, ErrorCode code, std::string_view words) {
    const auto plan = Quantizer::plan(context_, desc);
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().code, code);
    EXPECT_TRUE(says(plan.error(), words)) << plan.error().message;
  }
  static QuantizerDesc desc(std::string_view recipe) {
    QuantizerDesc out{.rows = 32, .cols = 64, .recipe = recipe_of(recipe)};
    out.source = CastSource::kGlu;
    return out;
  }
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
};

TEST_F(ComputedMisuse, PlansThatCannotBe) {
  QuantizerDesc high = desc("rowwise_with_gw_hp");
  high.q = false;
  refused(high, ErrorCode::kUnsupported, "makes no fp8 copy");
  QuantizerDesc weight = desc("blockwise");
  weight.operand = Tensor::kWeight;
  refused(weight, ErrorCode::kInvalidArgument, "it is for FLOAT8_INPUT");
  for (const CastSource source : {CastSource::kGluBackward, CastSource::kActivationBackward}) {
    weight.source = source;
    refused(weight, ErrorCode::kInvalidArgument, "it is for FLOAT8_GRAD_OUTPUT");
  }
  QuantizerDesc sums = desc("blockwise");
  sums.column_sums = true;
  refused(sums, ErrorCode::kInvalidArgument, "it is for FLOAT8_ACTIVATION_BACKWARD");
  for (const CastSource source : {CastSource::kPlain, CastSource::kRmsNorm}) {
    QuantizerDesc activated = desc("blockwise");
    Source{source, Activation::kGelu}.set(activated);
    refused(activated, ErrorCode::kInvalidArgument, "float8_quantizer_desc.activation");
  }
  QuantizerDesc rounded = desc("blockwise");
  rounded.f32_source = true;
  refused(rounded, ErrorCode::kInvalidArgument, "it is for FLOAT8_INPUT");
  const std::shared_ptr<const Quantizer> all[] = {
      Quantizer::plan(context_, desc("blockwise")).value()};
  const auto list = QuantizerList::plan(context_, all);
  ASSERT_FALSE(list);
  EXPECT_TRUE(says(list.error(), "quantizers[0] has FLOAT8_GLU")) << list.error().message;
}

TEST_F(ComputedMisuse, CallsThatCannotBe) {
  const auto fused = Quantizer::plan(context_, desc("delayed")).value();
  QuantizerDesc of_plain = desc("blockwise");
  of_plain.source = CastSource::kPlain;
  const auto plain = Quantizer::plan(context_, of_plain).value();
  Buffer x(32 * 64 * 2), up(32 * 64 * 2), tensor(fused->tensor_bytes() + plain->tensor_bytes());
  Buffer workspace(plain->workspace_bytes() + 16);
  alignas(16) float scale[8] = {1, 0, 0, 0, 1};
  uint32_t amax[1] = {0}, format[1] = {0};
  QuantizeCall good{.rows = 32, .x = {x.data()}, .tensor = {tensor.data()}};
  good.scales = ScaleSlots{amax, scale, format};
  good.up.data = up.data();
  const auto refused = [&](const Quantizer& quantizer, const QuantizeCall& call,
                           std::string_view words) {
    const Status status = quantizer.run(with_workspace(call, workspace.data()), nullptr);
    ASSERT_FALSE(status);
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
  };
  QuantizeCall call = good;
  call.up.data = nullptr;
  refused(*fused, call, "float8_quantize_args.up.data is NULL");
  refused(*plain, good, "float8_quantize_args.up.data is given");
  call = good;
  call.up.data = tensor.data();
  refused(*fused, call, "overlap");
  call = good;
  call.up.ld = 60;
  refused(*fused, call, "up.ld");
  call = good;
  call.norm_weight = up.data();
  refused(*fused, call, "float8_quantize_args.norm_weight is given");
  EXPECT_TRUE(tensor.untouched());
  EXPECT_TRUE(cuda_.launches.empty());
}

TEST_F(ComputedMisuse, CallsOfANormThatCannotBe) {
  QuantizerDesc of_norm = desc("blockwise");
  of_norm.source = CastSource::kRmsNorm;
  const auto fused = Quantizer::plan(context_, of_norm).value();
  Buffer x(32 * 64 * 2), weight(64 * 2), rstd(32 * 4), tensor(fused->tensor_bytes());
  const QuantizeCall good{.rows = 32,
                          .x = {x.data()},
                          .tensor = {tensor.data()},
                          .norm_weight = weight.data(),
                          .rstd = reinterpret_cast<const float*>(rstd.data())};
  const std::tuple<std::function<void(QuantizeCall&)>, std::string_view> cases[] = {
      {[](QuantizeCall& c) { c.norm_weight = nullptr; }, "norm_weight is NULL"},
      {[](QuantizeCall& c) { c.rstd = nullptr; }, "rstd is NULL"},
      {[](QuantizeCall& c) { c.up = c.x; }, "up.data is given"},
      {[](QuantizeCall& c) { c.rstd = static_cast<const float*>(c.tensor.data); }, "overlap"},
      {[](QuantizeCall& c) { c.norm_weight = static_cast<const char*>(c.norm_weight) + 2; },
       "norm_weight"},
  };
  for (const auto& [change, words] : cases) {
    QuantizeCall call = good;
    change(call);
    const Status status = fused->run(call, nullptr);
    ASSERT_FALSE(status) << words;
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
  }
  EXPECT_TRUE(tensor.untouched());
  EXPECT_TRUE(cuda_.launches.empty());
}

TEST_F(ComputedMisuse, CallsOfAnActivationThatCannotBe) {
  QuantizerDesc of_gradient = desc("blockwise");
  of_gradient.operand = Tensor::kGradOutput;
  Source{CastSource::kActivationBackward, Activation::kGelu}.set(of_gradient);
  of_gradient.column_sums = true;
  const auto fused = Quantizer::plan(context_, of_gradient).value();
  Buffer x(32 * 64 * 2), grad(32 * 64 * 2), sums(64 * 4), tensor(fused->tensor_bytes());
  Buffer workspace(fused->workspace_bytes());
  const QuantizeCall good{.rows = 32,
                          .x = {x.data()},
                          .tensor = {tensor.data()},
                          .grad = {grad.data()},
                          .column_sums = reinterpret_cast<float*>(sums.data())};
  const std::tuple<std::function<void(QuantizeCall&)>, std::string_view> cases[] = {
      {[](QuantizeCall& c) { c.grad.data = nullptr; }, "grad.data is NULL"},
      {[](QuantizeCall& c) { c.up = c.x; }, "up.data is given"},
      {[](QuantizeCall& c) { c.up_tensor = c.tensor; }, "up_tensor.data is given"},
      {[](QuantizeCall& c) { c.column_sums = nullptr; }, "column_sums is NULL"},
      {[](QuantizeCall& c) { c.column_sums = static_cast<float*>(c.tensor.data); }, "overlap"},
      {[](QuantizeCall& c) { c.grad.data = c.tensor.data; }, "overlap"},
      {[](QuantizeCall& c) { c.x.data = c.tensor.data; }, "overlap"},
      {[](QuantizeCall& c) { c.grad.ld = 60; }, "grad.ld"},
  };
  for (const auto& [change, words] : cases) {
    QuantizeCall call = good;
    change(call);
    const Status status = fused->run(with_workspace(call, workspace.data()), nullptr);
    ASSERT_FALSE(status) << words;
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
  }
  EXPECT_TRUE(tensor.untouched() && sums.untouched());
  EXPECT_TRUE(cuda_.launches.empty());
}

TEST_F(ComputedMisuse, BackwardCallsThatCannotBe) {
  QuantizerDesc of_gradients = desc("delayed");
  of_gradients.operand = Tensor::kGradOutput;
  of_gradients.source = CastSource::kGluBackward;
  const auto fused = Quantizer::plan(context_, of_gradients).value();
  Buffer x(32 * 64 * 2), up(32 * 64 * 2), grad(32 * 64 * 2), workspace(fused->workspace_bytes());
  Buffer tensors[2] = {Buffer(fused->tensor_bytes()), Buffer(fused->tensor_bytes())};
  Slots slots[2];
  const QuantizeCall good{.rows = 32,
                          .x = {x.data()},
                          .up = {up.data()},
                          .tensor = {tensors[0].data()},
                          .scales = slots[0],
                          .grad = {grad.data()},
                          .up_tensor = {tensors[1].data()},
                          .up_scales = slots[1]};
  float8_step over_ranks = kFirstOfSteps;
  over_ranks.ranks = reinterpret_cast<float8_nccl_comm>(this);
  const std::tuple<std::function<void(QuantizeCall&)>, std::string_view> cases[] = {
      {[](QuantizeCall& c) { c.grad.data = nullptr; }, "float8_quantize_args.grad.data is NULL"},
      {[](QuantizeCall& c) { c.up.data = nullptr; }, "float8_quantize_args.up.data is NULL"},
      {[](QuantizeCall& c) { c.up_tensor.data = nullptr; },
       "float8_quantize_args.up_tensor.data is NULL"},
      {[](QuantizeCall& c) { c.up_transposed.data = c.up_tensor.data; },
       "float8_quantize_args.up_transposed.data is given and transposed.data is NULL"},
      {[](QuantizeCall& c) { c.up_scales = {}; }, "float8_quantize_args.up_scales is empty"},
      {[](QuantizeCall& c) { c.up_tensor = c.tensor; }, "overlap"},
      {[](QuantizeCall& c) { c.grad.data = c.up_tensor.data; }, "overlap"},
      {[](QuantizeCall& c) { c.grad.ld = 60; }, "grad.ld"},
      {[&](QuantizeCall& c) { c.step = &over_ranks; }, "quantize it with FLOAT8_PLAIN"},
      {[](QuantizeCall& c) { c.up_counters = static_cast<CastCounters*>(c.up_tensor.data); },
       "float8_quantize_args.up_counters is given"},
  };
  for (const auto& [change, words] : cases) {
    QuantizeCall call = good;
    change(call);
    const Status status = fused->run(with_workspace(call, workspace.data()), nullptr);
    ASSERT_FALSE(status) << words;
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
  }
  EXPECT_TRUE(tensors[0].untouched() && tensors[1].untouched());
  EXPECT_TRUE(cuda_.launches.empty());
}

}  // namespace
}  // namespace f8::runtime
