// Attention's forward in fp8, with its casts, as the candidate of an open problem; and by itself, for its accuracy.
#include <algorithm>

#include "tools/tuner/backend/gpu_backend.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::tuner {
namespace {

constexpr int kSampledRows = 24;
constexpr double kTolerance = 0.2;       // fp8 against exact arithmetic: the format's own error
constexpr uint8_t kNeverWritten = 0xff;  // a NaN in bf16

runtime::AttentionDesc desc_of(const AttentionShape& shape) {
  return {.heads_q = shape.heads_q,
          .heads_kv = shape.heads_kv,
          .head_dim = shape.head_dim,
          .causal = shape.causal};
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
  size_t q, kv, o, lse, saved, workspace;

  AttentionBytes(const AttentionShape& s, const runtime::Attention& plan) {
    const int64_t rows = s.batch * s.heads_q * s.tokens;
    q = o = suballocation_bytes(bytes_of(rows * s.head_dim, Dtype::kBf16));
    kv = suballocation_bytes(bytes_of(s.batch * s.heads_kv * s.tokens * s.head_dim, Dtype::kBf16));
    lse = suballocation_bytes(bytes_of(rows, Dtype::kF32));
    saved = suballocation_bytes(plan.saved_bytes(sizes_of(s)));
    workspace = suballocation_bytes(plan.workspace_bytes(sizes_of(s)));
  }
  [[nodiscard]] size_t inputs() const { return q + 2 * kv; }
  [[nodiscard]] size_t results() const { return o + lse + saved + workspace; }
};

// Takes the results of a call from `take`, in the order of AttentionBytes::results().
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

}  // namespace

Status GpuBackend::open_attention() {
  OpenAttention open{.shape = attention_shape(problem_), .plan = {}, .sets = {}};
  const AttentionShape& shape = open.shape;
  open.plan = F8_TRY(runtime::Attention::plan(context_, desc_of(shape)));
  F8_TRY(open.plan->check(sizes_of(shape)));
  const AttentionBytes bytes(shape, *open.plan);
  const size_t results = bytes.results() + bytes.inputs();  // which dequantize writes
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
    set.back.struct_size = sizeof set.back;
    set.back.sizes = set.forward.sizes;
    set.back.saved = set.forward.saved;
    set.back.q = heads(take(bytes.q), shape, shape.heads_q);
    set.back.k = heads(take(bytes.kv), shape, shape.heads_kv);
    set.back.v = heads(take(bytes.kv), shape, shape.heads_kv);
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
  const auto& plan = attention_->plan;
  for (const OpenAttention::Set& set : attention_->sets) {
    timed.launch.emplace_back(
        [plan, call = set.forward](runtime::Stream stream) { return plan->forward(call, stream); });
  }
  timed.steps = [plan, sets = attention_->sets](size_t set) {
    return plan->steps(sets[set].forward, sets[set].back);
  };
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

// Whole rows of O: of the first and the last query of a head, and of some between.
GpuBackend::Reference GpuBackend::attention_reference() const {
  const auto& [shape, plan, sets] = *attention_;
  const OpenAttention::Set& set = sets.front();
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
    const int64_t head = row % shape.heads_q;
    const int64_t t = row / shape.heads_q % shape.tokens;
    const int64_t sequence = row / shape.heads_q / shape.tokens;
    const int64_t group = shape.heads_q / shape.heads_kv;
    const int64_t q = ((sequence * shape.heads_q + head) * shape.tokens + t) * d;
    const int64_t kv = (sequence * shape.heads_kv + head / group) * shape.tokens * d;
    std::ranges::copy(
        exact_query(
            shape.causal ? t + 1 : shape.tokens, d, [&](int64_t c) { return set.q.value(q + c); },
            [&](int64_t j, int64_t c) { return set.k.value(kv + j * d + c); },
            [&](int64_t j, int64_t c) { return set.v.value(kv + j * d + c); }),
        std::back_inserter(reference.values));
  }
  return reference;
}

Result<Check> GpuBackend::verify_attention(Timed& timed) {
  const auto& [shape, plan, sets] = *attention_;
  const auto o = reinterpret_cast<CUdeviceptr>(sets.front().forward.o);
  const int64_t rows = shape.batch * shape.tokens * shape.heads_q;
  F8_TRY(
      driver_.check(driver_.memset_d8_async(o, kNeverWritten,
                                            bytes_of(rows * shape.head_dim, Dtype::kBf16), stream_),
                    "cuMemsetD8Async"));
  // Steps that are timed by themselves read what a forward has left.
  for (size_t i = 0; i < sets.size(); ++i) {
    if (const Status ran = launch_once(timed, i); !ran) return triage(ran.error());
  }
  if (const Status done = driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
      !done) {
    return triage(done.error());
  }
  const auto key = std::pair{Operands::kBf16, int64_t{0}};
  if (!references_.contains(key)) references_[key] = attention_reference();
  Check check;
  F8_TRY(check_output(o, Dtype::kBf16, shape.head_dim, references_[key], kTolerance, "o", check));
  return check;
}

Result<std::vector<float>> GpuBackend::attention_output(const AttentionShape& shape,
                                                        const AttentionData& data) {
  const auto plan = F8_TRY(runtime::Attention::plan(context_, desc_of(shape)));
  F8_TRY(plan->check(sizes_of(shape)));
  const AttentionBytes bytes(shape, *plan);
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
  void* q = F8_TRY(copy(data.q));
  void* k = F8_TRY(copy(data.k));
  void* v = F8_TRY(copy(data.v));
  F8_TRY(driver_.check(driver_.stream_synchronize(nullptr), "cuStreamSynchronize"));
  const float8_attention_forward_args args = forward_args(shape, q, k, v, bytes, take);
  if (const Status ran = plan->forward(args, stream_); !ran) return triage(ran.error());
  if (const Status done = driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
      !done) {
    return triage(done.error());
  }
  return read(reinterpret_cast<CUdeviceptr>(args.o), Dtype::kBf16, std::ssize(data.q));
}

}  // namespace f8::tuner
