// Expert linears through the public header, on an emulated device: what is refused, and in which
// words.
#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace {

using float8::testing::emulated;
using float8::testing::Memory;
using float8::testing::memory;

class GroupLayoutAbi : public ::testing::Test {
 protected:
  float8_group_layout_plan* plan(int64_t m_max, int32_t experts) {
    const float8_group_layout_desc desc{
        .struct_size = sizeof desc, .m_max = m_max, .experts = experts, .reserved = 0};
    float8_group_layout_plan* out = nullptr;
    status_ = float8_group_layout_plan_create(context_.get(), &desc, &out);
    return out;
  }
  static bool says(std::string_view words) {
    return std::string_view(float8_last_error()).find(words) != std::string_view::npos;
  }

  float8::Context context_ = emulated();
  float8_status status_ = FLOAT8_OK;
};

TEST_F(GroupLayoutAbi, BytesFollowFromTheDescription) {
  float8_group_layout_plan* layouts = plan(1000, 6);
  ASSERT_NE(layouts, nullptr);
  // The header, five arrays, and tables of 64, 128, 192 and 256 rows.
  EXPECT_EQ(float8_group_layout_bytes(layouts),
            4 * (16 + 5 * 8 + 4 * (15 + 6 + 7 + 6 + 5 + 6 + 3 + 6)));
  float8_group_layout_plan_destroy(layouts);
  EXPECT_EQ(float8_group_layout_bytes(nullptr), 0U);
  float8_group_layout_plan_destroy(nullptr);
}

TEST_F(GroupLayoutAbi, RefusesSizes) {
  EXPECT_EQ(plan(0, 1), nullptr);
  EXPECT_EQ(status_, FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("m_max is 0"));
  EXPECT_EQ(plan(int64_t{1} << 31, 1), nullptr);
  EXPECT_EQ(plan(1, 0), nullptr);
  EXPECT_EQ(plan(1, FLOAT8_MAX_EXPERTS + 1), nullptr);
  EXPECT_TRUE(says("experts is 1025; it is 1 to 1024"));
}

TEST_F(GroupLayoutAbi, RefusesCalls) {
  float8_group_layout_plan* layouts = plan(100, 2);
  const size_t bytes = float8_group_layout_bytes(layouts);
  const Memory layout = memory(bytes);
  const std::vector<int32_t> offsets = {40, 90};
  const auto call = [&](float8_group_layout_args args) {
    return float8_group_layout(layouts, &args, nullptr);
  };
  EXPECT_EQ(call({.offsets = offsets.data(), .m = 100, .layout = {layout.get(), bytes}}),
            FLOAT8_OK);
  EXPECT_EQ(call({.offsets = offsets.data(), .m = 101, .layout = {layout.get()}}),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("m is 101; the plan was made for 0 to 100"));
  EXPECT_EQ(call({.m = 100, .layout = {layout.get()}}), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("offsets is NULL"));
  EXPECT_EQ(call({.offsets = offsets.data(), .m = 100}), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("layout is NULL"));
  EXPECT_EQ(call({.offsets = offsets.data(), .m = 100, .layout = {layout.get(), bytes - 1}}),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("bytes are needed"));
  EXPECT_EQ(call({.offsets = offsets.data(),
                  .m = 100,
                  .layout = {static_cast<char*>(layout.get()) + 4, 0}}),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("not aligned to 16 bytes"));
  float8_group_error error;
  EXPECT_EQ(float8_group_layout_error(layouts, nullptr, nullptr, &error), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_group_layout_error(layouts, layout.get(), nullptr, &error), FLOAT8_OK);
  EXPECT_EQ(error.code, FLOAT8_NO_GROUP_ERROR);
  EXPECT_EQ(error.expert, -1);
  float8_group_layout_plan_destroy(layouts);
}

}  // namespace
