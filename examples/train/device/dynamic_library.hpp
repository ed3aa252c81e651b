// CUDA's libraries are opened by name when they are needed, so that the program starts, and
// emulates, on a machine that has none of them.
#pragma once

#include <dlfcn.h>

#include <string>

#include "error.hpp"

namespace train {

class DynamicLibrary {
 public:
  // `remedy` completes the message that says that the library is missing.
  DynamicLibrary(std::string name, const char* remedy)
      : name_(std::move(name)), handle_(dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) fail(FLOAT8_ENVIRONMENT, "%s; %s", dlerror(), remedy);
  }
  template <class Function>
  void find(const char* symbol, Function*& out) const {
    out = reinterpret_cast<Function*>(dlsym(handle_, symbol));
    if (out == nullptr) {
      fail(FLOAT8_ENVIRONMENT, "%s has no %s; install a newer one", name_.c_str(), symbol);
    }
  }

 private:
  std::string name_;
  void* handle_;  // stays open: CUDA's libraries do not survive being closed
};

}  // namespace train
