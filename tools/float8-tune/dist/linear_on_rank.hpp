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
void append(Bytes& to, const Bytes& from);
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

  // Takes all memory that it needs. With `shards` it reads a qt of the weight in shards, unless
  // cuBLASLt is the choice for grad_input; reads_shards() tells.
  [[nodiscard]] Status plan(const uint16_t* x, const uint16_t* dy, bool shards = false);
  [[nodiscard]] bool reads_shards() const { return reads_shards_; }
  // With delayed scaling a linear has a scale state of its own, or one that another linear has.
  [[nodiscard]] Status plan_scales();
  [[nodiscard]] const float8::ScaleSlots& slots() const { return slots_; }
  void use_slots(const float8::ScaleSlots& slots) { slots_ = slots; }
  [[nodiscard]] Status sync_scales(float8_nccl_comm ranks);
  // The state as it is saved; empty without delayed scaling.
  [[nodiscard]] Result<Bytes> scale_state();
  // The next calls are of a first step over these ranks, or of a later one.
  void set_first_step(bool first, float8_nccl_comm ranks) {
    first_step_ = first;
    first_ranks_ = ranks;
  }

  // Computes y with the weight or its fp8 copies, and with x_fp8 or the x of plan().
  [[nodiscard]] Status forward(const void* w, const float8::Tensor* w_fp8,
                               const float8::Tensor* x_fp8 = nullptr);
  // Without `dx` it computes dw alone.
  [[nodiscard]] Status backward(const void* w, const float8::Tensor* w_fp8,
                                const float8::Tensor* x_fp8 = nullptr, bool dx = true);
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
  bool reads_shards_ = false;
  std::optional<float8::Scales> scales_;
  void* state_ = nullptr;
  float8::ScaleSlots slots_{};
  bool first_step_ = false;
  float8_nccl_comm first_ranks_ = nullptr;
  void *x_ = nullptr, *dy_ = nullptr, *y_ = nullptr, *dx_ = nullptr, *dw_ = nullptr;
  void *saved_ = nullptr, *workspace_ = nullptr;
};

// A linear of all tokens at once, on one rank, whose memory is released then.
[[nodiscard]] Result<Results> run_whole(DeviceRank& rank, const std::string& recipe,
                                        const Shape& shape, const Inputs& inputs);

// What a rank holds of a tensor.
enum class Held { kAll, kRows, kColumns };

// A tensor in fp8: a rank's part, or a whole one, cast here or gathered.
class TensorOnRank {
 public:
  // Takes all memory that it needs. A part has rows_max rows at most; rows of a tensor of whole_rows
  // that may cut its blocks begin with first_row.
  [[nodiscard]] Status plan(DeviceRank& rank, const std::string& recipe, float8_operand operand,
                            int64_t rows_max, int64_t rows, int64_t cols, Held held,
                            int64_t whole_rows = 0, int64_t first_row = 0);
  // Casts what `from` has in bf16 in host memory, with the scales of the whole tensor. `slots` are those
  // of delayed scaling.
  [[nodiscard]] Status upload(const uint16_t* from);
  [[nodiscard]] Status cast(const float8::ScaleSlots& slots = {});
  // A gathered qt stays as it arrives, in shards of shard_rows.
  void lie_in_shards(int ranks, int64_t shard_rows);
  // Fills `whole`, a view of a tensor of all rows, from the ranks' shards of shard_rows.
  [[nodiscard]] Status take_workspace(const float8::Tensor& whole, int64_t shard_rows, int ranks);
  [[nodiscard]] Status gather(const float8::Tensor& whole);
  [[nodiscard]] const float8::Tensor& view() const { return view_; }
  // The defined bytes of the copies and their scales. Waits for the stream.
  [[nodiscard]] Result<Bytes> bytes();

 private:
  [[nodiscard]] Status reduce_amax();
  DeviceRank* rank_ = nullptr;
  std::optional<float8::Quantizer> quantizer_;
  std::optional<float8::QuantizerList> list_;  // of this tensor alone
  float8::Tensor view_;
  float8::QuantizeArgs args_;
  Held held_ = Held::kAll;
  int64_t shard_rows_ = 0;
  void* workspace_ = nullptr;  // of a cast
  void* gather_workspace_ = nullptr;
};

// One GEMM of a linear, of tensors in fp8.
class GemmOnRank {
 public:
  [[nodiscard]] Status plan(DeviceRank& rank, const std::string& recipe, float8_gemm_kind kind,
                            const Shape& shape, float8_dtype d);
  [[nodiscard]] Status run(const float8::Tensor& a, const float8::Tensor& b, void* d);

 private:
  DeviceRank* rank_ = nullptr;
  std::optional<float8::Gemm> gemm_;
  void* workspace_ = nullptr;
};

}  // namespace f8::cli
