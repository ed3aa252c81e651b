// What tests of the C++ headers share: a call has the words of the C interface, and a handle lives as long as its last
// copy.
#pragma once

#include <optional>
#include <string>

#include "runtime/c_abi/common.hpp"
#include "tests/unit/runtime/c_abi/experts/moe_fixture.hpp"

namespace float8::testing {

inline constexpr float8_dtype kNoDtype = static_cast<float8_dtype>(3);

inline std::string bytes_of(const Memory& memory, size_t bytes) {
  return {static_cast<const char*>(memory.get()), bytes};
}

// Both descriptions have fields of the same names, which `change` spoils.
template <class Wrapper, class Desc, class CDesc, class Handle, class Change>
void expect_refused_as_in_c(const Context& context, Desc desc, CDesc c,
                            float8_status (*plan)(float8_context*, const CDesc*, Handle**),
                            const Change& change) {
  change(desc);
  change(c);
  Handle* none = nullptr;
  const float8_status status = plan(context.get(), &c, &none);
  ASSERT_NE(status, FLOAT8_OK);
  const std::string words = float8_last_error();
  const auto made = Wrapper::plan(context, desc);
  ASSERT_FALSE(made) << words;
  EXPECT_EQ(made.error().code, status);
  EXPECT_EQ(made.error().message, words);
}

// The status of a call in C++, and the same call in C.
template <class Handle, class Args>
void expect_refused_as_in_c(const Status& status,
                            float8_status (*call)(const Handle*, const Args*, float8_stream),
                            const Handle* handle, const Args& args) {
  EXPECT_NE(status.code(), FLOAT8_OK);
  EXPECT_EQ(status.code(), call(handle, &args, nullptr));
  EXPECT_EQ(status.message(), float8_last_error());
}

// A plan keeps its context alive, which ends with the plan's last copy and not before: its handle is
// destroyed. What was moved from has none.
template <class Wrapper, class Desc>
void expect_a_handle(const Desc& desc) {
  std::weak_ptr<f8::runtime::Context> context;
  std::optional<Wrapper> first;
  {
    const Context made = emulated();
    context = made.get()->context;
    first.emplace(Wrapper::plan(made, desc).value());
  }
  ASSERT_FALSE(context.expired());
  const auto* const handle = first->get();
  Wrapper second = std::move(*first);
  EXPECT_EQ(first->get(), nullptr);
  EXPECT_EQ(second.get(), handle);
  *first = second;
  EXPECT_EQ(first->get(), handle);
  second = std::move(*first);
  first.reset();
  EXPECT_FALSE(context.expired());
  EXPECT_EQ(second.get(), handle);
  second = Wrapper::plan(emulated(), desc).value();
  EXPECT_TRUE(context.expired());
}

}  // namespace float8::testing
