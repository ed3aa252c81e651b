# The public headers, each C++ one also alone as C++17, and the documents' first C++ examples compile without a warning: that of docs/build.md as C++17, others as
# C++20. Each is its includes, then its statements as the body of a function that has the names which the text takes for granted.
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
  [[maybe_unused]] const float8::GroupLayoutDesc layout{.experts = 2};
  [[maybe_unused]] const float8::ExpertsDesc experts{.n = 16};
  [[maybe_unused]] const float8::ExpertQuantizerDesc casts{.n = 16};
  [[maybe_unused]] const float8::MoeDesc moe{.dim = 16};
  [[maybe_unused]] const float8::MoeRouteDesc route{.top_k = 2};
  [[maybe_unused]] const float8::MoeCombineDesc combine{.cols = 16};
  [[maybe_unused]] const float8::AttentionDesc attention{.causal = true};
  [[maybe_unused]] const float8::AdamwTensor weight{.rows = 16};
  [[maybe_unused]] const float8::AdamwArgs adamw{.lr = 1};
}
")
execute_process(COMMAND ${CXX} -std=c++20 -pedantic -Wall -Wextra -Werror -I${INCLUDE} -fsyntax-only
                        ${OUTPUT} COMMAND_ERROR_IS_FATAL ANY)

file(GLOB headers ${INCLUDE}/float8/*.hpp)
foreach(header ${headers})
  cmake_path(GET header FILENAME name)
  file(WRITE ${OUTPUT} "#include <float8/${name}>\n")
  execute_process(COMMAND ${CXX} -std=c++17 -pedantic -Wall -Wextra -Werror -I${INCLUDE} -fsyntax-only
                          ${OUTPUT} COMMAND_ERROR_IS_FATAL ANY)
endforeach()

foreach(document README.md docs/experts.md docs/attention.md docs/build.md)
  set(standard 20)
  if(document STREQUAL "docs/build.md")
    set(standard 17)
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
             [[maybe_unused]] void* dw, void* workspace, float8_stream stream,
             [[maybe_unused]] const void* ids, [[maybe_unused]] int32_t* index, [[maybe_unused]] int32_t* position,
             [[maybe_unused]] int32_t* offsets, [[maybe_unused]] const float* scores, [[maybe_unused]] float* row_scores,
             [[maybe_unused]] void* groups, [[maybe_unused]] const void* w13, [[maybe_unused]] const void* w2,
             [[maybe_unused]] void* rows, [[maybe_unused]] void* q, [[maybe_unused]] void* k, [[maybe_unused]] void* v,
             [[maybe_unused]] void* o, [[maybe_unused]] float* lse, [[maybe_unused]] void* dout, [[maybe_unused]] void* dq,
             [[maybe_unused]] void* dk, [[maybe_unused]] void* dv) {
${statements}}
")
  execute_process(COMMAND ${CXX} -std=c++${standard} -pedantic -Wall -Wextra -Werror -I${INCLUDE}
                          -fsyntax-only ${OUTPUT} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
