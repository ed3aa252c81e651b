// A library or a function that is missing becomes a message that names it and says what to do.
#include "examples/train/device/dynamic_library.hpp"

#include "train_test.hpp"

namespace train {
namespace {

TEST(TrainDynamicLibrary, FindsFunctions) {
  const DynamicLibrary library("libm.so.6", "install it");
  double (*cosine)(double) = nullptr;
  library.find("cos", cosine);
  EXPECT_EQ(cosine(0), 1);
}

TEST(TrainDynamicLibrary, SaysWhatIsMissing) {
  const float8::Error no_library =
      error_of([] { DynamicLibrary("libnothing.so.1", "install it, or use --emulate"); });
  EXPECT_EQ(no_library.code, FLOAT8_ENVIRONMENT);
  EXPECT_NE(no_library.message.find("libnothing.so.1"), std::string::npos) << no_library.message;
  EXPECT_NE(no_library.message.find("; install it, or use --emulate"), std::string::npos);

  const DynamicLibrary library("libm.so.6", "install it");
  void (*function)() = nullptr;
  const float8::Error no_function = error_of([&] { library.find("nothing", function); });
  EXPECT_EQ(no_function.code, FLOAT8_ENVIRONMENT);
  EXPECT_NE(no_function.message.find("libm.so.6 has no nothing"), std::string::npos)
      << no_function.message;
}

}  // namespace
}  // namespace train
