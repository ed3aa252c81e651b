// MLPs as candidates of an open problem: in fp8 as float8.torch.fuse runs one, whose activation is computed by the
// casts of what it makes, or as float8_moe; and in bf16, where copies move what an activation would. So the baseline
// has the best activation that there can be, whatever a compiler makes of it.
#include <algorithm>
#include <utility>

#include "runtime/moe/moe.hpp"
#include "tools/tuner/backend/gpu/gpu_backend.hpp"

namespace f8::tuner {
namespace {

// Tensors of m x n, in halves: a forward reads gate and up, and writes h; a backward reads the gradient of h too, and
// writes those of gate and up. A copy reads half of what it moves.
constexpr int64_t forward_halves(bool gate) {
  return gate ? 3 : 2;
}
constexpr int64_t backward_halves(bool gate) {
  return gate ? 5 : 3;
}

// The bytes that an operand set of an MLP takes.
struct MlpBytes {
  std::vector<size_t> weights;
  size_t x, n_half, hidden;
  int64_t streams;

  explicit MlpBytes(const MlpShape& mlp) {
    const int64_t matrices = std::max<int64_t>(mlp.groups.experts, 1);
    for (const Shape& linear : linears_of(mlp)) {
      weights.push_back(
          suballocation_bytes(bytes_of(matrices * linear.n * linear.k, Dtype::kBf16)));
    }
    x = suballocation_bytes(bytes_of(mlp.m * mlp.k, Dtype::kBf16));
    hidden = bytes_of(mlp.m * mlp.n, Dtype::kBf16);
    n_half = hidden / 2;
    streams = mlp.gate ? 2 : 1;
  }
  [[nodiscard]] size_t all_weights() const {
    size_t all = 0;
    for (const size_t bytes : weights) all += bytes;
    return all;
  }
  [[nodiscard]] size_t inputs() const { return 2 * x + all_weights(); }
  // dh, gate and up; h; dgate and dup; y; dx, its part by up, and their sum
  [[nodiscard]] size_t read_hidden() const {
    return suballocation_bytes(hidden * static_cast<size_t>(1 + streams));
  }
  [[nodiscard]] size_t h(bool gate) const {
    return suballocation_bytes(n_half * static_cast<size_t>(forward_halves(gate)));
  }
  [[nodiscard]] size_t d_hidden(bool gate) const {
    return suballocation_bytes(n_half * static_cast<size_t>(backward_halves(gate)));
  }
  [[nodiscard]] size_t results(bool gate) const {
    return read_hidden() + h(gate) + d_hidden(gate) + 5 * x + all_weights();
  }
};

}  // namespace

Status GpuBackend::open_mlp() {
  OpenMlp open{.shape = mlp_shape(problem_.dims), .sets = {}};
  const MlpShape& mlp = open.shape;
  const MlpBytes bytes(mlp);
  group_rows_ = {mlp.m};
  if (mlp.groups.experts > 0) {
    group_rows_ = rows_of_experts(mlp.m, mlp.groups);
    F8_TRY(open_routing());
  }
  // The copies in fp8, which a candidate allocates: q and qt of all operands.
  const double fp8 = 2.0 * static_cast<double>(bytes.inputs() + bytes.read_hidden());
  const size_t set_bytes = bytes.inputs() + bytes.results(mlp.gate);
  sets_ = F8_TRY(fit_sets(static_cast<double>(bytes.inputs() + bytes.read_hidden()),
                          static_cast<double>(set_bytes) + fp8));
  const auto sets = static_cast<size_t>(sets_);
  F8_TRY(make_room(set_bytes * sets));
  Pool& operands = pool(nullptr);
  F8_TRY(operands.reserve(driver_, bytes.inputs() * sets));
  F8_TRY(results_.reserve(driver_, bytes.results(mlp.gate) * sets, "results"));
  const int64_t matrices = std::max<int64_t>(mlp.groups.experts, 1);
  for (size_t i = 0; i < sets; ++i) {
    OpenMlp::Set set;
    set.x = operands.suballocate(mlp.m * mlp.k);
    set.dy = operands.suballocate(mlp.m * mlp.k);
    for (const Shape& linear : linears_of(mlp)) {
      set.w.push_back(operands.suballocate(matrices * linear.n * linear.k));
    }
    for (const size_t weight : bytes.weights) set.dw.push_back(results_.suballocate(weight));
    set.dh = results_.suballocate(bytes.read_hidden());
    set.hidden = set.dh + bytes.hidden;
    set.bf16_h = results_.suballocate(bytes.h(mlp.gate));
    set.bf16_d_hidden = results_.suballocate(bytes.d_hidden(mlp.gate));
    set.y = results_.suballocate(bytes.x);
    set.dx = results_.suballocate(2 * bytes.x);
    set.dx_sum = results_.suballocate(2 * bytes.x);
    open.sets.push_back(std::move(set));
  }
  mlp_.emplace(std::move(open));
  return {};
}

GpuBackend::Launch GpuBackend::copy_of(CUdeviceptr from, CUdeviceptr to, int64_t elements) const {
  return [this, from, to, elements](runtime::Stream stream) {
    return driver_.check(
        driver_.memcpy_dtod_async(to, from, bytes_of(elements, Dtype::kBf16), stream),
        "cuMemcpyDtoDAsync");
  };
}

Result<Built> GpuBackend::add_mlp(const Candidate& candidate) {
  const MlpChoices choices = F8_TRY(parse_mlp_choices(candidate.config));
  Timed timed;
  timed.candidate = candidate;
  timed.launch = F8_TRY(candidate.impl == Impl::kBf16    ? mlp_in_bf16(choices)
                        : mlp_->shape.groups.experts > 0 ? experts_mlp_in_fp8(choices, timed)
                                                         : mlp_in_fp8(choices, timed));
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

// Forward of gate and up, the activation, down; backward of down, the activation, up and gate; and where both have a
// gradient of x, their sum.
Result<std::vector<GpuBackend::Launch>> GpuBackend::mlp_in_bf16(const MlpChoices& choices) {
  const MlpShape& mlp = mlp_->shape;
  const std::vector<Shape> linears = linears_of(mlp);
  const size_t down = linears.size() - 1;
  const auto at = [](CUdeviceptr address) { return PoolTensor{.data = pointer(address)}; };
  std::vector<std::vector<GemmLaunches>> gemms;  // by linear, and by set
  for (size_t i = 0; i < linears.size(); ++i) {
    const Problem linear = F8_TRY(Problem::make(Op::kLinear, recipe_, linears[i], mlp.groups));
    const auto hidden = bytes_of(i == down ? 0 : mlp.m * linears[i].n, Dtype::kBf16) * i;
    std::vector<LinearSet> sets;
    for (const OpenMlp::Set& set : mlp_->sets) {
      LinearSet own;
      own.x = i == down ? at(set.bf16_h) : set.x;
      own.w = set.w[i];
      own.dy = i == down ? set.dy : at(set.bf16_d_hidden + hidden);
      own.y = i == down ? set.y : set.hidden + hidden;
      own.dx = i == down ? set.dh : set.dx + i * bytes_of(mlp.m * mlp.k, Dtype::kBf16);
      own.dw = set.dw[i];
      sets.push_back(own);
    }
    gemms.push_back(F8_TRY(bf16_launches(linear, sets, i == down ? choices.down : choices.up)));
  }
  std::vector<Launch> launches;
  for (size_t s = 0; s < mlp_->sets.size(); ++s) {
    const OpenMlp::Set& set = mlp_->sets[s];
    std::vector<Launch> all;
    const auto add = [&](size_t linear, Gemm gemm) {
      all.push_back(gemms[linear][s][static_cast<size_t>(gemm)]);
    };
    if (routing_) {
      all.emplace_back(
          [this](runtime::Stream stream) { return routing_->plan.run(routing_->call, stream); });
    }
    for (size_t i = 0; i < down; ++i) add(i, Gemm::kOutput);
    all.push_back(copy_of(set.hidden, set.bf16_h, mlp.m * mlp.n * forward_halves(mlp.gate) / 2));
    for (const Gemm gemm : kGemms) add(down, gemm);
    all.push_back(
        copy_of(set.dh, set.bf16_d_hidden, mlp.m * mlp.n * backward_halves(mlp.gate) / 2));
    for (size_t i = 0; i < down; ++i) {
      add(i, Gemm::kGradInput);
      add(i, Gemm::kGradWeight);
    }
    if (down == 2) all.push_back(copy_of(set.dx, set.dx_sum, mlp.m * mlp.k * 3 / 2));
    launches.emplace_back([all = std::move(all)](runtime::Stream stream) -> Status {
      for (const Launch& launch : all) F8_TRY(launch(stream));
      return {};
    });
  }
  return launches;
}

// The plans of an MLP of linears.
struct GpuBackend::FusedPlans {
  std::shared_ptr<const runtime::Linear> up, down;  // gate has up's
  std::shared_ptr<const runtime::Quantizer> x, h,
      d_hidden;  // x: none where linears cast it themselves

  [[nodiscard]] const runtime::Linear& linear(bool is_down) const { return is_down ? *down : *up; }
  [[nodiscard]] size_t saved_bytes(bool is_down) const {
    return suballocation_bytes(linear(is_down).saved_bytes(false, is_down || x != nullptr));
  }
  [[nodiscard]] size_t workspace_bytes() const {
    return std::max({up->workspace_bytes(), down->workspace_bytes(), h->workspace_bytes(),
                     d_hidden->workspace_bytes(), x ? x->workspace_bytes() : 0});
  }
};

// Its calls on one operand set. They point to views, so that it stays where it is.
struct GpuBackend::FusedCalls {
  FusedPlans plans;
  std::vector<runtime::ForwardCall> forward{};  // gate, up and down, or up and down
  std::vector<runtime::BackwardCall> backward{};
  runtime::QuantizeCall of_x{}, of_h{}, of_d_hidden{};
  float8_tensor x_view{}, h_view{};
  std::array<float8_tensor, 2> d_hidden_views{};

  Status run(const float8_step* step, runtime::Stream stream) {
    for (runtime::ForwardCall& call : forward) call.step = step;
    for (runtime::BackwardCall& call : backward) call.step = step;
    for (runtime::QuantizeCall* call : {&of_x, &of_h, &of_d_hidden}) call->step = step;
    const size_t last = forward.size() - 1;
    if (plans.x) F8_TRY(plans.x->run(of_x, stream));
    for (size_t i = 0; i < last; ++i) F8_TRY(plans.up->forward(forward[i], stream));
    F8_TRY(plans.h->run(of_h, stream));
    F8_TRY(plans.down->forward(forward[last], stream));
    F8_TRY(plans.down->backward(backward[last], stream));
    F8_TRY(plans.d_hidden->run(of_d_hidden, stream));
    for (size_t i = 0; i < last; ++i) F8_TRY(plans.up->backward(backward[i], stream));
    return {};
  }
};

Result<GpuBackend::FusedPlans> GpuBackend::plan_fused(const MlpChoices& choices) {
  const MlpShape& mlp = mlp_->shape;
  const auto linear = [&](const Shape& shape, const LinearChoices& kernels) {
    runtime::LinearDesc desc{.shape = shape, .recipe = recipe_, .choices = {}};
    for (size_t i = 0; i < kernels.size(); ++i) desc.choices[i] = kernels[i];
    return runtime::Linear::plan(context_, desc);
  };
  using runtime::CastSource;
  const auto quantizer = [&](CastSource source, runtime::Tensor operand, int64_t cols) {
    const bool has_activation = source != CastSource::kPlain;
    return runtime::Quantizer::plan(
        context_, {.operand = operand,
                   .rows = mlp.m,
                   .cols = cols,
                   .recipe = recipe_,
                   .source = source,
                   .activation = mlp.gate || !has_activation ? codegen::Activation::kSilu
                                                             : codegen::Activation::kGelu});
  };
  FusedPlans plans;
  plans.up = F8_TRY(linear(linears_of(mlp).front(), choices.up));
  plans.down = F8_TRY(linear(linears_of(mlp).back(), choices.down));
  if (mlp.gate && plans.up->scale_slots().empty()) {
    plans.x = F8_TRY(quantizer(CastSource::kPlain, runtime::Tensor::kInput, mlp.k));
  }
  plans.h = F8_TRY(quantizer(mlp.gate ? CastSource::kGlu : CastSource::kActivation,
                             runtime::Tensor::kInput, mlp.n));
  plans.d_hidden =
      F8_TRY(quantizer(mlp.gate ? CastSource::kGluBackward : CastSource::kActivationBackward,
                       runtime::Tensor::kGradOutput, mlp.n));
  return plans;
}

// The calls on one set, whose copies in fp8 `take` allocates.
Result<std::shared_ptr<GpuBackend::FusedCalls>> GpuBackend::fused_calls(
    const FusedPlans& plans, const OpenMlp::Set& set, const MlpStates& states,
    const float8_buffer& workspace, const std::function<void*(size_t)>& take) const {
  const MlpShape& mlp = mlp_->shape;
  const size_t last = set.w.size() - 1;
  auto calls = std::make_shared<FusedCalls>(FusedCalls{.plans = plans});
  const auto hidden = [&](size_t i) {
    return mutable_pointer(set.hidden + i * bytes_of(mlp.m * mlp.n, Dtype::kBf16));
  };
  const auto cast = [&](const runtime::Quantizer& quantizer, const void* x, size_t linear) {
    return runtime::QuantizeCall{.rows = mlp.m,
                                 .x = {x},
                                 .tensor = {take(quantizer.tensor_bytes())},
                                 .workspace = workspace,
                                 .scales = states.slots[linear]};
  };
  if (plans.x) {
    calls->of_x = cast(*plans.x, set.x.data, 0);
    calls->x_view = F8_TRY(plans.x->view(calls->of_x.tensor.data, nullptr, mlp.m));
  }
  calls->of_h = cast(*plans.h, hidden(0), last);
  calls->h_view = F8_TRY(plans.h->view(calls->of_h.tensor.data, nullptr, mlp.m));
  runtime::QuantizeCall& of_d_hidden = calls->of_d_hidden;
  of_d_hidden = cast(*plans.d_hidden, hidden(0), 0);
  of_d_hidden.grad = {pointer(set.dh)};
  calls->d_hidden_views[0] = F8_TRY(plans.d_hidden->view(of_d_hidden.tensor.data, nullptr, mlp.m));
  if (mlp.gate) {
    calls->of_h.up = of_d_hidden.up = {hidden(1)};
    of_d_hidden.up_tensor = {take(plans.d_hidden->tensor_bytes())};
    of_d_hidden.up_scales = states.slots[1];
    calls->d_hidden_views[1] =
        F8_TRY(plans.d_hidden->view(of_d_hidden.up_tensor.data, nullptr, mlp.m));
  }
  for (size_t i = 0; i <= last; ++i) {
    const bool is_down = i == last;
    const float8_buffer saved{take(plans.saved_bytes(is_down))};
    // Of what is given in fp8 the shape alone is read.
    const float8_matrix x{is_down ? hidden(0) : set.x.data, 0,
                          is_down   ? &calls->h_view
                          : plans.x ? &calls->x_view
                                    : nullptr};
    const float8_matrix dy = is_down ? float8_matrix{set.dy.data}
                                     : float8_matrix{hidden(i), 0, &calls->d_hidden_views[i]};
    const CUdeviceptr dx = is_down ? set.dh : set.dx + i * bytes_of(mlp.m * mlp.k, Dtype::kBf16);
    calls->forward.push_back({.m = mlp.m,
                              .x = x,
                              .w = {set.w[i].data},
                              .y = {is_down ? mutable_pointer(set.y) : hidden(i)},
                              .saved = saved,
                              .workspace = workspace,
                              .scales = states.slots[i]});
    calls->backward.push_back({.m = mlp.m,
                               .dy = dy,
                               .x = x,
                               .w = {set.w[i].data},
                               .dx = {mutable_pointer(dx)},
                               .dw = {mutable_pointer(set.dw[i])},
                               .saved = saved,
                               .workspace = workspace,
                               .scales = states.slots[i]});
  }
  return calls;
}

// A state of delayed scaling for each linear; empty slots under other recipes.
Result<GpuBackend::MlpStates> GpuBackend::add_mlp_states(
    const std::vector<const std::vector<DelayedSlot>*>& linears) {
  MlpStates states{.all = {}, .slots = std::vector<float8_scale_slots>(linears.size())};
  for (size_t i = 0; i < linears.size() && !linears[i]->empty(); ++i) {
    states.all.push_back(F8_TRY(add_delayed_state(*linears[i])));
    states.slots[i] = states.all[i].scales->slots(states.all[i].bytes, 0);
  }
  return states;
}

// What makes the first scales, by a first step of `run`.
std::function<Status()> GpuBackend::first_step_of(
    const MlpStates& states, std::function<Status(const float8_step&)> run) const {
  if (states.all.empty()) return {};
  return [this, all = states.all, run = std::move(run)]() -> Status {
    for (const DelayedState& state : all) F8_TRY(state.scales->init(state.bytes, stream_));
    F8_TRY(run({.first_step = 1}));
    for (const DelayedState& state : all) F8_TRY(state.scales->update(state.bytes, stream_));
    return {};
  };
}

Result<std::vector<GpuBackend::Launch>> GpuBackend::mlp_in_fp8(const MlpChoices& choices,
                                                               Timed& timed) {
  const MlpShape& mlp = mlp_->shape;
  const FusedPlans plans = F8_TRY(plan_fused(choices));
  const size_t before_down = linears_of(mlp).size() - 1;
  std::vector<const std::vector<DelayedSlot>*> slots(before_down, &plans.up->scale_slots());
  slots.push_back(&plans.down->scale_slots());
  const MlpStates states = F8_TRY(add_mlp_states(slots));
  F8_TRY(reserve_workspace(plans.workspace_bytes()));
  const float8_buffer workspace{mutable_pointer(workspaces_.back().address()),
                                workspaces_.back().bytes()};
  const size_t of_set =
      (plans.saved_bytes(false) + suballocation_bytes(plans.d_hidden->tensor_bytes())) *
          before_down +
      plans.saved_bytes(true) + suballocation_bytes(plans.h->tensor_bytes()) +
      (plans.x ? suballocation_bytes(plans.x->tensor_bytes()) : 0);
  buffers_.push_back(F8_TRY(
      DeviceBuffer::allocate(driver_, of_set * mlp_->sets.size(), "an MLP's copies in fp8")));
  CUdeviceptr next = buffers_.back().address();
  const auto take = [&](size_t bytes) {
    return mutable_pointer(std::exchange(next, next + suballocation_bytes(bytes)));
  };
  std::vector<Launch> launches;
  for (const OpenMlp::Set& set : mlp_->sets) {
    const auto calls = F8_TRY(fused_calls(plans, set, states, workspace, take));
    if (launches.empty()) {
      timed.prime = first_step_of(
          states, [this, calls](const float8_step& step) { return calls->run(&step, stream_); });
    }
    launches.emplace_back(
        [calls, gate = mlp.gate, sum = copy_of(set.dx, set.dx_sum, mlp.m * mlp.k * 3 / 2)](
            runtime::Stream stream) -> Status {
          F8_TRY(calls->run(nullptr, stream));
          return gate ? sum(stream) : Status{};
        });
  }
  return launches;
}

Result<std::vector<GpuBackend::Launch>> GpuBackend::experts_mlp_in_fp8(const MlpChoices& choices,
                                                                       Timed& timed) {
  const MlpShape& mlp = mlp_->shape;
  runtime::MoeDesc desc;
  desc.m_max = mlp.m;
  desc.dim = mlp.k;
  desc.hidden = mlp.n;
  desc.experts = mlp.groups.experts;
  desc.recipe = recipe_;
  desc.rows_in_place = true;
  for (size_t i = 0; i < kGemms.size(); ++i) {
    desc.configs[0][i] = choices.up[i].config;
    desc.configs[1][i] = choices.down[i].config;
  }
  const auto moe = F8_TRY(runtime::Moe::plan(context_, desc));
  F8_TRY(reserve_workspace(moe->workspace_bytes()));
  const float8_buffer workspace{mutable_pointer(workspaces_.back().address()),
                                workspaces_.back().bytes()};
  const size_t of_set = suballocation_bytes(moe->saved_bytes());
  buffers_.push_back(
      F8_TRY(DeviceBuffer::allocate(driver_, of_set * mlp_->sets.size(), "an MLP's saved buffer")));
  CUdeviceptr next = buffers_.back().address();
  const MlpStates states =
      F8_TRY(add_mlp_states({&moe->w13()->scale_slots(), &moe->w2()->scale_slots()}));
  std::vector<Launch> launches;
  for (const OpenMlp::Set& set : mlp_->sets) {
    const float8_buffer saved{mutable_pointer(std::exchange(next, next + of_set)),
                              moe->saved_bytes()};
    const runtime::MoeForwardCall forward{.m = mlp.m,
                                          .tokens = mlp.m,
                                          .x = {set.x.data},
                                          .w13 = {set.w[0].data},
                                          .w2 = {set.w[1].data},
                                          .y = {mutable_pointer(set.y)},
                                          .layout = routing_->call.layout,
                                          .saved = saved,
                                          .workspace = workspace,
                                          .w13_scales = states.slots[0],
                                          .w2_scales = states.slots[1]};
    const runtime::MoeBackwardCall backward{.m = mlp.m,
                                            .tokens = mlp.m,
                                            .x = {set.x.data},
                                            .dy = {set.dy.data},
                                            .dx = {mutable_pointer(set.dx)},
                                            .dw13 = {mutable_pointer(set.dw[0])},
                                            .dw2 = {mutable_pointer(set.dw[1])},
                                            .layout = routing_->call.layout,
                                            .saved = saved,
                                            .workspace = workspace,
                                            .w13_scales = states.slots[0],
                                            .w2_scales = states.slots[1]};
    const auto run = [this, moe, forward, backward](const float8_step* step,
                                                    runtime::Stream stream) -> Status {
      runtime::MoeForwardCall first = forward;
      runtime::MoeBackwardCall second = backward;
      first.step = second.step = step;
      F8_TRY(routing_->plan.run(routing_->call, stream));
      F8_TRY(moe->forward(first, stream));
      return moe->backward(second, stream);
    };
    if (launches.empty()) {
      timed.prime = first_step_of(
          states, [this, run](const float8_step& step) { return run(&step, stream_); });
    }
    launches.emplace_back([run](runtime::Stream stream) { return run(nullptr, stream); });
  }
  return launches;
}

}  // namespace f8::tuner
