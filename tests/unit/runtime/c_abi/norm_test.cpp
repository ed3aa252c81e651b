// RMSNorms through the C interface and the C++ header over it, on an emulated device: a struct of C has the bits of one
// of C++, and what the interface refuses before the library sees it.
#include <functional>

#include "tests/unit/runtime/c_abi/wrapper_checks.hpp"

namespace float8::testing {
namespace {

class Norm : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 5, kCols = 64;
  static constexpr size_t kBytes = kRows * kCols * 2;

  [[nodiscard]] RmsNormArgs forward() const {
    RmsNormArgs args;
    args.x.data = x_.get();
    args.weight = weight_.get();
    args.y.data = y_.get();
    args.rstd = static_cast<float*>(rstd_.get());
    args.rows = kRows;
    args.cols = kCols;
    args.eps = 1e-5F;
    return args;
  }
  [[nodiscard]] RmsNormBackwardArgs backward() const {
    RmsNormBackwardArgs args;
    args.dy.data = dy_.get();
    args.x.data = x_.get();
    args.weight = weight_.get();
    args.rstd = static_cast<const float*>(rstd_.get());
    args.dx.data = dx_.get();
    args.dweight.data = dweight_.get();
    args.workspace = {workspace_.get(), workspace_bytes()};
    args.rows = kRows;
    args.cols = kCols;
    return args;
  }
  [[nodiscard]] size_t workspace_bytes() const {
    return rms_norm_backward_workspace_bytes(context_, kRows, kCols);
  }
  template <class Args>
  void expect_refused(Args args, const std::function<void(Args&)>& change, const char* words) {
    change(args);
    float8_status status = FLOAT8_OK;
    if constexpr (std::is_same_v<Args, RmsNormArgs>) {
      status = float8_rms_norm(context_.get(), &args, nullptr);
    } else {
      status = float8_rms_norm_backward(context_.get(), &args, nullptr);
    }
    EXPECT_EQ(status, FLOAT8_INVALID_ARGUMENT) << words;
    EXPECT_NE(std::string(float8_last_error()).find(words), std::string::npos)
        << float8_last_error();
  }

  Context context_ = emulated();
  Memory x_ = random_bf16(kRows * kCols, 1), dy_ = random_bf16(kRows * kCols, 2),
         weight_ = random_bf16(kCols, 3), y_ = memory(kBytes), dx_ = memory(kBytes),
         dweight_ = memory(kCols * 2), rstd_ = memory(kRows * 4),
         workspace_ = memory(workspace_bytes());
};

TEST_F(Norm, ACallOfCppHasTheBitsOfC) {
  ASSERT_TRUE(rms_norm(context_, forward(), nullptr));
  ASSERT_TRUE(rms_norm_backward(context_, backward(), nullptr));
  const auto results = [&] {
    return bytes_of(y_, kBytes) + bytes_of(dx_, kBytes) + bytes_of(dweight_, kCols * 2);
  };
  const std::string found = results();
  for (const Memory* each : {&y_, &dx_}) std::memset(each->get(), 0, kBytes);
  const RmsNormArgs args = forward();
  const RmsNormBackwardArgs gradients = backward();
  ASSERT_EQ(float8_rms_norm(context_.get(), &args, nullptr), FLOAT8_OK);
  ASSERT_EQ(float8_rms_norm_backward(context_.get(), &gradients, nullptr), FLOAT8_OK);
  EXPECT_EQ(results(), found);
  EXPECT_NE(bytes_of(y_, kBytes), std::string(kBytes, '\0'));
  EXPECT_EQ(workspace_bytes(),
            float8_rms_norm_backward_workspace_bytes(context_.get(), kRows, kCols));
  EXPECT_EQ(float8_rms_norm_backward_workspace_bytes(nullptr, kRows, kCols), 0U);
}

TEST_F(Norm, NamesTheFieldThatItRefuses) {
  using Forward = RmsNormArgs;
  using Backward = RmsNormBackwardArgs;
  const float8_tensor tensor{};
  expect_refused<Forward>(
      forward(), [&](Forward& a) { a.x.fp8 = &tensor; }, "float8_rms_norm_args.x.fp8 is given");
  expect_refused<Forward>(
      forward(), [](Forward& a) { a.y.accumulate = 1; }, "float8_rms_norm_args.y.accumulate");
  expect_refused<Forward>(
      forward(), [](Forward& a) { a.rounding = 2; }, "float8_rms_norm_args.rounding is 2; 0 to 1");
  expect_refused<Forward>(
      forward(), [](Forward& a) { a.dtype = 3; }, "float8_rms_norm_args.dtype is 3; 0 to 2");
  expect_refused<Forward>(
      forward(), [](Forward& a) { a.struct_size = 20; }, "struct_size is 20");
  expect_refused<Backward>(
      backward(), [](Backward& a) { a.dx.accumulate = 1; }, "_backward_args.dx.accumulate");
  expect_refused<Backward>(
      backward(), [](Backward& a) { a.dweight.ld = 64; }, "dweight.ld is 64; it is a vector");
  expect_refused<Backward>(
      backward(), [&](Backward& a) { a.dy.fp8 = &tensor; }, "_backward_args.dy.fp8 is given");
  expect_refused<Backward>(
      backward(), [](Backward& a) { a.reserved = 1; }, "reserved is 1; it must be 0");
  expect_refused<Backward>(
      backward(), [](Backward& a) { a.workspace.bytes = 255; },
      "workspace.bytes is 255, 256 bytes are needed");
  EXPECT_EQ(float8_rms_norm(nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace float8::testing
