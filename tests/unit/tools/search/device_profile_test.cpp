// Profiles of devices: what they predict, and what they are fitted to.
#include "tools/tuner/search/device_profile.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "base/file.hpp"
#include "tests/unit/tuning_db/sample.hpp"

namespace f8::tuner {
namespace {

using tuning_db::Database;

TEST(DeviceProfile, TheBuiltInOnesAreFittedToTheBuiltInRows) {
  const auto fitted = fit_profiles(Database::builtin().value());
  ASSERT_TRUE(fitted) << fitted.error().message;
  const auto built_in = device_profiles();
  ASSERT_EQ(fitted->size(), built_in.size());
  for (size_t i = 0; i < built_in.size(); ++i) {
    SCOPED_TRACE(built_in[i].name);
    EXPECT_EQ((*fitted)[i].name, built_in[i].name);
    EXPECT_EQ((*fitted)[i].rows, built_in[i].rows) << "fit them again: float8-tune profile fit -o";
    EXPECT_NEAR((*fitted)[i].fp8_tflops, built_in[i].fp8_tflops, 1);
    EXPECT_NEAR((*fitted)[i].memory_gb_per_s, built_in[i].memory_gb_per_s, 1);
    EXPECT_NEAR((*fitted)[i].settled, built_in[i].settled, 1e-3);
    EXPECT_LE(built_in[i].error_median, 0.07);
    EXPECT_LE(built_in[i].error_p95, 0.21);
  }
  EXPECT_EQ(profiles_source(*fitted).substr(0, 40), "// Written by `float8-tune profile fit`;");
}

TEST(DeviceProfile, ADeviceHasItsOwnOrTheFirst) {
  DeviceClass device;
  device.name = "NVIDIA H200";
  EXPECT_EQ(profile_of(device).name, "NVIDIA H200");
  device.name = "NVIDIA H800";
  EXPECT_EQ(profile_of(device).name, device_profiles().front().name);
}

TEST(DeviceProfile, PredictsByItsRates) {
  const DeviceProfile profile{.name = "made",
                              .settled = 1,
                              .fp8_tflops = 1000,
                              .bf16_tflops = 500,
                              .cast_gb_per_s = 3000,
                              .memory_gb_per_s = 1e9,
                              .launch_us = 1,
                              .bf16_launch_us = 2};
  const Shape shape{1000, 1000, 1000};
  // 6 GFLOP are 6 us; 3 million elements at 6 bytes are 6 us; 9 launches are 9 us.
  EXPECT_NEAR(profile.linear_ns(shape, true), 21e3, 1);
  EXPECT_NEAR(profile.linear_ns(shape, false), 12e3 + 6e3, 20);
  EXPECT_NEAR(profile.gemm_ns(2e9, true), 3e3, 1);
  EXPECT_NEAR(profile.gemm_ns(2e9, false), 6e3, 1);
}

class FitTest : public ::testing::Test {
 protected:
  Database filled(const DeviceProfile& truth, const std::vector<Shape>& shapes) {
    Database db = Database::open(folder_ / "t.f8db", tuning_db::OpenMode::kCreate).value();
    tuning_db::sweep_linears(
        db, "rowwise", shapes, [&](Shape s) { return truth.linear_ns(s, false); },
        [&](Shape s) { return truth.linear_ns(s, false) / truth.linear_ns(s, true); });
    return db;
  }
  void SetUp() override {
    folder_ = make_temp_directory(std::filesystem::temp_directory_path(), "profile_").value();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

TEST_F(FitTest, FindsTheRatesThatTheRowsHave) {
  const DeviceProfile truth{.name = "made",
                            .settled = 1,
                            .fp8_tflops = 900,
                            .bf16_tflops = 600,
                            .cast_gb_per_s = 2000,
                            .memory_gb_per_s = 5000,
                            .launch_us = 1.5,
                            .bf16_launch_us = 4};
  std::vector<Shape> shapes;
  for (const int64_t m : {128, 1024, 16384}) {
    for (const int64_t n : {256, 2048, 8192}) {
      for (const int64_t k : {512, 4096}) shapes.push_back({m, n, k});
    }
  }
  const auto fitted = fit_profiles(filled(truth, shapes));
  ASSERT_TRUE(fitted) << fitted.error().message;
  ASSERT_EQ(fitted->size(), 1U);
  const DeviceProfile& found = fitted->front();
  EXPECT_EQ(found.rows, 36);
  for (const auto field : {&DeviceProfile::fp8_tflops, &DeviceProfile::bf16_tflops,
                           &DeviceProfile::cast_gb_per_s, &DeviceProfile::memory_gb_per_s,
                           &DeviceProfile::launch_us, &DeviceProfile::bf16_launch_us}) {
    EXPECT_NEAR(found.*field / (truth.*field), 1, 0.01);
  }
  EXPECT_LE(found.error_p95, 0.01);
}

// Long linears alone show no rate of the memory, whatever the fit makes of their noise.
TEST_F(FitTest, ARateThatNoRowShowsIsNotSeen) {
  const DeviceProfile truth{.name = "made",
                            .settled = 1,
                            .fp8_tflops = 900,
                            .bf16_tflops = 600,
                            .cast_gb_per_s = 2000,
                            .memory_gb_per_s = 200'000,
                            .launch_us = 1.5,
                            .bf16_launch_us = 4};
  std::vector<Shape> shapes;
  for (const int64_t m : {2048, 8192, 16384}) {
    for (const int64_t n : {1024, 8192}) {
      for (const int64_t k : {1024, 4096}) shapes.push_back({m, n, k});
    }
  }
  const auto fitted = fit_profiles(filled(truth, shapes));
  ASSERT_TRUE(fitted) << fitted.error().message;
  EXPECT_EQ(fitted->front().memory_gb_per_s, kNotSeen);
  EXPECT_NEAR(fitted->front().cast_gb_per_s, 2000, 20);
}

TEST_F(FitTest, TooFewShapesAreAnErrorThatSaysHowMany) {
  const auto few = fit_profiles(filled(device_profiles().front(), {{1024, 1024, 1024}}));
  ASSERT_FALSE(few);
  EXPECT_EQ(few.error().code, ErrorCode::kInvalidArgument);
  for (const char* words :
       {"fp8 linears of 1 shapes are too few", "needs 12", "float8-tune sweep"}) {
    EXPECT_NE(few.error().message.find(words), std::string::npos) << few.error().message;
  }
  Database empty = Database::open(folder_ / "e.f8db", tuning_db::OpenMode::kCreate).value();
  const auto none = fit_profiles(empty);
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().message.find("no measured linears"), std::string::npos);
}

// Many rows of one shape tell nothing apart.
TEST_F(FitTest, ManyRowsOfOneShapeAreTooFewToo) {
  const DeviceProfile& truth = device_profiles().front();
  std::vector<Shape> alike(20, Shape{1024, 1024, 1024});
  Database db = filled(truth, {alike.front()});
  for (size_t i = 1; i < alike.size(); ++i) {
    tuning_db::sweep_linears(
        db, "rowwise", {alike[i]}, [&](Shape s) { return truth.linear_ns(s, false); },
        [](Shape) { return 1.2; });
  }
  EXPECT_FALSE(fit_profiles(db));
}

}  // namespace
}  // namespace f8::tuner
