# float8_embed_text(OUTPUT NAMESPACE FILES...): a C++ source that defines, for each file a/b/name.ext,
#   extern const std::string_view NAMESPACE::name_ext;
# so that text (device templates, SQL) is read by people as files and by the program from itself.
function(float8_embed_text output namespace)
  set(script ${PROJECT_SOURCE_DIR}/cmake/embed_text.cmake)
  string(REPLACE ";" "," joined "${ARGN}")
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DOUTPUT=${output} -DNAMESPACE=${namespace} -DFILES=${joined} -P ${script}
    DEPENDS ${ARGN} ${script}
    COMMENT "Embedding text into ${output}" VERBATIM)
endfunction()
