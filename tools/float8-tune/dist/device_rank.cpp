#include "tools/float8-tune/dist/device_rank.hpp"

#include <mutex>
#include <thread>

#include "runtime/c_abi/common.hpp"
#include "runtime/device/context_state.hpp"

namespace f8::cli {

static_assert(static_cast<int>(ErrorCode::kInvalidArgument) + 1 == FLOAT8_INVALID_ARGUMENT &&
              static_cast<int>(ErrorCode::kOutOfMemory) + 1 == FLOAT8_OUT_OF_MEMORY);

Status of_call(const float8::Status& status) {
  if (status) return {};
  const int code = status.code();
  return fail(
      code <= FLOAT8_OUT_OF_MEMORY ? static_cast<ErrorCode>(code - 1) : ErrorCode::kInternal, "{}",
      status.message());
}

Result<std::unique_ptr<DeviceRank>> DeviceRank::create(int index, int device, bool emulate,
                                                       const std::string& table) {
  float8::ContextOptions options;
  options.emulate = emulate;
  std::unique_ptr<DeviceRank> rank(
      new DeviceRank(index, F8_TRY(of_call(float8::Context::create(device, options)))));
  if (!table.empty()) F8_TRY(of_call(rank->context_.load_table(table)));
  runtime::Context& context = *rank->context_.get()->context;
  const auto loaded = context.table();
  rank->table_hash_ = loaded == nullptr ? "none" : loaded->hash();
  rank->driver_ = &context.state().driver;
  rank->primary_ = context.state().primary;
  const runtime::ScopedContext current(*rank->driver_, rank->primary_);
  F8_TRY(current.status());
  F8_TRY(rank->driver_->check(rank->driver_->stream_create(&rank->stream_, CU_STREAM_NON_BLOCKING),
                              "cuStreamCreate"));
  return rank;
}

DeviceRank::~DeviceRank() {
  release();
  if (stream_ == nullptr) return;
  const runtime::ScopedContext current(*driver_, primary_);
  driver_->stream_destroy(stream_);
}

Result<void*> DeviceRank::allocate(size_t bytes) {
  const runtime::ScopedContext current(*driver_, primary_);
  F8_TRY(current.status());
  CUdeviceptr memory = 0;
  const size_t some = std::max<size_t>(bytes, 16);
  F8_TRY(driver_->check(driver_->mem_alloc(&memory, some), "cuMemAlloc"));
  memory_.push_back(memory);
  F8_TRY(driver_->check(driver_->memset_d8_async(memory, 0, some, stream_), "cuMemsetD8Async"));
  return reinterpret_cast<void*>(memory);
}

Result<void*> DeviceRank::upload(const void* from, size_t bytes) {
  void* const memory = F8_TRY(allocate(bytes));
  const runtime::ScopedContext current(*driver_, primary_);
  F8_TRY(driver_->check(
      driver_->memcpy_htod_async(reinterpret_cast<CUdeviceptr>(memory), from, bytes, stream_),
      "cuMemcpyHtoDAsync"));
  F8_TRY(driver_->check(driver_->stream_synchronize(stream_), "cuStreamSynchronize"));
  return memory;
}

Result<std::vector<unsigned char>> DeviceRank::download(const void* from, size_t bytes) {
  std::vector<unsigned char> out(bytes);
  const runtime::ScopedContext current(*driver_, primary_);
  F8_TRY(current.status());
  F8_TRY(driver_->check(
      driver_->memcpy_dtoh_async(out.data(), reinterpret_cast<CUdeviceptr>(from), bytes, stream_),
      "cuMemcpyDtoHAsync"));
  F8_TRY(driver_->check(driver_->stream_synchronize(stream_), "cuStreamSynchronize"));
  return out;
}

void DeviceRank::release() {
  if (driver_ == nullptr) return;
  const runtime::ScopedContext current(*driver_, primary_);
  for (const CUdeviceptr memory : std::exchange(memory_, {})) driver_->mem_free(memory);
}

Status join_all(const DeviceRanks& ranks, int timeout_ms) {
  std::vector<const float8::Context*> contexts;
  for (const auto& rank : ranks) contexts.push_back(&rank->context());
  auto communicators = F8_TRY(of_call(float8::Communicator::create(contexts, timeout_ms)));
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i]->join(std::move(communicators[i]));
  return {};
}

Status run_ranks(const DeviceRanks& ranks, const std::function<Status(DeviceRank&)>& body) {
  Status first;
  std::mutex mutex;
  {
    std::vector<std::jthread> threads;
    for (const auto& rank : ranks) {
      threads.emplace_back([&] {
        const Status done = body(*rank);
        if (done) return;
        const std::lock_guard lock(mutex);
        if (first) first = done;
        rank->communicator().abort();
      });
    }
  }
  return first;
}

}  // namespace f8::cli
