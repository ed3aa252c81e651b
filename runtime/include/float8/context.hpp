// Context: a device and the kernels loaded on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "float8/base.hpp"
#include "float8/context.h"
#include "float8/counters.h"
#include "float8/optimizer.h"
#include "float8/weights.h"

namespace float8 {

using FingerprintArgs = float8_fingerprint_args;
using AdamwTensor = float8_adamw_tensor;
using AdamwArgs = float8_adamw_args;

struct ContextOptions {
  std::string cache_dir = {};  // empty: the default
  bool serial_launch = false;
  bool check_pointers = false;
  bool emulate = false;   // a device in host memory instead of a GPU
  bool no_table = false;  // without the built-in tuning table
  bool moves_saved = false;
  int tune_on_first_use = 0;  // milliseconds a shape
  std::string database = {};  // empty: $FLOAT8_DB
};

class Context {
 public:
  static Result<Context> create(int device, const ContextOptions& options = {}) {
    float8_context_options c{};
    c.struct_size = sizeof c;
    c.cache_dir = options.cache_dir.empty() ? nullptr : options.cache_dir.c_str();
    c.serial_launch = options.serial_launch ? 1 : 0;
    c.check_pointers = options.check_pointers ? 1 : 0;
    c.emulate = options.emulate ? 1 : 0;
    c.no_table = options.no_table ? 1 : 0;
    c.moves_saved = options.moves_saved ? 1 : 0;
    c.tune_on_first_use = options.tune_on_first_use;
    c.database = options.database.empty() ? nullptr : options.database.c_str();
    float8_context* handle = nullptr;
    const float8_status status = float8_context_create(device, &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Context(handle);
  }
  // Gives the table's hash, for ranks to compare.
  Result<std::uint64_t> load_table(const std::string& path) {
    std::uint64_t hash = 0;
    const float8_status status = float8_context_load_table(handle_.get(), path.c_str(), &hash);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return hash;
  }
  // The tuning table in use, for ranks that are to have the same: its text, and its hash (0: none).
  [[nodiscard]] Result<std::string> table() const {
    return detail::text([this](char* text, std::size_t bytes, std::size_t* needed) {
      return float8_context_table(handle_.get(), text, bytes, needed, nullptr);
    });
  }
  [[nodiscard]] std::uint64_t table_hash() const {
    std::uint64_t hash = 0;
    float8_context_table(handle_.get(), nullptr, 0, nullptr, &hash);
    return hash;
  }
  // Takes the text that table() gave on another rank; gives its hash.
  Result<std::uint64_t> set_table(const std::string& text) {
    std::uint64_t hash = 0;
    const float8_status status = float8_context_set_table(handle_.get(), text.c_str(), &hash);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return hash;
  }
  // Sets noop flags to 0 where weights changed since the call before.
  Status compare_weights(const FingerprintArgs* args, std::size_t count,
                         float8_stream stream) const {
    return Status(float8_weights_compare(handle_.get(), args, count, stream));
  }
  // A step of AdamW of the weights of `args`.
  Status adamw(const AdamwArgs& args, float8_stream stream) const {
    return Status(float8_adamw(handle_.get(), &args, stream));
  }
  Status clear_counters(float8_cast_counters* counters, std::size_t count,
                        float8_stream stream) const {
    return Status(float8_counters_clear(handle_.get(), counters, count, stream));
  }
  // Copies to host memory at `to`, in stream order.
  Status snapshot_counters(const float8_cast_counters* counters, std::size_t count,
                           float8_cast_counters* to, float8_stream stream) const {
    return Status(float8_counters_snapshot(handle_.get(), counters, count, to, stream));
  }
  // The bytes at the front of a workspace that belong to float8 between calls.
  [[nodiscard]] std::size_t workspace_reserved_bytes() const {
    return float8_workspace_reserved_bytes(handle_.get());
  }
  // The device, the options and the tuning table in use, for people.
  [[nodiscard]] Result<std::string> info() const {
    return detail::text([this](char* text, std::size_t bytes, std::size_t* needed) {
      return float8_context_info(handle_.get(), text, bytes, needed);
    });
  }
  [[nodiscard]] float8_context* get() const { return handle_.get(); }

 private:
  explicit Context(float8_context* handle) : handle_(handle) {}
  detail::Handle<float8_context, float8_context_destroy> handle_;
};

}  // namespace float8
