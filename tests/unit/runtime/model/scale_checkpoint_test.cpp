// Scale states out of the device and back: resumed bitwise, and refused where anything is wrong.
#include "runtime/model/scale_checkpoint.hpp"

#include <bit>
#include <cstring>
#include <float8/float8.hpp>
#include <fstream>

#include "base/file.hpp"
#include "base/hash.hpp"
#include "recipes/scales/scale_state.hpp"
#include "runtime/c_abi/common.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::FakeCuda;
using testing::Fixture;
using testing::says;

class ScaleCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    state_ = Buffer(scales_.bytes());
    ASSERT_TRUE(scales_.init(state_.data(), nullptr));
    for (int step = 0; step < 5; ++step) advance(scales_, state_, step);
    // The checkpoint is taken in the middle of a step, and with a scale that is no number.
    scales_.amaxes(state_.data())[1] = 0x40123456;
    scales_.amaxes(state_.data())[2] = 0x7fc00001;
  }

  static void advance(const DelayedScales& scales, Buffer& state, int step) {
    for (uint32_t i = 0; i < scales.count(); ++i) {
      scales.amaxes(state.data())[i] = 0x3f800000U + static_cast<uint32_t>(step) * 0x1234567U + i;
    }
    ASSERT_TRUE(scales.update(state.data(), nullptr));
  }
  [[nodiscard]] std::string saved(const DelayedScales& scales, Buffer& state) const {
    std::string bytes(saved_state_bytes(scales), '\0');
    const Status status =
        save_state(scales, state.data(), std::as_writable_bytes(std::span(bytes)), nullptr);
    EXPECT_TRUE(status) << status.error().message;
    return bytes;
  }
  [[nodiscard]] static Status load(const DelayedScales& scales, Buffer& state,
                                   std::string_view bytes) {
    return load_state(scales, state.data(), std::as_bytes(std::span(bytes)), nullptr);
  }

  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
  std::vector<DelayedSlot> slots_ = {
      {Dtype::kE4m3, false}, {Dtype::kE5m2, false}, {Dtype::kE4m3, true}, {Dtype::kE5m2, true}};
  DelayedScales scales_ = DelayedScales::plan(context_, slots_, {.history = 3}).value();
  Buffer state_{0};
};

TEST_F(ScaleCheckpoint, RestoresEveryBit) {
  const std::string bytes = saved(scales_, state_);
  EXPECT_EQ(cuda_.synchronisations, 1);
  Buffer other(scales_.bytes());
  ASSERT_TRUE(load(scales_, other, bytes));
  EXPECT_EQ(cuda_.synchronisations, 2);
  EXPECT_EQ(std::memcmp(other.data(), state_.data(), scales_.bytes()), 0);
  EXPECT_TRUE(other.guard_is_whole());
  EXPECT_EQ(saved(scales_, other), bytes);
}

TEST_F(ScaleCheckpoint, IsWhatTheGrammarSays) {
  const std::string bytes = saved(scales_, state_);
  ASSERT_EQ(bytes.size(), 16U + 8 + 4 * 4 * (5 + 3) + 32);
  EXPECT_EQ(bytes.substr(0, 16), "float8-scales 1\n");
  const auto word = [&](size_t i) {
    uint32_t value = 0;
    std::memcpy(&value, bytes.data() + 16 + 4 * i, 4);
    return value;
  };
  const auto scale = [&](size_t slot, size_t at) {
    return std::bit_cast<uint32_t>(scales_.slots(state_.data(), slot).scale[at]);
  };
  EXPECT_EQ(word(0), 4U);  // count
  EXPECT_EQ(word(1), 3U);  // length
  for (uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(word(2 + i), i);                                      // format
    EXPECT_EQ(word(6 + i), *scales_.slots(state_.data(), i).amax);  // amax
    EXPECT_EQ(word(10 + i), scale(i, 0));                           // scale
    EXPECT_EQ(word(14 + i), scale(i, kernels::kInverse));           // inverse
    EXPECT_EQ(word(18 + i), 0x3f800000U + 4 * 0x1234567U + i) << "newest";
    EXPECT_EQ(word(26 + i), 0x3f800000U + 2 * 0x1234567U + i) << "oldest";
    EXPECT_EQ(word(30 + i), 0U);  // non_finite
  }
  EXPECT_EQ(bytes.substr(bytes.size() - 32), hash_hex(bytes.substr(0, bytes.size() - 32)));
}

// A training run that stops and goes on gives the bits of one that does not.
TEST(ScaleCheckpointRun, ResumesBitwise) {
  FakeCuda cuda;
  Fixture s(cuda, testing::describe("delayed", {40, 32, 48}), 40);
  const auto step = [&](int i) {
    s.first_step = i == 0;
    for (auto& value : s.xm.values) value *= i % 2 == 0 ? 1.5F : 0.25F;
    s.x = Buffer(s.xm);
    ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
    ASSERT_TRUE(s.linear->backward(s.backward(), nullptr));
    ASSERT_TRUE(s.delayed->update(s.state.data(), nullptr));
  };
  for (int i = 0; i < 3; ++i) step(i);
  std::string bytes(saved_state_bytes(*s.delayed), '\0');
  ASSERT_TRUE(
      save_state(*s.delayed, s.state.data(), std::as_writable_bytes(std::span(bytes)), nullptr));
  const auto x = s.xm;
  for (int i = 3; i < 6; ++i) step(i);
  const auto y = s.y.bf16();
  const auto dw = s.dw.bf16();

  std::memset(s.state.data(), testing::kPoison, s.state.bytes());
  ASSERT_TRUE(load_state(*s.delayed, s.state.data(), std::as_bytes(std::span(bytes)), nullptr));
  s.xm = x;
  for (int i = 3; i < 6; ++i) step(i);
  EXPECT_EQ(s.y.bf16(), y);
  EXPECT_EQ(s.dw.bf16(), dw);
}

TEST_F(ScaleCheckpoint, RefusesWhatIsNotTheSameAndTouchesNothing) {
  const std::string bytes = saved(scales_, state_);
  Buffer other(scales_.bytes());
  const auto refused = [&](const DelayedScales& scales, std::string_view given, ErrorCode code,
                           std::string_view words) {
    Buffer target(std::max<size_t>(scales.bytes(), 16));
    const Status status = load(scales, target, given);
    ASSERT_FALSE(status) << words;
    EXPECT_EQ(status.error().code, code) << status.error().message;
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
    EXPECT_TRUE(target.untouched()) << words;
  };
  using enum ErrorCode;
  const std::string_view all = bytes;
  refused(scales_, "", kCorrupt, "not a scale state");
  refused(scales_, "float8-table 1\n", kCorrupt, "not a scale state");
  refused(scales_, all.substr(0, 15), kUnsupported, "version");
  refused(scales_, all.substr(0, 20), kCorrupt, "it was cut short");
  refused(scales_, all.substr(0, all.size() - 1), kCorrupt, "it was cut short");
  refused(scales_, bytes + "x", kCorrupt, "something follows it");
  std::string changed = bytes;
  changed[14] = '2';
  refused(scales_, changed, kUnsupported, "version '2'");
  for (size_t i = 16 + 8; i < bytes.size(); ++i) {
    changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ 4);
    refused(scales_, changed, kCorrupt, "not those that were saved");
  }
  const auto planned = [&](std::vector<DelayedSlot> slots, int history) {
    return DelayedScales::plan(context_, slots, {.history = history}).value();
  };
  std::vector<DelayedSlot> fewer(slots_.begin(), slots_.end() - 1);
  refused(planned(fewer, 3), all, kInvalidArgument, "of 4 operands");
  refused(planned({}, 3), all, kInvalidArgument, "these linears have 0");
  refused(planned(slots_, 4), all, kInvalidArgument, "histories of 3");
  std::swap(slots_[1], slots_[2]);
  refused(planned(slots_, 3), all, kInvalidArgument, "has e5m2 as operand 1");
}

TEST_F(ScaleCheckpoint, OptionsThatAreNoStateMayDiffer) {
  const std::string bytes = saved(scales_, state_);
  const auto other =
      DelayedScales::plan(context_, slots_,
                          {.history = 3, .scale_from = ScaleFrom::kMostRecent, .margin = 1})
          .value();
  Buffer state(other.bytes());
  EXPECT_TRUE(load(other, state, bytes));
}

TEST_F(ScaleCheckpoint, DeviceErrorsReachTheCaller) {
  std::string bytes = saved(scales_, state_);
  const auto failed = [](const Status& status, std::string_view words) {
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, ErrorCode::kCuda);
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
  };
  const auto save = [&] {
    return save_state(scales_, state_.data(), std::as_writable_bytes(std::span(bytes)), nullptr);
  };
  const std::string before = bytes;
  cuda_.copy_result = CUDA_ERROR_ILLEGAL_ADDRESS;
  failed(save(), "restart the process");
  failed(load(scales_, state_, bytes), "cuMemcpyHtoDAsync");
  cuda_.copy_result = CUDA_SUCCESS;
  cuda_.synchronize_result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  failed(save(), "cuStreamSynchronize");
  EXPECT_EQ(bytes, before) << "a failed save writes nothing";
}

TEST_F(ScaleCheckpoint, MisuseIsOneClearError) {
  std::string bytes = saved(scales_, state_);
  const auto refused = [](const Status& status, std::string_view words) {
    ASSERT_FALSE(status) << words;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
  };
  const auto out = std::as_writable_bytes(std::span(bytes));
  refused(save_state(scales_, nullptr, out, nullptr), "state is NULL");
  refused(save_state(scales_, state_.data() + 4, out, nullptr), "aligned");
  refused(save_state(scales_, state_.data(), out.first(out.size() - 1), nullptr), "are needed");
  refused(load_state(scales_, nullptr, out, nullptr), "state is NULL");
}

// The same through the public headers, with a file.
TEST_F(ScaleCheckpoint, ThroughTheInterface) {
  const float8_linear linear{
      Linear::plan(context_, testing::describe("delayed", {16, 32, 48})).value()};
  const float8_linear* list[] = {&linear};
  float8_context context{context_};
  float8_scales_desc desc{};
  desc.struct_size = sizeof desc;
  desc.linears = list;
  desc.count = 1;
  float8_scales* scales = nullptr;
  ASSERT_EQ(float8_scales_plan(&context, &desc, &scales), FLOAT8_OK) << float8_last_error();
  Buffer state(float8_scales_bytes(scales));
  ASSERT_EQ(float8_scales_init(scales, state.data(), nullptr), FLOAT8_OK);
  advance(scales->delayed, state, 3);
  std::vector<uint8_t> bytes(float8_scales_saved_bytes(scales));
  ASSERT_EQ(float8_scales_save(scales, state.data(), bytes.data(), bytes.size(), nullptr),
            FLOAT8_OK)
      << float8_last_error();
  const testing::ScratchDirectory directory;
  const std::string path = directory.path() + "/scales";
  ASSERT_EQ(float8_scales_save_file(scales, state.data(), path.c_str(), nullptr), FLOAT8_OK);
  EXPECT_EQ(read_file(path).value(), std::string(bytes.begin(), bytes.end()));
  // Saving over a private file keeps it private; a link is followed.
  fs::permissions(path, fs::perms(0600));
  fs::create_symlink("scales", directory.path() + "/link");
  const std::string link = directory.path() + "/link";
  ASSERT_EQ(float8_scales_save_file(scales, state.data(), link.c_str(), nullptr), FLOAT8_OK);
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(fs::status(path).permissions(), fs::perms(0600));
  EXPECT_EQ(float8_scales_load_file(scales, state.data(), "/dev/zero", nullptr),
            FLOAT8_INVALID_ARGUMENT);
  const std::vector<uint8_t> before(state.data(), state.data() + state.bytes());
  const auto loads = [&](auto&& call) {
    std::memset(state.data(), 0, state.bytes());
    EXPECT_EQ(call(), FLOAT8_OK) << float8_last_error();
    EXPECT_EQ(std::memcmp(state.data(), before.data(), before.size()), 0);
  };
  loads([&] {
    return float8_scales_load(scales, state.data(), bytes.data(), bytes.size(), nullptr);
  });
  loads([&] { return float8_scales_load_file(scales, state.data(), path.c_str(), nullptr); });

  std::ofstream(path) << "float8-scales 1\n";
  EXPECT_EQ(float8_scales_load_file(scales, state.data(), path.c_str(), nullptr), FLOAT8_CORRUPT);
  EXPECT_NE(std::string_view(float8_last_error()).find(path + ": a scale state of 16 bytes"),
            std::string_view::npos)
      << float8_last_error();
  EXPECT_EQ(float8_scales_load_file(scales, state.data(), "/nowhere", nullptr), FLOAT8_NOT_FOUND);
  EXPECT_EQ(float8_scales_save_file(scales, state.data(), "/nowhere/x", nullptr), FLOAT8_IO)
      << float8_last_error();
  EXPECT_EQ(float8_scales_saved_bytes(nullptr), 0U);
  EXPECT_EQ(float8_scales_save(scales, state.data(), nullptr, 9, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_save(nullptr, nullptr, bytes.data(), 9, nullptr),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_load(scales, state.data(), nullptr, 0, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_load(nullptr, nullptr, bytes.data(), 9, nullptr),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_save_file(scales, state.data(), nullptr, nullptr),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_load_file(nullptr, nullptr, "x", nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(std::memcmp(state.data(), before.data(), before.size()), 0);
  float8_scales_destroy(scales);
}

}  // namespace
}  // namespace f8::runtime
