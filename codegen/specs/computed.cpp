#include "codegen/specs/computed.hpp"

#include <algorithm>

#include "codegen/kernels/kernel_args.cuh"
#include "codegen/specs/text.hpp"

namespace f8::codegen {
namespace {

struct ActivationName {
  std::string_view key, name;
};
constexpr ActivationName kActivations[] = {{"silu", "Activation::kSilu"},
                                           {"gelu", "Activation::kGelu"},
                                           {"gelu_tanh", "Activation::kGeluTanh"},
                                           {"relu2", "Activation::kRelu2"}};

const ActivationName& name_of(Activation activation) {
  return kActivations[static_cast<size_t>(activation)];
}

// What the two kinds differ in.
struct OfCast {
  static constexpr std::string_view kKind = "cast", kArgs = "ComputedCastArgs";
  static constexpr std::string_view kFile = "activation_cast.cuh";
  static constexpr size_t kBytes = sizeof(kernels::ComputedCastArgs);
  static std::string config(const CastSpec& cast) { return cast_config(cast); }
  static int blocks_per_sm(const CastSpec&, Computed) { return 0; }
};
struct OfAmax {
  static constexpr std::string_view kKind = "amax", kArgs = "ComputedAmaxArgs";
  static constexpr std::string_view kFile = "activation_amax.cuh";
  static constexpr size_t kBytes = sizeof(kernels::ComputedAmaxArgs);
  static std::string config(const AmaxSpec& amax) { return amax_config(amax); }
  // All blocks of a tensor's launch are to be resident.
  static int blocks_per_sm(const AmaxSpec& amax, Computed source) {
    return amax.row || amax.col || amax.in == Dtype::kF32 ? 0 : tensor_blocks_per_sm(source);
  }
};
template <class Of>
using TraitsOf = std::conditional_t<std::is_same_v<Of, CastSpec>, OfCast, OfAmax>;

Status check_options(const CastSpec& cast, Computed source) {
  if (cast.one_launch || cast.list || cast.noop_flag || cast.from_f32 || cast.shard || cast.group ||
      (cast.sums && !is_gradient(source))) {
    return fail(ErrorCode::kInvalidArgument,
                "a cast of what is computed has the options /pow2, /hold and /count alone, and "
                "/sums of gradients");
  }
  return {};
}
Status check_options(const AmaxSpec& amax, Computed) {
  if (amax.block || amax.list || amax.noop_flag || amax.from_f32 || amax.group) {
    return fail(
        ErrorCode::kInvalidArgument,
        "maxima of what is computed are over the tensor, rows and columns, without options");
  }
  return {};
}

}  // namespace

std::string_view to_string(Computed source) {
  const std::string_view kind = ComputedCastSpec::kKinds[static_cast<size_t>(source)];
  return kind.substr(0, kind.size() - std::string_view("_cast").size());
}

std::string_view to_string(Activation activation) {
  return name_of(activation).key;
}

Result<Activation> parse_activation(std::string_view text) {
  const auto* found = std::ranges::find(kActivations, text, &ActivationName::key);
  if (found != std::end(kActivations)) return static_cast<Activation>(found - kActivations);
  return fail(ErrorCode::kInvalidArgument,
              "unknown activation {}: expected silu, gelu, gelu_tanh or relu2", quote(text));
}

template <class Of>
Result<ComputedSpec<Of>> ComputedSpec<Of>::parse(std::string_view kind, std::string_view rest) {
  ComputedSpec spec;
  spec.source = static_cast<Computed>(std::ranges::find(kKinds, kind) - kKinds.begin());
  if (has_activation(spec.source)) {
    spec.activation = F8_TRY(parse_activation(take_until(rest, '/')));
  }
  spec.of = F8_TRY(Of::parse(TraitsOf<Of>::kKind, rest));
  return spec;
}

template <class Of>
std::string ComputedSpec<Of>::key() const {
  const std::string plain = of.key();
  const std::string_view rest = std::string_view(plain).substr(TraitsOf<Of>::kKind.size() + 1);
  const std::string_view kind = kKinds[static_cast<size_t>(source)];
  return has_activation(source) ? f8::format("{}/{}/{}", kind, name_of(activation).key, rest)
                                : f8::format("{}/{}", kind, rest);
}

template <class Of>
Status ComputedSpec<Of>::validate() const {
  F8_TRY(of.validate());
  return check_options(of, source);
}

template <class Of>
Stub ComputedSpec<Of>::stub() const {
  using Traits = TraitsOf<Of>;
  std::string config = Traits::config(of);
  if (has_activation(source)) {
    config.insert(config.rfind("}"),
                  constant("Activation", "kActivation", name_of(activation).name));
  }
  return function_stub(has_activation(source) ? Traits::kFile : "norm.cuh",
                       kKinds[static_cast<size_t>(source)], config, Traits::kArgs,
                       parameters().first, launch(), Traits::blocks_per_sm(of, source));
}

template <class Of>
ParameterBytes ComputedSpec<Of>::parameters() const {
  return {.first = TraitsOf<Of>::kBytes};
}

template struct ComputedSpec<AmaxSpec>;
template struct ComputedSpec<CastSpec>;

}  // namespace f8::codegen
