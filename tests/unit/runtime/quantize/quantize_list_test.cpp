// Lists of matrices cast alike, each with its own scales: the same bytes as one by one.
#include "runtime/quantize/quantize_list.hpp"

#include <algorithm>

#include "tests/unit/runtime/count_allocations.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::FakeCuda;
using testing::says;

// A matrix and everything that a cast of it may write.
struct Item {
  Item(const codegen::CastSpec& spec, MatrixSize size, uint64_t seed)
      : matrix(reference::random_matrix(size.rows, size.cols, seed)),
        x(matrix),
        q(fp8_copy_bytes(size.rows, size.cols)),
        qt(fp8_copy_bytes(size.cols, size.rows)),
        scale(32),
        inv_row(static_cast<size_t>(scale_floats(spec.scale_q, size.rows, size.cols)) * 4),
        inv_col(static_cast<size_t>(scale_floats(spec.scale_qt, size.cols, size.rows)) * 4) {}

  [[nodiscard]] QuantizeOperand operand() {
    return {.x = x.data(),
            .rows = matrix.rows,
            .cols = matrix.cols,
            .q = q.data(),
            .qt = qt.data(),
            .scale = reinterpret_cast<float*>(scale.data()),
            .inv_row = reinterpret_cast<float*>(inv_row.data()),
            .inv_col = reinterpret_cast<float*>(inv_col.data()),
            .delayed = &delayed,
            .recorded_amax = &recorded};
  }
  [[nodiscard]] auto written() {
    const auto copy = [](Buffer& b) {
      return std::vector<uint8_t>(b.data(), b.data() + b.bytes());
    };
    return std::tuple(copy(q), copy(qt), copy(scale), copy(inv_row), copy(inv_col), recorded);
  }
  [[nodiscard]] bool guards_are_whole() {
    const auto buffers = {&q, &qt, &scale, &inv_row, &inv_col};
    return std::ranges::all_of(buffers, [](Buffer* b) { return b->guard_is_whole(); });
  }

  reference::Matrix matrix;
  Buffer x, q, qt, scale, inv_row, inv_col;
  float delayed = 96;
  uint32_t recorded = 0;
};

std::vector<MatrixSize> sizes_of(size_t count) {
  std::vector<MatrixSize> sizes;
  for (size_t i = 0; i < count; ++i) {
    const auto n = static_cast<int64_t>(i);
    sizes.push_back({1 + n * 37 % 150, 16 * (1 + n * 5 % 11)});
  }
  return sizes;
}

codegen::CastSpec spec_of(const char* key) {
  return std::get<codegen::CastSpec>(codegen::parse_kernel_spec(key).value());
}

class QuantizeListTest : public ::testing::TestWithParam<const char*> {
 protected:
  QuantizeList plan(size_t count) {
    return QuantizeList::plan(context_, spec_of(GetParam()), sizes_of(count)).value();
  }
  std::vector<std::unique_ptr<Item>> items(size_t count) {
    std::vector<std::unique_ptr<Item>> out;
    for (size_t i = 0; i < count; ++i) {
      out.push_back(std::make_unique<Item>(spec_of(GetParam()), sizes_of(count)[i], i));
    }
    return out;
  }
  static std::vector<QuantizeOperand> operands(std::vector<std::unique_ptr<Item>>& items) {
    std::vector<QuantizeOperand> out;
    for (auto& item : items) out.push_back(item->operand());
    return out;
  }
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
};
INSTANTIATE_TEST_SUITE_P(
    Specs, QuantizeListTest,
    ::testing::Values("cast/bf16.e4m3/tensor/q+qt", "cast/bf16.e4m3/axis/q+qt/pow2",
                      "cast/bf16.e4m3/axis+tensor/q+qt/pow2", "cast/bf16.e5m2/delayed/q+qt",
                      "cast/bf16.e4m3/block128x128/q+qt/pow2", "cast/bf16.e4m3/tensor/q"));

TEST_P(QuantizeListTest, TheSameAsOneByOne) {
  for (const size_t count : {1, 4, 5, 28, 29, 65}) {
    SCOPED_TRACE(count);
    auto together = items(count);
    const QuantizeList list = plan(count);
    Buffer workspace(list.workspace_bytes());
    cuda_.launches.clear();
    const size_t before = cuda_.launches.size();
    ASSERT_TRUE(list.run(operands(together), workspace.data(), nullptr));
    EXPECT_EQ(cuda_.launches.size() - before, list.launches());
    const size_t pairs = (count + 27) / 28;
    EXPECT_EQ(list.launches(), amax_before(spec_of(GetParam())) ? 2 * pairs : pairs);
    EXPECT_TRUE(workspace.guard_is_whole());
    auto alone = items(count);
    for (size_t i = 0; i < count; ++i) {
      const QuantizeList single =
          QuantizeList::plan(context_, spec_of(GetParam()), {sizes_of(count)[i]}).value();
      Buffer scratch(single.workspace_bytes());
      const QuantizeOperand operand = alone[i]->operand();
      ASSERT_TRUE(single.run({&operand, 1}, scratch.data(), nullptr));
      EXPECT_EQ(together[i]->written(), alone[i]->written()) << i;
      EXPECT_TRUE(together[i]->guards_are_whole()) << i;
    }
    ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
  }
}

TEST_P(QuantizeListTest, RunDoesNotAllocate) {
  const QuantizeList list = plan(31);
  auto all = items(31);
  const auto given = operands(all);
  Buffer workspace(list.workspace_bytes());
  cuda_.emulate = false;
  bool ok = false;
  int allocations = 0;
  {
    const testing::CountAllocations counting;
    ok = list.run(given, workspace.data(), nullptr).has_value();
    allocations = counting.count();
  }
  EXPECT_TRUE(ok);
  EXPECT_EQ(allocations, 0);
}

// Few matrices take the kernels of a layer's launches, whose parameters are short.
TEST_P(QuantizeListTest, KernelsByLength) {
  for (const auto& [count, list] : {std::pair{4, false}, {5, true}, {65, true}}) {
    const int loaded = cuda_.modules_loaded;
    const auto context = cuda_.context();
    ASSERT_TRUE(
        QuantizeList::plan(context, spec_of(GetParam()), sizes_of(static_cast<size_t>(count))));
    const auto specs = QuantizeList::kernel_specs(spec_of(GetParam()), static_cast<size_t>(count));
    EXPECT_EQ(cuda_.modules_loaded - loaded, static_cast<int>(specs.size()));
    for (const auto& spec : specs) {
      EXPECT_EQ(codegen::key(spec).ends_with("/list"), list) << codegen::key(spec);
      EXPECT_TRUE(std::ranges::any_of(cuda_.modules, [&](const auto& module) {
        return module->key == codegen::key(spec);
      })) << codegen::key(spec);
    }
  }
}

TEST_P(QuantizeListTest, MisuseIsOneClearError) {
  const QuantizeList list = plan(6);
  auto all = items(6);
  const auto good = operands(all);
  Buffer workspace(list.workspace_bytes() + 16);
  const size_t before = cuda_.launches.size();
  const auto refused = [&](const Status& status, std::string_view part) {
    ASSERT_FALSE(status) << part;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), part)) << status.error().message;
  };
  refused(list.run(std::span(good).first(5), workspace.data(), nullptr), "6 matrices was given 5");
  auto bad = good;
  bad[3].rows += 1;
  refused(list.run(bad, workspace.data(), nullptr), "matrix 3 of a list is");
  bad = good;
  bad[5].x = nullptr;
  refused(list.run(bad, workspace.data(), nullptr), "matrix 5 of a list");
  bad = good;
  bad[1].q += 1;
  refused(list.run(bad, workspace.data(), nullptr), "q is not aligned to 16 bytes");
  if (list.workspace_bytes() > 0) {
    refused(list.run(good, nullptr, nullptr), "workspace is null");
    refused(list.run(good, workspace.data() + 4, nullptr), "workspace is not aligned");
  }
  EXPECT_EQ(cuda_.launches.size(), before);
  for (const MatrixSize size :
       {MatrixSize{0, 16}, {16, 0}, {16, 24}, {16, -16}, {kMaxDim + 1, 16}}) {
    const auto plan = QuantizeList::plan(context_, spec_of(GetParam()), {{16, 16}, size});
    ASSERT_FALSE(plan);
    EXPECT_TRUE(says(plan.error(), "matrix 1 of a list")) << plan.error().message;
  }
  const QuantizeList empty = plan(0);
  EXPECT_EQ(empty.workspace_bytes(), 0U);
  EXPECT_TRUE(empty.run({}, nullptr, nullptr));
  EXPECT_EQ(cuda_.launches.size(), before);
}

TEST_P(QuantizeListTest, ALaunchThatFailsStopsTheRun) {
  const QuantizeList list = plan(31);
  auto all = items(31);
  Buffer workspace(list.workspace_bytes());
  cuda_.launch_result = CUDA_ERROR_ILLEGAL_ADDRESS;
  const Status status = list.run(operands(all), workspace.data(), nullptr);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kCuda);
  EXPECT_TRUE(says(status.error(), "/list")) << status.error().message;
}

// Each matrix has a share of a tensor amax's blocks by size: at least one, no more than alone.
TEST(QuantizeArgs, BlocksBySize) {
  const QuantizeOperand operands[] = {{.rows = 16384, .cols = 4096},
                                      {.rows = 4096, .cols = 4096},
                                      {.rows = 1, .cols = 16},
                                      {.rows = 128, .cols = 256}};
  const auto args = amax_args(codegen::AmaxSpec{}, 132, operands);
  EXPECT_EQ(args.tensors[0].blocks, 633);
  EXPECT_EQ(args.tensors[1].blocks, 158);
  EXPECT_EQ(args.tensors[2].blocks, 1);
  EXPECT_EQ(args.tensors[3].blocks, 1);
  EXPECT_EQ(args.tensors[3].first_block, 633 + 158 + 1);
  EXPECT_EQ(amax_partials(16384, 4096, 132), 792);
  EXPECT_EQ(amax_partials(128, 256, 132), 2);
  const auto cast = cast_args(codegen::CastSpec{}, 132, operands);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(cast.tensors[i].partial_count, args.tensors[i].blocks);
}

}  // namespace
}  // namespace f8::runtime
