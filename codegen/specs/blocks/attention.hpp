// The forward of attention in fp8 (kernels/attention/attention_forward.cuh), and the casts of its operands
// (attention_cast.cuh); and the backward in fp8: its casts (attention_backward_cast.cuh), dQ (attention_backward_dq.cuh),
// and dK with dV, which heads of 256 have each in a kernel (attention_backward_dkv.cuh).
//   attention := "attention_forward/" head "/" mask ["/packed"] "/s" stages
//   backward  := "attention_backward_dq/" head "/" mask ["/packed"]
//              | "attention_backward_dkv/" ("d64" | "d128") "/" mask ["/packed"]
//              | ("attention_backward_dk/" | "attention_backward_dv/") "d256/" mask ["/packed"]
//   casts     := ("attention_sum_keys" | "attention_cast" | "attention_dequantize" | "attention_backward_cast") "/" head
//                ["/packed"] | ("attention_layout/" | "attention_spans/" | "attention_finish/") head "/packed"
//   mask      := "full" | "causal" | "window"
//   head      := "d64" | "d128" | "d256"
#pragma once

#include "codegen/specs/kind.hpp"

namespace f8::codegen {

// The elements of a head that these kernels have.
inline constexpr int kAttentionHeadDims[] = {64, 128, 256};

// The keys of a query: all, those up to its own, or the last ones of these, so many as the launch says.
enum class AttentionMask { kFull, kCausal, kWindow };

struct AttentionForwardSpec {
  int head_dim = 128;
  AttentionMask mask = AttentionMask::kFull;
  bool packed = false;  // sequences behind each other, from offsets on the device
  int stages = 3;       // tiles of keys that a CTA loads ahead

  // With as many stages as measured best.
  [[nodiscard]] static constexpr AttentionForwardSpec of(int head_dim, AttentionMask mask,
                                                         bool packed) {
    AttentionForwardSpec spec{head_dim, mask, packed, 0};
    spec.stages = head_dim == 256 ? 2 : head_dim == 64 || spec.warpgroups() == 3 ? 4 : 3;
    return spec;
  }
  // Warpgroups of 64 queries each: three where their registers hold a head. Packed sequences lie in blocks of two, and
  // a window is narrow for more queries.
  [[nodiscard]] constexpr int warpgroups() const {
    return head_dim == 256 || packed || mask == AttentionMask::kWindow ? 2 : 3;
  }

  static constexpr std::string_view kKinds[] = {"attention_forward"};
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<AttentionForwardSpec> parse(std::string_view kind,
                                                          std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const AttentionForwardSpec&) const = default;
};

// The gradients of a kernel of the backward.
enum class AttentionGradients { kDq, kDkv, kDk, kDv };

struct AttentionBackwardSpec {
  int head_dim = 128;
  AttentionMask mask = AttentionMask::kFull;
  bool packed = false;
  AttentionGradients gradients = AttentionGradients::kDq;

  // Returns true where registers hold the sums of dK and of dV, so that one kernel computes both.
  [[nodiscard]] static constexpr bool has_both(int head_dim) { return head_dim <= 128; }
  // The keys of a stage of dQ's kernel: a tile, or half of one where shared memory has no room for more.
  [[nodiscard]] static constexpr int keys_of_stage(int head_dim) {
    return head_dim <= 128 ? 128 : 64;
  }
  static constexpr std::string_view kKinds[] = {"attention_backward_dq", "attention_backward_dkv",
                                                "attention_backward_dk",
                                                "attention_backward_dv"};  // by `gradients`
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<AttentionBackwardSpec> parse(std::string_view kind,
                                                           std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const AttentionBackwardSpec&) const = default;
};

// The last two are of packed sequences, as the layout: before a library's attention (attention_spans.cuh), and after its forward.
enum class AttentionStep { kSumKeys, kCast, kDequantize, kLayout, kBackwardCast, kSpans, kFinish };

struct AttentionCastSpec {
  int head_dim = 128;
  AttentionStep step = AttentionStep::kCast;
  bool packed = false;

  [[nodiscard]] constexpr bool is_beside_library() const {
    return step == AttentionStep::kSpans || step == AttentionStep::kFinish;
  }
  static constexpr std::string_view kKinds[] = {
      "attention_sum_keys",      "attention_cast",  "attention_dequantize", "attention_layout",
      "attention_backward_cast", "attention_spans", "attention_finish"};  // by step
  [[nodiscard]] std::string key() const;
  [[nodiscard]] static Result<AttentionCastSpec> parse(std::string_view kind,
                                                       std::string_view rest);
  [[nodiscard]] Status validate() const;
  [[nodiscard]] Stub stub() const;
  [[nodiscard]] LaunchTraits launch() const;
  [[nodiscard]] ParameterBytes parameters() const;
  bool operator==(const AttentionCastSpec&) const = default;
};

}  // namespace f8::codegen
