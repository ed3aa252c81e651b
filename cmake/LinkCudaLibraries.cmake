# Links to the CUDA libraries that were found, in the build tree's lib. Programs and libfloat8.so have
# $ORIGIN/../lib and $ORIGIN as their RUNPATH, so the build tree runs with the toolkit that it was
# configured with, while an installed tree, which has no such links, relies on the dynamic loader
# (LD_LIBRARY_PATH, the system's folders). Links of an earlier configuration are removed first.
set(_libraries ${FLOAT8_CUDA_LIBRARIES})
if(FLOAT8_NVRTC_LIBRARY)  # libnvrtc opens its builtins by name
  get_filename_component(_folder ${FLOAT8_NVRTC_LIBRARY} DIRECTORY)
  file(GLOB _builtins ${_folder}/libnvrtc-builtins.so.13.[0-9])
  list(APPEND _libraries ${_builtins})
endif()
file(MAKE_DIRECTORY ${CMAKE_LIBRARY_OUTPUT_DIRECTORY})
foreach(_soname libnvrtc libnvrtc-builtins libcublasLt libnccl)
  file(GLOB _links ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/${_soname}.so.*)
  if(_links)
    file(REMOVE ${_links})
  endif()
endforeach()
foreach(_library ${_libraries})
  get_filename_component(_name ${_library} NAME)
  file(CREATE_LINK ${_library} ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/${_name} SYMBOLIC)
endforeach()
