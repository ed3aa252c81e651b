# A trainer that links float8 gets the C++ runtime and libc with it, and nothing else: no CUDA library,
# which would keep it from starting where there is no driver, no libfmt, and no part of the tools. The
# static library asks for nothing else either. docs/build.md lists what float8 opens at run time instead.
execute_process(COMMAND ${READELF} -d ${SHARED} OUTPUT_VARIABLE table COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "\\(NEEDED\\)[^\n]+" needed "${table}")
if(NOT needed)
  message(FATAL_ERROR "${READELF} does not list what ${SHARED} needs:\n${table}")
endif()
foreach(line ${needed})
  if(NOT line MATCHES "\\[(libstdc\\+\\+|libm|libc|libgcc_s|libdl|libpthread|ld-linux-x86-64)\\.so" AND
     NOT (SANITIZE AND line MATCHES "san\\.so"))
    message(FATAL_ERROR "${SHARED} needs a library that a trainer may not have: ${line}")
  endif()
endforeach()
execute_process(COMMAND ${NM} --undefined-only ${STATIC} OUTPUT_VARIABLE undefined
  ERROR_QUIET COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCH " U (sqlite3|_ZNK?3CLI|_ZNK?3fmt|_ZNK?8nlohmann|cu[A-Z]|cublas|nccl|nvrtc|nvml)[^\n]*" found
  "${undefined}")
if(found OR NOT undefined MATCHES " U memcpy")
  message(FATAL_ERROR "${STATIC} wants a symbol of a library that it must not link:${found}")
endif()
