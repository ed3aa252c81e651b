// Checks by the driver of each call that is given memory and a stream. Contexts that are
// asked to check pointers name what is not their device's, is too small, or is another CUDA
// context's, and enqueue nothing; on any context the driver's errors reach the caller.
#include <float8/float8.h>

#include <functional>
#include <random>

#include "runtime/c_abi/common.hpp"
#include "tests/unit/runtime/c_abi/small_shape.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::FakeAllocation;
using testing::FakeCuda;
using testing::Fixture;

class CAbiDriver : public ::testing::Test {
 protected:
  // A call, and the memory that it names.
  struct Call {
    const char* name;
    std::vector<std::pair<const char*, Buffer*>> memory;
    std::function<float8_status(float8_stream)> run;
  };

  CAbiDriver() {
    const float8_linear* const linears[] = {&linear_};
    float8_scales_desc desc{};
    desc.struct_size = sizeof desc;
    desc.linears = linears;
    desc.count = 1;
    EXPECT_EQ(float8_scales_plan(&context_, &desc, &scales_), FLOAT8_OK) << float8_last_error();
    const float8_quantizer* const quantizers[] = {&quantizer_};
    EXPECT_EQ(float8_quantizer_list_plan(&context_, quantizers, 1, &casts_), FLOAT8_OK);
    EXPECT_EQ(float8_quantizer_view(&quantizer_, tensor_.data(), nullptr, kShape.n, &view_),
              FLOAT8_OK);
    saved_state_.resize(float8_scales_saved_bytes(scales_));
    for (Buffer* buffer : {&s_.x, &s_.w, &s_.dy, &s_.bias, &s_.y, &s_.dx, &s_.dw, &s_.workspace,
                           &s_.saved, &tensor_, &s_.state, &db_, &counters_, &noop_flag_,
                           &found_inf_, &casts_workspace_, &fingerprint_}) {
      cuda_.allocations.push_back({.begin = buffer->data(), .bytes = buffer->bytes()});
    }
    EXPECT_EQ(float8_scales_init(scales_, s_.state.data(), nullptr), FLOAT8_OK)
        << float8_last_error();
    EXPECT_EQ(float8_scales_slots(scales_, s_.state.data(), 0, &slots_), FLOAT8_OK);
    EXPECT_EQ(float8_scales_save(scales_, s_.state.data(), saved_state_.data(), saved_state_.size(),
                                 nullptr),
              FLOAT8_OK);
  }
  ~CAbiDriver() override {
    float8_quantizer_list_destroy(casts_);
    float8_scales_destroy(scales_);
  }

  static LinearDesc description() {
    LinearDesc desc = testing::describe("delayed", kShape);
    desc.bias = desc.bias_grad = desc.count = true;
    return desc;
  }
  [[nodiscard]] float8_cast_counters* counters() {
    return reinterpret_cast<float8_cast_counters*>(counters_.data());
  }
  [[nodiscard]] float* found_inf() { return reinterpret_cast<float*>(found_inf_.data()); }
  [[nodiscard]] uint32_t* noop_flag() { return reinterpret_cast<uint32_t*>(noop_flag_.data()); }

  float8_status forward(float8_stream stream) {
    float8_forward_args args{};
    args.struct_size = sizeof args;
    args.x.data = s_.x.data();
    args.w.data = s_.w.data();
    args.y.data = s_.y.data();
    args.saved.data = s_.saved.data();
    args.m = kShape.m;
    args.bias = s_.bias.data();
    args.scales = slots_;
    args.step = &kFirstOfSteps;
    args.counters = counters();
    return float8_linear_forward(&linear_, given(args, s_.workspace.data()), stream);
  }
  float8_status forward_with_weight(float8_stream stream) {
    float8_forward_args args{};
    args.struct_size = sizeof args;
    args.x.data = s_.x.data();
    args.y.data = s_.y.data();
    args.m = kShape.m;
    args.bias = s_.bias.data();
    args.w.fp8 = &view_;
    args.scales = slots_;
    args.step = &kFirstOfSteps;
    return float8_linear_forward(&linear_, given(args, s_.workspace.data()), stream);
  }
  float8_status backward(float8_stream stream) {
    float8_backward_args args{};
    args.struct_size = sizeof args;
    args.dy.data = s_.dy.data();
    args.saved.data = s_.saved.data();
    args.dx.data = s_.dx.data();
    args.dw.data = s_.dw.data();
    args.db.data = db_.data();
    args.m = kShape.m;
    args.scales = slots_;
    args.step = &kFirstOfSteps;
    args.counters = counters();
    return float8_linear_backward(&linear_, given(args, s_.workspace.data()), stream);
  }
  [[nodiscard]] float8_quantize_args weight() {
    float8_quantize_args args{};
    args.struct_size = sizeof args;
    args.x.data = s_.w.data();
    args.tensor.data = tensor_.data();
    args.rows = kShape.n;
    args.scales = slots_;
    args.step = &kFirstOfSteps;
    args.counters = counters();
    args.noop_flag = noop_flag();
    return args;
  }

  std::vector<Call> calls() {
    return {
        {"float8_linear_forward",
         {{"float8_forward_args.w.fp8", &tensor_}},
         [this](float8_stream stream) { return forward_with_weight(stream); }},
        {"float8_linear_forward",
         {{"float8_forward_args.x", &s_.x},
          {"float8_forward_args.w", &s_.w},
          {"float8_forward_args.y", &s_.y},
          {"float8_forward_args.saved", &s_.saved},
          {"float8_forward_args.bias", &s_.bias},
          {"float8_scale_slots (amax)", &s_.state},
          {"float8_forward_args.counters", &counters_},
          {"float8_forward_args.workspace", &s_.workspace}},
         [this](float8_stream stream) { return forward(stream); }},
        {"float8_linear_backward",
         {{"float8_backward_args.dy", &s_.dy},
          {"float8_backward_args.dx", &s_.dx},
          {"float8_backward_args.dw", &s_.dw},
          {"float8_backward_args.db", &db_},
          {"float8_backward_args.saved", &s_.saved},
          {"float8_scale_slots (amax)", &s_.state},
          {"float8_backward_args.counters", &counters_},
          {"float8_backward_args.workspace", &s_.workspace}},
         [this](float8_stream stream) { return backward(stream); }},
        {"float8_quantize",
         {{"float8_quantize_args.x", &s_.w},
          {"float8_quantize_args.tensor", &tensor_},
          {"float8_quantize_args.noop_flag", &noop_flag_},
          {"float8_scale_slots (amax)", &s_.state},
          {"float8_quantize_args.counters", &counters_},
          {"float8_quantize_args.workspace", &s_.workspace}},
         [this](float8_stream stream) {
           const float8_quantize_args args = weight();
           return float8_quantize(&quantizer_, given(args, s_.workspace.data()), stream);
         }},
        {"float8_quantize_list_args.tensors[0]: float8_quantize_list",
         {{"float8_quantize_args.x", &s_.w},
          {"float8_quantize_args.tensor", &tensor_},
          {"float8_quantize_args.noop_flag", &noop_flag_},
          {"float8_quantize_list_args.workspace", &casts_workspace_}},
         [this](float8_stream stream) {
           float8_quantize_args args = weight();
           args.step = nullptr;
           args.noop_flag = nullptr;
           const auto all =
               listed({&args, 1}, casts_workspace_.data(), &kFirstOfSteps, noop_flag());
           return float8_quantize_list(casts_, &all, stream);
         }},
        {"args[0]: float8_weights_compare",
         {{"float8_fingerprint_args.w", &s_.w},
          {"float8_fingerprint_args.fingerprint", &fingerprint_},
          {"float8_fingerprint_args.noop_flag", &noop_flag_}},
         [this](float8_stream stream) {
           const float8_fingerprint_args args{.w = {s_.w.data()},
                                              .n = 4,
                                              .k = 16,
                                              .fingerprint = fingerprint_.data(),
                                              .noop_flag = noop_flag()};
           return float8_weights_compare(&context_, &args, 1, stream);
         }},
        {"float8_counters_clear",
         {{"counters", &counters_}},
         [this](float8_stream stream) {
           return float8_counters_clear(&context_, counters(), FLOAT8_LINEAR_COUNTERS, stream);
         }},
        {"float8_counters_snapshot",
         {{"counters", &counters_}},
         [this](float8_stream stream) {
           return float8_counters_snapshot(&context_, counters(), FLOAT8_LINEAR_COUNTERS, read_,
                                           stream);
         }},
        {"float8_scales_init",
         {{"state", &s_.state}},
         [this](float8_stream stream) {
           return float8_scales_init(scales_, s_.state.data(), stream);
         }},
        {"float8_scales_sync",
         {{"state", &s_.state}},
         [this](float8_stream stream) {
           return float8_scales_sync(scales_, s_.state.data(), nullptr, stream);
         }},
        {"float8_scales_sync",
         {{"state", &s_.state}},
         [this](float8_stream stream) {
           // Nothing may reach the ranks either: there is no NCCL behind this.
           return float8_scales_sync(
               scales_, s_.state.data(),
               broken_ ? reinterpret_cast<float8_nccl_comm>(uintptr_t{16}) : nullptr, stream);
         }},
        {"float8_scales_found_inf",
         {{"state", &s_.state}, {"found_inf", &found_inf_}},
         [this](float8_stream stream) {
           return float8_scales_found_inf(scales_, s_.state.data(), nullptr, found_inf(), stream);
         }},
        {"float8_scales_sync_unless",
         {{"found_inf", &found_inf_}},
         [this](float8_stream stream) {
           return float8_scales_sync_unless(scales_, s_.state.data(), found_inf(), nullptr, stream);
         }},
        {"float8_scales_discard",
         {{"state", &s_.state}},
         [this](float8_stream stream) {
           return float8_scales_discard(scales_, s_.state.data(), stream);
         }},
        {"float8_scales_save",
         {{"state", &s_.state}},
         [this](float8_stream stream) {
           return float8_scales_save(scales_, s_.state.data(), saved_state_.data(),
                                     saved_state_.size(), stream);
         }},
        {"float8_scales_load",
         {{"state", &s_.state}},
         [this](float8_stream stream) {
           return float8_scales_load(scales_, s_.state.data(), saved_state_.data(),
                                     saved_state_.size(), stream);
         }},
    };
  }

  void expect_refused(const Call& call, float8_stream stream, const std::string& words) {
    const size_t launches = cuda_.launches.size();
    const int memsets = cuda_.memsets;
    const int synchronisations = cuda_.synchronisations;
    broken_ = true;
    EXPECT_EQ(call.run(stream), FLOAT8_INVALID_ARGUMENT) << words;
    broken_ = false;
    EXPECT_EQ(std::string_view(float8_last_error()).substr(0, words.size()), words);
    EXPECT_EQ(cuda_.launches.size(), launches) << words;
    EXPECT_EQ(cuda_.memsets, memsets) << words;
    EXPECT_EQ(cuda_.synchronisations, synchronisations) << words;
  }

  FakeCuda cuda_;
  Fixture s_{cuda_, description(), kShape.m};
  float8_context context_{cuda_.context({.cache_dir = {}, .check_pointers = true})};
  float8_linear linear_{Linear::plan(context_.context, description()).value()};
  static QuantizerDesc of_weight() {
    QuantizerDesc desc = weight_of(description());
    desc.noop_flag = true;
    return desc;
  }
  float8_quantizer quantizer_{Quantizer::plan(context_.context, of_weight()).value()};
  Buffer tensor_{float8_quantizer_tensor_bytes(&quantizer_)};
  float8_tensor view_;
  Buffer db_{static_cast<size_t>(kShape.n) * 2};
  Buffer counters_{FLOAT8_LINEAR_COUNTERS * sizeof(float8_cast_counters)};
  Buffer noop_flag_{16};
  Buffer fingerprint_{std::vector<uint8_t>(FLOAT8_FINGERPRINT_BYTES)};
  Buffer found_inf_{16};
  Buffer casts_workspace_{size_t{4} << 20};
  float8_scales* scales_ = nullptr;
  float8_quantizer_list* casts_ = nullptr;
  float8_scale_slots slots_{};
  std::vector<unsigned char> saved_state_;
  float8_cast_counters read_[FLOAT8_LINEAR_COUNTERS];
  bool broken_ = false;
};

TEST_F(CAbiDriver, GoodCallsPass) {
  ASSERT_LE(float8_quantizer_list_workspace_bytes(casts_), casts_workspace_.bytes());
  auto* const stream = reinterpret_cast<float8_stream>(uintptr_t{8});
  for (const Call& call : calls()) {
    EXPECT_EQ(call.run(stream), FLOAT8_OK) << call.name << ": " << float8_last_error();
  }
}

TEST_F(CAbiDriver, MemoryThatIsNotTheDevicesIsNamed) {
  for (const Call& call : calls()) {
    for (const auto& [name, buffer] : call.memory) {
      FakeAllocation& memory =
          *std::ranges::find(cuda_.allocations, buffer->data(), &FakeAllocation::begin);
      const FakeAllocation good = memory;
      const std::string is = f8::format("{}: {} is ", call.name, name);
      memory.device = 3;
      expect_refused(call, nullptr, is + "memory of device 3");
      memory = good;
      memory.type = CU_MEMORYTYPE_HOST;
      expect_refused(call, nullptr, is + "pinned memory");
      memory = {};
      expect_refused(call, nullptr, is + "ordinary memory of the host");
      memory = good;
      memory.bytes = 1;
      expect_refused(call, nullptr, f8::format("{}: {} needs ", call.name, name));
      memory = good;
      EXPECT_EQ(call.run(nullptr), FLOAT8_OK) << float8_last_error();
    }
  }
}

TEST_F(CAbiDriver, StreamsOfAnotherContextAreNamed) {
  cuda_.foreign_stream = reinterpret_cast<float8_stream>(uintptr_t{24});
  for (const Call& call : calls()) {
    expect_refused(call, cuda_.foreign_stream,
                   f8::format("{}: the stream is of another CUDA context", call.name));
  }
}

// An error of the driver in a launch, a memset, a copy or a wait ends the call, which says what
// became of the CUDA context; the next call is as good as ever where the context is.
TEST_F(CAbiDriver, ErrorsOfTheDriverReachTheCaller) {
  struct Fault {
    CUresult result;
    float8_status status;
    std::string_view words;
  };
  for (const Call& call : calls()) {
    for (const auto& [result, status, words] :
         {Fault{CUDA_ERROR_ILLEGAL_ADDRESS, FLOAT8_CUDA, "restart the process"},
          Fault{CUDA_ERROR_OUT_OF_MEMORY, FLOAT8_OUT_OF_MEMORY, "out of memory"},
          Fault{CUDA_ERROR_INVALID_VALUE, FLOAT8_CUDA, "CUDA_ERROR_INVALID_VALUE"}}) {
      cuda_.launch_result = cuda_.memset_result = cuda_.copy_result = result;
      EXPECT_EQ(call.run(nullptr), status) << call.name;
      EXPECT_NE(std::string_view(float8_last_error()).find(words), std::string_view::npos)
          << call.name << ": " << float8_last_error();
      EXPECT_EQ(std::string_view(float8_last_error()).find('\n'), std::string_view::npos);
      cuda_.launch_result = cuda_.memset_result = cuda_.copy_result = CUDA_SUCCESS;
      EXPECT_EQ(call.run(nullptr), FLOAT8_OK) << call.name << ": " << float8_last_error();
    }
  }
}

// Pointers, sizes and numbers at random, which checked pointers make safe to try: a status out of
// the list and one line of words, whatever is asked. Sanitizer builds watch the rest.
TEST_F(CAbiDriver, CallsAtRandom) {
  std::mt19937_64 random(11);
  const auto rarely = [&] { return random() % 6 == 0; };
  std::array<Buffer*, 6> others{&s_.x,       &s_.state,         &counters_,
                                &noop_flag_, &casts_workspace_, &tensor_};
  const auto pointer = [&](void* usual) -> void* {
    if (!rarely()) return usual;
    switch (random() % 5) {
      case 0:
        return nullptr;
      case 1:
        return static_cast<uint8_t*>(usual) + 1 + random() % 40;
      case 2:
        return reinterpret_cast<void*>(random() & ~uint64_t{15});
      default:
        return others[random() % others.size()]->data();
    }
  };
  const auto number = [&](size_t usual) -> size_t {
    constexpr std::array<size_t, 6> kOdd{0, 2, 7, 4096, size_t{1} << 61, SIZE_MAX};
    return rarely() ? kOdd[random() % kOdd.size()] : usual;
  };
  const auto counters_at = [&] {
    return static_cast<float8_cast_counters*>(pointer(counters_.data()));
  };
  const auto noop_flag_at = [&] { return static_cast<uint32_t*>(pointer(noop_flag_.data())); };
  const auto state_at = [&] { return pointer(s_.state.data()); };
  const auto weights = [&] {
    std::array<float8_quantize_args, 2> args{weight(), weight()};
    for (float8_quantize_args& w : args) {
      if (rarely()) w.struct_size = random() % (sizeof w + 1);
      w.x.data = pointer(s_.w.data());
      w.tensor.data = pointer(tensor_.data());
      w.x.ld = static_cast<int64_t>(rarely() ? number(0) : 0);
      w.counters = counters_at();
      w.noop_flag = noop_flag_at();
      w.step = first_step_if(rarely());
      w.rows = static_cast<int64_t>(number(kShape.n));
      for (void*& slot : w.scales.opaque) slot = slot == nullptr ? nullptr : pointer(slot);
      w.workspace.bytes = number(0);
      w.tensor.bytes = number(0);
    }
    return args;
  };
  const std::vector<std::function<float8_status()>> tries = {
      [&] {
        return float8_counters_clear(&context_, counters_at(), number(FLOAT8_LINEAR_COUNTERS),
                                     nullptr);
      },
      [&] {
        return float8_counters_snapshot(&context_, counters_at(),
                                        std::min<size_t>(number(6), FLOAT8_LINEAR_COUNTERS), read_,
                                        nullptr);
      },
      [&] { return float8_scales_init(scales_, state_at(), nullptr); },
      [&] { return float8_scales_sync(scales_, state_at(), nullptr, nullptr); },
      [&] {
        std::vector<unsigned char> bytes = saved_state_;
        return float8_scales_save(scales_, state_at(), bytes.data(),
                                  std::min(number(bytes.size()), bytes.size()), nullptr);
      },
      [&] {
        std::vector<unsigned char> bytes = saved_state_;
        if (rarely()) bytes[random() % bytes.size()] ^= static_cast<unsigned char>(random());
        return float8_scales_load(scales_, state_at(), bytes.data(),
                                  std::min(number(bytes.size()), bytes.size()), nullptr);
      },
      [&] {
        float8_scale_slots slots{};
        return float8_scales_slots(scales_, state_at(), number(0), &slots);
      },
      [&] {
        char text[64];
        return float8_counters_text("x", rarely() ? nullptr : read_, text,
                                    std::min(number(64), sizeof text), nullptr);
      },
      [&] {
        const auto args = weights();
        return float8_quantize(&quantizer_, given(args[0], pointer(s_.workspace.data())), nullptr);
      },
      [&] {
        auto args = weights();
        for (float8_quantize_args& w : args) {
          if (!rarely()) w.step = nullptr;
          if (!rarely()) w.noop_flag = nullptr;
        }
        const size_t count = number(1) == 1 ? 1 : random() % 3;
        const auto all = listed({args.data(), count}, pointer(casts_workspace_.data()),
                                first_step_if(rarely()), noop_flag_at());
        return float8_quantize_list(casts_, &all, nullptr);
      },
      [&] {
        const float8_linear* const linears[] = {&linear_, rarely() ? nullptr : &linear_};
        float8_scales_desc desc{};
        desc.struct_size = number(sizeof desc) == sizeof desc ? sizeof desc : random() % 41;
        desc.linears = rarely() ? nullptr : linears;
        desc.count = random() % 3;
        desc.history = static_cast<int32_t>(number(3));
        desc.margin = static_cast<int32_t>(number(1));
        desc.scale_from = static_cast<int32_t>(number(0));
        desc.non_finite = static_cast<int32_t>(number(1));
        float8_scales* scales = nullptr;
        const float8_status status = float8_scales_plan(&context_, &desc, &scales);
        EXPECT_EQ(status == FLOAT8_OK, scales != nullptr);
        float8_scales_destroy(scales);
        return status;
      },
  };
  std::vector<int> good(tries.size());
  std::vector<int> bad(tries.size());
  for (int i = 0; i < 6000; ++i) {
    const size_t which = random() % tries.size();
    const float8_status status = tries[which]();
    ++(status == FLOAT8_OK ? good : bad)[which];
    cuda_.launches.clear();
    if (status == FLOAT8_OK) continue;
    EXPECT_STRNE(float8_status_string(status), "unknown status");
    EXPECT_NE(status, FLOAT8_INTERNAL) << float8_last_error();
    EXPECT_STRNE(float8_last_error(), "");
    EXPECT_EQ(std::string_view(float8_last_error()).find('\n'), std::string_view::npos);
  }
  for (size_t i = 0; i < tries.size(); ++i) {
    EXPECT_GT(good[i], 3) << i;
    EXPECT_GT(bad[i], 3) << i;
  }
}

// A run that is not asked to look does not pay for it.
TEST_F(CAbiDriver, NobodyAsksUnasked) {
  cuda_.allocations.clear();
  float8_context unasked{cuda_.context()};
  EXPECT_EQ(float8_counters_clear(&unasked, counters(), 1, nullptr), FLOAT8_OK);
  EXPECT_TRUE(s_.delayed->update(s_.state.data(), nullptr));
  EXPECT_TRUE(s_.linear->forward(s_.forward(), nullptr));
}

}  // namespace
}  // namespace f8::runtime
