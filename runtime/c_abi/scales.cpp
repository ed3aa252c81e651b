// The state of delayed scaling.
#include <span>

#include "base/file.hpp"
#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/linear.hpp"
#include "runtime/c_abi/ranks.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "runtime/model/scale_checkpoint.hpp"

using namespace f8::c_abi;
using f8::ErrorCode;

namespace {

// Replaces the amaxes of a step by their maxima over ranks, if there are several.
f8::Status reduce(const char* call, const f8::runtime::DelayedScales& delayed, void* state,
                  float8_nccl_comm communicator, float8_stream stream) {
  if (communicator == nullptr || delayed.count() == 0) return {};
  const auto over_ranks =
      F8_TRY(amax_reducer(*delayed.context(), "communicator", communicator, true));
  F8_TRY(delayed.check(call, state, stream));
  return over_ranks(delayed.amaxes(state), delayed.count(), communicator, stream);
}

}  // namespace

float8_status float8_scales_plan(float8_context* context, const float8_scales_desc* desc,
                                 float8_scales** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_scales_desc known;
    F8_TRY(read_struct(desc, "float8_scales_desc", known));
    if (known.count > 0) F8_TRY(need(known.linears, "float8_scales_desc.linears"));
    if (known.experts_count > 0) F8_TRY(need(known.experts, "float8_scales_desc.experts"));
    F8_TRY(check_enum("float8_scales_desc.scale_from", known.scale_from,
                      FLOAT8_SCALE_FROM_MOST_RECENT));
    F8_TRY(check_enum("float8_scales_desc.non_finite", known.non_finite, FLOAT8_SATURATE));
    f8::DelayedOptions options;
    if (known.history != 0) options.history = known.history;
    options.scale_from = known.scale_from == FLOAT8_SCALE_FROM_MAX ? f8::ScaleFrom::kMax
                                                                   : f8::ScaleFrom::kMostRecent;
    options.margin = known.margin;
    options.non_finite = non_finite_of(known.non_finite);
    F8_TRY(f8::validate(options));

    std::vector<size_t> first;
    std::vector<f8::DelayedSlot> slots;
    const auto add = [&](const char* name, size_t i, const auto* handle,
                         const auto& plan_of) -> f8::Status {
      if (handle == nullptr) {
        return f8::fail(ErrorCode::kInvalidArgument, "float8_scales_desc.{}[{}] is NULL", name, i);
      }
      const auto& plan = plan_of(*handle);
      if (plan.context() != context->context) {
        return f8::fail(ErrorCode::kInvalidArgument,
                        "float8_scales_desc.{}[{}] is another context's; give each context's "
                        "linears scales of their own",
                        name, i);
      }
      first.push_back(slots.size());
      const auto& own = plan.scale_slots();
      slots.insert(slots.end(), own.begin(), own.end());
      return {};
    };
    for (size_t i = 0; i < known.count; ++i) {
      F8_TRY(add(
          "linears", i, known.linears[i],
          [](const float8_linear& of) -> const auto& { return *of.linear; }));
    }
    for (size_t i = 0; i < known.experts_count; ++i) {
      F8_TRY(add(
          "experts", i, known.experts[i],
          [](const float8_experts& of) -> const auto& { return *of.experts; }));
    }
    first.push_back(slots.size());
    auto delayed = F8_TRY(f8::runtime::DelayedScales::plan(context->context, slots, options));
    *out = new float8_scales{std::move(delayed), std::move(first)};
    return {};
  });
}

float8_status float8_scales_size(const float8_linear_desc* const* linears, size_t count,
                                 int32_t history, size_t* bytes) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(bytes, "bytes"));
    if (count > 0) F8_TRY(need(linears, "linears"));
    f8::DelayedOptions options;
    if (history != 0) options.history = history;
    F8_TRY(f8::validate(options));
    size_t slots = 0;
    const float8_linear_desc* last = nullptr;
    size_t of_last = 0;
    for (size_t i = 0; i < count; ++i) {
      if (linears[i] != last || i == 0) {  // linears of one description follow each other
        const auto desc = F8_TRY(linear_desc(linears[i]));
        of_last = F8_TRY(f8::runtime::linear_kernels(desc)).slots.size();
        last = linears[i];
      }
      slots += of_last;
    }
    *bytes = f8::runtime::scale_layout(slots, options.history).bytes;
    return {};
  });
}

void float8_scales_destroy(float8_scales* scales) {
  destroy(scales);
}

size_t float8_scales_bytes(const float8_scales* scales) {
  return scales == nullptr ? 0 : scales->delayed.bytes();
}

float8_status float8_scales_init(const float8_scales* scales, void* state, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(scales, "scales"));
    return scales->delayed.init(state, stream);
  });
}

float8_status float8_scales_slots(const float8_scales* scales, void* state, size_t index,
                                  float8_scale_slots* slots) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(slots, "slots"));
    *slots = {};
    F8_TRY(need(scales, "scales"));
    const size_t linears = scales->first.size() - 1;
    if (index >= linears) {
      return f8::fail(ErrorCode::kInvalidArgument, "index is {}, the scales have {} linears", index,
                      linears);
    }
    if (scales->first[index] == scales->first[index + 1]) return {};
    F8_TRY(need(state, "state"));
    *slots = scales->delayed.slots(state, scales->first[index]);
    return {};
  });
}

float8_status float8_scales_sync(const float8_scales* scales, void* state,
                                 float8_nccl_comm communicator, float8_stream stream) {
  return float8_scales_sync_unless(scales, state, nullptr, communicator, stream);
}

float8_status float8_scales_sync_unless(const float8_scales* scales, void* state,
                                        const float* found_inf, float8_nccl_comm communicator,
                                        float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(scales, "scales"));
    F8_TRY(reduce("float8_scales_sync", scales->delayed, state, communicator, stream));
    return scales->delayed.update(state, stream, found_inf);
  });
}

float8_status float8_scales_found_inf(const float8_scales* scales, void* state,
                                      float8_nccl_comm communicator, float* found_inf,
                                      float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(scales, "scales"));
    F8_TRY(reduce("float8_scales_found_inf", scales->delayed, state, communicator, stream));
    return scales->delayed.find_inf(state, found_inf, stream);
  });
}

float8_status float8_scales_first_steps(const float8_scales* scales, const void* state,
                                        int32_t* first_step, size_t count, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(scales, "scales"));
    const size_t linears = scales->first.size() - 1;
    if (count != linears) {
      return f8::fail(ErrorCode::kInvalidArgument,
                      "float8_scales_first_steps: count is {}, the scales have {} linears", count,
                      linears);
    }
    if (count > 0) F8_TRY(need(first_step, "first_step"));
    const auto histories = F8_TRY(scales->delayed.histories(state, stream));
    for (size_t i = 0; i < count; ++i) {
      const size_t first = scales->first[i];
      const auto own = std::span(histories).subspan(first, scales->first[i + 1] - first);
      first_step[i] = f8::reference::is_first_step(own) ? 1 : 0;
    }
    return {};
  });
}

float8_status float8_scales_discard(const float8_scales* scales, void* state,
                                    float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(scales, "scales"));
    return scales->delayed.discard(state, stream);
  });
}

size_t float8_scales_saved_bytes(const float8_scales* scales) {
  return scales == nullptr ? 0 : f8::runtime::saved_state_bytes(scales->delayed);
}

float8_status float8_scales_save(const float8_scales* scales, const void* state, void* buffer,
                                 size_t bytes, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(scales, "scales"));
    F8_TRY(need(buffer, "buffer"));
    return f8::runtime::save_state(scales->delayed, state, {static_cast<std::byte*>(buffer), bytes},
                                   stream);
  });
}

float8_status float8_scales_load(const float8_scales* scales, void* state, const void* buffer,
                                 size_t bytes, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(scales, "scales"));
    F8_TRY(need(buffer, "buffer"));
    return f8::runtime::load_state(scales->delayed, state,
                                   {static_cast<const std::byte*>(buffer), bytes}, stream);
  });
}

float8_status float8_scales_save_file(const float8_scales* scales, const void* state,
                                      const char* path, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(scales, "scales"));
    F8_TRY(need(path, "path"));
    std::string bytes(f8::runtime::saved_state_bytes(scales->delayed), '\0');
    F8_TRY(f8::runtime::save_state(scales->delayed, state, std::as_writable_bytes(std::span(bytes)),
                                   stream));
    return f8::write_file_atomic(path, bytes);
  });
}

float8_status float8_scales_load_file(const float8_scales* scales, void* state, const char* path,
                                      float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(scales, "scales"));
    F8_TRY(need(path, "path"));
    const std::string bytes = F8_TRY(f8::read_file(path));
    f8::Status loaded =
        f8::runtime::load_state(scales->delayed, state, std::as_bytes(std::span(bytes)), stream);
    if (!loaded) loaded.error().message = f8::format("{}: {}", path, loaded.error().message);
    return loaded;
  });
}
