// The model's weights lie end to end in one array, so that one kernel updates them all: first the
// matrices, which decay, then embeddings and gains, which do not. Master weights, gradients, both
// moments and the bf16 copy have this layout.
//
//   weights   := block[layers] head embedding gain
//   block     := up[ffn][hidden] down[hidden][ffn]     of each the rows of the rank
//   head      := [kBytes][hidden]                      likewise
//   embedding := [context][kBytes][hidden / context]
//   gain      := [layers + 1][hidden]      of the norm before each block and before the head
#pragma once

#include <span>

#include "config.hpp"

namespace train {

// How the ranks of tensor parallelism share a weight out.
enum class Split { kNone, kRows, kColumns };

struct LinearShape {
  std::string name;  // "block.3.up"
  Split split = Split::kNone;
  int64_t n = 0;
  int64_t k = 0;
  int64_t rows = 0;      // of n that a rank has
  int64_t offset = 0;    // where its weight begins
  double deviation = 0;  // of its initial weights
};

struct Parameters {
  std::vector<LinearShape> linears;  // up and down of each block, then the head
  int64_t decayed = 0;
  int64_t embedding = 0;
  int64_t gain = 0;
  int64_t count = 0;

  // Those of one of fsdp * tp ranks. n and k are those of its tensor-parallel part, of which it has
  // an equal part of the rows; of embeddings and gains it has all.
  explicit Parameters(const TrainConfig& config, int fsdp = 1, int tp = 1);
  [[nodiscard]] std::vector<float> initial(const TrainConfig& config) const;
};

}  // namespace train
