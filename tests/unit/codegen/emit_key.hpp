// The source of a kernel by its key, for tests of the emitter.
#pragma once

#include <gtest/gtest.h>

#include "codegen/emit.hpp"

namespace f8::codegen {

inline KernelSource emit_key(std::string_view key) {
  const auto spec = parse_kernel_spec(key);
  EXPECT_TRUE(spec) << spec.error().message;
  auto source = emit(*spec);
  EXPECT_TRUE(source) << source.error().message;
  return *std::move(source);
}

}  // namespace f8::codegen
