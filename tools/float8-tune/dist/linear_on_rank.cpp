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

size_t different(const Bytes& a, const Bytes& b) {
  size_t count = a.size() > b.size() ? a.size() - b.size() : b.size() - a.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i] ? 1 : 0;
  return count;
}

Inputs::Inputs(const Shape& shape)
    : x(values(shape.m * shape.k, 1)),
      w(values(shape.n * shape.k, 2)),
      dy(values(shape.m * shape.n, 3)) {}

Status LinearOnRank::plan(const uint16_t* x, const uint16_t* dy) {
  const auto [m, n, k] = shape_;
  float8::LinearDesc desc;
  desc.m_max = m;
  desc.n = n;
  desc.k = k;
  desc.recipe = float8::Recipe::named(recipe_);
  desc.grad_weight_dtype = FLOAT8_F32;
  linear_.emplace(F8_TRY(of_call(float8::Linear::plan(rank_.context(), desc))));
  x_ = F8_TRY(rank_.upload(x, size_of(m * k, 2)));
  dy_ = F8_TRY(rank_.upload(dy, size_of(m * n, 2)));
  y_ = F8_TRY(rank_.allocate(size_of(m * n, 2)));
  dx_ = F8_TRY(rank_.allocate(size_of(m * k, 2)));
  dw_ = F8_TRY(rank_.allocate(size_of(dw_rows_ * k, 4)));
  saved_ = F8_TRY(rank_.allocate(linear_->saved_bytes()));
  workspace_ = F8_TRY(rank_.allocate(linear_->workspace_bytes()));
  return {};
}

Status LinearOnRank::forward(const void* w, const float8::Tensor* w_tensor,
                             const float8::Tensor* x_tensor) {
  float8::ForwardArgs args;
  args.x = x_;
  args.w = w;
  args.x_tensor = x_tensor;
  args.w_tensor = w_tensor;
  args.y = y_;
  args.saved = saved_;
  return of_call(linear_->forward(args, workspace_, rank_.stream()));
}

Status LinearOnRank::backward(const void* w, const float8::Tensor* w_tensor,
                              const float8::Tensor* x_tensor) {
  float8::BackwardArgs args;
  args.dy = dy_;
  args.saved = saved_;
  args.x = x_;
  args.w = w;
  args.x_tensor = x_tensor;
  args.w_tensor = w_tensor;
  args.dx = dx_;
  args.dw = dw_;
  return of_call(linear_->backward(args, workspace_, rank_.stream()));
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
  void* const w = F8_TRY(rank.upload(inputs.w.data(), inputs.w.size() * 2));
  F8_TRY(linear.forward(w, nullptr));
  F8_TRY(linear.backward(w, nullptr));
  Results out = F8_TRY(linear.results());
  rank.release();
  return out;
}

Status TensorOnRank::plan(DeviceRank& rank, const std::string& recipe, float8_operand operand,
                          int64_t rows_max, int64_t rows, int64_t cols, bool over_ranks) {
  rank_ = &rank;
  over_ranks_ = over_ranks;
  rows_max_ = rows_max;
  float8::QuantizerDesc desc;
  desc.operand = operand;
  desc.rows_max = rows_max;
  desc.cols = cols;
  desc.recipe = float8::Recipe::named(recipe);
  desc.over_ranks = over_ranks;
  quantizer_.emplace(F8_TRY(of_call(float8::Quantizer::plan(rank.context(), desc))));
  args_.tensor = F8_TRY(rank.allocate(quantizer_->tensor_bytes()));
  args_.rows = rows;
  view_ = F8_TRY(of_call(quantizer_->view(args_.tensor, rows)));
  workspace_ = F8_TRY(rank.allocate(quantizer_->workspace_bytes()));
  if (const size_t words = quantizer_->amax_words(); words > 0) {
    args_.amax = static_cast<uint32_t*>(F8_TRY(rank.allocate(words * sizeof(uint32_t))));
  }
  if (const size_t words = quantizer_->row_amax_words(); words > 0) {
    args_.row_amax = static_cast<uint32_t*>(F8_TRY(rank.allocate(words * sizeof(uint32_t))));
  }
  return {};
}

Status TensorOnRank::upload(const uint16_t* from) {
  args_.x = F8_TRY(rank_->upload(from, size_of(view_.rows * view_.cols, 2)));
  return {};
}

Status TensorOnRank::cast() {
  const float8_stream stream = rank_->stream();
  if (over_ranks_) {
    F8_TRY(of_call(quantizer_->find_amax(args_, stream)));
    if (const size_t words = quantizer_->amax_words(); words > 0) {
      F8_TRY(of_call(rank_->communicator().sync_amax(args_.amax, words, stream)));
    }
  }
  return of_call(quantizer_->run(args_, over_ranks_ ? nullptr : workspace_, stream));
}

Status TensorOnRank::take_workspace(const float8::Tensor& whole, int ranks) {
  gather_workspace_ =
      F8_TRY(rank_->allocate(float8_gather_workspace_bytes(&whole, rows_max_, ranks)));
  return {};
}

Status TensorOnRank::gather(const float8::Tensor& whole) {
  float8::GatherArgs args;
  args.shard = &view_;
  args.whole = &whole;
  args.shard_rows = rows_max_;
  return of_call(rank_->communicator().gather_tensor(rank_->context(), args, gather_workspace_,
                                                     rank_->stream()));
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
  F8_TRY(add(tensor.qt, tensor.cols, tensor.rows, tensor.ld_qt));
  F8_TRY(scales(tensor.qt_inverse_scale, tensor.qt_setting, tensor.cols, tensor.rows));
  return out;
}

}  // namespace f8::cli
