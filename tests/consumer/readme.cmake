# The README's C++ example compiles: its includes, then its statements as the body of a function that
# has the names which the text takes for granted.
file(READ ${README} text)
string(FIND "${text}" "```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "${README} has no C++ example")
endif()
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${text}" ${begin} -1 text)
string(FIND "${text}" "```" end)
string(SUBSTRING "${text}" 0 ${end} example)

string(REGEX MATCHALL "#include[^\n]*\n" includes "${example}")
string(REGEX REPLACE "#include[^\n]*\n" "" statements "${example}")
string(REPLACE ";#" "#" includes "${includes}")
file(WRITE ${OUTPUT} "${includes}
void example(const void* x, const void* w, void* y, void* saved, const void* dy, void* dx, void* dw,
             void* workspace, float8_stream stream) {
${statements}}
")
execute_process(COMMAND ${CXX} -std=c++20 -Wall -Wextra -Werror -I${INCLUDE} -fsyntax-only ${OUTPUT}
                COMMAND_ERROR_IS_FATAL ANY)
