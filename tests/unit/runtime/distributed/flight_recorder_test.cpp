// A rank that waits in vain on NCCL's communicators of one process says which rank did not come, and to
// what. NCCL and the device are fakes: collectives are never done unless a test says so.
#include "runtime/distributed/flight_recorder.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <thread>
#include <vector>

#include "runtime/distributed/communicators.hpp"
#include "runtime/distributed/nccl_api.hpp"
#include "runtime/distributed/scale_sync.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"
#include "tests/unit/runtime/intercept.hpp"

namespace f8::runtime {
namespace {

constexpr int kRanks = 3;
constexpr std::chrono::milliseconds kShort{2};

void expect_says(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_TRUE(testing::says(message, part)) << part << message;
}

// Rank r's communicator is the address of one of these.
struct FakeComm {
  int rank;
};
std::array<FakeComm, kRanks> g_comms;
ncclResult_t g_async = ncclSuccess;
CUresult g_stream = CUDA_SUCCESS;  // CUDA_ERROR_NOT_READY: its work is not done

Nccl table() {
  Nccl made;
  made.comm_init_all = [](ncclComm_t* out, int count, const int*) {
    for (int rank = 0; rank < count; ++rank) {
      g_comms[static_cast<size_t>(rank)].rank = rank;
      out[rank] = reinterpret_cast<ncclComm_t>(&g_comms[static_cast<size_t>(rank)]);
    }
    return ncclSuccess;
  };
  made.comm_destroy = made.comm_abort = [](ncclComm_t) { return ncclSuccess; };
  made.comm_count = [](const ncclComm_t, int* out) {
    *out = kRanks;
    return ncclSuccess;
  };
  made.comm_user_rank = [](const ncclComm_t communicator, int* out) {
    *out = reinterpret_cast<const FakeComm*>(communicator)->rank;
    return ncclSuccess;
  };
  made.comm_async_error = [](ncclComm_t, ncclResult_t* out) {
    *out = g_async;
    return ncclSuccess;
  };
  made.all_reduce = [](const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                       cudaStream_t) { return ncclSuccess; };
  made.all_gather = [](const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) {
    return ncclSuccess;
  };
  made.reduce_scatter = made.all_reduce;
  made.get_error_string = [](ncclResult_t) { return "a remote process is gone"; };
  return made;
}

class FlightRecorder : public ::testing::Test {
 protected:
  void SetUp() override {
    g_async = ncclSuccess;
    g_stream = CUDA_SUCCESS;
    set_nccl_for_testing(&table_);
    driver_.stream_query = [](CUstream) { return g_stream; };
    set_driver_for_testing(&driver_);
    cuda_.device_count = kRanks;
    std::vector<Context*> contexts;
    for (int rank = 0; rank < kRanks; ++rank) {
      contexts_.push_back(Context::create(rank).value());
      contexts.push_back(contexts_.back().get());
    }
    ranks_ = make_communicators(contexts, kRankTimeout).value();
    g_stream = CUDA_ERROR_NOT_READY;
  }
  void TearDown() override {
    for (ncclComm* one : ranks_) destroy_communicator(one);
    set_nccl_for_testing(nullptr);
  }

  void sync(size_t rank, size_t words) {
    ASSERT_TRUE(sync_amax(words_.data(), words, ranks_[rank], nullptr));
  }
  void collective(size_t rank, Collective what, size_t count) {
    ASSERT_TRUE(run_collective(what, words_.data(), words_.data(), count, Dtype::kBf16,
                               ranks_[rank], nullptr));
  }
  Status wait(size_t rank) {
    return wait_for_ranks(*contexts_[rank], ranks_[rank], "step 7", kShort, nullptr);
  }
  std::string error(size_t rank = 0) { return wait(rank).error().message; }
  void wait_well(size_t rank) {
    g_stream = CUDA_SUCCESS;
    ASSERT_TRUE(wait(rank));
    g_stream = CUDA_ERROR_NOT_READY;
  }

  testing::FakeCuda cuda_;
  Driver driver_ = cuda_.table();
  Nccl table_ = table();
  std::vector<std::shared_ptr<Context>> contexts_;
  std::vector<ncclComm*> ranks_;
  std::array<uint32_t, 8> words_{};
};

TEST_F(FlightRecorder, NamesTheRankThatDidNotComeAndTheOperation) {
  for (size_t rank = 0; rank < kRanks; ++rank) sync(rank, 5);
  sync(0, 6);
  sync(1, 6);
  collective(0, Collective::kReduceScatter, 8);  // enqueued, and far ahead of what it waits for
  expect_says(error(), {"step 7: rank 0 of 3", "operation 1",
                        "ncclAllReduce of 6 elements of 4 bytes", "rank 2 did not come"});
  EXPECT_EQ(wait(0).error().code, ErrorCode::kCuda);
  // The rank in the middle sees the same; the one that is behind does not blame another.
  EXPECT_NE(error(1).find("rank 2 did not come"), std::string::npos) << error(1);
  EXPECT_EQ(error(2).find("did not come"), std::string::npos) << error(2);
}

TEST_F(FlightRecorder, NamesAllRanksThatDidNotCome) {
  collective(0, Collective::kAllGather, 3);
  expect_says(error(),
              {"operation 0", "ncclAllGather of 3 elements of 2 bytes", "ranks 1, 2 did not come"});
}

TEST_F(FlightRecorder, NamesCallsThatDoNotFitEachOther) {
  for (size_t rank = 0; rank < kRanks; ++rank) sync(rank, 5);
  collective(0, Collective::kAllReduce, 4);
  collective(1, Collective::kAllReduce, 4);
  collective(2, Collective::kAllReduce, 3);
  expect_says(error(), {"operation 1", "rank 0 calls ncclAllReduce of 4 elements",
                        "rank 2 calls ncclAllReduce of 3 elements"});
}

// Replays of a graph are not seen, but the waits between them are.
TEST_F(FlightRecorder, NamesTheRankThatDidNotComeToTheWait) {
  for (size_t rank = 0; rank < kRanks; ++rank) {
    sync(rank, 5);
    wait_well(rank);
  }
  expect_says(error(), {"its calls (1)", "ranks 1, 2 did not come to this wait"});
  expect_says(error(2), {"its calls (1)", "and rank 1 did not come to this wait"});
}

TEST_F(FlightRecorder, SaysWhereItDoesNotKnow) {
  for (size_t rank = 0; rank < kRanks; ++rank) {
    sync(rank, 5);
    wait_well(rank);
  }
  static_cast<void>(error(1));
  static_cast<void>(error(2));
  expect_says(error(), {"its calls (1)", "a device is behind"});
}

TEST_F(FlightRecorder, KnowsNothingOfACommunicatorOfTheCallers) {
  FakeComm own{0};
  auto* const communicator = reinterpret_cast<ncclComm*>(&own);
  ASSERT_TRUE(sync_amax(words_.data(), 5, communicator, nullptr));
  expect_says(
      wait_for_ranks(*contexts_[0], communicator, "step 7", kShort, nullptr).error().message,
      {"rank 0 of 3", "float8_comms_create"});
}

TEST_F(FlightRecorder, AnAbortOfARankEndsTheWaitOfTheOthers) {
  sync(0, 5);
  abort_communicator(ranks_[2]);
  ranks_.pop_back();
  const Status status =
      wait_for_ranks(*contexts_[0], ranks_[0], "step 7", std::chrono::hours{1}, nullptr);
  ASSERT_FALSE(status);
  expect_says(status.error().message, {"step 7: rank 0 of 3: rank 2 has aborted"});
  g_async = ncclRemoteError;  // as with NCCL's own word for it
  expect_says(error(1), {"step 7: rank 1 of 3: rank 2 has aborted"});
}

TEST_F(FlightRecorder, ARankThatLeftIsNamed) {
  sync(0, 5);
  sync(1, 5);
  destroy_communicator(ranks_[2]);
  ranks_.pop_back();
  expect_says(error(), {"operation 0", "rank 2 did not come and left"});
}

// A communicator at the address of one that is gone is another one.
TEST_F(FlightRecorder, ForgetsCommunicatorsThatAreGone) {
  sync(0, 5);
  sync(0, 5);
  for (ncclComm* one : ranks_) destroy_communicator(one);
  std::vector<Context*> contexts;
  for (const auto& context : contexts_) contexts.push_back(context.get());
  ranks_ = make_communicators(contexts, kRankTimeout).value();
  sync(1, 5);
  expect_says(error(1), {"operation 0", "ranks 0, 2 did not come"});
}

// Only the latest calls are kept: of one that is long gone its number is known.
TEST_F(FlightRecorder, ARankThatIsFarBehindIsNamedToo) {
  for (int i = 0; i < 1000; ++i) {
    sync(0, 1 + static_cast<size_t>(i % 8));
    sync(1, 1 + static_cast<size_t>(i % 8));
  }
  sync(2, 1);
  expect_says(error(), {"operation 1 ", "rank 2 did not come"});
  for (int i = 1; i < 999; ++i) sync(2, 1 + static_cast<size_t>(i % 8));
  expect_says(error(), {"operation 999", "of 8 elements", "rank 2 did not come"});
}

TEST_F(FlightRecorder, ReadsWhatOtherThreadsWrite) {
  std::vector<std::thread> threads;
  for (size_t rank = 1; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (size_t i = 0; i < 2000; ++i) sync(rank, 1 + i % 8);
    });
  }
  for (size_t i = 0; i < 2000; ++i) sync(0, 1 + i % 8);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(error().find("calls ncclAllReduce"), std::string::npos);
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(error().find("all ranks have made its calls (2000)"), std::string::npos) << error();
}

TEST_F(FlightRecorder, AsksNothingOfTheHost) {
  if (!testing::Intercept::works()) GTEST_SKIP() << "a sanitizer has its own malloc";
  testing::SystemCalls calls;
  {
    const testing::Intercept intercept;
    const Status done = sync_amax(words_.data(), 5, ranks_[1], nullptr);
    calls = intercept.calls();
    ASSERT_TRUE(done);
  }
  EXPECT_EQ(calls, testing::SystemCalls{});
}

}  // namespace
}  // namespace f8::runtime
