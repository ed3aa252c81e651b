# Finds the CUDA 13 headers (cuda.h, nvrtc.h, cublasLt.h, nccl.h) and the folder of the libraries beside
# them, in an installed toolkit or in the local folder that scripts/setup fills from wheels. Nothing links a
# CUDA library: the targets carry the folder as an rpath, and base/dynlib opens the libraries by soname.
#
#   float8::cuda_headers   include directories
#   FLOAT8_CUDA_LIB_DIRS   folders of libnvrtc, libcublasLt and libnccl, for rpaths
set(_roots ${FLOAT8_CUDA_ROOT} $ENV{CUDA_HOME} /usr/local/cuda ${CMAKE_SOURCE_DIR}/.deps/cuda)
find_path(FLOAT8_CUDA_INCLUDE cuda.h HINTS ${_roots} PATH_SUFFIXES include)
find_path(FLOAT8_NVRTC_INCLUDE nvrtc.h HINTS ${_roots} PATH_SUFFIXES include)
find_path(FLOAT8_CUBLASLT_INCLUDE cublasLt.h HINTS ${_roots} PATH_SUFFIXES include)
find_path(FLOAT8_NCCL_INCLUDE nccl.h HINTS ${_roots} PATH_SUFFIXES include)
find_file(FLOAT8_NVRTC_LIBRARY NAMES libnvrtc.so.13 HINTS ${_roots} PATH_SUFFIXES lib64 lib)
find_file(FLOAT8_CUBLASLT_LIBRARY NAMES libcublasLt.so.13 HINTS ${_roots} PATH_SUFFIXES lib64 lib)
find_file(FLOAT8_NCCL_LIBRARY NAMES libnccl.so.2 HINTS ${_roots} PATH_SUFFIXES lib64 lib)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudaHeaders
  REQUIRED_VARS FLOAT8_CUDA_INCLUDE FLOAT8_NVRTC_INCLUDE FLOAT8_CUBLASLT_INCLUDE FLOAT8_NCCL_INCLUDE
  REASON_FAILURE_MESSAGE "run scripts/setup, which fetches what is missing")

if(CudaHeaders_FOUND AND NOT TARGET float8::cuda_headers)
  set(FLOAT8_CUDA_LIB_DIRS "")
  foreach(_lib FLOAT8_NVRTC_LIBRARY FLOAT8_CUBLASLT_LIBRARY FLOAT8_NCCL_LIBRARY)
    if(${_lib})
      get_filename_component(_dir ${${_lib}} DIRECTORY)
      list(APPEND FLOAT8_CUDA_LIB_DIRS ${_dir})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES FLOAT8_CUDA_LIB_DIRS)
  add_library(float8::cuda_headers INTERFACE IMPORTED)
  target_include_directories(float8::cuda_headers SYSTEM INTERFACE
    ${FLOAT8_CUDA_INCLUDE} ${FLOAT8_NVRTC_INCLUDE} ${FLOAT8_CUBLASLT_INCLUDE} ${FLOAT8_NCCL_INCLUDE})
  list(APPEND CMAKE_BUILD_RPATH ${FLOAT8_CUDA_LIB_DIRS})
  list(APPEND CMAKE_INSTALL_RPATH ${FLOAT8_CUDA_LIB_DIRS})
endif()
