# The C++ program of docs/c-distributed.md compiles without a warning, runs on emulated ranks, and prints what
# its comment says.
file(READ ${DOCUMENT} text)
string(FIND "${text}" "```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "${DOCUMENT} has no C++ program")
endif()
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${text}" ${begin} -1 text)
string(FIND "${text}" "```\n" end)
string(SUBSTRING "${text}" 0 ${end} program)
file(WRITE ${OUTPUT}.cpp "${program}")

set(sanitize)
if(SANITIZE)
  set(sanitize -fsanitize=${SANITIZE})
endif()
get_filename_component(folder ${LIBRARY} DIRECTORY)
execute_process(COMMAND ${CXX} -std=c++20 -pedantic -Wall -Wextra -Werror ${sanitize} -I${INCLUDE}
                        ${OUTPUT}.cpp -o ${OUTPUT} ${LIBRARY} -Wl,-rpath,${folder} -pthread
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${OUTPUT} OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
foreach(rank 0 1)
  if(NOT printed MATCHES "rank ${rank}: dw is 1\n")
    message(FATAL_ERROR "the program prints: ${printed}")
  endif()
endforeach()
