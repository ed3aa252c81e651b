// The peer's automatic filter: see torchao_rule.hpp.
#include "tuning_db/torchao_rule.hpp"

#include <fmt/format.h>

namespace f8::tuning_db {

bool torchao_has_rule(std::string_view recipe) {
  return recipe == "rowwise" || recipe == "tensorwise";
}

std::string torchao_keeps(std::string_view recipe, int64_t k, int64_t n) {
  if (recipe == "rowwise") {
    if (n <= 2048) return fmt::format("N {} <= 2048", n);
    if (k <= 1024) return fmt::format("K {} <= 1024", k);
    if (n <= 4096 && k <= 2048) return fmt::format("N {} <= 4096 and K {} <= 2048", n, k);
  } else if (recipe == "tensorwise") {
    if (k <= 4096 && n <= 1024) return fmt::format("K {} <= 4096 and N {} <= 1024", k, n);
  }
  return {};
}

}  // namespace f8::tuning_db
