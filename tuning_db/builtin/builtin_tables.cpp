// The built-in tables: the text that make_builtin wrote, read at first use.
#include "tuning_db/estimate/builtin_tables.hpp"

#include <algorithm>
#include <mutex>
#include <vector>

#include "base/log.hpp"

namespace f8::tuning_db {
namespace text {
extern const std::span<const std::string_view> builtin_tables;  // in the build folder
}

std::span<const TuningTable> builtin_tables() {
  // The tables are never destroyed: contexts may outlive static objects.
  static const auto& tables = *[] {
    auto* read = new std::vector<TuningTable>;
    for (const std::string_view text : text::builtin_tables) {
      auto table = TuningTable::parse(text);
      if (table) {
        read->push_back(*std::move(table));
      } else {
        log_warning("a built-in table is left out: {}", table.error().message);
      }
    }
    return read;
  }();
  return tables;
}

namespace {

// One of builtin_tables(), and behind it the others of its compute capability: made at first use.
struct Merged {
  std::once_flag once;
  TuningTable table;
};

std::vector<Merged>& merged_tables() {
  static auto& merged = *new std::vector<Merged>(builtin_tables().size());
  return merged;
}

}  // namespace

std::shared_ptr<const TuningTable> builtin_table(const DeviceClass& device) {
  const auto tables = builtin_tables();
  const TuningTable* nearest = nearest_table(tables, device);
  if (nearest == nullptr) return nullptr;
  Merged& merged = merged_tables()[static_cast<size_t>(nearest - tables.data())];
  std::call_once(merged.once, [&] {
    merged.table = *nearest;
    for (const TuningTable& other : tables) {
      const bool alike =
          !other.devices.empty() && other.devices.front().cc == nearest->devices.front().cc;
      if (alike && &other != nearest) merged.table.add_behind(other);
    }
  });
  return {std::shared_ptr<void>(), &merged.table};
}

bool is_builtin(const TuningTable& table) {
  return std::ranges::any_of(merged_tables(),
                             [&](const Merged& merged) { return &merged.table == &table; });
}

}  // namespace f8::tuning_db
