// A checksum for each row, in the row's column `checksum`: XXH3-64 of the table's name and of the
// types and values of all other columns. A row that was changed without it (a flipped bit, another
// program) is found when the file is opened. It finds accidents; who means to deceive can compute
// it too.
#pragma once

#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {

// Computes and stores the checksums of these rows; Transaction::commit calls it, so no writer has to
// know of them. Tables without the column are passed over.
[[nodiscard]] Status store_checksums(Connection& db, const ChangedRows& changed);
[[nodiscard]] Status store_all_checksums(Connection& db);
// Compares every row with its checksum; the error names the first that differs.
[[nodiscard]] Status verify_checksums(const Connection& db);

}  // namespace f8::tuning_db
