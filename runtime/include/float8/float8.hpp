// float8 for C++17: handles that clean up after themselves, and errors that cannot be overlooked.
// Header-only over float8.h, which says what every argument means, and what holds of lifetimes,
// streams and threads (its conventions).
//
//   auto context = float8::Context::create(0).value();
//   auto linear  = float8::Linear::plan(context, {.m_max = 16384, .n = 4096, .k = 4096}).value();
//   float8::Status status =
//       linear.forward({.x = {x}, .w = {w}, .y = {y}, .workspace = {workspace}}, stream);
// (designated initialisers are C++20; in C++17 set the fields by name)
#pragma once

#include "float8/attention.hpp"
#include "float8/base.hpp"
#include "float8/context.hpp"
#include "float8/counters.hpp"
#include "float8/distributed.hpp"
#include "float8/expert_quantizer.hpp"
#include "float8/experts.hpp"
#include "float8/float8.h"
#include "float8/gemm.hpp"
#include "float8/linear.hpp"
#include "float8/model.hpp"
#include "float8/moe.hpp"
#include "float8/moe_route.hpp"
#include "float8/norm.hpp"
#include "float8/quantizer.hpp"
#include "float8/recipe.hpp"
#include "float8/scales.hpp"
