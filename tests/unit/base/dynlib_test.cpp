#include "base/dynlib.hpp"

#include <gtest/gtest.h>

namespace f8 {
namespace {

TEST(DynamicLibrary, AMissingLibraryIsAnEnvironmentErrorWithTheRemedy) {
  const auto library =
      DynamicLibrary::open("libfloat8_no_such.so.9", "version 9", "install the toolkit");
  ASSERT_FALSE(library);
  EXPECT_EQ(library.error().code, ErrorCode::kEnvironment);
  EXPECT_TRUE(library.error().message.starts_with("cannot load libfloat8_no_such.so.9 ("))
      << library.error().message;
  EXPECT_TRUE(library.error().message.ends_with("; install the toolkit"));
  EXPECT_EQ(library.error().message.find('\n'), std::string::npos);
}

TEST(DynamicLibrary, ResolvesAFunctionAndNamesAMissingOne) {
  const auto library = DynamicLibrary::open("libm.so.6", "no C library", "install a C library");
  ASSERT_TRUE(library) << library.error().message;
  double (*cosine)(double) = nullptr;
  const Status found = library->resolve("cos", cosine);
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(cosine(0.0), 1.0);

  double (*missing)(double) = cosine;
  const Status not_found = library->resolve("float8_no_such_symbol", missing);
  ASSERT_FALSE(not_found);
  EXPECT_EQ(not_found.error().code, ErrorCode::kEnvironment);
  EXPECT_EQ(not_found.error().message,
            "libm.so.6 has no symbol float8_no_such_symbol, which no C library has; "
            "install a C library");
  EXPECT_EQ(missing, cosine);
}

}  // namespace
}  // namespace f8
