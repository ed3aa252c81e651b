#include "runtime/distributed/scale_sync.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "runtime/distributed/nccl_api.hpp"
#include "tests/golden.hpp"

namespace f8::runtime {
namespace {

struct Reduced {
  const void* send;
  void* receive;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  cudaStream_t stream;
};
std::vector<Reduced> g_calls;
ncclResult_t g_result = ncclSuccess;

ncclResult_t all_reduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, ncclComm_t, cudaStream_t stream) {
  g_calls.push_back({send, receive, count, type, op, stream});
  return g_result;
}
const char* error_string(ncclResult_t) {
  return "unhandled system error";
}

class ScaleSync : public ::testing::Test {
 protected:
  void SetUp() override {
    g_calls.clear();
    g_result = ncclSuccess;
    table_.all_reduce = all_reduce;
    table_.get_error_string = error_string;
    set_nccl_for_testing(&table_);
  }
  void TearDown() override { set_nccl_for_testing(nullptr); }

  Nccl table_;
  ncclComm* communicator_ = reinterpret_cast<ncclComm*>(uintptr_t{1});
  CUstream_st* stream_ = reinterpret_cast<CUstream_st*>(uintptr_t{2});
  uint32_t amaxes_[3] = {};
};

TEST_F(ScaleSync, IsOneAllReduceInPlace) {
  ASSERT_TRUE(sync_amax(amaxes_, 3, communicator_, stream_));
  ASSERT_EQ(g_calls.size(), 1U);
  EXPECT_EQ(g_calls[0].send, amaxes_);
  EXPECT_EQ(g_calls[0].receive, amaxes_);
  EXPECT_EQ(g_calls[0].count, 3U);
  EXPECT_EQ(g_calls[0].type, ncclUint32);
  EXPECT_EQ(g_calls[0].op, ncclMax);
  EXPECT_EQ(g_calls[0].stream, stream_);
}

TEST_F(ScaleSync, MisuseIsOneClearError) {
  EXPECT_EQ(sync_amax(amaxes_, 3, nullptr, stream_).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(sync_amax(nullptr, 3, communicator_, stream_).error().code,
            ErrorCode::kInvalidArgument);
  EXPECT_TRUE(g_calls.empty());
}

TEST_F(ScaleSync, NcclErrorsCarryItsWords) {
  g_result = ncclSystemError;
  const Status status = sync_amax(amaxes_, 3, communicator_, stream_);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kCuda);
  EXPECT_MESSAGE(status);
}

// The order that the reduction relies on.
TEST(AmaxBits, OrderAsMagnitudesWithNanAboveAll) {
  const auto bits = [](float v) { return std::bit_cast<uint32_t>(v); };
  const float inf = std::numeric_limits<float>::infinity();
  const float values[] = {0,    std::numeric_limits<float>::denorm_min(), 1e-30F,
                          1.0F, std::numeric_limits<float>::max(),        inf};
  for (size_t i = 1; i < std::size(values); ++i) EXPECT_LT(bits(values[i - 1]), bits(values[i]));
  EXPECT_LT(bits(inf), bits(std::numeric_limits<float>::quiet_NaN()));
}

}  // namespace
}  // namespace f8::runtime
