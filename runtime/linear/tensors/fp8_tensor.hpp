// Views of tensors in fp8, float8_tensor: made from a buffer's layout, checked against a recipe, and
// bound to a call.
#pragma once

#include "float8/float8.h"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/linear/plan/layout.hpp"

namespace f8::runtime {

[[nodiscard]] float8_cast_setting cast_setting(const CastSetting& from);

// The view of the copies at `refs`, a part of what `call` has. A null ref is a copy that is not made.
[[nodiscard]] float8_tensor tensor_view(const Fp8Refs& refs, const CallArguments& call,
                                        int64_t rows, int64_t cols, const Copies& copies);

// Checks that a tensor of `args` has this shape and the copy that is read (q, else qt), made as the
// recipe says. `shards`: qt may lie in shards.
[[nodiscard]] Status check_tensor(const char* args, const char* name, const float8_tensor& tensor,
                                  int64_t rows, int64_t cols, const Copies& copies, bool q,
                                  bool shards = false);
// Lists the memory of that copy.
void add_tensor(CallMemory& memory, const char* name, const float8_tensor& tensor,
                const Copies& copies, bool q);

// Sets the four slots from `first` on (q, its inverse scales, qt, its) to those of a tensor, or to
// what refs give.
void bind_tensor(const float8_tensor& tensor, Slot first, CallArguments& to);
void bind_refs(const Fp8Refs& refs, Slot first, CallArguments& to);

}  // namespace f8::runtime
