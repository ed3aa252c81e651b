# float8_embed_text(OUTPUT NAMESPACE FILES...): a C++ source that defines, for each file a/b/name.ext,
#   extern const std::string_view NAMESPACE::name_ext;
# and a list of all of them by name:
#   extern const std::span<const std::pair<std::string_view, const std::string_view*>> NAMESPACE::files;
# so that text (device templates, SQL) is read by people as files and by the program from itself. The
# values are constants, usable from any static initialiser. Bytes are kept: what a raw string literal
# cannot hold (a carriage return, its own delimiter) fails the build.
function(float8_embed_text output namespace)
  set(script ${PROJECT_SOURCE_DIR}/cmake/embed_text.cmake)
  set(files "")
  foreach(file IN LISTS ARGN)
    get_filename_component(file ${file} ABSOLUTE)
    list(APPEND files ${file})
  endforeach()
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DOUTPUT=${output} -DNAMESPACE=${namespace} "-DFILES=${files}" -P ${script}
    DEPENDS ${files} ${script}
    COMMENT "Embedding text into ${output}" VERBATIM)
endfunction()
