// Several devices: a rank's communicator and its calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "float8/context.hpp"
#include "float8/distributed.h"

namespace float8 {

using GatherArgs = float8_gather_args;

// A rank's communicator, of float8_comms_create.
class Communicator {
 public:
  // Rank r's is on the device of contexts[r].
  static Result<std::vector<Communicator>> create(const std::vector<const Context*>& contexts,
                                                  int timeout_ms = 0) {
    std::vector<float8_context*> handles;
    for (const Context* context : contexts) handles.push_back(context->get());
    std::vector<float8_nccl_comm> made(handles.size());
    const float8_status status =
        float8_comms_create(handles.data(), handles.size(), timeout_ms, made.data());
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    std::vector<Communicator> out;
    for (float8_nccl_comm one : made) out.push_back(Communicator(one));
    return out;
  }
  // Ends what other ranks wait for, after a failure; the communicator is gone then.
  void abort() { float8_comm_abort(handle_.release()); }
  // Waits for the stream; `operation` is for the message of a failure.
  Status wait(const Context& context, const std::string& operation, float8_stream stream,
              int timeout_ms = 0) const {
    return Status(float8_comm_wait(context.get(), get(), operation.c_str(), timeout_ms, stream));
  }
  Status sync_amax(std::uint32_t* amax_bits, std::size_t count, float8_stream stream) const {
    return Status(float8_amax_sync(amax_bits, count, get(), stream));
  }
  Status gather_tensor(const Context& context, GatherArgs args, float8_stream stream) const {
    args.communicator = get();
    return Status(float8_gather_tensor(context.get(), &args, stream));
  }
  // The bytes of GatherArgs::workspace with this view of the whole tensor.
  [[nodiscard]] static std::size_t gather_workspace_bytes(const float8_tensor& whole,
                                                          std::int64_t shard_rows,
                                                          std::int32_t ranks) {
    return float8_gather_workspace_bytes(&whole, shard_rows, ranks);
  }
  Status all_gather(const void* from, void* to, std::size_t count, float8_dtype dtype,
                    float8_stream stream) const {
    return Status(float8_all_gather(from, to, count, dtype, get(), stream));
  }
  Status reduce_scatter(const void* from, void* to, std::size_t count, float8_dtype dtype,
                        float8_stream stream) const {
    return Status(float8_reduce_scatter(from, to, count, dtype, get(), stream));
  }
  Status all_reduce(const void* from, void* to, std::size_t count, float8_dtype dtype,
                    float8_stream stream) const {
    return Status(float8_all_reduce(from, to, count, dtype, get(), stream));
  }
  [[nodiscard]] float8_nccl_comm get() const { return handle_.get(); }

 private:
  explicit Communicator(float8_nccl_comm handle) : handle_(handle) {}
  detail::Handle<ncclComm, float8_comm_destroy> handle_;
};

}  // namespace float8
