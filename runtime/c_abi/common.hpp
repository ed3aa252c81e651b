// The common part of the C interface's files: the handles, the way out of the library for errors
// and exceptions, and the reading of a caller's structs.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "float8/float8.h"
#include "runtime/attention/attention.hpp"
#include "runtime/c_abi/fork_gate.hpp"
#include "runtime/c_abi/struct_fields.hpp"
#include "runtime/device/context.hpp"
#include "runtime/device/element_type.hpp"
#include "runtime/experts/expert_quantizer.hpp"
#include "runtime/experts/experts.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/linear/linear.hpp"
#include "runtime/linear/tensors/quantizer.hpp"
#include "runtime/linear/tensors/tensor_gemm.hpp"
#include "runtime/lists/quantizer_list.hpp"
#include "runtime/moe/combine.hpp"
#include "runtime/moe/moe.hpp"
#include "runtime/moe/route.hpp"
#include "runtime/quantize/fingerprint.hpp"
#include "runtime/quantize/quantize.hpp"

struct float8_context {
  std::shared_ptr<f8::runtime::Context> context;
};

struct float8_linear {
  std::shared_ptr<const f8::runtime::Linear> linear;
};

struct float8_quantizer {
  std::shared_ptr<const f8::runtime::Quantizer> quantizer;
};

struct float8_quantizer_list {
  f8::runtime::QuantizerList casts;
  std::vector<std::shared_ptr<const f8::runtime::Quantizer>> quantizers;
};

struct float8_gemm_plan {
  f8::runtime::TensorGemm gemm;
};

struct float8_group_layout_plan {
  f8::runtime::GroupLayoutPlan plan;
};

struct float8_moe_route_plan {
  f8::runtime::RoutePlan plan;
};

struct float8_moe_combine_plan {
  f8::runtime::CombinePlan plan;
};

struct float8_experts {
  std::shared_ptr<const f8::runtime::Experts> experts;
};

struct float8_expert_quantizer {
  std::shared_ptr<const f8::runtime::ExpertQuantizer> quantizer;
};

struct float8_moe {
  std::shared_ptr<const f8::runtime::Moe> moe;
  std::array<float8_experts, 2> linears;  // of w13 and w2
};

struct float8_attention {
  std::shared_ptr<const f8::runtime::Attention> attention;
};

struct float8_scales {
  f8::runtime::DelayedScales delayed;
  std::vector<size_t> first;  // the first slot of each linear; then the number of slots
};

namespace f8::c_abi {

[[nodiscard]] std::string& last_error();         // of this thread
void set_last_error(const char* text) noexcept;  // "out of memory" where there is none for it
[[nodiscard]] float8_status to_status(ErrorCode code);

// A call of this thread, which fork() waits for.
class Call {
 public:
  Call() : is_open_(ForkGate::enter()) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    if (is_open_) ForkGate::leave();
  }
  [[nodiscard]] bool is_open() const { return is_open_; }

 private:
  bool is_open_;
};

// Runs a body that returns Status, at the edge of the library.
template <class Body>
float8_status guarded(Body&& body) noexcept {
  try {
    const Call call;
    if (!call.is_open()) [[unlikely]] {
      last_error() = ForkGate::kTorn;
      return FLOAT8_ENVIRONMENT;
    }
    Status status = body();
    if (status) [[likely]] {
      return FLOAT8_OK;
    }
    last_error() = std::move(status.error().message);
    return to_status(status.error().code);
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
    return FLOAT8_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    set_last_error(e.what());
    return FLOAT8_INTERNAL;
  } catch (...) {
    set_last_error("an exception of unknown type");
    return FLOAT8_INTERNAL;
  }
}

// Destroys a handle. Where no call may begin, its memory is left to the end of the process.
template <class Handle>
void destroy(Handle* handle) noexcept {
  const Call call;
  if (call.is_open()) delete handle;
}

inline Status need(const void* pointer, const char* name) {
  if (pointer != nullptr) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{} is NULL", name);
}

// Reads the caller's struct as this version knows it. Fields that an older header lacks are 0.
// Fields of a newer header must be 0 too, for this version would overlook them. A size that no
// version has, because it ends inside a field, is refused: half of a pointer is not one.
template <class T>
Status read_struct(const T* from, const char* name, T& out) {
  F8_TRY(need(from, name));
  const size_t given = from->struct_size;
  if (given < sizeof(size_t) || given > 4096 || (given != sizeof(T) && !has_whole_fields<T>(given)))
      [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}: struct_size is {}; set it to sizeof the struct ({})", name, given, sizeof(T));
  }
  std::memset(static_cast<void*>(&out), 0, sizeof out);  // not the defaults of C++
  std::memcpy(&out, from, std::min(given, sizeof(T)));
  for (size_t i = sizeof(T); i < given; ++i) {
    if (reinterpret_cast<const unsigned char*>(from)[i] != 0) {
      return fail(ErrorCode::kUnsupported,
                  "{}: it sets fields that float8 {}.{}.{} does not know; use a newer library",
                  name, FLOAT8_VERSION_MAJOR, FLOAT8_VERSION_MINOR, FLOAT8_VERSION_PATCH);
    }
  }
  return {};
}

// Reads a struct of a caller's array, all of which have the struct_size of the first.
template <class T>
Status read_element(const T* from, const T* first, const char* name, T& out) {
  F8_TRY(read_struct(from, name, out));
  if (from->struct_size == first->struct_size) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{}: struct_size is {}, that of args[0] is {}", name,
              from->struct_size, first->struct_size);
}

// Writes to the caller's struct what it has room for.
template <class T>
Status write_struct(const char* name, const T& from, T* to) {
  T known;
  F8_TRY(read_struct(to, name, known));
  const size_t size = to->struct_size;
  std::memcpy(to, &from, std::min(size, sizeof from));
  to->struct_size = size;
  return {};
}

inline Status need_zero(const char* field, int64_t value) {
  if (value == 0) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{} is {}; it must be 0", field, value);
}

// What no call looks at in a result, and whether it may add to it.
inline Status check_result(const char* args, const char* name, const float8_result& result,
                           bool may_add, bool is_vector = false) {
  if (result.reserved == 0 && (may_add || result.accumulate == 0) && (!is_vector || result.ld == 0))
      [[likely]] {
    return {};
  }
  if (result.reserved != 0) {
    return fail(ErrorCode::kInvalidArgument, "{}.{}.reserved is {}; it must be 0", args, name,
                result.reserved);
  }
  if (is_vector && result.ld != 0) {
    return fail(ErrorCode::kInvalidArgument, "{}.{}.ld is {}; it is a vector: leave it 0", args,
                name, result.ld);
  }
  return fail(ErrorCode::kInvalidArgument,
              "{}.{}.accumulate is set; the call writes it and adds to nothing", args, name);
}

// Replaces a pointer to the caller's view by one to this version's, kept in `held`.
inline Status read_tensor(const char* name, const float8_tensor*& tensor, float8_tensor& held) {
  if (tensor == nullptr) [[likely]] {
    return {};
  }
  F8_TRY(read_struct(tensor, name, held));
  tensor = &held;
  return {};
}

// The same for a step, which becomes an ordinary one where there is none.
inline Status read_step(const float8_step*& step, float8_step& held) {
  if (step == nullptr) {
    held = {};
  } else {
    F8_TRY(read_struct(step, "float8_step", held));
  }
  step = &held;
  return {};
}

// A buffer's size, if the caller gave one.
inline Status check_bytes(const char* args, const char* name, const float8_buffer& given,
                          size_t needed) {
  if (given.data == nullptr || given.bytes == 0 || given.bytes >= needed) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{}.{}.bytes is {}, {} bytes are needed", args, name,
              given.bytes, needed);
}

// A step's launch counts, whose bytes depend on the device alone.
inline Status check_launch_counts(const float8_step& step, const runtime::Context& context) {
  return check_bytes("float8_step", "launch_counts", step.launch_counts,
                     runtime::quantize_sync_bytes(context.device().sm_count));
}

// A matrix that a call reads as it is.
inline Status need_plain(const char* args, const char* name, const float8_matrix& matrix) {
  if (matrix.fp8 == nullptr) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{}.{}.fp8 is given; the call casts data: leave it NULL",
              args, name);
}

inline NonFinite non_finite_of(int32_t value) {
  return value == FLOAT8_SATURATE ? NonFinite::kSaturate : NonFinite::kPropagate;
}

// Copies a text as float8_linear_info describes it.
[[nodiscard]] Status copy_text(const std::string& from, char* text, size_t bytes, size_t* needed);

// Checks a number that must be one of an enum's values, 0 to `last`.
inline Status check_enum(const char* field, int64_t value, int64_t last) {
  if (value >= 0 && value <= last) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{} is {}; 0 to {}, see float8.h", field, value, last);
}

inline Result<Dtype> dtype_of(const char* field, int32_t value) {
  F8_TRY(check_enum(field, value, FLOAT8_F16));
  return runtime::element_type(value);
}

inline Result<int> sm_limit_of(const char* field, int32_t value) {
  if (value >= 0) return value;
  return fail(ErrorCode::kInvalidArgument, "{} is {}; the most SMs of a GEMM, or 0 for all", field,
              value);
}

}  // namespace f8::c_abi
