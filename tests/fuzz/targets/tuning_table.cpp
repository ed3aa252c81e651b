// Tuning tables, as they stand and with a last line that fits, which gets the edits past the hash.
#include "tuning_db/estimate/tuning_table.hpp"

#include "recipes/sealed_text.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace f8 {
namespace {

void check(std::string_view text) {
  const auto table = TuningTable::parse(text);
  if (!table) {
    FUZZ_CHECK(table.error().code == ErrorCode::kCorrupt ||
               table.error().code == ErrorCode::kUnsupported);
    fuzz::check_readable(table.error().message);
    return;
  }
  fuzz::count_accepted();
  // A table of an older version is written as one of today's.
  const std::string written = table->serialize();
  FUZZ_CHECK(written == text || text.starts_with("float8-table 3\n") ||
             text.starts_with("float8-table 4\n"));
  const auto again = TuningTable::parse(written);
  FUZZ_CHECK(again && again->serialize() == written);
}

}  // namespace
}  // namespace f8

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = f8::fuzz::text_of(data, size);
  f8::check(text);
  f8::check(f8::seal(std::string(text.substr(0, text.rfind("end ")))));
  return 0;
}
