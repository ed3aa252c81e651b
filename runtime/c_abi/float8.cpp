// The C interface over the runtime. Nothing may leave these functions but a status: exceptions (of
// the allocator) become one, and the words of every failure go to the thread's last error.
#include "float8/float8.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <new>

#include "base/file.hpp"
#include "runtime/context.hpp"
#include "runtime/distributed/scale_sync.hpp"
#include "runtime/linear.hpp"

struct float8_context {
  std::shared_ptr<f8::runtime::Context> context;
};

struct float8_linear {
  std::shared_ptr<const f8::runtime::Linear> linear;
};

namespace {

using f8::ErrorCode;

std::string& last_error() {
  thread_local std::string message;
  return message;
}

float8_status to_status(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return FLOAT8_INVALID_ARGUMENT;
    case ErrorCode::kNotFound:
      return FLOAT8_NOT_FOUND;
    case ErrorCode::kUnsupported:
      return FLOAT8_UNSUPPORTED;
    case ErrorCode::kEnvironment:
      return FLOAT8_ENVIRONMENT;
    case ErrorCode::kIo:
      return FLOAT8_IO;
    case ErrorCode::kCorrupt:
      return FLOAT8_CORRUPT;
    case ErrorCode::kCompile:
      return FLOAT8_COMPILE;
    case ErrorCode::kCuda:
      return FLOAT8_CUDA;
    case ErrorCode::kOutOfMemory:
      return FLOAT8_OUT_OF_MEMORY;
    case ErrorCode::kInterrupted:
    case ErrorCode::kInternal:
      return FLOAT8_INTERNAL;
  }
  return FLOAT8_INTERNAL;
}

// Runs a body that returns f8::Status, at the edge of the library.
template <class Body>
float8_status guarded(Body&& body) noexcept {
  try {
    f8::Status status = body();
    if (status) [[likely]] {
      return FLOAT8_OK;
    }
    last_error() = std::move(status.error().message);
    return to_status(status.error().code);
  } catch (const std::bad_alloc&) {
    last_error().clear();  // no memory for words
    return FLOAT8_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    last_error() = e.what();
    return FLOAT8_INTERNAL;
  } catch (...) {
    last_error() = "an exception of unknown type";
    return FLOAT8_INTERNAL;
  }
}

f8::Status need(const void* pointer, const char* name) {
  if (pointer != nullptr) [[likely]] {
    return {};
  }
  return f8::fail(ErrorCode::kInvalidArgument, "{} is NULL", name);
}

// The caller's struct as this version knows it: what an older header lacks is 0. A newer header's
// fields must be 0 too, for this version would overlook them.
template <class T>
f8::Status read_struct(const T* from, const char* name, T& out) {
  F8_TRY(need(from, name));
  const size_t given = from->struct_size;
  if (given < sizeof(size_t) || given > 4096) [[unlikely]] {
    return f8::fail(ErrorCode::kInvalidArgument,
                    "{}: struct_size is {}; set it to sizeof the struct ({})", name, given,
                    sizeof(T));
  }
  out = T{};
  std::memcpy(&out, from, std::min(given, sizeof(T)));
  for (size_t i = sizeof(T); i < given; ++i) {
    if (reinterpret_cast<const unsigned char*>(from)[i] != 0) {
      return f8::fail(ErrorCode::kUnsupported,
                      "{}: it sets fields that float8 {}.{}.{} does not know; use a newer library",
                      name, FLOAT8_VERSION_MAJOR, FLOAT8_VERSION_MINOR, FLOAT8_VERSION_PATCH);
    }
  }
  return {};
}

}  // namespace

const char* float8_status_string(float8_status status) {
  switch (status) {
    case FLOAT8_OK:
      return "ok";
    case FLOAT8_INVALID_ARGUMENT:
      return "invalid argument";
    case FLOAT8_NOT_FOUND:
      return "not found";
    case FLOAT8_UNSUPPORTED:
      return "unsupported";
    case FLOAT8_ENVIRONMENT:
      return "unfit environment";
    case FLOAT8_IO:
      return "input or output error";
    case FLOAT8_CORRUPT:
      return "corrupt data";
    case FLOAT8_COMPILE:
      return "kernel compilation failed";
    case FLOAT8_CUDA:
      return "CUDA error";
    case FLOAT8_OUT_OF_MEMORY:
      return "out of memory";
    case FLOAT8_INTERNAL:
      return "internal error";
  }
  return "unknown status";
}

const char* float8_last_error(void) {
  return last_error().c_str();
}

#define FLOAT8_TEXT_OF(x) #x
#define FLOAT8_TEXT(x) FLOAT8_TEXT_OF(x)
const char* float8_version(void) {
  return FLOAT8_TEXT(FLOAT8_VERSION_MAJOR) "." FLOAT8_TEXT(FLOAT8_VERSION_MINOR) "." FLOAT8_TEXT(
      FLOAT8_VERSION_PATCH);
}

float8_status float8_context_create(int device, const float8_context_options* options,
                                    float8_context** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    f8::runtime::ContextOptions converted;
    if (options != nullptr) {
      float8_context_options known;
      F8_TRY(read_struct(options, "float8_context_options", known));
      if (known.cache_dir != nullptr) converted.cache_dir = known.cache_dir;
      converted.programmatic_launch = known.serial_launch == 0;
    }
    auto context = F8_TRY(f8::runtime::Context::create(device, converted));
    *out = new float8_context{std::move(context)};
    return {};
  });
}

void float8_context_destroy(float8_context* context) {
  delete context;
}

float8_status float8_context_load_table(float8_context* context, const char* path, uint64_t* hash) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    F8_TRY(need(path, "path"));
    auto table = f8::TuningTable::parse(F8_TRY(f8::read_file(path)));
    if (!table) return f8::fail(table.error().code, "{}: {}", path, table.error().message);
    const std::string digits = table->hash().substr(0, 16);
    uint64_t value = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    context->context->set_table(std::move(*table));
    if (hash != nullptr) *hash = value;
    return {};
  });
}

float8_status float8_linear_plan(float8_context* context, const float8_linear_desc* desc,
                                 float8_linear** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_linear_desc known;
    F8_TRY(read_struct(desc, "float8_linear_desc", known));
    F8_TRY(need(known.recipe, "float8_linear_desc.recipe"));
    f8::runtime::LinearDesc converted;
    converted.shape = {known.m_max, known.n, known.k};
    converted.recipe = F8_TRY(f8::find_recipe(known.recipe));
    for (const f8::GemmSetting& gemm : converted.recipe.gemms) {
      if (gemm.is_fp8() && gemm.a.scaling != f8::Scaling::kDelayed) continue;
      return f8::fail(ErrorCode::kUnsupported,
                      "recipe {}: this interface carries no scale state and no high-precision "
                      "operands of backward; tensorwise, rowwise and blockwise need neither",
                      known.recipe);
    }
    switch (known.grad_weight_dtype) {
      case FLOAT8_BF16:
        converted.grad_weight_dtype = f8::Dtype::kBf16;
        break;
      case FLOAT8_F32:
        converted.grad_weight_dtype = f8::Dtype::kF32;
        break;
      default:
        return f8::fail(ErrorCode::kInvalidArgument,
                        "float8_linear_desc.grad_weight_dtype is {}; FLOAT8_BF16 or FLOAT8_F32",
                        known.grad_weight_dtype);
    }
    auto linear = F8_TRY(f8::runtime::Linear::plan(context->context, converted));
    *out = new float8_linear{std::move(linear)};
    return {};
  });
}

void float8_linear_destroy(float8_linear* linear) {
  delete linear;
}

size_t float8_linear_workspace_bytes(const float8_linear* linear) {
  return linear == nullptr ? 0 : linear->linear->workspace_bytes();
}

size_t float8_linear_saved_bytes(const float8_linear* linear) {
  return linear == nullptr ? 0 : linear->linear->saved_bytes();
}

float8_status float8_linear_forward(const float8_linear* linear, const float8_forward_args* args,
                                    void* workspace, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(linear, "linear"));
    float8_forward_args known;
    F8_TRY(read_struct(args, "float8_forward_args", known));
    return linear->linear->forward({known.x, known.w, known.y, known.saved, known.m}, workspace,
                                   stream);
  });
}

float8_status float8_linear_backward(const float8_linear* linear, const float8_backward_args* args,
                                     void* workspace, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(linear, "linear"));
    float8_backward_args known;
    F8_TRY(read_struct(args, "float8_backward_args", known));
    return linear->linear->backward({known.dy, known.saved, known.dx, known.dw, known.m}, workspace,
                                    stream);
  });
}

float8_status float8_amax_sync(uint32_t* amax_bits, size_t count, float8_nccl_comm communicator,
                               float8_stream stream) {
  return guarded([&] { return f8::runtime::sync_amax(amax_bits, count, communicator, stream); });
}
