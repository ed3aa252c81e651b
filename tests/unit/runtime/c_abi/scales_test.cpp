// The scale state through the C++ header: a model of several linears, several steps, one and more
// ranks.
#include <bit>
#include <float8/float8.hpp>

#include "runtime/c_abi/common.hpp"
#include "runtime/distributed/nccl_api.hpp"
#include "tests/golden.hpp"
#include "tests/unit/runtime/c_abi/small_shape.hpp"
#include "tests/unit/runtime/count_allocations.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::FakeCuda;
using testing::says;

class CAbiScales : public ::testing::Test {
 protected:
  CAbiScales() {
    for (const char* recipe : {"delayed", "tensorwise", "delayed"}) {
      handles_.push_back(
          {Linear::plan(context_.context, testing::describe(recipe, kShape)).value()});
    }
    for (const float8_linear& handle : handles_) linears_.push_back(&handle);
  }
  [[nodiscard]] float8_scales_desc desc() const {
    float8_scales_desc d{};
    d.struct_size = sizeof d;
    d.linears = linears_.data();
    d.count = linears_.size();
    return d;
  }

  FakeCuda cuda_;
  float8_context context_{cuda_.context()};
  std::vector<float8_linear> handles_;
  std::vector<const float8_linear*> linears_;
};

TEST_F(CAbiScales, LaysOutTheSlotsOfAllLinears) {
  float8_scales_desc d = desc();
  d.history = 3;
  float8_scales* scales = nullptr;
  ASSERT_EQ(float8_scales_plan(&context_, &d, &scales), FLOAT8_OK) << float8_last_error();
  EXPECT_EQ(scales->delayed.count(), 6U);
  EXPECT_EQ(scales->delayed.options().history, 3);
  Buffer state(float8_scales_bytes(scales));
  ASSERT_EQ(float8_scales_init(scales, state.data(), nullptr), FLOAT8_OK) << float8_last_error();
  float8_scale_slots slots{};
  ASSERT_EQ(float8_scales_slots(scales, state.data(), 2, &slots), FLOAT8_OK);
  const ScaleSlots expected = scales->delayed.slots(state.data(), 3);
  EXPECT_EQ(slots.opaque[0], expected.amax);
  EXPECT_EQ(slots.opaque[1], expected.scale);
  ASSERT_EQ(float8_scales_slots(scales, state.data(), 1, &slots), FLOAT8_OK);
  EXPECT_EQ(slots.opaque[0], nullptr);

  // A step: every slot's amax gives its scale, and is zeroed.
  uint32_t* amaxes = scales->delayed.amaxes(state.data());
  for (uint32_t i = 0; i < 6; ++i)
    amaxes[i] = std::bit_cast<uint32_t>(1.0F + static_cast<float>(i));
  cuda_.emulate = false;  // the emulation may allocate
  {
    const testing::CountAllocations counting;
    const float8_status status = float8_scales_sync(scales, state.data(), nullptr, nullptr);
    const int allocations = counting.count();
    ASSERT_EQ(status, FLOAT8_OK) << float8_last_error();
    EXPECT_EQ(allocations, 0);
  }
  cuda_.emulate = true;
  ASSERT_EQ(float8_scales_sync(scales, state.data(), nullptr, nullptr), FLOAT8_OK);
  EXPECT_EQ(expected.scale[0], 448.0F / 4);
  EXPECT_EQ(amaxes[3], 0U);
  EXPECT_TRUE(state.guard_is_whole());
  float8_scales_destroy(scales);
}

TEST_F(CAbiScales, OptionsAreTheCallers) {
  float8_scales_desc d = desc();
  float8_scales* scales = nullptr;
  ASSERT_EQ(float8_scales_plan(&context_, &d, &scales), FLOAT8_OK);
  EXPECT_EQ(scales->delayed.options(), DelayedOptions{});
  float8_scales_destroy(scales);
  d.history = 1024;
  d.scale_from = FLOAT8_SCALE_FROM_MOST_RECENT;
  d.margin = 2;
  d.non_finite = FLOAT8_SATURATE;
  ASSERT_EQ(float8_scales_plan(&context_, &d, &scales), FLOAT8_OK);
  EXPECT_EQ(scales->delayed.options(),
            (DelayedOptions{1024, ScaleFrom::kMostRecent, 2, NonFinite::kSaturate}));
  float8_scales_destroy(scales);
}

TEST_F(CAbiScales, NothingToScaleIsNothingToDo) {
  float8_scales_desc d = desc();
  d.linears = &linears_[1];
  d.count = 1;
  float8_scales* scales = nullptr;
  ASSERT_EQ(float8_scales_plan(&context_, &d, &scales), FLOAT8_OK) << float8_last_error();
  EXPECT_EQ(float8_scales_bytes(scales), 0U);
  float8_scale_slots slots{};
  EXPECT_EQ(float8_scales_init(scales, nullptr, nullptr), FLOAT8_OK);
  EXPECT_EQ(float8_scales_slots(scales, nullptr, 0, &slots), FLOAT8_OK);
  EXPECT_EQ(float8_scales_sync(scales, nullptr, nullptr, nullptr), FLOAT8_OK);
  EXPECT_TRUE(cuda_.launches.empty());
  float8_scales_destroy(scales);
}

struct AllReduce {
  const void* send;
  size_t count;
};
std::vector<AllReduce> g_reductions;

TEST_F(CAbiScales, RanksAgreeInOneAllReduce) {
  float8_scales_desc d = desc();
  float8_scales* scales = nullptr;
  ASSERT_EQ(float8_scales_plan(&context_, &d, &scales), FLOAT8_OK);
  Buffer state(float8_scales_bytes(scales));
  ASSERT_EQ(float8_scales_init(scales, state.data(), nullptr), FLOAT8_OK);
  Nccl table{};
  // The other rank's maxima are 2.
  table.all_reduce = [](const void* send, void* receive, size_t count, ncclDataType_t, ncclRedOp_t,
                        ncclComm_t, cudaStream_t) {
    g_reductions.push_back({send, count});
    std::fill_n(static_cast<uint32_t*>(receive), count, std::bit_cast<uint32_t>(2.0F));
    return ncclSuccess;
  };
  g_reductions.clear();
  set_nccl_for_testing(&table);
  auto* communicator = reinterpret_cast<float8_nccl_comm>(uintptr_t{16});
  const float8_status status = float8_scales_sync(scales, state.data(), communicator, nullptr);
  set_nccl_for_testing(nullptr);
  ASSERT_EQ(status, FLOAT8_OK) << float8_last_error();
  ASSERT_EQ(g_reductions.size(), 1U);
  EXPECT_EQ(g_reductions[0].send, state.data());
  EXPECT_EQ(g_reductions[0].count, 6U);
  EXPECT_EQ(scales->delayed.slots(state.data(), 0).scale[0], 448.0F / 2);
  float8_scales_destroy(scales);
}

// A linear's calls in a first step over ranks, of which the others have tensors with larger maxima.
class FirstStepOverRanks : public ::testing::Test {
 protected:
  static constexpr float kOther = 1000.0F;  // the largest of all ranks'

  FirstStepOverRanks() {
    table_.all_reduce = [](const void* send, void* receive, size_t count, ncclDataType_t,
                           ncclRedOp_t, ncclComm_t, cudaStream_t) {
      g_reductions.push_back({send, count});
      auto* bits = static_cast<uint32_t*>(receive);
      for (size_t i = 0; i < count; ++i) {
        bits[i] = std::max(bits[i], std::bit_cast<uint32_t>(kOther));
      }
      return ncclSuccess;
    };
    table_.get_error_string = [](ncclResult_t) { return "a rank is gone"; };
    set_nccl_for_testing(&table_);
    g_reductions.clear();
    const float8_linear* const linears[] = {&linear_};
    float8_scales_desc desc{};
    desc.struct_size = sizeof desc;
    desc.linears = linears;
    desc.count = 1;
    EXPECT_EQ(float8_scales_plan(&context_, &desc, &scales_), FLOAT8_OK) << float8_last_error();
    EXPECT_EQ(float8_scales_init(scales_, s_.state.data(), nullptr), FLOAT8_OK);
    EXPECT_EQ(float8_scales_slots(scales_, s_.state.data(), 0, &slots_), FLOAT8_OK);
  }
  ~FirstStepOverRanks() override {
    set_nccl_for_testing(nullptr);
    float8_scales_destroy(scales_);
  }

  template <class Args>
  [[nodiscard]] Args over_ranks(Args args) const {
    args.struct_size = sizeof args;
    args.scales = slots_;
    args.step = &over_ranks_;
    return args;
  }
  float8_status forward(const float8_forward_args& args) {
    return float8_linear_forward(&linear_, given(args, s_.workspace.data()), nullptr);
  }
  float8_status backward(const float8_backward_args& args) {
    return float8_linear_backward(&linear_, given(args, s_.workspace.data()), nullptr);
  }
  // The reductions of a call that succeeded.
  static size_t reductions(float8_status status) {
    EXPECT_EQ(status, FLOAT8_OK) << float8_last_error();
    return std::exchange(g_reductions, {}).size();
  }

  Nccl table_{};
  FakeCuda cuda_;
  testing::Fixture s_{cuda_, testing::describe("delayed", kShape), kShape.m};
  float8_context context_{s_.context};
  float8_linear linear_{s_.linear};
  float8_scales* scales_ = nullptr;
  float8_scale_slots slots_{};
  float8_step over_ranks_{.first_step = 1,
                          .ranks = reinterpret_cast<float8_nccl_comm>(uintptr_t{16})};
};

// Each call reduces the amaxes of its casts, and nothing else does.
TEST_F(FirstStepOverRanks, TakesScalesOfAllRanks) {
  ASSERT_LT(reference::amax(s_.xm, reference::AmaxOver::kTensor)[0], kOther);
  float8_forward_args f = over_ranks(s_.forward());
  float8_backward_args b = over_ranks(s_.backward());
  EXPECT_EQ(reductions(forward(f)), 1U);
  EXPECT_EQ(reductions(backward(b)), 1U);
  const auto expected = s_.expected({kOther, kOther, kOther});
  EXPECT_LE(reference::relative_error(expected.y, s_.values_y()), 2.5e-3);
  EXPECT_LE(reference::relative_error(expected.dx, s_.values_dx()), 2.5e-3);
  EXPECT_LE(reference::relative_error(expected.dw, s_.result_dw()), 2.5e-3);
  // The state has this rank's maxima, and the scales of all.
  const uint32_t* const own = scales_->delayed.amaxes(s_.state.data());
  EXPECT_EQ(own[0],
            std::bit_cast<uint32_t>(reference::amax(s_.xm, reference::AmaxOver::kTensor)[0]));
  EXPECT_EQ(scales_->delayed.slots(s_.state.data(), 0).scale[0], 448.0F / kOther);
  EXPECT_TRUE(s_.guards_are_whole());
  // Later steps reduce nothing.
  ASSERT_EQ(float8_scales_sync(scales_, s_.state.data(), nullptr, nullptr), FLOAT8_OK);
  f.step = b.step = nullptr;
  EXPECT_EQ(reductions(forward(f)), 0U);
  EXPECT_EQ(reductions(backward(b)), 0U);
}

// A weight alone or those of a model, to the same bits; one reduction for all of them.
TEST_F(FirstStepOverRanks, CastsWeightsWithOneReduction) {
  testing::Fp8Weight weight(s_);
  const float8_quantizer quantizer{weight.quantizer};
  const float8_quantize_args w = over_ranks(weight.call());
  EXPECT_EQ(reductions(float8_quantize(&quantizer, given(w, weight.workspace.data()), nullptr)),
            1U);
  const std::vector<uint8_t> alone = bytes(weight.tensor);
  const float8_quantizer* const quantizers[] = {&quantizer, &quantizer};
  float8_quantizer_list* casts = nullptr;
  ASSERT_EQ(float8_quantizer_list_plan(&context_, quantizers, 2, &casts), FLOAT8_OK);
  Buffer workspace(float8_quantizer_list_workspace_bytes(casts));
  Buffer second(weight.tensor.bytes());
  float8_quantize_args all[] = {w, w};
  all[0].step = all[1].step = nullptr;
  all[1].tensor.data = second.data();
  const auto list = listed(all, workspace.data(), &over_ranks_);
  EXPECT_EQ(reductions(float8_quantize_list(casts, &list, nullptr)), 1U);
  EXPECT_EQ(bytes(weight.tensor), alone);
  EXPECT_EQ(bytes(second), alone);
  EXPECT_TRUE(workspace.guard_is_whole() && second.guard_is_whole());
  all[1].step = &over_ranks_;
  EXPECT_EQ(float8_quantize_list(casts, &list, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_MESSAGE(float8_last_error(), "tensors[1]", "float8_quantize_args.step");
  float8_quantizer_list_destroy(casts);
}

TEST_F(FirstStepOverRanks, SaysWhatIsWrong) {
  float8_forward_args f = over_ranks(s_.forward());
  f.scales.opaque[2] = f.y.data;
  EXPECT_EQ(forward(f), FLOAT8_INVALID_ARGUMENT);
  EXPECT_MESSAGE(float8_last_error(), "float8_scale_slots", "12");
  f.scales.opaque[2] = nullptr;
  EXPECT_EQ(forward(f), FLOAT8_INVALID_ARGUMENT);
  EXPECT_MESSAGE(float8_last_error(), "float8_forward_args.scales");
  f.scales = slots_;
  table_.all_reduce = [](const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                         cudaStream_t) { return ncclSystemError; };
  EXPECT_EQ(forward(f), FLOAT8_CUDA);
  EXPECT_MESSAGE(float8_last_error());
}

TEST_F(CAbiScales, MisuseIsOneClearError) {
  float8_scales* scales = nullptr;
  const auto refused = [&](auto change, std::string_view words) {
    float8_scales_desc d = desc();
    change(d);
    scales = reinterpret_cast<float8_scales*>(uintptr_t{1});
    EXPECT_EQ(float8_scales_plan(&context_, &d, &scales), FLOAT8_INVALID_ARGUMENT) << words;
    EXPECT_MESSAGE(float8_last_error(), words);
    EXPECT_EQ(scales, nullptr);
  };
  refused([](auto& d) { d.struct_size = 1; }, "float8_scales_desc");
  refused([](auto& d) { d.linears = nullptr; });
  refused([](auto& d) { d.history = -1; }, "history");
  refused([](auto& d) { d.history = 1025; }, "1025");
  refused([](auto& d) { d.margin = 17; }, "17");
  refused([](auto& d) { d.scale_from = 2; }, "scale_from");
  refused([](auto& d) { d.non_finite = -1; }, "non_finite");
  linears_[2] = nullptr;
  refused([](auto&) {}, "linears[2]");
  linears_[2] = &handles_[2];
  const float8_linear foreign{
      Linear::plan(cuda_.context(), testing::describe("delayed", kShape)).value()};
  linears_[1] = &foreign;
  refused([](auto&) {}, "linears[1]");
  linears_[1] = &handles_[1];

  EXPECT_EQ(float8_scales_bytes(nullptr), 0U);
  float8_scales_destroy(nullptr);
  EXPECT_EQ(float8_scales_init(nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_sync(nullptr, nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  const float8_scales_desc d = desc();
  ASSERT_EQ(float8_scales_plan(&context_, &d, &scales), FLOAT8_OK);
  Buffer state(float8_scales_bytes(scales));
  float8_scale_slots slots{};
  EXPECT_EQ(float8_scales_init(scales, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_init(scales, state.data() + 4, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_sync(scales, nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_slots(scales, nullptr, 0, &slots), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_slots(scales, state.data(), 3, &slots), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_slots(scales, state.data(), 0, nullptr), FLOAT8_INVALID_ARGUMENT);
  float8_scales_destroy(scales);
}

}  // namespace
}  // namespace f8::runtime
