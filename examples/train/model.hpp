// The model and its training step. C bytes of context are embedded side by side into the residual
// stream h; each of L blocks adds down(gelu(up(norm(h)))); the head gives the next byte's logits.
// Activations are bf16, gradients of weights and the weights' masters fp32.
//
// A step's tokens are those of all ranks and micro-batches: micro-batch b of FSDP rank r takes the share
// r * micro_batches + b. An FSDP rank holds rows of each linear's weight, and all embeddings and gains.
// With tensor parallelism it has a part of the inner width of each block: up is column-wise, so its
// input's gradient is summed over ranks, and down is row-wise, so its output is.
//
// All memory is taken when the model is made, and a step is a fixed sequence of launches, so that
// it can be recorded once and repeated.
#pragma once

#include "checkpoint.hpp"
#include "linears.hpp"
#include "ranks/agreement.hpp"

namespace train {

class Model {
 public:
  // Copies `text`. The backend and the communicators outlive the model.
  Model(Backend& backend, const TrainConfig& config, const Ranks& ranks, std::string_view text);

  // Throws the same error on all ranks where they would train another model, or by other kernels. All
  // ranks call it before the first step; `run` is the identity of theirs.
  void agree(const std::string& run) const;
  // Enqueues one step: sample, forward, backward, scales, optimizer.
  void step(bool first_step);
  // The losses of steps [first, last), which are done.
  [[nodiscard]] std::vector<float> losses(int64_t first, int64_t last) const;

  // Holds weights, moments and scales of all ranks; the caller adds what it knows of the run. All ranks
  // call it.
  [[nodiscard]] Checkpoint state() const;
  // The next step is the one after checkpoint.loss.size().
  void set_state(const Checkpoint& checkpoint);

 private:
  // A block's backward needs these of its forward. The head has one too, without u and a.
  struct Saved {
    u16* h = nullptr;  // before the norm
    u16* n = nullptr;  // behind the norm
    float* inv_rms = nullptr;
    u16* u = nullptr;  // before GELU
    u16* a = nullptr;
  };

  void allocate(std::string_view text);
  // Of a micro-batch.
  void forward(int64_t batch, bool first_step);
  void backward(int64_t batch, bool first_step);
  void norm_grad(size_t index, const u16* d_residual, float* small);
  // Sums bf16 activations over the ranks of tensor parallelism, in place.
  void sum_over_tp(u16* activations);
  [[nodiscard]] int64_t square_count() const;
  void square_sums();
  void optimize();
  void gather(const Rank& group, const float* from, float* to, int64_t count) const;
  [[nodiscard]] std::vector<float> whole(const float* shards) const;
  [[nodiscard]] std::vector<float> shard(const std::vector<float>& whole) const;

  Backend& backend_;
  TrainConfig config_;
  Ranks ranks_;
  Parameters whole_parameters_;
  Parameters parameters_;  // of this rank
  GradSum grad_sum_;
  Agreement run_agreement_, plan_agreement_;
  AdamConfig adam_;
  std::optional<Linears> linears_;

  u8* text_ = nullptr;
  u32 text_bytes_ = 0;
  u32* step_ = nullptr;
  StepScalars* schedule_ = nullptr;
  float* curve_ = nullptr;  // [steps]
  float* master_ = nullptr;
  float* m_ = nullptr;
  float* v_ = nullptr;
  float* grad_ = nullptr;
  u16* copy_ = nullptr;  // the weights in bf16
  u8* slots_ = nullptr;
  u8* targets_ = nullptr;
  std::vector<Saved> saved_;  // [layers + 1]
  u16* y_ = nullptr;          // what a block adds; in backward the gradient behind its norm
  u16* dh_ = nullptr;
  u16* da_ = nullptr;
  u16* logits_ = nullptr;
  u16* dlogits_ = nullptr;
  float* losses_ = nullptr;       // [tokens], of all ranks
  float* partials_ = nullptr;     // of one sum at a time
  float* own_squares_ = nullptr;  // of this rank's gradients
  float* squares_ = nullptr;      // of all gradients
  float* small_ = nullptr;        // gradients of embeddings and gains that are not summed yet
};

}  // namespace train
