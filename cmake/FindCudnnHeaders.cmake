# Finds the headers of cuDNN 9 and of its C++ frontend, in the local folder that scripts/setup fills from wheels or an
# installed one. cuDNN itself is opened at run time.
#
#   float8::cudnn_headers    include directories
find_path(FLOAT8_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${CMAKE_CURRENT_LIST_DIR}/../.deps/cudnn/include)
find_path(FLOAT8_CUDNN_INCLUDE cudnn_graph_v9.h HINTS ${FLOAT8_CUDNN_FRONTEND_INCLUDE})
mark_as_advanced(FLOAT8_CUDNN_FRONTEND_INCLUDE FLOAT8_CUDNN_INCLUDE)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudnnHeaders REQUIRED_VARS FLOAT8_CUDNN_FRONTEND_INCLUDE FLOAT8_CUDNN_INCLUDE
  REASON_FAILURE_MESSAGE "run scripts/setup, which fetches them, or build without: -DFLOAT8_CUDNN=OFF")
if(CudnnHeaders_FOUND AND NOT TARGET float8::cudnn_headers)
  add_library(float8::cudnn_headers INTERFACE IMPORTED)
  target_include_directories(float8::cudnn_headers SYSTEM INTERFACE
    ${FLOAT8_CUDNN_FRONTEND_INCLUDE} ${FLOAT8_CUDNN_INCLUDE})
endif()
