// The text is made of what plans and calls are made of: a launch that is listed is one that runs.
#include "runtime/model/info.hpp"

#include <span>

#include "runtime/linear/tensors/fp8_tensor.hpp"
#include "runtime/model/first_use.hpp"
#include "tuning_db/estimate/builtin_tables.hpp"

namespace f8::runtime {
namespace {

std::string_view text_of(Granularity granularity) {
  switch (granularity) {
    case Granularity::kTensor:
      return "one scale";
    case Granularity::kAxis:
      return "a scale a row";
    case Granularity::kBlock1x128:
      return "a scale per 1x128";
    case Granularity::kBlock128x128:
      return "a scale per 128x128";
  }
  return "";
}

std::string text_of(const CastSetting& setting, Dtype tensor_dtype) {
  if (setting.scaling == Scaling::kDisabled) return std::string(to_string(tensor_dtype));
  return f8::format("{} ({}{}{})", to_string(setting.dtype), text_of(setting.granularity),
                    setting.scaling == Scaling::kDelayed ? ", delayed" : "",
                    setting.pow2 ? ", power of two" : "");
}

std::string text_of(const std::vector<Step>& steps) {
  std::string text;
  for (const Step& step : steps) text += (text.empty() ? "" : "; ") + step.name;
  return text.empty() ? "nothing" : text;
}

// Addresses for calls that are listed and never run: far apart, and aligned.
class FakeAddresses {
 public:
  void* next() { return reinterpret_cast<void*>(++count_ << 48); }

 private:
  uintptr_t count_ = 0;
};

// A view of the linear's weight in fp8; without copies where the weight is never cast.
float8_tensor weight_view(const LinearDesc& desc, FakeAddresses& addresses) {
  const auto kernels = linear_kernels(desc);
  if (!kernels) return {};
  CallArguments call;
  constexpr Fp8Refs kRefs{Slot::kWeightQ, Slot::kWeightQInverse, Slot::kWeightQt,
                          Slot::kWeightQtInverse};
  for (const Slot slot :
       {Slot::kWeightQ, Slot::kWeightQInverse, Slot::kWeightQt, Slot::kWeightQtInverse}) {
    call.set(slot, addresses.next());
  }
  return tensor_view(kRefs, call, desc.shape.n, desc.shape.k, kernels->of(Tensor::kWeight));
}

void add_launches(const Linear& linear, std::string& text) {
  const LinearDesc& desc = linear.desc();
  FakeAddresses addresses;
  const float8_scale_slots slots{{addresses.next(), addresses.next()}};
  ForwardCall forward{.m = desc.shape.m,
                      .x = {addresses.next()},
                      .w = {addresses.next()},
                      .bias = desc.bias ? addresses.next() : nullptr,
                      .y = {addresses.next()},
                      .saved = {desc.recompute ? nullptr : addresses.next()},
                      .workspace = {addresses.next()},
                      .scales = slots};
  BackwardCall backward{.m = desc.shape.m,
                        .dy = {addresses.next()},
                        .x = forward.x,
                        .w = forward.w,
                        .dx = {desc.needs_grad_input ? addresses.next() : nullptr},
                        .dw = {desc.needs_grad_weight ? addresses.next() : nullptr},
                        .db = {desc.bias_grad ? addresses.next() : nullptr},
                        .saved = forward.saved,
                        .workspace = forward.workspace,
                        .scales = slots};
  const auto add = [&](const char* name, const std::vector<Step>& steps) {
    text += f8::format("\n  {:<20} {}", name, text_of(steps));
  };
  add("forward", linear.forward_steps(forward));
  add("backward", linear.backward_steps(backward));
  const float8_tensor weight = weight_view(desc, addresses);
  if (weight.q == nullptr && weight.qt == nullptr) return;
  forward.w.fp8 = backward.w.fp8 = &weight;
  add("forward, w in fp8", linear.forward_steps(forward));
  if (desc.recompute) add("backward, w in fp8", linear.backward_steps(backward));
}

std::string describe(const TuningTable& table, const DeviceInfo& device) {
  std::string origin = "loaded";
  if (tuning_db::is_builtin(table)) {
    origin = device.emulated                      ? "built-in"
             : table.device_name() == device.name ? "built-in, of this device"
                                                  : "built-in, of the nearest class: none is of "
                                                    "this device";
  }
  return f8::format("\ntuning table: {} kernels and {} linears measured on {}, hash {} ({})",
                    table.choices().size(), table.speedups().size(),
                    table.devices.empty() ? "no device" : table.device_name(), table.hash(),
                    origin);
}

}  // namespace

std::string describe(const Context& context) {
  const DeviceInfo& device = context.device();
  const ContextOptions& options = context.options();
  const auto table = context.table();
  std::string text = f8::format("device {}: {}, compute capability {}.{}, {} SMs", device.ordinal,
                                device.name, device.cc / 10, device.cc % 10, device.sm_count);
  text += f8::format("\nlaunches: {}, {}",
                     options.programmatic_launch ? "each may start while the one before it ends"
                                                 : "one after the other",
                     options.cooperative_launch ? "small tensors are cast in one"
                                                : "amax and cast are always two");
  text += table == nullptr ? "\ntuning table: none; the cost model chooses the kernels"
                           : describe(*table, device);
  return text + describe_first_use(context);
}

std::string describe(const Linear& linear) {
  const LinearDesc& desc = linear.desc();
  std::string text = f8::format(
      "linear m up to {}, n {}, k {}: recipe {}, tensors {}, dw {}{}{}{}{}", desc.shape.m,
      desc.shape.n, desc.shape.k, desc.recipe.name, to_string(desc.tensor_dtype),
      desc.needs_grad_weight ? to_string(desc.grad_weight_dtype) : "none",
      desc.bias ? ", with bias" : "", desc.accumulate_grad_weight ? ", may add" : "",
      desc.needs_grad_input ? "" : ", no dx", desc.recompute ? ", recompute" : "");
  if (desc.bias_grad) text += f8::format(", db {}", to_string(desc.bias_grad_dtype));
  if (desc.non_finite == NonFinite::kSaturate) text += ", holds scales that are not finite";
  if (desc.count) text += ", counts";
  for (const Gemm gemm : kGemms) {
    if (!desc.needs(gemm)) continue;
    const GemmSetting& setting = desc.recipe.at(gemm);
    const GemmChoice& choice = linear.choice(gemm);
    text += f8::format("\n  {:<12} {} by {}{}\n               {} {}: {}", to_string(gemm),
                       text_of(setting.a, desc.tensor_dtype), text_of(setting.b, desc.tensor_dtype),
                       !setting.is_fp8() ? ""
                       : setting.fast    ? ", fast sums"
                                         : ", precise sums",
                       to_string(choice.provider), config_text(choice),
                       choice.why.empty() ? "given by the caller" : choice.why);
  }
  add_launches(linear, text);
  return text + f8::format(
                    "\n  bytes: workspace {}, saved {} ({} with the weight in fp8); delayed "
                    "scales {}",
                    linear.workspace_bytes(), linear.saved_bytes(), linear.saved_bytes(true),
                    linear.scale_slots().size());
}

}  // namespace f8::runtime
