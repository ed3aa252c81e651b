// A kernel spec describes a kernel: it is enough to emit it, and has nothing that varies from call
// to call. Shapes, pointers and scales are run-time arguments, so layers and token counts share
// kernels.
//
// A spec has a text form, its key, which names it in golden files and in `emit --kernel`: its kind
// and fields, as the kinds' files in codegen/specs have them. A spec has one key.
#pragma once

#include <variant>

#include "codegen/specs/amax.hpp"
#include "codegen/specs/blocks/adamw.hpp"
#include "codegen/specs/blocks/attention.hpp"
#include "codegen/specs/blocks/moe.hpp"
#include "codegen/specs/blocks/rms_norm.hpp"
#include "codegen/specs/blocks/rotary.hpp"
#include "codegen/specs/cast.hpp"
#include "codegen/specs/column_sums.hpp"
#include "codegen/specs/computed.hpp"
#include "codegen/specs/fingerprint.hpp"
#include "codegen/specs/gemm.hpp"
#include "codegen/specs/group_layout.hpp"
#include "codegen/specs/scale_update.hpp"

namespace f8::codegen {

template <Kind... Kinds>
using OneOf = std::variant<Kinds...>;
// The registered kinds.
using KernelSpec =
    OneOf<AmaxSpec, CastSpec, GemmSpec, ScaleUpdateSpec, FoundInfSpec, FingerprintSpec,
          ColumnSumsSpec, BiasGradSpec, ComputedAmaxSpec, ComputedCastSpec, GroupLayoutSpec,
          RouteSpec, CombineSpec, AttentionForwardSpec, AttentionBackwardSpec, AttentionCastSpec,
          RotarySpec, RmsNormSpec, AdamwSpec, AdamwCastSpec>;

[[nodiscard]] std::string key(const KernelSpec& spec);
[[nodiscard]] Result<KernelSpec> parse_kernel_spec(std::string_view text);

// Checks that a spec is legal on Hopper: register and shared-memory budgets, tile multiples. The
// error says which limit is exceeded and by how much; the tuner records it as the reason of a
// pruned configuration.
[[nodiscard]] Status validate(const KernelSpec& spec);

[[nodiscard]] Stub stub(const KernelSpec& spec);
[[nodiscard]] LaunchTraits launch_traits(const KernelSpec& spec);
[[nodiscard]] ParameterBytes parameter_bytes(const KernelSpec& spec);

}  // namespace f8::codegen
