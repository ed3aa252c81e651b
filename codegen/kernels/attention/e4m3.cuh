// Elements of e4m3 and words of them.
#pragma once

#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

F8_DEVICE u32 pack_e4m3(float a, float b, float c, float d) {
  u32 r;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}
// Two elements of e4m3 in fp32.
F8_DEVICE void unpack_e4m3(u16 pair, float& low, float& high) {
  asm("{\n.reg .b32 both;\n.reg .b16 first, second;\ncvt.rn.f16x2.e4m3x2 both, %2;\n"
      "mov.b32 {first, second}, both;\ncvt.f32.f16 %0, first;\ncvt.f32.f16 %1, second;\n}\n"
      : "=f"(low), "=f"(high)
      : "h"(pair));
}

}  // namespace f8::kernels
