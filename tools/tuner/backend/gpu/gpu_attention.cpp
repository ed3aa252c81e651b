// Attention's forward, backward, or both, as the candidates of an open problem: float8's with its casts, and a library's
// in bf16; and float8's by themselves, for their accuracy.
#include <algorithm>

#include "tools/tuner/backend/gpu/gpu_backend.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::tuner {
namespace {

constexpr int kSampledRows = 24;
// Against exact arithmetic: the format's own error.
constexpr double kFp8Tolerance = 0.2;
constexpr double kBf16Tolerance = 0.02;
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

// What the calls for a set of operands write.
struct ResultBytes {
  size_t q, kv, o, lse, saved, workspace;
  size_t backward_workspace = 0;

  ResultBytes(const AttentionShape& s, const runtime::Attention& plan, bool backward) {
    const int64_t rows = s.batch * s.heads_q * s.tokens;
    q = o = suballocation_bytes(bytes_of(rows * s.head_dim, Dtype::kBf16));
    kv = suballocation_bytes(bytes_of(s.batch * s.heads_kv * s.tokens * s.head_dim, Dtype::kBf16));
    lse = suballocation_bytes(bytes_of(rows, Dtype::kF32));
    saved = suballocation_bytes(plan.saved_bytes(sizes_of(s)));
    workspace = suballocation_bytes(plan.workspace_bytes(sizes_of(s)));
    if (backward) {
      backward_workspace = suballocation_bytes(plan.backward_workspace_bytes(sizes_of(s)));
    }
  }
  // A backward writes gradients, and a dequantisation copies, that are as large as q, k and v.
  [[nodiscard]] size_t all() const {
    return o + lse + saved + workspace + q + 2 * kv + backward_workspace;
  }
  // What q, k and v have, and with a backward dout.
  [[nodiscard]] size_t operands(bool backward) const { return (backward ? 2 : 1) * q + 2 * kv; }
};

// These take the results of a call from `take`, ResultBytes::all() together.
template <class Take>
float8_attention_forward_args forward_args(const AttentionShape& shape, const void* q,
                                           const void* k, const void* v, const ResultBytes& bytes,
                                           const Take& take) {
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
                                                 const ResultBytes& bytes, const Take& take) {
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
                                             const void* dout, const ResultBytes& bytes,
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
  args.q = forward.q;
  args.k = forward.k;
  args.v = forward.v;
  return args;
}

}  // namespace

// Candidates allocate their results themselves: float8, and bf16, which takes about as much.
Status GpuBackend::open_attention() {
  OpenAttention open{.shape = attention_shape(problem_), .plan = {}, .sets = {}};
  const AttentionShape& shape = open.shape;
  open.plan =
      F8_TRY(runtime::Attention::plan(context_, desc_of(attention_recipe(problem_), shape)));
  F8_TRY(open.plan->check(sizes_of(shape)));
  const bool backward = problem_.op != Op::kAttentionForward;
  const ResultBytes bytes(shape, *open.plan, backward);
  const size_t inputs = bytes.operands(backward);
  sets_ = F8_TRY(fit_sets(static_cast<double>(inputs + bytes.o),
                          static_cast<double>(inputs + 2 * bytes.all())));
  const auto sets = static_cast<size_t>(sets_);
  F8_TRY(make_room((inputs + 2 * bytes.all()) * sets));
  Pool& operands = pool(nullptr);
  F8_TRY(operands.reserve(driver_, inputs * sets));
  const int64_t of_head = shape.batch * shape.tokens * shape.head_dim;
  for (size_t i = 0; i < sets; ++i) {
    OpenAttention::Set& set = open.sets.emplace_back();
    set.q = operands.suballocate(of_head * shape.heads_q);
    set.k = operands.suballocate(of_head * shape.heads_kv);
    set.v = operands.suballocate(of_head * shape.heads_kv);
    if (backward) set.dout = operands.suballocate(of_head * shape.heads_q);
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

Result<GpuBackend::AttentionCalls> GpuBackend::lay_out_attention(
    std::shared_ptr<const runtime::Attention> plan, bool is_bf16) {
  const AttentionShape& shape = attention_->shape;
  const bool backward = problem_.op != Op::kAttentionForward;
  const bool dequantize =
      !backward && !is_bf16 && attention_recipe(problem_) == AttentionRecipe::kFp8Forward;
  const ResultBytes bytes(shape, *plan, backward);
  buffers_.push_back(F8_TRY(DeviceBuffer::allocate(driver_, bytes.all() * attention_->sets.size(),
                                                   "results of attention")));
  CUdeviceptr next = buffers_.back().address();
  const auto take = [&](size_t size) { return mutable_pointer(std::exchange(next, next + size)); };
  AttentionCalls calls{.plan = std::move(plan), .sets = {}};
  for (const OpenAttention::Set& of : attention_->sets) {
    AttentionCalls::Set& set = calls.sets.emplace_back();
    set.forward = forward_args(shape, of.q.data, of.k.data, of.v.data, bytes, take);
    if (backward) set.backward = backward_args(shape, set.forward, of.dout.data, bytes, take);
    if (dequantize) set.dequantize = dequantize_args(shape, set.forward, bytes, take);
  }
  return calls;
}

// Forward and backward together are measured for the decision between fp8 and bf16, so that there is no one without the
// other; and the backward of kFp8Forward is that of bf16.
Result<Built> GpuBackend::add_attention(const Candidate& candidate) {
  const bool is_bf16 = candidate.impl == Impl::kBf16;
  auto plan = attention_->plan;
  if (is_bf16 || problem_.op == Op::kAttention) {
    auto library =
        runtime::Attention::plan(context_, desc_of(AttentionRecipe::kBf16, attention_->shape));
    if (!library) {
      return fail(ErrorCode::kUnsupported, "there is no attention in bf16 to compare with: {}",
                  library.error().message);
    }
    if (is_bf16) plan = *std::move(library);
  }
  const auto calls =
      std::make_shared<const AttentionCalls>(F8_TRY(lay_out_attention(std::move(plan), is_bf16)));
  Timed timed;
  timed.candidate = candidate;
  timed.attention = calls;
  const bool forward = problem_.op != Op::kAttentionBackward;
  for (const AttentionCalls::Set& set : calls->sets) {
    timed.launch.emplace_back([calls, &set, forward](runtime::Stream stream) -> Status {
      if (forward) F8_TRY(calls->plan->forward(set.forward, stream));
      return set.backward ? calls->plan->backward(*set.backward, stream) : Status();
    });
  }
  timed.steps = [calls, shape = attention_->shape](size_t i) {
    const runtime::Attention& own = *calls->plan;
    const AttentionCalls::Set& set = calls->sets[i];
    if (set.backward) return steps_of(own, set.forward, *set.backward);
    std::vector<runtime::Step> steps = own.forward_steps(set.forward);
    if (!set.dequantize) return steps;
    // It reads each element in fp8 and writes it in bf16.
    const auto elements = static_cast<double>(shape.batch * shape.tokens * shape.head_dim *
                                              (shape.heads_q + 2 * shape.heads_kv));
    steps.push_back({"dequantize q,k,v",
                     [calls, &set](runtime::Stream stream) {
                       return calls->plan->dequantize(*set.dequantize, stream);
                     },
                     3 * elements});
    return steps;
  };
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

// Whole rows of O, or of dQ: of the first and the last query of a head, and of some between.
GpuBackend::Reference GpuBackend::attention_reference(bool of_dq) const {
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

Result<Check> GpuBackend::verify_attention(const Timed& timed) {
  const AttentionShape& shape = attention_->shape;
  const auto& [plan, sets] = *timed.attention;
  const bool is_bf16 = timed.candidate.impl == Impl::kBf16;
  std::vector<bool> results;  // whether each is dQ, or O
  if (problem_.op != Op::kAttentionBackward) results.push_back(false);
  if (problem_.op != Op::kAttentionForward) results.push_back(true);
  const auto at = [&](bool of_dq) {
    return reinterpret_cast<CUdeviceptr>(of_dq ? sets.front().backward->dq.data
                                               : sets.front().forward.o);
  };
  const int64_t elements = shape.batch * shape.tokens * shape.heads_q * shape.head_dim;
  for (const bool of_dq : results) {
    F8_TRY(driver_.check(driver_.memset_d8_async(at(of_dq), kNeverWritten,
                                                 bytes_of(elements, Dtype::kBf16), stream_),
                         "cuMemsetD8Async"));
  }
  // A backward, and steps that are timed by themselves, read what has been left in their set.
  for (const AttentionCalls::Set& set : sets) {
    Status ran = plan->forward(set.forward, stream_);
    if (ran && set.backward) ran = plan->backward(*set.backward, stream_);
    if (!ran) return triage(ran.error());
  }
  if (const Status done = driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
      !done) {
    return triage(done.error());
  }
  Check check;
  for (const bool of_dq : results) {
    const auto key = std::pair{Operands::kBf16, int64_t{of_dq}};
    if (!references_.contains(key)) references_[key] = attention_reference(of_dq);
    F8_TRY(check_output(at(of_dq), Dtype::kBf16, shape.head_dim, references_[key],
                        is_bf16 ? kBf16Tolerance : kFp8Tolerance, of_dq ? "dq" : "o", check));
    if (!check.right) break;
  }
  return check;
}

Result<AttentionResults<float>> GpuBackend::attention_results(AttentionRecipe recipe,
                                                              const AttentionShape& shape,
                                                              const AttentionData& data) {
  const auto plan = F8_TRY(runtime::Attention::plan(context_, desc_of(recipe, shape)));
  F8_TRY(plan->check(sizes_of(shape)));
  const ResultBytes bytes(shape, *plan, true);
  const DeviceBuffer buffer =
      F8_TRY(DeviceBuffer::allocate(driver_, bytes.operands(true) + bytes.all(), "attention"));
  CUdeviceptr next = buffer.address();
  const auto take = [&](size_t size) { return mutable_pointer(std::exchange(next, next + size)); };
  const auto copy = [&](const std::vector<uint16_t>& from) -> Result<void*> {
    const size_t size = from.size() * sizeof(uint16_t);
    void* to = take(suballocation_bytes(size));
    F8_TRY(driver_.check(driver_.memcpy_htod(reinterpret_cast<CUdeviceptr>(to), from.data(), size),
                         "cuMemcpyHtoD"));
    return to;
  };
  void* q = F8_TRY(copy(data.q));
  void* k = F8_TRY(copy(data.k));
  void* v = F8_TRY(copy(data.v));
  void* dout = F8_TRY(copy(data.dout));
  F8_TRY(driver_.check(driver_.stream_synchronize(nullptr), "cuStreamSynchronize"));
  const float8_attention_forward_args forward = forward_args(shape, q, k, v, bytes, take);
  const float8_attention_backward_args backward = backward_args(shape, forward, dout, bytes, take);
  if (const Status ran = plan->forward(forward, stream_); !ran) return triage(ran.error());
  // The library that has the other recipe's backward may be absent, or refuse this shape.
  bool has_backward = recipe == AttentionRecipe::kFp8 || bytes.backward_workspace > 0;
  if (has_backward) {
    const Status ran = plan->backward(backward, stream_);
    has_backward = ran || ran.error().code != ErrorCode::kUnsupported;
    if (!ran && has_backward) return triage(ran.error());
  }
  if (const Status done = driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
      !done) {
    return triage(done.error());
  }
  const auto read_as = [&](const void* from, const std::vector<uint16_t>& operand) {
    return read(reinterpret_cast<CUdeviceptr>(from), Dtype::kBf16, std::ssize(operand));
  };
  AttentionResults<float> results;
  results.o = F8_TRY(read_as(forward.o, data.q));
  if (!has_backward) return results;
  results.dq = F8_TRY(read_as(backward.dq.data, data.q));
  results.dk = F8_TRY(read_as(backward.dk.data, data.k));
  results.dv = F8_TRY(read_as(backward.dv.data, data.v));
  return results;
}

}  // namespace f8::tuner
