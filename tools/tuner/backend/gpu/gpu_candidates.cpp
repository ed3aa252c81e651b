// Makes a candidate's text into launches on every operand set.
#include <algorithm>
#include <utility>

#include "tools/tuner/backend/gpu/gpu_backend.hpp"

namespace f8::tuner {

Result<Suggested> GpuBackend::suggestions(const Problem& gemm, bool bf16) {
  if (is_grouped(gemm.op)) return suggested_of_groups(bf16);
  const runtime::GemmDesc desc = F8_TRY(gemm_desc(gemm, bf16));
  const auto found = runtime::cublaslt_suggestions(*context_, desc);
  if (!found) return triage(found.error());
  return Suggested{static_cast<int>(found->all.size()), found->unmeasured};
}

// Plans keep pointers into a workspace, so an earlier, smaller one stays until the problem is
// closed.
Status GpuBackend::reserve_workspace(size_t bytes) {
  if (!workspaces_.empty() && workspaces_.back().bytes() >= bytes) return {};
  constexpr size_t kLeast = size_t{64} << 20;
  workspaces_.push_back(
      F8_TRY(DeviceBuffer::allocate(driver_, std::max(bytes, kLeast), "a workspace")));
  return {};
}

Result<Built> GpuBackend::add(const Candidate& candidate) {
  Result<Built> built = fail(ErrorCode::kInvalidArgument, "unknown candidate {} of {}",
                             impl_text(candidate), problem_.key());
  const bool whole = !is_gemm(problem_.op);
  const bool experts = is_grouped(problem_.op);
  if (candidate.impl == Impl::kCopy && (weights_ != nullptr || producer_)) {
    built = add_copy();
  } else if (weights_ != nullptr) {
    built = add_casts(candidate);
  } else if (producer_) {
    built = add_producer(candidate);
  } else if (attention_ || mlp_) {
    if (candidate.impl == Impl::kFloat8 || candidate.impl == Impl::kBf16) {
      built = attention_ ? add_attention(candidate) : add_mlp(candidate);
    }
  } else if (candidate.impl == Impl::kBf16 ? whole
                                           : candidate.impl == Impl::kBf16CublasLt && experts) {
    built = add_bf16(candidate);
  } else if (experts) {
    if (candidate.impl == (whole ? Impl::kFloat8 : Impl::kGenerated)) {
      built = add_experts(candidate);
    }
  } else if (!whole && (candidate.impl == Impl::kGenerated || candidate.impl == Impl::kCublasLt ||
                        candidate.impl == Impl::kCublasLtTensorwise ||
                        candidate.impl == Impl::kBf16CublasLt)) {
    built = add_gemm(candidate);
  } else if (whole && (candidate.impl == Impl::kFloat8 || candidate.impl == Impl::kFloat8Reused)) {
    built = add_float8(candidate);
  }
  if (!built) return triage(built.error());
  return built;
}

Result<Built> GpuBackend::add_gemm(const Candidate& candidate) {
  const Operands operands = candidate.impl == Impl::kBf16CublasLt         ? Operands::kBf16
                            : candidate.impl == Impl::kCublasLtTensorwise ? Operands::kFp8OneScale
                                                                          : Operands::kFp8;
  const bool bf16 = operands == Operands::kBf16;
  const bool one_scale = operands == Operands::kFp8OneScale;
  const runtime::GemmDesc desc =
      F8_TRY(gemm_desc(one_scale ? with_one_scale(problem_) : problem_, bf16, candidate.epilogue));
  const runtime::GemmChoice choice = F8_TRY(to_choice(candidate));
  const auto plan = F8_TRY(runtime::GemmPlan::create(context_, desc, choice));
  F8_TRY(bf16 ? suballocate_bf16() : suballocate_fp8());
  F8_TRY(reserve_workspace(plan->workspace_bytes()));

  Timed timed;
  timed.candidate = candidate;
  timed.operands = operands;
  timed.k = !bf16 && choice.provider == Provider::kCublasLt ? padded(gemm_.k) : gemm_.k;
  runtime::GemmCall call{.inv_scale_a = bf16 ? nullptr : scale_a_.data,
                         .inv_scale_b = bf16 ? nullptr : scale_b_.data,
                         .m = problem_.shape().m};
  F8_TRY(add_epilogue(desc, timed, call));
  void* workspace = mutable_pointer(workspaces_.back().address());
  for (const GemmSet& set : bf16 ? bf16_sets_ : fp8_sets_) {
    call.a = set.a.data;
    call.b = set.b.data;
    call.d = mutable_pointer(set.d);
    timed.launch.emplace_back([plan, call, workspace](runtime::Stream stream) {
      return plan->run(call, workspace, stream);
    });
  }
  Built built{.id = static_cast<int>(timed_.size())};
  if (choice.provider == Provider::kGenerated) {
    const runtime::Kernel* kernel =
        F8_TRY(context_->kernel(runtime::gemm_spec(desc, choice.config)));
    built.registers = kernel->registers;
    built.smem_bytes = kernel->smem_bytes;
    built.spill_bytes = kernel->spill_bytes;
  }
  timed_.push_back(std::move(timed));
  return built;
}

// Allocates the epilogue's operands: the bias, and the word that the amax goes to.
Status GpuBackend::add_epilogue(const runtime::GemmDesc& desc, Timed& timed,
                                runtime::GemmCall& call) {
  if (desc.bias) {
    std::vector<uint8_t> bytes(static_cast<size_t>(gemm_.n) * size_bytes(desc.d));
    for (int64_t j = 0; j < gemm_.n; ++j) store_element(bytes.data(), j, bias_of(j), desc.d);
    buffers_.push_back(F8_TRY(DeviceBuffer::allocate(driver_, bytes.size(), "a bias")));
    const CUdeviceptr at = buffers_.back().address();
    F8_TRY(driver_.check(driver_.memcpy_htod(at, bytes.data(), bytes.size()), "cuMemcpyHtoD"));
    F8_TRY(driver_.check(driver_.stream_synchronize(nullptr), "cuStreamSynchronize"));
    call.bias = pointer(at);
  }
  if (desc.amax) {
    buffers_.push_back(F8_TRY(DeviceBuffer::allocate(driver_, sizeof(uint32_t), "an amax")));
    timed.amax = buffers_.back().address();
    call.amax = reinterpret_cast<uint32_t*>(timed.amax);
  }
  return {};
}

Result<Built> GpuBackend::add_float8(const Candidate& candidate) {
  runtime::LinearDesc desc{.shape = problem_.shape(), .recipe = recipe_, .choices = {}};
  if (!candidate.config.empty()) {
    const LinearChoices choices = F8_TRY(parse_choices(candidate.config));
    for (size_t i = 0; i < choices.size(); ++i) desc.choices[i] = choices[i];
  }
  Timed timed;
  timed.candidate = candidate;
  timed.linear = F8_TRY(runtime::Linear::plan(context_, desc));
  F8_TRY(reserve_workspace(timed.linear->workspace_bytes()));
  if (timed.linear->saved_bytes() > saved_bytes_) {
    return fail(ErrorCode::kInternal, "{}: the linear saves {} bytes, {} were laid out for it",
                problem_.key(), timed.linear->saved_bytes(), saved_bytes_);
  }
  for (const LinearSet& set : linear_sets_) {
    timed.forward.push_back({.m = problem_.shape().m,
                             .x = {set.x.data},
                             .w = {set.w.data},
                             .y = {mutable_pointer(set.y)},
                             .saved = {mutable_pointer(set.saved)}});
    timed.backward.push_back({.m = problem_.shape().m,
                              .dy = {set.dy.data},
                              .x = {set.x.data},
                              .w = {set.w.data},
                              .dx = {mutable_pointer(set.dx)},
                              .dw = {mutable_pointer(set.dw)},
                              .saved = {mutable_pointer(set.saved)}});
  }
  if (!timed.linear->scale_slots().empty()) F8_TRY(add_delayed_scales(timed));
  if (candidate.impl == Impl::kFloat8Reused) F8_TRY(add_weights_in_fp8(timed));
  void* workspace = mutable_pointer(workspaces_.back().address());
  for (size_t i = 0; i < timed.forward.size(); ++i) {
    timed.forward[i].workspace.data = timed.backward[i].workspace.data = workspace;
    timed.launch.emplace_back([linear = timed.linear, forward = timed.forward[i],
                               backward = timed.backward[i]](runtime::Stream stream) -> Status {
      F8_TRY(linear->forward(forward, stream));
      return linear->backward(backward, stream);
    });
  }
  timed.steps = [linear = timed.linear, forward = timed.forward, backward = timed.backward](
                    size_t set) { return steps_of(*linear, forward[set], backward[set]); };
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

Result<GpuBackend::DelayedState> GpuBackend::add_delayed_state(
    const std::vector<DelayedSlot>& slots) {
  DelayedState state;
  state.scales = std::make_shared<const runtime::DelayedScales>(
      F8_TRY(runtime::DelayedScales::plan(context_, slots)));
  buffers_.push_back(
      F8_TRY(DeviceBuffer::allocate(driver_, state.scales->bytes(), "delayed scales")));
  state.bytes = mutable_pointer(buffers_.back().address());
  return state;
}

// Gives the linear a delayed-scaling state of its own, in which one step has left the operands'
// scales. The update of the scales is one launch for all linears of a model, so it is no part of
// one linear's time.
Status GpuBackend::add_delayed_scales(Timed& timed) {
  const DelayedState state = F8_TRY(add_delayed_state(timed.linear->scale_slots()));
  const runtime::ScaleSlots slots = state.scales->slots(state.bytes, 0);
  for (runtime::ForwardCall& forward : timed.forward) forward.scales = slots;
  for (runtime::BackwardCall& backward : timed.backward) backward.scales = slots;
  void* workspace = mutable_pointer(workspaces_.back().address());
  timed.prime = [this, state, workspace, linear = timed.linear, forward = timed.forward.front(),
                 backward = timed.backward.front()]() mutable -> Status {
    F8_TRY(state.scales->init(state.bytes, stream_));
    const float8_step first{.first_step = 1};
    forward.step = backward.step = &first;
    forward.workspace.data = backward.workspace.data = workspace;
    F8_TRY(linear->forward(forward, stream_));
    F8_TRY(linear->backward(backward, stream_));
    return state.scales->update(state.bytes, stream_);
  };
  return {};
}

// Makes the weight's fp8 copies once, outside of what is timed, as gradient accumulation does.
Status GpuBackend::add_weights_in_fp8(Timed& timed) {
  const runtime::LinearDesc& desc = timed.linear->desc();
  const runtime::LinearKernels kernels = F8_TRY(runtime::linear_kernels(desc));
  const runtime::Copies& copies = kernels.of(runtime::Tensor::kWeight);
  if (!copies.q && !copies.qt) return {};
  const auto quantizer =
      F8_TRY(runtime::Quantizer::plan(context_, {.operand = runtime::Tensor::kWeight,
                                                 .rows = desc.shape.n,
                                                 .cols = desc.shape.k,
                                                 .recipe = recipe_}));
  F8_TRY(reserve_workspace(quantizer->workspace_bytes()));
  const size_t bytes = suballocation_bytes(quantizer->tensor_bytes());
  buffers_.push_back(
      F8_TRY(DeviceBuffer::allocate(driver_, bytes * timed.forward.size(), "weights in fp8")));
  std::vector<runtime::QuantizeCall> calls;
  timed.weights.resize(timed.forward.size());
  for (size_t i = 0; i < timed.forward.size(); ++i) {
    runtime::ForwardCall& forward = timed.forward[i];
    void* tensor = mutable_pointer(buffers_.back().address() + i * bytes);
    calls.push_back({.rows = desc.shape.n,
                     .x = {forward.w.data},
                     .tensor = {tensor},
                     .scales = forward.scales});
    timed.weights[i] = F8_TRY(quantizer->view(tensor, nullptr, desc.shape.n));
    forward.w.fp8 = timed.backward[i].w.fp8 = &timed.weights[i];
  }
  for (runtime::QuantizeCall& call : calls) {
    call.workspace.data = mutable_pointer(workspaces_.back().address());
  }
  timed.prime = [this, before = std::move(timed.prime), calls = std::move(calls),
                 quantizer]() -> Status {
    if (before) F8_TRY(before());
    for (const runtime::QuantizeCall& call : calls) {
      F8_TRY(quantizer->run(call, stream_));
    }
    return {};
  };
  return {};
}

GpuBackend::ExpertsCalls GpuBackend::experts_calls(std::span<const LinearSet> sets,
                                                   const float8_scale_slots& slots) const {
  ExpertsCalls calls;
  for (const LinearSet& set : sets) {
    calls.forward.push_back({.m = problem_.shape().m,
                             .x = {set.x.data},
                             .w = {set.w.data},
                             .y = {mutable_pointer(set.y)},
                             .layout = routing_->call.layout,
                             .saved = {mutable_pointer(set.saved)},
                             .workspace = {mutable_pointer(set.workspace)},
                             .scales = slots});
    calls.backward.push_back({.m = problem_.shape().m,
                              .dy = {set.dy.data},
                              .dx = {mutable_pointer(set.dx)},
                              .dw = {mutable_pointer(set.dw)},
                              .layout = routing_->call.layout,
                              .saved = {mutable_pointer(set.saved)},
                              .workspace = {mutable_pointer(set.workspace)},
                              .w = {set.w.data},
                              .scales = slots,
                              .x = {set.x.data}});
  }
  return calls;
}

// An expert linear, whole or one of its GEMMs, is timed with the casts that a routing's layout needs.
// A GEMM alone reads the copies that a step has left.
Result<Built> GpuBackend::add_experts(const Candidate& candidate) {
  runtime::ExpertsDesc desc = F8_TRY(experts_desc(problem_));
  const bool whole = !is_gemm(problem_.op);
  if (!whole) {
    desc.configs[static_cast<size_t>(to_gemm(problem_.op))] =
        F8_TRY(parse_gemm_config(candidate.config));
  } else if (!candidate.config.empty()) {
    const LinearChoices choices = F8_TRY(parse_choices(candidate.config));
    for (size_t i = 0; i < choices.size(); ++i) desc.configs[i] = choices[i].config;
  }
  const auto experts = F8_TRY(runtime::Experts::plan(context_, desc));
  float8_scale_slots slots{};
  std::optional<DelayedState> delayed;
  if (!experts->scale_slots().empty()) {
    delayed = F8_TRY(add_delayed_state(experts->scale_slots()));
    slots = delayed->scales->slots(delayed->bytes, 0);
  }
  const auto [forward, backward] = experts_calls(linear_sets_, slots);
  Timed timed;
  timed.candidate = candidate;
  timed.prime = [this, experts, forward = forward, backward = backward, delayed]() -> Status {
    if (delayed) {
      F8_TRY(delayed->scales->init(delayed->bytes, stream_));
      const float8_step first{.first_step = 1};
      runtime::ExpertsForwardCall first_forward = forward.front();
      runtime::ExpertsBackwardCall first_backward = backward.front();
      first_forward.step = first_backward.step = &first;
      F8_TRY(experts->forward(first_forward, stream_));
      F8_TRY(experts->backward(first_backward, stream_));
      F8_TRY(delayed->scales->update(delayed->bytes, stream_));
    }
    // The copies of dy take the place of those that forward alone reads.
    for (size_t i = 0; i < forward.size(); ++i) {
      F8_TRY(experts->forward(forward[i], stream_));
      if (problem_.op == Op::kGroupedOutput) continue;
      F8_TRY(experts->backward(backward[i], stream_));
    }
    return {};
  };
  timed.steps = [this, experts, forward = forward, backward = backward](size_t set) {
    std::vector<runtime::Step> steps = {{"layout", [this](runtime::Stream stream) {
                                           return routing_->plan.run(routing_->call, stream);
                                         }}};
    std::ranges::move(steps_of(*experts, forward[set], backward[set]), std::back_inserter(steps));
    return steps;
  };
  const std::string own = whole ? "" : f8::format("gemm {}", to_string(to_gemm(problem_.op)));
  for (size_t i = 0; i < forward.size(); ++i) {
    std::vector<runtime::Step> steps = timed.steps(i);
    if (!whole) std::erase_if(steps, [&](const runtime::Step& step) { return step.name != own; });
    timed.launch.emplace_back([steps = std::move(steps)](runtime::Stream stream) -> Status {
      for (const runtime::Step& step : steps) F8_TRY(step.launch(stream));
      return {};
    });
  }
  Built built{.id = static_cast<int>(timed_.size())};
  if (!whole) {
    codegen::GemmSpec spec = F8_TRY(gemm_spec(problem_));
    spec.config = experts->config(to_gemm(problem_.op));
    const runtime::Kernel* kernel = F8_TRY(context_->kernel(spec));
    built.registers = kernel->registers;
    built.smem_bytes = kernel->smem_bytes;
    built.spill_bytes = kernel->spill_bytes;
  }
  timed_.push_back(std::move(timed));
  return built;
}

Result<std::vector<GpuBackend::Part>> GpuBackend::add_steps(int linear) {
  const Timed& whole = timed_[static_cast<size_t>(linear)];
  if (!whole.steps) {
    return fail(ErrorCode::kInvalidArgument, "only a float8 linear and attention have steps");
  }
  std::vector<Part> parts;
  std::vector<Timed> timed;
  for (size_t set = 0; set < whole.launch.size(); ++set) {
    const std::vector<runtime::Step> steps = whole.steps(set);
    timed.resize(steps.size());
    parts.resize(steps.size());
    for (size_t i = 0; i < steps.size(); ++i) {
      timed[i].launch.push_back(steps[i].launch);
      parts[i] = {.name = steps[i].name, .bytes = steps[i].bytes, .products = steps[i].products};
    }
  }
  for (size_t i = 0; i < timed.size(); ++i) {
    parts[i].id = static_cast<int>(timed_.size());
    timed_.push_back(std::move(timed[i]));
  }
  return parts;
}

}  // namespace f8::tuner
