// The built-in tables: the text that make_builtin wrote, read at first use.
#include "tuning_db/estimate/builtin_tables.hpp"

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

std::shared_ptr<const TuningTable> builtin_table(const DeviceClass& device) {
  return {std::shared_ptr<void>(), nearest_table(builtin_tables(), device)};
}

bool is_builtin(const TuningTable& table) {
  for (const TuningTable& builtin : builtin_tables()) {
    if (&builtin == &table) return true;
  }
  return false;
}

}  // namespace f8::tuning_db
