# What a wheel has beside the Python: the shim, the library under its soname, and the program, all
# of them stripped. An installed tree has none of it.
find_program(FLOAT8_STRIP NAMES strip REQUIRED)
mark_as_advanced(FLOAT8_STRIP)

function(float8_wheel_file path folder name)
  install(PROGRAMS ${path} DESTINATION ${folder} RENAME ${name} COMPONENT python EXCLUDE_FROM_ALL)
  install(CODE "execute_process(COMMAND_ERROR_IS_FATAL ANY
    COMMAND ${FLOAT8_STRIP} --strip-unneeded \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${folder}/${name})"
    COMPONENT python EXCLUDE_FROM_ALL)
endfunction()

function(float8_wheel_files shim library soname program)
  float8_wheel_file(${shim} float8 _C.so)
  float8_wheel_file(${library} float8/lib ${soname})
  float8_wheel_file(${program} float8/bin float8-tune)
endfunction()

# scripts/python-test builds everything once: then the files are those of a build tree.
if(FLOAT8_PREBUILT)
  file(GLOB links ${FLOAT8_PREBUILT}/lib/libfloat8.so.?.?)
  list(GET links 0 link)
  get_filename_component(soname ${link} NAME)
  file(REAL_PATH ${link} library)
  float8_wheel_files(
    ${FLOAT8_PREBUILT}/lib/_C.so ${library} ${soname} ${FLOAT8_PREBUILT}/bin/float8-tune)
  foreach(target float8 float8_shim float8-tune)  # what pyproject.toml asks to build
    add_custom_target(${target})
  endforeach()
endif()
