# The public headers and the documents' first C++ examples compile without a warning: the README's as C++20, that of docs/build.md as C++17. Each is its includes, then
# its statements as the body of a function that has the names which the text takes for granted.
# A designated initializer names some of a struct's fields; the others have default values.
file(WRITE ${OUTPUT} "#include <float8/float8.h>
#include <float8/float8.hpp>
void example() {
  (void)float8::Context::create(0, {.emulate = true});
  [[maybe_unused]] const float8::LinearDesc linear{.n = 16};
  [[maybe_unused]] const float8::QuantizerDesc quantizer{.cols = 16};
  [[maybe_unused]] const float8::GemmDesc gemm{.n = 16};
  [[maybe_unused]] const float8::ScalesOptions scales{.margin = 1};
  [[maybe_unused]] const float8::ModelOptions model{.tokens = 16};
  [[maybe_unused]] const float8::ModelLayer layer{.name = {}};
  [[maybe_unused]] const float8::ModelVerdict verdict{.speedup = 2};
  [[maybe_unused]] const float8::Error error{.code = FLOAT8_OK};
  [[maybe_unused]] const float8::ForwardArgs forward{.x = {nullptr}};
  [[maybe_unused]] const float8::BackwardArgs backward{.dy = {nullptr}};
}
")
execute_process(COMMAND ${CXX} -std=c++20 -pedantic -Wall -Wextra -Werror -I${INCLUDE} -fsyntax-only
                        ${OUTPUT} COMMAND_ERROR_IS_FATAL ANY)

foreach(standard 20 17)
  set(document README.md)
  if(standard EQUAL 17)
    set(document docs/build.md)
  endif()
  file(READ ${ROOT}/${document} text)
  string(FIND "${text}" "```cpp\n" begin)
  if(begin EQUAL -1)
    message(FATAL_ERROR "${document} has no C++${standard} example")
  endif()
  math(EXPR begin "${begin} + 7")
  string(SUBSTRING "${text}" ${begin} -1 text)
  string(FIND "${text}" "```\n" end)
  string(SUBSTRING "${text}" 0 ${end} example)

  string(REGEX MATCHALL "#include[^\n]*\n" includes "${example}")
  string(REGEX REPLACE "#include[^\n]*\n" "" statements "${example}")
  string(REPLACE ";#" "#" includes "${includes}")
  file(WRITE ${OUTPUT} "${includes}
void example([[maybe_unused]] const void* x, [[maybe_unused]] const void* w, [[maybe_unused]] void* y,
             [[maybe_unused]] void* saved, [[maybe_unused]] const void* dy, [[maybe_unused]] void* dx,
             [[maybe_unused]] void* dw, void* workspace, float8_stream stream) {
${statements}}
")
  execute_process(COMMAND ${CXX} -std=c++${standard} -pedantic -Wall -Wextra -Werror -I${INCLUDE}
                          -fsyntax-only ${OUTPUT} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
