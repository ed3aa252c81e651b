// The reduction over ranks that a call needs. A communicator is of the call's kind of device, else the
// call is refused.
#pragma once

#include "runtime/c_abi/common.hpp"
#include "runtime/quantize/delayed_scales.hpp"

namespace f8::c_abi {

// `reduces`: the call would reduce amaxes over `ranks`, which `field` names, if they are not NULL.
[[nodiscard]] Result<runtime::AmaxReducer> amax_reducer(const runtime::Context& context,
                                                        const char* field, float8_nccl_comm ranks,
                                                        bool reduces);

}  // namespace f8::c_abi
