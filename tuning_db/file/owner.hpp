// Which process measures a run: "<boot id> <pid> <start time>", so that a number that the system
// has given to another process since is not taken for the old one. Internal to tuning_db.
#pragma once

#include <string>
#include <string_view>

namespace f8::tuning_db {

[[nodiscard]] std::string this_owner();
// Living, on this machine, and not this process. An owner of another machine cannot be asked and
// counts as dead.
[[nodiscard]] bool is_living_other(std::string_view owner);
[[nodiscard]] bool is_living(std::string_view owner);
[[nodiscard]] std::string owner_pid(std::string_view owner);

}  // namespace f8::tuning_db
