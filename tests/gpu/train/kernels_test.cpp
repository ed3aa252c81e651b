// The trainer's kernels on the GPU are compared with their plain counterparts, from the same
// inputs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "examples/train/device/bf16.hpp"
#include "examples/train/error.hpp"
#include "gpu_backend_test.hpp"

namespace train {
namespace {

struct Size {
  int64_t width, context, tokens;
};

// One array, on the GPU and on the host.
template <class T>
struct Mirrored {
  std::vector<T> start;
  T* gpu = nullptr;
  T* host = nullptr;

  [[nodiscard]] T* on(bool is_gpu) const { return is_gpu ? gpu : host; }
};

class TrainKernels : public ::testing::TestWithParam<Size> {
 protected:
  void SetUp() override {
    gpu_ = gpu_backend_or_skip(size().width, size().context);
    if (gpu_ == nullptr) return;
    host_ = make_host_backend();
  }

  static Size size() { return GetParam(); }
  static i32 tokens() { return static_cast<i32>(size().tokens); }
  static i32 width() { return static_cast<i32>(size().width); }
  static i32 context() { return static_cast<i32>(size().context); }
  static size_t stream() { return static_cast<size_t>(size().width * size().tokens); }

  template <class T>
  Mirrored<T> mirrored(std::vector<T> values) {
    Mirrored<T> out{std::move(values)};
    const size_t bytes = out.start.size() * sizeof(T);
    out.gpu = put(*gpu_, out.start.data(), bytes);
    out.host = put(*host_, out.start.data(), bytes);
    return out;
  }
  // A kernel writes it; until then it holds garbage.
  template <class T>
  Mirrored<T> output(size_t count) {
    std::vector<T> garbage(count);
    std::memset(garbage.data(), 0x7f, count * sizeof(T));
    return mirrored(std::move(garbage));
  }
  Mirrored<u16> bf16(size_t count, double deviation) {
    std::vector<u16> values(count);
    for (u16& value : values) value = encode_bf16(normal() * static_cast<float>(deviation));
    return mirrored(std::move(values));
  }
  Mirrored<float> f32(size_t count, double mean, double deviation) {
    std::vector<float> values(count);
    for (float& value : values) {
      value = static_cast<float>(mean) + normal() * static_cast<float>(deviation);
    }
    return mirrored(std::move(values));
  }
  Mirrored<u8> bytes(size_t count) {
    std::vector<u8> values(count);
    // Half of them are one value, as spaces are in a text.
    for (u8& value : values) value = generator_() % 2 == 0 ? u8{32} : static_cast<u8>(generator_());
    return mirrored(std::move(values));
  }

  // `call(true)` has the GPU's addresses, `call(false)` the host's.
  void launch(const std::function<KernelCall(bool)>& call) {
    gpu_->launch(call(true));
    host_->launch(call(false));
  }
  template <class T>
  std::vector<double> values(Backend& backend, const T* from, size_t count) {
    std::vector<T> raw(count);
    backend.download(raw.data(), from, count * sizeof(T));
    std::vector<double> out;
    for (const T value : raw) {
      if constexpr (std::is_same_v<T, u16>) {
        out.push_back(double{decode_bf16(value)});
      } else {
        out.push_back(static_cast<double>(value));
      }
    }
    return out;
  }
  // Compares each element to `relative` of itself, and of the root mean square a hundredth of that.
  template <class T>
  void expect_equal(const Mirrored<T>& mirrored, double relative, const char* what) {
    const auto expected = values(*host_, mirrored.host, mirrored.start.size());
    const auto actual = values(*gpu_, mirrored.gpu, mirrored.start.size());
    double squares = 0;
    for (const double value : expected) squares += value * value;
    const double rms = std::sqrt(squares / static_cast<double>(expected.size()));
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i], relative * (std::abs(expected[i]) + 0.01 * rms))
          << what << ", element " << i << " of " << expected.size();
    }
  }

  static constexpr double kBf16 = 0x1p-7;  // one unit in the last place
  std::unique_ptr<Backend> gpu_;
  std::unique_ptr<Backend> host_;

 private:
  template <class T>
  T* put(Backend& backend, const T* from, size_t bytes) {
    void* memory = backend.allocate(bytes);
    backend.upload(memory, from, bytes);
    return static_cast<T*>(memory);
  }
  float normal() { return normal_(generator_); }

  std::mt19937 generator_{1};
  std::normal_distribution<float> normal_;
};

TEST_P(TrainKernels, Sample) {
  const auto text = bytes(100'003);
  const auto step = mirrored(std::vector<u32>{7});
  const auto slots = output<u8>(static_cast<size_t>(size().context * size().tokens));
  const auto targets = output<u8>(static_cast<size_t>(size().tokens));
  launch([&](bool gpu) {
    return SampleArgs{text.on(gpu),  100'003U,        5U,       step.on(gpu),
                      slots.on(gpu), targets.on(gpu), tokens(), context()};
  });
  expect_equal(slots, 0, "slots");
  expect_equal(targets, 0, "targets");
}

TEST_P(TrainKernels, Embed) {
  const auto table = bf16(static_cast<size_t>(kBytes * size().width), 1);
  const auto slots = bytes(static_cast<size_t>(size().context * size().tokens));
  const auto h = output<u16>(stream());
  launch([&](bool gpu) {
    return EmbedArgs{table.on(gpu), slots.on(gpu), h.on(gpu), tokens(), context(), width()};
  });
  expect_equal(h, 0, "h");
}

TEST_P(TrainKernels, EmbedGrad) {
  const auto dh = bf16(stream(), 1);
  const auto slots = bytes(static_cast<size_t>(size().context * size().tokens));
  const auto dtable = output<float>(static_cast<size_t>(kBytes * size().width));
  launch([&](bool gpu) {
    return EmbedGradArgs{dh.on(gpu), slots.on(gpu), dtable.on(gpu), tokens(), context(), width()};
  });
  expect_equal(dtable, 1e-3, "dtable");
}

TEST_P(TrainKernels, Norm) {
  const auto h = bf16(stream(), 2);
  const auto y = bf16(stream(), 1);
  const auto gain = f32(static_cast<size_t>(width()), 1, 0.3);
  for (const bool with_y : {false, true}) {
    const auto sum = output<u16>(stream());
    const auto n = output<u16>(stream());
    const auto inv_rms = output<float>(static_cast<size_t>(tokens()));
    launch([&](bool gpu) {
      return NormArgs{h.on(gpu),
                      with_y ? y.on(gpu) : nullptr,
                      with_y ? sum.on(gpu) : nullptr,
                      gain.on(gpu),
                      n.on(gpu),
                      inv_rms.on(gpu),
                      tokens(),
                      width()};
    });
    if (with_y) expect_equal(sum, 0, "sum");
    expect_equal(n, kBf16, "n");
    expect_equal(inv_rms, 1e-5, "inv_rms");
  }
}

TEST_P(TrainKernels, NormGrad) {
  const auto dn = bf16(stream(), 1);
  const auto h = bf16(stream(), 2);
  const auto gain = f32(static_cast<size_t>(width()), 1, 0.3);
  const auto inv_rms = f32(static_cast<size_t>(tokens()), 0.5, 0.05);
  constexpr i32 kShares = 40;
  for (const bool with_residual : {false, true}) {
    const auto dh = bf16(stream(), 1);  // the residual's gradient, in place
    const auto partials = output<float>(static_cast<size_t>(kShares * width()));
    const auto d_gain = output<float>(static_cast<size_t>(width()));
    launch([&](bool gpu) {
      return NormGradArgs{dn.on(gpu),
                          h.on(gpu),
                          gain.on(gpu),
                          inv_rms.on(gpu),
                          with_residual ? dh.on(gpu) : nullptr,
                          dh.on(gpu),
                          partials.on(gpu),
                          kShares,
                          tokens(),
                          width()};
    });
    launch([&](bool gpu) {
      return SumRowsArgs{partials.on(gpu), d_gain.on(gpu), kShares, width()};
    });
    expect_equal(dh, kBf16, "dh");
    expect_equal(d_gain, 1e-2, "d_gain");
  }
}

TEST_P(TrainKernels, Gelu) {
  const auto u = bf16(stream() + 8, 3);  // not a multiple of what a block takes
  const auto a = output<u16>(u.start.size());
  const auto du = bf16(u.start.size(), 1);
  const auto count = static_cast<i64>(u.start.size());
  launch([&](bool gpu) { return GeluArgs{u.on(gpu), a.on(gpu), count}; });
  launch([&](bool gpu) { return GeluGradArgs{u.on(gpu), du.on(gpu), du.on(gpu), count}; });
  expect_equal(a, kBf16, "a");
  expect_equal(du, kBf16, "du");
}

TEST_P(TrainKernels, Loss) {
  const auto logits = bf16(static_cast<size_t>(tokens() * kBytes), 3);
  const auto targets = bytes(static_cast<size_t>(tokens()));
  const auto dlogits = output<u16>(logits.start.size());
  const auto losses = output<float>(targets.start.size());
  const auto curve = mirrored(std::vector<float>{-1, -1, -1});
  const auto step = mirrored(std::vector<u32>{1});
  launch([&](bool gpu) {
    return LossArgs{logits.on(gpu), targets.on(gpu), dlogits.on(gpu), losses.on(gpu), tokens()};
  });
  launch([&](bool gpu) {
    return FinishArgs{losses.on(gpu), curve.on(gpu), step.on(gpu), tokens()};
  });
  expect_equal(dlogits, kBf16, "dlogits");
  expect_equal(losses, 1e-5, "losses");
  expect_equal(curve, 1e-5, "curve");
  expect_equal(step, 0, "step");
}

// What several ranks and micro-batches add: shares of a step, sums of parts.
TEST_P(TrainKernels, SharesOfAStep) {
  const auto text = bytes(100'003);
  const auto step = mirrored(std::vector<u32>{3});
  const auto slots = output<u8>(static_cast<size_t>(size().context * size().tokens));
  const auto targets = output<u8>(static_cast<size_t>(size().tokens));
  launch([&](bool gpu) {
    return SampleArgs{text.on(gpu),    100'003U, 5U,        step.on(gpu), slots.on(gpu),
                      targets.on(gpu), tokens(), context(), tokens(),     4 * tokens()};
  });
  expect_equal(slots, 0, "slots");
  expect_equal(targets, 0, "targets");
  const auto logits = bf16(static_cast<size_t>(tokens() * kBytes), 3);
  const auto dlogits = output<u16>(logits.start.size());
  const auto losses = output<float>(targets.start.size());
  launch([&](bool gpu) {
    return LossArgs{logits.on(gpu), targets.on(gpu), dlogits.on(gpu),
                    losses.on(gpu), tokens(),        4 * tokens()};
  });
  expect_equal(dlogits, kBf16, "dlogits");

  const auto from = f32(static_cast<size_t>(kBytes * width()), 0, 1);
  const auto to = f32(from.start.size(), 0, 1);
  const auto squares = mirrored(std::vector<float>(128, -1.0F));
  const auto count = static_cast<i64>(from.start.size());
  launch([&](bool gpu) { return AddArgs{from.on(gpu), to.on(gpu), count}; });
  launch([&](bool gpu) { return SquareSumArgs{to.on(gpu), squares.on(gpu), count, 128}; });
  expect_equal(to, 0, "to");
  expect_equal(squares, 1e-4, "squares");
}

TEST_P(TrainKernels, AdamW) {
  const size_t count = static_cast<size_t>(kBytes * width()) + 4;
  const auto master = f32(count, 0, 1);
  const auto m = f32(count, 0, 0.1);
  const auto v = f32(count, 2, 0.1);
  const auto grad = f32(count, 0, 0.01);
  const auto copy = output<u16>(count);
  constexpr i32 kShares = 50;
  const auto partials = output<float>(kShares);
  const auto schedule = mirrored(std::vector<StepScalars>{{}, {0.01F, 2.0F, 4.0F, 0.0F}});
  const auto step = mirrored(std::vector<u32>{1});
  launch([&](bool gpu) {
    return SquareSumArgs{grad.on(gpu), partials.on(gpu), static_cast<i64>(count), kShares};
  });
  launch([&](bool gpu) {
    return AdamArgs{master.on(gpu), m.on(gpu),
                    v.on(gpu),      grad.on(gpu),
                    copy.on(gpu),   static_cast<i64>(count),
                    1024,           partials.on(gpu),
                    kShares,        schedule.on(gpu),
                    step.on(gpu),   1.0F,
                    0.9F,           0.95F,
                    1e-8F,          0.1F};
  });
  expect_equal(master, 1e-4, "master");
  expect_equal(m, 1e-3, "m");
  expect_equal(v, 1e-3, "v");
  expect_equal(copy, kBf16, "copy");
}

INSTANTIATE_TEST_SUITE_P(Sizes, TrainKernels,
                         ::testing::Values(Size{64, 4, 48}, Size{192, 4, 80}, Size{2048, 16, 4112},
                                           Size{4096, 16, 256}, Size{8192, 4, 64}),
                         [](const auto& one) {
                           return format("w%ldc%ldt%ld", one.param.width, one.param.context,
                                         one.param.tokens);
                         });

}  // namespace
}  // namespace train
