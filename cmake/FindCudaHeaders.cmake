# Finds the CUDA 13 headers (cuda.h, nvrtc.h, cublasLt.h, nccl.h) and the libraries beside them: in
# FLOAT8_CUDA_ROOT, $CUDA_HOME, an installed toolkit, or the local folder that scripts/setup fills
# from wheels. A toolkit of another major version is passed over as a whole, so headers of two
# versions never mix. Nothing links a CUDA library: base/dynlib opens them by soname, and
# LinkCudaLibraries.cmake lets the build tree find them.
#
#   float8::cuda_headers    include directories
#   FLOAT8_CUDA_LIBRARIES   the files libnvrtc, libcublasLt and libnccl, as far as they are there
#
# scripts/setup runs this file by itself (cmake -P) to ask whether anything has to be fetched; then
# libnvrtc counts as needed too.
if(CMAKE_SCRIPT_MODE_FILE)
  cmake_minimum_required(VERSION 3.25)
endif()

set(_roots "")
foreach(_root ${FLOAT8_CUDA_ROOT} $ENV{CUDA_HOME} /usr/local/cuda /usr
              ${CMAKE_CURRENT_LIST_DIR}/../.deps/cuda)
  if(EXISTS ${_root}/include/cuda.h)
    file(STRINGS ${_root}/include/cuda.h _line REGEX "^#define CUDA_VERSION 13[0-9]*$")
    if(_line)
      list(APPEND _roots ${_root})
    endif()
  endif()
endforeach()
if(FLOAT8_CUDA_ROOT AND NOT FLOAT8_CUDA_ROOT IN_LIST _roots)
  message(FATAL_ERROR "FLOAT8_CUDA_ROOT=${FLOAT8_CUDA_ROOT}: include/cuda.h there is missing or not "
                      "of CUDA 13; name another folder or run scripts/setup")
endif()

set(_places FLOAT8_CUDA_INCLUDE FLOAT8_NVRTC_INCLUDE FLOAT8_CUBLASLT_INCLUDE FLOAT8_NCCL_INCLUDE
            FLOAT8_NV_TARGET_INCLUDE FLOAT8_NVRTC_LIBRARY FLOAT8_CUBLASLT_LIBRARY FLOAT8_NCCL_LIBRARY)
if(NOT CMAKE_SCRIPT_MODE_FILE AND NOT "${FLOAT8_CUDA_ROOT_SEARCHED}" STREQUAL "${_roots}")
  foreach(_place ${_places})
    unset(${_place} CACHE)  # found under other roots
  endforeach()
  set(FLOAT8_CUDA_ROOT_SEARCHED "${_roots}" CACHE INTERNAL "")
endif()

set(_lib_folders lib64 lib targets/x86_64-linux/lib lib/x86_64-linux-gnu)
find_path(FLOAT8_CUDA_INCLUDE cuda.h HINTS ${_roots} PATH_SUFFIXES include NO_DEFAULT_PATH)
find_path(FLOAT8_NVRTC_INCLUDE nvrtc.h HINTS ${_roots} PATH_SUFFIXES include NO_DEFAULT_PATH)
find_path(FLOAT8_CUBLASLT_INCLUDE cublasLt.h HINTS ${_roots} PATH_SUFFIXES include NO_DEFAULT_PATH)
find_path(FLOAT8_NV_TARGET_INCLUDE nv/target HINTS ${_roots} PATH_SUFFIXES include include/cccl
          NO_DEFAULT_PATH)  # cublasLt.h and nccl.h come to include it, by way of cuda_fp16.h
find_path(FLOAT8_NCCL_INCLUDE nccl.h HINTS ${_roots} /usr PATH_SUFFIXES include)
find_file(FLOAT8_NVRTC_LIBRARY libnvrtc.so.13 HINTS ${_roots} PATH_SUFFIXES ${_lib_folders})
find_file(FLOAT8_CUBLASLT_LIBRARY libcublasLt.so.13 HINTS ${_roots} PATH_SUFFIXES ${_lib_folders})
find_file(FLOAT8_NCCL_LIBRARY libnccl.so.2 HINTS ${_roots} /usr PATH_SUFFIXES ${_lib_folders})
mark_as_advanced(${_places})

set(_required FLOAT8_CUDA_INCLUDE FLOAT8_NVRTC_INCLUDE FLOAT8_CUBLASLT_INCLUDE FLOAT8_NCCL_INCLUDE
              FLOAT8_NV_TARGET_INCLUDE)
if(CMAKE_SCRIPT_MODE_FILE)
  list(APPEND _required FLOAT8_NVRTC_LIBRARY)
  set(CudaHeaders_FIND_REQUIRED TRUE)
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudaHeaders REQUIRED_VARS ${_required}
  REASON_FAILURE_MESSAGE "run scripts/setup, which fetches what is missing")

if(CudaHeaders_FOUND AND NOT CMAKE_SCRIPT_MODE_FILE AND NOT TARGET float8::cuda_headers)
  set(FLOAT8_CUDA_LIBRARIES "")
  foreach(_lib FLOAT8_NVRTC_LIBRARY FLOAT8_CUBLASLT_LIBRARY FLOAT8_NCCL_LIBRARY)
    if(${_lib})
      list(APPEND FLOAT8_CUDA_LIBRARIES ${${_lib}})
    endif()
  endforeach()
  add_library(float8::cuda_headers INTERFACE IMPORTED)
  target_include_directories(float8::cuda_headers SYSTEM INTERFACE
    ${FLOAT8_CUDA_INCLUDE} ${FLOAT8_NVRTC_INCLUDE} ${FLOAT8_CUBLASLT_INCLUDE} ${FLOAT8_NCCL_INCLUDE}
    ${FLOAT8_NV_TARGET_INCLUDE})
endif()
