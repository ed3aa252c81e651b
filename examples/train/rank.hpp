// A rank of a run: which share of each step it takes, and of each weight it holds (FSDP). A run on one
// device has one rank.
#pragma once

#include <float8/float8.hpp>

namespace train {

struct Rank {
  int index = 0;
  int count = 1;
  const float8::Communicator* communicator = nullptr;  // null: there is one rank

  [[nodiscard]] bool is_alone() const { return count == 1; }
  [[nodiscard]] float8_nccl_comm handle() const {
    return communicator == nullptr ? nullptr : communicator->get();
  }
};

}  // namespace train
