#include "tools/float8-tune/dist/linear_on_rank.hpp"

#include <algorithm>

#include "recipes/fp8_layout.hpp"

namespace f8::cli {
namespace {

size_t size_of(int64_t count, size_t element) {
  return static_cast<size_t>(count) * element;
}

// bf16 values of a normal-like distribution, each by its index and the seed alone.
std::vector<uint16_t> values(int64_t count, uint64_t seed) {
  std::vector<uint16_t> out(static_cast<size_t>(count));
  uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
  for (uint16_t& value : out) {
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      sum += static_cast<float>(state >> 40) * 0x1p-24F - 0.5F;
    }
    value = encode_bf16(sum);
  }
  return out;
}

}  // namespace

std::vector<float> decode(const Bytes& bytes, Dtype type) {
  std::vector<float> out(bytes.size() / size_bytes(type));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = load_element(bytes.data(), static_cast<int64_t>(i), type);
  }
  return out;
}

void append(Bytes& to, const Bytes& from) {
  to.insert(to.end(), from.begin(), from.end());
}

size_t different(const Bytes& a, const Bytes& b) {
  size_t count = a.size() > b.size() ? a.size() - b.size() : b.size() - a.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i] ? 1 : 0;
  return count;
}

Inputs::Inputs(const Shape& shape)
    : x(values(shape.m * shape.k, 1)),
      w(values(shape.n * shape.k, 2)),
      dy(values(shape.m * shape.n, 3)) {}

Status LinearOnRank::plan(const uint16_t* x, const uint16_t* dy, bool shards) {
  const auto [m, n, k] = shape_;
  float8::LinearDesc desc;
  desc.m_max = m;
  desc.n = n;
  desc.k = k;
  desc.recipe = float8::Recipe::named(recipe_);
  desc.grad_weight_dtype = FLOAT8_F32;
  desc.weight_shards = shards;
  auto linear = of_call(float8::Linear::plan(rank_.context(), desc));
  reads_shards_ = shards && linear;
  if (!linear && shards && linear.error().code == ErrorCode::kUnsupported) {
    desc.weight_shards = false;
    linear = of_call(float8::Linear::plan(rank_.context(), desc));
  }
  linear_.emplace(F8_TRY(std::move(linear)));
  x_ = F8_TRY(rank_.upload(x, size_of(m * k, 2)));
  dy_ = F8_TRY(rank_.upload(dy, size_of(m * n, 2)));
  y_ = F8_TRY(rank_.allocate(size_of(m * n, 2)));
  dx_ = F8_TRY(rank_.allocate(size_of(m * k, 2)));
  dw_ = F8_TRY(rank_.allocate(size_of(dw_rows_ * k, 4)));
  saved_ = F8_TRY(rank_.allocate(linear_->saved_bytes()));
  workspace_ = F8_TRY(rank_.allocate(linear_->workspace_bytes()));
  return {};
}

Status LinearOnRank::plan_scales() {
  scales_.emplace(F8_TRY(of_call(float8::Scales::plan(rank_.context(), {linear_->get()}))));
  if (scales_->bytes() == 0) {
    scales_.reset();
    return {};
  }
  state_ = F8_TRY(rank_.allocate(scales_->bytes()));
  F8_TRY(of_call(scales_->init(state_, rank_.stream())));
  slots_ = F8_TRY(of_call(scales_->slots(state_, 0)));
  return {};
}

Status LinearOnRank::sync_scales(float8_nccl_comm ranks) {
  return of_call(scales_->sync(state_, ranks, rank_.stream()));
}

Result<Bytes> LinearOnRank::scale_state() {
  if (!scales_) return Bytes();
  return of_call(scales_->save(state_, rank_.stream()));
}

Status LinearOnRank::forward(const void* w, const float8::Tensor* w_fp8,
                             const float8::Tensor* x_fp8) {
  float8::ForwardArgs args;
  args.x.data = x_;
  args.w.data = w;
  args.x.fp8 = x_fp8;
  args.w.fp8 = w_fp8;
  args.y.data = y_;
  args.saved.data = saved_;
  args.scales = slots_;
  const float8::Step step{.first_step = first_step_, .ranks = first_ranks_};
  args.step = &step;
  args.workspace.data = workspace_;
  return of_call(linear_->forward(args, rank_.stream()));
}

Status LinearOnRank::backward(const void* w, const float8::Tensor* w_fp8,
                              const float8::Tensor* x_fp8, bool dx) {
  float8::BackwardArgs args;
  args.dy.data = dy_;
  args.saved.data = saved_;
  args.x.data = x_;
  args.w.data = w;
  args.x.fp8 = x_fp8;
  args.w.fp8 = w_fp8;
  args.dx.data = dx ? dx_ : nullptr;
  args.dw.data = dw_;
  args.scales = slots_;
  const float8::Step step{.first_step = first_step_, .ranks = first_ranks_};
  args.step = &step;
  args.workspace.data = workspace_;
  return of_call(linear_->backward(args, rank_.stream()));
}

Result<Results> LinearOnRank::results() {
  Results out;
  out.y = F8_TRY(rank_.download(y_, size_of(shape_.m * shape_.n, 2)));
  out.dx = F8_TRY(rank_.download(dx_, size_of(shape_.m * shape_.k, 2)));
  out.dw = F8_TRY(rank_.download(dw_, size_of(shape_.n * shape_.k, 4)));
  return out;
}

Result<Results> run_whole(DeviceRank& rank, const std::string& recipe, const Shape& shape,
                          const Inputs& inputs) {
  LinearOnRank linear(rank, recipe, shape, shape.n);
  F8_TRY(linear.plan(inputs.x.data(), inputs.dy.data()));
  F8_TRY(linear.plan_scales());
  linear.set_first_step(true, nullptr);
  void* const w = F8_TRY(rank.upload(inputs.w.data(), inputs.w.size() * 2));
  F8_TRY(linear.forward(w, nullptr));
  F8_TRY(linear.backward(w, nullptr));
  Results out = F8_TRY(linear.results());
  rank.release();
  return out;
}

Status TensorOnRank::plan(DeviceRank& rank, const std::string& recipe, float8_operand operand,
                          int64_t rows_max, int64_t rows, int64_t cols, Held held,
                          int64_t whole_rows, int64_t first_row) {
  rank_ = &rank;
  held_ = held;
  float8::QuantizerDesc desc;
  desc.operand = operand;
  desc.rows_max = rows_max;
  desc.cols = cols;
  desc.recipe = float8::Recipe::named(recipe);
  desc.over_ranks = held != Held::kAll;
  desc.whole_rows = whole_rows;
  quantizer_.emplace(F8_TRY(of_call(float8::Quantizer::plan(rank.context(), desc))));
  list_.emplace(F8_TRY(of_call(float8::QuantizerList::plan(rank.context(), {*quantizer_}))));
  args_.tensor.data = F8_TRY(rank.allocate(quantizer_->tensor_bytes()));
  args_.rows = rows;
  args_.first_row = first_row;
  view_.cols = cols;
  if (rows > 0) view_ = F8_TRY(of_call(quantizer_->view(args_.tensor.data, rows)));
  workspace_ = F8_TRY(rank.allocate(list_->workspace_bytes()));
  const size_t words = quantizer_->amax_words(), row_words = quantizer_->row_amax_words();
  auto* const all =
      static_cast<uint32_t*>(F8_TRY(rank.allocate((words + row_words) * sizeof(uint32_t))));
  if (words > 0) args_.amax = all;
  if (row_words > 0) args_.row_amax = all + words;
  return {};
}

Status TensorOnRank::upload(const uint16_t* from) {
  args_.x.data = F8_TRY(rank_->upload(from, size_of(view_.rows * view_.cols, 2)));
  return {};
}

Status TensorOnRank::cast(const float8::ScaleSlots& slots) {
  const float8_stream stream = rank_->stream();
  args_.scales = slots;
  if (held_ != Held::kAll) {
    F8_TRY(of_call(list_->find_amax({}, {args_}, stream)));
    F8_TRY(reduce_amax());
  }
  return of_call(list_->run({.workspace = {workspace_}}, {args_}, stream));
}

// Of rows, the words of columns and of the tensor span ranks; of columns, the tensor's, which is the last
// one, and those of rows, which follow.
Status TensorOnRank::reduce_amax() {
  const auto is_one = [](const void* copy, const float8_cast_setting& setting) {
    return copy != nullptr && setting.granularity == FLOAT8_TENSOR;
  };
  size_t first = 0, end = quantizer_->amax_words();
  if (held_ == Held::kColumns) {
    const bool one = is_one(view_.q, view_.q_setting) || is_one(view_.qt, view_.qt_setting);
    first = one ? end - 1 : end;
    end += quantizer_->row_amax_words();
  }
  if (first == end) return {};
  uint32_t* const words = args_.amax != nullptr ? args_.amax : args_.row_amax;
  return of_call(rank_->communicator().sync_amax(words + first, end - first, rank_->stream()));
}

void TensorOnRank::lie_in_shards(int ranks, int64_t shard_rows) {
  view_.qt_shards = ranks;
  view_.ld_qt = shard_rows;
}

Status TensorOnRank::take_workspace(const float8::Tensor& whole, int64_t shard_rows, int ranks) {
  shard_rows_ = shard_rows;
  gather_workspace_ =
      F8_TRY(rank_->allocate(float8_gather_workspace_bytes(&whole, shard_rows, ranks)));
  return {};
}

Status TensorOnRank::gather(const float8::Tensor& whole) {
  float8::GatherArgs args;
  args.shard = &view_;
  args.whole = &whole;
  args.shard_rows = shard_rows_;
  args.workspace.data = gather_workspace_;
  return of_call(rank_->communicator().gather_tensor(rank_->context(), args, rank_->stream()));
}

Result<Bytes> TensorOnRank::bytes() {
  const float8::Tensor& tensor = view_;
  Bytes out;
  const auto add = [&](const void* from, int64_t lines, int64_t width, int64_t pitch) -> Status {
    const Bytes all = F8_TRY(rank_->download(from, static_cast<size_t>(lines * pitch)));
    for (int64_t line = 0; line < lines; ++line) {
      out.insert(out.end(), all.begin() + line * pitch, all.begin() + line * pitch + width);
    }
    return {};
  };
  const auto scales = [&](const float* from, const float8_cast_setting& setting, int64_t rows,
                          int64_t cols) {
    int64_t floats = 1;
    if (setting.granularity == FLOAT8_AXIS) floats = rows;
    if (setting.granularity == FLOAT8_BLOCK_128X128) {
      floats = ceil_div(rows, 128) * ceil_div(ceil_div(cols, 128), 4) * 4;
    }
    return add(from, 1, floats * 4, floats * 4);
  };
  F8_TRY(add(tensor.q, tensor.rows, tensor.cols, tensor.ld_q));
  F8_TRY(scales(tensor.q_inverse_scale, tensor.q_setting, tensor.rows, tensor.cols));
  if (tensor.qt_shards > 1) {
    const Bytes all = F8_TRY(rank_->download(tensor.qt, size_of(tensor.rows * tensor.cols, 1)));
    for (int64_t col = 0; col < tensor.cols; ++col) {
      for (int64_t shard = 0; shard < tensor.qt_shards; ++shard) {
        const auto from = all.begin() + (shard * tensor.cols + col) * tensor.ld_qt;
        out.insert(out.end(), from, from + tensor.ld_qt);
      }
    }
  } else {
    F8_TRY(add(tensor.qt, tensor.cols, tensor.rows, tensor.ld_qt));
  }
  F8_TRY(scales(tensor.qt_inverse_scale, tensor.qt_setting, tensor.cols, tensor.rows));
  return out;
}

Status GemmOnRank::plan(DeviceRank& rank, const std::string& recipe, float8_gemm_kind kind,
                        const Shape& shape, float8_dtype d) {
  rank_ = &rank;
  float8::GemmDesc desc;
  desc.gemm = kind;
  desc.m_max = shape.m;
  desc.n = shape.n;
  desc.k = shape.k;
  desc.recipe = float8::Recipe::named(recipe);
  desc.d_dtype = d;
  gemm_.emplace(F8_TRY(of_call(float8::Gemm::plan(rank.context(), desc))));
  workspace_ = F8_TRY(rank.allocate(gemm_->workspace_bytes()));
  return {};
}

Status GemmOnRank::run(const float8::Tensor& a, const float8::Tensor& b, void* d) {
  float8::GemmArgs args;
  args.a = &a;
  args.b = &b;
  args.d.data = d;
  args.workspace.data = workspace_;
  return of_call(gemm_->run(args, rank_->stream()));
}

}  // namespace f8::cli
