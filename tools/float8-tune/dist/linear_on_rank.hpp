// What verify-dist runs on a rank's device: linears and tensors in fp8 with their memory, and inputs that
// are the same in every run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "recipes/dtype.hpp"
#include "recipes/problem.hpp"
#include "tools/float8-tune/dist/device_rank.hpp"

namespace f8::cli {

using Bytes = std::vector<unsigned char>;

[[nodiscard]] std::vector<float> decode(const Bytes& bytes, Dtype type);
// How many bytes differ.
[[nodiscard]] size_t different(const Bytes& a, const Bytes& b);

struct Inputs {
  std::vector<uint16_t> x, w, dy;  // in bf16
  explicit Inputs(const Shape& shape);
};

// The results of a forward and a backward: y and dx in bf16, dw in fp32.
struct Results {
  Bytes y, dx, dw;
};

class LinearOnRank {
 public:
  // `dw` has memory for dw_rows rows.
  LinearOnRank(DeviceRank& rank, std::string recipe, const Shape& shape, int64_t dw_rows)
      : rank_(rank), recipe_(std::move(recipe)), shape_(shape), dw_rows_(dw_rows) {}

  // Takes all memory that it needs.
  [[nodiscard]] Status plan(const uint16_t* x, const uint16_t* dy);
  // With the weight or its fp8 copies, and with x_tensor or the x of plan().
  [[nodiscard]] Status forward(const void* w, const float8::Tensor* w_tensor,
                               const float8::Tensor* x_tensor = nullptr);
  [[nodiscard]] Status backward(const void* w, const float8::Tensor* w_tensor,
                                const float8::Tensor* x_tensor = nullptr);
  // Waits for the stream.
  [[nodiscard]] Result<Results> results();
  [[nodiscard]] void* y() const { return y_; }
  [[nodiscard]] void* dx() const { return dx_; }
  [[nodiscard]] void* dw() const { return dw_; }
  [[nodiscard]] Result<std::string> info() const { return of_call(linear_->info()); }

 private:
  DeviceRank& rank_;
  std::string recipe_;
  Shape shape_;
  int64_t dw_rows_;
  std::optional<float8::Linear> linear_;
  void *x_ = nullptr, *dy_ = nullptr, *y_ = nullptr, *dx_ = nullptr, *dw_ = nullptr;
  void *saved_ = nullptr, *workspace_ = nullptr;
};

// A linear of all tokens at once, on one rank, whose memory is released then.
[[nodiscard]] Result<Results> run_whole(DeviceRank& rank, const std::string& recipe,
                                        const Shape& shape, const Inputs& inputs);

// A tensor in fp8: a rank's shard, or a whole one, cast here or gathered.
class TensorOnRank {
 public:
  // Takes all memory that it needs. A shard has rows_max rows at most.
  [[nodiscard]] Status plan(DeviceRank& rank, const std::string& recipe, float8_operand operand,
                            int64_t rows_max, int64_t rows, int64_t cols, bool over_ranks);
  // Casts what `from` has in bf16 in host memory, of a shard over all ranks.
  [[nodiscard]] Status upload(const uint16_t* from);
  [[nodiscard]] Status cast();
  // Fills `whole`, a view of a tensor of all rows, from the ranks' shards.
  [[nodiscard]] Status take_workspace(const float8::Tensor& whole, int ranks);
  [[nodiscard]] Status gather(const float8::Tensor& whole);
  [[nodiscard]] const float8::Tensor& view() const { return view_; }
  // The defined bytes of the copies and their scales. Waits for the stream.
  [[nodiscard]] Result<Bytes> bytes();

 private:
  DeviceRank* rank_ = nullptr;
  std::optional<float8::Quantizer> quantizer_;
  float8::Tensor view_;
  float8::QuantizeArgs args_;
  bool over_ranks_ = false;
  int64_t rows_max_ = 0;
  void* workspace_ = nullptr;  // of a cast
  void* gather_workspace_ = nullptr;
};

}  // namespace f8::cli
