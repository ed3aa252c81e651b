// The options of a linear as one integer: an op's argument that torch.compile keeps as a constant,
// that means the same in every process, and that costs nothing to pass. float8/recipes.py packs it.
//
//   bits 0-3    a named recipe (kRecipeNames), 0: the custom settings of bits 16 to 54
//   bit 4       the device is emulated: tensors are on the CPU
//   bit 5       forward saves nothing, backward casts x and w again; of experts, the weights again
//   bit 6       dynamic scales of non-finite amaxes saturate (FLOAT8_SATURATE)
//   bit 7       backward reads x
//   bit 8       backward reads the weight
//   bit 9       the linear has a bias
//   bit 10      graphs of torch.compile cast what a norm makes of x as it is computed (norm_casts.py); no
//               kernel looks at it
//   bit 11      an emulated device's tensors are staged also where they are on the CPU, for tests
//   bit 12      the weight is frozen: backward gives no dw, and x and dy have no copy for it; of an MLP of
//               experts, w13
//   bit 13      of an MLP of experts, w2 is frozen
//   bits 16-51  six cast settings of six bits, in the order of float8_recipe:
//               scaling (2), granularity (2), format (1), pow2 (1)
//   bits 52-54  fast accumulation of output, grad_input, grad_weight
#pragma once

#include <array>
#include <cstdint>

#include "float8/float8.h"

namespace float8_torch {

inline constexpr std::array<const char*, 7> kRecipeNames = {
    nullptr, "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "bf16"};

class Config {
 public:
  explicit Config(int64_t bits) : bits_(static_cast<uint64_t>(bits)) {}
  explicit Config(uint64_t bits) : bits_(bits) {}

  [[nodiscard]] bool emulate() const { return bit(4); }
  [[nodiscard]] bool recompute() const { return bit(5); }
  [[nodiscard]] bool saturate() const { return bit(6); }
  [[nodiscard]] bool reads_x() const { return bit(7); }
  [[nodiscard]] bool reads_weight() const { return bit(8); }
  [[nodiscard]] bool bias() const { return bit(9); }
  [[nodiscard]] bool frozen() const { return bit(12); }
  [[nodiscard]] bool frozen_w2() const { return bit(13); }
  [[nodiscard]] bool staged() const { return bit(11); }
  [[nodiscard]] int64_t without_staging() const {
    return static_cast<int64_t>(bits_ & ~(uint64_t{1} << 11));
  }
  // The bits that casts and scales depend on.
  [[nodiscard]] uint64_t of_casts() const { return bits_ & ~uint64_t{0b11'1111'1010'0000}; }
  // Those that the plan of expert linears depends on.
  [[nodiscard]] uint64_t of_experts() const {
    return of_casts() | (bits_ & uint64_t{0b11'0000'0010'0000});
  }
  [[nodiscard]] uint64_t bits() const { return bits_; }

  // Fills the recipe's fields of a desc of any type; `custom` outlives the use of the desc. Throws where
  // the bits name no recipe.
  template <class Desc>
  void set_recipe(Desc& desc, float8_recipe& custom) const {
    desc.recipe = recipe_name();
    if (desc.recipe != nullptr) return;
    custom = custom_recipe();
    desc.custom_recipe = &custom;
  }
  // The recipe's settings, also where it is a named one.
  [[nodiscard]] float8_recipe recipe() const;

 private:
  [[nodiscard]] const char* recipe_name() const;  // NULL: the settings are custom ones
  [[nodiscard]] float8_recipe custom_recipe() const;
  [[nodiscard]] bool bit(int i) const { return field(i, 1) != 0; }
  [[nodiscard]] int32_t field(int first, int width) const {
    return static_cast<int32_t>((bits_ >> first) & ((uint64_t{1} << width) - 1));
  }

  uint64_t bits_;
};

}  // namespace float8_torch
