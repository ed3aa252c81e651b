// The built-in database: builtin.f8db, which the build makes of tuning_db/data/*.jsonl, as bytes of
// this object. SQLite reads them where they lie. Its tables are those that the build made of the same rows.
#include <span>

#include "tuning_db/estimate/builtin_tables.hpp"
#include "tuning_db/state.hpp"

asm(R"(
  .pushsection .rodata
  .balign 16
  .hidden f8_builtin_db_begin
  .globl f8_builtin_db_begin
f8_builtin_db_begin:
  .incbin "builtin.f8db"
  .hidden f8_builtin_db_end
  .globl f8_builtin_db_end
f8_builtin_db_end:
  .popsection
)");

extern "C" {
extern const unsigned char f8_builtin_db_begin[];
extern const unsigned char f8_builtin_db_end[];
}

namespace f8::tuning_db {

Result<Database> Database::builtin() {
  auto db = F8_TRY(Connection::open_bytes({f8_builtin_db_begin, f8_builtin_db_end}, "built-in"));
  return State::wrap({std::move(db), "built-in", false, builtin_table});
}

}  // namespace f8::tuning_db
