#include "base/dynlib.hpp"

#include <dlfcn.h>

namespace f8 {

Result<DynamicLibrary> DynamicLibrary::open(const char* soname, const char* remedy) {
  void* handle = ::dlopen(soname, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    return fail(ErrorCode::kEnvironment, "cannot load {} ({}); {}", soname,
                reason == nullptr ? "no reason given" : reason, remedy);
  }
  return DynamicLibrary(handle, soname);
}

Result<void*> DynamicLibrary::find(const char* symbol) const {
  void* address = ::dlsym(handle_, symbol);
  if (address == nullptr) {
    return fail(ErrorCode::kEnvironment, "{} has no symbol {}; it is older than CUDA 13.0", soname_,
                symbol);
  }
  return address;
}

}  // namespace f8
