// The built-in tables: the text that make_builtin wrote, read at first use.
#include "tuning_db/estimate/builtin_tables.hpp"

#include <algorithm>
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

// For each of builtin_tables() that table, and behind it the others of its compute capability.
std::span<const TuningTable> merged_tables() {
  static const auto& merged = *[] {
    auto* made = new std::vector<TuningTable>;
    for (const TuningTable& first : builtin_tables()) {
      TuningTable& table = made->emplace_back();
      table.add_behind(first);
      for (const TuningTable& other : builtin_tables()) {
        const bool alike = !first.devices.empty() && !other.devices.empty() &&
                           first.devices.front().cc == other.devices.front().cc;
        if (alike && &other != &first) table.add_behind(other);
      }
    }
    return made;
  }();
  return merged;
}

}  // namespace

std::shared_ptr<const TuningTable> builtin_table(const DeviceClass& device) {
  return {std::shared_ptr<void>(), nearest_table(merged_tables(), device)};
}

bool is_builtin(const TuningTable& table) {
  return std::ranges::any_of(merged_tables(),
                             [&](const TuningTable& builtin) { return &builtin == &table; });
}

}  // namespace f8::tuning_db
