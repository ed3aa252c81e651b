// Attention's forward or backward in fp8, with its casts, as the candidate of an open problem; and both by themselves,
// for their accuracy.
#include <algorithm>

#include "tools/tuner/backend/gpu_backend.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::tuner {
namespace {

constexpr int kSampledRows = 24;
constexpr double kTolerance = 0.2;       // fp8 against exact arithmetic: the format's own error
constexpr uint8_t kNeverWritten = 0xff;  // a NaN in bf16

runtime::AttentionDesc desc_of(AttentionRecipe recipe, const AttentionShape& shape) {
  return {.heads_q = shape.heads_q,
          .heads_kv = shape.heads_kv,
          .head_dim = shape.head_dim,
          .causal = shape.causal,
          .recipe = recipe};
}

float8_attention_sizes sizes_of(const AttentionShape& shape) {
  return {.batch = shape.batch, .tokens_q = shape.tokens, .tokens_kv = shape.tokens};
}

// [b][h][s][d].
float8_heads heads(const void* data, const AttentionShape& shape, int64_t count) {
  return {.data = const_cast<void*>(data),
          .batch_stride = count * shape.tokens * shape.head_dim,
          .head_stride = shape.tokens * shape.head_dim,
          .token_stride = shape.head_dim};
}

struct AttentionBytes {
  size_t q, kv, dout, o, lse, saved, workspace, backward_workspace;

  AttentionBytes(AttentionRecipe recipe, const AttentionShape& s, const runtime::Attention& plan) {
    const int64_t rows = s.batch * s.heads_q * s.tokens;
    q = o = suballocation_bytes(bytes_of(rows * s.head_dim, Dtype::kBf16));
    dout = recipe == AttentionRecipe::kFp8 ? q : 0;
    kv = suballocation_bytes(bytes_of(s.batch * s.heads_kv * s.tokens * s.head_dim, Dtype::kBf16));
    lse = suballocation_bytes(bytes_of(rows, Dtype::kF32));
    saved = suballocation_bytes(plan.saved_bytes(sizes_of(s)));
    workspace = suballocation_bytes(plan.workspace_bytes(sizes_of(s)));
    backward_workspace = suballocation_bytes(plan.backward_workspace_bytes(sizes_of(s)));
  }
  [[nodiscard]] size_t inputs() const { return q + 2 * kv + dout; }
  // A backward writes gradients, and a dequantisation copies, that are as large as q, k and v.
  [[nodiscard]] size_t results() const {
    return o + lse + saved + workspace + q + 2 * kv + backward_workspace;
  }
};

// These take the results of a call from `take`, in the order of AttentionBytes::results().
template <class Take>
float8_attention_forward_args forward_args(const AttentionShape& shape, const void* q,
                                           const void* k, const void* v,
                                           const AttentionBytes& bytes, const Take& take) {
  float8_attention_forward_args args{};
  args.struct_size = sizeof args;
  args.sizes = sizes_of(shape);
  args.q = heads(q, shape, shape.heads_q);
  args.k = heads(k, shape, shape.heads_kv);
  args.v = heads(v, shape, shape.heads_kv);
  args.o = take(bytes.o);
  args.lse = static_cast<float*>(take(bytes.lse));
  args.saved = {take(bytes.saved), bytes.saved};
  args.workspace = {take(bytes.workspace), bytes.workspace};
  return args;
}

template <class Take>
float8_attention_dequantize_args dequantize_args(const AttentionShape& shape,
                                                 const float8_attention_forward_args& forward,
                                                 const AttentionBytes& bytes, const Take& take) {
  float8_attention_dequantize_args args{};
  args.struct_size = sizeof args;
  args.sizes = forward.sizes;
  args.saved = forward.saved;
  args.q = heads(take(bytes.q), shape, shape.heads_q);
  args.k = heads(take(bytes.kv), shape, shape.heads_kv);
  args.v = heads(take(bytes.kv), shape, shape.heads_kv);
  return args;
}

template <class Take>
float8_attention_backward_args backward_args(const AttentionShape& shape,
                                             const float8_attention_forward_args& forward,
                                             const void* dout, const AttentionBytes& bytes,
                                             const Take& take) {
  float8_attention_backward_args args{};
  args.struct_size = sizeof args;
  args.sizes = forward.sizes;
  args.dout = heads(dout, shape, shape.heads_q);
  args.o = forward.o;
  args.lse = forward.lse;
  args.saved = forward.saved;
  args.dq = heads(take(bytes.q), shape, shape.heads_q);
  args.dk = heads(take(bytes.kv), shape, shape.heads_kv);
  args.dv = heads(take(bytes.kv), shape, shape.heads_kv);
  args.workspace = {take(bytes.backward_workspace), bytes.backward_workspace};
  return args;
}

}  // namespace

Status GpuBackend::open_attention() {
  OpenAttention open{.shape = attention_shape(problem_),
                     .recipe = attention_recipe(problem_),
                     .plan = {},
                     .sets = {}};
  const AttentionShape& shape = open.shape;
  open.plan = F8_TRY(runtime::Attention::plan(context_, desc_of(open.recipe, shape)));
  F8_TRY(open.plan->check(sizes_of(shape)));
  const AttentionBytes bytes(open.recipe, shape, *open.plan);
  const size_t results = bytes.results();
  sets_ = F8_TRY(fit_sets(static_cast<double>(bytes.inputs() + bytes.o),
                          static_cast<double>(bytes.inputs() + results)));
  const auto sets = static_cast<size_t>(sets_);
  F8_TRY(make_room((bytes.inputs() + results) * sets));
  Pool& operands = pool(nullptr);
  F8_TRY(operands.reserve(driver_, bytes.inputs() * sets));
  F8_TRY(results_.reserve(driver_, results * sets, "results"));
  const auto take = [this](size_t size) { return mutable_pointer(results_.suballocate(size)); };
  for (size_t i = 0; i < sets; ++i) {
    OpenAttention::Set set{};
    const int64_t kv = shape.batch * shape.heads_kv * shape.tokens * shape.head_dim;
    set.q = operands.suballocate(kv / shape.heads_kv * shape.heads_q);
    set.k = operands.suballocate(kv);
    set.v = operands.suballocate(kv);
    set.forward = forward_args(shape, set.q.data, set.k.data, set.v.data, bytes, take);
    if (open.recipe == AttentionRecipe::kFp8) {
      set.dout = operands.suballocate(kv / shape.heads_kv * shape.heads_q);
      set.backward = backward_args(shape, set.forward, set.dout.data, bytes, take);
    } else {
      set.dequantize = dequantize_args(shape, set.forward, bytes, take);
    }
    open.sets.push_back(set);
  }
  attention_.emplace(std::move(open));
  return {};
}

size_t GpuBackend::attention_saved_bytes() const {
  const AttentionShape& s = attention_->shape;
  const int64_t rows = s.batch * s.heads_q * s.tokens;
  return attention_->plan->saved_bytes(sizes_of(s)) + bytes_of(rows * s.head_dim, Dtype::kBf16) +
         bytes_of(rows, Dtype::kF32);
}

Result<Built> GpuBackend::add_attention(const Candidate& candidate) {
  Timed timed;
  timed.candidate = candidate;
  const auto& [shape, recipe, plan, sets] = *attention_;
  for (const OpenAttention::Set& set : sets) {
    if (problem_.op == Op::kAttentionBackward) {
      timed.launch.emplace_back([plan = plan, call = set.backward](runtime::Stream stream) {
        return plan->backward(call, stream);
      });
    } else {
      timed.launch.emplace_back([plan = plan, call = set.forward](runtime::Stream stream) {
        return plan->forward(call, stream);
      });
    }
  }
  timed.steps = [plan = plan, recipe = recipe, sets = sets](size_t i) {
    const OpenAttention::Set& set = sets[i];
    std::vector<runtime::Step> steps = plan->forward_steps(set.forward);
    if (recipe == AttentionRecipe::kFp8) return steps_of(*plan, set.forward, set.backward);
    steps.push_back({"dequantize q,k,v", [plan, call = set.dequantize](runtime::Stream stream) {
                       return plan->dequantize(call, stream);
                     }});
    return steps;
  };
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

// Whole rows of O, or of dQ: of the first and the last query of a head, and of some between.
GpuBackend::Reference GpuBackend::attention_reference() const {
  const AttentionShape& shape = attention_->shape;
  const OpenAttention::Set& set = attention_->sets.front();
  const int64_t d = shape.head_dim;
  Reference reference;
  Random random(options_.seed + 5);
  const int64_t rows = shape.batch * shape.tokens * shape.heads_q;
  reference.rows = {0, rows - 1};
  for (int i = 2; i < kSampledRows; ++i) {
    reference.rows.push_back(static_cast<int64_t>(random.below(static_cast<size_t>(rows))));
  }
  for (int64_t c = 0; c < d; ++c) reference.cols.push_back(c);
  const bool of_dq = problem_.op == Op::kAttentionBackward;
  for (const int64_t row : reference.rows) {
    // O is [b][s][h][d], and dQ [b][h][s][d].
    const int64_t head = of_dq ? row / shape.tokens % shape.heads_q : row % shape.heads_q;
    const int64_t t = of_dq ? row % shape.tokens : row / shape.heads_q % shape.tokens;
    const int64_t sequence = row / shape.heads_q / shape.tokens;
    const int64_t group = shape.heads_q / shape.heads_kv;
    const int64_t query = ((sequence * shape.heads_q + head) * shape.tokens + t) * d;
    const int64_t first_key = (sequence * shape.heads_kv + head / group) * shape.tokens * d;
    const auto k = [&](int64_t j, int64_t c) { return set.k.value(first_key + j * d + c); };
    const auto v = [&](int64_t j, int64_t c) { return set.v.value(first_key + j * d + c); };
    const std::vector<double> p = exact_softmax(
        shape.causal ? t + 1 : shape.tokens, d, [&](int64_t c) { return set.q.value(query + c); },
        k);
    std::ranges::move(
        of_dq ? weighted_sum(exact_score_gradients(
                                 p, d, v, [&](int64_t c) { return set.dout.value(query + c); }),
                             d, k)
              : weighted_sum(p, d, v),
        std::back_inserter(reference.values));
  }
  return reference;
}

Result<Check> GpuBackend::verify_attention() {
  const auto& [shape, recipe, plan, sets] = *attention_;
  const bool of_dq = problem_.op == Op::kAttentionBackward;
  const OpenAttention::Set& first = sets.front();
  const auto result =
      reinterpret_cast<CUdeviceptr>(of_dq ? first.backward.dq.data : first.forward.o);
  const int64_t rows = shape.batch * shape.tokens * shape.heads_q;
  F8_TRY(
      driver_.check(driver_.memset_d8_async(result, kNeverWritten,
                                            bytes_of(rows * shape.head_dim, Dtype::kBf16), stream_),
                    "cuMemsetD8Async"));
  // A backward, and steps that are timed by themselves, read what has been left in their set.
  const auto run = [&](const OpenAttention::Set& set) -> Status {
    F8_TRY(plan->forward(set.forward, stream_));
    if (recipe == AttentionRecipe::kFp8) F8_TRY(plan->backward(set.backward, stream_));
    return {};
  };
  for (const OpenAttention::Set& set : sets) {
    if (const Status ran = run(set); !ran) return triage(ran.error());
  }
  if (const Status done = driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
      !done) {
    return triage(done.error());
  }
  const auto key = std::pair{Operands::kBf16, int64_t{0}};
  if (!references_.contains(key)) references_[key] = attention_reference();
  Check check;
  F8_TRY(check_output(result, Dtype::kBf16, shape.head_dim, references_[key], kTolerance,
                      of_dq ? "dq" : "o", check));
  return check;
}

Result<AttentionResults<float>> GpuBackend::attention_results(AttentionRecipe recipe,
                                                              const AttentionShape& shape,
                                                              const AttentionData& data) {
  const auto plan = F8_TRY(runtime::Attention::plan(context_, desc_of(recipe, shape)));
  F8_TRY(plan->check(sizes_of(shape)));
  const AttentionBytes bytes(recipe, shape, *plan);
  const DeviceBuffer buffer =
      F8_TRY(DeviceBuffer::allocate(driver_, bytes.inputs() + bytes.results(), "attention"));
  CUdeviceptr next = buffer.address();
  const auto take = [&](size_t size) { return mutable_pointer(std::exchange(next, next + size)); };
  const auto copy = [&](const std::vector<uint16_t>& from) -> Result<void*> {
    const size_t size = from.size() * sizeof(uint16_t);
    void* to = take(suballocation_bytes(size));
    F8_TRY(driver_.check(driver_.memcpy_htod(reinterpret_cast<CUdeviceptr>(to), from.data(), size),
                         "cuMemcpyHtoD"));
    return to;
  };
  const bool fp8 = recipe == AttentionRecipe::kFp8;
  void* q = F8_TRY(copy(data.q));
  void* k = F8_TRY(copy(data.k));
  void* v = F8_TRY(copy(data.v));
  void* dout = fp8 ? F8_TRY(copy(data.dout)) : nullptr;
  F8_TRY(driver_.check(driver_.stream_synchronize(nullptr), "cuStreamSynchronize"));
  const float8_attention_forward_args forward = forward_args(shape, q, k, v, bytes, take);
  const float8_attention_backward_args backward =
      fp8 ? backward_args(shape, forward, dout, bytes, take) : float8_attention_backward_args{};
  Status ran = plan->forward(forward, stream_);
  if (ran && fp8) ran = plan->backward(backward, stream_);
  if (!ran) return triage(ran.error());
  if (const Status done = driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
      !done) {
    return triage(done.error());
  }
  const auto read_as = [&](const void* from, const std::vector<uint16_t>& operand) {
    return read(reinterpret_cast<CUdeviceptr>(from), Dtype::kBf16, std::ssize(operand));
  };
  AttentionResults<float> results;
  results.o = F8_TRY(read_as(forward.o, data.q));
  if (!fp8) return results;
  results.dq = F8_TRY(read_as(backward.dq.data, data.q));
  results.dk = F8_TRY(read_as(backward.dk.data, data.k));
  results.dv = F8_TRY(read_as(backward.dv.data, data.v));
  return results;
}

}  // namespace f8::tuner
