# How this project declares targets.
#
#   float8_add_library(NAME LINK ...)              the folder's *.cpp as the static layer library f8_<NAME>
#   float8_add_test(NAME FOLDER ... LINK ... LABELS ...)   a folder's *.cpp as a GoogleTest program, known to ctest
add_library(float8_options INTERFACE)
# A newer compiler's new warnings must not stop a project that only uses float8.
option(FLOAT8_WERROR "Warnings are errors" ${PROJECT_IS_TOP_LEVEL})
target_compile_options(float8_options INTERFACE
  -Wall -Wextra $<$<BOOL:${FLOAT8_WERROR}>:-Werror> $<$<COMPILE_LANGUAGE:CXX>:-Wconversion -Wshadow>)
target_include_directories(float8_options INTERFACE ${CMAKE_CURRENT_SOURCE_DIR})
set(FLOAT8_TEST_TIMEOUT 300)
if(FLOAT8_SANITIZE)
  set(FLOAT8_TEST_TIMEOUT 1800)
  target_compile_options(float8_options INTERFACE
    -fsanitize=${FLOAT8_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    -Wno-maybe-uninitialized  # instrumented code of the standard library has it
    -D_GLIBCXX_ASSERTIONS)
  target_link_options(float8_options INTERFACE -fsanitize=${FLOAT8_SANITIZE})
endif()

# For code that only starts the work of others (tests, the command line): builds faster.
set(FLOAT8_COLD_CODE $<$<CONFIG:Release>:-O1>)

function(float8_add_library name)
  cmake_parse_arguments(ARG "" "" "LINK;EXTRA_SOURCES" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS *.cpp)
  add_library(f8_${name} STATIC ${sources} ${ARG_EXTRA_SOURCES})
  target_link_libraries(f8_${name} PRIVATE $<BUILD_INTERFACE:float8_options> PUBLIC ${ARG_LINK})
  target_include_directories(f8_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
endfunction()

function(float8_add_test name)
  cmake_parse_arguments(ARG "" "FOLDER" "LINK;LABELS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${ARG_FOLDER}/*.cpp)
  if(NOT sources)
    return()
  endif()
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE float8_options ${ARG_LINK} GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE FLOAT8_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_compile_options(${name} PRIVATE ${FLOAT8_COLD_CODE})
  add_test(NAME ${name} COMMAND ${name})
  # A program all of whose tests skipped is listed as skipped, not as passed.
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${FLOAT8_TEST_TIMEOUT}
    SKIP_REGULAR_EXPRESSION "\\[  PASSED  \\] 0 tests")
endfunction()
