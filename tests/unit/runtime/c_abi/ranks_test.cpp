// Communicators of emulated devices through the public header: sums have one order, and ranks that do
// not fit each other, or do not come, get one clear error.
#include <gtest/gtest.h>

#include <float8/float8.hpp>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/device/emulated_driver.hpp"
#include "tests/unit/runtime/c_abi/emulated_memory.hpp"
#include "tests/unit/runtime/c_abi/emulated_ranks.hpp"

namespace f8::testing {
namespace {

constexpr int kPatience = 2000;  // milliseconds, of tests in which a rank does not come

TEST(Ranks, ReduceInTheirOrder) {
  Ranks ranks(3);
  // In another order the sums round to other numbers.
  const std::vector<std::vector<float>> values = {
      {1.0F, 1e8F, 3.0F}, {1e8F, 1.0F, -5.0F}, {-1e8F, -1e8F, 0.25F}};
  const std::vector<float> sums = {(1.0F + 1e8F) + -1e8F, (1e8F + 1.0F) + -1e8F, -1.75F};
  ranks.run([&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const float8::Communicator& communicator = ranks.communicator(rank);
    std::vector<float> all(3);
    ASSERT_TRUE(communicator.all_reduce(values[r].data(), all.data(), 3, FLOAT8_F32, nullptr));
    EXPECT_EQ(all, sums);
    std::vector<float> own = values[r];
    ASSERT_TRUE(communicator.reduce_scatter(own.data(), own.data() + r, 1, FLOAT8_F32, nullptr));
    EXPECT_EQ(own[r], sums[r]);
    std::vector<float> gathered(3);
    gathered[r] = static_cast<float>(rank);
    ASSERT_TRUE(
        communicator.all_gather(gathered.data() + r, gathered.data(), 1, FLOAT8_F32, nullptr));
    EXPECT_EQ(gathered, (std::vector<float>{0, 1, 2}));
    // 1 + 2^-8 is no bf16: each addition rounds.
    const std::vector<uint16_t> half = {static_cast<uint16_t>(rank == 0 ? 0x3f80 : 0x3b80)};
    std::vector<uint16_t> sum(1);
    ASSERT_TRUE(communicator.all_reduce(half.data(), sum.data(), 1, FLOAT8_BF16, nullptr));
    EXPECT_EQ(sum[0], 0x3f80);
  });
}

// What is the same of all ranks' errors: all but the call that failed.
std::string without_call(const std::string& error) {
  return error.substr(error.find(": ") + 2);
}

// Every rank's error is one line.
std::vector<std::string> errors(Ranks& ranks, const std::function<float8::Status(int)>& call) {
  std::vector<std::string> out(ranks.contexts.size());
  ranks.run([&](int rank) { out[static_cast<size_t>(rank)] = call(rank).message(); });
  return out;
}

TEST(Ranks, WithAnotherShapeAreOneError) {
  Ranks ranks(3);
  std::vector<float> from(8), to(24);
  const auto all = errors(ranks, [&](int rank) {
    std::vector<float> mine(24);
    return ranks.communicator(rank).all_gather(from.data(), mine.data(), rank == 1 ? 4 : 8,
                                               FLOAT8_F32, nullptr);
  });
  for (const std::string& error : all) {
    EXPECT_NE(error.find("operation 0 of the communicator"), std::string::npos) << error;
    EXPECT_NE(error.find("ncclAllGather of 4 elements"), std::string::npos) << error;
    EXPECT_NE(error.find("ncclAllGather of 8 elements"), std::string::npos) << error;
    EXPECT_EQ(error.find('\n'), std::string::npos);
    EXPECT_EQ(error, all[0]);
  }
  // The communicator is of no use any more, and says why.
  EXPECT_EQ(without_call(ranks.communicator(0).sync_amax(nullptr, 0, nullptr).message()),
            without_call(all[0]));
}

TEST(Ranks, WithAnotherOperationAreOneError) {
  Ranks ranks(2);
  std::vector<float> from(8);
  const auto all = errors(ranks, [&](int rank) {
    std::vector<float> to(16);
    return rank == 0
               ? ranks.communicator(0).all_gather(from.data(), to.data(), 8, FLOAT8_F32, nullptr)
               : ranks.communicator(1).all_reduce(from.data(), to.data(), 8, FLOAT8_F32, nullptr);
  });
  EXPECT_NE(all[0].find("ncclAllReduce"), std::string::npos) << all[0];
  EXPECT_NE(all[0].find("ncclAllGather"), std::string::npos) << all[0];
  EXPECT_EQ(without_call(all[0]), without_call(all[1]));
}

TEST(Ranks, ThatDoNotComeAreAnErrorNotAHang) {
  Ranks ranks(3, kPatience);
  std::vector<uint32_t> words(5);
  const auto all = errors(ranks, [&](int rank) {
    if (rank == 2) return float8::Status();
    std::vector<uint32_t> mine(5);
    return ranks.communicator(rank).sync_amax(mine.data(), 5, nullptr);
  });
  EXPECT_EQ(all[2], "");
  EXPECT_EQ(all[0], all[1]);
  EXPECT_NE(all[0].find("rank 2 did not come"), std::string::npos) << all[0];
  // The late rank sees it too.
  EXPECT_EQ(ranks.communicator(2).sync_amax(words.data(), 5, nullptr).message(), all[0]);
}

TEST(Ranks, ThatLeaveAreAnErrorAtOnce) {
  for (const bool aborts : {false, true}) {
    Ranks ranks(2, 60'000);
    std::vector<uint32_t> words(5);
    const auto all = errors(ranks, [&](int rank) {
      if (rank == 0) return ranks.communicator(0).sync_amax(words.data(), 5, nullptr);
      if (aborts) {
        ranks.communicator(1).abort();
      } else {
        float8_comm_destroy(ranks.communicator(1).get());
      }
      return float8::Status();
    });
    EXPECT_NE(all[0].find(aborts ? "rank 1 has aborted the communicator"
                                 : "rank 1 has left the communicator"),
              std::string::npos)
        << all[0];
    if (aborts) {
      EXPECT_NE(ranks.communicator(0)
                    .wait(ranks.context(0), "step 7", nullptr)
                    .message()
                    .find("step 7: rank 0 of 2: another rank failed"),
                std::string::npos);
    }
  }
}

// A rank whose shard has a wrong size is refused at once, and leaves; the others hear of it.
TEST(Ranks, WithAShardOfAWrongSizeAreNamed) {
  Ranks ranks(3);
  const auto all = errors(ranks, [&](int rank) {
    float8::QuantizerDesc desc;
    desc.operand = FLOAT8_WEIGHT;
    desc.rows_max = 32;
    desc.cols = 64;
    desc.recipe = float8::Recipe::rowwise();
    desc.over_ranks = true;
    const auto shard_plan = float8::Quantizer::plan(ranks.context(rank), desc).value();
    desc.rows_max = 96;
    desc.over_ranks = false;
    const auto whole_plan = float8::Quantizer::plan(ranks.context(rank), desc).value();
    const auto memory = float8::testing::memory(shard_plan.tensor_bytes());
    const auto whole_memory = float8::testing::memory(whole_plan.tensor_bytes());
    const float8::Tensor shard = shard_plan.view(memory.get(), rank == 1 ? 16 : 32).value();
    const float8::Tensor whole = whole_plan.view(whole_memory.get(), 96).value();
    const auto workspace =
        float8::testing::memory(float8::Communicator::gather_workspace_bytes(whole, 32, 3));
    float8::GatherArgs args;
    args.shard = &shard;
    args.whole = &whole;
    args.shard_rows = 32;
    auto status = ranks.communicator(rank).gather_tensor(
        ranks.context(rank), with_workspace(args, workspace.get()), nullptr);
    if (!status) ranks.communicator(rank).abort();
    return status;
  });
  EXPECT_EQ(all[1],
            "float8_gather_args.shard has 16 rows; rank 1 of 3 has 32 of the 96 rows of whole, "
            "where shard_rows is 32");
  for (const std::string& error : {all[0], all[2]}) {
    EXPECT_NE(error.find(" has aborted the communicator"), std::string::npos) << error;
  }
}

TEST(Ranks, OfTwoKindsAreRefused) {
  Ranks ranks(1);
  float8_tensor view{};
  view.struct_size = sizeof view;
  float8::GatherArgs args;
  args.shard = args.whole = &view;
  args.communicator = reinterpret_cast<float8_nccl_comm>(uintptr_t{16});
  EXPECT_EQ(float8_gather_tensor(ranks.context(0).get(), &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_NE(std::string_view(float8_last_error()).find("float8_gather_args.communicator is NCCL's"),
            std::string_view::npos)
      << float8_last_error();
}

// A graph that holds a collective is launched by each rank.
TEST(Ranks, CollectivesAreCapturedInAGraph) {
  const runtime::Driver& driver = runtime::emulation::driver();
  Ranks ranks(2);
  ranks.run([&](int rank) {
    const float8::Communicator& communicator = ranks.communicator(rank);
    CUstream stream = nullptr;
    ASSERT_EQ(driver.stream_create(&stream, 0), CUDA_SUCCESS);
    std::vector<float> sum = {1.0F + static_cast<float>(rank)};
    ASSERT_EQ(driver.stream_begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              CUDA_SUCCESS);
    ASSERT_TRUE(communicator.all_reduce(sum.data(), sum.data(), 1, FLOAT8_F32, stream));
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    ASSERT_EQ(driver.stream_end_capture(stream, &graph), CUDA_SUCCESS);
    EXPECT_EQ(sum[0], 1.0F + static_cast<float>(rank)) << "nothing ran yet";
    ASSERT_EQ(driver.graph_instantiate(&exec, graph, 0), CUDA_SUCCESS);
    ASSERT_EQ(driver.graph_launch(exec, stream), CUDA_SUCCESS);
    EXPECT_EQ(sum[0], 3.0F);
    ASSERT_EQ(driver.graph_launch(exec, stream), CUDA_SUCCESS);
    EXPECT_EQ(sum[0], 6.0F);
    driver.graph_exec_destroy(exec);
    driver.graph_destroy(graph);
    driver.stream_destroy(stream);
  });
}

}  // namespace
}  // namespace f8::testing
