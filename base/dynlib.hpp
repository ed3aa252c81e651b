// A shared library that is opened by soname at its first use, so that a program starts and does all
// its other work where the library is missing. The dynamic loader searches LD_LIBRARY_PATH, the
// RUNPATH of the program or library that holds this code ($ORIGIN and ../lib; the build tree's lib
// has links to the toolkit, see cmake/FindCudaHeaders.cmake), and the system's folders.
#pragma once

#include <string>

#include "base/error.hpp"

namespace f8 {

class DynamicLibrary {
 public:
  // `remedy` ends the error messages; it says what to install where the library is missing or lacks a symbol.
  // `version` is one that has all symbols that the caller resolves, as "NCCL 2.4". Both outlive the library.
  [[nodiscard]] static Result<DynamicLibrary> open(const char* soname, const char* version,
                                                   const char* remedy);

  template <class Function>
  [[nodiscard]] Status resolve(const char* symbol, Function*& out) const {
    out = reinterpret_cast<Function*>(F8_TRY(find(symbol)));
    return {};
  }
  // Returns what dlopen gave.
  [[nodiscard]] void* handle() const { return handle_; }

 private:
  DynamicLibrary(void* handle, std::string soname, const char* version, const char* remedy)
      : handle_(handle), soname_(std::move(soname)), version_(version), remedy_(remedy) {}
  [[nodiscard]] Result<void*> find(const char* symbol) const;

  void* handle_;  // It is never closed, because CUDA libraries do not survive that.
  std::string soname_;
  const char* version_;
  const char* remedy_;
};

}  // namespace f8
