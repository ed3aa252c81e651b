// Shared libraries opened by soname at first need, so that everything but the calls themselves
// works where the library is missing. The executable's rpath names the toolkit folder found at
// configure time.
#pragma once

#include <string>

#include "base/error.hpp"

namespace f8 {

class DynamicLibrary {
 public:
  // `remedy` completes the error: what to install where the library is missing.
  [[nodiscard]] static Result<DynamicLibrary> open(const char* soname, const char* remedy);

  template <class Function>
  [[nodiscard]] Status resolve(const char* symbol, Function*& out) const {
    out = reinterpret_cast<Function*>(F8_TRY(find(symbol)));
    return {};
  }

 private:
  DynamicLibrary(void* handle, std::string soname) : handle_(handle), soname_(std::move(soname)) {}
  [[nodiscard]] Result<void*> find(const char* symbol) const;

  void* handle_;  // never closed: CUDA libraries do not survive being unloaded
  std::string soname_;
};

}  // namespace f8
