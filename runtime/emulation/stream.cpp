#include "runtime/emulation/stream.hpp"

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

namespace f8::runtime::emulation {
namespace {

struct EmulatedStream;

struct Capture {
  Graph graph;
  EmulatedStream* origin = nullptr;
  std::vector<EmulatedStream*> streams;  // the origin and those that joined
  bool broken = false;                   // by a call that a capture cannot hold
};

struct EmulatedStream {
  std::shared_ptr<Capture> capture;
};

struct EmulatedEvent {
  std::weak_ptr<Capture> capture;  // that it was last recorded in, until the capture ends
};

// The streams or events there are: a handle is the address of one, or is refused.
template <class T>
class Live {
 public:
  T* add() {
    auto made = std::make_unique<T>();
    const std::lock_guard lock(mutex_);
    T* const address = made.get();
    all_.emplace(address, std::move(made));
    return address;
  }
  T* find(const void* handle) {
    const std::shared_lock lock(mutex_);
    const auto found = all_.find(handle);
    return found == all_.end() ? nullptr : found->second.get();
  }
  void remove(const T* one) {
    const std::lock_guard lock(mutex_);
    all_.erase(one);
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<const void*, std::unique_ptr<T>> all_;
};

template <class T>
Live<T>& live() {
  static Live<T> all;
  return all;
}

thread_local std::string g_refusal;

bool is_default(CUstream stream) {
  return stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

EmulatedStream* stream_of(CUstream handle) {
  return live<EmulatedStream>().find(handle);
}

EmulatedEvent* event_of(CUevent handle) {
  return live<EmulatedEvent>().find(handle);
}

CUresult no_stream() {
  return refuse(CUDA_ERROR_INVALID_HANDLE, "not a stream of an emulated device");
}
CUresult no_event() {
  return refuse(CUDA_ERROR_INVALID_HANDLE, "not an event of an emulated device");
}

CUresult stream_create(CUstream* out, unsigned) {
  *out = reinterpret_cast<CUstream>(live<EmulatedStream>().add());
  return CUDA_SUCCESS;
}

CUresult stream_destroy(CUstream handle) {
  if (is_default(handle)) return no_stream();
  EmulatedStream* stream = stream_of(handle);
  if (stream == nullptr) return no_stream();
  if (stream->capture != nullptr) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream is under capture");
  }
  live<EmulatedStream>().remove(stream);
  return CUDA_SUCCESS;
}

// A wait for a stream breaks its capture, as on a device.
CUresult synchronize(CUstream handle) {
  if (is_default(handle)) return CUDA_SUCCESS;
  EmulatedStream* stream = stream_of(handle);
  if (stream == nullptr) return no_stream();
  if (stream->capture == nullptr) return CUDA_SUCCESS;
  stream->capture->broken = true;
  return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                "a stream under capture cannot be synchronized");
}

CUresult begin_capture(CUstream handle, CUstreamCaptureMode) {
  if (is_default(handle)) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the default stream cannot be captured");
  }
  EmulatedStream* stream = stream_of(handle);
  if (stream == nullptr) return no_stream();
  if (stream->capture != nullptr) {
    return refuse(CUDA_ERROR_ILLEGAL_STATE, "the stream is under capture already");
  }
  auto capture = std::make_shared<Capture>();
  capture->origin = stream;
  capture->streams.push_back(stream);
  stream->capture = std::move(capture);
  return CUDA_SUCCESS;
}

CUresult end_capture(CUstream handle, CUgraph* out) {
  *out = nullptr;
  EmulatedStream* stream = is_default(handle) ? nullptr : stream_of(handle);
  if (stream == nullptr || stream->capture == nullptr) {
    return refuse(CUDA_ERROR_ILLEGAL_STATE, "the stream is not under capture");
  }
  if (stream->capture->origin != stream) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "the capture began on another stream");
  }
  const std::shared_ptr<Capture> capture = stream->capture;
  for (EmulatedStream* joined : capture->streams) joined->capture.reset();
  if (capture->broken) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "a call broke the capture");
  }
  *out = reinterpret_cast<CUgraph>(new Graph(std::move(capture->graph)));
  return CUDA_SUCCESS;
}

CUresult event_create(CUevent* out, unsigned) {
  *out = reinterpret_cast<CUevent>(live<EmulatedEvent>().add());
  return CUDA_SUCCESS;
}

CUresult event_destroy(CUevent handle) {
  EmulatedEvent* event = event_of(handle);
  if (event == nullptr) return no_event();
  live<EmulatedEvent>().remove(event);
  return CUDA_SUCCESS;
}

CUresult event_record(CUevent handle, CUstream on) {
  EmulatedEvent* event = event_of(handle);
  if (event == nullptr) return no_event();
  EmulatedStream* stream = is_default(on) ? nullptr : stream_of(on);
  if (!is_default(on) && stream == nullptr) return no_stream();
  event->capture.reset();
  if (stream != nullptr) event->capture = stream->capture;
  return CUDA_SUCCESS;
}

CUresult wait_event(CUstream on, CUevent handle, unsigned) {
  EmulatedEvent* event = event_of(handle);
  if (event == nullptr) return no_event();
  EmulatedStream* stream = is_default(on) ? nullptr : stream_of(on);
  if (!is_default(on) && stream == nullptr) return no_stream();
  const std::shared_ptr<Capture> capture = event->capture.lock();
  if (capture == nullptr || stream == nullptr || stream->capture == capture) return CUDA_SUCCESS;
  if (stream->capture != nullptr) {
    return refuse(CUDA_ERROR_STREAM_CAPTURE_MERGE, "the two streams are captured apart");
  }
  stream->capture = capture;
  stream->capture->streams.push_back(stream);
  return CUDA_SUCCESS;
}

CUresult event_query(CUevent handle) {
  return event_of(handle) == nullptr ? no_event() : CUDA_SUCCESS;
}

CUresult elapsed_time(float*, CUevent, CUevent) {
  return refuse(CUDA_ERROR_NOT_SUPPORTED, "an emulated device has no clock");
}

// An executable graph is a graph that nothing changes any more.
CUresult instantiate(CUgraphExec* out, CUgraph graph, unsigned long long) {
  if (graph == nullptr) return refuse(CUDA_ERROR_INVALID_VALUE, "the graph is null");
  *out = reinterpret_cast<CUgraphExec>(new Graph(*reinterpret_cast<const Graph*>(graph)));
  return CUDA_SUCCESS;
}

CUresult graph_launch(CUgraphExec exec, CUstream stream) {
  if (exec == nullptr) return refuse(CUDA_ERROR_INVALID_VALUE, "the graph is null");
  const auto& operations = reinterpret_cast<const Graph*>(exec)->operations;
  return enqueue(stream, [operations] {
    for (const Operation& operation : operations) {
      if (const CUresult result = operation(); result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
  });
}

CUresult graph_exec_destroy(CUgraphExec exec) {
  delete reinterpret_cast<Graph*>(exec);
  return CUDA_SUCCESS;
}

CUresult graph_destroy(CUgraph graph) {
  delete reinterpret_cast<Graph*>(graph);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult capture_of(CUstream handle, Graph*& graph) {
  graph = nullptr;
  if (is_default(handle)) return CUDA_SUCCESS;
  EmulatedStream* stream = stream_of(handle);
  if (stream == nullptr) return no_stream();
  if (stream->capture != nullptr) graph = &stream->capture->graph;
  return CUDA_SUCCESS;
}

CUresult refuse(CUresult result, std::string why) {
  g_refusal = std::move(why);
  return result;
}

const char* last_refusal() {
  return g_refusal.c_str();
}

void fill_stream_functions(Driver& table) {
  table.stream_create = stream_create;
  table.stream_destroy = stream_destroy;
  table.stream_synchronize = synchronize;
  table.stream_query = synchronize;
  table.stream_wait_event = wait_event;
  table.stream_begin_capture = begin_capture;
  table.stream_end_capture = end_capture;
  table.event_create = event_create;
  table.event_destroy = event_destroy;
  table.event_record = event_record;
  table.event_query = event_query;
  table.event_synchronize = event_query;
  table.event_elapsed_time = elapsed_time;
  table.graph_instantiate = instantiate;
  table.graph_launch = graph_launch;
  table.graph_exec_destroy = graph_exec_destroy;
  table.graph_destroy = graph_destroy;
}

}  // namespace f8::runtime::emulation
