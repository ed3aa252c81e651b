// Attention: its forward, its backward, and the values that a forward in fp8 multiplied.
#include "python/shim/attention.hpp"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/heads.hpp"
#include "python/shim/plans/plans.hpp"
#include "python/shim/plans/workspace.hpp"

namespace float8_torch {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  refuse_heads("attention", what);
}

Heads as_bf16(const Tensor& tensor, const Place& place, const char* name) {
  if (dtype_of(tensor) != aoti_torch_dtype_bfloat16()) {
    refuse(std::string(name) + " is not in bfloat16");
  }
  return as_heads(tensor, place, "attention", name);
}

// A dense tensor [batch][tokens][heads][head_dim].
Heads empty_heads(int64_t batch, int64_t tokens, int64_t heads, int64_t dim, const Place& place) {
  const std::array<int64_t, 4> sizes = {batch, tokens, heads, dim};
  const Tensor keep = empty(sizes, aoti_torch_dtype_bfloat16(), place.device);
  return {keep, {keep.mutable_data_ptr(), tokens * heads * dim, dim, heads * dim}};
}

const float8_attention* plan_of(int64_t heads_q, int64_t heads_kv, int64_t head_dim, double scale,
                                bool causal, int64_t window, bool packed, int64_t recipe,
                                const Place& place) {
  return attention_plan_for({.heads_q = heads_q,
                             .heads_kv = heads_kv,
                             .head_dim = head_dim,
                             .scale = static_cast<float>(scale),
                             .device = place.key(),
                             .causal = causal,
                             .window = window,
                             .packed = packed,
                             .recipe = static_cast<int32_t>(recipe)},
                            place)
      .attention;
}

// The first bad offset of packed sequences on each device since it was asked for the last time, which also replays
// of a CUDA graph keep.
struct SequenceErrors {
  std::mutex mutex;
  std::map<int32_t, Tensor> of_devices;  // by the key of a place
};

SequenceErrors& all_sequence_errors() {
  static auto* const all = new SequenceErrors;
  return *all;
}

// Waits for what the current stream does to the words before it.
float8_sequence_error read_error(const Tensor& words) {
  const Tensor host = torch::stable::to(
      words, torch::stable::Device(torch::headeronly::DeviceType::CPU, -1), false, true);
  float8_sequence_error error;
  std::memcpy(&error, host.mutable_data_ptr(), sizeof error);
  return error;
}

// The words of a device. They are made by its first call, which made a plan too, so that it is not captured.
float8_sequence_error* kept_sequence_error(const Place& place) {
  SequenceErrors& all = all_sequence_errors();
  const std::lock_guard lock(all.mutex);
  auto at = all.of_devices.find(place.key());
  if (at == all.of_devices.end()) {
    Tensor words = allocate_kept(place, sizeof(float8_sequence_error));
    torch::stable::zero_(words);
    read_error(words);  // other streams may use it at once, so the host waits, this one time
    at = all.of_devices.emplace(place.key(), words).first;
  }
  return static_cast<float8_sequence_error*>(at->second.mutable_data_ptr());
}

// The offsets of a pack, or null: [sequences + 1] in int32.
const int32_t* offsets_of(const std::optional<Tensor>& given, const Place& place,
                          const char* name) {
  if (!given) return nullptr;
  if (given->dim() != 1 || given->size(0) < 2 || dtype_of(*given) != aoti_torch_dtype_int32()) {
    refuse(std::string(name) + " is not [sequences + 1] in int32");
  }
  check_dense(*given, sizeof(int32_t), place.device, name);
  return static_cast<const int32_t*>(given->mutable_data_ptr());
}

}  // namespace

std::vector<int64_t> sequence_errors() {
  SequenceErrors& all = all_sequence_errors();
  const std::lock_guard lock(all.mutex);
  std::vector<int64_t> found;
  for (auto& [device, words] : all.of_devices) {
    const float8_sequence_error error = read_error(words);
    if (error.code == FLOAT8_NO_SEQUENCE_ERROR) continue;
    found.insert(found.end(), {device, error.code, error.index});
    torch::stable::zero_(words);
    read_error(words);
  }
  return found;
}

int64_t cudnn_version() {
  int32_t version = 0;
  return float8_cudnn_version(&version) == FLOAT8_OK ? version : 0;
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k,
                                                     const Tensor& v, double scale, bool causal,
                                                     int64_t window, int64_t config,
                                                     const std::optional<Tensor>& cu_seqlens_q,
                                                     const std::optional<Tensor>& cu_seqlens_k,
                                                     int64_t max_seqlen_q, int64_t max_seqlen_k,
                                                     int64_t recipe) {
  const Place place = place_of(q, Config(config));
  const Heads operands[] = {as_bf16(q, place, "query"), as_bf16(k, place, "key"),
                            as_bf16(v, place, "value")};
  if (k.size(0) != q.size(0) || k.size(3) != q.size(3) || v.size(0) != k.size(0) ||
      v.size(1) != k.size(1) || v.size(2) != k.size(2) || v.size(3) != k.size(3)) {
    refuse("query, key and value are of unlike sizes");
  }
  const bool packed = cu_seqlens_q.has_value();
  if (packed != cu_seqlens_k.has_value() ||
      (packed && (q.size(0) != 1 || cu_seqlens_q->numel() != cu_seqlens_k->numel()))) {
    refuse("packed sequences are a batch of 1, with as many offsets of keys as of queries");
  }
  const float8_attention* const plan =
      plan_of(q.size(1), k.size(1), q.size(3), scale, causal, window, packed, recipe, place);
  float8_attention_forward_args args;
  args.sizes = {packed ? cu_seqlens_q->numel() - 1 : q.size(0), q.size(2), k.size(2)};
  args.cu_seqlens_q = offsets_of(cu_seqlens_q, place, "cu_seqlens_q");
  args.cu_seqlens_kv = offsets_of(cu_seqlens_k, place, "cu_seqlens_k");
  args.sizes.longest_q = max_seqlen_q;
  args.sizes.longest_kv = max_seqlen_k;
  if (packed) args.sequence_error = kept_sequence_error(place);
  const size_t saved_bytes = float8_attention_saved_bytes(plan, &args.sizes);
  const size_t workspace_bytes = float8_attention_workspace_bytes(plan, &args.sizes);
  const Heads o = empty_heads(q.size(0), q.size(2), q.size(1), q.size(3), place);
  const std::array<int64_t, 3> rows = {q.size(0), q.size(1), q.size(2)};
  Tensor lse = empty(rows, aoti_torch_dtype_float32(), place.device);
  Tensor saved = empty_bytes(static_cast<int64_t>(saved_bytes), place.device);
  const Workspace workspace(place, workspace_bytes, Counts::kNone);
  args.q = operands[0].heads;
  args.k = operands[1].heads;
  args.v = operands[2].heads;
  args.o = o.heads.data;
  args.lse = static_cast<float*>(lse.mutable_data_ptr());
  args.saved = {saved.mutable_data_ptr(), saved_bytes};
  args.workspace = {workspace.data(), workspace_bytes};
  check(float8_attention_forward(plan, &args, place.stream));
  return {o.keep, lse, saved};
}

std::tuple<Tensor, Tensor, Tensor> attention_dequantize(const Tensor& saved, const Tensor& o,
                                                        int64_t heads_kv, int64_t tokens_kv,
                                                        double scale, bool causal, int64_t window,
                                                        int64_t config, int64_t sequences) {
  const Place place = place_of(o, Config(config));
  check_dense(saved, 1, place.device, "saved");
  if (o.dim() != 4) refuse("o is not what attention_forward gave");
  const int64_t batch = o.size(0), tokens_q = o.size(1), heads_q = o.size(2), dim = o.size(3);
  const float8_attention* const plan = plan_of(heads_q, heads_kv, dim, scale, causal, window,
                                               sequences > 0, FLOAT8_ATTENTION_FP8_FORWARD, place);
  const Heads q = empty_heads(batch, tokens_q, heads_q, dim, place);
  const Heads k = empty_heads(batch, tokens_kv, heads_kv, dim, place);
  const Heads v = empty_heads(batch, tokens_kv, heads_kv, dim, place);
  float8_attention_dequantize_args args;
  args.sizes = {sequences > 0 ? sequences : batch, tokens_q, tokens_kv};
  args.saved = {saved.mutable_data_ptr(), static_cast<size_t>(saved.numel())};
  args.q = q.heads;
  args.k = k.heads;
  args.v = v.heads;
  check(float8_attention_dequantize(plan, &args, place.stream));
  return {q.keep, k.keep, v.keep};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const Tensor& o, const Tensor& lse, const Tensor& saved, int64_t heads_kv,
    int64_t tokens_kv, double scale, bool causal, int64_t window, int64_t config, int64_t sequences,
    int64_t recipe, const std::optional<Tensor>& q, const std::optional<Tensor>& k,
    const std::optional<Tensor>& v, int64_t max_seqlen_q, int64_t max_seqlen_k) {
  const Place place = place_of(o, Config(config));
  check_dense(saved, 1, place.device, "saved");
  check_dense(o, sizeof(uint16_t), place.device, "o");
  check_dense(lse, sizeof(float), place.device, "lse");
  if (o.dim() != 4) refuse("o is not what attention_forward gave");
  const int64_t batch = o.size(0), tokens_q = o.size(1), heads_q = o.size(2), dim = o.size(3);
  const Heads of_dout = as_bf16(dout, place, "the gradient of the output");
  if (dout.size(0) != batch || dout.size(1) != heads_q || dout.size(2) != tokens_q ||
      dout.size(3) != dim || lse.numel() != batch * heads_q * tokens_q) {
    refuse("the gradient of the output is not [batch, heads, tokens, head_dim] of the output");
  }
  const float8_attention* const plan =
      plan_of(heads_q, heads_kv, dim, scale, causal, window, sequences > 0, recipe, place);
  const Heads dq = empty_heads(batch, tokens_q, heads_q, dim, place);
  Heads dk = empty_heads(batch, tokens_kv, heads_kv, dim, place);
  Heads dv = empty_heads(batch, tokens_kv, heads_kv, dim, place);
  float8_attention_backward_args args;
  args.sizes = {sequences > 0 ? sequences : batch, tokens_q, tokens_kv, max_seqlen_q, max_seqlen_k};
  const size_t workspace_bytes = float8_attention_backward_workspace_bytes(plan, &args.sizes);
  const Workspace workspace(place, workspace_bytes, Counts::kNone);
  args.dout = of_dout.heads;
  args.o = o.mutable_data_ptr();
  args.lse = static_cast<const float*>(lse.mutable_data_ptr());
  args.saved = {saved.mutable_data_ptr(), static_cast<size_t>(saved.numel())};
  args.workspace = {workspace.data(), workspace_bytes};
  args.dq = dq.heads;
  args.dk = dk.heads;
  args.dv = dv.heads;
  std::vector<Heads> operands;  // whose copies, where there are any, the call reads
  if (recipe == FLOAT8_ATTENTION_BF16) {
    if (!q || !k || !v) refuse("a backward in bf16 has the forward's query, key and value");
    operands = {as_bf16(*q, place, "query"), as_bf16(*k, place, "key"),
                as_bf16(*v, place, "value")};
    args.q = operands[0].heads;
    args.k = operands[1].heads;
    args.v = operands[2].heads;
  }
  if (tokens_q == 0) {  // a call without queries writes nothing
    torch::stable::zero_(dk.keep);
    torch::stable::zero_(dv.keep);
  }
  check(float8_attention_backward(plan, &args, place.stream));
  return {dq.keep, dk.keep, dv.keep};
}

}  // namespace float8_torch
