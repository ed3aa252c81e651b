// Overlaps of a call's memory, and the questions to the driver about it.
#include "runtime/device/calls/call_memory.hpp"

#include "runtime/c_abi/common.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::FakeAllocation;
using testing::FakeCuda;
using testing::Fixture;
using testing::says;

Region region(uintptr_t begin, size_t rows, size_t row, size_t pitch) {
  const size_t bytes = rows == 0 || row == 0 ? 0 : (rows - 1) * pitch + row;
  return {begin, begin + bytes, row, pitch, nullptr, "", 1, Access::kRead, false, {}};
}

void expect_overlap(const Region& a, const Region& b, bool expected) {
  EXPECT_EQ(overlap(a, b), expected) << a.begin << " " << b.begin;
  EXPECT_EQ(overlap(b, a), expected) << a.begin << " " << b.begin;
}

TEST(Overlap, OfDenseRegions) {
  const Region a = region(1024, 4, 64, 64);
  expect_overlap(a, a, true);
  expect_overlap(a, region(1024 + 255, 1, 16, 16), true);
  expect_overlap(a, region(1024 + 256, 1, 16, 16), false);
  expect_overlap(a, region(1024 - 16, 1, 16, 16), false);
  expect_overlap(a, region(1024 - 15, 1, 16, 16), true);
}

// Against the bytes themselves.
TEST(Overlap, OfEveryTwoColumnsOfABuffer) {
  constexpr size_t kPitch = 12;
  const auto bytes = [](const Region& r) {
    std::vector<bool> touched(200);
    for (uintptr_t row = r.begin; row < r.end; row += r.pitch) {
      for (size_t i = 0; i < r.row; ++i) touched[row + i] = true;
    }
    return touched;
  };
  for (uintptr_t begin = 20; begin < 20 + 4 * kPitch; ++begin) {
    for (size_t width = 1; width <= kPitch; ++width) {
      for (size_t rows = 1; rows <= 3; ++rows) {
        const Region a = region(30, 3, 5, kPitch);
        const Region b = region(begin, rows, width, kPitch);
        const auto x = bytes(a);
        const auto y = bytes(b);
        bool touches = false;
        for (size_t i = 0; i < x.size(); ++i) touches = touches || (x[i] && y[i]);
        // Never missed; columns of one buffer whose rows do not wrap are told apart exactly.
        if (touches) expect_overlap(a, b, true);
        const bool wraps = (begin + 3 * kPitch - 30) % kPitch + width > kPitch;
        if (!touches && !wraps) expect_overlap(a, b, false);
      }
    }
  }
}

TEST(CallMemory, NothingIsNowhere) {
  CallMemory memory;
  memory.add("x", nullptr, 100, Access::kWrite);
  memory.add("y", &memory, 0, Access::kWrite);
  memory.add_rows("z", &memory, 0, 16, 32, Dtype::kBf16, Access::kWrite);
  EXPECT_TRUE(memory.regions().empty());
}

class CheckedPointers : public ::testing::Test {
 protected:
  CheckedPointers() : s_(cuda_, testing::describe("tensorwise", {40, 48, 32}), 40) {
    context_ = cuda_.context({.cache_dir = {}, .check_pointers = true});
    linear_ = Linear::plan(context_, s_.linear->desc()).value();
    for (testing::Buffer* buffer :
         {&s_.x, &s_.w, &s_.dy, &s_.y, &s_.dx, &s_.dw, &s_.workspace, &s_.saved}) {
      cuda_.allocations.push_back({.begin = buffer->data(), .bytes = buffer->bytes()});
    }
  }
  FakeAllocation& of(testing::Buffer& buffer) {
    return *std::ranges::find(cuda_.allocations, buffer.data(), &FakeAllocation::begin);
  }
  void refused(std::string_view words, Stream stream = nullptr) {
    const size_t launches = cuda_.launches.size();
    const Status status = linear_->forward(s_.forward(), stream);
    ASSERT_FALSE(status) << words;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), words)) << status.error().message;
    EXPECT_EQ(cuda_.launches.size(), launches);
  }

  FakeCuda cuda_;
  Fixture s_;
  std::shared_ptr<Context> context_;
  std::shared_ptr<const Linear> linear_;
};

TEST_F(CheckedPointers, GoodCallsPass) {
  auto* stream = reinterpret_cast<Stream>(uintptr_t{8});
  EXPECT_TRUE(linear_->forward(s_.forward(), stream));
  EXPECT_TRUE(linear_->backward(s_.backward(), stream));
  of(s_.y).managed = true;
  of(s_.y).device = -2;
  EXPECT_TRUE(linear_->forward(s_.forward(), nullptr));
}

TEST_F(CheckedPointers, BadOnesAreNamed) {
  FakeAllocation& x = of(s_.x);
  x.type = CU_MEMORYTYPE_HOST;
  refused("float8_linear_forward: float8_forward_args.x is pinned memory");
  x = {};
  refused("float8_linear_forward: float8_forward_args.x is ordinary memory");
  x = {.begin = s_.x.data(), .bytes = s_.x.bytes(), .device = 3};
  refused("float8_linear_forward: float8_forward_args.x is memory of device 3");
}

TEST_F(CheckedPointers, AllocationsAreLargeEnough) {
  of(s_.saved).bytes -= 1;
  refused(
      f8::format("float8_linear_forward: float8_forward_args.saved needs {} bytes, its allocation "
                 "ends {} bytes behind it",
                 s_.saved.bytes(), s_.saved.bytes() - 1));
  const Status backward = linear_->backward(s_.backward(), nullptr);
  ASSERT_FALSE(backward);
  EXPECT_TRUE(says(backward.error(), "float8_linear_backward: float8_backward_args.saved needs"));
}

TEST_F(CheckedPointers, StreamsAreOfTheContext) {
  cuda_.foreign_stream = reinterpret_cast<Stream>(uintptr_t{24});
  refused("float8_linear_forward: the stream is of another CUDA context", cuda_.foreign_stream);
}

TEST_F(CheckedPointers, NobodyAsksUnasked) {
  cuda_.allocations.clear();
  EXPECT_TRUE(s_.linear->forward(s_.forward(), nullptr));
}

}  // namespace
}  // namespace f8::runtime
