// Row strides of the emulated device: every multiple of 16 bytes is legal, as on a GPU.
#include "runtime/device/memory.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;
using testing::FakeCuda;
using testing::Fixture;

class EmulatedStrides : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Recipes, EmulatedStrides,
                         ::testing::Values("tensorwise", "rowwise", "delayed", "blockwise"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(EmulatedStrides, RowsAre16BytesApart) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    SCOPED_TRACE(to_string(type));
    LinearDesc desc = testing::describe(GetParam(), {40, 48, 144});
    desc.tensor_dtype = desc.grad_weight_dtype = type;
    desc.bias_grad = true;
    FakeCuda cuda;
    const auto run = [&](Fixture& s, Buffer& db) {
      BackwardCall backward = s.backward();
      backward.db.data = db.data();
      ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
      ASSERT_TRUE(s.linear->backward(backward, nullptr));
      ASSERT_TRUE(cuda.faults.empty()) << cuda.faults.front();
    };
    Fixture dense(cuda, desc, 40);
    Fixture apart(cuda, desc, 40, 1, static_cast<int64_t>(16 / size_bytes(type)));
    Buffer dense_db(48 * 2);
    Buffer apart_db(48 * 2);
    run(dense, dense_db);
    run(apart, apart_db);
    EXPECT_EQ(apart.values_y(), dense.values_y());
    EXPECT_EQ(apart.values_dx(), dense.values_dx());
    EXPECT_EQ(apart.values_dw(), dense.values_dw());
    EXPECT_EQ(apart_db.bf16(), dense_db.bf16());
  }
}

}  // namespace
}  // namespace f8::runtime
