// The flight recorder: what the host has called on each rank of the communicators that float8 makes for
// the devices of one process, so that a rank that waits in vain can say which rank did not come.
//
//   seen      float8's collectives and waits. A captured call is recorded when it is captured; replays of
//             graphs, and what a program asks of NCCL itself, are not seen
//   kept      the numbers of calls, and the last kKept calls of each rank, by which ranks that call
//             different operations are found
//   cost      recording takes no lock and allocates nothing
//   unknown   communicators of other origin, whose ranks may be other processes, have no recorder
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "runtime/distributed/collective_call.hpp"

struct ncclComm;

namespace f8::runtime {

class FlightRecorder;

// `ranks` are those of one communicator, in order. Beyond 1,024 ranks of all communicators there is no
// recorder.
void start_recording(std::span<ncclComm* const> ranks);
// The communicator is about to be destroyed or aborted; the recorders of its other ranks know that.
void stop_recording(const ncclComm* communicator, bool aborted);
void record_call(const ncclComm* communicator, const CollectiveCall& call);

// A rank that waits for its stream.
class RecordedWait {
 public:
  explicit RecordedWait(const ncclComm* communicator);
  // The first other rank that has aborted the communicator.
  [[nodiscard]] std::optional<int> aborted_rank() const;
  // Says which ranks this one waits for, and in which operation, as the end of a message.
  [[nodiscard]] std::string diagnosis() const;

 private:
  std::shared_ptr<const FlightRecorder> recorder_;  // null: there is none
  int rank_ = 0;
};

}  // namespace f8::runtime
