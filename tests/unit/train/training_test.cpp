// Tiny models take whole steps on emulated devices, under every recipe, on one rank and several.
#include <numeric>

#include "tiny_training.hpp"

namespace train {
namespace {

class EmulatedTraining : public Training {
 protected:
  EmulatedTraining() { options_.emulate = true; }
};
INSTANTIATE_TEST_SUITE_P(Recipes, EmulatedTraining, ::testing::ValuesIn(kRecipes),
                         [](const auto& recipe) { return recipe.param; });

using Values = std::vector<double>;

// The model in double, of which the gradient is taken by differences.
class Reference {
 public:
  Reference(const Config& config, std::string text)
      : config_(config), text_(std::move(text)), layout_(config) {
    const std::vector<float> start = initial_parameters(config);
    values.assign(start.begin(), start.end());
  }

  // These are the first step's tokens: places of the text by a counter from 1 on.
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

// The first moments are a tenth of the gradient, which is clipped to a norm of 1.
TEST_F(EmulatedTraining, TheFirstStepIsThatOfTheModelInDouble) {
  Config config = tiny("bf16");
  config.hidden = 32;
  config.ffn = 48;
  config.tokens = 16;
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

TEST_P(EmulatedTraining, LossFallsAsInBf16AndARunResumes) {
  const Config config = tiny(GetParam());
  const State whole = run(config, 30, "whole");
  EXPECT_NEAR(whole.loss.front(), 5.6, 0.4);  // log 256, and what random logits add
  EXPECT_LT(whole.loss.back(), 3.0);
  const State bf16 = run(tiny("bf16"), 30, "bf16");
  expect_close(whole, bf16, 0.1F);
  EXPECT_EQ(whole.loss == bf16.loss, GetParam() == "bf16");
  // The state has sixteen amaxes of each operand of each linear, where there is delayed scaling.
  EXPECT_EQ(whole.scales.size() > 16 * sizeof(float) * 3 * 4, GetParam() == "delayed");

  run(config, 8, "half");
  expect_same(run(config, 30, "rest", "half"), whole);
}

// Three ranks hold 48 rows each of 144, and 32, 32 and none of 64. Two have uneven shards, which cut the blocks of
// blockwise; four have whole blocks of one weight and parts of the other's.
TEST_P(EmulatedTraining, RanksHaveTheBitsOfMicroBatches) {
  for (const i64 ranks : {2, 3, 4}) {
    Config config = tiny(GetParam(), ranks);
    if (ranks == 4) config.ffn = 512;
    const State sharded = run(config, 4, "sharded");
    config.fsdp = 1;
    const State one = run(config, 4, "one");
    config.micro_batches = ranks;
    const State alone = run(config, 4, "alone");
    // Delayed scales are those of all ranks' activations, and so of no micro-batch.
    if (GetParam() == "delayed") {
      expect_close(sharded, alone, 0.02F);
      expect_close(sharded, one, 1e-3F);
    } else {
      expect_same(sharded, alone);
    }
  }
  expect_close(run(tiny(GetParam(), 2, 2), 4, "both"), run(tiny(GetParam(), 1, 4), 4, "four"),
               0.02F);
}

TEST_P(EmulatedTraining, ResumesOnAnotherNumberOfRanks) {
  const State whole = run(tiny(GetParam(), 2), 6, "whole");
  run(tiny(GetParam(), 2), 3, "half");
  expect_same(run(tiny(GetParam(), 2), 6, "two", "half"), whole);
  const State alone = run(tiny(GetParam(), 1, 2), 6, "one", "half");
  GetParam() == "delayed" ? expect_close(alone, whole, 0.02F) : expect_same(alone, whole);
}

TEST_F(EmulatedTraining, ARankThatFailsStopsAllAndIsNamed) {
  for (const char* recipe : {"rowwise", "delayed"}) {
    const Config config = tiny(recipe, 3);
    const State whole = run(config, 6, "whole");
    options_.progress = [](int rank, const State& curve) {
      if (rank == 2 && curve.loss.size() == 4) fail(FLOAT8_CUDA, "the device is lost");
    };
    options_.checkpoint = folder_ / "lost";
    options_.save_every = 1;
    const auto error = error_of([&] { (void)train(config, sample_text(), options_); });
    EXPECT_EQ(error.code, FLOAT8_CUDA);
    EXPECT_EQ(error.message, "rank 2: the device is lost");
    options_.progress = nullptr;
    EXPECT_EQ(load(folder_ / "lost", name_of_run(config, sample_text())).loss.size(), 3U);
    expect_same(run(config, 6, "rest", "lost"), whole);
  }
}

TEST_F(EmulatedTraining, ARankThatDoesNotComeIsNamed) {
  options_.timeout_ms = 1500;
  options_.progress = [](int rank, const State&) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(4));
  };
  const auto error = error_of([&] { run(tiny("rowwise", 2), 3, "late"); });
  EXPECT_TRUE(error.message.starts_with("rank 0: ")) << error.message;
  EXPECT_NE(error.message.find("rank 1 did not come within 1500 ms"), std::string::npos)
      << error.message;
}

// A row that the second rank alone holds: the maximum over ranks takes its NaN to all.
TEST_F(EmulatedTraining, WhatIsNotFiniteStopsTheRun) {
  const Config config = tiny("rowwise", 2);
  State state = run(config, 1, "spoilt");
  state.master[static_cast<size_t>(config.ffn * config.hidden - 1)] = NAN;
  save(folder_ / "spoilt", name_of_run(config, sample_text()), state);
  const auto error = error_of([&] { run(config, 4, "next", "spoilt"); });
  EXPECT_NE(error.message.find("the loss of step 2 is not finite"), std::string::npos)
      << error.message;
  EXPECT_FALSE(fs::exists(folder_ / "next"));
}

TEST_F(EmulatedTraining, ACheckpointThatIsDamagedOrOfAnotherRunIsRefused) {
  const Config config = tiny("delayed");
  run(config, 2, "a");
  const std::string whole = read_file(folder_ / "a"), name = name_of_run(config, sample_text());
  const auto expect_refused = [&](std::string_view bytes) {
    write_file(folder_ / "b", bytes);
    EXPECT_NE(error_of([&] { (void)load(folder_ / "b", name); }).code, FLOAT8_OK);
  };
  const size_t head = whole.find('\n', whole.find("text ") + 22) + 1;
  for (size_t at = 0; at < whole.size(); at = at < head ? at + 1 : at + 4099) {
    expect_refused(std::string_view(whole).substr(0, at));
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    expect_refused(damaged);
  }
  expect_refused(whole + "x");
  Config other = config;
  other.lr *= 1 + 1e-15;
  const auto error = error_of([&] { run(other, 4, "other", "a"); });
  EXPECT_EQ(error.code, FLOAT8_INVALID_ARGUMENT);
  EXPECT_NE(error.message.find("is of another run: \"" + name + "\""), std::string::npos);
  EXPECT_EQ(error_of([&] { run(config, 4, "missing/a"); }).code, FLOAT8_IO);
}

TEST_F(EmulatedTraining, WhatDoesNotFitIsNamed) {
  const auto expect_error = [&](std::string words, std::string recipe, i64 fsdp, i64 ffn,
                                i64 context) {
    Config config = tiny(recipe, fsdp);
    config.ffn = ffn;
    config.context = context;
    const auto error = error_of([&] { (void)train(config, "some text", options_); });
    EXPECT_NE(error.message.find(words), std::string::npos) << error.message;
    EXPECT_EQ(error.message.find('\n'), std::string::npos);
  };
  expect_error("'fp4'", "fp4", 1, 144, 4);
  expect_error("16 times --fsdp (5) times --micro-batches (1)", "bf16", 5, 144, 4);
  expect_error("--ffn (100) are multiples of 16", "bf16", 1, 100, 4);
  expect_error("--context (5) divides --hidden", "bf16", 1, 144, 5);
  expect_error("the text has 9 bytes", "bf16", 1, 144, 16);
}

TEST_F(EmulatedTraining, TextIsFilesEndToEndInOrder) {
  for (const char* name :
       {"in/b.cpp", "in/a.md", "in/c.bin", "in/build/d.cpp", "in/.git/d.cpp", "e.bin"}) {
    fs::create_directories((folder_ / name).parent_path());
    write_file(folder_ / name, name);
  }
  EXPECT_EQ(load_text({folder_ / "in", folder_ / "e.bin"}), "in/a.mdin/b.cppe.bin");
  EXPECT_EQ(error_of([&] { (void)load_text({folder_ / "none"}); }).code, FLOAT8_IO);
}

}  // namespace
}  // namespace train
