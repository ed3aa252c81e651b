// Delayed scaling where ranks have some of the tokens each: from the first step on their scales are
// those of one device that has them all. The ranks are threads with a stream each on one device;
// they reduce their maxima by meeting on the host.
#include <barrier>
#include <bit>
#include <thread>

#include "runtime/lists/quantizer_list.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

constexpr Shape kRankShape = {300, 208, 592};
constexpr std::array<int64_t, 2> kRows = {176, 124};  // of each rank

// The way in which a step casts the weight.
enum class Weights { kEachCall, kGiven, kGivenAtOnce, kRecomputed };

// The point where both ranks wait for each other when amaxes are reduced.
struct Meeting {
  std::barrier<> both{2};
  std::array<std::vector<uint32_t>, 2> amaxes;
  std::array<int, 2> reductions{};
};

// A model of one linear on all rows or on a rank's.
struct Model {
  Model(const std::shared_ptr<Context>& on, Weights weights_of, int64_t rows)
      : context(on), weights(weights_of) {
    LinearDesc desc = describe("delayed", kRankShape);
    desc.recompute = weights == Weights::kRecomputed;
    desc.count = true;
    linear = Linear::plan(context, desc).value();
    scales = DelayedScales::plan(context, linear->scale_slots(), {.history = 3}).value();
    weight = std::make_unique<Fp8Weight>(context, desc);
    casts = QuantizerList::plan(context, {&weight->quantizer, 1}).value();
    t = std::make_unique<Tensors>(*context, *linear, rows, 5);
    state = std::make_unique<DeviceBuffer>(*context, scales->bytes());
    casts_workspace = std::make_unique<DeviceBuffer>(*context, casts->workspace_bytes());
    counters = std::make_unique<DeviceBuffer>(
        *context, std::vector<uint8_t>(kCountersOfLinear * sizeof(CastCounters)));
    stream = std::make_unique<DeviceStream>(*context);
    t->slots = scales->slots(state->as(), 0);
    ok(scales->init(state->as(), stream->get()));
  }

  // Rows from `first` on of the inputs of a step.
  void take(const reference::Matrix& x, const reference::Matrix& dy, int64_t first) {
    const auto rows = [&](const reference::Matrix& from, DeviceBuffer& to) {
      reference::Matrix part{t->m, from.cols, {}};
      const auto begin = from.values.begin() + static_cast<std::ptrdiff_t>(first * from.cols);
      part.values.assign(begin, begin + static_cast<std::ptrdiff_t>(t->m * from.cols));
      const auto bits = reference::to_bf16_bits(part);
      to.upload(bits.data(), bits.size() * 2);
    };
    rows(x, t->device_x);
    rows(dy, t->device_dy);
  }

  Status step(bool first_step) {
    const bool given = weights == Weights::kGiven || weights == Weights::kGivenAtOnce;
    auto* const counted = counters->as<CastCounters>();
    const float8_step common{.first_step = first_step, .ranks = ranks};
    if (given) {
      QuantizeCall cast = weight->call(*t);
      cast.step = weights == Weights::kGiven ? &common : nullptr;  // a list has its own
      cast.counters = counted;
      F8_TRY(weights == Weights::kGiven
                 ? weight->Quantized::run(cast, stream->get(), reduce)
                 : casts->run(listed({&cast, 1}, casts_workspace->as(), &common), stream->get(),
                              reduce));
    }
    ForwardCall forward = t->forward();
    BackwardCall backward = t->backward();
    forward.step = backward.step = &common;
    forward.counters = backward.counters = counted;
    if (given) forward.w.fp8 = backward.w.fp8 = &weight->w_tensor;
    F8_TRY(linear->forward(forward, stream->get(), reduce));
    F8_TRY(linear->backward(backward, stream->get(), reduce));
    if (ranks != nullptr) {
      F8_TRY(reduce(scales->amaxes(state->as()), scales->count(), ranks, stream->get()));
    }
    F8_TRY(scales->update(state->as(), stream->get()));
    stream->synchronize();
    return {};
  }
  static void ok(const Status& status) { EXPECT_TRUE(status) << status.error().message; }

  std::shared_ptr<Context> context;
  Weights weights;
  std::shared_ptr<const Linear> linear;
  std::optional<DelayedScales> scales;
  std::unique_ptr<Fp8Weight> weight;
  std::optional<QuantizerList> casts;
  std::unique_ptr<Tensors> t;
  std::unique_ptr<DeviceBuffer> state, casts_workspace, counters;
  std::unique_ptr<DeviceStream> stream;
  // A rank stands for its communicator.
  float8_nccl_comm ranks = nullptr;
  AmaxReducer reduce = nullptr;
};

struct Rank {
  Meeting* meeting;
  size_t index;
  Model model;

  static Status reduce(uint32_t* bits, size_t count, float8_nccl_comm ranks, Stream stream) {
    auto& self = *reinterpret_cast<Rank*>(ranks);
    const Driver& driver = self.model.context->state().driver;
    const auto at = reinterpret_cast<CUdeviceptr>(bits);
    auto& amaxes = self.meeting->amaxes;
    auto& own = amaxes[self.index];
    own.resize(count);
    F8_TRY(driver.check(driver.stream_synchronize(stream), "cuStreamSynchronize"));
    F8_TRY(driver.check(driver.memcpy_dtoh(own.data(), at, 4 * count), "cuMemcpyDtoH"));
    self.meeting->both.arrive_and_wait();
    const auto& other = amaxes[1 - self.index];
    if (other.size() != count) {
      return fail(ErrorCode::kInternal, "{} maxima meet {}", count, other.size());
    }
    std::vector<uint32_t> most(count);
    std::ranges::transform(own, other, most.begin(),
                           [](uint32_t a, uint32_t b) { return std::max(a, b); });
    self.meeting->both.arrive_and_wait();
    ++self.meeting->reductions[self.index];
    F8_TRY(driver.check(driver.memcpy_htod(at, most.data(), 4 * count), "cuMemcpyHtoD"));
    // The copy is the default stream's, which `stream` does not wait for.
    return driver.check(driver.stream_synchronize(nullptr), "cuStreamSynchronize");
  }
};

class DelayedRanks : public GpuTestWith<Weights> {};
INSTANTIATE_TEST_SUITE_P(By, DelayedRanks,
                         ::testing::Values(Weights::kEachCall, Weights::kGiven,
                                           Weights::kGivenAtOnce, Weights::kRecomputed));

TEST_P(DelayedRanks, ScaleAsOneDeviceFromTheFirstStepOn) {
  Model whole(context_, GetParam(), kRankShape.m);
  Meeting meeting;
  std::array<Rank, 2> ranks{Rank{&meeting, 0, {context_, GetParam(), kRows[0]}},
                            Rank{&meeting, 1, {context_, GetParam(), kRows[1]}}};
  for (Rank& rank : ranks) {
    rank.model.ranks = reinterpret_cast<float8_nccl_comm>(&rank);
    rank.model.reduce = Rank::reduce;
  }

  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE(step);
    const auto seed = static_cast<uint64_t>(100 + 10 * step);
    reference::Matrix x = reference::random_matrix(kRankShape.m, kRankShape.k, seed);
    reference::Matrix dy = reference::random_matrix(kRankShape.m, kRankShape.n, seed + 1);
    // The largest of x is the first rank's, that of dy the second's.
    x.values.front() = 7.5F + static_cast<float>(step);
    dy.values.back() = -9.25F;
    whole.take(x, dy, 0);
    ranks[0].model.take(x, dy, 0);
    ranks[1].model.take(x, dy, kRows[0]);
    F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));

    meeting.reductions = {};
    F8_ASSERT_OK(whole.step(step == 0));
    std::array<Status, 2> ran;
    {
      std::vector<std::jthread> threads;
      for (size_t r = 0; r < ranks.size(); ++r) {
        threads.emplace_back([&, r] {
          ran[r] = context().make_current();
          if (ran[r]) ran[r] = ranks[r].model.step(step == 0);
          if (!ran[r]) meeting.both.arrive_and_drop();
        });
      }
    }
    F8_ASSERT_OK(ran[0]);
    F8_ASSERT_OK(ran[1]);
    const bool given = GetParam() == Weights::kGiven || GetParam() == Weights::kGivenAtOnce;
    EXPECT_EQ(meeting.reductions[0], step > 0 ? 1 : given ? 4 : 3);

    const auto state = whole.state->download<uint32_t>();
    const auto append = [](std::vector<double> to, const std::vector<double>& more) {
      to.insert(to.end(), more.begin(), more.end());
      return to;
    };
    for (const Rank& rank : ranks) {
      EXPECT_EQ(rank.model.state->download<uint32_t>(), state) << "rank " << rank.index;
      rank.model.t->expect_whole_guards();
      for (const auto* buffer : {&rank.model.state, &rank.model.casts_workspace}) {
        EXPECT_TRUE((*buffer)->guards_are_whole());
      }
    }
    // Equal casts, so equal up to the order of sums, which the number of rows may change.
    const double near = kEmulated ? 0 : 1e-3;
    const Tensors& first = *ranks[0].model.t;
    const Tensors& second = *ranks[1].model.t;
    EXPECT_LE(reference::relative_error(whole.t->y.bf16(), append(first.y.bf16(), second.y.bf16())),
              near);
    EXPECT_LE(
        reference::relative_error(whole.t->dx.bf16(), append(first.dx.bf16(), second.dx.bf16())),
        near);
    if (HasFailure()) return;
  }
  // Casts for the amaxes alone are not counted.
  const auto counted = [](const Model& model) {
    return model.counters->download<CastCounters>()[0].elements;
  };
  EXPECT_EQ(counted(ranks[0].model) + counted(ranks[1].model), counted(whole));
}

}  // namespace
}  // namespace f8::runtime::gpu
