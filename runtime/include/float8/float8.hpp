// float8 for C++17: handles that clean up after themselves, and errors that cannot be overlooked.
// Header-only over float8.h, which says what every argument means.
//
//   auto context = float8::Context::create(0).value();
//   auto linear  = float8::Linear::plan(context, {.m_max = 16384, .n = 4096, .k = 4096}).value();
//   float8::Status status = linear.forward({.x = x, .w = w, .y = y}, workspace, stream);
// (designated initialisers are C++20; in C++17 set the fields by name)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "float8/float8.h"

namespace float8 {

struct Error {
  float8_status code = FLOAT8_INTERNAL;
  std::string message = {};
};

// The result of a call that gives nothing back. Making one for a success allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  explicit Status(float8_status code) : code_(code) {
    if (code != FLOAT8_OK) message_ = float8_last_error();
  }
  [[nodiscard]] bool ok() const { return code_ == FLOAT8_OK; }
  explicit operator bool() const { return ok(); }
  [[nodiscard]] float8_status code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }  // "" for a success

 private:
  float8_status code_ = FLOAT8_OK;
  std::string message_;
};

// A value, or why there is none. value() of an error throws it where exceptions are enabled, and
// else ends the program with its message.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::move(value)) {}      // NOLINT: implicit on purpose
  Result(Error error) : content_(std::move(error)) {}  // NOLINT
  [[nodiscard]] bool ok() const { return content_.index() == 0; }
  explicit operator bool() const { return ok(); }
  [[nodiscard]] const Error& error() const { return *std::get_if<1>(&content_); }
  [[nodiscard]] T& value() & { return checked(); }
  [[nodiscard]] const T& value() const& { return const_cast<Result*>(this)->checked(); }
  [[nodiscard]] T value() && { return std::move(checked()); }

 private:
  T& checked();
  std::variant<T, Error> content_;
};

class Exception : public std::exception {
 public:
  explicit Exception(Error error) : error_(std::move(error)) {}
  [[nodiscard]] const char* what() const noexcept override { return error_.message.c_str(); }
  [[nodiscard]] float8_status code() const noexcept { return error_.code; }

 private:
  Error error_;
};

template <class T>
T& Result<T>::checked() {
  if (T* value = std::get_if<0>(&content_)) return *value;
#if defined(__cpp_exceptions)
  throw Exception(error());
#else
  std::fprintf(stderr, "float8: %s\n", error().message.c_str());
  std::abort();
#endif
}

// How operands are cast: a named recipe, or settings of the caller's.
using CastSetting = float8_cast_setting;
using GemmSetting = float8_gemm_setting;

class Recipe {
 public:
  static Recipe tensorwise() { return Recipe("tensorwise"); }
  static Recipe rowwise() { return Recipe("rowwise"); }
  static Recipe rowwise_with_gw_hp() { return Recipe("rowwise_with_gw_hp"); }
  static Recipe delayed() { return Recipe("delayed"); }
  static Recipe blockwise() { return Recipe("blockwise"); }
  static Recipe bf16() { return Recipe("bf16"); }  // no GEMM is fp8
  static Recipe named(std::string name) { return Recipe(std::move(name)); }
  // `name` goes into messages: a-z, 0-9 and _.
  static Recipe custom(std::string name, const GemmSetting& output, const GemmSetting& grad_input,
                       const GemmSetting& grad_weight) {
    Recipe recipe(std::move(name));
    recipe.custom_ = true;
    recipe.output_ = output;
    recipe.grad_input_ = grad_input;
    recipe.grad_weight_ = grad_weight;
    return recipe;
  }
  [[nodiscard]] const std::string& name() const { return name_; }

  // Its settings, to start a custom one from; a name that is not known is an error.
  [[nodiscard]] Result<float8_recipe> settings() const {
    float8_recipe c{};
    c.struct_size = sizeof c;
    if (custom_) {
      c.name = name_.c_str();  // as long as this recipe
      c.output = output_;
      c.grad_input = grad_input_;
      c.grad_weight = grad_weight_;
      return c;
    }
    const float8_status status = float8_recipe_named(name_.c_str(), &c);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return c;
  }

 private:
  explicit Recipe(std::string name) : name_(std::move(name)) {}
  std::string name_;
  bool custom_ = false;
  GemmSetting output_{}, grad_input_{}, grad_weight_{};
};

namespace detail {
// The text that a call copies into a buffer.
template <class Call>
Result<std::string> text(Call call) {
  std::size_t needed = 0;
  float8_status status = call(nullptr, 0, &needed);
  std::string text(needed, ' ');
  if (status == FLOAT8_OK) status = call(&text[0], needed, nullptr);
  if (status != FLOAT8_OK) return Error{status, float8_last_error()};
  text.pop_back();
  return text;
}

template <class T, void (*destroy)(T*)>
struct Destroy {
  void operator()(T* handle) const { destroy(handle); }
};
template <class T, void (*destroy)(T*)>
using Handle = std::unique_ptr<T, Destroy<T, destroy>>;
}  // namespace detail

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
  // Words of `valid` to 0 where weights changed since the call before.
  Status compare_weights(const float8_fingerprint_args* args, std::size_t count,
                         float8_stream stream) const {
    return Status(float8_weights_compare(handle_.get(), args, count, stream));
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

struct LinearDesc {
  std::int64_t m_max = 0;
  std::int64_t n = 0;  // out_features
  std::int64_t k = 0;  // in_features
  Recipe recipe = Recipe::tensorwise();
  float8_dtype grad_weight_dtype = FLOAT8_BF16;
  bool bias = false;
  bool accumulate_grad_weight = false;
  bool needs_grad_input = true;
  float8_dtype tensor_dtype = FLOAT8_BF16;
  bool recompute = false;
  bool bias_grad = false;
  float8_dtype bias_grad_dtype = FLOAT8_BF16;
  float8_non_finite non_finite = FLOAT8_PROPAGATE;
  bool count = false;
  bool accumulate_grad_input = false;
  std::int32_t sm_limit = 0;
  bool weight_shards = false;

  // All but the recipe.
  [[nodiscard]] float8_linear_desc c() const {
    float8_linear_desc c{};
    c.struct_size = sizeof c;
    c.m_max = m_max;
    c.n = n;
    c.k = k;
    c.grad_weight_dtype = grad_weight_dtype;
    c.bias = bias ? 1 : 0;
    c.accumulate_grad_weight = accumulate_grad_weight ? 1 : 0;
    c.no_grad_input = needs_grad_input ? 0 : 1;
    c.tensor_dtype = tensor_dtype;
    c.recompute = recompute ? 1 : 0;
    c.bias_grad = bias_grad ? 1 : 0;
    c.bias_grad_dtype = bias_grad_dtype;
    c.non_finite = non_finite;
    c.count = count ? 1 : 0;
    c.accumulate_grad_input = accumulate_grad_input ? 1 : 0;
    c.sm_limit = sm_limit;
    c.weight_shards = weight_shards ? 1 : 0;
    return c;
  }
};

using CastCounters = float8_cast_counters;
// A linear's part of a scale state; Scales::slots gives it.
using ScaleSlots = float8_scale_slots;

// The arguments of calls are float8.h's structs. In C++ their fields have default values: the sizes
// are set, pointers are null, and m and rows are -1, which stands for m_max and rows_max.
using ForwardArgs = float8_forward_args;
using BackwardArgs = float8_backward_args;
using QuantizeArgs = float8_quantize_args;
using FingerprintArgs = float8_fingerprint_args;
using GemmArgs = float8_gemm_args;
// A view of a tensor in fp8.
using Tensor = float8_tensor;

// Copies are the same linear.
class Linear {
 public:
  static Result<Linear> plan(const Context& context, const LinearDesc& desc) {
    const auto recipe = desc.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    float8_linear_desc c = desc.c();
    c.custom_recipe = &settings;
    float8_linear* handle = nullptr;
    const float8_status status = float8_linear_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Linear({handle, float8_linear_destroy}, desc.m_max);
  }

  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_linear_workspace_bytes(handle_.get());
  }
  [[nodiscard]] std::size_t saved_bytes() const { return float8_linear_saved_bytes(handle_.get()); }
  // The same for calls that are given x, or w, in fp8.
  [[nodiscard]] std::size_t saved_bytes_with_tensors(bool x_tensor, bool w_tensor) const {
    return float8_linear_saved_bytes_with_tensors(handle_.get(), x_tensor ? 1 : 0,
                                                  w_tensor ? 1 : 0);
  }

  Status forward(ForwardArgs args, void* workspace, float8_stream stream) const {
    if (args.m == -1) args.m = m_max_;
    return Status(float8_linear_forward(handle_.get(), &args, workspace, stream));
  }
  Status backward(BackwardArgs args, void* workspace, float8_stream stream) const {
    if (args.m == -1) args.m = m_max_;
    return Status(float8_linear_backward(handle_.get(), &args, workspace, stream));
  }
  // Says what was planned and why, for people.
  [[nodiscard]] Result<std::string> info() const {
    return detail::text([this](char* text, std::size_t bytes, std::size_t* needed) {
      return float8_linear_info(handle_.get(), text, bytes, needed);
    });
  }
  [[nodiscard]] std::int64_t m_max() const { return m_max_; }
  [[nodiscard]] const float8_linear* get() const { return handle_.get(); }

 private:
  friend class Model;
  Linear(std::shared_ptr<const float8_linear> handle, std::int64_t m_max)
      : handle_(std::move(handle)), m_max_(m_max) {}
  std::shared_ptr<const float8_linear> handle_;
  std::int64_t m_max_;
};

struct QuantizerDesc {
  float8_operand operand = FLOAT8_INPUT;
  std::int64_t rows_max = 0;
  std::int64_t cols = 0;
  Recipe recipe = Recipe::tensorwise();
  float8_dtype dtype = FLOAT8_BF16;
  float8_non_finite non_finite = FLOAT8_PROPAGATE;
  bool count = false;
  float8_copies copies = FLOAT8_BOTH_COPIES;
  bool over_ranks = false;      // ranks hold the tensor by rows; run() follows find_amax()
  std::int64_t whole_rows = 0;  // with over_ranks: those of the whole, whose blocks shards may cut
  bool weight_flag = false;     // casts of the weight look at QuantizeArgs::valid
  bool f32_source = false;      // x is in fp32, and is rounded to dtype as it is read
  float8_source source = FLOAT8_PLAIN;  // FLOAT8_SWIGLU: silu(x) * QuantizeArgs::up is cast
};

// The casts of an operand apart from a linear. Copies are the same quantizer.
class Quantizer {
 public:
  static Result<Quantizer> plan(const Context& context, const QuantizerDesc& desc) {
    const auto recipe = desc.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    float8_quantizer_desc c{};
    c.struct_size = sizeof c;
    c.rows_max = desc.rows_max;
    c.cols = desc.cols;
    c.operand = desc.operand;
    c.dtype = desc.dtype;
    c.custom_recipe = &settings;
    c.non_finite = desc.non_finite;
    c.count = desc.count ? 1 : 0;
    c.copies = desc.copies;
    c.over_ranks = desc.over_ranks ? 1 : 0;
    c.whole_rows = desc.whole_rows;
    c.weight_flag = desc.weight_flag ? 1 : 0;
    c.f32_source = desc.f32_source ? 1 : 0;
    c.source = desc.source;
    float8_quantizer* handle = nullptr;
    const float8_status status = float8_quantizer_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Quantizer(handle, desc.rows_max);
  }
  [[nodiscard]] std::size_t tensor_bytes() const {
    return float8_quantizer_tensor_bytes(handle_.get());
  }
  // The part of them that may lie apart.
  [[nodiscard]] std::size_t transposed_bytes() const {
    return float8_quantizer_transposed_bytes(handle_.get());
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_quantizer_workspace_bytes(handle_.get());
  }
  Status run(QuantizeArgs args, void* workspace, float8_stream stream) const {
    if (args.rows == -1) args.rows = rows_max_;
    return Status(float8_quantize(handle_.get(), &args, workspace, stream));
  }
  // The words of QuantizeArgs::amax, whose maxima over ranks run() casts with, and of row_amax.
  [[nodiscard]] std::size_t amax_words() const {
    return float8_quantizer_amax_words(handle_.get());
  }
  [[nodiscard]] std::size_t row_amax_words() const {
    return float8_quantizer_row_amax_words(handle_.get());
  }
  Status find_amax(QuantizeArgs args, float8_stream stream) const {
    if (args.rows == -1) args.rows = rows_max_;
    return Status(float8_quantize_amax(handle_.get(), &args, stream));
  }
  // The view of what a run with these rows leaves in `tensor`, and in `transposed` if it has one.
  [[nodiscard]] Result<Tensor> view(const void* tensor, std::int64_t rows,
                                    const void* transposed = nullptr) const {
    Tensor out;
    const float8_status status =
        float8_quantizer_view(handle_.get(), tensor, transposed, rows, &out);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return out;
  }
  [[nodiscard]] std::int64_t rows_max() const { return rows_max_; }
  [[nodiscard]] const float8_quantizer* get() const { return handle_.get(); }

 private:
  Quantizer(float8_quantizer* handle, std::int64_t rows_max)
      : handle_(handle, float8_quantizer_destroy), rows_max_(rows_max) {}
  std::shared_ptr<const float8_quantizer> handle_;
  std::int64_t rows_max_;
};

// The casts of many tensors in few launches.
class QuantizerList {
 public:
  static Result<QuantizerList> plan(const Context& context,
                                    const std::vector<Quantizer>& quantizers) {
    std::vector<const float8_quantizer*> handles;
    for (const Quantizer& quantizer : quantizers) handles.push_back(quantizer.get());
    float8_quantizer_list* handle = nullptr;
    const float8_status status =
        float8_quantizer_list_plan(context.get(), handles.data(), handles.size(), &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return QuantizerList(handle, quantizers);
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_quantizer_list_workspace_bytes(handle_.get());
  }
  Status run(std::vector<QuantizeArgs> args, void* workspace, float8_stream stream) const {
    set_rows(args);
    return Status(float8_quantize_list(handle_.get(), args.data(), args.size(), workspace, stream));
  }
  Status find_amax(std::vector<QuantizeArgs> args, float8_stream stream) const {
    set_rows(args);
    return Status(float8_quantize_list_amax(handle_.get(), args.data(), args.size(), stream));
  }
  [[nodiscard]] const float8_quantizer_list* get() const { return handle_.get(); }

 private:
  QuantizerList(float8_quantizer_list* handle, const std::vector<Quantizer>& quantizers)
      : handle_(handle) {
    for (const Quantizer& quantizer : quantizers) rows_max_.push_back(quantizer.rows_max());
  }
  void set_rows(std::vector<QuantizeArgs>& args) const {
    for (std::size_t i = 0; i < args.size() && i < rows_max_.size(); ++i) {
      if (args[i].rows == -1) args[i].rows = rows_max_[i];
    }
  }
  detail::Handle<float8_quantizer_list, float8_quantizer_list_destroy> handle_;
  std::vector<std::int64_t> rows_max_;
};

struct GemmDesc {
  float8_gemm_kind gemm = FLOAT8_OUTPUT;
  std::int64_t m_max = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Recipe recipe = Recipe::tensorwise();
  float8_dtype d_dtype = FLOAT8_BF16;
  bool bias = false;
  bool accumulate = false;
  std::int32_t sm_limit = 0;
};

// A GEMM over tensors in fp8. Copies are the same plan.
class Gemm {
 public:
  static Result<Gemm> plan(const Context& context, const GemmDesc& desc) {
    const auto recipe = desc.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    float8_gemm_desc c{};
    c.struct_size = sizeof c;
    c.m_max = desc.m_max;
    c.n = desc.n;
    c.k = desc.k;
    c.gemm = desc.gemm;
    c.d_dtype = desc.d_dtype;
    c.custom_recipe = &settings;
    c.bias = desc.bias ? 1 : 0;
    c.accumulate = desc.accumulate ? 1 : 0;
    c.sm_limit = desc.sm_limit;
    float8_gemm_plan* handle = nullptr;
    const float8_status status = float8_gemm_plan_create(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Gemm(handle);
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_gemm_workspace_bytes(handle_.get());
  }
  Status run(const GemmArgs& args, void* workspace, float8_stream stream) const {
    return Status(float8_gemm(handle_.get(), &args, workspace, stream));
  }
  [[nodiscard]] const float8_gemm_plan* get() const { return handle_.get(); }

 private:
  explicit Gemm(float8_gemm_plan* handle) : handle_(handle, float8_gemm_plan_destroy) {}
  std::shared_ptr<const float8_gemm_plan> handle_;
};

struct ScalesOptions {
  int history = 16;
  float8_scale_from scale_from = FLOAT8_SCALE_FROM_MAX;
  int margin = 0;
  float8_non_finite non_finite = FLOAT8_PROPAGATE;
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
    float8_scales* handle = nullptr;
    const float8_status status = float8_scales_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Scales(handle, linears.size());
  }
  [[nodiscard]] std::size_t bytes() const { return float8_scales_bytes(handle_.get()); }
  Status init(void* state, float8_stream stream) const {
    return Status(float8_scales_init(handle_.get(), state, stream));
  }
  // Returns the slots of the linear that was the index-th of the list.
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
  std::size_t count_;  // of the list of linears
};

// A linear's counters in host memory, as lines for people.
[[nodiscard]] inline Result<std::string> counters_text(const std::string& name,
                                                       const CastCounters* counters) {
  return detail::text([&](char* text, std::size_t bytes, std::size_t* needed) {
    return float8_counters_text(name.c_str(), counters, text, bytes, needed);
  });
}

// A layer of a model: its desc's m_max and recipe are the model's and not looked at.
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
  Status gather_tensor(const Context& context, GatherArgs args, void* workspace,
                       float8_stream stream) const {
    args.communicator = get();
    return Status(float8_gather_tensor(context.get(), &args, workspace, stream));
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

struct ModelLayer {
  std::string name = {};
  LinearDesc desc = {};  // an m_max of 0 is the model's tokens
};

struct ModelOptions {
  Recipe recipe = Recipe::tensorwise();
  std::int64_t tokens = 0;
  // "auto_filter_small_kn" switches the automatic rule on.
  std::vector<std::string> filter_fqns = {};
  float8_filter_policy policy = FLOAT8_FILTER_MEASURED;
  double margin = 0;  // 0: 0.02
  std::function<bool(const std::string& name, std::int64_t n, std::int64_t k)> callback = {};
  std::string verdicts = {};  // a filter file; empty: none
  int compile_threads = 0;
  // The ranks that share the model, as in float8_model_desc.
  std::int64_t fsdp = 1, tp = 1;
  std::int64_t hosts = 0;   // 0: as few as have at most 8 each
  double network_gbit = 0;  // 0: 400
};

// The decision about a layer.
struct ModelVerdict {
  std::string name = {};
  std::string reason = {};
  std::optional<Linear> linear = {};  // none: kept in high precision
  double speedup = 1, speedup_low = 1, speedup_high = 1;
  float8_evidence evidence = FLOAT8_EVIDENCE_RULE;
  // What ranks send in a step, in bf16 and fp8, and what of it GEMMs do not hide.
  double wire_bf16_us = 0, wire_fp8_us = 0, exposed_bf16_us = 0, exposed_fp8_us = 0;
  bool wire_is_prediction = false;
};

class Model {
 public:
  static Result<Model> plan(const Context& context, const std::vector<ModelLayer>& layers,
                            const ModelOptions& options) {
    const auto recipe = options.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    std::vector<float8_linear_desc> descs;
    for (const ModelLayer& layer : layers) descs.push_back(layer.desc.c());
    std::vector<float8_model_layer> all;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      all.push_back({sizeof(float8_model_layer), layers[i].name.c_str(), &descs[i]});
    }
    std::vector<const char*> names;
    for (const std::string& name : options.filter_fqns) names.push_back(name.c_str());
    float8_model_desc c{};
    c.struct_size = sizeof c;
    c.layers = all.data();
    c.count = all.size();
    c.tokens = options.tokens;
    c.custom_recipe = &settings;
    c.filter_fqns = names.data();
    c.filter_fqn_count = names.size();
    if (options.callback) {
      c.callback = [](void* user, const char* name, std::int64_t n, std::int64_t k) {
        return std::int32_t{static_cast<const ModelOptions*>(user)->callback(name, n, k)};
      };
      c.callback_user = const_cast<ModelOptions*>(&options);
    }
    c.verdicts = options.verdicts.empty() ? nullptr : options.verdicts.c_str();
    c.margin = options.margin;
    c.policy = options.policy;
    c.compile_threads = options.compile_threads;
    c.fsdp = options.fsdp;
    c.tp = options.tp;
    c.hosts = options.hosts;
    c.network_gbit = options.network_gbit;
    float8_model* handle = nullptr;
    const float8_status status = float8_model_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Model({handle, float8_model_destroy}, options.tokens);
  }

  // Returns the verdict of the layer that was the index-th of the list.
  [[nodiscard]] Result<ModelVerdict> verdict(std::size_t index) const {
    float8_model_verdict c{};
    c.struct_size = sizeof c;
    const float8_status status = float8_model_layer_verdict(handle_.get(), index, &c);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    ModelVerdict verdict{c.name,
                         c.reason,
                         {},
                         c.speedup,
                         c.speedup_low,
                         c.speedup_high,
                         static_cast<float8_evidence>(c.evidence),
                         c.wire_bf16_us,
                         c.wire_fp8_us,
                         c.exposed_bf16_us,
                         c.exposed_fp8_us,
                         c.wire_is_prediction != 0};
    // It is the model's, which it keeps alive.
    if (c.linear != nullptr) verdict.linear = Linear({handle_, c.linear}, tokens_);
    return verdict;
  }
  [[nodiscard]] std::size_t layers() const { return float8_model_layer_count(handle_.get()); }
  [[nodiscard]] std::size_t converted() const {
    return float8_model_converted_count(handle_.get());
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_model_workspace_bytes(handle_.get());
  }
  [[nodiscard]] float8_model* get() const { return handle_.get(); }

 private:
  Model(std::shared_ptr<float8_model> handle, std::int64_t tokens)
      : handle_(std::move(handle)), tokens_(tokens) {}
  std::shared_ptr<float8_model> handle_;
  std::int64_t tokens_;
};

[[nodiscard]] inline std::string version() {
  return float8_version();
}

}  // namespace float8
