// Lays out a tensor that casts compute as operand sets, and adds its candidates: the cast that computes it, and, in
// place of a kernel that computes it in bf16, a copy that moves as many bytes, with the cast behind it. So what is
// apart is the best that it can be, whatever a compiler makes of it.
#include <algorithm>

#include "tools/tuner/backend/gpu/gpu_backend.hpp"

namespace f8::tuner {

Status GpuBackend::open_producer(const Recipe& recipe, const Producer& producer,
                                 runtime::MatrixSize size, L2State l2) {
  return open_casts(recipe, l2, [&] { return lay_out_producer(producer, size); });
}

Status GpuBackend::lay_out_producer(const Producer& producer, runtime::MatrixSize size) {
  OpenProducer& open = producer_.emplace();
  open.what = producer;
  open.size = size;
  runtime::QuantizerDesc desc = producer.desc(recipe_, size);
  open.fused = F8_TRY(runtime::Quantizer::plan(context_, desc));
  desc.source = runtime::CastSource::kPlain;
  desc.activation = {};
  open.plain = F8_TRY(runtime::Quantizer::plan(context_, desc));

  const int64_t elements = size.rows * size.cols;
  const size_t inputs =
      producer.operands() * suballocation_bytes(bytes_of(elements, Dtype::kBf16)) +
      2 * suballocation_bytes(bytes_of(size.cols, Dtype::kBf16));
  const size_t copied = suballocation_bytes(bytes_of(open.copied_elements(), Dtype::kBf16));
  const size_t tensor = suballocation_bytes(open.fused->tensor_bytes());
  const size_t outputs = copied + producer.results() * tensor;
  sets_ = F8_TRY(fit_sets(static_cast<double>(inputs + producer.results() * tensor),
                          static_cast<double>(inputs + outputs),
                          {f8::format("{} of {} x {}", to_string(producer), size.rows, size.cols),
                           "give a smaller --size"}));
  const auto sets = static_cast<size_t>(sets_);
  F8_TRY(make_room((inputs + outputs) * sets));
  Pool& operands = pool(nullptr);
  F8_TRY(operands.reserve(driver_, inputs * sets));
  F8_TRY(results_.reserve(driver_, outputs * sets, "fp8 tensors"));
  F8_TRY(reserve_workspace(std::max(open.fused->workspace_bytes(), open.plain->workspace_bytes())));
  open.norm_weight = operands.suballocate(size.cols);
  open.norm_bias = operands.suballocate(size.cols);
  for (size_t i = 0; i < sets; ++i) {
    OpenProducer::Set& set = open.sets.emplace_back();
    for (size_t j = 0; j < producer.operands(); ++j) {
      set.operands.push_back(operands.suballocate(elements));
    }
    set.copied = results_.suballocate(copied);
    for (size_t j = 0; j < producer.results(); ++j) {
      set.results.push_back(mutable_pointer(results_.suballocate(tensor)));
    }
  }
  return is_norm(producer.source) ? give_statistics(size) : Status{};
}

Status GpuBackend::give_statistics(runtime::MatrixSize size) {
  const auto rows = static_cast<size_t>(size.rows);
  std::vector<float> values(rows, static_cast<float>(kRstd));
  values.resize(2 * rows, static_cast<float>(kMean));
  const size_t bytes = values.size() * sizeof(float);
  DeviceBuffer& statistics = producer_->statistics;
  statistics = F8_TRY(DeviceBuffer::allocate(driver_, bytes, "a norm's statistics"));
  return driver_.check(driver_.memcpy_htod(statistics.address(), values.data(), bytes),
                       "cuMemcpyHtoD");
}

// The call that reads the operands, without its workspace and scales.
runtime::QuantizeCall GpuBackend::fused_call(const OpenProducer::Set& set) const {
  const OpenProducer& open = *producer_;
  runtime::QuantizeCall call{
      .rows = open.size.rows, .x = {set.operands.front().data}, .tensor = {set.results.front()}};
  const auto operand = [&](size_t i) { return float8_matrix{set.operands[i].data}; };
  switch (open.what.source) {
    case codegen::Computed::kGlu:
      call.up = operand(1);
      break;
    case codegen::Computed::kGluBackward:
      call.up = operand(1);
      call.grad = operand(2);
      call.up_tensor = {set.results[1]};
      break;
    case codegen::Computed::kActivationBackward:
      call.grad = operand(1);
      break;
    case codegen::Computed::kLayerNorm:
      call.norm_bias = open.norm_bias.data;
      call.mean = static_cast<const float*>(pointer(open.statistics.address())) + open.size.rows;
      [[fallthrough]];
    case codegen::Computed::kRmsNorm:
      call.norm_weight = open.norm_weight.data;
      call.rstd = static_cast<const float*>(pointer(open.statistics.address()));
      break;
    default:
      break;
  }
  return call;
}

Result<Built> GpuBackend::add_producer(const Candidate& candidate) {
  const bool fused = candidate.impl == Impl::kProduce;
  if (!fused && candidate.impl != Impl::kProduceApart) {
    return fail(ErrorCode::kInvalidArgument, "unknown candidate {} of a producer",
                impl_text(candidate));
  }
  const OpenProducer& open = *producer_;
  const auto slots =
      F8_TRY(runtime::linear_kernels({.shape = {16, 16, 16}, .recipe = recipe_, .choices = {}}))
          .slots;
  const size_t results = open.what.results();
  const MlpStates states =
      F8_TRY(add_mlp_states(std::vector<const std::vector<DelayedSlot>*>(results, &slots)));
  const float8_buffer workspace{mutable_pointer(workspaces_.back().address()),
                                workspaces_.back().bytes()};
  Timed timed;
  timed.candidate = candidate;
  for (const OpenProducer::Set& set : open.sets) {
    // The call that computes its tensors, or that of each tensor.
    std::vector<runtime::QuantizeCall> calls;
    if (fused) {
      calls.push_back(fused_call(set));
      if (results == 2) calls.front().up_scales = states.slots[1];
    }
    for (size_t i = 0; !fused && i < results; ++i) {
      const size_t before = i * bytes_of(open.size.rows * open.size.cols, Dtype::kBf16);
      calls.push_back({.rows = open.size.rows,
                       .x = {pointer(set.copied + before)},
                       .tensor = {set.results[i]}});
    }
    for (size_t i = 0; i < calls.size(); ++i) {
      calls[i].workspace = workspace;
      calls[i].scales = states.slots[i];
    }
    const Launch copy = copy_of(reinterpret_cast<CUdeviceptr>(set.operands.front().data),
                                set.copied, open.copied_elements());
    const auto run = [fused, copy, quantizer = fused ? open.fused : open.plain,
                      calls = std::move(calls)](const float8_step* step,
                                                runtime::Stream stream) -> Status {
      if (!fused) F8_TRY(copy(stream));
      for (runtime::QuantizeCall call : calls) {
        call.step = step;
        F8_TRY(quantizer->run(call, stream));
      }
      return {};
    };
    if (timed.launch.empty()) {
      timed.prime = first_step_of(
          states, [this, run](const float8_step& step) { return run(&step, stream_); });
    }
    timed.launch.emplace_back([run](runtime::Stream stream) { return run(nullptr, stream); });
  }
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

}  // namespace f8::tuner
