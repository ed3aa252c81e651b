// Trainings of tiny models, for the tests of the trainer.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "examples/train/train.hpp"

namespace train {

inline std::string sample_text() {
  std::string text;
  for (int i = 0; i < 500; ++i) text += format("line %d: the quick brown fox jumps.\n", i * i);
  return text;
}

inline Config tiny(const std::string& recipe, i64 fsdp = 1, i64 micro_batches = 1) {
  Config config;
  config.recipe = recipe;
  config.hidden = 64;
  config.ffn = 144;
  config.layers = 2;
  config.context = 4;
  config.tokens = 192;
  config.steps = 30;
  config.lr = 1e-2;
  config.fsdp = fsdp;
  config.micro_batches = micro_batches;
  return config;
}

class Training : public ::testing::TestWithParam<std::string> {
 protected:
  ~Training() override { fs::remove_all(folder_); }

  // Steps until `stop`; then the checkpoint is `name`. A run goes on from `resume`.
  State run(const Config& config, i64 stop, const std::string& name,
            const std::string& resume = "") {
    options_.checkpoint = folder_ / name;
    options_.save_every = options_.stop_after = stop;
    options_.resume = resume.empty() ? "" : folder_ / resume;
    static_cast<void>(train(config, sample_text(), options_));
    return load(folder_ / name, name_of_run(config, sample_text()));
  }
  static void expect_same(const State& one, const State& two) {
    EXPECT_EQ(one.loss, two.loss);
    EXPECT_EQ(one.master, two.master);
    EXPECT_EQ(one.m, two.m);
    EXPECT_EQ(one.v, two.v);
    EXPECT_EQ(one.scales, two.scales);
  }
  static void expect_close(const State& one, const State& two, float tolerance) {
    ASSERT_EQ(one.loss.size(), two.loss.size());
    for (size_t i = 0; i < one.loss.size(); ++i) {
      EXPECT_NEAR(one.loss[i] / two.loss[i], 1, tolerance) << "step " << i + 1;
    }
  }
  // Parts of the gradient, or of what is proportional to it, have this signal over noise at least. Where
  // `expected` is 0, it is not known.
  static void expect_gradient(const Config& config, const std::vector<double>& expected,
                              const std::vector<float>& got, double least_db) {
    const Layout layout(config);
    std::vector<i64> ends = {layout.embedding, layout.gain, layout.count};
    for (const Weight& weight : layout.weights) ends.insert(ends.end() - 3, weight.offset);
    for (size_t part = 1; part < ends.size(); ++part) {
      double signal = 0, noise = 0;
      for (auto i = static_cast<size_t>(ends[part - 1]); i < static_cast<size_t>(ends[part]); ++i) {
        signal += expected[i] * expected[i];
        noise += expected[i] == 0 ? 0 : std::pow(double{got[i]} - expected[i], 2);
      }
      EXPECT_GT(10 * std::log10(signal / noise), least_db) << "up to " << ends[part];
    }
  }
  // The error of a call; a test whose call throws none fails.
  static float8::Error error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const float8::Exception& error) {
      return {error.code(), error.what()};
    }
    ADD_FAILURE() << "no error is thrown";
    return {};
  }

  RunOptions options_;
  fs::path folder_ = [] {
    std::string name = fs::temp_directory_path() / "f8-train-XXXXXX";
    return fs::path(mkdtemp(name.data()));
  }();
};

}  // namespace train
