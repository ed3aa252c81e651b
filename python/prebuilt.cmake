# The wheel's files from a build tree that has them already, FLOAT8_PREBUILT: scripts/test builds
# everything once.
find_program(strip NAMES strip REQUIRED)
function(install_stripped file folder name)
  file(REAL_PATH ${FLOAT8_PREBUILT}/${file} path)  # not a link
  install(PROGRAMS ${path} DESTINATION float8/${folder} COMPONENT python RENAME ${name})
  install(CODE "execute_process(COMMAND ${strip} --strip-unneeded \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/float8/${folder}/${name}
    COMMAND_ERROR_IS_FATAL ANY)" COMPONENT python)
endfunction()
install_stripped(lib/_C.so . _C.so)
file(GLOB library RELATIVE ${FLOAT8_PREBUILT} ${FLOAT8_PREBUILT}/lib/libfloat8.so.?.?)
get_filename_component(name ${library} NAME)
install_stripped(${library} lib ${name})
install_stripped(bin/float8-tune bin float8-tune)
foreach(target float8 float8_shim float8-tune)  # what pyproject.toml asks to build
  add_custom_target(${target})
endforeach()
