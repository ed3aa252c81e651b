#include "python/shim/optimizer.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "python/shim/base/errors.hpp"
#include "python/shim/casts/cast.hpp"
#include "python/shim/plans/plans.hpp"

namespace float8_torch {
namespace {

size_t bytes_of(float8_dtype dtype) {
  return dtype == FLOAT8_F32 ? sizeof(float) : sizeof(uint16_t);
}

// An element in fp32 on the device, or null.
const float* element_of(const std::optional<Tensor>& tensor, const Device& device,
                        const char* name) {
  if (!tensor) return nullptr;
  check_dense(*tensor, sizeof(float), device, name);
  if (tensor->numel() == 1 && dtype_of(*tensor) == aoti_torch_dtype_float32()) {
    return static_cast<const float*>(tensor->mutable_data_ptr());
  }
  throw std::invalid_argument(std::string("float8: ") + name +
                              " is one element in float32 on the weights' device");
}

// A tensor of the update: of the weight's type and size.
void* memory_like(const Tensor& tensor, const Tensor& param, const Device& device,
                  const char* name) {
  check_dense(tensor, bytes_of(element_type(dtype_of(param), "a weight")), device, name);
  if (tensor.numel() == param.numel() && dtype_of(tensor) == dtype_of(param)) {
    return tensor.mutable_data_ptr();
  }
  throw std::invalid_argument(std::string("float8: ") + name + " has " +
                              std::to_string(tensor.numel()) + " elements, its weight " +
                              std::to_string(param.numel()) +
                              "; both have the same shape and type");
}

uint32_t* maxima_of(const Tensor& words, int64_t count, const Device& device) {
  if (words.numel() == 0) return nullptr;
  check_dense(words, sizeof(uint32_t), device, "maxima of a weight");
  if (words.numel() == count) return static_cast<uint32_t*>(words.mutable_data_ptr());
  throw std::invalid_argument("float8: maxima of a weight are " + std::to_string(words.numel()) +
                              " words; it has " + std::to_string(count));
}

// The maxima of columns come first, then the weight's.
void set_maxima(float8_adamw_tensor& to, const Tensor& amax, const Tensor& row_amax,
                const Device& device) {
  const bool columns = amax.numel() >= to.cols;
  const bool tensor = amax.numel() == (columns ? to.cols + 1 : 1);
  uint32_t* const words = maxima_of(amax, (columns ? to.cols : 0) + (tensor ? 1 : 0), device);
  if (columns) to.col_amax = words;
  if (tensor) to.amax = words + (columns ? to.cols : 0);
  to.row_amax = maxima_of(row_amax, to.rows, device);
}

// One matrix for each expert, whose maxima and states lie one expert after the other. Maxima are those of the
// experts, or those of their columns.
void add_experts(std::vector<float8_adamw_tensor>& tensors, const float8_adamw_tensor& first,
                 int64_t experts, const Tensor& amax, const Tensor& row_amax,
                 const Device& device) {
  const int64_t bytes = first.rows * first.cols *
                        static_cast<int64_t>(bytes_of(static_cast<float8_dtype>(first.dtype)));
  const bool columns = amax.numel() > experts;
  uint32_t* const words = maxima_of(amax, columns ? experts * first.cols : experts, device);
  uint32_t* const of_rows = maxima_of(row_amax, experts * first.rows, device);
  for (int64_t e = 0; e < experts; ++e) {
    float8_adamw_tensor to = first;
    for (void** const field :
         {&to.param, &to.grad, &to.exp_avg, &to.exp_avg_sq, &to.max_exp_avg_sq}) {
      if (*field != nullptr) *field = static_cast<char*>(*field) + e * bytes;
    }
    if (words != nullptr && columns) to.col_amax = words + e * first.cols;
    if (words != nullptr && !columns) to.amax = words + e;
    if (of_rows != nullptr) to.row_amax = of_rows + e * first.rows;
    if (first.fingerprint != nullptr) {
      to.fingerprint = static_cast<char*>(first.fingerprint) + e * int64_t{kWeightStateBytes};
      to.seed = fingerprint_seed_at(first.seed, static_cast<uint64_t>(e * bytes));
    }
    tensors.push_back(to);
  }
}

// Casts the weight into these copies, in the launch that updates it.
void set_cast(float8_adamw_tensor& to, float8_quantize_args& args, const Cast& cast,
              const Tensor& q, const Tensor& qt) {
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  check_copy(q, quantizer.q_bytes, cast.place.device, "a copy in fp8");
  check_copy(qt, quantizer.qt_bytes, cast.place.device, "a copy in fp8");
  const bool has_q = quantizer.q_bytes > 0;
  args.tensor.data = (has_q ? q : qt).mutable_data_ptr();
  if (has_q && quantizer.qt_bytes > 0) args.transposed.data = qt.mutable_data_ptr();
  to.quantizer = quantizer.quantizer;
  to.cast = &args;
}

}  // namespace

void adamw(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
           std::vector<Tensor> exp_avg_sqs, std::vector<Tensor> max_exp_avg_sqs,
           std::vector<Tensor> steps, std::vector<Tensor> amax, std::vector<Tensor> row_amax,
           std::vector<Tensor> states, std::vector<Tensor> copies, std::vector<int64_t> config,
           std::vector<int64_t> dtypes, std::vector<int64_t> rows_max, std::vector<Tensor> scales,
           int64_t layout, std::vector<double> options, bool maximize,
           const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_scale,
           const std::optional<Tensor>& found_inf) {
  const size_t count = params.size();
  for (const size_t size : {grads.size(), exp_avgs.size(), exp_avg_sqs.size(), steps.size(),
                            amax.size(), row_amax.size(), states.size(), config.size(),
                            dtypes.size(), rows_max.size(), copies.size() / 2}) {
    if (size == count && count > 0) continue;
    throw std::invalid_argument("float8: adamw takes as many of each tensor as weights, and one");
  }
  if (!scales.empty() && scales.size() != count) {
    throw std::invalid_argument(
        "float8: adamw takes parts of a scale state of all weights or none");
  }
  if (options.size() != 5 || (!max_exp_avg_sqs.empty() && max_exp_avg_sqs.size() != count)) {
    throw std::invalid_argument(
        "float8: adamw takes lr, beta1, beta2, eps and weight_decay, and max_exp_avg_sqs of all "
        "weights or none");
  }
  const Place place = place_of(params.front(), Config(config.front()));
  std::vector<float8_adamw_tensor> tensors;
  std::vector<float8_quantize_args> casts(count);
  std::vector<float8_step> in_step(count);
  for (size_t i = 0; i < count; ++i) {
    float8_adamw_tensor to;
    const Tensor& param = params[i];
    const int64_t dims = param.dim();
    if (dims != 2 && dims != 3) {
      throw std::invalid_argument("float8: adamw updates matrices, or one for each expert");
    }
    const int64_t experts = dims == 3 ? param.size(0) : 1;
    to.rows = param.size(dims - 2);
    to.cols = param.size(dims - 1);
    to.dtype = element_type(dtype_of(param), "a weight");
    to.cast_dtype = static_cast<int32_t>(dtypes[i]);
    to.param = memory_like(param, param, place.device, "a weight");
    to.grad = memory_like(grads[i], param, place.device, "a gradient");
    to.exp_avg = memory_like(exp_avgs[i], param, place.device, "exp_avg");
    to.exp_avg_sq = memory_like(exp_avg_sqs[i], param, place.device, "exp_avg_sq");
    if (!max_exp_avg_sqs.empty()) {
      to.max_exp_avg_sq = memory_like(max_exp_avg_sqs[i], param, place.device, "max_exp_avg_sq");
    }
    to.step = element_of(steps[i], place.device, "a step");
    if (states[i].numel() > 0) {
      check_dense(states[i], 1, place.device, "the state of a weight's copies");
      if (states[i].numel() != experts * static_cast<int64_t>(kWeightStateBytes)) {
        throw std::invalid_argument("float8: the state of a weight's copies has " +
                                    std::to_string(kWeightStateBytes) +
                                    " bytes, or as many for each expert");
      }
      to.fingerprint = states[i].mutable_data_ptr();
      to.seed = fingerprint_seed(to.cast_dtype, static_cast<float8_dtype>(to.dtype));
    }
    if (dims == 3) {
      add_experts(tensors, to, experts, amax[i], row_amax[i], place.device);
      continue;
    }
    set_maxima(to, amax[i], row_amax[i], place.device);
    if (copies[2 * i].numel() + copies[2 * i + 1].numel() > 0) {
      const Cast cast(param, config[i], FLOAT8_WEIGHT, FLOAT8_BOTH_COPIES, {.most = rows_max[i]},
                      dtypes[i]);
      if (!scales.empty()) {
        cast.set_scales(casts[i].scales, in_step[i], scales[i], layout, false);
        casts[i].step = &in_step[i];
      }
      set_cast(to, casts[i], cast, copies[2 * i], copies[2 * i + 1]);
    }
    tensors.push_back(to);
  }
  float8_adamw_args args;
  args.tensors = tensors.data();
  args.count = tensors.size();
  args.lr = options[0];
  args.beta1 = options[1];
  args.beta2 = options[2];
  args.eps = options[3];
  args.weight_decay = options[4];
  args.maximize = maximize ? 1 : 0;
  args.lr_tensor = element_of(lr, place.device, "lr");
  args.grad_scale = element_of(grad_scale, place.device, "grad_scale");
  args.found_inf = element_of(found_inf, place.device, "found_inf");
  check(float8_adamw(context_of(place.key()), &args, place.stream));
}

}  // namespace float8_torch
