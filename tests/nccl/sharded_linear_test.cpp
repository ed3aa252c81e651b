// Ranks on the GPUs of this machine, a thread each, through the C interface: what the unit tests hold
// for emulated ranks, and what only a device shows: graphs, and a rank that does not come.
#include "tools/float8-tune/dist/sharded_linear.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>

#include "runtime/device/device_info.hpp"
#include "runtime/distributed/nccl_api.hpp"

namespace f8::cli {
namespace {

class GpuRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto count = runtime::device_count();
    if (!count) GTEST_SKIP() << count.error().message;
    if (const auto library = runtime::nccl(); !library) GTEST_SKIP() << library.error().message;
    if (*count < 2) GTEST_SKIP() << "one GPU";
    devices_ = *count;
  }
  // The first GPUs, joined.
  static DeviceRanks make(int count) {
    DeviceRanks ranks;
    for (int i = 0; i < count; ++i) {
      auto rank = DeviceRank::create(i, i, false, "");
      EXPECT_TRUE(rank) << rank.error().message;
      if (!rank) return {};
      ranks.push_back(std::move(*rank));
    }
    const Status joined = join_all(ranks, 0);
    EXPECT_TRUE(joined) << joined.error().message;
    return joined ? std::move(ranks) : DeviceRanks();
  }
  static void expect_good(const Status& status) { EXPECT_TRUE(status) << status.error().message; }
  int devices_ = 0;
};

TEST_F(GpuRanks, ShardedLinearsAreThoseOfOneDevice) {
  for (int count = 2; count <= devices_; count *= 2) {
    const DeviceRanks ranks = make(count);
    ASSERT_FALSE(ranks.empty());
    for (const char* recipe :
         {"tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"}) {
      for (const auto& [n, k] :
           {std::pair<int64_t, int64_t>{1024, 512}, {400, 144}, {4096, 2048}}) {
        SCOPED_TRACE(f8::format("{} {}x{} on {}", recipe, n, k, count));
        const auto findings = verify_sharded(
            ranks, {.recipe = recipe, .shape = {512, n, k}, .one_order = count == 2});
        ASSERT_TRUE(findings) << findings.error().message;
        for (const Finding& finding : *findings) {
          EXPECT_TRUE(finding.is_good()) << finding.check << ": " << finding.different
                                         << " differ, " << finding.sqnr_db << " dB";
          EXPECT_TRUE(finding.notes.empty()) << finding.notes.front();
        }
      }
    }
  }
}

// Captures a call of the rank, whose context is current, in a graph.
Result<CUgraphExec> captured(DeviceRank& rank, const std::function<Status()>& call) {
  const runtime::Driver& cuda = rank.driver();
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  F8_TRY(cuda.check(cuda.stream_begin_capture(rank.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                    "cuStreamBeginCapture"));
  F8_TRY(call());
  F8_TRY(cuda.check(cuda.stream_end_capture(rank.stream(), &graph), "cuStreamEndCapture"));
  const Status made = cuda.check(cuda.graph_instantiate(&exec, graph, 0), "cuGraphInstantiate");
  cuda.graph_destroy(graph);
  F8_TRY(made);
  return exec;
}

TEST_F(GpuRanks, CollectivesAreCapturedInAGraph) {
  const DeviceRanks ranks = make(2);
  ASSERT_FALSE(ranks.empty());
  std::vector<void*> values;
  for (const auto& rank : ranks) {
    const float value = 1.0F + static_cast<float>(rank->index());
    values.push_back(rank->upload(&value, sizeof value).value());
  }
  expect_good(run_ranks(ranks, [&](DeviceRank& rank) -> Status {
    void* const value = values[static_cast<size_t>(rank.index())];
    const auto sum = [&] {
      return of_call(rank.communicator().all_reduce(value, value, 1, FLOAT8_F32, rank.stream()));
    };
    F8_TRY(sum());  // connects the ranks
    F8_TRY(of_call(rank.communicator().wait(rank.context(), "a sum", rank.stream())));
    const runtime::Driver& cuda = rank.driver();
    const runtime::ScopedContext current(cuda, rank.primary());
    CUgraphExec exec = F8_TRY(captured(rank, sum));
    for (int i = 0; i < 2; ++i) {
      F8_TRY(cuda.check(cuda.graph_launch(exec, rank.stream()), "cuGraphLaunch"));
    }
    F8_TRY(of_call(rank.communicator().wait(rank.context(), "a graph", rank.stream())));
    cuda.graph_exec_destroy(exec);
    return {};
  }));
  for (size_t i = 0; i < ranks.size(); ++i) {
    float value = 0;
    std::memcpy(&value, ranks[i]->download(values[i], sizeof value).value().data(), sizeof value);
    EXPECT_EQ(value, 12.0F);  // 3, then twice doubled
  }
}

// A rank fails between two replays of a graph with collectives: it destroys its graph and aborts, and the other
// rank, whose replay waits for it, hears of it. NCCL waits for graphs before it aborts, so the other drops its own too.
TEST_F(GpuRanks, AnAbortEndsTheReplayOfTheOtherRank) {
  const DeviceRanks ranks = make(2);
  ASSERT_FALSE(ranks.empty());
  std::vector<void*> values;
  for (const auto& rank : ranks) values.push_back(rank->allocate(4).value());
  const Status status = run_ranks(ranks, [&](DeviceRank& rank) -> Status {
    void* const value = values[static_cast<size_t>(rank.index())];
    const auto sum = [&] {
      return of_call(rank.communicator().all_reduce(value, value, 1, FLOAT8_F32, rank.stream()));
    };
    const auto wait = [&](const char* what) {
      return of_call(rank.communicator().wait(rank.context(), what, rank.stream(), 60'000));
    };
    F8_TRY(sum());  // connects the ranks
    F8_TRY(wait("a sum"));
    const runtime::Driver& cuda = rank.driver();
    const runtime::ScopedContext current(cuda, rank.primary());
    CUgraphExec exec = F8_TRY(captured(rank, sum));
    F8_TRY(cuda.check(cuda.graph_launch(exec, rank.stream()), "cuGraphLaunch"));
    F8_TRY(wait("replay 1"));
    Status waited;
    if (rank.index() == 0) {
      F8_TRY(cuda.check(cuda.graph_launch(exec, rank.stream()), "cuGraphLaunch"));
      waited = wait("replay 2");
    }
    cuda.graph_exec_destroy(exec);
    if (rank.index() == 1) rank.communicator().abort();
    return waited;
  });
  ASSERT_FALSE(status);
  EXPECT_NE(
      status.error().message.find("replay 2: rank 0 of 2: rank 1 has aborted the communicator"),
      std::string::npos)
      << status.error().message;
}

TEST_F(GpuRanks, ARankThatDoesNotComeIsAnErrorNotAHang) {
  const DeviceRanks ranks = make(2);
  ASSERT_FALSE(ranks.empty());
  std::vector<void*> values;
  for (const auto& rank : ranks) values.push_back(rank->allocate(4).value());
  const auto sum = [&](DeviceRank& rank) {
    void* const value = values[static_cast<size_t>(rank.index())];
    return of_call(rank.communicator().all_reduce(value, value, 1, FLOAT8_F32, rank.stream()));
  };
  expect_good(run_ranks(ranks, [&](DeviceRank& rank) -> Status {
    F8_TRY(sum(rank));  // connects the ranks
    return of_call(rank.communicator().wait(rank.context(), "a sum", rank.stream()));
  }));
  const auto start = std::chrono::steady_clock::now();
  const Status status = run_ranks(ranks, [&](DeviceRank& rank) -> Status {
    if (rank.index() == 1) return {};
    F8_TRY(sum(rank));
    return of_call(rank.communicator().wait(rank.context(), "step 7", rank.stream(), 500));
  });
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kCuda);
  EXPECT_NE(status.error().message.find("step 7: rank 0 of 2"), std::string::npos)
      << status.error().message;
  EXPECT_NE(status.error().message.find("rank 1 did not come"), std::string::npos)
      << status.error().message;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

}  // namespace
}  // namespace f8::cli
