// Computes one linear layer, y = x w^T, in fp8 with the rowwise recipe, and prints how far the result
// is from the exact one.
//
// Exit status: 0 where the result is good, 1 where something failed, 2 where this machine has no
// Hopper GPU.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <float8/float8.hpp>
#include <random>
#include <vector>

#include "device_memory.hpp"

namespace {

using Bf16 = std::uint16_t;  // the upper half of a float

float to_float(Bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Returns random values that bf16 represents exactly.
std::vector<Bf16> random_matrix(std::int64_t rows, std::int64_t columns, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<Bf16> values(static_cast<std::size_t>(rows * columns));
  for (Bf16& value : values) {
    const float sample = normal(generator);
    std::uint32_t bits;
    std::memcpy(&bits, &sample, sizeof bits);
    value = static_cast<Bf16>(bits >> 16);
  }
  return values;
}

int run() {
  const std::int64_t m = 1000, n = 512, k = 1024;

  auto context = float8::Context::create(0);
  if (!context) {
    const bool unfit =
        context.error().code == FLOAT8_ENVIRONMENT || context.error().code == FLOAT8_UNSUPPORTED;
    std::fprintf(stderr, "linear_forward: %s\n", context.error().message.c_str());
    return unfit ? 2 : 1;
  }

  float8::LinearDesc desc;
  desc.m_max = m;
  desc.n = n;
  desc.k = k;
  desc.recipe = float8::Recipe::rowwise();
  const float8::Linear linear = float8::Linear::plan(context.value(), desc).value();

  const std::vector<Bf16> x = random_matrix(m, k, 1);
  const std::vector<Bf16> w = random_matrix(n, k, 2);
  Device device;
  float8::ForwardArgs args;
  args.x.data = device.upload(x);
  args.w.data = device.upload(w);
  args.y.data = device.allocate(static_cast<std::size_t>(m * n) * sizeof(Bf16));
  args.workspace.data = device.allocate(linear.workspace_bytes());

  if (const float8::Status status = linear.forward(args, nullptr); !status) {
    std::fprintf(stderr, "linear_forward: %s\n", status.message().c_str());
    return 1;
  }
  const std::vector<Bf16> y = device.download<Bf16>(args.y.data, static_cast<std::size_t>(m * n));

  double signal = 0, noise = 0;
  for (std::int64_t row = 0; row < m; row += 37) {
    for (std::int64_t column = 0; column < n; ++column) {
      double exact = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        exact += static_cast<double>(to_float(x[static_cast<std::size_t>(row * k + i)])) *
                 to_float(w[static_cast<std::size_t>(column * k + i)]);
      }
      const double error = exact - to_float(y[static_cast<std::size_t>(row * n + column)]);
      signal += exact * exact;
      noise += error * error;
    }
  }
  const double sqnr_db = 10 * std::log10(signal / noise);
  std::printf("y[%lld,%lld] = x w^T over %lld in fp8, rowwise: %.1f dB from the exact result\n",
              static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k),
              sqnr_db);
  return sqnr_db >= 25 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "linear_forward: %s\n", error.what());
    return 1;
  }
}
