// The model's weights lie end to end in one array, so that one kernel updates them all: first the
// matrices, which decay, then embeddings and gains, which do not. Master weights, gradients, both
// moments and the bf16 copy have this layout.
//
//   weights   := block[layers] head embedding gain
//   block     := up[ffn][hidden] down[hidden][ffn]     of each the shard of the rank
//   head      := [kBytes][hidden]                      likewise
//   embedding := [context][kBytes][hidden / context]
//   gain      := [layers + 1][hidden]      of the norm before each block and before the head
#pragma once

#include <span>

#include "config.hpp"
#include "ranks/rank.hpp"

namespace train {

// How the ranks of tensor parallelism share a weight out.
enum class Split { kNone, kRows, kColumns };

struct LinearShape {
  std::string name;  // "block.3.up"
  Split split = Split::kNone;
  int64_t n = 0;
  int64_t k = 0;
  // FSDP rank r has the rows of n from r * shard_rows on, in an array of shard_rows. The last ranks may
  // have fewer of them, or none; nobody reads what is behind them.
  int64_t shard_rows = 0;
  int64_t rows = 0;         // this rank's
  int64_t offset = 0;       // where its weight begins
  int64_t chunk_rows = 0;   // rows whose squares one sum has; a shard has whole chunks
  int64_t first_chunk = 0;  // of n's, among all chunks
  double deviation = 0;     // of its initial weights

  [[nodiscard]] int64_t first_row(const Rank& fsdp) const { return fsdp.index * shard_rows; }
};

struct Parameters {
  std::vector<LinearShape> linears;  // up and down of each block, then the head
  int64_t decayed = 0;
  int64_t embedding = 0;
  int64_t gain = 0;
  int64_t count = 0;
  int64_t chunks = 0;

  // Those of a rank. n and k are those of its tensor-parallel part, whose rows the FSDP ranks share
  // out; of embeddings and gains it has all.
  explicit Parameters(const TrainConfig& config, const Rank& fsdp = {}, int tp = 1);
  [[nodiscard]] std::vector<float> initial(const TrainConfig& config) const;
};

}  // namespace train
