// linear_group: the time of linears that read one x, for the projections of Llama-3-8B: as a group,
// one by one, and one by one with an x that is cast once.
//
//   linear_group [ROUNDS] [--emulate]     medians of ROUNDS rounds (50), in microseconds
//
// A round times every way once, in an order that alternates with the reverse one. Each call follows a
// write of more than the L2 cache, which also gives the host time to enqueue the call, and is timed by
// events. --emulate runs small shapes on an emulated device, to test the program.
#include "runtime/lists/linear_group.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/format.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/linear/quantizer.hpp"

namespace f8::runtime {
namespace {

constexpr float8_step kFirstStepOfAll{.first_step = 1};

struct Options {
  int rounds = 50;
  bool emulate = false;
};

struct Projections {
  const char* name;
  std::vector<int64_t> n;
  int64_t k;
};

// Device memory, freed at the end.
class Memory {
 public:
  Memory(const Driver& driver, size_t bytes)
      : driver_(driver), bytes_(std::max<size_t>(bytes, 16)) {
    if (driver_.mem_alloc(&address_, bytes_) != CUDA_SUCCESS) {
      std::fprintf(stderr, "linear_group: %zu bytes of device memory are not free\n", bytes_);
      std::exit(2);
    }
    driver_.memset_d8(address_, 0, bytes_);
  }
  // A tensor of random bf16 values: zeros would take the GEMMs less power, and so less time.
  Memory(const Driver& driver, int64_t rows, int64_t cols, unsigned seed)
      : Memory(driver, static_cast<size_t>(rows * cols) * 2) {
    std::vector<uint16_t> values(static_cast<size_t>(rows * cols));
    std::minstd_rand generator(seed);
    for (uint16_t& value : values) {  // of either sign, with magnitudes from 1/8 to 2
      const auto bits = static_cast<uint32_t>(generator());
      value = static_cast<uint16_t>((bits & 0x8000U) | (0x3e00U + (bits >> 16 & 0x1ffU)));
    }
    driver_.memcpy_htod(address_, values.data(), values.size() * 2);
  }
  ~Memory() { driver_.mem_free(address_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  [[nodiscard]] void* get() const { return reinterpret_cast<void*>(address_); }
  void overwrite(Stream stream) const { driver_.memset_d8_async(address_, 1, bytes_, stream); }

 private:
  const Driver& driver_;
  CUdeviceptr address_ = 0;
  size_t bytes_;
};
using MemoryPtr = std::unique_ptr<Memory>;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// The plans and tensors of one comparison.
struct Bench {
  Bench(const std::shared_ptr<Context>& of, int64_t rows) : context(of), m(rows) {}

  [[nodiscard]] Status plan(const Recipe& recipe, const Projections& projections);
  [[nodiscard]] Status forward_alone(bool shared, bool first_step = false);
  [[nodiscard]] Status backward_alone(bool shared, bool first_step = false);
  [[nodiscard]] LinearGroupCall group_call();
  // The copies of an operand; null where the recipe makes none.
  [[nodiscard]] std::shared_ptr<const Quantizer> plan_casts(const Recipe& recipe, Tensor operand,
                                                            int64_t rows, int64_t cols) const;
  [[nodiscard]] const float8_tensor* weight(size_t i) const {
    return cached && of_w[i] != nullptr ? &w_views[i] : nullptr;
  }
  [[nodiscard]] const Driver& driver() const { return context->state().driver; }

  std::shared_ptr<Context> context;
  int64_t m;
  bool cached = false;
  std::vector<std::shared_ptr<const Linear>> linears;
  std::shared_ptr<const LinearGroup> group;
  std::shared_ptr<const Quantizer> quantizer;  // of x
  std::vector<std::shared_ptr<const Quantizer>> of_w;
  std::vector<MemoryPtr> w, y, dy, dw, w_tensors, saved;
  MemoryPtr x, dx, x_fp8, workspace, group_saved, state;
  std::vector<ScaleSlots> slots;
  std::vector<GroupedLinearCall> members;
  float8_tensor x_view = {};
  std::vector<float8_tensor> w_views;
};

std::shared_ptr<const Quantizer> Bench::plan_casts(const Recipe& recipe, Tensor operand,
                                                   int64_t rows, int64_t cols) const {
  auto planned =
      Quantizer::plan(context, {.operand = operand, .rows = rows, .cols = cols, .recipe = recipe});
  return planned ? *planned : nullptr;
}

Status Bench::plan(const Recipe& recipe, const Projections& projections) {
  const auto [name, ns, k] = projections;
  const auto bytes = [](int64_t rows, int64_t cols) {
    return static_cast<size_t>(rows * cols) * 2;
  };
  std::vector<DelayedSlot> delayed;
  std::vector<size_t> first_slot;
  size_t workspace_bytes = 0;
  for (const int64_t n : ns) {
    LinearDesc desc;
    desc.shape = {m, n, k};
    desc.recipe = recipe;
    desc.accumulate_grad_input = true;
    const auto linear = F8_TRY(Linear::plan(context, desc));
    const auto seed = static_cast<unsigned>(linears.size());
    w.push_back(std::make_unique<Memory>(driver(), n, k, 3 * seed + 1));
    dy.push_back(std::make_unique<Memory>(driver(), m, n, 3 * seed + 2));
    y.push_back(std::make_unique<Memory>(driver(), bytes(m, n)));
    dw.push_back(std::make_unique<Memory>(driver(), bytes(n, k)));
    saved.push_back(std::make_unique<Memory>(driver(), linear->saved_bytes()));
    of_w.push_back(plan_casts(recipe, Tensor::kWeight, n, k));
    const bool casts = of_w.back() != nullptr;
    w_tensors.push_back(
        std::make_unique<Memory>(driver(), casts ? of_w.back()->tensor_bytes() : 0));
    w_views.push_back(casts ? F8_TRY(of_w.back()->view(w_tensors.back()->get(), nullptr, n))
                            : float8_tensor());
    workspace_bytes = std::max(
        {workspace_bytes, linear->workspace_bytes(), casts ? of_w.back()->workspace_bytes() : 0});
    first_slot.push_back(delayed.size());
    delayed.insert(delayed.end(), linear->scale_slots().begin(), linear->scale_slots().end());
    linears.push_back(linear);
  }
  group = F8_TRY(LinearGroup::plan(context, linears));
  quantizer = plan_casts(recipe, Tensor::kInput, m, k);
  workspace_bytes = std::max({workspace_bytes, group->workspace_bytes(),
                              quantizer == nullptr ? 0 : quantizer->workspace_bytes()});
  workspace = std::make_unique<Memory>(driver(), workspace_bytes);
  group_saved = std::make_unique<Memory>(driver(), group->saved_bytes());
  x = std::make_unique<Memory>(driver(), m, k, 99);
  dx = std::make_unique<Memory>(driver(), bytes(m, k));
  x_fp8 = std::make_unique<Memory>(driver(), quantizer == nullptr ? 0 : quantizer->tensor_bytes());
  if (quantizer != nullptr) x_view = F8_TRY(quantizer->view(x_fp8->get(), nullptr, m));
  const auto scales = F8_TRY(DelayedScales::plan(context, delayed));
  state = std::make_unique<Memory>(driver(), scales.bytes());
  F8_TRY(scales.init(state->get(), nullptr));
  for (size_t i = 0; i < linears.size(); ++i) {
    slots.push_back(scales.count() == 0 ? ScaleSlots{} : scales.slots(state->get(), first_slot[i]));
    if (of_w[i] == nullptr) continue;
    F8_TRY(of_w[i]->run({.rows = linears[i]->desc().shape.n,
                         .x = {w[i]->get()},
                         .tensor = {w_tensors[i]->get()},
                         .workspace = {workspace->get()},
                         .step = &kFirstStepOfAll,
                         .scales = slots[i]},
                        nullptr));
  }
  if (scales.count() == 0) return {};
  // With delayed scaling, one step leaves the scales of the calls that are timed.
  F8_TRY(forward_alone(false, true));
  F8_TRY(backward_alone(false, true));
  return scales.update(state->get(), nullptr);
}

LinearGroupCall Bench::group_call() {
  members.assign(linears.size(), {});
  for (size_t i = 0; i < linears.size(); ++i) {
    members[i].w.data = w[i]->get();
    members[i].y.data = y[i]->get();
    members[i].dy.data = dy[i]->get();
    members[i].dw.data = dw[i]->get();
    members[i].w.fp8 = weight(i);
    members[i].scales = slots[i];
  }
  LinearGroupCall call;
  call.x.data = x->get();
  call.saved.data = group_saved->get();
  call.dx.data = dx->get();
  call.m = m;
  call.linears = members.data();
  call.count = members.size();
  call.workspace.data = workspace->get();
  return call;
}

Status Bench::forward_alone(bool shared, bool first_step) {
  if (shared && quantizer != nullptr) {
    QuantizeCall call;
    call.x.data = x->get();
    call.tensor.data = x_fp8->get();
    call.rows = m;
    call.scales = slots[0];
    call.workspace.data = workspace->get();
    F8_TRY(quantizer->run(call, nullptr));
  }
  for (size_t i = 0; i < linears.size(); ++i) {
    ForwardCall call;
    call.x.data = x->get();
    call.w.data = w[i]->get();
    call.y.data = y[i]->get();
    call.saved.data = saved[i]->get();
    call.m = m;
    call.w.fp8 = weight(i);
    call.scales = slots[i];
    if (first_step) call.step = &kFirstStepOfAll;
    call.workspace.data = workspace->get();
    if (shared && quantizer != nullptr) call.x.fp8 = &x_view;
    F8_TRY(linears[i]->forward(call, nullptr));
  }
  return {};
}

Status Bench::backward_alone(bool shared, bool first_step) {
  for (size_t i = 0; i < linears.size(); ++i) {
    BackwardCall call;
    call.dy.data = dy[i]->get();
    call.saved.data = saved[i]->get();
    call.dx.data = dx->get();
    call.dw.data = dw[i]->get();
    call.m = m;
    call.x.data = x->get();
    call.w.data = w[i]->get();
    call.w.fp8 = weight(i);
    call.scales = slots[i];
    if (first_step) call.step = &kFirstStepOfAll;
    call.workspace.data = workspace->get();
    call.dx.accumulate = i > 0 ? 1 : 0;
    if (shared && quantizer != nullptr) call.x.fp8 = &x_view;
    F8_TRY(linears[i]->backward(call, nullptr));
  }
  return {};
}

// A way of computing, and the times of its parts.
struct Way {
  const char* name;
  std::function<Status()> forward, backward;
  std::vector<double> forward_us = {}, backward_us = {};
};

class Timer {
 public:
  Timer(const Driver& driver, bool emulate)
      : driver_(driver), emulate_(emulate), flush_(driver, emulate ? 4096 : size_t{256} << 20) {
    driver_.event_create(&begin_, 0);
    driver_.event_create(&end_, 0);
  }
  ~Timer() {
    driver_.event_destroy(begin_);
    driver_.event_destroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  Result<double> time(const std::function<Status()>& call) {
    flush_.overwrite(nullptr);
    F8_TRY(driver_.check(driver_.event_record(begin_, nullptr), "cuEventRecord"));
    F8_TRY(call());
    F8_TRY(driver_.check(driver_.event_record(end_, nullptr), "cuEventRecord"));
    F8_TRY(driver_.check(driver_.event_synchronize(end_), "cuEventSynchronize"));
    if (emulate_) return 1.0;  // an emulated device has no clock
    float ms = 0;
    F8_TRY(driver_.check(driver_.event_elapsed_time(&ms, begin_, end_), "cuEventElapsedTime"));
    return double{ms} * 1000;
  }

 private:
  const Driver& driver_;
  bool emulate_;
  Memory flush_;
  CUevent begin_ = nullptr, end_ = nullptr;
};

Status compare(Bench& bench, const Recipe& recipe, const Projections& projections,
               const Options& options, Timer& timer) {
  const LinearGroupCall call = bench.group_call();
  std::array<Way, 3> ways = {Way{"one by one", [&] { return bench.forward_alone(false); },
                                 [&] { return bench.backward_alone(false); }},
                             Way{"shared x", [&] { return bench.forward_alone(true); },
                                 [&] { return bench.backward_alone(true); }},
                             Way{"group", [&] { return bench.group->forward(call, nullptr); },
                                 [&] { return bench.group->backward(call, nullptr); }}};
  const int warm_rounds = options.emulate ? 0 : 5;
  for (int round = 0; round < warm_rounds + options.rounds; ++round) {
    for (size_t i = 0; i < ways.size(); ++i) {
      Way& way = ways[round % 2 == 0 ? i : ways.size() - 1 - i];
      const double forward = F8_TRY(timer.time(way.forward));
      const double backward = F8_TRY(timer.time(way.backward));
      if (round < warm_rounds) continue;
      way.forward_us.push_back(forward);
      way.backward_us.push_back(backward);
    }
  }
  const auto total = [](const Way& way) {
    return median(way.forward_us) + median(way.backward_us);
  };
  for (const Way& way : ways) {
    print("{:<20} {:<10} {:>6} {:<7} {:<11} {:>10.1f} {:>10.1f} {:>10.1f} {:>8.3f}\n", recipe.name,
          projections.name, bench.m, bench.cached ? "cached" : "cast", way.name,
          median(way.forward_us), median(way.backward_us), total(way), total(ways[0]) / total(way));
  }
  return {};
}

Status compare_all(const Options& options) {
  const auto context = F8_TRY(Context::create(0, {.emulate = options.emulate}));
  F8_TRY(context->make_current());
  std::vector<Projections> all = {{"QKV", {4096, 1024, 1024}, 4096},
                                  {"gate+up", {14336, 14336}, 4096}};
  std::vector<int64_t> tokens = {256, 2048, 8192};
  if (options.emulate) {
    all = {{"QKV", {64, 16, 16}, 64}, {"gate+up", {224, 224}, 64}};
    tokens = {16, 48};
  }
  print("{}, {} rounds; medians in us, speedup over one by one\n\n", context->device().name,
        options.rounds);
  print("{:<20} {:<10} {:>6} {:<7} {:<11} {:>10} {:>10} {:>10} {:>8}\n", "recipe", "linears", "M",
        "weights", "way", "forward", "backward", "both", "speedup");
  Timer timer(context->state().driver, options.emulate);
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Projections& projections : all) {
      for (const int64_t m : tokens) {
        Bench bench(context, m);
        F8_TRY(bench.plan(recipe, projections));
        for (const bool cached : {false, true}) {
          bench.cached = cached;
          F8_TRY(compare(bench, recipe, projections, options, timer));
        }
        print("{}\n\n", describe(*bench.group));
      }
    }
  }
  return {};
}

}  // namespace
}  // namespace f8::runtime

int main(int argc, char** argv) {
  f8::runtime::Options options;
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == std::string_view("--emulate")) {
      options.emulate = true;
    } else if ((options.rounds = std::atoi(argv[i])) < 1) {
      std::fprintf(stderr, "linear_group [ROUNDS] [--emulate]\n");
      return 1;
    }
  }
  const f8::Status status = f8::runtime::compare_all(options);
  if (status) return 0;
  std::fprintf(stderr, "linear_group: %s\n", status.error().message.c_str());
  return 2;
}
