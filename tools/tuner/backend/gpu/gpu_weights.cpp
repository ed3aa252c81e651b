// Lays out weights as operand sets, and adds and checks the candidates that cast them.
#include <algorithm>

#include "tools/tuner/backend/gpu/gpu_backend.hpp"

namespace f8::tuner {
namespace {

constexpr size_t kSampledBytes = 64 << 10;  // at either end of a weight's copies
constexpr uint8_t kUnwritten = 0xff;        // a NaN in both formats

std::string name_of(size_t weight, const runtime::Quantizer& quantizer) {
  const runtime::QuantizerDesc& desc = quantizer.desc();
  return f8::format("weight {} ({} x {})", weight, desc.rows, desc.cols);
}

}  // namespace

Status GpuBackend::open_weights(const Recipe& recipe, std::span<const runtime::MatrixSize> weights,
                                L2State l2) {
  return open_casts(recipe, l2, [&] { return lay_out_weights(recipe, weights); });
}

Status GpuBackend::open_casts(const Recipe& recipe, L2State l2,
                              const std::function<Status()>& lay_out) {
  F8_TRY(driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize"));
  forget();
  problem_ = {};
  recipe_ = recipe;
  l2_ = l2;
  if (const Status laid_out = lay_out(); !laid_out) {
    weights_.reset();
    producer_.reset();
    return triage(laid_out.error());
  }
  return {};
}

Status GpuBackend::lay_out_weights(const Recipe& recipe,
                                   std::span<const runtime::MatrixSize> weights) {
  weights_ = std::make_unique<Weights>();
  size_t inputs = 0;
  size_t copies = 0;
  size_t workspace_bytes = 0;
  for (const auto& [rows, cols] : weights) {
    auto quantizer = runtime::Quantizer::plan(
        context_,
        {.operand = runtime::Tensor::kWeight, .rows = rows, .cols = cols, .recipe = recipe});
    if (!quantizer && quantizer.error().code == ErrorCode::kUnsupported) {
      return fail(ErrorCode::kUnsupported, "the recipe {} casts no weight; name another --recipe",
                  recipe.name);
    }
    weights_->quantizers.push_back(F8_TRY(std::move(quantizer)));
    inputs += suballocation_bytes(static_cast<size_t>(rows * cols) * size_bytes(Dtype::kBf16));
    copies += suballocation_bytes(weights_->quantizers.back()->tensor_bytes());
    workspace_bytes = std::max(workspace_bytes, weights_->quantizers.back()->workspace_bytes());
  }
  const auto set_bytes = static_cast<double>(inputs + copies);
  sets_ = F8_TRY(fit_sets(set_bytes, set_bytes,
                          {f8::format("a list of {} weights and their copies", weights.size()),
                           "make the list shorter"}));
  const auto sets = static_cast<size_t>(sets_);
  F8_TRY(make_room((inputs + copies) * sets));
  Pool& operands = pool(nullptr);
  F8_TRY(operands.reserve(driver_, inputs * sets));
  F8_TRY(results_.reserve(driver_, copies * sets, "fp8 weights"));
  F8_TRY(reserve_workspace(workspace_bytes));
  for (size_t set = 0; set < sets; ++set) {
    std::vector<runtime::QuantizeCall>& calls = weights_->calls.emplace_back();
    for (const auto& quantizer : weights_->quantizers) {
      const auto& [rows, cols] =
          runtime::MatrixSize{quantizer->desc().rows, quantizer->desc().cols};
      calls.push_back(
          {.rows = rows,
           .x = {operands.suballocate(rows * cols).data},
           .tensor = {mutable_pointer(results_.suballocate(quantizer->tensor_bytes()))}});
    }
  }
  return settle_weight_scales();
}

// Gives delayed scaling a state in which one step has left the weights' scales.
Status GpuBackend::settle_weight_scales() {
  const auto& quantizers = weights_->quantizers;
  if (!quantizers.front()->is_delayed()) return {};
  // The slots are those of a linear with this recipe, whatever its sizes.
  const auto of_linear =
      F8_TRY(runtime::linear_kernels({.shape = {16, 16, 16}, .recipe = recipe_, .choices = {}}))
          .slots;
  std::vector<DelayedSlot> slots;
  for (size_t i = 0; i < quantizers.size(); ++i) {
    slots.insert(slots.end(), of_linear.begin(), of_linear.end());
  }
  const auto state = F8_TRY(runtime::DelayedScales::plan(context_, slots));
  buffers_.push_back(F8_TRY(DeviceBuffer::allocate(driver_, state.bytes(), "delayed scales")));
  void* bytes = mutable_pointer(buffers_.back().address());
  F8_TRY(state.init(bytes, stream_));
  void* workspace = mutable_pointer(workspaces_.back().address());
  for (std::vector<runtime::QuantizeCall>& calls : weights_->calls) {
    for (size_t i = 0; i < calls.size(); ++i) {
      calls[i].scales = state.slots(bytes, i * of_linear.size());
      runtime::QuantizeCall first = calls[i];
      const float8_step step{.first_step = 1};
      first.step = &step;
      first.workspace.data = workspace;
      F8_TRY(quantizers[i]->run(first, stream_));
    }
  }
  return state.update(bytes, stream_);
}

Result<Built> GpuBackend::add_casts(const Candidate& candidate) {
  const Built built{.id = static_cast<int>(timed_.size())};
  Timed timed;
  timed.candidate = candidate;
  if (candidate.impl == Impl::kCastEach) {
    void* workspace = mutable_pointer(workspaces_.back().address());
    for (const std::vector<runtime::QuantizeCall>& calls : weights_->calls) {
      timed.launch.emplace_back([&calls, &quantizers = weights_->quantizers,
                                 workspace](runtime::Stream stream) -> Status {
        for (size_t i = 0; i < calls.size(); ++i) {
          runtime::QuantizeCall call = calls[i];
          call.workspace.data = workspace;
          F8_TRY(quantizers[i]->run(call, stream));
        }
        return {};
      });
    }
  } else if (candidate.impl == Impl::kCastList) {
    const auto casts = std::make_shared<const runtime::QuantizerList>(
        F8_TRY(runtime::QuantizerList::plan(context_, weights_->quantizers)));
    F8_TRY(reserve_workspace(casts->workspace_bytes()));
    void* workspace = mutable_pointer(workspaces_.back().address());
    for (const std::vector<runtime::QuantizeCall>& calls : weights_->calls) {
      timed.launch.emplace_back([&calls, casts, workspace](runtime::Stream stream) {
        return casts->run(
            {.tensors = calls.data(), .count = calls.size(), .workspace = {workspace}}, stream);
      });
    }
  } else {
    return fail(ErrorCode::kInvalidArgument, "unknown candidate {} of a list of weights",
                impl_text(candidate));
  }
  timed_.push_back(std::move(timed));
  return built;
}

// Checks that the copies are the same bytes whichever candidate has made them.
Result<Check> GpuBackend::verify_casts(Timed& timed) {
  Check check;
  const std::vector<runtime::QuantizeCall>& calls = weights_->calls.front();
  const auto& quantizers = weights_->quantizers;
  const auto copies_of = [&](size_t i) {
    return reinterpret_cast<CUdeviceptr>(calls[i].tensor.data);
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    F8_TRY(driver_.check(
        driver_.memset_d8_async(copies_of(i), kUnwritten, quantizers[i]->tensor_bytes(), stream_),
        "cuMemsetD8Async"));
  }
  if (const Status ran = launch_once(timed, 0); !ran) return triage(ran.error());
  if (const Status done = driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
      !done) {
    return triage(done.error());
  }
  std::vector<uint8_t> seen;
  for (size_t i = 0; i < calls.size(); ++i) {
    const size_t bytes = quantizers[i]->tensor_bytes();
    const size_t some = std::min(bytes, kSampledBytes);
    const size_t begin = seen.size();
    seen.resize(begin + 2 * some);
    uint8_t* to = seen.data() + begin;
    F8_TRY(driver_.check(driver_.memcpy_dtoh(to, copies_of(i), some), "cuMemcpyDtoH"));
    F8_TRY(driver_.check(driver_.memcpy_dtoh(to + some, copies_of(i) + bytes - some, some),
                         "cuMemcpyDtoH"));
    const bool written = std::any_of(to, to + 16, [](uint8_t byte) { return byte != kUnwritten; });
    const bool alike = weights_->copies.empty() ||
                       std::equal(seen.begin() + static_cast<std::ptrdiff_t>(begin), seen.end(),
                                  weights_->copies.begin() + static_cast<std::ptrdiff_t>(begin));
    if (written && alike) continue;
    check.right = false;
    check.what =
        f8::format("{}: its fp8 copies {}", name_of(i, *quantizers[i]),
                   written ? "are not those that it has cast the other way" : "were not written");
    return check;
  }
  weights_->copies = std::move(seen);
  return check;
}

}  // namespace f8::tuner
