// Rotary positions against the formula, element by element: every pair of types, strides with gaps, positions of
// their own for each sequence, the gradient, and what is refused.
#include "runtime/attention/rotary.hpp"

#include <array>
#include <random>
#include <string>

#include "runtime/device/element_type.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

struct RotaryCase {
  std::array<int32_t, 3> types;  // of the heads, of cosines, of the result
  int64_t batch, tokens, heads_q, heads_k, dim;
  bool inverse = false;
  bool own_positions = false;  // of each sequence
  int64_t gap = 0;             // elements between tokens
};

// Elements in memory of a type.
struct TypedElements {
  TypedElements(Dtype of_type, int64_t count, uint64_t seed)
      : type(of_type), bytes(static_cast<size_t>(count) * size_bytes(of_type)) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) store_element(bytes.data(), i, normal(random), type);
  }
  [[nodiscard]] float at(int64_t i) const { return load_element(bytes.data(), i, type); }

  Dtype type;
  std::vector<uint8_t> bytes;
};

// The heads of queries or of keys: [batch][tokens][heads][dim] as they come, [batch][heads][tokens][dim] as they leave.
struct TurnedHeads {
  TurnedHeads(const Context& context, const RotaryCase& of, int64_t count, uint64_t seed)
      : heads(count),
        token_stride(count * of.dim + of.gap),
        in(element_type(of.types[0]), of.batch * of.tokens * token_stride, seed),
        memory(context, in.bytes),
        result(context, static_cast<size_t>(of.batch * count * of.tokens * of.dim) *
                            size_bytes(element_type(of.types[2]))) {}
  [[nodiscard]] float8_heads given(const RotaryCase& of) const {
    return {memory.as(), of.tokens * token_stride, of.dim, token_stride};
  }
  [[nodiscard]] float8_heads wanted(const RotaryCase& of) const {
    return {result.as(), heads * of.tokens * of.dim, of.tokens * of.dim, of.dim};
  }

  int64_t heads, token_stride;
  TypedElements in;
  DeviceBuffer memory, result;
};

class RotaryTensors {
 public:
  RotaryTensors(const Context& context, const RotaryCase& of)
      : of_(of),
        q_(context, of, of.heads_q, 1),
        k_(context, of, of.heads_k, 2),
        cos_(element_type(of.types[1]), positions() * of.dim, 3),
        sin_(element_type(of.types[1]), positions() * of.dim, 4),
        cos_memory_(context, cos_.bytes),
        sin_memory_(context, sin_.bytes) {}

  [[nodiscard]] float8_rotary_args args() const {
    float8_rotary_args args;
    args.q = q_.given(of_);
    args.q_out = q_.wanted(of_);
    if (of_.heads_k > 0) {
      args.k = k_.given(of_);
      args.k_out = k_.wanted(of_);
    }
    args.cos = cos_memory_.as();
    args.sin = sin_memory_.as();
    args.cos_batch_stride = of_.own_positions ? of_.tokens * of_.dim : 0;
    args.cos_token_stride = of_.dim;
    args.batch = of_.batch;
    args.tokens = of_.tokens;
    args.heads_q = static_cast<int32_t>(of_.heads_q);
    args.heads_k = static_cast<int32_t>(of_.heads_k);
    args.head_dim = static_cast<int32_t>(of_.dim);
    args.dtype = of_.types[0];
    args.cos_dtype = of_.types[1];
    args.out_dtype = of_.types[2];
    args.inverse = of_.inverse ? 1 : 0;
    return args;
  }
  void expect() const {
    expect(q_);
    expect(k_);
  }

 private:
  [[nodiscard]] int64_t positions() const {
    return of_.own_positions ? of_.batch * of_.tokens : of_.tokens;
  }
  void expect(const TurnedHeads& heads) const {
    const Dtype type = element_type(of_.types[2]);
    const auto found = heads.result.download<uint8_t>();
    const int64_t half = of_.dim / 2;
    int64_t at = 0;
    for (int64_t b = 0; b < of_.batch; ++b) {
      for (int64_t h = 0; h < heads.heads; ++h) {
        for (int64_t t = 0; t < of_.tokens; ++t) {
          const int64_t x = (b * of_.tokens + t) * heads.token_stride + h * of_.dim;
          const int64_t position = ((of_.own_positions ? b * of_.tokens : 0) + t) * of_.dim;
          for (int64_t i = 0; i < of_.dim; ++i, ++at) {
            const int64_t other = (i + half) % of_.dim;
            const bool minus = (i < half) != of_.inverse;
            const float along = heads.in.at(x + i) * cos_.at(position + i);
            const float across =
                heads.in.at(x + other) * sin_.at(position + (of_.inverse ? other : i));
            const float sum =
                round_element(along, type) + round_element(minus ? -across : across, type);
            ASSERT_EQ(load_element(found.data(), at, type), round_element(sum, type))
                << "batch " << b << " head " << h << " token " << t << " element " << i;
          }
        }
      }
    }
    EXPECT_TRUE(heads.result.guards_are_whole());
  }

  RotaryCase of_;
  TurnedHeads q_, k_;
  TypedElements cos_, sin_;
  DeviceBuffer cos_memory_, sin_memory_;
};

class RotaryTest : public GpuTest {
 protected:
  void expect_bits(const RotaryCase& of) {
    const RotaryTensors tensors(context(), of);
    F8_ASSERT_OK(rotary(context(), tensors.args(), nullptr));
    tensors.expect();
  }
  void expect_refused(const std::function<void(float8_rotary_args&)>& change,
                      const std::string& words) {
    const RotaryTensors tensors(context(), {{0, 0, 0}, 1, 3, 2, 1, 64});
    float8_rotary_args args = tensors.args();
    change(args);
    const Status status = rotary(context(), args, nullptr);
    ASSERT_FALSE(status) << words;
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
  }
};

TEST_F(RotaryTest, HasTheBitsOfTheFormulaInAllTypes) {
  for (const int32_t in : {FLOAT8_BF16, FLOAT8_F16, FLOAT8_F32}) {
    for (const int32_t cos : {in, static_cast<int32_t>(FLOAT8_F32)}) {
      SCOPED_TRACE(f8::format("{} {}", in, cos));
      expect_bits({{in, cos, cos}, 2, 5, 3, 2, 64});
      expect_bits({{cos, cos, in}, 2, 5, 3, 2, 64, true});
    }
  }
}

TEST_F(RotaryTest, OfAnySize) {
  const int32_t bf16 = FLOAT8_BF16;
  for (const int64_t dim : {16, 48, 96, 128, 256, 1024}) {
    SCOPED_TRACE(dim);
    expect_bits({{bf16, bf16, bf16}, 2, 3, 9, 2, dim, false, true, 8});
    expect_bits({{bf16, bf16, bf16}, 1, 2, 1, 0, dim, true});
  }
  const int64_t tokens = by_device<int64_t>(1021, 37);
  expect_bits({{bf16, bf16, bf16}, 1, tokens, 40, 8, 128});
  expect_bits({{bf16, FLOAT8_F32, FLOAT8_F32}, 3, tokens, 70, 1, 64, false, true, 24});
}

TEST_F(RotaryTest, NothingIsDoneWithoutTokens) {
  const RotaryTensors tensors(context(), {{0, 0, 0}, 1, 3, 2, 1, 64});
  for (int64_t float8_rotary_args::*const size :
       {&float8_rotary_args::batch, &float8_rotary_args::tokens}) {
    float8_rotary_args args = tensors.args();
    args.*size = 0;
    args.q = {};
    args.cos = nullptr;
    F8_ASSERT_OK(rotary(context(), args, nullptr));
  }
}

TEST_F(RotaryTest, SaysWhatItRefuses) {
  using Args = float8_rotary_args;
  expect_refused([](Args& a) { a.head_dim = 24; }, "head_dim is 24; it is a multiple of 16");
  expect_refused([](Args& a) { a.head_dim = 2048; }, "up to 1024");
  expect_refused([](Args& a) { a.heads_q = 0; }, "heads_q is 0");
  expect_refused([](Args& a) { a.heads_k = -1; }, "heads_k is -1");
  expect_refused([](Args& a) { a.tokens = -1; }, "tokens is -1");
  expect_refused([](Args& a) { a.batch = int64_t{1} << 40; }, "less than 2^31 together");
  expect_refused([](Args& a) { a.q.data = nullptr; }, "float8_rotary_args.q is NULL");
  expect_refused([](Args& a) { a.k_out.data = nullptr; }, "float8_rotary_args.k_out is NULL");
  expect_refused([](Args& a) { a.sin = nullptr; }, "float8_rotary_args.sin is NULL");
  expect_refused([](Args& a) { a.cos_token_stride = 12; }, "cos_token_stride is 12");
  expect_refused([](Args& a) { a.q.token_stride = 4; }, "float8_rotary_args.q.token_stride is 4");
  expect_refused([](Args& a) { a.q_out.token_stride = 8; }, "its elements do not overlap");
  expect_refused([](Args& a) { a.q_out = a.q; }, "overlap");
}

}  // namespace
}  // namespace f8::runtime::gpu
