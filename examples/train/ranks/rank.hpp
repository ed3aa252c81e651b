// The place of a device in a run: which share of each step it takes, and of each weight it holds. A run
// on one device has one rank.
//
//   fsdp    ranks that share out the rows of every weight, and the predictions of a step
//   tp      ranks that share out the inner width of every block (tensor parallel); they take the
//           same predictions
//   world   all of them: rank fsdp * tp count + tp
#pragma once

#include <float8/float8.hpp>

namespace train {

// A place in a group of ranks.
struct Rank {
  int index = 0;
  int count = 1;
  const float8::Communicator* communicator = nullptr;  // null: there is one rank

  [[nodiscard]] bool is_alone() const { return count == 1; }
  [[nodiscard]] float8_nccl_comm handle() const {
    return communicator == nullptr ? nullptr : communicator->get();
  }
};

struct Ranks {
  Rank world, fsdp, tp;
};

}  // namespace train
