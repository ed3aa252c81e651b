#include "base/dynlib.hpp"

#include <dlfcn.h>

namespace f8 {

Result<DynamicLibrary> DynamicLibrary::open(const char* soname, const char* version,
                                            const char* remedy) {
  void* handle = ::dlopen(soname, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    return fail(ErrorCode::kEnvironment, "cannot load {} ({}); {}", soname,
                reason == nullptr ? "no reason given" : reason, remedy);
  }
  return DynamicLibrary(handle, soname, version, remedy);
}

Result<void*> DynamicLibrary::find(const char* symbol) const {
  void* address = ::dlsym(handle_, symbol);
  if (address == nullptr) {
    return fail(ErrorCode::kEnvironment, "{} has no symbol {}, which {} has; {}", soname_, symbol,
                version_, remedy_);
  }
  return address;
}

}  // namespace f8
