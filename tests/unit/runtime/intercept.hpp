// Counts what the calling thread asks of the system while it lives: memory, locks, waiting, text,
// files, the environment. Calls reach this program's definitions before those of libc, which they
// go on to.
#pragma once

namespace f8::runtime::testing {

struct SystemCalls {
  int allocations = 0;  // malloc and its like, operator new included
  int locks = 0;        // mutexes and reader-writer locks
  int waits = 0;        // on a condition or a clock, or the rest of a time slice given away
  int texts = 0;        // formatted by libc; fmt's are allocations
  int files = 0;        // opened
  int environment = 0;  // variables read
  bool operator==(const SystemCalls&) const = default;
};

class Intercept {
 public:
  Intercept();
  ~Intercept();
  Intercept(const Intercept&) = delete;
  Intercept& operator=(const Intercept&) = delete;
  [[nodiscard]] SystemCalls calls() const;
  // A sanitizer has its own definitions in the way.
  [[nodiscard]] static bool works();
};

}  // namespace f8::runtime::testing
