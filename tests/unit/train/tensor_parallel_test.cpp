// The linears of a block on ranks of tensor parallelism, beside those of one device: parts of its results
// bit for bit, and sums over ranks as close as sums of bf16 are.
#include <cmath>
#include <thread>

#include "examples/train/device/bf16.hpp"
#include "examples/train/linears.hpp"
#include "tiny_ranks.hpp"

namespace train {
namespace {

using Words = std::vector<u16>;

// The last columns have the largest values, so that parts of columns would have other scales.
Words random_bf16(int64_t rows, int64_t cols, uint64_t seed) {
  Words out(static_cast<size_t>(rows * cols));
  uint64_t state = seed;
  for (size_t i = 0; i < out.size(); ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const auto col = static_cast<float>(i % static_cast<size_t>(cols));
    out[i] = encode_bf16((static_cast<float>(state >> 40) * 0x1p-24F - 0.5F) *
                         (1 + 6 * col / static_cast<float>(cols)));
  }
  return out;
}

template <class T>
std::vector<T> columns(const std::vector<T>& from, int64_t all, int64_t first, int64_t count) {
  std::vector<T> out;
  for (auto row = from.begin(); row != from.end(); row += all) {
    out.insert(out.end(), row + first, row + first + count);
  }
  return out;
}

// The results of up and down, each with random inputs.
struct Results {
  Words y[2], dx[2];
  std::vector<float> dw[2];
};

struct Inputs {
  Words w[2], x[2], dy[2];  // of up and down
};

Results run(const TrainConfig& config, const Ranks& ranks, Backend& backend, const Inputs& inputs) {
  const Parameters parameters(config, ranks.fsdp, ranks.tp.count);
  const int64_t tokens = config.batch_tokens();
  const auto count = static_cast<size_t>(parameters.count);
  auto* const weights = static_cast<u16*>(backend.allocate(count * sizeof(u16)));
  auto* const grads = static_cast<float*>(backend.allocate(count * sizeof(float)));
  for (size_t i = 0; i < 2; ++i) {
    std::ranges::copy(inputs.w[i], weights + parameters.linears[i].offset);
  }
  Linears linears(backend, config, ranks, parameters, weights, grads);
  linears.set_scale_state({});
  linears.cast_weights(true);
  Results out;
  for (size_t i = 0; i < 2; ++i) {
    const LinearShape& shape = parameters.linears[i];
    const auto upload = [&](const Words& from) {
      void* const to = backend.allocate(from.size() * sizeof(u16));
      backend.upload(to, from.data(), from.size() * sizeof(u16));
      return to;
    };
    void* const x = upload(inputs.x[i]);
    void* const dy = upload(inputs.dy[i]);
    out.y[i].resize(static_cast<size_t>(tokens * shape.n));
    out.dx[i].resize(static_cast<size_t>(tokens * shape.k));
    void* const y = upload(out.y[i]);
    void* const dx = upload(out.dx[i]);
    linears.forward(i, x, y, true);
    linears.backward(i, dy, x, dx, true, 0);
    backend.download(out.y[i].data(), y, out.y[i].size() * sizeof(u16));
    backend.download(out.dx[i].data(), dx, out.dx[i].size() * sizeof(u16));
    out.dw[i].assign(grads + shape.offset, grads + shape.offset + shape.n * shape.k);
  }
  return out;
}

double sqnr_db(const Words& expected, const std::vector<Words>& parts) {
  double signal = 0, noise = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    double sum = 0;
    for (const Words& part : parts) sum += double{decode_bf16(part[i])};
    const double value = double{decode_bf16(expected[i])};
    signal += value * value;
    noise += (value - sum) * (value - sum);
  }
  return 10 * std::log10(signal / noise);
}

class TensorParallel : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Recipes, TensorParallel, ::testing::ValuesIn(recipe_names()),
                         [](const auto& recipe) { return recipe.param; });

TEST_P(TensorParallel, HasTheScalesOfWholeTensors) {
  for (const int64_t tp : {2, 3, 4}) {
    TrainConfig config = tiny(GetParam(), 1, 1, tp);
    config.layers = 1;
    config.ffn = 128 * tp;
    config.tokens = 128;
    const int64_t hidden = config.hidden, ffn = config.ffn, part = ffn / tp;
    const Inputs whole = {
        {random_bf16(ffn, hidden, 1), random_bf16(hidden, ffn, 2)},
        {random_bf16(config.tokens, hidden, 3), random_bf16(config.tokens, ffn, 4)},
        {random_bf16(config.tokens, ffn, 5), random_bf16(config.tokens, hidden, 6)}};
    const auto alone = make_host_backend();
    TrainConfig one = config;
    one.tp = 1;
    const Results expected = run(one, {}, *alone, whole);

    std::vector<std::unique_ptr<Backend>> backends;
    std::vector<const float8::Context*> contexts;
    for (int r = 0; r < tp; ++r) backends.push_back(make_host_backend(r));
    for (const auto& backend : backends) contexts.push_back(&backend->context());
    const auto communicators = float8::Communicator::create(contexts).value();
    std::vector<Results> got(backends.size());
    {
      std::vector<std::jthread> threads;
      for (size_t r = 0; r < backends.size(); ++r) {
        threads.emplace_back([&, r] {
          const auto first = static_cast<int64_t>(r) * part;
          const auto rows = whole.w[0].begin() + first * hidden;
          const Inputs own = {
              {Words(rows, rows + part * hidden), columns(whole.w[1], ffn, first, part)},
              {whole.x[0], columns(whole.x[1], ffn, first, part)},
              {columns(whole.dy[0], ffn, first, part), whole.dy[1]}};
          const Rank rank{static_cast<int>(r), static_cast<int>(tp), &communicators[r]};
          got[r] = run(config, {.world = rank, .fsdp = {}, .tp = rank}, *backends[r], own);
        });
      }
    }
    std::vector<Words> dx_of_up, y_of_down;
    for (size_t r = 0; r < got.size(); ++r) {
      const auto first = static_cast<int64_t>(r) * part;
      EXPECT_EQ(got[r].y[0], columns(expected.y[0], ffn, first, part)) << tp;
      EXPECT_EQ(got[r].dx[1], columns(expected.dx[1], ffn, first, part)) << tp;
      const auto rows = expected.dw[0].begin() + first * hidden;
      EXPECT_EQ(got[r].dw[0], std::vector<float>(rows, rows + part * hidden)) << tp;
      EXPECT_EQ(got[r].dw[1], columns(expected.dw[1], ffn, first, part)) << tp;
      dx_of_up.push_back(got[r].dx[0]);
      y_of_down.push_back(got[r].y[1]);
    }
    // Each part is rounded to bf16. Under tensorwise, parts with scales of their own leave 25 to 40 dB.
    EXPECT_GT(sqnr_db(expected.dx[0], dx_of_up), 45) << tp;
    EXPECT_GT(sqnr_db(expected.y[1], y_of_down), 45) << tp;
  }
}

}  // namespace
}  // namespace train
