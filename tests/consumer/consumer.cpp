// A C++17 trainer reduced to its first call: a context where there is a Hopper GPU, else a status
// that says what is missing.
#include <cstdio>
#include <float8/float8.hpp>

int main() {
  std::printf("float8 %s\n", float8::version().c_str());
  auto context = float8::Context::create(0);
  if (!context) {
    const float8::Error& error = context.error();
    std::printf("%s: %s\n", float8_status_string(error.code), error.message.c_str());
    const bool no_gpu = error.code == FLOAT8_ENVIRONMENT || error.code == FLOAT8_UNSUPPORTED;
    return no_gpu && !error.message.empty() ? 0 : 1;
  }
  float8::LinearDesc desc;
  desc.m_max = 16;
  desc.n = 16;
  desc.k = 17;
  auto linear = float8::Linear::plan(context.value(), desc);
  return !linear && linear.error().code == FLOAT8_INVALID_ARGUMENT ? 0 : 1;
}
