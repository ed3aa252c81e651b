// Makes a candidate's text into launches on every operand set.
#include <algorithm>
#include <utility>

#include "tools/tuner/backend/gpu_backend.hpp"

namespace f8::tuner {
Result<Suggested> GpuBackend::suggestions(const Problem& gemm, bool bf16) {
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
  const bool linear = problem_.op == Op::kLinear;
  if (weights_ != nullptr) {
    built = add_casts(candidate);
  } else if (!linear && (candidate.impl == Impl::kGenerated || candidate.impl == Impl::kCublasLt ||
                         candidate.impl == Impl::kCublasLtTensorwise ||
                         candidate.impl == Impl::kBf16CublasLt)) {
    built = add_gemm(candidate);
  } else if (linear && (candidate.impl == Impl::kFloat8 || candidate.impl == Impl::kFloat8Reused)) {
    built = add_float8(candidate);
  } else if (linear && candidate.impl == Impl::kBf16) {
    built = add_bf16(candidate);
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
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

// Gives the linear a delayed-scaling state of its own, in which one step has left the operands'
// scales. The update of the scales is one launch for all linears of a model, so it is no part of
// one linear's time.
Status GpuBackend::add_delayed_scales(Timed& timed) {
  const auto state = std::make_shared<const runtime::DelayedScales>(
      F8_TRY(runtime::DelayedScales::plan(context_, timed.linear->scale_slots())));
  buffers_.push_back(F8_TRY(DeviceBuffer::allocate(driver_, state->bytes(), "delayed scales")));
  void* bytes = mutable_pointer(buffers_.back().address());
  const runtime::ScaleSlots slots = state->slots(bytes, 0);
  for (runtime::ForwardCall& forward : timed.forward) forward.scales = slots;
  for (runtime::BackwardCall& backward : timed.backward) backward.scales = slots;
  void* workspace = mutable_pointer(workspaces_.back().address());
  timed.prime = [this, state, bytes, workspace, linear = timed.linear,
                 forward = timed.forward.front(),
                 backward = timed.backward.front()]() mutable -> Status {
    F8_TRY(state->init(bytes, stream_));
    const float8_step first{.first_step = 1};
    forward.step = backward.step = &first;
    forward.workspace.data = backward.workspace.data = workspace;
    F8_TRY(linear->forward(forward, stream_));
    F8_TRY(linear->backward(backward, stream_));
    return state->update(bytes, stream_);
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

Result<Built> GpuBackend::add_bf16(const Candidate& candidate) {
  LinearChoices choices;
  for (auto& choice : choices) choice.provider = Provider::kCublasLt;
  if (!candidate.config.empty()) choices = F8_TRY(parse_choices(candidate.config));
  std::array<std::shared_ptr<const runtime::GemmPlan>, 3> plans;
  size_t workspace_bytes = 0;
  for (const Gemm gemm : kGemms) {
    const auto i = static_cast<size_t>(gemm);
    Problem problem = problem_;
    problem.op = to_op(gemm);
    const runtime::GemmDesc gemm_of = F8_TRY(gemm_desc(problem, true));
    plans[i] = F8_TRY(runtime::GemmPlan::create(context_, gemm_of, choices[i]));
    workspace_bytes = std::max(workspace_bytes, plans[i]->workspace_bytes());
  }
  F8_TRY(reserve_workspace(workspace_bytes));
  Timed timed;
  timed.candidate = candidate;
  void* workspace = mutable_pointer(workspaces_.back().address());
  for (const LinearSet& set : linear_sets_) {
    const auto call = [&](const PoolTensor& a, const PoolTensor& b, CUdeviceptr d) {
      return runtime::GemmCall{.a = a.data,
                               .b = b.data,
                               .d = mutable_pointer(d),
                               .inv_scale_a = nullptr,
                               .inv_scale_b = nullptr,
                               .m = problem_.shape().m};
    };
    const std::array calls = {call(set.x, set.w, set.y), call(set.dy, set.w, set.dx),
                              call(set.dy, set.x, set.dw)};
    timed.launch.emplace_back([plans, calls, workspace](runtime::Stream stream) -> Status {
      for (size_t i = 0; i < plans.size(); ++i) {
        F8_TRY(plans[i]->run(calls[i], workspace, stream));
      }
      return {};
    });
  }
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

Result<std::vector<GpuBackend::Part>> GpuBackend::add_steps(int linear) {
  const Timed& whole = timed_[static_cast<size_t>(linear)];
  const auto plan = whole.linear;
  if (plan == nullptr) {
    return fail(ErrorCode::kInvalidArgument, "only a float8 linear has steps");
  }
  void* workspace = mutable_pointer(workspaces_.back().address());
  std::vector<Part> parts;
  std::vector<Timed> timed;
  for (size_t set = 0; set < whole.forward.size(); ++set) {
    runtime::ForwardCall forward = whole.forward[set];
    runtime::BackwardCall backward_call = whole.backward[set];
    forward.workspace.data = backward_call.workspace.data = workspace;
    std::vector<runtime::Step> steps = plan->forward_steps(forward);
    const std::vector<runtime::Step> backward = plan->backward_steps(backward_call);
    steps.insert(steps.end(), backward.begin(), backward.end());
    timed.resize(steps.size());
    parts.resize(steps.size());
    for (size_t i = 0; i < steps.size(); ++i) {
      timed[i].launch.push_back(steps[i].launch);
      parts[i] = {.name = steps[i].name, .bytes = steps[i].bytes};
    }
  }
  for (size_t i = 0; i < timed.size(); ++i) {
    parts[i].id = static_cast<int>(timed_.size());
    timed_.push_back(std::move(timed[i]));
  }
  return parts;
}

}  // namespace f8::tuner
