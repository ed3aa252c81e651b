// The model's linear layers on float8: which of them are converted, their fp8 copies of weights and
// activations, and the state of delayed scaling. Nothing here depends on the recipe by name.
#pragma once

#include <optional>

#include "ranks/column_activation.hpp"
#include "ranks/grad_sum.hpp"
#include "ranks/shards.hpp"

namespace train {

class Linears {
 public:
  // `weights` is the bf16 copy of the rank's parameters and `grads` their fp32 gradients; both stay in
  // use.
  Linears(Backend& backend, const TrainConfig& config, const Ranks& ranks,
          const Parameters& parameters, const u16* weights, float* grads);

  // Begins a step: makes fp8 copies of the weights as they are now. The first step of all has no
  // scales of earlier ones.
  void cast_weights(bool first_step);
  void forward(size_t index, const void* x, void* y, bool first_step);
  // x is the forward's. The weight's gradient is overwritten by micro-batch 0; the others add to it.
  void backward(size_t index, const void* dy, const void* x, void* dx, bool first_step,
                int64_t batch);
  // A hash of what a linear runs, which its plan says in words.
  [[nodiscard]] std::string plan_hash(size_t index) const;
  // Memory of the largest whole gradient of all ranks, free between two calls.
  [[nodiscard]] float* gradient_scratch() const { return dw_; }
  // Comes between backward and the optimizer.
  void update_scales();

  // The state of delayed scaling as float8 saves it.
  [[nodiscard]] std::vector<unsigned char> scale_state() const;
  // An empty state is that of a model before its first step.
  void set_scale_state(const std::vector<unsigned char>& state);

 private:
  struct Layer {
    float8::Linear linear;
    const u16* w;
    float* dw;
    bool in_shards;  // backward reads a gathered qt as it lies
    void* saved = nullptr;
    void* cache = nullptr;  // null where the weight is never cast
    float8::ScaleSlots slots = {};
    // Of tensor parallelism, where scales span its ranks.
    std::unique_ptr<ColumnActivation> x;       // of a row-wise linear
    std::shared_ptr<ColumnActivation> dy;      // one for all column-wise linears, which are alike
    const float8::Tensor* x_tensor = nullptr;  // the latest forward's
  };
  void allocate();
  void allocate_shards(const std::string& recipe);
  void allocate_columns(const TrainConfig& config);

  Backend& backend_;
  const Ranks& ranks_;
  const Parameters& parameters_;
  GradSum grad_sum_;
  std::optional<Shards> shards_;  // of several ranks
  std::vector<Layer> layers_;
  std::optional<float8::WeightCasts> casts_;  // none where no weight is cast
  std::optional<float8::Scales> scales_;
  void* scale_state_ = nullptr;
  float* dw_ = nullptr;        // a whole weight's gradient that is not its sum yet
  void* workspace_ = nullptr;  // serves one call at a time
};

}  // namespace train
