// Steps that a trainer skips, and calls that leave the scale state alone, through the public header
// on an emulated device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <float8/float8.hpp>
#include <limits>

#include "runtime/distributed/nccl_api.hpp"
#include "tests/unit/runtime/c_abi/small_shape.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;

// A trainer with one linear under delayed scaling.
class SkippedSteps : public ::testing::Test {
 protected:
  SkippedSteps() { EXPECT_TRUE(scales_.init(state_.data(), nullptr)); }

  static float8::Linear plan(const float8::Context& context) {
    float8::LinearDesc desc;
    desc.m_max = kM;
    desc.n = kN;
    desc.k = kK;
    desc.recipe = float8::Recipe::delayed();
    return float8::Linear::plan(context, desc).value();
  }
  [[nodiscard]] float8::ForwardArgs forward_args() {
    float8::ForwardArgs args;
    args.x.data = x_.data();
    args.w.data = w_.data();
    args.y.data = y_.data();
    args.saved.data = saved_.data();
    args.scales = scales_.slots(state_.data(), 0).value();
    args.step = first_step_if(first_step_);
    return args;
  }
  void forward_and_backward(Buffer& dy) {
    const float8::Status forward =
        linear_.forward(with_workspace(forward_args(), workspace_.data()), nullptr);
    ASSERT_TRUE(forward) << forward.message();
    float8::BackwardArgs args;
    args.dy.data = dy.data();
    args.saved.data = saved_.data();
    args.dx.data = dx_.data();
    args.dw.data = dw_.data();
    args.scales = scales_.slots(state_.data(), 0).value();
    args.step = first_step_if(first_step_);
    const float8::Status backward =
        linear_.backward(with_workspace(args, workspace_.data()), nullptr);
    ASSERT_TRUE(backward) << backward.message();
  }
  void good_step() {
    forward_and_backward(dy_);
    ASSERT_TRUE(scales_.sync(state_.data(), nullptr, nullptr));
    first_step_ = false;
  }
  [[nodiscard]] float found_inf() {
    float found = 0;
    EXPECT_TRUE(scales_.found_inf(state_.data(), nullptr, &found, nullptr));
    return found;
  }
  static Buffer with(const reference::Matrix& x, float value) {
    reference::Matrix changed = x;
    changed.values[changed.values.size() / 2] = value;
    return Buffer(changed);
  }

  float8::Context context_ = float8::Context::create(0, {.cache_dir = "", .emulate = true}).value();
  float8::Linear linear_ = plan(context_);
  float8::Quantizer quantizer_ =  // of the weight
      float8::Quantizer::plan(context_, {.operand = FLOAT8_WEIGHT,
                                         .rows_max = kN,
                                         .cols = kK,
                                         .recipe = float8::Recipe::delayed()})
          .value();
  float8::Scales scales_ = float8::Scales::plan(context_, {linear_.get()}).value();
  reference::Matrix xm_ = reference::random_matrix(kM, kK, 1);
  reference::Matrix wm_ = reference::random_matrix(kN, kK, 2);
  reference::Matrix dym_ = reference::random_matrix(kM, kN, 3);
  Buffer x_{xm_}, w_{wm_}, dy_{dym_};
  Buffer y_{kM * kN * 2}, dx_{kM * kK * 2}, dw_{kN * kK * 2};
  Buffer workspace_{linear_.workspace_bytes()}, saved_{linear_.saved_bytes()};
  Buffer state_{scales_.bytes()};
  bool first_step_ = true;
};

TEST_F(SkippedSteps, AnInfinityIsSeenInItsOwnStep) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  good_step();
  forward_and_backward(dy_);
  EXPECT_EQ(found_inf(), 0.0F);
  for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
    ASSERT_TRUE(scales_.discard(state_.data(), nullptr));
    Buffer dy = with(dym_, bad);
    forward_and_backward(dy);
    EXPECT_EQ(found_inf(), 1.0F) << bad;
  }
  // An input's and a weight's count as well.
  for (Buffer* operand : {&x_, &w_}) {
    ASSERT_TRUE(scales_.discard(state_.data(), nullptr));
    forward_and_backward(dy_);
    EXPECT_EQ(found_inf(), 0.0F);
    Buffer good = *operand;
    *operand = with(operand == &x_ ? xm_ : wm_, kInfinity);
    forward_and_backward(dy_);
    EXPECT_EQ(found_inf(), 1.0F);
    *operand = good;
  }
}

TEST_F(SkippedSteps, AFlagThatIsSetStaysSet) {
  good_step();
  forward_and_backward(dy_);
  float found = 7;
  ASSERT_TRUE(scales_.found_inf(state_.data(), nullptr, &found, nullptr));
  EXPECT_EQ(found, 7.0F);
}

// A skipped step leaves the state's bytes, and so the results of the next step, as if it had not
// been.
TEST_F(SkippedSteps, LeaveNothingBehind) {
  good_step();
  const std::vector<uint8_t> state = bytes(state_);
  Buffer dy = with(dym_, std::numeric_limits<float>::infinity());
  float set = 1;
  float clear = 0;
  for (const bool by_flag : {true, false}) {
    forward_and_backward(dy);
    ASSERT_NE(bytes(state_), state);
    ASSERT_TRUE(by_flag ? scales_.sync_unless(state_.data(), &set, nullptr, nullptr)
                        : scales_.discard(state_.data(), nullptr));
    EXPECT_EQ(bytes(state_), state) << by_flag;
  }
  // A flag that is not set changes nothing.
  forward_and_backward(dy_);
  const std::vector<uint8_t> before = bytes(state_);
  ASSERT_TRUE(scales_.sync_unless(state_.data(), &clear, nullptr, nullptr));
  const std::vector<uint8_t> after = bytes(state_);
  std::memcpy(state_.data(), before.data(), before.size());
  ASSERT_TRUE(scales_.sync(state_.data(), nullptr, nullptr));
  EXPECT_EQ(bytes(state_), after);
}

// A step that is not finite costs itself alone, whatever the trainer does: its results show it, and
// the scales of the next one are those of the history without it.
TEST_F(SkippedSteps, AStepThatIsNotFiniteCostsItselfAlone) {
  good_step();
  forward_and_backward(dy_);
  const std::vector<uint8_t> dx = bytes(dx_);
  const std::vector<uint8_t> dw = bytes(dw_);
  ASSERT_TRUE(scales_.discard(state_.data(), nullptr));
  const std::vector<unsigned char> before = scales_.save(state_.data(), nullptr).value();
  const size_t row = kM / 2;  // of the element that with() changes
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    Buffer dy = with(dym_, bad);
    forward_and_backward(dy);
    EXPECT_TRUE(std::isnan(dx_.bf16()[row * kK]));
    EXPECT_FALSE(std::isnan(dx_.bf16()[(row - 1) * kK]));
    EXPECT_TRUE(std::isnan(dw_.bf16()[0])) << "of column 0 of dy";
    ASSERT_TRUE(scales_.sync(state_.data(), nullptr, nullptr));
    EXPECT_EQ(scales_.first_steps(state_.data(), nullptr).value(), std::vector<int32_t>{0});
    forward_and_backward(dy_);
    EXPECT_EQ(bytes(dx_), dx);
    EXPECT_EQ(bytes(dw_), dw);
    ASSERT_TRUE(scales_.discard(state_.data(), nullptr));
  }
  // Only the count of such steps has changed: three words of 4 bytes lie before the hash.
  const std::vector<unsigned char> after = scales_.save(state_.data(), nullptr).value();
  ASSERT_EQ(after.size(), before.size());
  EXPECT_TRUE(std::equal(after.begin(), after.end() - 44, before.begin()));
  EXPECT_EQ(after[after.size() - 36], 2) << "of dy";
}

TEST_F(SkippedSteps, ABadFirstStepIsFollowedByAFirstStep) {
  const auto first = [&] { return scales_.first_steps(state_.data(), nullptr).value(); };
  EXPECT_EQ(first(), std::vector<int32_t>{1});
  Buffer dy = with(dym_, std::numeric_limits<float>::infinity());
  forward_and_backward(dy);
  EXPECT_TRUE(std::isnan(dw_.bf16()[0]));
  ASSERT_TRUE(scales_.sync(state_.data(), nullptr, nullptr));
  EXPECT_EQ(first(), std::vector<int32_t>{1});
  good_step();
  EXPECT_EQ(first(), std::vector<int32_t>{0});
}

// A weight of zeros, as in LoRA, has no scale until it is something else.
TEST_F(SkippedSteps, AWeightOfZerosHasNoScaleYet) {
  const Buffer w = w_;
  std::memset(w_.data(), 0, w_.bytes());
  good_step();
  EXPECT_EQ(scales_.first_steps(state_.data(), nullptr).value(), std::vector<int32_t>{1});
  w_ = w;
  for (const int32_t still : {1, 0}) {
    first_step_ = true;
    good_step();
    EXPECT_EQ(scales_.first_steps(state_.data(), nullptr).value(), std::vector<int32_t>{still})
        << "it may grow";
  }
}

// With FLOAT8_SATURATE infinities saturate, and the scales of finite operands move on.
TEST_F(SkippedSteps, HeldOperandsFreezeAlone) {
  float8::LinearDesc desc;
  desc.m_max = kM;
  desc.n = kN;
  desc.k = kK;
  desc.recipe = float8::Recipe::delayed();
  desc.non_finite = FLOAT8_SATURATE;
  linear_ = float8::Linear::plan(context_, desc).value();
  float8::ScalesOptions options;
  options.non_finite = FLOAT8_SATURATE;
  options.history = 1;
  scales_ = float8::Scales::plan(context_, {linear_.get()}, options).value();
  state_ = Buffer(scales_.bytes());
  ASSERT_TRUE(scales_.init(state_.data(), nullptr));
  good_step();
  const auto scale = [&](size_t slot) {
    const auto slots = scales_.slots(state_.data(), 0).value();
    return static_cast<const float*>(slots.opaque[1])[slot * 8];
  };
  const float of_x = scale(0);
  const float of_dy = scale(2);
  reference::Matrix twice = xm_;
  for (float& value : twice.values) value *= 2;
  x_ = Buffer(twice);
  Buffer dy = with(dym_, std::numeric_limits<float>::infinity());
  forward_and_backward(dy);
  EXPECT_FALSE(std::isnan(dx_.bf16()[kM / 2 * kK]));
  ASSERT_TRUE(scales_.sync(state_.data(), nullptr, nullptr));
  EXPECT_EQ(scale(0), of_x / 2);
  EXPECT_EQ(scale(2), of_dy);
}

TEST_F(SkippedSteps, AFirstStepLeavesTheInitialState) {
  const std::vector<uint8_t> state = bytes(state_);
  Buffer dy = with(dym_, std::numeric_limits<float>::infinity());
  forward_and_backward(dy);
  EXPECT_EQ(found_inf(), 1.0F);
  ASSERT_TRUE(scales_.discard(state_.data(), nullptr));
  EXPECT_EQ(bytes(state_), state);
}

TEST_F(SkippedSteps, EvaluationRecordsNothing) {
  for (const bool first : {true, false}) {
    first_step_ = first;
    if (!first) {
      first_step_ = true;
      good_step();
    }
    float8::ForwardArgs args = forward_args();
    ASSERT_TRUE(linear_.forward(with_workspace(args, workspace_.data()), nullptr));
    const std::vector<uint8_t> y = bytes(y_);
    ASSERT_TRUE(scales_.discard(state_.data(), nullptr));
    const std::vector<uint8_t> state = bytes(state_);
    const float8::Step step{.first_step = first_step_, .evaluate = 1};
    args.step = &step;
    for (void* saved : {static_cast<void*>(saved_.data()), static_cast<void*>(nullptr)}) {
      args.saved.data = saved;
      std::memset(y_.data(), 0, y_.bytes());
      ASSERT_TRUE(linear_.forward(with_workspace(args, workspace_.data()), nullptr));
      EXPECT_EQ(bytes(state_), state) << first;
      EXPECT_EQ(bytes(y_), y) << "the result is that of a training call";
    }
  }
}

TEST_F(SkippedSteps, EvaluationOverRanksReducesNothing) {
  float8::ForwardArgs args = forward_args();
  const float8::Step step{.first_step = first_step_,
                          .evaluate = 1,
                          .ranks = reinterpret_cast<float8_nccl_comm>(uintptr_t{16})};  // nowhere
  args.step = &step;
  const std::vector<uint8_t> state = bytes(state_);
  const float8::Status forward = linear_.forward(with_workspace(args, workspace_.data()), nullptr);
  EXPECT_TRUE(forward) << forward.message();
  EXPECT_EQ(bytes(state_), state);
}

// An emulated device's memory is the host's: a communicator of NCCL was not made for it, and NCCL is
// not called with it, whatever the caller passes.
TEST_F(SkippedSteps, AnEmulatedDeviceNeverCallsNccl) {
  static int calls = 0;
  Nccl table{};
  table.all_reduce = [](const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                        cudaStream_t) {
    ++calls;
    return ncclSuccess;
  };
  table.get_error_string = [](ncclResult_t) { return "none"; };
  set_nccl_for_testing(&table);
  auto* const ranks = reinterpret_cast<float8_nccl_comm>(uintptr_t{16});
  const auto refused = [](const float8::Status& status) {
    EXPECT_EQ(status.code(), FLOAT8_INVALID_ARGUMENT);
    EXPECT_NE(status.message().find("is NCCL's"), std::string::npos) << status.message();
  };
  float8::ForwardArgs forward = forward_args();
  const float8::Step over_ranks{.first_step = 1, .ranks = ranks};
  forward.step = &over_ranks;
  const std::vector<uint8_t> state = bytes(state_);
  refused(linear_.forward(with_workspace(forward, workspace_.data()), nullptr));
  EXPECT_EQ(bytes(state_), state) << "a call that is refused has done nothing";
  forward_and_backward(dy_);
  float8::BackwardArgs backward;
  backward.dy.data = dy_.data();
  backward.saved.data = saved_.data();
  backward.dx.data = dx_.data();
  backward.dw.data = dw_.data();
  backward.scales = forward.scales;
  backward.step = &over_ranks;
  refused(linear_.backward(with_workspace(backward, workspace_.data()), nullptr));
  Buffer tensor(quantizer_.tensor_bytes());
  float8::QuantizeArgs weight{
      .x = {w_.data()}, .tensor = {tensor.data()}, .step = &over_ranks, .scales = forward.scales};
  refused(quantizer_.run(with_workspace(weight, workspace_.data()), nullptr));
  const auto casts = float8::QuantizerList::plan(context_, {quantizer_}).value();
  weight.step = nullptr;
  refused(casts.run({.workspace = {workspace_.data()}, .step = &over_ranks}, {weight}, nullptr));
  float found = 0;
  refused(scales_.found_inf(state_.data(), ranks, &found, nullptr));
  refused(scales_.sync(state_.data(), ranks, nullptr));
  refused(scales_.sync_unless(state_.data(), &found, ranks, nullptr));
  EXPECT_EQ(calls, 0);
  set_nccl_for_testing(nullptr);
  // Where nothing is reduced a communicator does not matter.
  good_step();
  forward.step = nullptr;
  EXPECT_TRUE(linear_.forward(with_workspace(forward, workspace_.data()), nullptr));
}

TEST_F(SkippedSteps, MisuseIsOneClearError) {
  const auto says = [](const float8::Status& status, const std::string& words) {
    EXPECT_EQ(status.code(), FLOAT8_INVALID_ARGUMENT);
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  };
  float found = 0;
  const auto odd = reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(&found) + 1);
  says(scales_.found_inf(nullptr, nullptr, &found, nullptr),
       "float8_scales_found_inf: state is NULL");
  says(scales_.found_inf(state_.data(), nullptr, nullptr, nullptr), "found_inf is NULL");
  says(scales_.found_inf(state_.data(), nullptr, odd, nullptr), "found_inf is not aligned");
  says(scales_.sync_unless(state_.data(), odd, nullptr, nullptr), "found_inf is not aligned");
  says(scales_.discard(nullptr, nullptr), "float8_scales_discard: state is NULL");
  int32_t first = 0;
  const auto first_steps = [&](const void* state, int32_t* to, size_t count) {
    return float8::Status(float8_scales_first_steps(scales_.get(), state, to, count, nullptr));
  };
  says(first_steps(nullptr, &first, 1), "float8_scales_first_steps: state is NULL");
  says(first_steps(state_.data(), &first, 2), "count is 2");
  says(first_steps(state_.data(), nullptr, 1), "first_step is NULL");
  EXPECT_EQ(float8_scales_first_steps(nullptr, state_.data(), &first, 1, nullptr),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_discard(nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_found_inf(nullptr, nullptr, nullptr, &found, nullptr),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_sync_unless(nullptr, nullptr, nullptr, nullptr, nullptr),
            FLOAT8_INVALID_ARGUMENT);
}

// --- calls that do not fit earlier ones

void expect_refused(const float8::Status& status, const std::string& words) {
  EXPECT_EQ(status.code(), FLOAT8_INVALID_ARGUMENT) << words;
  EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
}

TEST_F(SkippedSteps, AFirstStepSaysSo) {
  first_step_ = false;
  expect_refused(linear_.forward(with_workspace(forward_args(), workspace_.data()), nullptr),
                 "float8_step.first_step is 0");
  Buffer tensor(quantizer_.tensor_bytes());
  const float8::QuantizeArgs weight{.x = {w_.data()},
                                    .tensor = {tensor.data()},
                                    .scales = scales_.slots(state_.data(), 0).value()};
  expect_refused(quantizer_.run(with_workspace(weight, workspace_.data()), nullptr),
                 "float8_step.first_step is 0");
  const auto casts = float8::QuantizerList::plan(context_, {quantizer_}).value();
  expect_refused(casts.run({.workspace = {workspace_.data()}}, {weight}, nullptr),
                 "tensors[0]: float8_step.first_step is 0");
  first_step_ = true;
  good_step();
  const auto saved = scales_.save(state_.data(), nullptr).value();
  good_step();
  // A loaded state has seen steps; one that a trainer initialises again has not.
  ASSERT_TRUE(scales_.init(state_.data(), nullptr));
  expect_refused(linear_.forward(with_workspace(forward_args(), workspace_.data()), nullptr),
                 "first_step is 0");
  ASSERT_TRUE(scales_.load(state_.data(), saved, nullptr));
  EXPECT_TRUE(linear_.forward(with_workspace(forward_args(), workspace_.data()), nullptr));
  // So has one whose bytes the trainer kept itself.
  const std::vector<uint8_t> copy = bytes(state_);
  ASSERT_TRUE(scales_.init(state_.data(), nullptr));
  std::memcpy(state_.data(), copy.data(), copy.size());
  EXPECT_TRUE(linear_.forward(with_workspace(forward_args(), workspace_.data()), nullptr));
}

TEST_F(SkippedSteps, ABackwardFitsItsForward) {
  good_step();
  ASSERT_TRUE(linear_.forward(with_workspace(forward_args(), workspace_.data()), nullptr));
  float8::BackwardArgs args;
  args.dy.data = dy_.data();
  args.saved.data = saved_.data();
  args.dx.data = dx_.data();
  args.dw.data = dw_.data();
  args.scales = scales_.slots(state_.data(), 0).value();
  args.m = kM - 8;
  const auto backward = [&] {
    return linear_.backward(with_workspace(args, workspace_.data()), nullptr);
  };
  expect_refused(backward(), "float8_backward_args.m is 32");
  args.m = kM;
  EXPECT_TRUE(backward());

  Buffer tensor(quantizer_.tensor_bytes());
  ASSERT_TRUE(quantizer_.run({.x = {w_.data()},
                              .tensor = {tensor.data()},
                              .workspace = {workspace_.data()},
                              .scales = args.scales},
                             nullptr));
  const float8::Tensor weight = quantizer_.view(tensor.data(), kN).value();
  args.w.fp8 = &weight;
  expect_refused(backward(), "float8_backward_args.w.fp8 is given");
  float8::ForwardArgs forward = forward_args();
  forward.w.fp8 = &weight;
  ASSERT_TRUE(linear_.forward(with_workspace(forward, workspace_.data()), nullptr));
  EXPECT_TRUE(backward());
  args.w.fp8 = nullptr;
  expect_refused(backward(), "float8_backward_args.w.fp8 is NULL");
  // A buffer that was moved is unknown, and accepted.
  Buffer moved(saved_.bytes());
  std::memcpy(moved.data(), saved_.data(), saved_.bytes());
  args.saved.data = moved.data();
  args.w.fp8 = &weight;
  EXPECT_TRUE(backward());
}

}  // namespace
}  // namespace f8::runtime
