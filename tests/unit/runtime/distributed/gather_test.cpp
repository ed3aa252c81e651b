// What a gather asks of NCCL and of the host: one group, one byte an element and the scales, and no
// memory or lock of the system's.
#include "runtime/distributed/gather.hpp"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "recipes/fp8_layout.hpp"
#include "runtime/distributed/nccl_api.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"
#include "tests/unit/runtime/intercept.hpp"

namespace f8::runtime {
namespace {

constexpr int kGathering = 4;
constexpr int64_t kRows = 512, kCols = 256, kShard = kRows / kGathering;

struct Sent {
  std::array<size_t, 8> bytes{};
  std::array<bool, 8> in_place{};
  size_t count = 0;
  int groups = 0;
  int open = 0;
  int beside_a_group = 0;
} g_sent;

ncclResult_t all_gather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t,
                        cudaStream_t) {
  EXPECT_EQ(type, ncclUint8);
  g_sent.in_place[g_sent.count] = from == static_cast<const char*>(to) + count;  // of rank 1
  g_sent.bytes[g_sent.count++] = count;
  if (g_sent.open == 0) ++g_sent.beside_a_group;
  return ncclSuccess;
}

Nccl gathering_table() {
  Nccl table;
  table.all_gather = all_gather;
  table.comm_count = [](const ncclComm_t, int* out) {
    *out = kGathering;
    return ncclSuccess;
  };
  table.comm_user_rank = [](const ncclComm_t, int* out) {
    *out = 1;
    return ncclSuccess;
  };
  table.group_start = [] {
    ++g_sent.open;
    return ncclSuccess;
  };
  table.group_end = [] {
    --g_sent.open;
    ++g_sent.groups;
    return ncclSuccess;
  };
  return table;
}

// Memory that is aligned as a device's.
struct alignas(256) Line {
  std::array<unsigned char, 256> bytes;
};
using Memory = std::vector<Line>;
Memory memory(size_t bytes) {
  return Memory(bytes / sizeof(Line) + 1);
}

class GatherCost : public ::testing::Test {
 protected:
  void SetUp() override {
    g_sent = {};
    set_nccl_for_testing(&table_);
    context_ = Context::create(0).value();
  }
  void TearDown() override { set_nccl_for_testing(nullptr); }
  // The view of a rowwise weight of so many rows.
  static float8_tensor view(int64_t rows, Memory& q, Memory& qt, Memory& scales) {
    float8_tensor out;
    out.rows = rows;
    out.cols = kCols;
    q = memory(fp8_copy_bytes(rows, kCols));
    qt = memory(fp8_copy_bytes(kCols, rows));
    scales = memory(static_cast<size_t>(rows + kCols + 64) * sizeof(float));
    out.q = q.data();
    out.qt = qt.data();
    out.q_inverse_scale = reinterpret_cast<float*>(scales.data());
    out.qt_inverse_scale = out.q_inverse_scale + rows;
    out.ld_q = row_pitch(kCols);
    out.ld_qt = row_pitch(rows);
    out.q_setting.granularity = out.qt_setting.granularity = FLOAT8_AXIS;
    return out;
  }

  testing::FakeCuda cuda_;
  Nccl table_ = gathering_table();
  std::shared_ptr<Context> context_;
  ncclComm* communicator_ = reinterpret_cast<ncclComm*>(uintptr_t{16});
  std::array<Memory, 6> memory_;
};

TEST_F(GatherCost, IsOneByteAnElementInOneGroup) {
  GatherCall call;
  call.shard = view(kShard, memory_[0], memory_[1], memory_[2]);
  call.whole = view(kRows, memory_[3], memory_[4], memory_[5]);
  call.shard_rows = kShard;
  call.communicator = communicator_;
  Memory workspace = memory(gather_workspace_bytes(call.whole, kShard, kGathering));
  call.workspace.data = workspace.data();
  // Only qt takes the workspace.
  EXPECT_EQ(gather_workspace_bytes(call.whole, kShard, kGathering), size_t{kRows * kCols});
  ASSERT_TRUE(gather(*context_, call, nullptr));
  EXPECT_EQ(g_sent.groups, 1);
  EXPECT_EQ(g_sent.beside_a_group, 0);
  ASSERT_EQ(g_sent.count, 3U) << "q, its scales, qt; the scales of columns are on all ranks";
  EXPECT_EQ(g_sent.bytes[0], size_t{kShard * kCols});
  EXPECT_EQ(g_sent.bytes[1], size_t{kShard} * sizeof(float));
  EXPECT_EQ(g_sent.bytes[2], size_t{kShard * kCols});
  EXPECT_FALSE(g_sent.in_place[0]);
  EXPECT_TRUE(g_sent.in_place[2]);
}

TEST_F(GatherCost, AsksNothingOfTheHost) {
  if (!testing::Intercept::works()) GTEST_SKIP() << "a sanitizer has its own malloc";
  GatherCall call;
  call.shard = view(kShard, memory_[0], memory_[1], memory_[2]);
  call.whole = view(kRows, memory_[3], memory_[4], memory_[5]);
  call.shard_rows = kShard;
  call.communicator = communicator_;
  Memory workspace = memory(gather_workspace_bytes(call.whole, kShard, kGathering));
  call.workspace.data = workspace.data();
  testing::SystemCalls calls;
  {
    const testing::Intercept intercept;
    const Status done = gather(*context_, call, nullptr);
    calls = intercept.calls();
    ASSERT_TRUE(done);
  }
  EXPECT_EQ(calls, testing::SystemCalls{});
}

}  // namespace
}  // namespace f8::runtime
