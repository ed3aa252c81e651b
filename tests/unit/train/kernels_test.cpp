// The first step of a tiny model beside the same model in double, whose gradient is taken by differences.
#include <numeric>

#include "tiny_training.hpp"

namespace train {
namespace {

using Values = std::vector<double>;

class Reference {
 public:
  Reference(const Config& config, std::string text)
      : config_(config), text_(std::move(text)), layout_(config) {
    const std::vector<float> start = initial_parameters(config);
    values.assign(start.begin(), start.end());
  }

  // Of the first step, whose tokens are places of the text by a counter from 1 on.
  [[nodiscard]] double loss() const {
    double sum = 0;
    for (i64 token = 0; token < config_.tokens; ++token) {
      const u64 random = mix((u64{config_.seed} << 40) + static_cast<u64>(token) + 1);
      const u64 places = text_.size() - static_cast<u64>(config_.context);
      const u8* at =
          reinterpret_cast<const u8*>(text_.data()) + config_.context + (random * places >> 32);
      sum += loss_of(at);
    }
    return sum / static_cast<double>(config_.tokens);
  }
  // The slope of the loss in a parameter.
  [[nodiscard]] double slope(size_t i) {
    const double at = std::exchange(values[i], values[i] + 1e-5), above = loss();
    values[i] = at - 1e-5;
    const double below = loss();
    values[i] = at;
    return (above - below) / 2e-5;
  }
  Values values;

 private:
  [[nodiscard]] double loss_of(const u8* at) const {
    const i64 slot_width = config_.hidden / config_.context;
    Values h;
    for (i64 c = 0; c < config_.hidden; ++c) {
      const i64 slot = c / slot_width, entry = slot * kBytes + at[-1 - slot];
      h.push_back(
          values[static_cast<size_t>(layout_.embedding + entry * slot_width + c % slot_width)]);
    }
    for (size_t i = 0; i < static_cast<size_t>(config_.layers); ++i) {
      Values a = times(2 * i, normed(h, i));
      for (double& u : a)
        u *= 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u)));
      const Values y = times(2 * i + 1, a);
      for (size_t c = 0; c < h.size(); ++c) h[c] += y[c];
    }
    const Values logits = times(layout_.weights.size() - 1, normed(h, layout_.weights.size() / 2));
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit);
    return std::log(sum) - logits[*at];
  }
  [[nodiscard]] Values normed(const Values& h, size_t index) const {
    const double squares = std::inner_product(h.begin(), h.end(), h.begin(), 0.0);
    const double* const gain = values.data() + layout_.gain + static_cast<i64>(index * h.size());
    Values out;
    for (size_t c = 0; c < h.size(); ++c) {
      out.push_back(h[c] * gain[c] / std::sqrt(squares / static_cast<double>(h.size()) + 1e-5));
    }
    return out;
  }
  [[nodiscard]] Values times(size_t index, const Values& x) const {
    const Weight& weight = layout_.weights[index];
    Values out;
    for (i64 row = 0; row < weight.n; ++row) {
      const auto w = values.begin() + weight.offset + row * weight.k;
      out.push_back(std::inner_product(x.begin(), x.end(), w, 0.0));
    }
    return out;
  }

  Config config_;
  std::string text_;
  Layout layout_;
};

class FirstStep : public Training {};

// The first moments are a tenth of the gradient, which is clipped to a norm of 1.
TEST_F(FirstStep, IsThatOfTheModelInDouble) {
  Config config = tiny("bf16");
  config.hidden = 32;
  config.ffn = 48;
  config.tokens = 16;
  options_.emulate = true;
  const State state = run(config, 1, "a");
  Reference reference(config, sample_text());
  EXPECT_NEAR(state.loss[0] / reference.loss(), 1, 1e-3);
  const Layout layout(config);
  double norm = 0, product = 0, square = 0;
  Values slopes(state.m.size());
  for (size_t i = 0; i < state.m.size(); ++i) {
    norm += 100 * double{state.m[i]} * double{state.m[i]};
    if (i % 7 != 0 || state.m[i] == 0) continue;  // a seventh takes a second
    slopes[i] = reference.slope(i);
    product += slopes[i] * double{state.m[i]};
    square += slopes[i] * slopes[i];
  }
  EXPECT_NEAR(norm, 1, 1e-3);
  for (double& slope : slopes) slope *= product / square;
  expect_gradient(config, slopes, state.m, 35);

  const double lr = config.lr / 4;  // of three steps of warm-up
  for (size_t i = 0; i < state.m.size(); ++i) {
    const double m = double{state.m[i]} / 0.1, w = reference.values[i];
    const double decay = static_cast<i64>(i) < layout.embedding ? 0.1 : 0;
    EXPECT_NEAR(state.v[i], 0.05 * m * m, 1e-6 * m * m);
    EXPECT_NEAR(state.master[i], w - lr * (m / (std::abs(m) + 1e-8) + decay * w), 1e-6);
  }
}

TEST(Config, TheLearningRateRisesAndFalls) {
  const Config config;
  EXPECT_NEAR(config.lr_at(49), 3e-4 * 50 / 101, 1e-9);
  EXPECT_NEAR(config.lr_at(100), 3e-4, 1e-9);
  EXPECT_NEAR(config.lr_at(1050), 3e-4 * 0.55, 1e-9);
  EXPECT_NEAR(config.lr_at(1999), 3e-5, 1e-9);
}

TEST(Kernels, CompileForTheGpu) {
  const std::string cubin = compile_kernels();
  for (const char* name : {"embed", "embed_grad", "rms_norm", "rms_norm_grad", "sum_shares", "gelu",
                           "gelu_grad", "loss", "add", "row_sums", "adamw"}) {
    EXPECT_NE(cubin.find(std::string(".text.") + name), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace train
