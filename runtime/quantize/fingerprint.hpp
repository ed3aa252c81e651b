// Whether weights changed since the comparison before, found in device memory (recipes/reference/fingerprint.hpp):
// copies of a weight are cast again where its bytes are others, whoever wrote them, and the host need
// not know.
#pragma once

#include "float8/float8.h"
#include "runtime/device/calls/call_array.hpp"
#include "runtime/device/context.hpp"

namespace f8::runtime {

using FingerprintCall = float8_fingerprint_args;
using FingerprintCalls = CallArray<FingerprintCall>;

// Compares every weight with its fingerprint, in a launch for each 32 of them, and keeps the new one.
// The first call of a context loads the kernel; one without weights does no more.
[[nodiscard]] Status compare_weights(Context& context, const FingerprintCalls& calls,
                                     Stream stream);

}  // namespace f8::runtime
