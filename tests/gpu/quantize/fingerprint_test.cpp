// The fingerprint kernel against the reference, bit for bit: weights of any size, type, stride and
// alignment, alone and in lists, and what a change of one bit does.
#include "runtime/quantize/fingerprint.hpp"

#include <array>
#include <random>

#include "recipes/reference/fingerprint.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

struct Weight {
  int64_t n, k, ld;  // ld 0: dense
  int32_t dtype;
  size_t offset;  // of the first element, in bytes

  [[nodiscard]] size_t element() const { return dtype == FLOAT8_F32 ? 4 : 2; }
  [[nodiscard]] size_t pitch() const { return static_cast<size_t>(ld == 0 ? k : ld) * element(); }
  [[nodiscard]] size_t row_bytes() const { return static_cast<size_t>(k) * element(); }
  [[nodiscard]] size_t bytes() const {
    return offset + static_cast<size_t>(n - 1) * pitch() + row_bytes();
  }
};

const std::vector<Weight> kWeights = {
    {1, 1, 0, FLOAT8_BF16, 0},      {3, 5, 0, FLOAT8_F16, 0},     {3, 5, 0, FLOAT8_BF16, 6},
    {7, 9, 11, FLOAT8_BF16, 2},     {16, 16, 0, FLOAT8_F32, 0},   {5, 3, 4, FLOAT8_F32, 4},
    {64, 128, 0, FLOAT8_BF16, 0},   {48, 80, 96, FLOAT8_F16, 0},  {257, 1031, 0, FLOAT8_BF16, 0},
    {300, 208, 592, FLOAT8_F32, 0}, {512, 520, 0, FLOAT8_F32, 8}, {640, 1040, 1048, FLOAT8_BF16, 0},
};

std::vector<uint8_t> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// A weight on the device, its fingerprint and its flag.
struct Kept {
  Kept(const Context& context, const Weight& of, uint64_t random)
      : weight(of),
        image(random_bytes(of.bytes(), random)),
        device(context, image),
        state(context, std::vector<uint64_t>(FLOAT8_FINGERPRINT_BYTES / 8)),
        noop_flag(context, std::vector<uint32_t>{7}) {}

  [[nodiscard]] FingerprintCall call() const {
    FingerprintCall call;
    call.w.data = device.as<uint8_t>() + weight.offset;
    call.n = weight.n;
    call.k = weight.k;
    call.w.ld = weight.ld;
    call.dtype = weight.dtype;
    call.seed = seed;
    call.fingerprint = state.as();
    call.noop_flag = noop_flag.as<uint32_t>();
    return call;
  }
  [[nodiscard]] reference::Fingerprint expected() const {
    return reference::fingerprint(image.data() + weight.offset, static_cast<size_t>(weight.n),
                                  weight.row_bytes(), weight.pitch(), seed);
  }
  // The flag, and what is kept of the weight; nothing is left of a launch.
  void expect(uint32_t flag) const {
    const auto words = state.download<uint64_t>();
    EXPECT_EQ((reference::Fingerprint{words[0], words[1]}), expected());
    EXPECT_EQ(words[2], 0U);
    EXPECT_EQ(words[3], 0U);
    EXPECT_EQ(words[4], 0U);
    EXPECT_EQ(noop_flag.download<uint32_t>()[0], flag);
    EXPECT_TRUE(device.guards_are_whole() && state.guards_are_whole() &&
                noop_flag.guards_are_whole());
  }
  void set_noop_flag() { noop_flag.upload(std::array<uint32_t, 1>{1}.data(), 4); }
  void flip(size_t byte, int bit) {
    image[byte] ^= static_cast<uint8_t>(1U << bit);
    device.upload(image.data(), image.size());
  }

  Weight weight;
  std::vector<uint8_t> image;
  DeviceBuffer device, state, noop_flag;
  uint64_t seed = 0x0123456789abcdefU;
};

class FingerprintTest : public GpuTest {
 protected:
  [[nodiscard]] Status compare(std::span<const FingerprintCall> calls) const {
    return compare_weights(context(), {calls.size(), calls.data()}, nullptr);
  }
  [[nodiscard]] Status compare(const Kept& kept) const {
    const FingerprintCall call = kept.call();
    return compare({&call, 1});
  }
};

TEST_F(FingerprintTest, TellsEveryChange) {
  for (const Weight& weight : kWeights) {
    SCOPED_TRACE(f8::format("{} x {}, ld {}, type {}, at {}", weight.n, weight.k, weight.ld,
                            weight.dtype, weight.offset));
    Kept kept(context(), weight, 3);
    F8_ASSERT_OK(compare(kept));
    kept.expect(0);
    kept.set_noop_flag();
    F8_ASSERT_OK(compare(kept));
    kept.expect(1);
    for (const size_t byte :
         {weight.offset, weight.bytes() - 1, weight.offset + weight.row_bytes() / 2}) {
      kept.flip(byte, static_cast<int>(byte % 8));
      F8_ASSERT_OK(compare(kept));
      kept.expect(0);
      kept.set_noop_flag();
      F8_ASSERT_OK(compare(kept));
      kept.expect(1);
    }
    // Between its rows there is no weight.
    if (weight.ld > weight.k && weight.n > 1) {
      kept.flip(weight.offset + weight.row_bytes(), 3);
      F8_ASSERT_OK(compare(kept));
      kept.expect(1);
    }
    kept.seed += uint64_t{1} << 40;
    F8_ASSERT_OK(compare(kept));
    kept.expect(0);
  }
}

// What moves is a change, and so is what only changes order.
TEST_F(FingerprintTest, TellsPlaces) {
  const Weight weight{64, 64, 0, FLOAT8_BF16, 0};
  Kept kept(context(), weight, 5);
  const auto set = [&](size_t chunk, uint8_t value) {
    std::fill_n(kept.image.begin() + static_cast<ptrdiff_t>(16 * chunk), 16, value);
  };
  std::ranges::fill(kept.image, uint8_t{0});
  F8_ASSERT_OK(compare(kept));
  for (const auto& [first, second] : {std::pair{3, 5}, {5, 3}, {4, 4}, {0, 8}, {8, 0}}) {
    set(17, static_cast<uint8_t>(first));
    set(18, static_cast<uint8_t>(second));
    kept.device.upload(kept.image.data(), kept.image.size());
    kept.set_noop_flag();
    F8_ASSERT_OK(compare(kept));
    kept.expect(0);
  }
}

TEST_F(FingerprintTest, Lists) {
  std::vector<std::unique_ptr<Kept>> all;
  std::vector<FingerprintCall> calls;
  for (size_t i = 0; i < 3 * kWeights.size(); ++i) {  // more than a launch takes
    all.push_back(std::make_unique<Kept>(context(), kWeights[i % kWeights.size()], i));
    calls.push_back(all.back()->call());
  }
  F8_ASSERT_OK(compare(calls));
  for (const auto& kept : all) {
    kept->expect(0);
    kept->set_noop_flag();
  }
  all[7]->flip(0, 0);
  all[35]->flip(all[35]->weight.offset, 7);
  F8_ASSERT_OK(compare(calls));
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    const bool changed = (i == 7 && all[i]->weight.offset == 0) || i == 35;
    all[i]->expect(changed ? 0 : 1);
  }
}

TEST_F(FingerprintTest, TheSameBitsEveryTime) {
  const Weight weight =
      by_device<Weight>({4096, 4096, 0, FLOAT8_BF16, 0}, {512, 512, 0, FLOAT8_BF16, 0});
  Kept kept(context(), weight, 9);
  for (int i = 0; i < repeats(200); ++i) {
    F8_ASSERT_OK(compare(kept));
    ASSERT_EQ(kept.noop_flag.download<uint32_t>()[0], i == 0 ? 0U : 1U) << i;
    kept.set_noop_flag();
  }
  kept.expect(1);
}

TEST_F(FingerprintTest, InAGraph) {
  Kept kept(context(), kWeights[8], 1);
  F8_ASSERT_OK(compare_weights(context(), {}, nullptr));  // loads the kernel
  const DeviceStream stream(context());
  const FingerprintCall call = kept.call();
  const DeviceGraph graph(context(), stream, [&] {
    return compare_weights(context(), {1, &call}, stream.get());
  });
  graph.replay();
  kept.expect(0);
  kept.set_noop_flag();
  graph.replay();
  kept.expect(1);
  kept.flip(77, 1);
  graph.replay();
  kept.expect(0);
}

TEST_F(FingerprintTest, RefusesWhatIsNoWeight) {
  Kept kept(context(), kWeights[6], 1);
  const auto refused = [&](auto change, std::string_view words) {
    FingerprintCall call = kept.call();
    change(call);
    const Status status = compare({&call, 1});
    ASSERT_FALSE(status);
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
  };
  refused([](FingerprintCall& c) { c.w.data = nullptr; },
          "args[0]: float8_fingerprint_args.w.data is NULL");
  refused([](FingerprintCall& c) { c.noop_flag = nullptr; }, "noop_flag is NULL");
  refused([](FingerprintCall& c) { c.fingerprint = nullptr; }, "fingerprint is NULL");
  refused([](FingerprintCall& c) { c.n = 0; }, "float8_fingerprint_args.n is 0");
  refused([](FingerprintCall& c) { c.k = -1; }, "float8_fingerprint_args.k is -1");
  refused([](FingerprintCall& c) { c.w.ld = 127; }, "w.ld is 127");
  refused([](FingerprintCall& c) { c.w.data = static_cast<const uint8_t*>(c.w.data) + 1; },
          "2 bytes");
  refused([](FingerprintCall& c) { c.fingerprint = static_cast<uint8_t*>(c.fingerprint) + 8; },
          "16 bytes");
  refused([](FingerprintCall& c) { c.fingerprint = const_cast<void*>(c.w.data); }, "overlap");
  const FingerprintCall twice[] = {kept.call(), kept.call()};
  const Status status = compare(twice);
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message.find("args[1]: float8_fingerprint_args.fingerprint is that of"),
            std::string::npos);
}

}  // namespace
}  // namespace f8::runtime::gpu
