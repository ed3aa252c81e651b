// Exported databases: what is read is written as lines that read back as the same records.
#include "tests/fuzz/fuzz.hpp"
#include "tuning_db/snapshot.hpp"

namespace f8::tuning_db {
namespace {

std::string lines_of(const Snapshot& snapshot) {
  std::string text = "{\"float8_tuning_db\":3}\n";
  const auto append = [&text](const auto& records) {
    for (const auto& record : records) text += to_json_line(record) + '\n';
  };
  append(snapshot.devices);
  append(snapshot.toolchains);
  append(snapshot.methods);
  append(snapshot.runs);
  append(snapshot.trials);
  return text;
}

}  // namespace
}  // namespace f8::tuning_db

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace f8;
  const auto snapshot = tuning_db::parse_jsonl(fuzz::text_of(data, size), "file");
  if (!snapshot) {
    fuzz::check_readable(snapshot.error().message);
    return 0;
  }
  fuzz::count_accepted();
  FUZZ_CHECK(tuning_db::check_json(*snapshot).has_value());
  const std::string text = tuning_db::lines_of(*snapshot);
  const auto again = tuning_db::parse_jsonl(text, "again");
  FUZZ_CHECK(again && tuning_db::lines_of(*again) == text);
  return 0;
}
