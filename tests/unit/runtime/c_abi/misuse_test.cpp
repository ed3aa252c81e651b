// Every misuse of a call has its status and words that say which argument and what to do, and
// launches nothing; and calls at random never do anything else.
#include <float8/float8.hpp>
#include <functional>
#include <random>

#include "runtime/c_abi/common.hpp"
#include "tests/unit/runtime/c_abi/small_shape.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::FakeCublasLt;
using testing::FakeCuda;
using testing::Fixture;

struct Args {
  float8_forward_args forward{};
  float8_backward_args backward{};
  float8_quantize_args weight{};
  float8_step step{};
  void* workspace = nullptr;
};

LinearDesc described(const char* recipe) {
  LinearDesc desc = testing::describe(recipe, kShape);
  desc.bias = true;
  return desc;
}

class Misuse : public ::testing::Test {
 public:
  [[nodiscard]] float8_status forward(const Args& call) const {
    auto args = call.forward;
    args.step = &call.step;
    return float8_linear_forward(&linear_, given(args, call.workspace), nullptr);
  }
  [[nodiscard]] float8_status backward(const Args& call) const {
    auto args = call.backward;
    args.step = &call.step;
    return float8_linear_backward(&linear_, given(args, call.workspace), nullptr);
  }
  [[nodiscard]] float8_status cast(const Args& call) const {
    auto args = call.weight;
    args.step = &call.step;
    return float8_quantize(&quantizer_, given(args, call.workspace), nullptr);
  }

 protected:
  explicit Misuse(const char* recipe = "tensorwise")
      : s_(cuda_, described(recipe), kShape.m), weight_(s_) {}

  [[nodiscard]] Args good() {
    Args call;
    float8_forward_args& f = call.forward;
    f.struct_size = sizeof f;
    f.x.data = s_.x.data();
    f.w.data = s_.w.data();
    f.y.data = s_.y.data();
    f.saved.data = s_.saved.data();
    f.m = kShape.m;
    f.bias = s_.bias.data();
    float8_backward_args& b = call.backward;
    b.struct_size = sizeof b;
    b.dy.data = s_.dy.data();
    b.saved.data = s_.saved.data();
    b.dx.data = s_.dx.data();
    b.dw.data = s_.dw.data();
    b.m = kShape.m;
    b.x.data = s_.x.data();
    b.w.data = s_.w.data();
    call.weight = weight_.call();
    call.weight.struct_size = sizeof call.weight;
    f.scales = b.scales =
        call.weight.scales = {{s_.slots.amax, const_cast<float*>(s_.slots.scale)}};
    call.workspace = s_.workspace.data();
    return call;
  }
  using Do = float8_status (Misuse::*)(const Args&) const;
  struct Row {
    Do call;
    std::function<void(Args&)> spoil;
    const char* words;
  };
  void expect_refused(const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      Args call = good();
      ASSERT_EQ((this->*row.call)(call), FLOAT8_OK) << float8_last_error();
      const size_t launches = cuda_.launches.size();
      const int memsets = cuda_.memsets;
      row.spoil(call);
      EXPECT_EQ((this->*row.call)(call), FLOAT8_INVALID_ARGUMENT) << row.words;
      EXPECT_NE(std::string_view(float8_last_error()).find(row.words), std::string_view::npos)
          << float8_last_error() << "\n  does not say: " << row.words;
      EXPECT_EQ(cuda_.launches.size(), launches) << row.words;
      EXPECT_EQ(cuda_.memsets, memsets) << row.words;
    }
  }
  // `by` bytes into the memory of another argument.
  static void* into(const void* pointer, size_t by) {
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(pointer)) + by;
  }

  FakeCuda cuda_;
  FakeCublasLt library_;
  Fixture s_;
  testing::Fp8Weight weight_;
  float8_linear linear_{s_.linear};
  float8_quantizer quantizer_{weight_.quantizer};
};

TEST_F(Misuse, OfAForward) {
  constexpr Do kForward = &Misuse::forward;
  expect_refused({
      {kForward, [](Args& c) { c.forward.struct_size = 3; }, "struct_size is 3"},
      {kForward, [](Args& c) { c.forward.y.reserved = 1; }, "y.reserved is 1"},
      {kForward, [](Args& c) { c.forward.y.accumulate = 1; },
       "float8_forward_args.y.accumulate is set"},
      {kForward, [](Args& c) { c.step.struct_size = 3; }, "float8_step: struct_size is 3"},
      {kForward, [](Args& c) { c.forward.x.data = nullptr; }, "float8_forward_args.x.data is NULL"},
      {kForward, [](Args& c) { c.forward.w.data = nullptr; }, "float8_forward_args.w.data is NULL"},
      {kForward, [](Args& c) { c.forward.y.data = nullptr; }, "float8_forward_args.y.data is NULL"},
      {kForward, [](Args& c) { c.forward.bias = nullptr; }, "float8_forward_args.bias is NULL"},
      {kForward, [](Args& c) { c.workspace = nullptr; },
       "float8_forward_args.workspace.data is NULL"},
      {kForward, [](Args& c) { c.forward.x.data = into(c.forward.x.data, 2); },
       "x is not aligned to 16"},
      {kForward, [](Args& c) { c.forward.w.data = into(c.forward.w.data, 8); }, "w is not aligned"},
      {kForward, [](Args& c) { c.forward.y.data = into(c.forward.y.data, 1); }, "y is not aligned"},
      {kForward, [](Args& c) { c.forward.bias = into(c.forward.bias, 2); }, "bias is not aligned"},
      {kForward, [](Args& c) { c.forward.saved.data = into(c.forward.saved.data, 4); },
       "saved is not"},
      {kForward, [](Args& c) { c.workspace = into(c.workspace, 8); },
       "float8_linear_forward: float8_forward_args.workspace is not aligned"},
      {kForward, [](Args& c) { c.step.launch_counts.data = into(c.workspace, 8); },
       "launch_counts is not aligned"},
      {kForward, [](Args& c) { c.step.launch_counts.data = c.forward.y.data; }, "overlap"},
      {kForward, [](Args& c) { c.forward.m = -1; }, "m is -1"},
      {kForward, [](Args& c) { c.forward.m = 41; }, "m is 41"},
      {kForward, [](Args& c) { c.forward.m = INT64_MAX; }, "the plan was made for 0 to 40"},
      {kForward, [](Args& c) { c.forward.x.ld = 31; }, "x.ld is 31"},
      {kForward, [](Args& c) { c.forward.w.ld = 33; }, "w.ld is 33"},
      {kForward, [](Args& c) { c.forward.y.ld = -48; }, "y.ld is -48"},
      {kForward, [](Args& c) { c.forward.y.ld = INT64_MAX; }, "y.ld is"},
      {kForward, [](Args& c) { c.forward.y.data = const_cast<void*>(c.forward.x.data); },
       "float8_linear_forward: float8_forward_args.y (3840 bytes) and float8_forward_args.x (2560 "
       "bytes) overlap; float8_forward_args.y is written, give it memory of its "
       "own"},
      {kForward, [](Args& c) { c.forward.y.data = into(c.forward.w.data, 3072 - 16); },
       "y (3840 bytes) and float8_forward_args.w"},
      {kForward, [](Args& c) { c.forward.saved.data = c.forward.y.data; },
       "y (3840 bytes) and float8_forward_args.saved"},
      {kForward, [](Args& c) { c.forward.saved.data = into(c.workspace, 16); }, "saved"},
      {kForward, [](Args& c) { c.workspace = const_cast<void*>(c.forward.x.data); }, "workspace"},
      {kForward, [](Args& c) { c.forward.bias = into(c.forward.y.data, 16); },
       "and float8_forward_args.bias (96 bytes)"},
      {kForward, [](Args& c) { c.forward.workspace.bytes = 1; }, "workspace.bytes is 1, "},
      {kForward, [](Args& c) { c.forward.saved.bytes = 1; }, "saved.bytes is 1, "},
  });
}

TEST_F(Misuse, OfABackward) {
  constexpr Do kBackward = &Misuse::backward;
  expect_refused({
      {kBackward, [](Args& c) { c.backward.struct_size = 0; }, "struct_size is 0"},
      {kBackward, [](Args& c) { c.backward.dy.data = nullptr; },
       "float8_backward_args.dy.data is NULL"},
      {kBackward, [](Args& c) { c.backward.saved.data = nullptr; },
       "float8_backward_args.saved.data is NULL"},
      {kBackward, [](Args& c) { c.workspace = nullptr; },
       "float8_backward_args.workspace.data is NULL"},
      {kBackward, [](Args& c) { c.backward.dy.data = into(c.backward.dy.data, 2); },
       "dy is not aligned"},
      {kBackward, [](Args& c) { c.backward.dx.data = into(c.backward.dx.data, 2); },
       "dx is not aligned"},
      {kBackward, [](Args& c) { c.backward.dw.data = into(c.backward.dw.data, 2); },
       "dw is not aligned"},
      {kBackward, [](Args& c) { c.backward.m = 41; }, "m is 41"},
      {kBackward, [](Args& c) { c.backward.dy.ld = 40; }, "dy.ld is 40"},
      {kBackward, [](Args& c) { c.backward.dx.ld = 16; }, "dx.ld is 16"},
      {kBackward, [](Args& c) { c.backward.dw.ld = 33; }, "dw.ld is 33"},
      {kBackward, [](Args& c) { c.backward.dx.reserved = 2; }, "dx.reserved is 2"},
      {kBackward, [](Args& c) { c.backward.db.ld = 16; }, "db.ld is 16"},
      {kBackward, [](Args& c) { c.backward.db.data = c.backward.dw.data; }, "db is given"},
      {kBackward,
       [](Args& c) {
         c.backward.counters = static_cast<float8_cast_counters*>(c.backward.dw.data);
       },
       "float8_backward_args.counters is given"},
      {kBackward, [](Args& c) { c.backward.dw.accumulate = 1; }, "accumulate is set"},
      {kBackward, [](Args& c) { c.backward.dw.data = const_cast<void*>(c.backward.w.data); },
       "dw (3072 bytes)"},
      {kBackward, [](Args& c) { c.backward.dx.data = const_cast<void*>(c.backward.dy.data); },
       "and float8_backward_args.dy"},
      {kBackward, [](Args& c) { c.backward.dw.data = into(c.backward.dx.data, 2560 - 16); },
       "overlap"},
      {kBackward, [](Args& c) { c.backward.dx.data = const_cast<void*>(c.backward.saved.data); },
       "and float8_backward_args.saved"},
      {kBackward, [](Args& c) { c.workspace = const_cast<void*>(c.backward.saved.data); },
       "workspace"},
      {kBackward, [](Args& c) { c.backward.workspace.bytes = 1; }, "workspace.bytes is 1, "},
      {kBackward, [](Args& c) { c.backward.saved.bytes = 1; }, "saved.bytes is 1, "},
  });
  // The input is not read: dx may take its place.
  Args call = good();
  call.backward.dx.data = const_cast<void*>(call.backward.x.data);
  EXPECT_EQ(backward(call), FLOAT8_OK) << float8_last_error();
}

TEST_F(Misuse, OfACastOfTheWeight) {
  constexpr Do kCast = &Misuse::cast;
  expect_refused({
      {kCast, [](Args& c) { c.weight.struct_size = 5000; }, "struct_size is 5000"},
      {kCast, [](Args& c) { c.weight.x.data = nullptr; }, "float8_quantize_args.x.data is NULL"},
      {kCast, [](Args& c) { c.weight.tensor.data = nullptr; },
       "float8_quantize_args.tensor.data is NULL"},
      {kCast, [](Args& c) { c.workspace = nullptr; },
       "float8_quantize_args.workspace.data is NULL"},
      {kCast, [](Args& c) { c.weight.noop_flag = static_cast<uint32_t*>(c.weight.tensor.data); },
       "noop_flag is given"},
      {kCast, [](Args& c) { c.weight.x.ld = 8; }, "x.ld is 8"},
      {kCast, [](Args& c) { c.weight.tensor.data = const_cast<void*>(c.weight.x.data); }, "tensor"},
      {kCast, [](Args& c) { c.weight.tensor.data = c.workspace; }, "overlap"},
      {kCast, [](Args& c) { c.weight.tensor.bytes = 7; }, "tensor.bytes is 7, "},
      {kCast, [](Args& c) { c.weight.workspace.bytes = 7; }, "workspace.bytes is 7, "},
  });
}

class MisuseDelayed : public Misuse {
 protected:
  MisuseDelayed() : Misuse("delayed") {}
};

TEST_F(MisuseDelayed, OfTheScales) {
  expect_refused({
      {&Misuse::forward, [](Args& c) { c.forward.scales = {}; },
       "float8_forward_args.scales is empty"},
      {&Misuse::backward, [](Args& c) { c.backward.scales = {}; },
       "float8_backward_args.scales is empty"},
      {&Misuse::cast, [](Args& c) { c.weight.scales = {}; },
       "float8_quantize_args.scales is empty"},
      {&Misuse::forward, [](Args& c) { c.forward.scales.opaque[0] = c.forward.y.data; },
       "float8_scale_slots (amax)"},
      {&Misuse::forward, [](Args& c) { c.forward.scales.opaque[1] = c.forward.y.data; },
       "and float8_scale_slots ("},
      {&Misuse::forward,
       [](Args& c) { c.forward.scales.opaque[0] = into(c.forward.scales.opaque[0], 2); },
       "float8_scale_slots (amax) is not aligned"},
      {&Misuse::backward,
       [](Args& c) { c.backward.scales.opaque[1] = into(c.backward.scales.opaque[1], 1); },
       "float8_scale_slots (scale) is not aligned"},
      {&Misuse::cast,
       [](Args& c) { c.weight.scales.opaque[0] = into(c.weight.scales.opaque[0], 6); },
       "float8_scale_slots (amax) is not aligned"},
  });
}

class MisuseHighPrecision : public Misuse {
 protected:
  MisuseHighPrecision() : Misuse("rowwise_with_gw_hp") {}
};

TEST_F(MisuseHighPrecision, OfWhatBackwardReads) {
  constexpr Do kBackward = &Misuse::backward;
  expect_refused({
      {kBackward, [](Args& c) { c.backward.x.data = nullptr; },
       "float8_backward_args.x.data is NULL"},
      {kBackward, [](Args& c) { c.backward.x.data = into(c.backward.x.data, 8); },
       "x is not aligned"},
      {kBackward, [](Args& c) { c.backward.dx.data = const_cast<void*>(c.backward.x.data); },
       "dx (2560 bytes) and float8_backward_args.x (2560 bytes) overlap"},
  });
}

TEST_F(Misuse, CudaErrorsReachTheCaller) {
  const Args call = good();
  const auto fails = [&](CUresult& where, CUresult with, float8_status status, const char* words) {
    where = with;
    EXPECT_EQ(forward(call), status) << words;
    EXPECT_NE(std::string_view(float8_last_error()).find(words), std::string_view::npos)
        << float8_last_error();
    where = CUDA_SUCCESS;
    EXPECT_EQ(forward(call), FLOAT8_OK) << float8_last_error();
  };
  fails(cuda_.launch_result, CUDA_ERROR_ILLEGAL_ADDRESS, FLOAT8_CUDA, "restart the process");
  fails(cuda_.launch_result, CUDA_ERROR_OUT_OF_MEMORY, FLOAT8_OUT_OF_MEMORY, "out of memory");
  fails(cuda_.launch_result, CUDA_ERROR_INVALID_VALUE, FLOAT8_CUDA, "cuLaunchKernelEx");
}

// Descriptions and arguments at random: a status out of the list, words for every failure, and no
// memory touched that a call was not given. Sanitizer builds watch the rest.
TEST_F(Misuse, CallsAtRandom) {
  float8_context context{s_.context};
  std::mt19937_64 random(7);
  const auto any = [&](auto... choices) {
    const std::array<std::common_type_t<decltype(choices)...>, sizeof...(choices)> all{choices...};
    return all[random() % all.size()];
  };
  const auto rarely = [&] { return random() % 8 == 0; };
  cuda_.emulate = cuda_.touch_memory = false;
  const auto expect_words = [](float8_status status) {
    if (status == FLOAT8_OK) return;
    EXPECT_STRNE(float8_status_string(status), "unknown status");
    EXPECT_STRNE(float8_last_error(), "");
    EXPECT_EQ(std::string_view(float8_last_error()).find('\n'), std::string_view::npos);
  };
  const auto pointer = [&](const void* usual) -> void* {
    if (!rarely()) return const_cast<void*>(usual);
    return any(static_cast<void*>(nullptr), into(usual, 2), into(usual, 16),
               static_cast<void*>(s_.workspace.data()), static_cast<void*>(s_.y.data()));
  };
  const auto number = [&](int64_t usual) -> int64_t {
    if (!rarely()) return usual;
    return any(int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{7}, int64_t{48}, int64_t{1} << 30,
               INT64_MAX, INT64_MIN);
  };
  const auto flag = [&] { return static_cast<int32_t>(rarely() ? number(1) : 0); };
  int good_calls = 0;
  for (int i = 0; i < 20000; ++i) {
    Args call = good();
    float8_forward_args& f = call.forward;
    if (rarely()) f.struct_size = random() % 6000;
    f.x.data = pointer(f.x.data);
    f.w.data = pointer(f.w.data);
    f.y.data = pointer(f.y.data);
    f.saved.data = pointer(f.saved.data);
    f.bias = pointer(f.bias);
    f.w.fp8 = rarely() ? &weight_.view : nullptr;
    f.m = number(f.m);
    f.x.ld = number(0);
    f.w.ld = number(0);
    f.y.ld = number(0);
    call.step.first_step = flag();
    f.y.reserved = flag();
    f.workspace.bytes = static_cast<size_t>(number(0));
    float8_backward_args& b = call.backward;
    if (rarely()) b.struct_size = random() % 6000;
    b.dy.data = pointer(b.dy.data);
    b.dx.data = pointer(b.dx.data);
    b.dw.data = pointer(b.dw.data);
    b.saved.data = pointer(b.saved.data);
    b.x.data = pointer(b.x.data);
    b.w.data = pointer(b.w.data);
    b.w.fp8 = rarely() ? &weight_.view : nullptr;
    b.m = number(b.m);
    b.dy.ld = number(0);
    b.dx.ld = number(0);
    b.dw.ld = number(0);
    b.dw.accumulate = flag();
    b.db.data = rarely() ? pointer(s_.bias.data()) : nullptr;
    b.counters = rarely() ? static_cast<float8_cast_counters*>(pointer(s_.y.data())) : nullptr;
    call.workspace = pointer(call.workspace);
    // A size beyond a struct's end would be read there.
    if (f.struct_size > sizeof f) f.struct_size = 0;
    if (b.struct_size > sizeof b) b.struct_size = 0;
    cuda_.launches.clear();
    for (const float8_status status : {forward(call), backward(call), cast(call)}) {
      expect_words(status);
      good_calls += status == FLOAT8_OK ? 1 : 0;
    }
  }
  EXPECT_GT(good_calls, 1000);

  int planned = 0;
  for (int i = 0; i < 300; ++i) {
    float8_recipe recipe{};
    recipe.struct_size = sizeof recipe;
    for (float8_gemm_setting* gemm : {&recipe.output, &recipe.grad_input, &recipe.grad_weight}) {
      for (float8_cast_setting* operand : {&gemm->a, &gemm->b}) {
        operand->scaling = rarely() ? static_cast<int32_t>(number(1)) : 0;
        operand->granularity = rarely() ? static_cast<int32_t>(random() % 5) : 0;
        operand->format = rarely() ? static_cast<int32_t>(random() % 3) : 0;
        operand->pow2 = flag();
      }
      gemm->fast = flag();
    }
    float8_linear_desc desc{};
    desc.struct_size = sizeof desc;
    desc.m_max = number(16);
    desc.n = number(48);
    desc.k = number(32);
    desc.recipe = any(static_cast<const char*>(nullptr), "delayed", "", "\x01%s\n");
    desc.custom_recipe = rarely() ? nullptr : &recipe;
    if (desc.custom_recipe != nullptr && !rarely()) desc.recipe = nullptr;
    desc.grad_weight_dtype = flag();
    desc.bias = flag();
    desc.accumulate_grad_weight = flag();
    desc.no_grad_input = flag();
    desc.tensor_dtype = flag();
    desc.recompute = flag();
    desc.bias_grad = flag();
    desc.bias_grad_dtype = flag();
    desc.non_finite = flag();
    desc.count = flag();
    float8_linear* linear = nullptr;
    const float8_status status = float8_linear_plan(&context, &desc, &linear);
    expect_words(status);
    EXPECT_EQ(status == FLOAT8_OK, linear != nullptr);
    planned += status == FLOAT8_OK ? 1 : 0;
    float8_linear_destroy(linear);
  }
  EXPECT_GT(planned, 10);
}

}  // namespace
}  // namespace f8::runtime
