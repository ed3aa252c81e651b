#include <cstdio>
#include <cstdlib>

#include "base/text.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace f8::fuzz {
namespace {

uint64_t g_accepted = 0;

}  // namespace

void count_accepted() {
  ++g_accepted;
}

uint64_t accepted() {
  return g_accepted;
}

void check_readable(const std::string& message) {
  FUZZ_CHECK(!message.empty());
  FUZZ_CHECK(message.size() <= 1500);
  FUZZ_CHECK(!has_control(message));
}

void broken(const char* file, int line, const char* promise) {
  std::fprintf(stderr, "%s:%d: this does not hold: %s\n", file, line, promise);
  std::abort();
}

}  // namespace f8::fuzz
