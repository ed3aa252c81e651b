// The memory of the MLP of experts: a step whose backward is several calls, and the bytes of large layers.
#include <algorithm>

#include "tests/unit/runtime/c_abi/experts/moe_fixture.hpp"

namespace {

using namespace float8::testing;

class MoeParts : public MoeAbi {};
INSTANTIATE_TEST_SUITE_P(Cases, MoeParts, kMoeCases, ::testing::PrintToStringParamName());

// Calls with no more scratch than each of them needs, and buffers that live from the call that writes them to
// the last one that reads them.
TEST_P(MoeParts, HaveTheBitsOfOneCall) {
  ASSERT_NO_FATAL_FAILURE(plan());
  step_.first_step = 1;
  const Step expected = by_experts();
  const auto guarded = [](size_t bytes) {
    Memory out(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
    std::memset(out.get(), 0xFF, (bytes + 511) / 256 * 256);
    return out;
  };
  const auto run = [&](auto& args, int32_t call) {
    const size_t bytes = float8_moe_call_bytes(moe_, call);
    EXPECT_LE(bytes, float8_moe_workspace_bytes(moe_));
    const Memory scratch = guarded(bytes);
    args.workspace = {scratch.get(), bytes};
    args.saved = {};
    if constexpr (requires { args.y; }) {
      ASSERT_EQ(float8_moe_forward(moe_, &args, nullptr), FLOAT8_OK) << float8_last_error();
    } else {
      args.part = call;
      ASSERT_EQ(float8_moe_backward(moe_, &args, nullptr), FLOAT8_OK) << float8_last_error();
    }
    for (size_t i = bytes; i < bytes + 255; ++i) {
      ASSERT_EQ(static_cast<const uint8_t*>(scratch.get())[i], 0xFF) << call << " wrote behind it";
    }
  };
  Memory buffers[6];
  for (int32_t i = 0; i < 6; ++i) buffers[i] = guarded(float8_moe_buffer_bytes(moe_, i));
  const Step got{memory(kRouted * kDim * 2), memory(kRouted * kDim * 2),
                 memory(kRowsOfW13 * kDim * 2), memory(kRowsOfW2 * kHidden * 2)};
  float8_moe_forward_args forward = forward_args(got.y);
  forward.buffers = {.gate_up = {buffers[FLOAT8_MOE_GATE_UP].get()},
                     .saved_of_w13 = {buffers[FLOAT8_MOE_SAVED_OF_W13].get()},
                     .saved_of_w2 = {buffers[FLOAT8_MOE_SAVED_OF_W2].get()}};
  run(forward, FLOAT8_MOE_FORWARD);
  const float8_moe_backward_args whole = backward_args(got.dx, got.dw13, got.dw2);
  float8_moe_backward_args hidden = whole;
  hidden.w13 = hidden.w3 = {};
  hidden.x = {};
  hidden.dx = hidden.dw13 = hidden.dw3 = {};
  hidden.buffers.saved_of_w2 = {buffers[FLOAT8_MOE_SAVED_OF_W2].get()};
  hidden.buffers.hidden_grad = {buffers[FLOAT8_MOE_HIDDEN_GRAD].get()};
  run(hidden, FLOAT8_MOE_GRAD_HIDDEN);
  buffers[FLOAT8_MOE_SAVED_OF_W2].reset();
  float8_moe_backward_args grads{.m = kRouted, .tokens = tokens()};
  set_common(grads);
  grads.buffers = {.gate_up = {buffers[FLOAT8_MOE_GATE_UP].get()},
                   .hidden_grad = {buffers[FLOAT8_MOE_HIDDEN_GRAD].get()},
                   .gate_up_grad_q = {buffers[FLOAT8_MOE_GATE_UP_GRAD_Q].get()},
                   .gate_up_grad_qt = {buffers[FLOAT8_MOE_GATE_UP_GRAD_QT].get()}};
  run(grads, FLOAT8_MOE_GRAD_GATE_UP);
  buffers[FLOAT8_MOE_GATE_UP].reset();
  buffers[FLOAT8_MOE_HIDDEN_GRAD].reset();
  float8_moe_backward_args input = whole;
  input.x = input.dy = input.w2 = {};
  input.index = nullptr;
  input.score = nullptr;
  input.dw13 = input.dw3 = input.dw2 = {};
  input.buffers = {.saved_of_w13 = {buffers[FLOAT8_MOE_SAVED_OF_W13].get()},
                   .gate_up_grad_q = {buffers[FLOAT8_MOE_GATE_UP_GRAD_Q].get()},
                   .gate_up_grad_qt = {buffers[FLOAT8_MOE_GATE_UP_GRAD_QT].get()}};
  run(input, FLOAT8_MOE_GRAD_INPUT);
  buffers[FLOAT8_MOE_GATE_UP_GRAD_Q].reset();
  float8_moe_backward_args weight = whole;
  weight.dy = weight.w13 = weight.w3 = weight.w2 = {};
  weight.score = nullptr;
  weight.dx = weight.dw2 = {};
  weight.buffers = {.gate_up_grad_qt = {buffers[FLOAT8_MOE_GATE_UP_GRAD_QT].get()}};
  run(weight, FLOAT8_MOE_GRAD_WEIGHT);
  expect_same(got.y, expected.y, kUsed * kDim, "y in parts");
  expect_same(got.dx, expected.dx, kUsed * kDim, "dx in parts");
  expect_same(joined(got.dw13), expected.dw13, kRowsOfW13 * kDim, "dw13 in parts");
  expect_same(got.dw2, expected.dw2, kRowsOfW2 * kHidden, "dw2 in parts");
}

struct Layer {
  const char* name;
  int64_t rows, dim, hidden;
  int32_t experts;
};
void PrintTo(const Layer& layer, std::ostream* out) {
  *out << layer.name;
}
class MoeMemory : public ::testing::TestWithParam<Layer> {};
INSTANTIATE_TEST_SUITE_P(Layers, MoeMemory,
                         ::testing::Values(Layer{"qwen3", 65536, 2048, 768, 128},
                                           Layer{"deepseek", 32768, 7168, 2048, 8},
                                           Layer{"mixtral", 32768, 4096, 14336, 8},
                                           Layer{"scout", 16640, 5120, 8192, 16}),
                         ::testing::PrintToStringParamName());

// No call has more than the largest sum of the copies that live at once, by their elements: scales, and the
// columns that fill each expert's last 128 rows, are what is over.
TEST_P(MoeMemory, IsThatOfTheCopiesThatLiveAtOnce) {
  const Layer layer = GetParam();
  const float8::Context context = emulated();
  for (const char* recipe : {"tensorwise", "rowwise", "blockwise"}) {
    float8_moe_desc desc{};
    desc.struct_size = sizeof desc;
    desc.m_max = layer.rows;
    desc.dim = layer.dim;
    desc.hidden = layer.hidden;
    desc.experts = layer.experts;
    desc.recipe = recipe;
    desc.recompute_weight = 1;
    float8_moe* moe = nullptr;
    ASSERT_EQ(float8_moe_plan(context.get(), &desc, &moe), FLOAT8_OK) << float8_last_error();
    const auto d = static_cast<double>(layer.dim), f = static_cast<double>(layer.hidden);
    const auto m = static_cast<double>(layer.rows), e = static_cast<double>(layer.experts);
    const double columns = m + 127 * e;  // of a copy whose rows are the experts' columns
    const double w13 = 2 * e * f * d, w2 = e * f * d, gate_up = 4 * m * f, hidden = 2 * m * f;
    const double forward = std::max(m * d + w13, m * f + w2);
    const double of_w2 = std::max(m * d + columns * d + w2 + hidden, columns * d + hidden);
    const double of_grads = hidden + 2 * m * f + 2 * columns * f;
    const double of_w13 = std::max(2 * m * f + 2 * columns * f + w13, columns * (2 * f + d));
    const auto expect_about = [&](size_t bytes, double floor, const char* what) {
      EXPECT_LE(static_cast<double>(bytes), 1.05 * floor) << recipe << " " << what;
    };
    const auto expect_call = [&](int32_t call, double floor) {
      expect_about(float8_moe_call_bytes(moe, call), floor, std::to_string(call).c_str());
    };
    expect_call(FLOAT8_MOE_FORWARD, forward);
    expect_call(FLOAT8_MOE_EVALUATE, std::max(gate_up + m * d + w13, gate_up + m * f + w2));
    expect_call(FLOAT8_MOE_BACKWARD, std::max({of_w2, of_grads, of_w13}));
    expect_call(FLOAT8_MOE_GRAD_HIDDEN, m * d + columns * d + w2);
    expect_call(FLOAT8_MOE_GRAD_INPUT, w13);
    expect_call(FLOAT8_MOE_GRAD_WEIGHT, columns * d);
    EXPECT_LE(float8_moe_call_bytes(moe, FLOAT8_MOE_GRAD_GATE_UP), size_t{64} << 20) << recipe;
    expect_call(FLOAT8_MOE_FORWARD | FLOAT8_MOE_WEIGHTS_GIVEN, std::max(m * d, m * f));
    expect_about(float8_moe_saved_bytes(moe), gate_up + columns * f, "saved");
    EXPECT_EQ(float8_moe_buffer_bytes(moe, FLOAT8_MOE_SAVED_OF_W13), 0U);
    // In bf16 x, gate and up, and silu(gate) up of each row are saved.
    EXPECT_LE(static_cast<double>(float8_moe_saved_bytes(moe)), 2 * m * d + gate_up + hidden);
    float8_moe_destroy(moe);
  }
  EXPECT_EQ(float8_moe_call_bytes(nullptr, 0), 0U);
  EXPECT_EQ(float8_moe_buffer_bytes(nullptr, 0), 0U);
}

}  // namespace
