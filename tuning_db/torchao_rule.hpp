// The peer's automatic filter: fixed limits on K and N, whatever the token count. Internal to
// tuning_db.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace f8::tuning_db {

// Why the rule keeps a layer in bf16; empty: it converts.
[[nodiscard]] std::string torchao_keeps(std::string_view recipe, int64_t k, int64_t n);
[[nodiscard]] bool torchao_has_rule(std::string_view recipe);

}  // namespace f8::tuning_db
