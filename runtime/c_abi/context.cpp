// Contexts.
#include <charconv>
#include <mutex>

#include "base/environment.hpp"
#include "base/file.hpp"
#include "runtime/c_abi/common.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/gemm/choose.hpp"
#include "runtime/model/info.hpp"
#include "runtime/quantize/quantize.hpp"

using namespace f8::c_abi;

namespace {

f8::Status check_tuning(f8::runtime::ContextOptions& options) {
  if (options.tune_on_first_use < 0) {
    return f8::fail(f8::ErrorCode::kInvalidArgument,
                    "float8_context_options.tune_on_first_use is {}; it is milliseconds, or 0",
                    options.tune_on_first_use);
  }
  if (options.database.empty()) options.database = f8::environment().db;
  if (options.tune_on_first_use > 0 && options.database.empty()) {
    return f8::fail(f8::ErrorCode::kInvalidArgument,
                    "float8_context_options.tune_on_first_use needs a database that keeps what is "
                    "measured; set database, or FLOAT8_DB");
  }
  return {};
}

// The first 64 bits of a table's hash; 0 for no table.
uint64_t hash_word(const f8::TuningTable* table) {
  if (table == nullptr) return 0;
  const std::string digits = table->hash().substr(0, 16);
  uint64_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  return value;
}

// `name` is that of the text in messages.
f8::Status set_table(f8::runtime::Context& context, const char* name, std::string_view text,
                     uint64_t* hash) {
  auto table = f8::runtime::parse_table(text);
  if (!table) return f8::fail(table.error().code, "{}: {}", name, table.error().message);
  context.set_table(std::move(*table));
  if (hash != nullptr) *hash = hash_word(context.table().get());
  return {};
}

}  // namespace

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
      converted.check_pointers = known.check_pointers != 0;
      converted.emulate = known.emulate != 0;
      converted.builtin_table = known.no_table == 0;
      converted.moves_saved = known.moves_saved != 0;
      converted.tune_on_first_use = known.tune_on_first_use;
      if (known.database != nullptr) converted.database = known.database;
      F8_TRY(check_tuning(converted));
    }
    auto context = F8_TRY(f8::runtime::Context::create(device, converted));
    *out = new float8_context{std::move(context)};
    return {};
  });
}

void float8_context_destroy(float8_context* context) {
  destroy(context);
}

float8_status float8_context_load_table(float8_context* context, const char* path, uint64_t* hash) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    F8_TRY(need(path, "path"));
    const std::string text = F8_TRY(f8::read_file(path));
    return set_table(*context->context, path, text, hash);
  });
}

float8_status float8_context_table(const float8_context* context, char* text, size_t bytes,
                                   size_t* needed, uint64_t* hash) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    const auto table = context->context->table();
    if (hash != nullptr) *hash = hash_word(table.get());
    return copy_text(table == nullptr ? "" : table->serialize(), text, bytes, needed);
  });
}

float8_status float8_context_set_table(float8_context* context, const char* text, uint64_t* hash) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    F8_TRY(need(text, "text"));
    if (*text != '\0') return set_table(*context->context, "text", text, hash);
    f8::runtime::Context::State& state = context->context->state();
    const std::lock_guard lock(state.table_mutex);
    state.table = nullptr;
    if (hash != nullptr) *hash = 0;
    return {};
  });
}

size_t float8_workspace_reserved_bytes(const float8_context* context) {
  return context == nullptr ? 0
                            : f8::runtime::quantize_sync_bytes(context->context->device().sm_count);
}

float8_status float8_context_info(const float8_context* context, char* text, size_t bytes,
                                  size_t* needed) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(context, "context"));
    return copy_text(f8::runtime::describe(*context->context), text, bytes, needed);
  });
}
