// Streams of an emulated device. Work is done when it is enqueued, on the caller's thread; a stream
// under capture keeps it in a graph instead.
//
// A stream is one thread's at a time, as on a device. Streams that wait for an event of a capturing
// stream join the capture, which ends for all of them at once; unlike a device, nothing insists
// that they were joined back.
#pragma once

#include <functional>
#include <vector>

#include "runtime/device/driver.hpp"

namespace f8::runtime::emulation {

using Operation = std::function<CUresult()>;

struct Graph {
  std::vector<Operation> operations;  // in the order of their enqueueing
};

// Gives the graph that the stream's work goes to, or null if the work is done at once. An invalid
// handle gives an error.
[[nodiscard]] CUresult capture_of(CUstream stream, Graph*& graph);

template <class Work>
[[nodiscard]] CUresult enqueue(CUstream stream, Work&& work) {
  Graph* graph = nullptr;
  if (const CUresult result = capture_of(stream, graph); result != CUDA_SUCCESS) return result;
  if (graph == nullptr) return work();
  graph->operations.emplace_back(std::forward<Work>(work));
  return CUDA_SUCCESS;
}

// Keeps the reason why a call of this thread failed, for the driver's description of the error.
[[nodiscard]] CUresult refuse(CUresult result, std::string why);
[[nodiscard]] const char* last_refusal();

// The functions of streams, events and graphs.
void fill_stream_functions(Driver& table);

}  // namespace f8::runtime::emulation
