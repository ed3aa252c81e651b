# Compiles SOURCE as strict C99 with the flags that pkg-config prints for the float8 in PREFIX, and runs
# it three times: with the shared library; with the static one, where both are installed, by the
# -l:libfloat8.a of docs/build.md; and with a copy of PREFIX that has the static library alone.
file(GLOB_RECURSE pc ${PREFIX}/float8.pc)
if(NOT pc)
  message(FATAL_ERROR "no float8.pc under ${PREFIX}")
endif()
get_filename_component(folder ${pc} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${folder})
execute_process(COMMAND ${PKG_CONFIG} --cflags --libs float8 OUTPUT_VARIABLE flags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PKG_CONFIG} --variable=libdir float8 OUTPUT_VARIABLE libdir
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
execute_process(COMMAND ${CC} -std=c99 -pedantic -Wall -Wextra -Werror ${SOURCE} -o ${PROGRAM} ${flags}
                        -Wl,-rpath,${libdir}
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PROGRAM} COMMAND_ERROR_IS_FATAL ANY)

execute_process(COMMAND ${PKG_CONFIG} --static --cflags --libs float8 OUTPUT_VARIABLE flags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "-lfloat8" "-l:libfloat8.a" flags "${flags}")
separate_arguments(flags UNIX_COMMAND "${flags}")
execute_process(COMMAND ${CC} -std=c99 ${SOURCE} -o ${PROGRAM}_static ${flags}
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PROGRAM}_static COMMAND_ERROR_IS_FATAL ANY)

set(static_prefix ${PREFIX}.static)
file(REMOVE_RECURSE ${static_prefix})
file(COPY ${PREFIX}/ DESTINATION ${static_prefix} PATTERN "libfloat8.so*" EXCLUDE)
string(REPLACE ${PREFIX} ${static_prefix} folder ${folder})
set(ENV{PKG_CONFIG_PATH} ${folder})
execute_process(COMMAND ${PKG_CONFIG} --static --cflags --libs float8 OUTPUT_VARIABLE flags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
execute_process(COMMAND ${CC} -std=c99 ${SOURCE} -o ${PROGRAM}_static_alone ${flags}
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PROGRAM}_static_alone COMMAND_ERROR_IS_FATAL ANY)
