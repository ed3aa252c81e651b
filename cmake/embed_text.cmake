# Run by float8_embed_text. ${text} is only ever expanded inside quotes, where CMake leaves semicolons,
# brackets and backslashes alone.
cmake_minimum_required(VERSION 3.25)
set(files "")
set(body "#include <span>\n#include <string_view>\n#include <utility>\n\nnamespace ${NAMESPACE} {\nusing namespace std::string_view_literals;\n")
foreach(file IN LISTS FILES)
  get_filename_component(name ${file} NAME)
  string(MAKE_C_IDENTIFIER ${name} symbol)
  file(READ ${file} text)
  file(SIZE ${file} size)
  string(LENGTH "${text}" length)
  if(NOT length EQUAL size)
    message(FATAL_ERROR "${file} holds a carriage return and cannot be embedded")
  endif()
  string(FIND "${text}" ")f8text\"" delimiter)
  if(NOT delimiter EQUAL -1)
    message(FATAL_ERROR "${file} holds the raw string delimiter )f8text\" and cannot be embedded")
  endif()
  string(APPEND body "extern const std::string_view ${symbol};\n"
    "constinit const std::string_view ${symbol} = R\"f8text(${text})f8text\"sv;\n")
  string(APPEND files "    {\"${name}\", &${symbol}},\n")
endforeach()
string(APPEND body "constexpr std::pair<std::string_view, const std::string_view*> kFiles[] = {\n${files}};\n"
  "extern const std::span<const std::pair<std::string_view, const std::string_view*>> files;\n"
  "constinit const std::span<const std::pair<std::string_view, const std::string_view*>> files = kFiles;\n"
  "}  // namespace ${NAMESPACE}\n")
file(WRITE ${OUTPUT} "${body}")
