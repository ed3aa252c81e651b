// A rank of `verify-dist`: a device, a stream, memory, and its place in a communicator of all ranks.
#pragma once

#include <float8/float8.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "runtime/device/driver.hpp"

namespace f8::cli {

// An error of a call of the C interface.
[[nodiscard]] Status of_call(const float8::Status& status);
template <class T>
[[nodiscard]] Result<T> of_call(float8::Result<T> result) {
  if (result) return std::move(result).value();
  return std::unexpected(of_call(float8::Status(result.error().code)).error());
}

class DeviceRank {
 public:
  [[nodiscard]] static Result<std::unique_ptr<DeviceRank>> create(int index, int device,
                                                                  bool emulate,
                                                                  const std::string& table);
  ~DeviceRank();
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] const float8::Context& context() const { return context_; }
  [[nodiscard]] const std::string& table_hash() const { return table_hash_; }
  [[nodiscard]] const runtime::Driver& driver() const { return *driver_; }
  [[nodiscard]] CUcontext primary() const { return primary_; }
  [[nodiscard]] float8_stream stream() const { return stream_; }
  [[nodiscard]] float8::Communicator& communicator() { return *communicator_; }
  void join(float8::Communicator communicator) { communicator_.emplace(std::move(communicator)); }

  // Zeroed memory, freed by release() or with the rank.
  [[nodiscard]] Result<void*> allocate(size_t bytes);
  [[nodiscard]] Result<void*> upload(const void* from, size_t bytes);
  // Waits for the stream.
  [[nodiscard]] Result<std::vector<unsigned char>> download(const void* from, size_t bytes);
  void release();

 private:
  DeviceRank(int index, float8::Context context) : index_(index), context_(std::move(context)) {}
  int index_;
  float8::Context context_;
  const runtime::Driver* driver_ = nullptr;
  CUcontext primary_ = nullptr;
  CUstream stream_ = nullptr;
  std::string table_hash_;
  std::optional<float8::Communicator> communicator_;
  std::vector<CUdeviceptr> memory_;
};

using DeviceRanks = std::vector<std::unique_ptr<DeviceRank>>;

// Puts the ranks into one communicator.
[[nodiscard]] Status join_all(const DeviceRanks& ranks, int timeout_ms);
// Runs `body` for each rank on a thread of its own. Where one fails the others stop waiting for it; the
// error is the first one.
[[nodiscard]] Status run_ranks(const DeviceRanks& ranks,
                               const std::function<Status(DeviceRank&)>& body);

}  // namespace f8::cli
