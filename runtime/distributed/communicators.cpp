#include "runtime/distributed/communicators.hpp"

#include <algorithm>
#include <thread>

#include "runtime/device/context_state.hpp"
#include "runtime/distributed/emulated_ranks.hpp"
#include "runtime/distributed/flight_recorder.hpp"
#include "runtime/distributed/nccl_api.hpp"

namespace f8::runtime {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLook{1};  // between two looks at a stream

struct Place {
  int rank = 0;
  int ranks = 0;
};

Result<Place> place_of(const Nccl& nccl, ncclComm* communicator) {
  Place place;
  F8_TRY(nccl.check(nccl.comm_user_rank(communicator, &place.rank), "ncclCommUserRank"));
  F8_TRY(nccl.check(nccl.comm_count(communicator, &place.ranks), "ncclCommCount"));
  return place;
}

ncclDataType_t type_of(Dtype type) {
  return type == Dtype::kF32 ? ncclFloat32 : type == Dtype::kF16 ? ncclFloat16 : ncclBfloat16;
}

}  // namespace

Result<std::vector<ncclComm*>> make_communicators(std::span<Context* const> contexts,
                                                  std::chrono::milliseconds timeout) {
  const auto emulated = std::ranges::count_if(
      contexts, [](const Context* context) { return context->options().emulate; });
  if (emulated > 0 && std::cmp_not_equal(emulated, contexts.size())) {
    return fail(ErrorCode::kInvalidArgument,
                "{} of {} contexts are emulated; a communicator has emulated devices or GPUs",
                emulated, contexts.size());
  }
  if (emulated > 0) return make_emulated_ranks(static_cast<int>(contexts.size()), timeout);
  std::vector<int> devices;
  for (const Context* context : contexts) {
    const int device = context->device().ordinal;
    if (std::ranges::find(devices, device) != devices.end()) {
      return fail(ErrorCode::kInvalidArgument,
                  "two contexts are of device {}; each rank has a device of its own", device);
    }
    devices.push_back(device);
  }
  const Nccl& library = *F8_TRY(nccl());
  std::vector<ncclComm*> out(contexts.size());
  F8_TRY(
      library.check(library.comm_init_all(out.data(), static_cast<int>(out.size()), devices.data()),
                    "ncclCommInitAll"));
  start_recording(out);
  return out;
}

void destroy_communicator(ncclComm* communicator) {
  stop_recording(communicator, false);
  if (const auto library = nccl_of(communicator)) (*library)->comm_destroy(communicator);
}

void abort_communicator(ncclComm* communicator) {
  stop_recording(communicator, true);
  if (const auto library = nccl_of(communicator)) (*library)->comm_abort(communicator);
}

Status check_communicator(const Context& context, const char* name, const ncclComm* communicator) {
  const bool emulate = context.options().emulate;
  if (emulate == is_emulated(communicator)) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "{} is {}; make communicators of emulated devices by float8_comms_create, and for "
              "them alone",
              name,
              emulate ? "NCCL's, and the device is emulated"
                      : "of emulated devices, and the device is a GPU");
}

Status wait_for_ranks(Context& context, ncclComm* communicator, const char* operation,
                      std::chrono::milliseconds timeout, Stream stream) {
  F8_TRY(check_communicator(context, "communicator", communicator));
  const Nccl& library = *F8_TRY(nccl_of(communicator));
  const Place place = F8_TRY(place_of(library, communicator));
  const Context::State& state = context.state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const RecordedWait wait(communicator);
  const auto deadline = Clock::now() + timeout;
  for (bool first = true;; first = false) {
    const CUresult done = state.driver.stream_query(stream);
    if (done != CUDA_ERROR_NOT_READY) {
      F8_TRY(state.driver.check(done, "cuStreamQuery"));
    }
    ncclResult_t failed = ncclSuccess;
    F8_TRY(library.check(library.comm_async_error(communicator, &failed), "ncclCommGetAsyncError"));
    const bool is_wrong = failed != ncclSuccess && failed != ncclInProgress;
    if (done == CUDA_SUCCESS && !is_wrong) return {};
    if (const auto aborted = wait.aborted_rank()) {
      return fail(ErrorCode::kCuda, "{}: rank {} of {}: rank {} has aborted the communicator",
                  operation, place.rank, place.ranks, *aborted);
    }
    if (is_wrong) {
      return fail(ErrorCode::kCuda, "{}: rank {} of {}: another rank failed ({}, code {})",
                  operation, place.rank, place.ranks, library.get_error_string(failed),
                  static_cast<int>(failed));
    }
    if (!first && Clock::now() > deadline) {
      return fail(ErrorCode::kCuda, "{}: rank {} of {} is not done after {} ms; {}", operation,
                  place.rank, place.ranks, timeout.count(), wait.diagnosis());
    }
    std::this_thread::sleep_for(kLook);
  }
}

Status run_collective(Collective what, const void* from, void* to, size_t count, Dtype type,
                      ncclComm* communicator, Stream stream) {
  const Nccl& library = *F8_TRY(nccl_of(communicator));
  const ncclDataType_t element = type_of(type);
  switch (what) {
    case Collective::kAllGather:
      record_call(communicator, {CollectiveKind::kAllGather, count, element});
      return library.check(library.all_gather(from, to, count, element, communicator, stream),
                           "ncclAllGather");
    case Collective::kReduceScatter:
      record_call(communicator, {CollectiveKind::kReduceScatter, count, element});
      return library.check(
          library.reduce_scatter(from, to, count, element, ncclSum, communicator, stream),
          "ncclReduceScatter");
    case Collective::kAllReduce:
      record_call(communicator, {CollectiveKind::kAllReduce, count, element});
      return library.check(
          library.all_reduce(from, to, count, element, ncclSum, communicator, stream),
          "ncclAllReduce");
  }
  return {};
}

}  // namespace f8::runtime
