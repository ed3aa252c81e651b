// Delayed scaling: the scale state of a model's linears.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "float8/linear.hpp"
#include "float8/scales.h"

namespace float8 {

struct ScalesOptions {
  int history = 16;
  float8_scale_from scale_from = FLOAT8_SCALE_FROM_MAX;
  int margin = 0;
  float8_non_finite non_finite = FLOAT8_PROPAGATE;
  // The model's expert linears (Experts::get, Moe::linear), whose indices follow those of `linears`.
  std::vector<const float8_experts*> experts = {};
};

// How the state of delayed scaling of a model's linears is laid out. The state itself is device
// memory of the caller's.
class Scales {
 public:
  static Result<Scales> plan(const Context& context,
                             const std::vector<const float8_linear*>& linears,
                             const ScalesOptions& options = {}) {
    float8_scales_desc c{};
    c.struct_size = sizeof c;
    c.linears = linears.data();
    c.count = linears.size();
    c.history = options.history;
    c.scale_from = options.scale_from;
    c.margin = options.margin;
    c.non_finite = options.non_finite;
    c.experts = options.experts.data();
    c.experts_count = options.experts.size();
    float8_scales* handle = nullptr;
    const float8_status status = float8_scales_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Scales(handle, linears.size() + options.experts.size());
  }
  [[nodiscard]] std::size_t bytes() const { return float8_scales_bytes(handle_.get()); }
  Status init(void* state, float8_stream stream) const {
    return Status(float8_scales_init(handle_.get(), state, stream));
  }
  // Returns the slots of the linear that was the index-th of the list, expert linears behind the
  // others.
  [[nodiscard]] Result<ScaleSlots> slots(void* state, std::size_t index) const {
    ScaleSlots slots{};
    const float8_status status = float8_scales_slots(handle_.get(), state, index, &slots);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return slots;
  }
  // The end of a step: all-reduce of the amaxes (null: one rank), then the next step's scales.
  Status sync(void* state, float8_nccl_comm communicator, float8_stream stream) const {
    return Status(float8_scales_sync(handle_.get(), state, communicator, stream));
  }
  // The same, but a step with *found_inf != 0, in device memory, is discarded.
  Status sync_unless(void* state, const float* found_inf, float8_nccl_comm communicator,
                     float8_stream stream) const {
    return Status(float8_scales_sync_unless(handle_.get(), state, found_inf, communicator, stream));
  }
  // For each linear of the list, nonzero if an operand has no scale yet, or grows from zero: its
  // calls then have first_step. It waits for the stream.
  [[nodiscard]] Result<std::vector<std::int32_t>> first_steps(const void* state,
                                                              float8_stream stream) const {
    std::vector<std::int32_t> first(count_);
    const float8_status status =
        float8_scales_first_steps(handle_.get(), state, first.data(), first.size(), stream);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return first;
  }
  // Sets *found_inf, in device memory, to 1 if the step recorded an amax that is not finite.
  Status found_inf(void* state, float8_nccl_comm communicator, float* found_inf,
                   float8_stream stream) const {
    return Status(float8_scales_found_inf(handle_.get(), state, communicator, found_inf, stream));
  }
  // Drops what the step recorded.
  Status discard(void* state, float8_stream stream) const {
    return Status(float8_scales_discard(handle_.get(), state, stream));
  }
  // The state for a checkpoint, and back; both wait for the stream.
  [[nodiscard]] Result<std::vector<unsigned char>> save(const void* state,
                                                        float8_stream stream) const {
    std::vector<unsigned char> bytes(float8_scales_saved_bytes(handle_.get()));
    const float8_status status =
        float8_scales_save(handle_.get(), state, bytes.data(), bytes.size(), stream);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return bytes;
  }
  Status load(void* state, const std::vector<unsigned char>& bytes, float8_stream stream) const {
    return load(state, bytes.data(), bytes.size(), stream);
  }
  Status load(void* state, const void* bytes, std::size_t size, float8_stream stream) const {
    return Status(float8_scales_load(handle_.get(), state, bytes, size, stream));
  }
  Status save_file(const void* state, const std::string& path, float8_stream stream) const {
    return Status(float8_scales_save_file(handle_.get(), state, path.c_str(), stream));
  }
  Status load_file(void* state, const std::string& path, float8_stream stream) const {
    return Status(float8_scales_load_file(handle_.get(), state, path.c_str(), stream));
  }
  [[nodiscard]] float8_scales* get() const { return handle_.get(); }

 private:
  Scales(float8_scales* handle, std::size_t count) : handle_(handle), count_(count) {}
  detail::Handle<float8_scales, float8_scales_destroy> handle_;
  std::size_t count_;  // of all linears
};

}  // namespace float8
