// Calls that must not throw. Our code throws nothing, but libraries and a full memory do, and an
// exception that leaves a thread ends the process.
#pragma once

#include <exception>
#include <new>

#include "base/error.hpp"

namespace f8 {

// Returns what `call` returns, a Result or a Status; or what it throws as an error.
template <class Call>
auto without_exceptions(Call&& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::kOutOfMemory, "out of memory");
  } catch (const std::exception& error) {
    return fail(ErrorCode::kInternal, "{}", error.what());
  } catch (...) {
    return fail(ErrorCode::kInternal, "an exception of unknown type");
  }
}

}  // namespace f8
