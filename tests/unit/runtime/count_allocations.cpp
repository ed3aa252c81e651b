#include "tests/unit/runtime/count_allocations.hpp"

#include <cstdlib>
#include <new>

namespace {
thread_local bool g_counting = false;
thread_local int g_count = 0;
}  // namespace

void* operator new(size_t bytes) {
  if (g_counting) ++g_count;
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  if (g_counting) ++g_count;
  return std::malloc(bytes);
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t) noexcept {
  std::free(p);
}

namespace f8::runtime::testing {

CountAllocations::CountAllocations() {
  g_count = 0;
  g_counting = true;
}
CountAllocations::~CountAllocations() {
  g_counting = false;
}
int CountAllocations::count() const {
  return g_count;
}

}  // namespace f8::runtime::testing
