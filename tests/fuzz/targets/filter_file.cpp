// Filter files, as they stand and with a last line that fits, which gets the edits past the hash.
#include "recipes/model/filter_file.hpp"

#include "recipes/sealed_text.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace f8 {
namespace {

void check(std::string_view text) {
  const auto file = FilterFile::parse(text);
  if (!file) {
    fuzz::check_readable(file.error().message);
    return;
  }
  fuzz::count_accepted();
  FUZZ_CHECK(file->serialize().value() == text);
  const FilterIndex index(*file);
  for (const FilterFile::Decision& d : file->decisions) FUZZ_CHECK(index.find(d.fqn) == &d);
  for (const FilterFile::Attention& a : file->attention) {
    FUZZ_CHECK(index.find_attention(a.fqn) == &a);
  }
}

}  // namespace
}  // namespace f8

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = f8::fuzz::text_of(data, size);
  f8::check(text);
  f8::check(f8::seal(std::string(text.substr(0, text.rfind("end ")))));
  return 0;
}
