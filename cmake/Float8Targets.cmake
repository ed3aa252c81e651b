# How this project declares targets.
#
#   float8_add_library(NAME [ROOMS ...] LINK ...)
#     The folder's *.cpp, and those of its subfolders ROOMS, as the static layer library f8_<NAME>.
#   float8_add_test(NAME FOLDER ... [ROOMS ...] [SHARDS N] LINK ... LABELS ...)
#     A folder's *.cpp, and those of its subfolders ROOMS, as a GoogleTest program that ctest knows;
#     with SHARDS as N tests of ctest, NAME_0 and so on, which run side by side.
add_library(float8_options INTERFACE)
# A newer compiler's new warnings must not stop a project that only uses float8.
option(FLOAT8_WERROR "Warnings are errors" ${PROJECT_IS_TOP_LEVEL})
target_compile_options(float8_options INTERFACE
  -Wall -Wextra $<$<BOOL:${FLOAT8_WERROR}>:-Werror> $<$<COMPILE_LANGUAGE:CXX>:-Wconversion -Wshadow>)
target_include_directories(float8_options INTERFACE ${CMAKE_CURRENT_SOURCE_DIR})
# Ten times what the slowest test takes on two cores that do nothing else: it ends what hangs.
set(FLOAT8_TEST_TIMEOUT 2000)
if(FLOAT8_SANITIZE)
  set(FLOAT8_TEST_TIMEOUT 12000)
  target_compile_options(float8_options INTERFACE
    -fsanitize=${FLOAT8_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all
    # Instrumented code of the standard library has it.
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
    -D_GLIBCXX_ASSERTIONS)
  target_link_options(float8_options INTERFACE -fsanitize=${FLOAT8_SANITIZE})
endif()

# Code that only starts the work of others is built with -O1, and tests with -Og: they build faster.
set(FLOAT8_COLD_CODE $<$<CONFIG:Release>:-O1>)
set(FLOAT8_TEST_CODE $<$<CONFIG:Release>:-Og>)

# Most of a compilation is its headers, so several files are compiled as one: a clean build takes a third
# of the time. Names in unnamed namespaces are then unique in a target, which a clean build holds them to.
# Where this is off, each file has to include what it uses.
option(FLOAT8_UNITY "Compile several source files at once" ON)
if(FLOAT8_UNITY)
  set(CMAKE_UNITY_BUILD ON)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 36)
  if(FLOAT8_SANITIZE)  # with which a unit needs several times the memory
    set(CMAKE_UNITY_BUILD_BATCH_SIZE 12)
  endif()
  # A unit includes its files, so what they define looks as if it were in a header.
  target_compile_options(float8_options INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endif()

# The *.cpp of a folder and of the subfolders that are named.
function(float8_glob_rooms out folder)
  list(TRANSFORM ARGN PREPEND "${folder}/" OUTPUT_VARIABLE rooms)
  list(TRANSFORM rooms APPEND "/*.cpp")
  file(GLOB sources CONFIGURE_DEPENDS "${folder}/*.cpp" ${rooms})
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

function(float8_add_library name)
  cmake_parse_arguments(ARG "" "" "ROOMS;LINK;EXTRA_SOURCES" ${ARGN})
  float8_glob_rooms(sources "${CMAKE_CURRENT_SOURCE_DIR}" ${ARG_ROOMS})
  add_library(f8_${name} STATIC ${sources} ${ARG_EXTRA_SOURCES})
  target_link_libraries(f8_${name} PRIVATE $<BUILD_INTERFACE:float8_options> PUBLIC ${ARG_LINK})
  target_include_directories(f8_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
endfunction()

function(float8_add_test name)
  cmake_parse_arguments(ARG "" "FOLDER;SHARDS" "ROOMS;LINK;LABELS" ${ARGN})
  float8_glob_rooms(sources "${CMAKE_CURRENT_SOURCE_DIR}/${ARG_FOLDER}" ${ARG_ROOMS})
  if(NOT sources)
    return()
  endif()
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE float8_options ${ARG_LINK} GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE FLOAT8_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_compile_options(${name} PRIVATE ${FLOAT8_TEST_CODE})
  set(tests ${name})
  if(ARG_SHARDS)
    math(EXPR last "${ARG_SHARDS} - 1")
    set(tests)
    foreach(shard RANGE ${last})
      list(APPEND tests ${name}_${shard})
      add_test(NAME ${name}_${shard} COMMAND ${name})
      set_tests_properties(${name}_${shard} PROPERTIES
        ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${shard}")
    endforeach()
  else()
    add_test(NAME ${name} COMMAND ${name})
  endif()
  # A program all of whose tests skipped is listed as skipped, not as passed.
  set_tests_properties(${tests} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${FLOAT8_TEST_TIMEOUT}
    SKIP_REGULAR_EXPRESSION "\\[  PASSED  \\] 0 tests")
endfunction()
